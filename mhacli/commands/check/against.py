"""Compares two implementations of attention with the same weights and inputs, and finds the first difference."""

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

from mhacli.attention.mistakes.stages import Projection
from mhacli.commands.check.candidates import head_counts, widest
from mhacli.commands.check.inputs import (
    HIDDEN,
    TOLERANCE,
    arguments_without_effect,
    max_error,
    output_for,
    randomised,
)
from mhacli.commands.check.result import CheckRequest, Examination, Finding, FirstDifference, OutputComparison
from mhacli.errors import MhaError
from mhacli.io.data import finite
from mhacli.usercode.arguments import parameters_of, role_of
from mhacli.usercode.build import is_factory
from mhacli.usercode.call.convention import CallMasks
from mhacli.usercode.call.user_attention import UserAttention, drawer_of, inputs_for
from mhacli.usercode.inputs import cast, cast_copy
from mhacli.usercode.process import SourceLine, Stage
from mhacli.usercode.projections import ProjectionReading, Widths, parts_of, projection_readings
from mhacli.usercode.target import Choice, TargetRequest, find_target
from mhacli.usercode.trace.dataflow import Dataflow, is_transpose
from mhacli.usercode.trace.trace import WatchedCall, watched
from mhacli.usercode.types import Inputs, MaskForm, Operation
from mhacli.usercode.user_module import arguments_of, load_user_attention

_ARGUMENT_OPTION = re.compile(r"--(?=(call-)?arg\b)")
_SIZES = ("d_model", "n_heads", "n_kv_heads", "d_head", "d_v")
"""Sizes that the second implementation gets too if the first has them by default, because inputs must fit both."""
_MOST_TRANSFERS = 24
"""The most ways to copy weights to try."""


@dataclass(frozen=True)
class ErrorSummary:
    """The difference of two outputs for one input, with its tolerance. `inputs` are the input named `case`, `forms` the forms
    of its masks."""

    case: str
    difference: float
    tolerance: float
    shape: tuple[int, ...] = ()
    inputs: Inputs | None = None
    forms: tuple[CallMasks, CallMasks] = (CallMasks(), CallMasks())

    @property
    def ok(self) -> bool:
        """Whether the difference is within rounding."""
        return self.difference <= self.tolerance


def compare(request: CheckRequest, stage: Stage) -> Examination:
    """Compares two implementations. Raises `MhaError` if one cannot be built or called, or if no input fits both."""
    assert request.against is not None
    first = load_user_attention(request.of, stage)
    second = _other(request.against, _arguments_of_first(first), stage)
    _require_comparable(first, second, request)
    stage(f"comparing {request.of.target} with {request.against.target}", limited=False)
    best: list[ErrorSummary] = []
    weights_choice, pair = Choice("weights", "there are no weights to copy"), (first, second)
    for copied_first, copied_second, choice in _pairs(first, second, request):
        gaps = list(_gaps(copied_first, copied_second, request.of.seed))
        if not best or _worst(gaps) < _worst(best):
            best, weights_choice, pair = gaps, choice, (copied_first, copied_second)
        if all(gap.ok for gap in gaps):
            break
    departure = _first_difference(best, pair, request.of.seed)
    worst = max(best, key=_relative_error)
    findings = _findings(best, pair, request, departure)
    return Examination(
        verdict="wrong" if findings else "right",
        target=request.of.target,
        called=first.described,
        arguments=arguments_of(first.built),
        findings=findings,
        departure=departure,
        choices=(
            weights_choice,
            Choice("built", f"the other is {_built(second)}"),
            Choice("called", f"the other is called {second.described}"),
        ),
        probes=(),
        comparison=OutputComparison(
            request.against.target,
            str(first.dtype).removeprefix("torch."),
            len(best),
            finite(worst.difference),
            worst.tolerance,
        ),
        against=request.against.target,
        not_examined=tuple(
            dict.fromkeys(name for subject in (first, second) for name in subject.untried if name not in subject.unread)
        ),
        notes=tuple(
            f"{target.target}: {note}"
            for target, subject in ((request.of, first), (request.against, second))
            for note in arguments_without_effect(subject)
        ),
    )


