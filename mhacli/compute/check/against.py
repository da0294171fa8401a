"""Two implementations of attention side by side: the same weights, the same inputs, how far apart they are, and from where on."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch
from torch import Tensor, nn

from mhacli.adapters.usercode.arguments import parameters_of, role_of
from mhacli.adapters.usercode.asker import cast, cast_copy
from mhacli.adapters.usercode.build import is_factory
from mhacli.adapters.usercode.call.convention import CallMasks
from mhacli.adapters.usercode.call.user_attention import UserAttention, drawer_of
from mhacli.adapters.usercode.process import SourceLine, Stage
from mhacli.adapters.usercode.projections import ProjectionReading, Widths, parts_of, projection_readings
from mhacli.adapters.usercode.target import find_target
from mhacli.adapters.usercode.types import Inputs, MaskForm, Operation
from mhacli.attention.mistakes.stages import Projection
from mhacli.compute.base.user_module import arguments_of, load_user_attention
from mhacli.compute.check.candidates import head_counts
from mhacli.compute.check.inputs import (
    HIDDEN,
    TOLERANCE,
    arguments_without_effect,
    ask,
    inputs_for,
    max_error,
    randomised,
)
from mhacli.compute.user_trace.dataflow import Dataflow, is_transpose
from mhacli.compute.user_trace.trace import WatchedCall, watched
from mhacli.errors import MhaError
from mhacli.io.json_schema import finite
from mhacli.requests.user_code import CheckRequest, TargetRequest
from mhacli.results.check import Choice, Examination, Finding, FirstDifference, OutputComparison

_OWN_OPTION = re.compile(r"--(?=(call-)?arg\b)")
_SIZES = ("d_model", "n_heads", "n_kv_heads", "d_head", "d_v")
"""What the other is built with too where the first has it by default: rows must fit both."""
_MOST_TRANSFERS = 24
"""In how many ways weights are carried over before the two are said to differ."""


@dataclass(frozen=True)
class ErrorSummary:
    """How far two answers to the same input are apart, relative to the tolerance; `case` names the input, which is `inputs`
    with its masks in their `forms`."""

    case: str
    difference: float
    tolerance: float
    shape: tuple[int, ...] = ()
    inputs: Inputs | None = None
    forms: tuple[CallMasks, CallMasks] = (CallMasks(), CallMasks())

    @property
    def ok(self) -> bool:
        """Whether that is rounding."""
        return self.difference <= self.tolerance


def compare(request: CheckRequest, stage: Stage) -> Examination:
    """Whether two of them answer alike. Raises `MhaError` for what cannot be built or called, or asked with the same rows."""
    assert request.against is not None
    one = load_user_attention(request.of, stage)
    other = _other(request.against, _arguments_of_first(one), stage)
    _require_alike(one, other, request)
    stage(f"comparing {request.of.target} with {request.against.target}", limited=False)
    best: list[ErrorSummary] = []
    how, pair = Choice("weights", "there are no weights to copy"), (one, other)
    for mine, theirs, said in _pairs(one, other, request):
        gaps = list(_gaps(mine, theirs, request.of.seed))
        if not best or _worst(gaps) < _worst(best):
            best, how, pair = gaps, said, (mine, theirs)
        if all(gap.ok for gap in gaps):
            break
    parting = _parting(best, pair, request.of.seed)
    worst = max(best, key=_strain)
    findings = _findings(best, pair, request, parting)
    return Examination(
        verdict="wrong" if findings else "right",
        target=request.of.target,
        called=one.described,
        arguments=arguments_of(one.built),
        findings=findings,
        departure=parting,
        choices=(
            how,
            Choice("built", f"the other is {_built(other)}"),
            Choice("called", f"the other is called {other.described}"),
        ),
        probes=(),
        comparison=OutputComparison(
            request.against.target,
            str(one.dtype).removeprefix("torch."),
            len(best),
            finite(worst.difference),
            worst.tolerance,
        ),
        against=request.against.target,
        not_examined=tuple(
            dict.fromkeys(name for subject in (one, other) for name in subject.untried if name not in subject.unread)
        ),
        notes=tuple(
            f"{target.target}: {note}"
            for target, subject in ((request.of, one), (request.against, other))
            for note in arguments_without_effect(subject, request.of.seed)
        ),
    )


def _arguments_of_first(subject: UserAttention) -> tuple[tuple[str, str], ...]:
    """The arguments of the first that the other is built with too: those that were given or guessed, and every size."""
    return tuple(
        (argument.name, argument.value)
        for argument in arguments_of(subject.built)
        if argument.origin != "default" or (role_of(argument.name) in _SIZES and argument.value.isdigit())
    )


def _other(request: TargetRequest, first_arguments: tuple[tuple[str, str], ...], stage: Stage) -> UserAttention:
    """The other, ready to be asked. Raises `MhaError` that names its own options."""
    try:
        return load_user_attention(_as_it_calls_them(request, first_arguments, stage), stage)
    except MhaError as fault:
        fault.message = _OWN_OPTION.sub("--against-", fault.message)
        fault.hint = fault.hint and _OWN_OPTION.sub("--against-", fault.hint)
        raise


def _as_it_calls_them(
    request: TargetRequest, first_arguments: tuple[tuple[str, str], ...], stage: Stage
) -> TargetRequest:
    """The request with the arguments of the first by the names that the other has for them, `num_heads` for `n_heads`;
    what it has no name for is left out, and its own come first."""
    stage(f"importing {request.target}")
    thing = find_target(request.target).thing
    is_built = inspect.isclass(thing) or is_factory(thing, dict(request.arguments))
    names = [p.name for p in parameters_of(thing).named] if is_built else []
    roles = {role: name for name in reversed(names) if (role := role_of(name)) is not None}
    renamed = []
    for name, value in first_arguments:
        role = role_of(name)
        own = name if name.partition(".")[0] in names else None if role is None else roles.get(role)
        renamed += [] if own is None else [(own, value)]
    return replace(request, arguments=tuple((dict(renamed) | dict(request.arguments)).items()))


def _built(subject: UserAttention) -> str:
    """How the other was built, as its author would write it."""
    given = [argument for argument in arguments_of(subject.built) if argument.origin != "default"]
    return f"{subject.built.name}({', '.join(f'{one.name}={one.value}' for one in given)})"


def _require_alike(one: UserAttention, other: UserAttention, request: CheckRequest) -> None:
    """Raises `MhaError` where no input fits both."""
    assert request.against is not None
    if one.is_function != other.is_function:
        raise MhaError(
            "cannot compare the two: one projects token vectors, the other takes q, k and v as they are",
            code="cannot-compare",
        )
    if not one.is_function and one.sizes.d_in != other.sizes.d_in:
        raise MhaError(
            f"cannot compare the two: {request.of.target} takes vectors of width {one.sizes.d_in}, {request.against.target} of "
            f"width {other.sizes.d_in}",
            hint="--arg sets an argument of both, by the name that each has for it; --against-arg NAME=VALUE of the second alone",
            code="cannot-compare",
        )


# ------------------------------------------------------------------------------------------------------------- the weights


def _pairs(
    one: UserAttention, other: UserAttention, request: CheckRequest
) -> Iterator[tuple[UserAttention, UserAttention, Choice]]:
    """Both with the same weights, in every way in which those of the one can be those of the other."""
    mine, theirs = one.built.module, other.built.module
    if mine is None or theirs is None or not list(theirs.parameters()):
        yield one, other, Choice("weights", "there are no weights to copy")
        return
    try:
        yield from _carried(one, other, request)
    except MhaError:  # a bias that the other has not, for instance: what it has can be carried the other way
        yield from ((first, second, said) for second, first, said in _carried(other, one, request))


def _carried(
    one: UserAttention, other: UserAttention, request: CheckRequest
) -> Iterator[tuple[UserAttention, UserAttention, Choice]]:
    """Both with random weights of the first."""
    assert one.built.module is not None
    assert other.built.module is not None
    source = cast(randomised(one.built.module, request.of.seed), one.dtype)
    for made, said in _transferred(source, other.built.module, one, other, request):
        yield one.of(source, one.dtype), other.of(cast(made, other.dtype), other.dtype), said


def _transferred(
    source: nn.Module, target: nn.Module, one: UserAttention, other: UserAttention, request: CheckRequest
) -> Iterator[tuple[nn.Module, Choice]]:
    shapes = {name: tuple(p.shape) for name, p in source.named_parameters()}
    if shapes == {name: tuple(p.shape) for name, p in target.named_parameters()}:
        made = cast_copy(target, torch.float64)
        made.load_state_dict({**made.state_dict(), **{n: p.detach() for n, p in source.named_parameters()}})
        yield made, Choice("weights", "weights are copied by their names")
        return
    count = 0
    for mine, theirs in product(_readings(source, one, request), _readings(_numbered(target), other, request)):
        made = cast_copy(target, torch.float64)
        if count < _MOST_TRANSFERS and _carry(mine, theirs, made):
            count += 1
            yield made, Choice("weights", f"weights are copied: {', '.join(theirs.parts)}")
    if not count:
        raise MhaError(
            "cannot give both the same weights: the names or shapes of their projections do not correspond",
            hint="projections are recognised by names such as q_proj, wk, qkv, out_proj",
            code="cannot-compare",
        )


def _readings(module: nn.Module, subject: UserAttention, request: CheckRequest) -> list[ProjectionReading]:
    parts = parts_of(module, {})
    widest = max((max(part.weight.shape) for part in parts), default=1)
    counts = head_counts(subject.built, module, request, parts_width=widest)
    widths = [Widths(subject.sizes.d_in, subject.sizes.d_context, *count) for count in counts[:1]]
    return [reading for width in widths for reading in projection_readings(parts, width)][:_MOST_TRANSFERS]


def _numbered(module: nn.Module) -> nn.Module:
    """A copy whose parameters hold the number of each of their cells, so that a reading of them tells where each lies."""
    numbered, start = cast_copy(module, torch.float64), 1  # 0 is where a reading has put a zero of its own
    for parameter in numbered.parameters():
        parameter.data = torch.arange(start, start + parameter.numel(), dtype=torch.float64).reshape(parameter.shape)
        start += parameter.numel()
    return numbered


def _carry(mine: ProjectionReading, theirs: ProjectionReading, made: nn.Module) -> bool:
    """Writes the projections of one reading to the cells that another reading tells. False where shapes do not fit."""
    flat = torch.cat([parameter.data.flatten() for parameter in made.parameters()])
    for name in ("q", "k", "v", "out"):
        given, wanted = getattr(mine.weights, name), getattr(theirs.weights, name)
        if (given is None) != (wanted is None):
            return False
        if given is not None and not _write(given, wanted, flat):
            return False
    start = 0
    for parameter in made.parameters():
        parameter.data = flat[start : start + parameter.numel()].reshape(parameter.shape)
        start += parameter.numel()
    return True


def _write(given: Projection, wanted: Projection, flat: Tensor) -> bool:
    """Writes a projection to its cells. False where it has not their shape, or cannot be written in them."""
    if given.weight.shape != wanted.weight.shape or not _put(given.weight, wanted.weight, flat):
        return False
    if wanted.bias is None:
        return given.bias is None or not bool(given.bias.any())
    return _put(torch.zeros_like(wanted.bias) if given.bias is None else given.bias, wanted.bias, flat)


def _put(given: Tensor, wanted: Tensor, flat: Tensor) -> bool:
    """Writes numbers to the cells that `wanted` counts from 1; what stands at 0 must be zero, and a cell cannot hold two."""
    cells, numbers = wanted.detach().flatten().long(), given.detach().flatten().to(torch.float64)
    if bool(numbers[cells == 0].any()):
        return False
    cells, numbers = cells[cells > 0] - 1, numbers[cells > 0]
    flat[cells] = numbers
    return torch.equal(flat[cells], numbers)


# -------------------------------------------------------------------------------------------------------------- the answers


def _gaps(one: UserAttention, other: UserAttention, seed: int) -> Iterator[ErrorSummary]:
    """The differences on inputs that both take: their own rows, another text, masks and padding."""
    common = replace_sizes(one, other)
    draw = drawer_of(common, seed)
    yield _gap("self-attention", one, other, draw.inputs(with_context=False))
    if one.takes_context and other.takes_context:
        yield _gap("fewer queries than keys", one, other, draw.inputs(with_context=True))
    inputs = draw.inputs(with_context=one.takes_context and other.takes_context)
    if one.mask_forms and other.mask_forms:
        masked = inputs._replace(allowed=draw.allowed(inputs)[:1])
        yield _least("a mask", one, other, masked, one.mask_forms, other.mask_forms, "mask")
    if one.padding_forms and other.padding_forms:
        padded = inputs._replace(real=draw.real(inputs))
        yield _least("padding", one, other, padded, one.padding_forms, other.padding_forms, "padding")


def replace_sizes(one: UserAttention, other: UserAttention) -> UserAttention:
    """The first, to be asked with no more tokens or heads than both take."""
    a, b = one.sizes, other.sizes
    sizes = replace(a, batch=min(a.batch, b.batch), q_len=min(a.q_len, b.q_len), k_len=min(a.k_len, b.k_len))
    return replace(one, sizes=sizes, n_heads=min(one.n_heads, other.n_heads), n_rows=min(one.n_rows, other.n_rows))


def _least(
    name: str,
    one: UserAttention,
    other: UserAttention,
    inputs: Inputs,
    mine: Sequence[MaskForm],
    theirs: Sequence[MaskForm],
    how: str,
) -> ErrorSummary:
    """The difference under those of their forms of a mask that bring them closest: what True means is a choice."""
    gaps = [
        _gap(name, one, other, inputs, (CallMasks(**{how: a}), CallMasks(**{how: b})))
        for a, b in product(mine[:4], theirs[:4])
    ]
    return min(gaps, key=lambda gap: gap.difference)


def _gap(
    name: str,
    one: UserAttention,
    other: UserAttention,
    inputs: Inputs,
    forms: tuple[CallMasks, CallMasks] = (CallMasks(), CallMasks()),
) -> ErrorSummary:
    try:
        a, b = ask(one, inputs, *forms[0]), ask(other, inputs, *forms[1])
    except Exception:  # a form that these sizes do not fit
        return ErrorSummary(name, math.inf, TOLERANCE)
    if inputs.real is not None and inputs.real.shape[1] == a.shape[-2] and a.shape == b.shape and a.ndim == 3:
        a, b = a[inputs.real], b[inputs.real]  # nobody says what padding is to answer
    finite = a[a.isfinite()]
    tolerance = TOLERANCE * (finite.abs().max().item() if finite.numel() else 1.0)
    error = max_error(a, b)
    return ErrorSummary(name, error, tolerance, tuple(b.shape) if math.isinf(error) else (), inputs, forms)


def _worst(gaps: Sequence[ErrorSummary]) -> float:
    return max(_strain(gap) for gap in gaps)


def _strain(gap: ErrorSummary) -> float:
    return gap.difference / gap.tolerance


def _parting(
    gaps: Sequence[ErrorSummary], pair: tuple[UserAttention, UserAttention], seed: int
) -> FirstDifference | None:
    """Where the two part on the first of the inputs on which they differ; None where that cannot be told."""
    for gap in gaps:
        if not gap.ok and gap.inputs is not None:
            try:
                return departure(*pair, gap.inputs, gap.forms, seed)
            except Exception:  # what cannot be watched: operations without end, or tensors of another kind
                return None
    return None


def _findings(
    gaps: Sequence[ErrorSummary],
    pair: tuple[UserAttention, UserAttention],
    request: CheckRequest,
    parting: FirstDifference | None,
) -> tuple[Finding, ...]:
    apart = [gap for gap in gaps if not gap.ok]
    if not apart:
        return ()
    assert request.against is not None
    lines = [f"{gap.case}: {_words(gap)}" for gap in apart]
    small = _smallest(*pair, request.of.seed)
    lines += [] if small is None else [small]
    lines += [f"{gap.case}: the same" for gap in gaps if gap.ok]
    return (
        Finding(
            code="differs",
            message=f"{request.of.target} and {request.against.target} give different outputs with the same weights",
            evidence="\n".join(lines),
            fix=_fix(request, parting),
            effect="they are not the same layer",
        ),
    )


def _fix(request: CheckRequest, parting: FirstDifference | None) -> str:
    """What to look at."""
    if parting is not None:
        return f"compare the two lines that compute {parting.site}"
    assert request.against is not None
    return f"compare mha trace {request.of.target} with mha trace {request.against.target}, step by step"


def _smallest(one: UserAttention, other: UserAttention, seed: int) -> str | None:
    """The smallest of a few small inputs on which the two differ."""
    for batch, length in ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)):
        inputs = drawer_of(replace_sizes(one, other), seed).inputs(with_context=False, q_len=length, batch=batch)
        gap = _gap("", one, other, inputs)
        if not gap.ok and math.isfinite(gap.difference):
            rows = f"{batch} sequence{'s' * (batch > 1)} of {length} token{'s' * (length > 1)}"
            return f"smallest example, {rows}: they differ by {gap.difference:.4g}"
    return None


def _words(gap: ErrorSummary) -> str:
    if math.isinf(gap.difference):
        return f"different shapes, or NaN in one of them{f', {list(gap.shape)}' if gap.shape else ''}"
    return f"largest difference {gap.difference:.4g}"


# ------------------------------------------------------------------------------------------------------- where they part


ComparedSite = Literal["q", "k", "v", "qk", "scores", "pattern", "z", "concat", "out"]
_SCORING: tuple[ComparedSite, ...] = ("q", "k", "qk", "scores")
_BEFORE: tuple[ComparedSite, ...] = ("q", "k", "v", "qk", "scores", "pattern", "z")
_BEHIND: tuple[ComparedSite, ...] = ("concat", "out")


@dataclass(frozen=True)
class _SiteTensors:
    """What one of the two makes at a site: a tensor for each loop over heads, and the operations that led to the first of them,
    the last one first."""

    tensors: tuple[Tensor, ...]
    history: tuple[Operation, ...]


def departure(
    one: UserAttention, other: UserAttention, inputs: Inputs, forms: tuple[CallMasks, CallMasks], seed: int
) -> FirstDifference | None:
    """The first site, in the order of execution, from which on the two differ; None where their sites cannot be told. Raises
    what either raises.

    A difference that a later site takes back is none, such as queries that are scaled in place of scores; and of scores
    that are a multiple of the other's, the site is that at which the factor came in.
    """
    mine, theirs = (
        _sites(watched(subject, inputs_for(subject, inputs), seed, mask=form.mask, padding=form.padding))
        for subject, form in zip((one, other), forms, strict=True)
    )
    factors = {site: factor_of(mine[site].tensors, theirs[site].tensors) for site in mine if site in theirs}
    site = first_apart(factors)
    if site is None:
        return None
    before = [name for name in list(factors)[: list(factors).index(site)] if factors[name] == 1.0]
    here, there = _makers(mine[site], theirs[site])
    lines = [SourceLine() if operation is None else operation.at for operation in (here, there)]
    return FirstDifference(site, before[-1] if before else None, *lines[0], *lines[1])


def _makers(mine: _SiteTensors, theirs: _SiteTensors) -> tuple[Operation | None, Operation | None]:
    """The operations that make a site; where both stand at one line, such as of a helper that both call, those before it."""
    for here, there in zip(mine.history, theirs.history, strict=False):
        if (here.file, here.line) != (there.file, there.line):
            return here, there
    return next(iter(mine.history), None), next(iter(theirs.history), None)


def first_apart(factors: Mapping[ComparedSite, float | None]) -> ComparedSite | None:
    """The site at which two computations part, from how their sites compare: 1 where they are the same, another number where
    one is that multiple of the other, None where they differ. What one of the two does not make is absent.

    >>> first_apart({"q": 0.5, "qk": 0.5, "scores": 1.0, "pattern": None, "z": None, "out": None})
    'pattern'
    """

    def differs(site: ComparedSite) -> bool:
        return site in factors and factors[site] != 1.0

    if factors.get("z") == 1.0:
        return next((site for site in _BEHIND if differs(site)), None)
    for site in _BEFORE:
        if _is_taken_on(site, factors) if site in _SCORING else differs(site):
            return site
    return next((site for site in _BEHIND if differs(site)), None)


def _is_taken_on(site: ComparedSite, factors: Mapping[ComparedSite, float | None]) -> bool:
    """Whether a difference before the softmax is still there in what the softmax reads: as it is, or as the same factor."""
    if factors.get(site, 1.0) == 1.0 or factors.get("pattern") == 1.0:
        return False
    end = factors.get("scores", factors.get("qk", math.nan))
    own = factors[site]
    if own is None or end is None:
        return own is None and end != 1.0
    return math.isclose(own, end, rel_tol=1e-3) if not math.isnan(end) else False


# -------------------------------------------------------------------------------------------------------------- the sites


def _sites(one: WatchedCall) -> dict[ComparedSite, _SiteTensors]:
    """What was made at each site that can be told, in the order of execution."""
    flow, found = one.flow, one.roles.attentions
    joined: list[int | None] = [index for index, site in one.roles.sites.items() if site == "concat"]
    places: dict[ComparedSite, list[int | None]] = {
        "q": [a.q for a in found],
        "k": [_before_transpose(flow, a.k) for a in found],
        "v": [a.v for a in found],
        "qk": [a.qk for a in found if a.softmax != a.z],
        "scores": [flow.made_by[a.softmax][0] for a in found if a.softmax != a.z],
        "pattern": [a.pattern for a in found],
        "z": [a.z for a in found],
        "concat": joined[-1:],
    }
    made: dict[ComparedSite, _SiteTensors] = {}
    for site, indexes in places.items():
        known = [index for index in dict.fromkeys(indexes) if index is not None]
        if known:
            made[site] = _SiteTensors(tuple(flow.operations[index].output for index in known), _history(flow, known[0]))
    made["out"] = _SiteTensors((one.answer.out,), _history(flow, len(flow.operations) - 1))
    return made


def _before_transpose(flow: Dataflow, index: int | None) -> int | None:
    """What made the keys: the operand of the product may be their transpose, which stands at the line of the product."""
    if index is None or not is_transpose(flow.operations[index]):
        return index
    made = flow.made_by[index][0]
    return index if made is None else made


def _history(flow: Dataflow, index: int | None) -> tuple[Operation, ...]:
    """The operation, that which made the first of its inputs that depends on the rows, and so on."""
    found: list[Operation] = []
    while index is not None and index >= 0:
        found.append(flow.operations[index])
        index = next((made for made in flow.made_by[index] if made is not None and flow.live[made]), None)
    return tuple(found)


# ----------------------------------------------------------------------------------------------------------- the numbers


def factor_of(mine: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> float | None:
    """The factor between what two computations make at a site, 1 where that is the same; None where there is none.

    Axes may be in another order. Where heads are folded, looped over or repeated, only the numbers are compared, in any order.
    """
    if len(mine) == len(theirs) == 1 and sorted(_shape(mine[0])) == sorted(_shape(theirs[0])):
        factors = [_factor(_plain(mine[0]), turned) for turned in _turned(_plain(theirs[0]), _shape(mine[0]))]
        return 1.0 if 1.0 in factors else next((one for one in factors if one is not None), None)
    a, b = (torch.cat([_plain(tensor).flatten() for tensor in some]).sort().values for some in (mine, theirs))
    few, many = sorted((a.numel(), b.numel()))
    if not few or many % few:
        return None
    a, b = (numbers.repeat_interleave(many // numbers.numel()) for numbers in (a, b))
    return _factor(a, b)


def _plain(tensor: Tensor) -> Tensor:
    """In float64 on the CPU without axes of size 1, masked numbers as −∞."""
    numbers = tensor.detach().to("cpu", torch.float64).squeeze()
    return numbers.masked_fill(numbers < HIDDEN, -math.inf)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.squeeze().shape)


def _turned(tensor: Tensor, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """The tensor with its axes in every order that gives a shape."""
    for order in itertools.permutations(range(tensor.ndim)):
        if tuple(tensor.shape[axis] for axis in order) == shape:
            yield tensor.permute(order)


def _factor(mine: Tensor, theirs: Tensor) -> float | None:
    if not torch.equal(mine.isfinite(), theirs.isfinite()):
        return None
    a, b = mine[mine.isfinite()], theirs[theirs.isfinite()]
    largest = max((t.abs().max().item() for t in (a, b) if t.numel()), default=0.0)
    if largest == 0.0 or (a - b).abs().max().item() <= TOLERANCE * largest:
        return 1.0
    factor = ((a * b).sum() / b.square().sum().clamp(min=1e-300)).item()
    return factor if factor and (a - factor * b).abs().max().item() <= TOLERANCE * a.abs().max().item() else None
