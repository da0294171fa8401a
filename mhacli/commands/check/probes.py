"""The probes of `mha check`: questions about a user's attention that need no knowledge of its weights."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from mhacli.commands.check.result import CheckRequest, ProbeResult
from mhacli.usercode.arguments import role_of
from mhacli.usercode.call.user_attention import UserAttention
from mhacli.usercode.inputs import InputDrawer, cast, copied, map_rows
from mhacli.usercode.types import Built, Inputs, MaskForm

Visible = Literal["full", "causal", "without itself", "plus the next", "transposed", "itself only", "other"]
"""Which tokens influence an output: all; up to its own position; before it; one more; from its own position on; its own only;
or another pattern."""


@dataclass(frozen=True)
class ProbeFacts:
    """The measurements of the probes, None or empty where nothing was measured.

    `call_s` is the duration of a call. `is_random`: the output varies in eval mode, and seeding torch repeats it. `keeps_state`:
    earlier calls change the output. `is_random_with_dropout`: random in eval mode when built with dropout, through the arguments
    `dropout_names`. `influence` `[query, key]`: whether the token at key influences the output at query, on the diagonal through
    its value, not its query; `visible` classifies it. `largest_future` is the largest relative change of an output by a later
    token. `is_causal_by_mask`: not causal by itself, but with a causal mask. `mask` is the first working form. `empty_row` is the
    output of a query without visible keys. `is_rescaled`: whether dropout divides by 1 − p, None if undecided.
    """

    call_s: float = 0.0
    is_random: bool | None = None
    keeps_state: bool | None = None
    is_random_with_dropout: bool | None = None
    dropout_names: tuple[str, ...] = ()
    influence: Bool[Tensor, "query key"] | None = None
    visible: Visible | None = None
    largest_future: float | None = None
    is_causal_by_mask: bool | None = None
    mask: MaskForm | None = None
    empty_row: Literal["zeros", "mean", "nan", "other"] | None = None
    is_rescaled: bool | None = None


class Probed(NamedTuple):
    """The results of the probes, in the order of `PROBES`, and the measured facts."""

    probes: tuple[ProbeResult, ...]
    facts: ProbeFacts


@dataclass(frozen=True)
class Reply:
    """What a probe answers: its message, a measured value, whether it passes, and the `ProbeFacts` fields that it measured."""

    message: str
    value: float | None = None
    ok: bool | None = None
    facts: Mapping[str, object] = field(default_factory=dict)


def probe(
    subject: UserAttention, request: CheckRequest, stage: Callable[[str], None], *, expects_causal: bool
) -> Probed:
    """The results of all probes, in eval mode. `stage` is called with a description before every call, which restarts the time
    limit; `expects_causal`: the code or the user states that no token sees a later one."""
    context = ProbeContext(subject, request, expects_causal=expects_causal)
    context.stage = lambda: stage(f"calling {subject.built.name}")
    with torch.random.fork_rng([subject.device] if subject.device.type == "cuda" else []):
        inputs, durations = context.inputs(), []
        for _ in range(_TIMED):
            began = time.perf_counter()
            context.out(inputs)
            durations.append(time.perf_counter() - began)
        context.facts = ProbeFacts(call_s=min(durations))
        results = []
        for name, run in PROBES.items():
            context.stage = lambda name=name: stage(f"probing {subject.built.name} ({name})")  # type: ignore[misc]
            results.append(_result(name, run, context))
    return Probed(tuple(results), context.facts)


def _result(name: str, run: Callable[[ProbeContext], Reply], context: ProbeContext) -> ProbeResult:
    """The result of one probe; updates the facts. An exception becomes its message."""
    context.drawer.restart()
    try:
        reply = run(context)
    except Exception as fault:  # user code may raise anything
        return ProbeResult(name, f"could not run: the code raises {_first_line(fault)}")
    context.facts = replace(context.facts, **reply.facts)  # type: ignore[arg-type]
    value = None if reply.value is None or not math.isfinite(reply.value) else float(reply.value)
    return ProbeResult(name, reply.message, value, reply.ok)


def _first_line(fault: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(fault).split())[:200]
    return f"{type(fault).__name__}: {text}" if text else type(fault).__name__


# ------------------------------------------------------------------------------------------------------------------ calls


_MOVES = {torch.float64: 1e-9, torch.float32: 1e-5}
_MOVES_16 = 2e-2
_TIMED = 3


class ProbeContext:
    """A user's attention, with the facts that the probes have measured so far.

    Every call starts with the same state of torch's generator, so that random outputs repeat. A subject that keeps state gets a
    fresh copy for each call. `stage` is called before every call. `drawer` is restarted for each probe, which so gets the same
    inputs.
    """

    def __init__(self, subject: UserAttention, request: CheckRequest, *, expects_causal: bool) -> None:
        self.subject, self.request, self.expects_causal = subject, request, expects_causal
        self.facts = ProbeFacts()
        self.stage: Callable[[], None] = lambda: None
        self._pristine = copied(subject.built.module)
        self.drawer = InputDrawer(
            subject.sizes,
            seed=request.of.seed % 2**63,
            n_heads=subject.n_heads if subject.is_function else None,
            dtype=subject.dtype,
            device=subject.device,
        )

    @property
    def tolerance(self) -> float:
        """The relative change from which an output counts as moved."""
        return _MOVES.get(self.subject.dtype, _MOVES_16)

    def out(
        self,
        inputs: Inputs,
        *,
        mask: MaskForm | None = None,
        training: bool = False,
        subject: UserAttention | None = None,
        seed: int | None = 0,
    ) -> Tensor:
        """The output of one call, with torch's generator seeded by `seed` and restored afterwards. None: not seeded."""
        callee = subject or self.subject
        if subject is None and self.facts.keeps_state and self._pristine is not None:
            callee = self.subject.of(copy.deepcopy(self._pristine), self.subject.dtype)
        self.stage()
        return callee(inputs, mask=mask, training=training, seed=seed).out

    def inputs(self) -> Inputs:
        """Self-attention inputs; for a function, equally many keys as queries."""
        return self.drawer.inputs(with_context=False)

    def moved_queries(self, before: Tensor, after: Tensor) -> Bool[Tensor, "batch query"]:
        """Which queries of which sequences changed."""
        change = _changes(before, after) / _size_of(before)
        return change.movedim(-2, 1).flatten(2).amax(2) > self.tolerance


