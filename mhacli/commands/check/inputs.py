"""Test inputs for a user's attention, each of which shows one property, and the outputs for them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from mhacli.attention.mistakes.stages import ReferenceInputs
from mhacli.commands.check.probes import Probed, with_dropout
from mhacli.commands.check.result import CheckRequest
from mhacli.record.checks import TOLERANCES
from mhacli.usercode.build import cast, cast_copy
from mhacli.usercode.roles import called_function
from mhacli.usercode.user_attention import Inputs, MaskForm, UserAttention

TOLERANCE = TOLERANCES["float32"].runs
"""Relative to the largest number of the output: rounding of float32, which many modules compute with inside."""
HIDDEN = -500.0
"""Scores, or terms added to them, below this number hide a key, whichever number stands for −∞."""
LARGE_TOLERANCE = 1e-2
LARGE = 1000.0
"""Inputs times this make scores a million times as large; a number that stands for −∞ must be lower still."""


@dataclass(frozen=True, eq=False)
class InputCase:
    """One input and its output `[batch, query, d_out]`, both in float64. `rows` are the inputs of the reference, `form` is the
    form of the mask or of the padding, and `rounding` the tolerance relative to the largest number of the output."""

    name: str
    rows: ReferenceInputs
    output: Tensor
    inputs: Inputs
    form: MaskForm | None = None
    rounding: float = TOLERANCE

    @property
    def tolerance(self) -> float:
        """The largest difference that counts as rounding."""
        finite = self.output[self.output.isfinite()]
        return max(finite.abs().max().item() if finite.numel() else 1.0, 1e-30) * self.rounding

    def counted(self, out: Tensor, keep: Tensor | None = None) -> Tensor:
        """The compared rows of an output, bool `[batch, query]`, or with heads for a function: padded queries, and those that may
        `keep` no key, have no right output."""
        counted, real = torch.ones(out.shape[:-1], dtype=torch.bool), self.inputs.real
        if real is not None and real.shape[1] == out.shape[-2]:
            counted &= real if out.ndim == 3 else real[:, None]
        if keep is not None:
            has_key = keep.any(dim=-1)  # [batch, head, query]
            counted &= has_key.all(dim=1) if out.ndim == 3 else has_key
        return counted


def plain(tensor: Tensor) -> Tensor:
    """The numbers of a tensor in float64 on the CPU."""
    return tensor.detach().to("cpu", torch.float64)


def rows_of(subject: UserAttention, inputs: Inputs) -> ReferenceInputs:
    """The inputs of the reference, rounded to the subject's dtype."""
    queries, keys, values = (t if t is None else t.to(subject.dtype).to(torch.float64) for t in inputs[:3])
    assert queries is not None
    keys = queries if keys is None else keys
    return ReferenceInputs(queries, keys, keys if values is None else values, inputs.allowed, inputs.real)


def make_case(
    name: str, subject: UserAttention, inputs: Inputs, form: MaskForm | None = None, *, rounding: float = TOLERANCE
) -> InputCase:
    """The case with the subject's output. Raises what the subject raises."""
    output = plain(subject(inputs, mask=form))
    return InputCase(name, rows_of(subject, inputs), output, inputs, form, rounding)


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


def unmasked_inputs(subject: UserAttention, seed: int) -> dict[str, Inputs]:
    """Inputs without masks by name: self-attention, and separate inputs for each argument."""
    drawer = subject.drawer(seed)
    inputs = {"self-attention": drawer.inputs(with_context=False)}
    if subject.takes_context or subject.n_rows > 1:
        name = "fewer queries than keys" if subject.takes_context else "other rows for each argument"
        inputs[name] = drawer.inputs(with_context=True)
    return inputs


def masked_cases(
    subject: UserAttention, seed: int, forms: Sequence[MaskForm], *, batch: int | None = None
) -> Iterator[InputCase]:
    """One case for each form of a mask, or of padding, that fits these sizes."""
    drawer = subject.drawer(seed)
    inputs = drawer.inputs(with_context=subject.takes_context, batch=batch)
    allowed, holes, right = drawer.allowed(inputs), drawer.real(inputs, on_the_right=False), drawer.real(inputs)
    for form in forms:
        n_masks = len(allowed) // form.n_shared if "batch" in form.axes else 1
        masked = inputs._replace(allowed=allowed[:n_masks].repeat(form.n_shared, 1, 1, 1))
        if form.is_padding:
            masked = inputs._replace(real=right if form.kind == "lengths" else holes)
        with suppress(Exception):  # the form does not fit these sizes
            yield make_case(_mask_text(form), subject, masked, form)


def large_case(subject: UserAttention, like: InputCase) -> InputCase:
    """Another case with scores a million times as large."""
    inputs = like.inputs
    large = inputs._replace(queries=inputs.queries * LARGE, keys=None if inputs.keys is None else inputs.keys * LARGE)
    if large.allowed is not None:  # one visible key for each query, so that its score may be low
        q_len, k_len = large.allowed.shape[-2:]
        large = large._replace(allowed=torch.eye(k_len, dtype=torch.bool)[torch.arange(q_len) % k_len][None, None])
    return make_case("scores × 1,000,000", subject, large, like.form, rounding=LARGE_TOLERANCE)


def _mask_text(form: MaskForm) -> str:
    if form.n_shared > 1:
        return f"{form.parameter} of {form.n_shared} windows"
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
    module, reference = subject.built.module, None
    tensors: dict[str, Tensor] = {}
    if module is None:
        stored = {**getattr(subject.built.call, "__dict__", {}), **subject.others}
        tensors = {
            name: plain(each) for name, each in stored.items() if isinstance(each, Tensor) and each.is_floating_point()
        }
    else:
        if probed.is_random:
            module, _ = with_dropout(module, 0.0)
        module = cast(randomised(module, request.of.seed), subject.dtype)
        subject = replace(subject.of(module, subject.dtype), is_forgetful=bool(probed.keeps_state))
        reference = cast_copy(module, torch.float64, "cpu")
    return Examined(subject, reference, tensors, probed, request, expects_causal)


def unparametrized(module: nn.Module) -> nn.Module:
    """A copy whose weights are parameters, also those that torch computes from others, as with a weight norm."""
    copied_module = copy.deepcopy(module)
    for part in copied_module.modules():
        for name in [*getattr(part, "parametrizations", ())]:
            parametrize.remove_parametrizations(part, name)
        for key, hook in [*part._forward_pre_hooks.items()]:  # the older weight norm and spectral norm
            if isinstance(hook, WeightNorm | SpectralNorm):
                hook.remove(part)
                del part._forward_pre_hooks[key]
    return copied_module


def randomised(module: nn.Module, seed: int) -> nn.Module:
    """A copy with random weights, scaled for queries and keys of unit size, and non-zero biases."""
    copied_module, generator = unparametrized(module), torch.Generator().manual_seed(seed + 1)
    for parameter in copied_module.parameters():
        is_set = parameter.numel() == 1 and bool(parameter != 0)  # a gate of 0 would hide all that is behind it
        if not parameter.is_floating_point() or is_set:
            continue
        numbers = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if bool((parameter.detach() == 1).all()):  # an untrained gain of a norm, or a temperature
            numbers = (1 + numbers * 0.2).abs()
        else:
            numbers = numbers * (0.5 if parameter.ndim < 2 else 1.2 * sorted(parameter.shape)[-1] ** -0.5)
        parameter.data.copy_(numbers)
    return copied_module
