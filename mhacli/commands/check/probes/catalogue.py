"""The probes of `mha check`, which need no knowledge of the weights."""

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

from mhacli.commands.check.probes import masks as mask_probes
from mhacli.commands.check.probes import visibility as visibility_probes
from mhacli.commands.check.probes.context import (
    NOT_FINITE_ANYWAY,
    ProbeContext,
    ProbeFacts,
    ProbeFunction,
    ProbeReply,
    bad_numbers,
    first_line,
    relative,
    reply,
)
from mhacli.commands.check.probes.masks import call_with_mask, hidden_cells, working_mask
from mhacli.commands.check.result import CheckRequest, ProbeResult
from mhacli.errors import first_names
from mhacli.usercode.arguments import is_size, role_of, stated
from mhacli.usercode.call.user_attention import UserAttention
from mhacli.usercode.inputs import cast, cast_copy, map_rows
from mhacli.usercode.types import Built, Inputs


class Probed(NamedTuple):
    """The results of the probes, in the order of `PROBES`, and the measured facts."""

    probes: tuple[ProbeResult, ...]
    facts: ProbeFacts


class ProbeEntry(NamedTuple):
    """A probe: its name, its function, and its approximate number of calls. Slow subjects get only `needed` probes."""

    name: str
    run: ProbeFunction
    n_calls: int
    needed: bool = False


_SLOW_S, _VERY_SLOW_S, _FEW = 0.05, 0.5, 3
_LONGEST_S = 1.0


def probe(
    subject: UserAttention, request: CheckRequest, stage: Callable[[str], None], *, expects_causal: bool
) -> Probed:
    """The results of all probes, in eval mode. `stage` is called with a description before every call; `expects_causal`: the
    code or the user states that no token sees a later one. An exception in a probe becomes its message."""
    context = ProbeContext(subject, request, expects_causal=expects_causal)
    context.stage = _stage_caller(stage, f"calling {subject.built.name}")
    with torch.random.fork_rng([subject.device] if subject.device.type == "cuda" else []):
        context.facts = dataclasses.replace(context.facts, call_s=context.timed(context.square()))
        return Probed(tuple(_results(context, stage)), context.facts)


def _results(context: ProbeContext, stage: Callable[[str], None]) -> Iterator[ProbeResult]:
    name, call_s = context.subject.built.name, context.facts.call_s
    for entry in PROBES:
        context.stage = _stage_caller(stage, f"probing {name} ({entry.name})")
        context.stage()
        if is_too_slow(entry, call_s):
            message = f"left out: a call takes {call_s:.2g} s, and this takes {max(1, entry.n_calls)} or more"
            yield ProbeResult(entry.name, message)
        else:
            yield _result(entry, context)


def _stage_caller(stage: Callable[[str], None], description: str) -> Callable[[], None]:
    """A function that reports the stage before each call, which restarts the time limit."""
    return lambda: stage(description)


def is_too_slow(entry: ProbeEntry, call_s: float) -> bool:
    """Whether a probe is skipped for a slow subject. The remaining probes take about 60 calls."""
    if call_s <= _SLOW_S:
        return not entry.needed and entry.n_calls * call_s > _LONGEST_S
    return not entry.needed if call_s <= _VERY_SLOW_S else not entry.needed or entry.n_calls > _FEW


def _result(entry: ProbeEntry, context: ProbeContext) -> ProbeResult:
    """The result of one probe; updates the facts."""
    context.begin()
    try:
        reply = entry.run(context)
    except Exception as fault:  # user code may raise anything
        return ProbeResult(entry.name, f"could not run: the code raises {first_line(fault)}")
    context.facts = dataclasses.replace(context.facts, **reply.facts)  # type: ignore[arg-type]
    return reply.probe


# ---------------------------------------------------------------------------------------------------------------- dropout


P = 0.5
"""The dropout of the copies, large enough to show in one call."""
FEWEST_CALLS, MOST_CALLS = 40, 200
_PATIENCE_S, _SIGMAS = 1.0, 5.0