def _arguments_of_first(subject: UserAttention) -> tuple[tuple[str, str], ...]:
    """The arguments of the first that the second gets too: given and guessed ones, and every size."""
    return tuple(
        (argument.name, argument.value)
        for argument in arguments_of(subject.built)
        if argument.origin != "default" or (role_of(argument.name) in _SIZES and argument.value.isdigit())
    )


def _other(request: TargetRequest, first_arguments: tuple[tuple[str, str], ...], stage: Stage) -> UserAttention:
    """The second implementation, ready to be called. Raises `MhaError` that names the `--against-` options."""
    try:
        return load_user_attention(_with_its_names(request, first_arguments, stage), stage)
    except MhaError as fault:
        fault.message = _ARGUMENT_OPTION.sub("--against-", fault.message)
        fault.hint = fault.hint and _ARGUMENT_OPTION.sub("--against-", fault.hint)
        raise


def _with_its_names(
    request: TargetRequest, first_arguments: tuple[tuple[str, str], ...], stage: Stage
) -> TargetRequest:
    """The request with the first's arguments under the second's names, such as `num_heads` for `n_heads`. Arguments without
    such a name are dropped, and the second's own arguments have priority."""
    stage(f"importing {request.target}")
    thing = find_target(request.target).thing
    is_built = inspect.isclass(thing) or is_factory(thing, dict(request.arguments))
    names = [p.name for p in parameters_of(thing).named] if is_built else []
    roles = {role: name for name in reversed(names) if (role := role_of(name)) is not None}
    renamed = []
    for name, value in first_arguments:
        role = role_of(name)
        target_name = name if name.partition(".")[0] in names else None if role is None else roles.get(role)
        renamed += [] if target_name is None else [(target_name, value)]
    return replace(request, arguments=tuple((dict(renamed) | dict(request.arguments)).items()))


def _built(subject: UserAttention) -> str:
    arguments = [argument for argument in arguments_of(subject.built) if argument.origin != "default"]
    return f"{subject.built.name}({', '.join(f'{argument.name}={argument.value}' for argument in arguments)})"


def _require_comparable(first: UserAttention, second: UserAttention, request: CheckRequest) -> None:
    """Raises `MhaError` if no input fits both."""
    assert request.against is not None
    if first.is_function != second.is_function:
        raise MhaError(
            "cannot compare the two: one projects token vectors, the other takes q, k and v as they are",
            code="cannot-compare",
        )
    if not first.is_function and first.sizes.d_in != second.sizes.d_in:
        raise MhaError(
            f"cannot compare the two: {request.of.target} takes vectors of width {first.sizes.d_in}, {request.against.target} of "
            f"width {second.sizes.d_in}",
            hint="--arg sets an argument of both, by the name that each has for it; --against-arg NAME=VALUE of the second alone",
            code="cannot-compare",
        )


# ------------------------------------------------------------------------------------------------------------- the weights


def _pairs(
    first: UserAttention, second: UserAttention, request: CheckRequest
) -> Iterator[tuple[UserAttention, UserAttention, Choice]]:
    """Both with the same weights, in every possible correspondence."""
    first_module, second_module = first.built.module, second.built.module
    if first_module is None or second_module is None or not list(second_module.parameters()):
        yield first, second, Choice("weights", "there are no weights to copy")
        return
    try:
        yield from _with_copied_weights(first, second, request)
    except MhaError:  # for example, the second lacks a bias: its weights may still fit the first
        yield from ((first, second, choice) for second, first, choice in _with_copied_weights(second, first, request))


def _with_copied_weights(
    first: UserAttention, second: UserAttention, request: CheckRequest
) -> Iterator[tuple[UserAttention, UserAttention, Choice]]:
    """Both with random weights of the first."""
    assert first.built.module is not None
    assert second.built.module is not None
    source = cast(randomised(first.built.module, request.of.seed), first.dtype)
    for module, choice in _weight_copies(source, second.built.module, first, second, request):
        yield first.of(source, first.dtype), second.of(cast(module, second.dtype), second.dtype), choice


