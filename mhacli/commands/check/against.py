"""Compares two implementations of attention with the same weights and inputs, and finds the first difference."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from mhacli.attention.mistakes.stages import Projection
from mhacli.commands.check.candidates import head_counts
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
from mhacli.usercode.build import arguments_of, cast, cast_copy, is_factory, load_built, parameters_of
from mhacli.usercode.find_call import find_user_attention
from mhacli.usercode.graph import recorded
from mhacli.usercode.process import Stage
from mhacli.usercode.projections import ProjectionReading, Widths, parts_of, projection_readings
from mhacli.usercode.roles import role_of
from mhacli.usercode.target import Choice, TargetRequest, find_target
from mhacli.usercode.user_attention import Inputs, MaskForm, UserAttention

_ARGUMENT_OPTION = re.compile(r"--(?=(call-)?arg\b)")
_SIZES = ("d_model", "n_heads", "n_kv_heads", "d_head", "d_v")
"""Sizes that the second implementation gets too if the first has them by default, because inputs must fit both."""
_MOST_READINGS = 5
"""The most ways to read the weights of one module."""
Pair = tuple[UserAttention, UserAttention]
_NOT_COMPARABLE = "different shapes, or NaN in one of them"
Masks = dict[str, MaskForm]
_NO_MASKS: tuple[Masks, Masks] = ({}, {})


class Gap(NamedTuple):
    """The difference of two outputs for the input named `case`. `masks` are the forms of its masks for each of the two."""

    case: str
    difference: float
    tolerance: float
    inputs: Inputs
    masks: tuple[Masks, Masks]

    @property
    def ok(self) -> bool:
        """Whether the difference is within rounding."""
        return self.difference <= self.tolerance


def compare(request: CheckRequest, stage: Stage) -> Examination:
    """Compares two implementations. Raises `MhaError` if one cannot be built or called, or if no input fits both."""
    assert request.against is not None
    targets = (request.of.target, request.against.target)
    first = find_user_attention(load_built(request.of, stage), request.of)
    second = _other(request.against, first, stage)
    if _takes(first) != _takes(second):
        raise MhaError(
            f"cannot compare the two: {targets[0]} takes {_takes(first)}, {targets[1]} takes {_takes(second)}",
            hint="--arg sets an argument of both, by the name that each has for it; --against-arg NAME=VALUE of the second alone",
            code="cannot-compare",
        )
    stage(f"comparing {targets[0]} with {targets[1]}", limited=False)
    gaps, pair, weights = _compared(_with_same_weights(first, second, request), request.of.seed)
    failing = next((gap for gap in gaps if not gap.ok), None)
    departure = None if failing is None else _departure(failing, pair, request.of.seed)
    findings = () if failing is None else (_finding(gaps, pair, request, departure),)
    worst = max(gaps, key=lambda gap: gap.difference / gap.tolerance)
    return Examination(
        verdict="wrong" if findings else "right",
        target=targets[0],
        called=first.described,
        arguments=arguments_of(first.built),
        findings=findings,
        departure=departure,
        choices=(
            weights,
            Choice("built", f"the other is {_built(second)}"),
            Choice("called", f"the other is called {second.described}"),
        ),
        probes=(),
        comparison=OutputComparison(
            targets[1],
            str(first.dtype).removeprefix("torch."),
            len(gaps),
            finite(worst.difference),
            worst.tolerance,
        ),
        against=targets[1],
        not_examined=tuple(
            dict.fromkeys(name for subject in (first, second) for name in subject.untried if name not in subject.unread)
        ),
        notes=tuple(
            f"{target}: {note}"
            for target, subject in zip(targets, (first, second), strict=True)
            for note in arguments_without_effect(subject)
        ),
    )


def _compared(pairs: Iterable[tuple[Pair, Choice]], seed: int) -> tuple[list[Gap], Pair, Choice]:
    """The differences of the first pair without any, else of the first pair."""
    first: tuple[list[Gap], Pair, Choice] | None = None
    for pair, choice in pairs:
        gaps = list(_gaps(*pair, seed))
        if all(gap.ok for gap in gaps):
            return gaps, pair, choice
        first = first or (gaps, pair, choice)
    assert first is not None, "weights are copied in one way at least"
    return first


def _other(request: TargetRequest, first: UserAttention, stage: Stage) -> UserAttention:
    """The second implementation, ready to be called. Raises `MhaError` that names the `--against-` options."""
    stage(f"importing {request.target}")
    try:
        request = _with_arguments_of(first, request)
        return find_user_attention(load_built(request, stage), request)
    except MhaError as fault:
        fault.message = _ARGUMENT_OPTION.sub("--against-", fault.message)
        fault.hint = fault.hint and _ARGUMENT_OPTION.sub("--against-", fault.hint)
        raise


def _with_arguments_of(first: UserAttention, request: TargetRequest) -> TargetRequest:
    """The request with the given and guessed arguments and all sizes of the first, under the second's names, such as `num_heads`
    for `n_heads`. Arguments without such a name are dropped, and the second's own arguments have priority."""
    thing = find_target(request.target)
    is_built = inspect.isclass(thing) or is_factory(thing, dict(request.arguments))
    names = list(parameters_of(thing)) if is_built else []
    roles = {role_of(name): name for name in reversed(names)}
    renamed = {}
    for argument in arguments_of(first.built):
        role = role_of(argument.name)
        is_size = role in _SIZES and argument.value.isdigit()
        if argument.origin == "default" and not is_size:
            continue
        if argument.name.partition(".")[0] in names:
            renamed[argument.name] = argument.value
        elif role is not None and role in roles:
            renamed[roles[role]] = argument.value
    return replace(request, arguments=tuple({**renamed, **dict(request.arguments)}.items()))


