"""Test inputs for a user's attention, each of which shows one property, and the outputs for them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.attention.mistakes.stages import ReferenceInputs
from mhacli.commands.check.probes import Probed
from mhacli.record.checks import TOLERANCES
from mhacli.usercode.call.signature import called_function
from mhacli.usercode.call.user_attention import UserAttention, drawer_of, inputs_for
from mhacli.usercode.inputs import cast, cast_copy, seeded
from mhacli.usercode.operations import watch
from mhacli.usercode.types import Built, Inputs, MaskForm, Operation

InputKind = Literal["core", "mask", "padding", "large"]
TOLERANCE = TOLERANCES["float32"].runs
"""Relative to the largest number of the output: rounding of float32, which many modules compute with inside."""
HIDDEN = -500.0
"""Scores, or terms added to them, below this number hide a key, whichever number stands for −∞."""
LARGE_TOLERANCE = 1e-2
LARGE = 1000.0
"""Inputs times this make scores a million times as large; a number that stands for −∞ must be lower still."""


@dataclass(frozen=True)
class InputCase:
    """One input and its output `[batch, query, d_out]`, both in float64. `rows` are the inputs of the reference; `form` and
    `padding` are the forms of the masks. `counted`, bool `[batch, query]`, marks the compared rows, None for all."""

    kind: InputKind
    name: str
    rows: ReferenceInputs
    output: Tensor
    inputs: Inputs
    form: MaskForm | None = None
    padding: MaskForm | None = None
    counted: Tensor | None = None

    @property
    def tolerance(self) -> float:
        """The largest difference that counts as rounding."""
        finite = self.output[self.output.isfinite()]
        largest = finite.abs().max().item() if finite.numel() else 1.0
        return max(largest, 1e-30) * (LARGE_TOLERANCE if self.kind == "large" else TOLERANCE)


def output_for(
    subject: UserAttention, inputs: Inputs, mask: MaskForm | None = None, padding: MaskForm | None = None
) -> Tensor:
    """The subject's output in float64 on the CPU, computed in its own dtype."""
    result = subject(inputs_for(subject, inputs), mask=mask, padding=padding)
    return result.out.detach().to("cpu", torch.float64)


def rows_of(subject: UserAttention, inputs: Inputs) -> ReferenceInputs:
    """The inputs of the reference, rounded to the subject's dtype."""

    def rounded(t: Tensor) -> Tensor:
        return t.to(subject.dtype).to(torch.float64)

    queries = rounded(inputs.queries)
    keys = queries if inputs.keys is None else rounded(inputs.keys)
    return ReferenceInputs(
        queries, keys, keys if inputs.values is None else rounded(inputs.values), inputs.allowed, inputs.real
    )


def make_case(
    kind: InputKind,
    name: str,
    subject: UserAttention,
    inputs: Inputs,
    form: MaskForm | None = None,
    padding: MaskForm | None = None,
) -> InputCase:
    """The case with the subject's output. Raises what the subject raises."""
    counted = None
    if inputs.real is not None and (inputs.keys is None or inputs.real.shape[1] == inputs.queries.shape[-2]):
        counted = inputs.real
    output = output_for(subject, inputs, form, padding)
    return InputCase(kind, name, rows_of(subject, inputs), output, inputs, form, padding, counted)


def max_error(left: Tensor, right: Tensor) -> float:
    """The largest difference; infinite if shapes or NaN positions differ, 0 if everything is NaN."""
    if left.shape != right.shape or not torch.equal(left.isnan(), right.isnan()):
        return math.inf
    difference = torch.where(left == right, 0.0, (left - right).abs())[~left.isnan()]
    return difference.max().item() if difference.numel() else 0.0