def _weight_copies(
    source: nn.Module, target: nn.Module, first: UserAttention, second: UserAttention, request: CheckRequest
) -> Iterator[tuple[nn.Module, Choice]]:
    shapes = {name: tuple(p.shape) for name, p in source.named_parameters()}
    if shapes == {name: tuple(p.shape) for name, p in target.named_parameters()}:
        module = cast_copy(target, torch.float64)
        module.load_state_dict({**module.state_dict(), **{n: p.detach() for n, p in source.named_parameters()}})
        yield module, Choice("weights", "weights are copied by their names")
        return
    count = 0
    for first_reading, second_reading in product(
        _readings(source, first, request), _readings(_numbered(target), second, request)
    ):
        module = cast_copy(target, torch.float64)
        if count < _MOST_TRANSFERS and _copy_projections(first_reading, second_reading, module):
            count += 1
            yield module, Choice("weights", f"weights are copied: {', '.join(second_reading.parts)}")
    if not count:
        raise MhaError(
            "cannot give both the same weights: the names or shapes of their projections do not correspond",
            hint="projections are recognised by names such as q_proj, wk, qkv, out_proj",
            code="cannot-compare",
        )


def _readings(module: nn.Module, subject: UserAttention, request: CheckRequest) -> list[ProjectionReading]:
    parts = parts_of(module, {})
    counts = head_counts(subject.built, module, request, parts_width=widest(parts))
    widths = [Widths(subject.sizes.d_in, subject.sizes.d_context, *count) for count in counts[:1]]
    return [reading for width in widths for reading in projection_readings(parts, width)][:_MOST_TRANSFERS]


def _numbered(module: nn.Module) -> nn.Module:
    """A copy in which each parameter cell holds its number, so that a reading shows the location of each cell."""
    numbered, start = cast_copy(module, torch.float64), 1  # 0 marks zeros that a reading inserted
    for parameter in numbered.parameters():
        parameter.data = torch.arange(start, start + parameter.numel(), dtype=torch.float64).reshape(parameter.shape)
        start += parameter.numel()
    return numbered


def _copy_projections(source: ProjectionReading, target: ProjectionReading, module: nn.Module) -> bool:
    """Copies the projections of one reading into the cells of another. False if shapes do not fit."""
    flat = torch.cat([parameter.data.flatten() for parameter in module.parameters()])
    for name in ("q", "k", "v", "out"):
        projection, cells = getattr(source.weights, name), getattr(target.weights, name)
        if (projection is None) != (cells is None):
            return False
        if projection is not None and not _write(projection, cells, flat):
            return False
    start = 0
    for parameter in module.parameters():
        parameter.data = flat[start : start + parameter.numel()].reshape(parameter.shape)
        start += parameter.numel()
    return True


def _write(projection: Projection, cells: Projection, flat: Tensor) -> bool:
    """Writes a projection to its cells. False if the shapes differ or it cannot be stored there."""
    if projection.weight.shape != cells.weight.shape or not _write_cells(projection.weight, cells.weight, flat):
        return False
    if cells.bias is None:
        return projection.bias is None or not bool(projection.bias.any())
    return _write_cells(torch.zeros_like(cells.bias) if projection.bias is None else projection.bias, cells.bias, flat)


def _write_cells(values: Tensor, cells: Tensor, flat: Tensor) -> bool:
    """Writes numbers to the cells that `cells` numbers from 1. False if a number for cell 0 is not zero, or if one cell would
    hold two numbers."""
    positions, numbers = cells.detach().flatten().long(), values.detach().flatten().to(torch.float64)
    if bool(numbers[positions == 0].any()):
        return False
    positions, numbers = positions[positions > 0] - 1, numbers[positions > 0]
    flat[positions] = numbers
    return torch.equal(flat[positions], numbers)


# -------------------------------------------------------------------------------------------------------------- the outputs


def _gaps(first: UserAttention, second: UserAttention, seed: int) -> Iterator[ErrorSummary]:
    """The differences for inputs that both take: self-attention, a context, masks and padding."""
    common = with_common_sizes(first, second)
    drawer = drawer_of(common, seed)
    yield _gap("self-attention", first, second, drawer.inputs(with_context=False))
    if first.takes_context and second.takes_context:
        yield _gap("fewer queries than keys", first, second, drawer.inputs(with_context=True))
    inputs = drawer.inputs(with_context=first.takes_context and second.takes_context)
    if first.mask_forms and second.mask_forms:
        masked = inputs._replace(allowed=drawer.allowed(inputs)[:1])
        yield _smallest_gap("a mask", first, second, masked, first.mask_forms, second.mask_forms, "mask")
    if first.padding_forms and second.padding_forms:
        padded = inputs._replace(real=drawer.real(inputs))
        yield _smallest_gap("padding", first, second, padded, first.padding_forms, second.padding_forms, "padding")