def _changes(before: Tensor, after: Tensor) -> Tensor:
    """|after − before| in float64; ∞ where only one is NaN or infinite, or for different shapes."""
    if before.shape != after.shape:
        return torch.full(before.shape or (1,), math.inf, dtype=torch.float64)
    a, b = (tensor.detach().to("cpu", torch.float64) for tensor in (before, after))
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (b - a).abs().nan_to_num(nan=math.inf))


def _size_of(tensor: Tensor) -> float:
    """The largest finite magnitude, 1 where there is none."""
    finite = tensor.detach().to("cpu", torch.float64).abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.max()) or 1.0 if finite.numel() else 1.0


def _relative(before: Tensor, after: Tensor) -> float:
    """The largest change relative to the size of `before`; ∞ if NaN appeared or disappeared."""
    differences = _changes(before, after)
    return float(differences.max()) / _size_of(before) if differences.numel() else 0.0


def _n_nonfinite(tensor: Tensor) -> int:
    """The number of NaN and infinite elements."""
    return int((~torch.isfinite(tensor)).sum())


# ----------------------------------------------------------------------------------------------------- the same output again


def determinism(context: ProbeContext) -> Reply:
    """Whether the same input gives the same output in eval mode, at once and after another input."""
    inputs, other = context.inputs(), context.inputs()
    first = context.out(inputs, seed=None)
    try:
        second = context.out(inputs, seed=None)
        context.out(other, seed=None)
        third = context.out(inputs, seed=None)
    except Exception as fault:  # a later call fails
        message = f"the first call works, a later one with the same input raises {_first_line(fault)}"
        return Reply(message, None, False, {"keeps_state": True, "is_random": False})
    change = max(_relative(first, second), _relative(first, third))
    if change <= context.tolerance:
        message = "the same input gives the same output, also after another one"
        return Reply(message, change, True, {"is_random": False, "keeps_state": False})
    if _relative(context.out(inputs), context.out(inputs)) <= context.tolerance:
        message = (
            "the same input gives another output in eval mode, but the same one after torch.manual_seed: it is random"
        )
        return Reply(message, change, False, {"is_random": True, "keeps_state": False})
    message = "the same input gives another output after other calls, with the same seed too: it keeps state"
    return Reply(message, change, False, {"is_random": False, "keeps_state": True})