def dropout_in_eval(context: ProbeContext) -> ProbeReply:
    """Whether a copy with dropout 0.5 and the same weights is deterministic in eval mode."""
    name = "dropout in eval"
    if context.subject.built.module is None:
        return reply(name, "a function has no eval mode")
    if context.facts.keeps_state:
        return reply(name, "not run: it keeps state")
    twin, names = with_dropout(context)
    if twin is None:
        return reply(name, "it has no dropout that could be raised")
    inputs = context.square()
    if context.facts.is_random:
        return _random_reply(context, name, inputs)
    first, second = (context.call(inputs, subject=twin, seed=seed).out for seed in (1, 2))
    change, names_text = relative(first, second), ", ".join(names)
    facts = {"dropout_names": names}
    if change > context.tolerance:
        message = f"with {names_text} = {P} the same input gives other outputs in eval mode: dropout does not rest"
        return reply(name, message, change, False, is_random_with_dropout=True, **facts)
    return reply(
        name, f"with {names_text} = {P} it rests in eval mode", change, True, is_random_with_dropout=False, **facts
    )


def _random_reply(context: ProbeContext, name: str, inputs: Inputs) -> ProbeReply:
    """For a random subject: whether it is deterministic with dropout 0."""
    twin, names = with_dropout(context, 0.0)
    change, change_without = (
        relative(*(context.call(inputs, subject=subject, seed=seed).out for seed in (1, 2)))
        for subject in (context.subject, twin)
    )
    names_text = ", ".join(names)
    if change_without > context.tolerance:
        return reply(
            name,
            f"with {names_text} = 0 it is random too",
            change_without,
            is_random_with_dropout=False,
            dropout_names=names,
        )
    message = f"with {names_text} = 0 it is not random in eval mode, otherwise it is: dropout does not rest"
    return reply(name, message, change, False, is_random_with_dropout=True, dropout_names=names)


def dropout_in_training(context: ProbeContext) -> ProbeReply:
    """The mean output of many calls in training mode with dropout 0.5, compared with the output in eval mode.

    Each output column contains a part without dropout, such as a bias, and a part that dropout scales. The slope of the
    training output over the eval output, within columns, is independent of the former. Every call gives a slope, and their
    spread gives the standard error.
    """
    name = "dropout in training"
    if context.subject.built.module is None:
        return reply(name, "a function has no training mode")
    if context.facts.keeps_state or context.facts.is_random:
        return reply(name, "not run: its output in eval mode is not always the same")
    twin, names = with_dropout(context)
    if twin is None:
        return reply(name, "it has no dropout that could be raised")
    inputs = context.square()
    eval_out = context.call(inputs, subject=twin).out.double()
    centred = eval_out - eval_out.mean((0, 1), keepdim=True)
    size = float((centred * centred).sum())
    if not math.isfinite(size) or size == 0:
        return reply(name, "its output does not vary, so that it cannot be compared")
    slopes = []
    n_calls = round(_PATIENCE_S / max(1e-6, context.facts.call_s))
    for seed in range(min(MOST_CALLS, max(FEWEST_CALLS, n_calls))):
        out = context.call(inputs, subject=twin, training=True, seed=seed).out.double()
        slopes.append(float((centred * (out - eval_out)).sum()) / size)
    if not all(math.isfinite(slope) for slope in slopes):
        return reply(name, "its output in training is not finite")
    if max(map(abs, slopes)) <= context.tolerance:
        return reply(name, f"{', '.join(names)} changes nothing in training", 1.0)
    return _slope_reply(name, names, slopes)


def _slope_reply(name: str, names: tuple[str, ...], slopes: list[float]) -> ProbeReply:
    """Decides between the slopes 1 and 1 − p, if five standard errors separate them."""
    slope = 1 + statistics.fmean(slopes)
    error = statistics.stdev(slopes) / math.sqrt(len(slopes))
    message = f"with {', '.join(names)} = {P} the mean output in training is {slope:.2f} ± {error:.2f} of that in eval"
    margin = _SIGMAS * error
    is_rescaled = None
    if 2 * margin < P:
        is_rescaled = True if abs(slope - 1) <= margin else False if abs(slope - (1 - P)) <= margin else None
    if is_rescaled is False:
        message += ": what is kept is not divided by 1 − p"
    return reply(
        name, message, slope, is_rescaled, dropout_slope_error=error, is_rescaled=is_rescaled, dropout_names=names
    )


def with_dropout(context: ProbeContext, p: float = P) -> tuple[UserAttention | None, tuple[str, ...]]:
    """A copy with the same weights and dropout `p`, and the names it was set through; None without dropout."""
    built = context.subject.built
    names = tuple(name for name, value in built.arguments.items() if _is_dropout(name, value))
    twin = _rebuilt(built, {name: p for name in names}) if names else None
    if twin is not None:
        return context.subject.of(twin, context.subject.dtype), names
    changed, parts = _with_dropout_set(built.module, p)
    return (None, ()) if changed is None else (context.subject.of(changed, context.subject.dtype), parts)


