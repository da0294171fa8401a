"""A user's attention behind one interface, with one layout for inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mhacli.usercode.call.convention import (
    CallConvention,
    CallMasks,
    CallSetting,
    call_with,
    read_output,
    sides_of,
)
from mhacli.usercode.inputs import InputDrawer, copied, map_rows, seeded
from mhacli.usercode.target import Mode
from mhacli.usercode.types import AttentionOutput, Built, Inputs, InputSizes, MaskForm


@dataclass(frozen=True)
class UserAttention:
    """A user's attention, ready to be called.

    `sizes` are valid input sizes; `k_len` equals `q_len` for attention over the queries only. `n_heads` is the number of heads of
    a function of q, k and v, else 1; `n_rows` counts the arguments for queries, keys and values. It computes in `dtype` on
    `device`. `mask_forms` are the accepted mask forms, with both meanings of True, the likeliest first; `padding_forms` the same
    for padding. `described` is the call as one line of Python, `convention` the same as data. `tensors` are the weights passed to
    a function, by parameter. `untried` are the arguments that always keep their defaults, `unread` those that its source never
    reads. `mode` is self or cross, None for an attention with one mode. `is_forgetful`: each call uses a new copy of the module,
    so that no state remains.
    """

    built: Built
    convention: CallConvention
    sizes: InputSizes
    n_heads: int
    n_rows: int
    dtype: torch.dtype
    device: torch.device
    mask_forms: tuple[MaskForm, ...] = ()
    padding_forms: tuple[MaskForm, ...] = ()
    described: str = ""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    untried: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    mode: Mode | None = None
    is_forgetful: bool = False

    @property
    def is_function(self) -> bool:
        """Whether q, k and v come split into heads and nothing is projected."""
        return self.convention.is_function

    @property
    def takes_context(self) -> bool:
        """Whether keys may be a separate sequence of another length."""
        return self.n_rows > 1 and self.sizes.q_len != self.sizes.k_len

    @property
    def causal_by(self) -> str | None:
        """The argument that makes it causal."""
        return self.convention.causal_by

    def __call__(
        self, inputs: Inputs, *, mask: MaskForm | None = None, padding: MaskForm | None = None, training: bool = False
    ) -> AttentionOutput:
        """Copies of the output and the pattern. `inputs.allowed` needs a `mask`, `inputs.real` a `padding`. Raises what the
        call raises, and ValueError for a mask that its form cannot express."""
        return read_output(self.result(inputs, mask=mask, padding=padding, training=training), self.convention)

    def result(
        self, inputs: Inputs, *, mask: MaskForm | None = None, padding: MaskForm | None = None, training: bool = False
    ) -> Any:
        """What the call returns."""
        call = copied(self.built.call) if self.is_forgetful else self.built.call
        setting = CallSetting(sides_of(inputs, self.convention), self.dtype, self.device, training, self.tensors)
        return call_with(call, self.convention, inputs, setting, CallMasks(mask, padding))

    def of(self, call: Callable[..., Any], dtype: torch.dtype) -> UserAttention:
        """The same convention for another copy of the callable."""
        module = call if isinstance(call, nn.Module) else None
        tensors = {name: tensor.to(dtype) for name, tensor in self.tensors.items()}
        built = replace(self.built, call=call, module=module)
        return replace(self, built=built, dtype=dtype, tensors=tensors, is_forgetful=False)


def drawer_of(attention: UserAttention, seed: int) -> InputDrawer:
    """Random inputs for this attention, in float64 on the CPU, with separate values if it takes them."""
    n_heads = attention.n_heads if attention.is_function else None
    return InputDrawer(attention.sizes, seed=seed, n_heads=n_heads, separate_values=attention.n_rows > 2)


def call_attention(
    attention: UserAttention,
    inputs: Inputs,
    *,
    mask: MaskForm | None = None,
    padding: MaskForm | None = None,
    training: bool = False,
    seed: int | None = None,
) -> AttentionOutput:
    """The output for inputs of any dtype and device, without gradients; `seed` seeds torch's generators. Raises what the
    attention raises."""
    with nullcontext() if seed is None else seeded(seed, attention.device), torch.no_grad():
        return attention(inputs_for(attention, inputs), mask=mask, padding=padding, training=training)


def inputs_for(attention: UserAttention, inputs: Inputs) -> Inputs:
    """The inputs in the dtype of an attention, on its device."""
    cast_inputs = map_rows(inputs, lambda rows: rows.to(attention.device, attention.dtype))
    allowed, real = (None if t is None else t.to(attention.device) for t in (inputs.allowed, inputs.real))
    return cast_inputs._replace(allowed=allowed, real=real)


def fresh_copy(attention: UserAttention) -> UserAttention:
    """The attention over a copy of its callable, so that calls leave the original unchanged; itself if it cannot be copied."""
    call = copied(attention.built.call)
    return attention if call is attention.built.call else attention.of(call, attention.dtype)