def _built(subject: UserAttention) -> str:
    arguments = [argument for argument in arguments_of(subject.built) if argument.origin != "default"]
    return f"{subject.built.name}({', '.join(f'{argument.name}={argument.value}' for argument in arguments)})"


def _takes(subject: UserAttention) -> str:
    return "q, k and v as they are" if subject.is_function else f"vectors of width {subject.sizes.d_in}"


# ------------------------------------------------------------------------------------------------------------- the weights


def _with_same_weights(
    first: UserAttention, second: UserAttention, request: CheckRequest
) -> Iterator[tuple[Pair, Choice]]:
    """Both with the same random weights, in every possible correspondence. Raises `MhaError` if there is none."""
    first_module, second_module = first.built.module, second.built.module
    if first_module is None or second_module is None or not list(second_module.parameters()):
        yield (first, second), Choice("weights", "there are no weights to copy")
        return
    random = cast_copy(randomised(first_module, request.of.seed), torch.float64, "cpu")
    other = cast_copy(second_module, torch.float64, "cpu")
    if _shapes(random) == _shapes(other):
        other.load_state_dict(dict(random.named_parameters()), strict=False)
        yield _filled((first, second), (random, other)), Choice("weights", "weights are copied by their names")
        return
    has_copies = False
    for cells, other_cells in itertools.product(_readings(random, first, request), _readings(other, second, request)):
        modules = cast_copy(random, torch.float64), cast_copy(other, torch.float64)
        if _equalise(modules, (cells, other_cells)):
            has_copies = True
            yield (
                _filled((first, second), modules),
                Choice("weights", f"weights are copied: {', '.join(other_cells.parts)}"),
            )
    if not has_copies:
        raise MhaError(
            "cannot give both the same weights: the names or shapes of their projections do not correspond",
            hint="projections are recognised by names such as q_proj, wk, qkv, out_proj",
            code="cannot-compare",
        )


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}


def _filled(pair: Pair, modules: tuple[nn.Module, nn.Module]) -> Pair:
    """Both with other modules."""
    first, second = (
        subject.of(cast(module, subject.dtype, subject.device), subject.dtype)
        for subject, module in zip(pair, modules, strict=True)
    )
    return first, second


def _readings(module: nn.Module, subject: UserAttention, request: CheckRequest) -> list[ProjectionReading]:
    """The readings of a copy in which each parameter cell holds its number, so that they show the location of each cell."""
    numbered = cast_copy(module, torch.float64)
    count = sum(parameter.numel() for parameter in numbered.parameters())
    numbers = torch.arange(1, count + 1, dtype=torch.float64)  # 0 marks zeros that a reading inserts
    vector_to_parameters(numbers, numbered.parameters())
    parts = parts_of(numbered, {})
    heads = head_counts(subject.built, module, request, parts=parts)[0]
    widths = Widths(subject.sizes.d_in, subject.sizes.d_context, *heads)
    return list(projection_readings(parts, widths))[:_MOST_READINGS]