def arguments_without_effect(subject: UserAttention, seed: int) -> Iterator[str]:
    """A sentence about each argument that is never read, and about positions whose reversal changes nothing."""
    name = getattr(called_function(subject.built.call), "__name__", subject.built.name)
    for parameter in subject.unread:
        yield f"{name}() never reads {parameter}: no value of it changes the output"
    rows = drawer_of(subject, seed).inputs(with_context=False)
    for recipe in subject.convention.extras:
        if recipe.kind == "positions" and recipe.parameter not in subject.unread:
            other_extras = tuple(other for other in subject.convention.extras if other != recipe)
            extras = (*other_extras, recipe._replace(kind="positions backwards"))
            reversed_subject = replace(subject, convention=replace(subject.convention, extras=extras))
            try:
                is_idle = max_error(output_for(subject, rows), output_for(reversed_subject, rows)) == 0.0
            except Exception:  # it may require ascending positions
                continue
            if is_idle:
                yield f"{recipe.parameter} does not change the output: backwards it gives the same"


def core_cases(subject: UserAttention, seed: int) -> Iterator[InputCase]:
    """The cases without masks: self-attention, and separate inputs for each argument."""
    inputs = drawer_of(subject, seed)
    yield make_case("core", "self-attention", subject, inputs.inputs(with_context=False))
    if subject.takes_context:
        yield make_case("core", "fewer queries than keys", subject, inputs.inputs(with_context=True))
    elif subject.n_rows > 1:
        yield make_case("core", "other rows for each argument", subject, inputs.inputs(with_context=True))


def mask_cases(subject: UserAttention, seed: int, forms: tuple[MaskForm, ...]) -> Iterator[InputCase]:
    """One case for each form of a mask."""
    drawer = drawer_of(subject, seed)
    inputs = drawer.inputs(with_context=subject.takes_context)
    inputs = inputs._replace(allowed=drawer.allowed(inputs))
    for form in forms:
        case_inputs = inputs
        if "batch" not in form.axes and inputs.allowed is not None:
            case_inputs = inputs._replace(allowed=inputs.allowed[:1])
        try:
            yield make_case("mask", _mask_text(form), subject, case_inputs, form)
        except Exception:  # the form does not fit these sizes
            continue


def windows_case(subject: UserAttention, seed: int, form: MaskForm) -> InputCase | None:
    """A mask for two windows on a batch of two images with two windows each; None if the form does not allow it."""
    if form.axes[0] != "batch" or "head" in form.axes:
        return None
    drawer = drawer_of(subject, seed)
    inputs = drawer.inputs(with_context=subject.takes_context, batch=4)
    inputs = inputs._replace(allowed=drawer.allowed(inputs)[:2].repeat(2, 1, 1, 1))
    try:
        return make_case("mask", f"{form.parameter} of two windows", subject, inputs, form._replace(n_shared=2))
    except Exception:  # the mask must have the batch size
        return None


def padding_cases(subject: UserAttention, seed: int, forms: tuple[MaskForm, ...]) -> Iterator[InputCase]:
    """One case for each form of padding."""
    drawer = drawer_of(subject, seed)
    inputs = drawer.inputs(with_context=subject.takes_context)
    holes, right = drawer.real(inputs, on_the_right=False), drawer.real(inputs)
    for form in forms:
        padded = inputs._replace(real=right if form.kind == "lengths" else holes)
        try:
            yield make_case("padding", _mask_text(form), subject, padded, padding=form)
        except Exception:
            continue


def large_case(subject: UserAttention, like: InputCase) -> InputCase:
    """Another case with scores a million times as large."""
    inputs = like.inputs
    large = inputs._replace(queries=inputs.queries * LARGE, keys=None if inputs.keys is None else inputs.keys * LARGE)
    if large.allowed is not None:  # one visible key for each query, so that its score may be low
        q_len, k_len = large.allowed.shape[-2:]
        large = large._replace(allowed=torch.eye(k_len, dtype=torch.bool)[torch.arange(q_len) % k_len][None, None])
    return make_case("large", "scores × 1,000,000", subject, large, like.form, like.padding)


def _mask_text(form: MaskForm) -> str:
    if form.kind == "additive":
        return f"{form.parameter} as 0 and −∞"
    if form.kind == "lengths":
        return f"{form.parameter} as lengths"
    kind = {"bool": "True", "01": "1", "whole": "1"}[form.kind]
    return (
        f"{form.parameter} [{', '.join(form.axes)}], {kind} = {'may attend' if form.true_means == 'keep' else 'hidden'}"
    )