def finite_outputs(context: ProbeContext) -> Reply:
    """Whether ordinary inputs give finite outputs."""
    out = context.out(context.inputs())
    bad = (~torch.isfinite(out)).movedim(-2, 0).flatten(1).any(1).nonzero().flatten().tolist()
    message = "every number of the output is finite"
    if bad:
        noun = "query" if len(bad) == 1 else "queries"
        queries = ", ".join(map(str, bad))
        message = f"{_n_nonfinite(out)} numbers of the output are NaN or infinite, those of {noun} {queries}"
    return Reply(message, _n_nonfinite(out), not bad)


def batch_independence(context: ProbeContext) -> Reply:
    """Whether a sequence gives the same output alone as among others."""
    inputs = context.inputs()
    if inputs.queries.shape[0] < 2:
        return Reply("it takes one sequence at a time")
    if context.facts.is_random:
        return Reply("not run: its output in eval mode is not always the same")
    among, alone = context.out(inputs)[1:2], context.out(map_rows(inputs, lambda rows: rows[1:2]))
    change = _relative(among, alone)
    if change > max(1e-6, 100 * context.tolerance):
        return Reply(
            f"a sequence gives another output alone than among others, by {change:.2g} of its size", change, False
        )
    return Reply("a sequence gives the same output alone as among others", change, True)


# ------------------------------------------------------------------------------------------------------------ visible keys


_SMALL_SCALE = 0.1
"""The scale of inputs with small scores and nearly equal weights, so that every visible key has an influence."""


def visible_keys(context: ProbeContext) -> Reply:
    """Which tokens influence which outputs in self-attention, by replacing each token in turn.

    A token among equal ones cannot change its output through its query, so equal tokens show the diagonal.
    """
    random, small = context.inputs(), map_rows(context.inputs(), lambda rows: rows * _SMALL_SCALE)
    equal_tokens = map_rows(small, lambda rows: rows[..., :1, :].expand_as(rows).clone())
    by_random, largest = _influence(context, random)
    by_equal, _ = _influence(context, equal_tokens, factor=_SMALL_SCALE)
    if random.keys is None:
        by_random.fill_diagonal_(False)  # the token may act through its query only
    influenced = by_random | by_equal
    kind = _kind_of(influenced)
    facts = {"influence": influenced, "visible": kind, "largest_future": largest}
    return Reply(_VISIBLE_TEXT[kind], float(influenced.float().mean()), None, facts)


_VISIBLE_TEXT: dict[Visible, str] = {
    "full": "every token sees every token",
    "causal": "every token sees itself and those before it",
    "without itself": "every token sees those before it, but not itself",
    "plus the next": "every token sees itself, those before it, and the next one",
    "transposed": "every token sees itself and those after it, none before",
    "itself only": "every token sees itself alone",
    "other": "what a token sees is neither everything nor a triangle",
}


def _influence(
    context: ProbeContext, base: Inputs, *, mask: MaskForm | None = None, factor: float = 1.0
) -> tuple[Bool[Tensor, "query key"], float]:
    """Which token influences which output, and the largest relative change by a later token."""
    before = context.out(base, mask=mask)
    moved, largest = [], 0.0
    for key in range(base.queries.shape[-2]):
        after = context.out(context.drawer.replaced(base, [key], factor=factor), mask=mask)
        moved.append(context.moved_queries(before, after).any(0))
        earlier = _changes(before, after)[..., :key, :]
        largest = max(largest, float(earlier.max()) / _size_of(before)) if earlier.numel() else largest
    return torch.stack(moved, 1), largest


