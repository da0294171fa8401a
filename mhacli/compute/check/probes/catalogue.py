"""The probes of `mha check`: questions that need no weights, asked of a user's attention one after the other."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mhacli.adapters.usercode.arguments import role_of, stated
from mhacli.adapters.usercode.asker import cast, cast_copy
from mhacli.adapters.usercode.call.user_attention import UserAttention
from mhacli.adapters.usercode.types import Built, Inputs
from mhacli.compute.check.probes import masks as probing_masks
from mhacli.compute.check.probes import visibility as probing_sight
from mhacli.compute.check.probes.context import (
    NOT_FINITE_ANYWAY,
    ProbeContext,
    ProbeFacts,
    ProbeReply,
    Question,
    bad_numbers,
    first_line,
    probe_answer,
    relative,
)
from mhacli.compute.check.probes.masks import ask_under, hidden_cells, working_mask
from mhacli.errors import first_names
from mhacli.requests.user_code import CheckRequest
from mhacli.results.check import ProbeResult


class Probed(NamedTuple):
    """The answers of the probes, in the order of `PROBES`, and what was measured on the way."""

    probes: tuple[ProbeResult, ...]
    facts: ProbeFacts


class ProbeEntry(NamedTuple):
    """A probe: its name, the question, and about how many calls it takes. Those that are `needed` are asked of slow ones too."""

    name: str
    ask: Question
    n_calls: int
    needed: bool = False


_SLOW_S, _VERY_SLOW_S, _FEW = 0.05, 0.5, 3
_LONGEST_S = 1.0


def probe(
    subject: UserAttention, request: CheckRequest, stage: Callable[[str], None], *, expects_causal: bool
) -> Probed:
    """Asks every probe of an attention in eval mode. `stage` is told what is asked before every call; `expects_causal`: its
    author, or the user, says that no token sees a later one. A probe on which it raises has the exception in its message and
    decides nothing.
    """
    context = ProbeContext(subject, request, expects_causal=expects_causal)
    context.stage = _stage_caller(stage, f"calling {subject.built.name}")
    with torch.random.fork_rng([subject.device] if subject.device.type == "cuda" else []):
        context.facts = dataclasses.replace(context.facts, call_s=context.timed(context.square()))
        return Probed(tuple(_answers(context, stage)), context.facts)


def _answers(context: ProbeContext, stage: Callable[[str], None]) -> Iterator[ProbeResult]:
    """One answer after the other."""
    name, call_s = context.subject.built.name, context.facts.call_s
    for entry in PROBES:
        context.stage = _stage_caller(stage, f"probing {name} ({entry.name})")
        context.stage()
        if is_too_slow(entry, call_s):
            message = f"left out: a call takes {call_s:.2g} s, and this takes {max(1, entry.n_calls)} or more"
            yield ProbeResult(entry.name, message)
        else:
            yield _reply_to(entry, context)


def _stage_caller(stage: Callable[[str], None], what: str) -> Callable[[], None]:
    """Tells that this goes on: a time limit is for one call."""
    return lambda: stage(what)


def is_too_slow(entry: ProbeEntry, call_s: float) -> bool:
    """Whether a probe is left out as a call takes so long: all of them together take about 60 calls of a slow one."""
    if call_s <= _SLOW_S:
        return not entry.needed and entry.n_calls * call_s > _LONGEST_S
    return not entry.needed if call_s <= _VERY_SLOW_S else not entry.needed or entry.n_calls > _FEW


def _reply_to(entry: ProbeEntry, context: ProbeContext) -> ProbeResult:
    """One answer, after which the context knows more."""
    context.begin()
    try:
        answer = entry.ask(context)
    except Exception as fault:  # whatever a user's attention raises
        return ProbeResult(entry.name, f"could not run: the code raises {first_line(fault)}")
    context.facts = dataclasses.replace(context.facts, **answer.facts)  # type: ignore[arg-type]
    return answer.probe


# ------------------------------------------- dropout: it must rest in eval mode, and leave the mean as it is in training


P = 0.5
"""The dropout of the copies that are asked: large enough to show in one call."""
FEWEST_CALLS, MOST_CALLS = 40, 200
_PATIENCE_S, _SIGMAS = 1.0, 5.0


def dropout_in_eval(context: ProbeContext) -> ProbeReply:
    """Built anew with dropout 0.5 and the same weights: in eval mode the same input must still give the same output."""
    name = "dropout in eval"
    if context.subject.built.module is None:
        return probe_answer(name, "a function has no eval mode")
    if context.facts.keeps_state:
        return probe_answer(name, "not run: it keeps state")
    twin, names = with_dropout(context)
    if twin is None:
        return probe_answer(name, "it has no dropout that could be raised")
    inputs = context.square()
    if context.facts.is_random:
        return _of_random(context, name, inputs)
    one, two = (context.ask(inputs, of=twin, seed=seed).out for seed in (1, 2))
    change, by = relative(one, two), ", ".join(names)
    facts = {"dropout_names": names}
    if change > context.tolerance:
        message = f"with {by} = {P} the same input gives other outputs in eval mode: dropout does not rest"
        return probe_answer(name, message, change, False, is_random_with_dropout=True, **facts)
    return probe_answer(
        name, f"with {by} = {P} it rests in eval mode", change, True, is_random_with_dropout=False, **facts
    )


def _of_random(context: ProbeContext, name: str, inputs: Inputs) -> ProbeReply:
    """Of what is random already: whether it still is with dropout 0."""
    twin, names = with_dropout(context, 0.0)
    change, rest = (
        relative(*(context.ask(inputs, of=one, seed=seed).out for seed in (1, 2))) for one in (context.subject, twin)
    )
    by = ", ".join(names)
    if rest > context.tolerance:
        return probe_answer(
            name, f"with {by} = 0 it is random too", rest, is_random_with_dropout=False, dropout_names=names
        )
    message = f"with {by} = 0 it is not random in eval mode, otherwise it is: dropout does not rest"
    return probe_answer(name, message, change, False, is_random_with_dropout=True, dropout_names=names)


def dropout_in_training(context: ProbeContext) -> ProbeReply:
    """The mean output of many calls in training, against the output in eval mode, with dropout 0.5.

    In each output column the output is what dropout leaves alone, such as a bias, and what it scales. Hence the slope of the
    output in training over the output in eval, within columns, does not depend on the first; every call gives one, so that
    their spread tells how sure their mean is.
    """
    name = "dropout in training"
    if context.subject.built.module is None:
        return probe_answer(name, "a function has no training mode")
    if context.facts.keeps_state or context.facts.is_random:
        return probe_answer(name, "not run: its output in eval mode is not always the same")
    twin, names = with_dropout(context)
    if twin is None:
        return probe_answer(name, "it has no dropout that could be raised")
    inputs = context.square()
    still = context.ask(inputs, of=twin).out.double()
    centred = still - still.mean((0, 1), keepdim=True)
    size = float((centred * centred).sum())
    if not math.isfinite(size) or size == 0:
        return probe_answer(name, "its output does not vary, so that it cannot be compared")
    slopes = []
    n_calls = round(_PATIENCE_S / max(1e-6, context.facts.call_s))
    for seed in range(min(MOST_CALLS, max(FEWEST_CALLS, n_calls))):
        out = context.ask(inputs, of=twin, training=True, seed=seed).out.double()
        slopes.append(float((centred * (out - still)).sum()) / size)
    if not all(math.isfinite(slope) for slope in slopes):
        return probe_answer(name, "its output in training is not finite")
    if max(map(abs, slopes)) <= context.tolerance:
        return probe_answer(name, f"{', '.join(names)} changes nothing in training", 1.0)
    return _of_slopes(name, names, slopes)


def _of_slopes(name: str, names: tuple[str, ...], slopes: list[float]) -> ProbeReply:
    """The verdict: 1 or 1 − p, by five standard errors, where these are small enough to tell the two apart."""
    slope = 1 + statistics.fmean(slopes)
    error = statistics.stdev(slopes) / math.sqrt(len(slopes))
    message = f"with {', '.join(names)} = {P} the mean output in training is {slope:.2f} ± {error:.2f} of that in eval"
    margin = _SIGMAS * error
    is_rescaled = None
    if 2 * margin < P:
        is_rescaled = True if abs(slope - 1) <= margin else False if abs(slope - (1 - P)) <= margin else None
    if is_rescaled is False:
        message += ": what is kept is not divided by 1 − p"
    return probe_answer(
        name, message, slope, is_rescaled, dropout_slope_error=error, is_rescaled=is_rescaled, dropout_names=names
    )


def with_dropout(context: ProbeContext, p: float = P) -> tuple[UserAttention | None, tuple[str, ...]]:
    """A copy with the same weights and dropout `p`, and by what names it was raised; None where it has no dropout."""
    built = context.subject.built
    names = tuple(name for name, value in built.arguments.items() if _is_dropout(name, value))
    twin = _rebuilt(built, {name: p for name in names}) if names else None
    if twin is not None:
        return context.subject.of(twin, context.subject.dtype), names
    raised, parts = _raised(built.module, p)
    return (None, ()) if raised is None else (context.subject.of(raised, context.subject.dtype), parts)


def _is_dropout(name: str, value: object) -> bool:
    """Whether an argument, of a configuration too, is a rate of dropout."""
    is_rate = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1
    return is_rate and role_of(name.rpartition(".")[2]) == "dropout"


def _rebuilt(built: Built, changes: Mapping[str, object]) -> nn.Module | None:
    """Built anew with the weights of the first; None where that does not work."""
    assert built.module is not None, "asked of modules only"
    first = next(built.module.parameters(), None)
    try:
        module = built.rebuild(changes).module
        if module is None:
            return None
        module.load_state_dict(built.module.state_dict())
        return module if first is None else cast(module, first.dtype, first.device)
    except Exception:  # whatever its author's constructor raises
        return None


def _raised(module: nn.Module | None, p: float) -> tuple[nn.Module | None, tuple[str, ...]]:
    """A copy whose dropout modules, and numbers named dropout, are set to `p`; None where it has none."""
    try:
        twin = copy.deepcopy(module)
    except Exception:  # whatever its author's __deepcopy__ raises
        return None, ()
    names = []
    for path, part in () if twin is None else twin.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = p
            names.append(path or type(part).__name__)
        else:
            own = [name for name, value in vars(part).items() if _is_dropout(name, value)]
            for name in own:
                setattr(part, name, p)
                names.append(f"{path}.{name}" if path else name)
    return (twin, tuple(names)) if names else (None, ())


# ------------------------------------------------------------------------------------------------------ the returned pattern


def row_sums(context: ProbeContext) -> ProbeReply:
    """The rows of a returned pattern: shares, which sum to one over the keys."""
    name, pattern = "row sums", context.ask(context.square()).pattern
    if pattern is None:
        return probe_answer(name, "no pattern is returned")
    shares = pattern.to("cpu", torch.float64)
    sums = shares.sum(-1)
    error = float((sums - 1).abs().where(sums != 0, 0.0).nan_to_num(nan=0.0).max())
    lowest, highest = float(shares.nan_to_num().min()), float(shares.nan_to_num().max())
    tolerance = max(1e-6, 100 * context.tolerance)
    if lowest < -tolerance or highest > 1 + tolerance:
        message = f"the returned numbers go from {lowest:.2g} to {highest:.2g}: they are not attention weights"
        return probe_answer(name, message, error)
    is_one = error <= tolerance
    message = "the rows of the returned pattern sum to one"
    if not is_one:
        over_queries = float((shares.sum(-2) - 1).abs().max()) <= tolerance
        message = f"the rows of the returned pattern miss one by up to {error:.2g}"
        message += "; its columns sum to one: the softmax runs over the queries" if over_queries else ""
    return probe_answer(name, message, error, is_one)


def masked_cells(context: ProbeContext) -> ProbeReply:
    """The shares of a returned pattern for keys that are hidden: exactly 0."""
    name, facts = "masked cells", context.facts
    inputs = context.square()
    length = inputs.queries.shape[-2]
    by = working_mask(context)
    if facts.visible == "causal":
        pattern = context.ask(inputs).pattern
        hidden = torch.ones(1, length, length, dtype=torch.bool).triu(1)
    elif by is not None:
        hidden = hidden_cells(context, by, length)
        pattern = ask_under(context, inputs, by, ~hidden).pattern
    else:
        return probe_answer(name, "nothing is hidden by it")
    if pattern is None:
        return probe_answer(name, "no pattern is returned")
    if pattern.shape[-2:] != hidden.shape[-2:]:
        return probe_answer(name, f"the returned pattern has shape {list(pattern.shape)}")
    cells = pattern.cpu()[hidden[:, None].expand(pattern.shape)]
    n_bad = int((cells != 0).sum())
    message = f"{n_bad} of {cells.numel()} weights of masked keys are not exactly 0"
    return probe_answer(name, message, n_bad, True if not n_bad else None)  # what moves an output, other probes tell


# ------------------------------------------------------------------------------------------------------------------ formats


def half(context: ProbeContext, dtype: torch.dtype, tolerance: float) -> ProbeReply:
    """In a format of 16 bits, against the same rounded weights and rows in float64."""
    name = str(dtype).removeprefix("torch.")
    twin, exact = _rounded(context, dtype)
    if twin is None or exact is None:
        return probe_answer(name, "it cannot be copied into another format")
    rounded = _cast(context.square(), dtype)
    try:
        found = context.ask(rounded, of=twin).out
    except Exception as fault:
        return probe_answer(name, f"raises {first_line(fault)}")
    n_bad = bad_numbers(found)
    if n_bad:
        return _not_finite(context, name, found)
    wide = context.ask(_cast(rounded, torch.float64), of=exact).out
    error = relative(wide, found)
    message = f"differs from float64 by {error:.1g} of the output's size" if error else "the same as float64"
    if error > tolerance:
        message += f", more than the {tolerance:g} that rounding explains"
    return probe_answer(name, message, error, True if error <= tolerance else None)


def _not_finite(context: ProbeContext, name: str, found: Tensor) -> ProbeReply:
    """Some numbers are not finite; which decides nothing where those of ordinary rows are not either."""
    n_bad = bad_numbers(found)
    if context.facts.nonfinite_queries:
        return probe_answer(name, NOT_FINITE_ANYWAY, n_bad)
    return probe_answer(name, f"{n_bad} of {found.numel()} numbers are NaN or infinite", n_bad, False)


def _rounded(context: ProbeContext, dtype: torch.dtype) -> tuple[UserAttention | None, UserAttention | None]:
    """A copy in `dtype`, and one with the same rounded weights in float64."""
    built, small = context.subject.built, context.fresh()
    if built.module is None:
        return context.subject.of(built.call, dtype), context.subject.of(built.call, torch.float64)
    if small is None:
        return None, None
    small = cast(small, dtype)
    wide = cast_copy(small, torch.float64)
    return context.subject.of(small, dtype), context.subject.of(wide, torch.float64)


def _cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return Inputs(*(None if rows is None else rows.to(dtype) for rows in inputs[:3]))  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------------------- sizes


def _of_length(context: ProbeContext, name: str, inputs: Inputs) -> ProbeReply:
    """Whether it answers finite numbers to a text of another length."""
    try:
        out = context.ask(inputs).out
    except Exception as fault:
        return probe_answer(name, f"raises {first_line(fault)}")
    return _not_finite(context, name, out) if bad_numbers(out) else probe_answer(name, "works", 0, True)


def one_token(context: ProbeContext) -> ProbeReply:
    """A text of one token, which can see itself alone."""
    return _of_length(context, "one token", context.square(1))


def one_key(context: ProbeContext) -> ProbeReply:
    """With a single key its share is one, whatever the query: another query must not matter."""
    name = "one key"
    if not context.subject.takes_context:
        return probe_answer(name, "it attends to its own rows alone")
    inputs = context.oblong(k_len=1)
    try:
        before = context.ask(inputs).out
        change = relative(before, context.ask(inputs._replace(queries=context.oblong(k_len=1).queries)).out)
    except Exception as fault:
        return probe_answer(name, f"raises {first_line(fault)}")
    if change <= context.tolerance:
        return probe_answer(name, "with one key the query does not matter", change, True)
    message = f"with one key, whose weight must be 1, another query changes the output by {change:.2g} of its size"
    return probe_answer(name, message, change)


def one_sequence(context: ProbeContext) -> ProbeReply:
    """The first sequence alone: it must answer what it answers among others."""
    name, inputs = "batch of one", context.square()
    if inputs.queries.shape[0] < 2:
        return probe_answer(name, "it takes one sequence at a time")
    alone = Inputs(*(None if rows is None else rows[:1] for rows in inputs[:3]))  # type: ignore[arg-type]
    try:
        found = context.ask(alone).out
    except Exception as fault:
        return probe_answer(name, f"raises {first_line(fault)}")
    change = relative(context.ask(inputs).out[:1], found)
    is_same = change <= max(1e-6, 100 * context.tolerance)
    message = "a sequence gives the same output alone as among others"
    if not is_same:
        message = f"a sequence gives another output alone than among others, by {change:.2g} of its size"
    return probe_answer(name, message, change, True if is_same else None if context.facts.is_random else False)


_LONG = 300


def long_text(context: ProbeContext) -> ProbeReply:
    """More tokens than most examples have."""
    return _of_length(context, f"{_LONG} tokens", context.square(_LONG, batch=1))


# --------------------------------------------------------------------------------------------------------------- parameters


def parameter_count(context: ProbeContext) -> ProbeReply:
    """How many parameters there are, against those of four projections of the named sizes."""
    name, module = "parameters", context.subject.built.module
    if module is None:
        return probe_answer(name, "a function has none")
    n_parameters = sum(parameter.numel() for parameter in module.parameters())
    formulas = list(_formulas(context))
    if not formulas:
        return probe_answer(
            name, f"{n_parameters:,}; its arguments name no width and heads to check them by", n_parameters
        )
    for said, n_expected in formulas:
        if n_parameters == n_expected:
            return probe_answer(name, f"{n_parameters:,}, as four projections {said} have", n_parameters, True)
    most = formulas[0][1]
    return probe_answer(name, f"{n_parameters:,}; four projections with biases have {most:,}", n_parameters)


def _formulas(context: ProbeContext) -> Iterator[tuple[str, int]]:
    """What four projections have, with biases and without, and with biases here and there."""
    arguments, context_width = context.subject.built.arguments, context.subject.sizes.d_context
    width, n_heads = stated(arguments, "d_model"), stated(arguments, "n_heads")
    if not _is_count(width) or not _is_count(n_heads):
        return
    d_head, n_kv_heads = stated(arguments, "d_head"), stated(arguments, "n_kv_heads")
    d_head = d_head if _is_count(d_head) else width // n_heads
    n_kv_heads = n_kv_heads if _is_count(n_kv_heads) else n_heads
    d_v = stated(arguments, "d_v")
    d_v = d_v if _is_count(d_v) else d_head
    q, k, v, o = n_heads * d_head, n_kv_heads * d_head, n_kv_heads * d_v, n_heads * d_v
    matrices = width * q + context_width * (k + v) + o * width
    yield "with biases", matrices + q + k + v + width
    yield "without biases", matrices
    yield "with a bias on the last alone", matrices + width
    yield "with biases on the first three", matrices + q + k + v
    yield "but the last, without biases,", matrices - o * width
    yield "but the last, with biases,", matrices - o * width + q + k + v


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def unused_parameters(context: ProbeContext) -> ProbeReply:
    """The matrices that no output depends on. Biases are left out: that of the keys moves nothing where all is right."""
    name, twin = "unused parameters", context.fresh()
    matrices = (
        {} if twin is None else {n: p for n, p in twin.named_parameters() if p.ndim > 1 and p.is_floating_point()}
    )
    if twin is None or not matrices or len(matrices) > _MOST_MATRICES:
        return probe_answer(name, f"it has {len(matrices) or 'no'} matrices")
    if context.facts.nonfinite_queries:
        return probe_answer(name, "outputs that are NaN cannot be compared")
    subject = context.subject.of(twin, context.subject.dtype)
    questions = [context.square()] + ([context.oblong()] if context.subject.takes_context else [])
    unused = set(matrices)
    for inputs in questions:
        before = context.ask(inputs, of=subject).out
        for one in sorted(unused):
            if context.moves(before, _answer_without(context, subject, matrices[one], inputs)):
                unused.remove(one)
    named = tuple(sorted(unused))
    message = (
        f"no output depends on {first_names(named, 4)}" if named else f"outputs depend on all {len(matrices)} matrices"
    )
    return probe_answer(name, message, len(named), not named)


_MOST_MATRICES = 40


def _answer_without(context: ProbeContext, subject: UserAttention, matrix: Tensor, inputs: Inputs) -> Tensor:
    """The output with the opposite of a matrix in its place, which is put back afterwards."""
    kept = matrix.detach().clone()
    matrix.data.mul_(-1.5).add_(0.1)
    try:
        return context.ask(inputs, of=subject).out
    finally:
        matrix.data.copy_(kept)


# -------------------------------------------------------------------------------------------------------- the table

PROBES: tuple[ProbeEntry, ...] = (
    ProbeEntry("determinism", probing_sight.determinism, 5, True),
    ProbeEntry("finite", probing_sight.finite_outputs, 1, True),
    ProbeEntry("dropout in eval", dropout_in_eval, 2, True),
    ProbeEntry("batch independence", probing_sight.batch_independence, 2, True),
    ProbeEntry("visible keys", probing_sight.visible_keys, 16, True),
    ProbeEntry("q_len ≠ k_len", probing_sight.visible_context, 24),
    ProbeEntry("mask", probing_masks.mask_argument, 8, True),
    ProbeEntry("open mask", probing_masks.open_mask, 2),
    ProbeEntry("padding", probing_masks.padding_argument, 8, True),
    ProbeEntry("padding of NaN", probing_masks.padding_of_nan, 3, True),
    ProbeEntry("query without a key", probing_masks.empty_row, 4),
    ProbeEntry("causality", probing_sight.causality, 0, True),
    ProbeEntry("self-visibility", probing_sight.self_visibility, 0, True),
    ProbeEntry("keys permuted", probing_sight.keys_permuted, 2),
    ProbeEntry("tokens permuted", probing_sight.tokens_permuted, 2),
    ProbeEntry("heads", probing_sight.heads, 2),
    ProbeEntry("row sums", row_sums, 1, True),
    ProbeEntry("masked cells", masked_cells, 1),
    ProbeEntry("scores × 1000", probing_masks.large_scores, 6),
    ProbeEntry("float16", partial(half, dtype=torch.float16, tolerance=2e-2), 2),
    ProbeEntry("bfloat16", partial(half, dtype=torch.bfloat16, tolerance=1e-1), 2),
    ProbeEntry("one token", one_token, 1, True),
    ProbeEntry("one key", one_key, 2),
    ProbeEntry("batch of one", one_sequence, 2, True),
    ProbeEntry("300 tokens", long_text, 1),
    ProbeEntry("parameters", parameter_count, 0, True),
    ProbeEntry("unused parameters", unused_parameters, 12),
    ProbeEntry("dropout in training", dropout_in_training, FEWEST_CALLS),
)
"""Later ones build on what earlier ones measured."""