def _is_dropout(name: str, value: object) -> bool:
    is_rate = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1
    return is_rate and role_of(name.rpartition(".")[2]) == "dropout"


def _rebuilt(built: Built, changes: Mapping[str, object]) -> nn.Module | None:
    """The module rebuilt with the same weights; None if that fails."""
    assert built.module is not None
    first = next(built.module.parameters(), None)
    try:
        module = built.rebuild(changes).module
        if module is None:
            return None
        module.load_state_dict(built.module.state_dict())
        return module if first is None else cast(module, first.dtype, first.device)
    except Exception:  # the constructor may raise anything
        return None


def _with_dropout_set(module: nn.Module | None, p: float) -> tuple[nn.Module | None, tuple[str, ...]]:
    """A copy with dropout modules and numeric dropout attributes set to `p`; None without any."""
    try:
        twin = copy.deepcopy(module)
    except Exception:  # a user's __deepcopy__ may raise
        return None, ()
    names = []
    for path, part in () if twin is None else twin.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = p
            names.append(path or type(part).__name__)
        else:
            attributes = [name for name, value in vars(part).items() if _is_dropout(name, value)]
            for name in attributes:
                setattr(part, name, p)
                names.append(f"{path}.{name}" if path else name)
    return (twin, tuple(names)) if names else (None, ())


# ------------------------------------------------------------------------------------------------------ the returned pattern


def row_sums(context: ProbeContext) -> ProbeReply:
    """Whether the rows of a returned pattern sum to one."""
    name, pattern = "row sums", context.call(context.square()).pattern
    if pattern is None:
        return reply(name, "no pattern is returned")
    weights = pattern.to("cpu", torch.float64)
    sums = weights.sum(-1)
    error = float((sums - 1).abs().where(sums != 0, 0.0).nan_to_num(nan=0.0).max())
    lowest, highest = float(weights.nan_to_num().min()), float(weights.nan_to_num().max())
    tolerance = max(1e-6, 100 * context.tolerance)
    if lowest < -tolerance or highest > 1 + tolerance:
        message = f"the returned numbers go from {lowest:.2g} to {highest:.2g}: they are not attention weights"
        return reply(name, message, error)
    is_one = error <= tolerance
    message = "the rows of the returned pattern sum to one"
    if not is_one:
        over_queries = float((weights.sum(-2) - 1).abs().max()) <= tolerance
        message = f"the rows of the returned pattern miss one by up to {error:.2g}"
        message += "; its columns sum to one: the softmax runs over the queries" if over_queries else ""
    return reply(name, message, error, is_one)


def masked_cells(context: ProbeContext) -> ProbeReply:
    """Whether a returned pattern has exactly 0 for hidden keys."""
    name, facts = "masked cells", context.facts
    inputs = context.square()
    length = inputs.queries.shape[-2]
    mask = working_mask(context)
    if facts.visible == "causal":
        pattern = context.call(inputs).pattern
        hidden = torch.ones(1, length, length, dtype=torch.bool).triu(1)
    elif mask is not None:
        hidden = hidden_cells(context, mask, length)
        pattern = call_with_mask(context, inputs, mask, ~hidden).pattern
    else:
        return reply(name, "nothing is hidden by it")
    if pattern is None:
        return reply(name, "no pattern is returned")
    if pattern.shape[-2:] != hidden.shape[-2:]:
        return reply(name, f"the returned pattern has shape {list(pattern.shape)}")
    cells = pattern.cpu()[hidden[:, None].expand(pattern.shape)]
    n_bad = int((cells != 0).sum())
    message = f"{n_bad} of {cells.numel()} weights of masked keys are not exactly 0"
    return reply(name, message, n_bad, True if not n_bad else None)  # other probes test the influence on outputs


# ------------------------------------------------------------------------------------------------------------------ formats


def half(context: ProbeContext, dtype: torch.dtype, tolerance: float) -> ProbeReply:
    """The error in a 16-bit dtype against float64 with the same rounded weights and inputs."""
    name = str(dtype).removeprefix("torch.")
    twin, exact = _rounded(context, dtype)
    if twin is None or exact is None:
        return reply(name, "it cannot be copied into another format")
    rounded = map_rows(context.square(), lambda rows: rows.to(dtype))
    try:
        out = context.call(rounded, subject=twin).out
    except Exception as fault:
        return reply(name, f"raises {first_line(fault)}")
    n_bad = bad_numbers(out)
    if n_bad:
        return _not_finite_reply(context, name, out)
    wide = context.call(map_rows(rounded, torch.Tensor.double), subject=exact).out
    error = relative(wide, out)
    message = f"differs from float64 by {error:.1g} of the output's size" if error else "the same as float64"
    if error > tolerance:
        message += f", more than the {tolerance:g} that rounding explains"
    return reply(name, message, error, True if error <= tolerance else None)