# -------------------------------------------------------------------------------------------------------- random weights


@dataclass(frozen=True)
class Examined:
    """The subject with random weights and without dropout; if it keeps state, each call uses a fresh copy."""

    subject: UserAttention
    module: nn.Module | None
    tensors: Mapping[str, Tensor]
    keeps_state: bool = False


def with_random_weights(subject: UserAttention, probed: Probed, seed: int) -> Examined:
    """The subject with random weights and biases. Initial weights hide mistakes, for example with zero biases."""
    module = _pristine(subject.built, probed)
    if module is None:
        tensors = {name: t.detach().to("cpu", torch.float64) for name, t in _tensors_of(subject).items()}
        return Examined(subject, None, tensors)
    module = cast(randomised(module, seed), subject.dtype)
    randomised_subject = subject.of(module, subject.dtype)
    forgetful = replace(randomised_subject, is_forgetful=True)
    keeps_state = bool(probed.facts.keeps_state) or _remembers_masks(subject, forgetful, seed)
    reference_module = cast_copy(module, torch.float64, "cpu")
    return Examined(forgetful if keeps_state else randomised_subject, reference_module, {}, keeps_state)


def _pristine(built: Built, probed: Probed) -> nn.Module | None:
    """The module, rebuilt without dropout if it is random or keeps state."""
    facts = probed.facts
    if built.module is None or not (facts.is_random or facts.keeps_state):
        return built.module
    try:
        return built.rebuild(dict.fromkeys(facts.dropout_names, 0.0)).module
    except Exception:  # the constructor rejects it
        return built.module


def _remembers_masks(subject: UserAttention, forgetful: UserAttention, seed: int) -> bool:
    """Whether the mask of one call affects the next call."""
    drawer = drawer_of(subject, seed)
    inputs = drawer.inputs(with_context=subject.takes_context)
    for form in (*subject.padding_forms[:1], *subject.mask_forms[:1]):
        is_padding = form in subject.padding_forms
        masked = (
            inputs._replace(real=drawer.real(inputs))
            if is_padding
            else inputs._replace(allowed=drawer.allowed(inputs)[:1])
        )
        open_inputs = masked._replace(
            allowed=None if masked.allowed is None else torch.ones_like(masked.allowed),
            real=None if masked.real is None else torch.ones_like(masked.real),
        )
        form_argument = {"padding": form} if is_padding else {"mask": form}
        try:
            used_subject = forgetful.of(copy.deepcopy(forgetful.built.call), forgetful.dtype)
            output_for(used_subject, open_inputs, **form_argument)
            with seeded(0, subject.device):
                after_call = output_for(used_subject, masked, **form_argument)
            with seeded(0, subject.device):
                without_call = output_for(forgetful, masked, **form_argument)
        except Exception:  # the form does not fit these sizes
            continue
        if not torch.equal(after_call.nan_to_num(), without_call.nan_to_num()):
            return True
    return False


def _tensors_of(subject: UserAttention) -> Mapping[str, Tensor]:
    """The weights of a function or instance: passed to each call, or stored in attributes."""
    passed = dict(subject.tensors)
    attributes = getattr(subject.built.call, "__dict__", {})
    return passed or {
        n: value for n, value in attributes.items() if isinstance(value, Tensor) and value.is_floating_point()
    }


def randomised(module: nn.Module, seed: int) -> nn.Module:
    """A copy with random weights, scaled for queries and keys of unit size, and non-zero biases."""
    copied_module, generator = copy.deepcopy(module), torch.Generator().manual_seed(seed + 1)
    for parameter in copied_module.parameters():
        if not parameter.is_floating_point() or parameter.numel() == 1:
            continue
        numbers = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.ndim == 1:
            numbers = numbers * 0.5 if not _is_gain(parameter) else (1 + numbers * 0.2).abs()
        elif _is_gain(parameter):
            numbers = (1 + numbers * 0.2).abs()
        else:
            numbers = numbers * 1.2 * sorted(parameter.shape)[-1] ** -0.5
        parameter.data.copy_(numbers)
    return copied_module