def with_common_sizes(first: UserAttention, second: UserAttention) -> UserAttention:
    """The first attention with sizes that both accept."""
    a, b = first.sizes, second.sizes
    sizes = replace(a, batch=min(a.batch, b.batch), q_len=min(a.q_len, b.q_len), k_len=min(a.k_len, b.k_len))
    return replace(
        first, sizes=sizes, n_heads=min(first.n_heads, second.n_heads), n_rows=min(first.n_rows, second.n_rows)
    )


def _smallest_gap(
    name: str,
    first: UserAttention,
    second: UserAttention,
    inputs: Inputs,
    first_forms: Sequence[MaskForm],
    second_forms: Sequence[MaskForm],
    argument: str,
) -> ErrorSummary:
    """The smallest difference over their mask forms, because the meaning of True is a choice."""
    gaps = [
        _gap(name, first, second, inputs, (CallMasks(**{argument: a}), CallMasks(**{argument: b})))
        for a, b in product(first_forms[:4], second_forms[:4])
    ]
    return min(gaps, key=lambda gap: gap.difference)


def _gap(
    name: str,
    first: UserAttention,
    second: UserAttention,
    inputs: Inputs,
    forms: tuple[CallMasks, CallMasks] = (CallMasks(), CallMasks()),
) -> ErrorSummary:
    try:
        a, b = output_for(first, inputs, *forms[0]), output_for(second, inputs, *forms[1])
    except Exception:  # the form does not fit these sizes
        return ErrorSummary(name, math.inf, TOLERANCE)
    if inputs.real is not None and inputs.real.shape[1] == a.shape[-2] and a.shape == b.shape and a.ndim == 3:
        a, b = a[inputs.real], b[inputs.real]  # padded positions have no defined output
    finite = a[a.isfinite()]
    tolerance = TOLERANCE * (finite.abs().max().item() if finite.numel() else 1.0)
    error = max_error(a, b)
    return ErrorSummary(name, error, tolerance, tuple(b.shape) if math.isinf(error) else (), inputs, forms)


def _worst(gaps: Sequence[ErrorSummary]) -> float:
    return max(_relative_error(gap) for gap in gaps)


def _relative_error(gap: ErrorSummary) -> float:
    return gap.difference / gap.tolerance


def _first_difference(
    gaps: Sequence[ErrorSummary], pair: tuple[UserAttention, UserAttention], seed: int
) -> FirstDifference | None:
    """The first difference inside, for the first input with different outputs; None if it cannot be found."""
    for gap in gaps:
        if not gap.ok and gap.inputs is not None:
            try:
                return departure(*pair, gap.inputs, gap.forms, seed)
            except Exception:  # the call cannot be recorded
                return None
    return None


def _findings(
    gaps: Sequence[ErrorSummary],
    pair: tuple[UserAttention, UserAttention],
    request: CheckRequest,
    departure: FirstDifference | None,
) -> tuple[Finding, ...]:
    failing = [gap for gap in gaps if not gap.ok]
    if not failing:
        return ()
    assert request.against is not None
    evidence = [f"{gap.case}: {_words(gap)}" for gap in failing]
    example = _smallest(*pair, request.of.seed)
    evidence += [] if example is None else [example]
    evidence += [f"{gap.case}: the same" for gap in gaps if gap.ok]
    return (
        Finding(
            code="differs",
            message=f"{request.of.target} and {request.against.target} give different outputs with the same weights",
            evidence="\n".join(evidence),
            fix=_fix(request, departure),
            effect="they are not the same layer",
        ),
    )


def _fix(request: CheckRequest, departure: FirstDifference | None) -> str:
    """Advice on where to look."""
    if departure is not None:
        return f"compare the two lines that compute {departure.site}"
    assert request.against is not None
    return f"compare mha trace {request.of.target} with mha trace {request.against.target}, step by step"