def _equalise(modules: tuple[nn.Module, nn.Module], cells: tuple[ProjectionReading, ProjectionReading]) -> bool:
    """Copies the projections of the first to the cells of the second. What one of them has no cell for, such as a bias, becomes
    zero in both, and what it has one cell for becomes equal in both. False if the shapes differ or cells do not fit."""
    first, second = (
        torch.cat([torch.zeros(1, dtype=torch.float64), parameters_to_vector(module.parameters()).detach()])
        for module in modules
    )
    for name in ("q", "k", "v", "out"):
        projections = [getattr(reading.weights, name) for reading in cells]
        if projections == [None, None]:
            continue
        if None in projections or projections[0].weight.shape != projections[1].weight.shape:
            return False
        places, other_places = map(_places, projections)
        second[other_places] = first[places]
        second[0] = 0
        first[places] = second[other_places]
        first[0] = 0
        if not torch.equal(first[places], second[other_places]):
            return False
    for module, numbers in zip(modules, (first, second), strict=True):
        vector_to_parameters(numbers[1:], module.parameters())
    return True


def _places(cells: Projection) -> Tensor:
    """The numbers of the cells of a weight and its bias, 0 where there is none."""
    weight, bias = cells.weight.detach(), cells.bias
    places = [weight.flatten(), weight.new_zeros(len(weight)) if bias is None else bias.detach()]
    return torch.cat(places).long()


# -------------------------------------------------------------------------------------------------------------- the outputs


def _gaps(first: UserAttention, second: UserAttention, seed: int) -> Iterator[Gap]:
    """The differences for inputs that both take: self-attention, a context, masks and padding."""
    drawer = _with_common_sizes(first, second).drawer(seed)
    pair, has_context = (first, second), first.takes_context and second.takes_context
    yield _gap("self-attention", pair, drawer.inputs(with_context=False))
    if has_context:
        yield _gap("fewer queries than keys", pair, drawer.inputs(with_context=True))
    inputs = drawer.inputs(with_context=has_context)
    masked, padded = inputs._replace(allowed=drawer.allowed(inputs)[:1]), inputs._replace(real=drawer.real(inputs))
    masks = [
        _gap("a mask", pair, masked, ({"mask": form}, {"mask": other}))
        for form, other in itertools.product(first.mask_forms[:4], second.mask_forms[:4])
    ]
    padding = [
        _gap("padding", pair, padded, ({"padding": form}, {"padding": other}))
        for form, other in itertools.product(first.padding_forms[:4], second.padding_forms[:4])
    ]
    for gaps in (masks, padding):
        if gaps:  # the smallest, because the meaning of True is a choice
            yield min(gaps, key=lambda gap: gap.difference)


def _with_common_sizes(first: UserAttention, second: UserAttention) -> UserAttention:
    """The first attention with sizes that both accept."""
    a, b = first.sizes, second.sizes
    names = ("batch", "q_len", "k_len", "n_heads")
    sizes = a._replace(**{name: min(getattr(a, name), getattr(b, name)) for name in names})
    slots = min(first, second, key=lambda attention: attention.n_rows).slots
    return replace(first, sizes=sizes, slots=slots)


def _gap(name: str, pair: Pair, inputs: Inputs, masks: tuple[Masks, Masks] = _NO_MASKS) -> Gap:
    try:
        a, b = (output_for(subject, inputs, **forms) for subject, forms in zip(pair, masks, strict=True))
    except Exception:  # the form does not fit these sizes
        return Gap(name, math.inf, TOLERANCE, inputs, masks)
    if inputs.real is not None and inputs.real.shape[1] == a.shape[-2] and a.shape == b.shape and a.ndim == 3:
        a, b = a[inputs.real], b[inputs.real]  # padded positions have no defined output
    return Gap(name, max_error(a, b), _tolerance(a), inputs, masks)


def _tolerance(tensor: Tensor) -> float:
    """The largest difference from a tensor that rounding explains."""
    finite_numbers = tensor[tensor.isfinite()].abs()
    return TOLERANCE * (finite_numbers.max().item() if finite_numbers.numel() else 1.0)