def _not_finite_reply(context: ProbeContext, name: str, out: Tensor) -> ProbeReply:
    """The reply for outputs that are not finite; undecided if ordinary inputs give such outputs too."""
    n_bad = bad_numbers(out)
    if context.facts.nonfinite_queries:
        return reply(name, NOT_FINITE_ANYWAY, n_bad)
    return reply(name, f"{n_bad} of {out.numel()} numbers are NaN or infinite", n_bad, False)


def _rounded(context: ProbeContext, dtype: torch.dtype) -> tuple[UserAttention | None, UserAttention | None]:
    """A copy in `dtype`, and a float64 copy with the same rounded weights."""
    built, small = context.subject.built, context.fresh()
    if built.module is None:
        return context.subject.of(built.call, dtype), context.subject.of(built.call, torch.float64)
    if small is None:
        return None, None
    small = cast(small, dtype)
    wide = cast_copy(small, torch.float64)
    return context.subject.of(small, dtype), context.subject.of(wide, torch.float64)


# -------------------------------------------------------------------------------------------------------------------- sizes


def _length_reply(context: ProbeContext, name: str, inputs: Inputs) -> ProbeReply:
    """Whether a text of another length gives finite outputs."""
    try:
        out = context.call(inputs).out
    except Exception as fault:
        return reply(name, f"raises {first_line(fault)}")
    return _not_finite_reply(context, name, out) if bad_numbers(out) else reply(name, "works", 0, True)


def one_token(context: ProbeContext) -> ProbeReply:
    """Whether a text of one token works."""
    return _length_reply(context, "one token", context.square(1))


def one_key(context: ProbeContext) -> ProbeReply:
    """Whether the query has no effect with a single key, whose weight must be 1."""
    name = "one key"
    if not context.subject.takes_context:
        return reply(name, "it attends to its own rows alone")
    inputs = context.oblong(k_len=1)
    try:
        before = context.call(inputs).out
        change = relative(before, context.call(inputs._replace(queries=context.oblong(k_len=1).queries)).out)
    except Exception as fault:
        return reply(name, f"raises {first_line(fault)}")
    if change <= context.tolerance:
        return reply(name, "with one key the query does not matter", change, True)
    message = f"with one key, whose weight must be 1, another query changes the output by {change:.2g} of its size"
    return reply(name, message, change)


def one_sequence(context: ProbeContext) -> ProbeReply:
    """Whether a sequence gives the same output alone as in a batch."""
    name, inputs = "batch of one", context.square()
    if inputs.queries.shape[0] < 2:
        return reply(name, "it takes one sequence at a time")
    single = map_rows(inputs, lambda rows: rows[:1])
    try:
        out = context.call(single).out
    except Exception as fault:
        return reply(name, f"raises {first_line(fault)}")
    change = relative(context.call(inputs).out[:1], out)
    is_same = change <= max(1e-6, 100 * context.tolerance)
    message = "a sequence gives the same output alone as among others"
    if not is_same:
        message = f"a sequence gives another output alone than among others, by {change:.2g} of its size"
    return reply(name, message, change, True if is_same else None if context.facts.is_random else False)


_LONG = 300


def long_text(context: ProbeContext) -> ProbeReply:
    """Whether a text longer than most examples works."""
    return _length_reply(context, f"{_LONG} tokens", context.square(_LONG, batch=1))


# --------------------------------------------------------------------------------------------------------------- parameters


def parameter_count(context: ProbeContext) -> ProbeReply:
    """The number of parameters, compared with four projections of the sizes in the arguments."""
    name, module = "parameters", context.subject.built.module
    if module is None:
        return reply(name, "a function has none")
    n_parameters = sum(parameter.numel() for parameter in module.parameters())
    formulas = list(_formulas(context))
    if not formulas:
        return reply(name, f"{n_parameters:,}; its arguments name no width and heads to check them by", n_parameters)
    for description, n_expected in formulas:
        if n_parameters == n_expected:
            return reply(name, f"{n_parameters:,}, as four projections {description} have", n_parameters, True)
    expected_with_biases = formulas[0][1]
    return reply(name, f"{n_parameters:,}; four projections with biases have {expected_with_biases:,}", n_parameters)