def _is_gain(parameter: Tensor) -> bool:
    """Whether the parameter is all ones, as an untrained gain of a norm or a temperature."""
    return bool((parameter.detach() == 1).all())


# -------------------------------------------------------------------------------------------------------- recorded runs


class Unreadable(Exception):
    """Raised if two runs have different operations or sizes, so that nothing can be read from them."""


class OperationPair(NamedTuple):
    """The same operation in both runs."""

    first: Operation
    second: Operation

    def fixed_inputs(self) -> list[bool]:
        """For each input, whether it is equal in both runs."""
        return [same(a, b) for a, b in zip(self.first.inputs, self.second.inputs, strict=True)]


@dataclass(frozen=True)
class PairedRuns:
    """The operations of two runs with inputs of the same sizes; `rows` are the inputs of the first."""

    steps: tuple[OperationPair, ...]
    batch: int
    q_len: int
    k_len: int
    rows: ReferenceInputs

    @cached_property
    def learned(self) -> frozenset[int]:
        """The ids of tensors in the first run that are computed from parameters."""
        ids: set[int] = set()
        for op, _ in self.steps:
            if any(isinstance(t, nn.Parameter) or id(t) in ids for t in op.inputs):
                ids.add(id(op.output))
        return frozenset(ids)

    def is_learned(self, tensor: Tensor) -> bool:
        """Whether a tensor of the first run is a parameter or computed from parameters."""
        return isinstance(tensor, nn.Parameter) or id(tensor) in self.learned

    def moving(self) -> Iterator[tuple[int, OperationPair]]:
        """The numbered steps whose output depends on the inputs."""
        return ((n, step) for n, step in enumerate(self.steps) if not same(step.first.output, step.second.output))

    def as_scores(self, tensor: Tensor, shape: torch.Size) -> Tensor | None:
        """A tensor broadcast to scores as `[batch, head, query, key]`; None if the shape does not fit scores."""
        key_axes = [axis for axis, size in enumerate(shape) if size == self.k_len]
        if not key_axes or tensor.ndim > len(shape):
            return None
        key = key_axes[-1]
        query_axes = [axis for axis, size in enumerate(shape) if size == self.q_len and axis != key]
        if not query_axes or shape.numel() % (self.batch * self.q_len * self.k_len):
            return None
        scores = tensor.detach().to("cpu", torch.float64).expand(shape).movedim((query_axes[-1], key), (-2, -1))
        return scores.reshape(self.batch, -1, self.q_len, self.k_len)


def runs_of(
    subject: UserAttention, seed: int, *, other: bool, q_len: int | None = None, k_len: int | None = None
) -> PairedRuns:
    """Two recorded runs of a subject, with separate keys if `other`. Raises `Unreadable` if the operations differ, and what the
    subject raises."""
    inputs_of_runs = [
        drawer_of(subject, seed + number).inputs(with_context=other, q_len=q_len, k_len=k_len) for number in range(2)
    ]
    first, second = (watch(partial(output_for, subject, inputs), subject.built.files)[1] for inputs in inputs_of_runs)
    if [_kind(op) for op in first] != [_kind(op) for op in second]:
        raise Unreadable
    rows = rows_of(subject, inputs_of_runs[0])
    steps = tuple(OperationPair(*pair) for pair in zip(first, second, strict=True))
    return PairedRuns(steps, rows.queries.shape[0], rows.queries.shape[-2], rows.keys.shape[-2], rows)


def _kind(operation: Operation) -> tuple[object, ...]:
    shapes = tuple(t.shape for t in operation.inputs)
    return operation.name, operation.line, operation.output.shape, shapes


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, with NaN equal to NaN."""
    return a is b or bool(a.shape == b.shape and torch.equal(a, b)) or _same_but_nan(a, b)


def _same_but_nan(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or not a.is_floating_point() or not a.isnan().any():
        return False
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