def _kind_of(influenced: Bool[Tensor, "query key"]) -> Visible:
    """The kind of visibility. A first or last query without any visible key counts as either way."""
    ones = torch.ones_like(influenced)
    shapes: dict[Visible, Tensor] = {
        "full": ones,
        "causal": ones.tril(),
        "plus the next": ones.tril(1),
        "transposed": ones.triu(),
        "itself only": ones.tril().triu(),
    }
    for name, shape in shapes.items():
        if torch.equal(influenced, shape):
            return name
    if torch.equal(influenced[1:], ones.tril(-1)[1:]):
        return "without itself"
    return "transposed" if torch.equal(influenced[:-1], ones.triu(1)[:-1]) else "other"


def causality(context: ProbeContext) -> Reply:
    """The number of later tokens that influence earlier outputs."""
    influenced, visible = context.facts.influence, context.facts.visible
    if influenced is None:
        return Reply("which tokens are seen is not known")
    if visible == "without itself":
        message = "no later token changes an earlier output, except the first, which sees none"
        return Reply(message, 0, True if context.expects_causal else None)
    n_later, n_pairs = int(influenced.triu(1).sum()), len(influenced) * (len(influenced) - 1) // 2
    message = f"in {n_later} of {n_pairs} pairs the later token changes the earlier output"
    message += f", by up to {context.facts.largest_future or 0.0:.0%}" if n_later else ""
    if visible in ("plus the next", "transposed"):
        return Reply(f"{message}: {_VISIBLE_TEXT[visible]}", n_later, False)
    if not context.expects_causal:
        return Reply(message, n_later)
    mask = context.facts.mask
    if n_later and mask is not None and "query" in mask.axes:
        inputs = context.inputs()._replace(allowed=torch.ones_like(influenced).tril()[None, None])
        is_causal = not bool(_influence(context, inputs, mask=mask)[0].triu(1).any())
        if is_causal:
            message += "; with a causal mask given, none does"
        return Reply(message, n_later, None if is_causal else False, {"is_causal_by_mask": is_causal})
    return Reply(message, n_later, not n_later)


# ------------------------------------------------------------------------------------------------------------------- masks


_MOST_FORMS, _MOST_FORMS_IF_SLOW, _SLOW_S = 12, 2, 0.05


def mask_argument(context: ProbeContext) -> Reply:
    """Whether a mask in some form removes the influence of hidden keys and keeps that of visible ones."""
    forms, means = context.subject.mask_forms, context.request.mask_means
    if not forms:
        return Reply("it takes no mask that could be tried")
    n_most = _MOST_FORMS_IF_SLOW if context.facts.call_s > _SLOW_S else _MOST_FORMS
    leaks, working = {}, []
    for form in forms[:n_most]:
        with suppress(Exception):  # a form that fails does not count
            leaks[form] = _leaked(context, form)
            working += [form] if leaks[form] == 0 else []
        if working and means in (None, working[-1].true_means):
            break
    if not leaks:
        return Reply("every form that it takes raises for some mask")
    if not working:
        parameters, least = ", ".join(dict.fromkeys(form.parameter for form in leaks)), min(leaks.values())
        message = f"{least:.0%} of what {parameters} hides still changes the output"
        return Reply(message, least, False)
    best = next((form for form in working if form.true_means == means), working[0])
    has_other_meaning = best.kind in ("bool", "01", "whole") and means not in (None, best.true_means)
    message = f"{best.parameter}: {_form_text(best)}; what it hides changes nothing"
    if has_other_meaning:
        message = f"{best.parameter}: True means {best.true_means}, not {means}"
    empty_row = _empty_row(context, best) if "query" in best.axes else None
    return Reply(message, 0.0, not has_other_meaning, {"mask": best, "empty_row": empty_row})


def _form_text(form: MaskForm) -> str:
    """A form as text: `bool [query, key], True = keep`."""
    kinds = {"bool": "bool", "01": "0 and 1", "whole": "whole 0 and 1", "additive": "0 and −∞"}
    text = f"{kinds[form.kind]} [{', '.join(form.axes)}]"
    return text if form.kind == "additive" else f"{text}, {'True' if form.kind == 'bool' else '1'} = {form.true_means}"