def _formulas(context: ProbeContext) -> Iterator[tuple[str, int]]:
    """Parameter counts of four projections with and without biases."""
    arguments, context_width = context.subject.built.arguments, context.subject.sizes.d_context
    width, n_heads = stated(arguments, "d_model"), stated(arguments, "n_heads")
    if not is_size(width) or not is_size(n_heads):
        return
    d_head, n_kv_heads = stated(arguments, "d_head"), stated(arguments, "n_kv_heads")
    d_head = d_head if is_size(d_head) else width // n_heads
    n_kv_heads = n_kv_heads if is_size(n_kv_heads) else n_heads
    d_v = stated(arguments, "d_v")
    d_v = d_v if is_size(d_v) else d_head
    q, k, v, o = n_heads * d_head, n_kv_heads * d_head, n_kv_heads * d_v, n_heads * d_v
    matrices = width * q + context_width * (k + v) + o * width
    yield "with biases", matrices + q + k + v + width
    yield "without biases", matrices
    yield "with a bias on the last alone", matrices + width
    yield "with biases on the first three", matrices + q + k + v
    yield "but the last, without biases,", matrices - o * width
    yield "but the last, with biases,", matrices - o * width + q + k + v


def unused_parameters(context: ProbeContext) -> ProbeReply:
    """The matrices that influence no output. Biases do not count, because a key bias never influences the output."""
    name, twin = "unused parameters", context.fresh()
    matrices = (
        {} if twin is None else {n: p for n, p in twin.named_parameters() if p.ndim > 1 and p.is_floating_point()}
    )
    if twin is None or not matrices or len(matrices) > _MOST_MATRICES:
        return reply(name, f"it has {len(matrices) or 'no'} matrices")
    if context.facts.nonfinite_queries:
        return reply(name, "outputs that are NaN cannot be compared")
    subject = context.subject.of(twin, context.subject.dtype)
    input_sets = [context.square()] + ([context.oblong()] if context.subject.takes_context else [])
    unused = set(matrices)
    for inputs in input_sets:
        before = context.call(inputs, subject=subject).out
        for parameter in sorted(unused):
            if context.moves(before, _output_with_changed_matrix(context, subject, matrices[parameter], inputs)):
                unused.remove(parameter)
    unused_names = tuple(sorted(unused))
    message = (
        f"no output depends on {first_names(unused_names, 4)}"
        if unused_names
        else f"outputs depend on all {len(matrices)} matrices"
    )
    return reply(name, message, len(unused_names), not unused_names)


_MOST_MATRICES = 40


def _output_with_changed_matrix(
    context: ProbeContext, subject: UserAttention, matrix: Tensor, inputs: Inputs
) -> Tensor:
    """The output with a matrix temporarily changed."""
    original = matrix.detach().clone()
    matrix.data.mul_(-1.5).add_(0.1)
    try:
        return context.call(inputs, subject=subject).out
    finally:
        matrix.data.copy_(original)


# -------------------------------------------------------------------------------------------------------- the table

PROBES: tuple[ProbeEntry, ...] = (
    ProbeEntry("determinism", visibility_probes.determinism, 5, True),
    ProbeEntry("finite", visibility_probes.finite_outputs, 1, True),
    ProbeEntry("dropout in eval", dropout_in_eval, 2, True),
    ProbeEntry("batch independence", visibility_probes.batch_independence, 2, True),
    ProbeEntry("visible keys", visibility_probes.visible_keys, 16, True),
    ProbeEntry("q_len ≠ k_len", visibility_probes.visible_context, 24),
    ProbeEntry("mask", mask_probes.mask_argument, 8, True),
    ProbeEntry("open mask", mask_probes.open_mask, 2),
    ProbeEntry("padding", mask_probes.padding_argument, 8, True),
    ProbeEntry("padding of NaN", mask_probes.padding_of_nan, 3, True),
    ProbeEntry("query without a key", mask_probes.empty_row, 4),
    ProbeEntry("causality", visibility_probes.causality, 0, True),
    ProbeEntry("self-visibility", visibility_probes.self_visibility, 0, True),
    ProbeEntry("keys permuted", visibility_probes.keys_permuted, 2),
    ProbeEntry("tokens permuted", visibility_probes.tokens_permuted, 2),
    ProbeEntry("heads", visibility_probes.heads, 2),
    ProbeEntry("row sums", row_sums, 1, True),
    ProbeEntry("masked cells", masked_cells, 1),
    ProbeEntry("scores × 1000", mask_probes.large_scores, 6),
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
"""In order of execution: later probes use facts from earlier ones."""