def _smallest(first: UserAttention, second: UserAttention, seed: int) -> str | None:
    """The smallest of a few small inputs with different outputs, as text."""
    for batch, length in ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)):
        inputs = drawer_of(with_common_sizes(first, second), seed).inputs(with_context=False, q_len=length, batch=batch)
        gap = _gap("", first, second, inputs)
        if not gap.ok and math.isfinite(gap.difference):
            rows = f"{batch} sequence{'s' * (batch > 1)} of {length} token{'s' * (length > 1)}"
            return f"smallest example, {rows}: they differ by {gap.difference:.4g}"
    return None


def _words(gap: ErrorSummary) -> str:
    if math.isinf(gap.difference):
        return f"different shapes, or NaN in one of them{f', {list(gap.shape)}' if gap.shape else ''}"
    return f"largest difference {gap.difference:.4g}"


# ------------------------------------------------------------------------------------------------------- first difference


ComparedSite = Literal["q", "k", "v", "qk", "scores", "pattern", "z", "concat", "out"]
_SCORING: tuple[ComparedSite, ...] = ("q", "k", "qk", "scores")
_BEFORE: tuple[ComparedSite, ...] = ("q", "k", "v", "qk", "scores", "pattern", "z")
_AFTER: tuple[ComparedSite, ...] = ("concat", "out")


@dataclass(frozen=True)
class _SiteTensors:
    """The tensors at a site, one for each iteration over heads, and the operations that led to the first, the last one
    first."""

    tensors: tuple[Tensor, ...]
    history: tuple[Operation, ...]


def departure(
    first: UserAttention, second: UserAttention, inputs: Inputs, forms: tuple[CallMasks, CallMasks], seed: int
) -> FirstDifference | None:
    """The first site, in the order of execution, from which the two differ; None if their sites cannot be found. Raises what
    either raises.

    A difference that a later site cancels does not count, such as scaled queries instead of scaled scores. If scores differ by
    a factor, the site is where the factor appears.
    """
    first_sites, second_sites = (
        _sites(watched(subject, inputs_for(subject, inputs), seed, mask=form.mask, padding=form.padding))
        for subject, form in zip((first, second), forms, strict=True)
    )
    factors = {
        site: factor_of(first_sites[site].tensors, second_sites[site].tensors)
        for site in first_sites
        if site in second_sites
    }
    site = first_apart(factors)
    if site is None:
        return None
    before = [name for name in list(factors)[: list(factors).index(site)] if factors[name] == 1.0]
    first_operation, second_operation = _makers(first_sites[site], second_sites[site])
    lines = [SourceLine() if operation is None else operation.at for operation in (first_operation, second_operation)]
    return FirstDifference(site, before[-1] if before else None, *lines[0], *lines[1])


def _makers(first: _SiteTensors, second: _SiteTensors) -> tuple[Operation | None, Operation | None]:
    """The operations that produce a site. Operations at a common line, such as in a shared helper, are skipped."""
    for first_operation, second_operation in zip(first.history, second.history, strict=False):
        if (first_operation.file, first_operation.line) != (second_operation.file, second_operation.line):
            return first_operation, second_operation
    return next(iter(first.history), None), next(iter(second.history), None)


def first_apart(factors: Mapping[ComparedSite, float | None]) -> ComparedSite | None:
    """The site at which two computations diverge. Each factor is 1 for equal tensors, another number for a multiple, None for
    different tensors; sites that one of the two lacks are absent.

    >>> first_apart({"q": 0.5, "qk": 0.5, "scores": 1.0, "pattern": None, "z": None, "out": None})
    'pattern'
    """

    def differs(site: ComparedSite) -> bool:
        return site in factors and factors[site] != 1.0

    if factors.get("z") == 1.0:
        return next((site for site in _AFTER if differs(site)), None)
    for site in _BEFORE:
        if _reaches_softmax(site, factors) if site in _SCORING else differs(site):
            return site
    return next((site for site in _AFTER if differs(site)), None)


def _reaches_softmax(site: ComparedSite, factors: Mapping[ComparedSite, float | None]) -> bool:
    """Whether a difference before the softmax persists in its input, as a difference or as the same factor."""
    if factors.get(site, 1.0) == 1.0 or factors.get("pattern") == 1.0:
        return False
    final_factor = factors.get("scores", factors.get("qk", math.nan))
    factor = factors[site]
    if factor is None or final_factor is None:
        return factor is None and final_factor != 1.0
    return math.isclose(factor, final_factor, rel_tol=1e-3) if not math.isnan(final_factor) else False