def _leaked(context: ProbeContext, form: MaskForm) -> float:
    """The part of the outputs that hidden keys, the last of all, still change; 1 where visible keys change none, and where the
    mask makes numbers NaN or infinite."""
    inputs = context.inputs()
    length = inputs.queries.shape[-2]
    first_hidden = 2 * length // 3
    allowed = (torch.arange(length) < first_hidden).expand(1, 1, length, length)
    masked = inputs._replace(allowed=allowed.to(context.subject.device))
    base = context.out(masked, mask=form)
    n_counted = length if inputs.keys is not None else first_hidden  # hidden tokens move by their own queries
    hidden, visible = (
        context.out(context.drawer.replaced(masked, keys), mask=form)
        for keys in (range(first_hidden, length), range(first_hidden))
    )
    leaked = context.moved_queries(base, hidden)[:, :n_counted].double().mean().item()
    is_seen = bool(context.moved_queries(base, visible)[:, :n_counted].any())
    return leaked if is_seen and _n_nonfinite(base) <= _n_nonfinite(context.out(inputs)) else 1.0


def _empty_row(context: ProbeContext, form: MaskForm) -> str:
    """The kind of output for a query without visible keys."""
    inputs = context.inputs()
    length, device = inputs.queries.shape[-2], context.subject.device
    empty_query = length // 2
    allowed = torch.ones(1, 1, length, length, dtype=torch.bool, device=device)
    allowed[..., empty_query, :] = False
    row = context.out(inputs._replace(allowed=allowed), mask=form)[..., empty_query, :]
    if _n_nonfinite(row):
        return "nan"
    if not row.any():
        return "zeros"
    own_keys = torch.eye(length, dtype=torch.bool, device=device)[None, None]
    single_keys = context.out(inputs._replace(allowed=own_keys), mask=form)
    return "mean" if _relative(single_keys.mean(-2), row) < max(1e-4, 100 * context.tolerance) else "other"


# ---------------------------------------------------------------------------------------------------------------- dropout


P = 0.5
"""The dropout of the copies, large enough to show in one call."""
FEWEST_CALLS, MOST_CALLS = 40, 200
_PATIENCE_S, _LONGEST_S, _SIGMAS = 1.0, 8.0, 5.0


def dropout_in_eval(context: ProbeContext) -> Reply:
    """Whether a copy with dropout 0.5 and the same weights is deterministic in eval mode; of a random subject, whether one
    with dropout 0 is."""
    is_random = bool(context.facts.is_random)
    reason, twin, names = _copy_with_dropout(context, 0.0 if is_random else P)
    if twin is None:
        return Reply(reason)
    inputs, names_text = context.inputs(), ", ".join(names)
    change = _relative(*(context.out(inputs, subject=twin, seed=seed) for seed in (1, 2)))
    varies = change > context.tolerance
    facts = {"dropout_names": names, "is_random_with_dropout": varies != is_random}
    if not is_random:
        message = f"with {names_text} = {P} it rests in eval mode"
        if varies:
            message = f"with {names_text} = {P} the same input gives other outputs in eval mode: dropout does not rest"
        return Reply(message, change, not varies, facts)
    if varies:
        return Reply(f"with {names_text} = 0 it is random too", change, None, facts)
    message = f"with {names_text} = 0 it is not random in eval mode, otherwise it is: dropout does not rest"
    return Reply(message, None, False, facts)


def dropout_in_training(context: ProbeContext) -> Reply:
    """The mean output of many calls in training mode with dropout 0.5, compared with the output in eval mode.

    Each output column contains a part without dropout, such as a bias, and a part that dropout scales. The slope of the
    training output over the eval output, within columns, is independent of the former. Every call gives a slope, and their
    spread gives the standard error.
    """
    if context.facts.is_random:
        return Reply("not run: its output in eval mode is not always the same")
    if FEWEST_CALLS * context.facts.call_s > _LONGEST_S:
        return Reply(f"left out: a call takes {context.facts.call_s:.2g} s, and this takes {FEWEST_CALLS} or more")
    reason, twin, names = _copy_with_dropout(context, P)
    if twin is None:
        return Reply(reason)
    inputs, slopes = context.inputs(), []
    eval_out = context.out(inputs, subject=twin).double()
    centred = eval_out - eval_out.mean((0, 1), keepdim=True)
    size = float((centred * centred).sum())
    if not math.isfinite(size) or size == 0:
        return Reply("its output does not vary, so that it cannot be compared")
    n_calls = round(_PATIENCE_S / max(1e-6, context.facts.call_s))
    for seed in range(min(MOST_CALLS, max(FEWEST_CALLS, n_calls))):
        out = context.out(inputs, subject=twin, training=True, seed=seed).double()
        slopes.append(float((centred * (out - eval_out)).sum()) / size)
    if not all(math.isfinite(slope) for slope in slopes):
        return Reply("its output in training is not finite")
    if max(map(abs, slopes)) <= context.tolerance:
        return Reply(f"{', '.join(names)} changes nothing in training", 1.0)
    return _slope_reply(names, slopes)


