"""A user's attention behind one interface, with one layout for inputs and outputs."""

from __future__ import annotations

import copy
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

    `sizes` are valid input sizes; `k_len` equals `q_len` for attention over the queries only. `is_function`: q, k and v come
    split into heads and nothing is projected; `n_heads` is then the number of heads, 1 if the function has none.
    `takes_context`: keys may be a separate sequence of another length; `n_rows` counts the arguments for queries, keys and
    values. `causal_by` is the argument that makes it causal. `mask_forms` are the accepted mask forms, with both meanings of
    True, the likeliest first; `padding_forms` the same for padding. It computes in `dtype` on `device`. `described` is the call
    as one line of Python, `convention` the same as data. `untried` are the arguments that always keep their defaults, `unread`
    those that its source never reads. `mode` is self or cross, None for an attention with one mode. `tensors` are the weights
    passed to a function, by parameter. `is_forgetful`: each call uses a new copy of the module, so that no state remains.

    With `convention.causal_yields`, a call with a mask omits the switch `causal_by`, because the two exclude each other. The
    mask must then be causal itself.
    """

    built: Built
    sizes: InputSizes
    is_function: bool
    n_heads: int
    takes_context: bool
    n_rows: int
    causal_by: str | None
    mask_forms: tuple[MaskForm, ...]
    padding_forms: tuple[MaskForm, ...]
    dtype: torch.dtype
    device: torch.device
    described: str
    convention: CallConvention
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    untried: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    mode: Mode | None = None
    is_forgetful: bool = False

    def __call__(
        self, inputs: Inputs, *, mask: MaskForm | None = None, padding: MaskForm | None = None, training: bool = False
    ) -> AttentionOutput:
        """Copies of the output and the pattern. `inputs.allowed` needs a `mask`, `inputs.real` a `padding`. Raises what the
        call raises, and ValueError for a mask that its form cannot express."""
        call = copy.deepcopy(self.built.call) if self.is_forgetful else self.built.call
        setting = CallSetting(sides_of(inputs, self.convention), self.dtype, self.device, training, self.tensors)
        return read_output(call_with(call, self.convention, inputs, setting, CallMasks(mask, padding)), self.convention)

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