# ----------------------------------------------------------------------------------------------------------------- sites


def _sites(run: WatchedCall) -> dict[ComparedSite, _SiteTensors]:
    """The tensors of each known site, in the order of execution."""
    flow, attentions = run.flow, run.roles.attentions
    joined: list[int | None] = [index for index, site in run.roles.sites.items() if site == "concat"]
    site_indexes: dict[ComparedSite, list[int | None]] = {
        "q": [a.q for a in attentions],
        "k": [_before_transpose(flow, a.k) for a in attentions],
        "v": [a.v for a in attentions],
        "qk": [a.qk for a in attentions if a.softmax != a.z],
        "scores": [flow.made_by[a.softmax][0] for a in attentions if a.softmax != a.z],
        "pattern": [a.pattern for a in attentions],
        "z": [a.z for a in attentions],
        "concat": joined[-1:],
    }
    tensors: dict[ComparedSite, _SiteTensors] = {}
    for site, indexes in site_indexes.items():
        known_indexes = [index for index in dict.fromkeys(indexes) if index is not None]
        if known_indexes:
            tensors[site] = _SiteTensors(
                tuple(flow.operations[index].output for index in known_indexes), _history(flow, known_indexes[0])
            )
    tensors["out"] = _SiteTensors((run.output.out,), _history(flow, len(flow.operations) - 1))
    return tensors


def _before_transpose(flow: Dataflow, index: int | None) -> int | None:
    """The operation that produced the keys, before a transpose on the line of the product."""
    if index is None or not is_transpose(flow.operations[index]):
        return index
    producer = flow.made_by[index][0]
    return index if producer is None else producer


def _history(flow: Dataflow, index: int | None) -> tuple[Operation, ...]:
    """The operation, the producer of its first input that depends on the subject's inputs, and so on."""
    operations: list[Operation] = []
    while index is not None and index >= 0:
        operations.append(flow.operations[index])
        index = next(
            (producer for producer in flow.made_by[index] if producer is not None and flow.live[producer]), None
        )
    return tuple(operations)


# --------------------------------------------------------------------------------------------------------------- factors


def factor_of(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> float | None:
    """The factor between the tensors of two computations, 1 if they are equal; None if there is none.

    The order of axes may differ. If heads are merged, looped over or repeated, only the sorted numbers are compared.
    """
    if len(first) == len(second) == 1 and sorted(_shape(first[0])) == sorted(_shape(second[0])):
        factors = [
            _factor(_plain(first[0]), permuted) for permuted in _permutations(_plain(second[0]), _shape(first[0]))
        ]
        return 1.0 if 1.0 in factors else next((factor for factor in factors if factor is not None), None)
    a, b = (torch.cat([_plain(tensor).flatten() for tensor in tensors]).sort().values for tensors in (first, second))
    few, many = sorted((a.numel(), b.numel()))
    if not few or many % few:
        return None
    a, b = (numbers.repeat_interleave(many // numbers.numel()) for numbers in (a, b))
    return _factor(a, b)


def _plain(tensor: Tensor) -> Tensor:
    """The tensor in float64 on the CPU without axes of size 1, with masked numbers as −∞."""
    numbers = tensor.detach().to("cpu", torch.float64).squeeze()
    return numbers.masked_fill(numbers < HIDDEN, -math.inf)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.squeeze().shape)


def _permutations(tensor: Tensor, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """The tensor with its axes in every order that gives this shape."""
    for order in itertools.permutations(range(tensor.ndim)):
        if tuple(tensor.shape[axis] for axis in order) == shape:
            yield tensor.permute(order)


def _factor(first: Tensor, second: Tensor) -> float | None:
    if not torch.equal(first.isfinite(), second.isfinite()):
        return None
    a, b = first[first.isfinite()], second[second.isfinite()]
    largest = max((t.abs().max().item() for t in (a, b) if t.numel()), default=0.0)
    if largest == 0.0 or (a - b).abs().max().item() <= TOLERANCE * largest:
        return 1.0
    factor = ((a * b).sum() / b.square().sum().clamp(min=1e-300)).item()
    return factor if factor and (a - factor * b).abs().max().item() <= TOLERANCE * a.abs().max().item() else None