def _finding(gaps: Sequence[Gap], pair: Pair, request: CheckRequest, departure: FirstDifference | None) -> Finding:
    assert request.against is not None
    targets = (request.of.target, request.against.target)
    evidence = []
    for gap in gaps:
        words = f"largest difference {gap.difference:.4g}" if math.isfinite(gap.difference) else _NOT_COMPARABLE
        evidence += [] if gap.ok else [f"{gap.case}: {words}"]
    example = _smallest(pair, request.of.seed)
    evidence += [] if example is None else [example]
    evidence += [f"{gap.case}: the same" for gap in gaps if gap.ok]
    fix = f"compare mha trace {targets[0]} with mha trace {targets[1]}, step by step"
    return Finding(
        code="differs",
        message=f"{targets[0]} and {targets[1]} give different outputs with the same weights",
        evidence="\n".join(evidence),
        fix=fix if departure is None else f"compare the two lines that compute {departure.site}",
        effect="they are not the same layer",
    )


def _smallest(pair: Pair, seed: int) -> str | None:
    """The smallest of a few small inputs with different outputs, as text."""
    for batch, length in ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)):
        drawer = _with_common_sizes(*pair).drawer(seed)
        gap = _gap("", pair, drawer.inputs(with_context=False, q_len=length, batch=batch))
        if not gap.ok and math.isfinite(gap.difference):
            rows = f"{batch} sequence{'s' * (batch > 1)} of {length} token{'s' * (length > 1)}"
            return f"smallest example, {rows}: they differ by {gap.difference:.4g}"
    return None


# ------------------------------------------------------------------------------------------------------- first difference


_SITES = ("q", "k", "qk", "scores", "pattern", "v", "z", "concat", "out")
_UP_TO_A_FACTOR = ("q", "k", "qk")
"""Sites before the scale, which some apply to the queries and others to the scores."""
_INPUTS = ("q", "k", "v")
"""Sites that may agree although an earlier one of another branch does not."""


def _departure(gap: Gap, pair: Pair, seed: int) -> FirstDifference | None:
    """The first site that differs after all that are the same. None if a call cannot be recorded, or if no site differs."""
    try:
        first, second = (
            recorded(subject, gap.inputs, seed, *masks.values()).tensors_at_sites()
            for subject, masks in zip(pair, gap.masks, strict=True)
        )
    except Exception:  # the code of the user raises it
        return None
    sites = [site for site in _SITES if site in first and site in second]
    same = [
        site for site in sites if _are_same(first[site][1], second[site][1], up_to_a_factor=site in _UP_TO_A_FACTOR)
    ]
    shared = [sites.index(site) for site in same if site not in _INPUTS]
    site = next((site for site in sites[max(shared, default=-1) + 1 :] if site not in same), None)
    if site is None:
        return None
    before = [name for name in same if sites.index(name) < sites.index(site)]
    lines = (first[site][0], second[site][0])
    return FirstDifference(site, before[-1] if before else None, *lines[0], *lines[1])


def _are_same(first: Sequence[Tensor], second: Sequence[Tensor], *, up_to_a_factor: bool) -> bool:
    """Whether tensors of one site have the same rows in any order, up to rounding. The last two axes may be exchanged. Where
    heads are merged in only one of the two, their single numbers are compared."""
    layouts = [second, [tensor.mT for tensor in second]]
    widths = [{tensor.shape[-1] for tensor in (*first, *layout)} for layout in layouts]
    pairs = [(layout, width.pop()) for layout, width in zip(layouts, widths, strict=True) if len(width) == 1]
    for layout, width in pairs or [(second, 1)]:
        a, b = _sorted_rows(first, width), _sorted_rows(layout, width)
        n_rows = max(len(a), len(b))
        if n_rows % len(a) or n_rows % len(b):
            continue
        a, b = (rows.repeat_interleave(n_rows // len(rows), dim=0) for rows in (a, b))
        if up_to_a_factor:
            both = a.isfinite() & b.isfinite()
            b = b * (a[both] @ b[both] / b[both].square().sum().clamp(min=1e-300))
        if max_error(a, b) <= _tolerance(a):
            return True
    return False


def _sorted_rows(tensors: Sequence[Tensor], width: int) -> Tensor:
    """The rows of tensors in float64 on the CPU, with masked numbers as −∞, in an order that depends on their numbers alone."""
    rows = torch.cat([tensor.detach().to("cpu", torch.float64).reshape(-1, width) for tensor in tensors])
    rows = rows.masked_fill(rows < HIDDEN, -math.inf)
    weights = torch.arange(1, width + 1, dtype=torch.float64)
    return rows[(rows.nan_to_num(neginf=0.0) @ weights).argsort()]