def _slope_reply(names: tuple[str, ...], slopes: list[float]) -> Reply:
    """Decides between the slopes 1 and 1 − p, if five standard errors separate them."""
    slope = 1 + statistics.fmean(slopes)
    error = statistics.stdev(slopes) / math.sqrt(len(slopes))
    margin, is_rescaled = _SIGMAS * error, None
    message = f"with {', '.join(names)} = {P} the mean output in training is {slope:.2f} ± {error:.2f} of that in eval"
    if 2 * margin < P and abs(slope - 1) <= margin:
        is_rescaled = True
    elif 2 * margin < P and abs(slope - (1 - P)) <= margin:
        is_rescaled = False
        message += ": what is kept is not divided by 1 − p"
    return Reply(message, slope, is_rescaled, {"is_rescaled": is_rescaled, "dropout_names": names})


def _copy_with_dropout(context: ProbeContext, p: float) -> tuple[str, UserAttention | None, tuple[str, ...]]:
    """A copy with the same weights and dropout `p`, and the names it was set through; else the reason why there is none."""
    built = context.subject.built
    if built.module is None:
        return "a function has no modes", None, ()
    if context.facts.keeps_state:
        return "not run: it keeps state", None, ()
    names = tuple(name for name, value in built.arguments.items() if _is_dropout(name, value))
    twin = _rebuilt(built, built.module, dict.fromkeys(names, p)) if names else None
    if twin is None:
        twin, names = _with_dropout_set(built.module, p)
    if twin is None or not names:
        return "it has no dropout that could be raised", None, ()
    return "", context.subject.of(twin, context.subject.dtype), names


def _is_dropout(name: str, value: object) -> bool:
    is_rate = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1
    return is_rate and role_of(name.rpartition(".")[2]) == "dropout"


def _rebuilt(built: Built, module: nn.Module, changes: Mapping[str, object]) -> nn.Module | None:
    """The module rebuilt with the same weights; None if that fails."""
    first = next(module.parameters(), None)
    try:
        twin = built.rebuild(changes).module
        if twin is None:
            return None
        twin.load_state_dict(module.state_dict())
        return twin if first is None else cast(twin, first.dtype, first.device)
    except Exception:  # the constructor may raise anything
        return None


def _with_dropout_set(module: nn.Module, p: float) -> tuple[nn.Module | None, tuple[str, ...]]:
    """A copy with dropout modules and numeric dropout attributes set to `p`, and their names."""
    try:
        twin = copy.deepcopy(module)
    except Exception:  # a user's __deepcopy__ may raise
        return None, ()
    names = []
    for path, part in twin.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = p
            names.append(path or type(part).__name__)
            continue
        for name in [name for name, value in vars(part).items() if _is_dropout(name, value)]:
            setattr(part, name, p)
            names.append(f"{path}.{name}" if path else name)
    return twin, tuple(names)


# -------------------------------------------------------------------------------------------------------- the table

PROBES: Mapping[str, Callable[[ProbeContext], Reply]] = {
    "determinism": determinism,
    "finite": finite_outputs,
    "dropout in eval": dropout_in_eval,
    "batch independence": batch_independence,
    "visible keys": visible_keys,
    "mask": mask_argument,
    "causality": causality,
    "dropout in training": dropout_in_training,
}
"""The probes in order of execution: later ones use facts from earlier ones."""
