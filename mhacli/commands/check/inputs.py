"""Test inputs for a user's attention, each of which shows one property, and the outputs for them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from mhacli.attention.mistakes.stages import ReferenceInputs
from mhacli.commands.check.probes import Probed, with_dropout
from mhacli.commands.check.result import CheckRequest
from mhacli.record.checks import TOLERANCES
from mhacli.usercode.build import cast, cast_copy
from mhacli.usercode.roles import called_function
from mhacli.usercode.user_attention import Inputs, MaskForm, UserAttention

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
    return subject(inputs, mask=mask or padding).detach().to("cpu", torch.float64)


def rows_of(subject: UserAttention, inputs: Inputs) -> ReferenceInputs:
    """The inputs of the reference, rounded to the subject's dtype."""
    queries, keys, values = (t if t is None else t.to(subject.dtype).to(torch.float64) for t in inputs[:3])
    assert queries is not None
    keys = queries if keys is None else keys
    return ReferenceInputs(queries, keys, keys if values is None else values, inputs.allowed, inputs.real)


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


def arguments_without_effect(subject: UserAttention) -> tuple[str, ...]:
    """A sentence about each argument that is never read."""
    name = getattr(called_function(subject.built.call), "__name__", subject.built.name)
    return tuple(f"{name}() never reads {it}: no value of it changes the output" for it in subject.unread)


def core_cases(subject: UserAttention, seed: int) -> Iterator[InputCase]:
    """The cases without masks: self-attention, and separate inputs for each argument."""
    inputs = subject.drawer(seed)
    yield make_case("core", "self-attention", subject, inputs.inputs(with_context=False))
    if subject.takes_context or subject.n_rows > 1:
        name = "fewer queries than keys" if subject.takes_context else "other rows for each argument"
        yield make_case("core", name, subject, inputs.inputs(with_context=True))


def masked_cases(subject: UserAttention, seed: int, forms: Sequence[MaskForm], kind: InputKind) -> Iterator[InputCase]:
    """One case for each form of a mask, or of padding."""
    drawer = subject.drawer(seed)
    inputs = drawer.inputs(with_context=subject.takes_context)
    allowed = drawer.allowed(inputs) if kind == "mask" else None
    holes, right = drawer.real(inputs, on_the_right=False), drawer.real(inputs)
    for form in forms:
        with suppress(Exception):  # the form does not fit these sizes
            if allowed is not None:
                masked = inputs._replace(allowed=allowed if "batch" in form.axes else allowed[:1])
                yield make_case(kind, _mask_text(form), subject, masked, form)
            else:
                padded = inputs._replace(real=right if form.kind == "lengths" else holes)
                yield make_case(kind, _mask_text(form), subject, padded, padding=form)


def windows_case(subject: UserAttention, seed: int, form: MaskForm) -> InputCase | None:
    """A mask for two windows on a batch of two images with two windows each; None if the form does not allow it."""
    if form.axes[0] != "batch" or "head" in form.axes:
        return None
    drawer = subject.drawer(seed)
    inputs = drawer.inputs(with_context=subject.takes_context, batch=4)
    inputs = inputs._replace(allowed=drawer.allowed(inputs)[:2].repeat(2, 1, 1, 1))
    try:
        return make_case("mask", f"{form.parameter} of two windows", subject, inputs, form._replace(n_shared=2))
    except Exception:  # the mask must have the batch size
        return None


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
    sign, meaning = "True" if form.kind == "bool" else "1", "may attend" if form.true_means == "keep" else "hidden"
    return f"{form.parameter} [{', '.join(form.axes)}], {sign} = {meaning}"


# -------------------------------------------------------------------------------------------------------- random weights


@dataclass(frozen=True)
class Examined:
    """All that is known before the comparison: the subject with random weights and without dropout, its module in float64 for
    the reference, the weights that a function is called with, what the probes measured, and the request. If it keeps state, each
    call uses a fresh copy. `expects_causal`: the code or the user states that no token sees a later one."""

    subject: UserAttention
    module: nn.Module | None
    tensors: Mapping[str, Tensor]
    probed: Probed
    request: CheckRequest
    expects_causal: bool


def with_random_weights(
    subject: UserAttention, probed: Probed, request: CheckRequest, *, expects_causal: bool
) -> Examined:
    """The subject with random weights and biases. Initial weights hide mistakes, for example with zero biases."""
    module = subject.built.module
    if module is None:
        stored = {**getattr(subject.built.call, "__dict__", {}), **subject.fixed}
        tensors = {
            name: value for name, value in stored.items() if isinstance(value, Tensor) and value.is_floating_point()
        }
        weights = {name: value.detach().to("cpu", torch.float64) for name, value in tensors.items()}
        return Examined(subject, None, weights, probed, request, expects_causal)
    if probed.keeps_state:
        with suppress(Exception):  # the constructor may reject it
            module = subject.built.rebuild().module or module
    elif probed.is_random:
        module, _ = with_dropout(module, 0.0)
    module = cast(randomised(module, request.of.seed), subject.dtype)
    subject = replace(subject.of(module, subject.dtype), is_forgetful=bool(probed.keeps_state))
    reference_module = cast_copy(module, torch.float64, "cpu")
    return Examined(subject, reference_module, {}, probed, request, expects_causal)


def randomised(module: nn.Module, seed: int) -> nn.Module:
    """A copy with random weights, scaled for queries and keys of unit size, and non-zero biases."""
    copied_module, generator = copy.deepcopy(module), torch.Generator().manual_seed(seed + 1)
    for parameter in copied_module.parameters():
        if not parameter.is_floating_point() or parameter.numel() == 1:
            continue
        numbers = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if bool((parameter.detach() == 1).all()):  # an untrained gain of a norm, or a temperature
            numbers = (1 + numbers * 0.2).abs()
        else:
            numbers = numbers * (0.5 if parameter.ndim == 1 else 1.2 * sorted(parameter.shape)[-1] ** -0.5)
        parameter.data.copy_(numbers)
    return copied_module
