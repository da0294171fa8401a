"""A user's attention behind one interface: rows in, output out, in one layout whatever its own layout is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mhacli.adapters.usercode.asker import InputDrawer, copied, map_rows, seeded
from mhacli.adapters.usercode.call.convention import (
    CallConvention,
    CallMasks,
    CallSetting,
    call_with,
    read_answer,
    sides_of,
)
from mhacli.adapters.usercode.types import AttentionOutput, Built, Inputs, InputSizes, MaskForm
from mhacli.results.check import Mode


@dataclass(frozen=True)
class UserAttention:
    """A user's attention that can be asked.

    `sizes` are those that it can be called with; `k_len` is `q_len` where keys must be the queries' own rows. `is_function`:
    q, k and v come split into heads, nothing is projected; `n_heads` is how many it can then be called with, 1 where it knows
    none. `takes_context`: keys may be other rows than the queries, and of another number; `n_rows` counts the arguments for
    queries, keys and values. `causal_by` is the argument that was set to make it causal. `mask_forms` are the ways to write a
    mask that it accepts without raising, both meanings of True of each, the likeliest first, `padding_forms` the same for
    padding. It computes in `dtype` on `device`. `described` is how it is called, in one line of Python, `convention` the same
    as data; `untried` are the arguments that are never given another value than their default, `unread` those that its lines
    never read; `mode` is which of its two modes this is, None where it has one. `tensors` are the weights that a function is
    given, by the names of its parameters. `is_forgetful`: each call goes to a new copy of the module, so that nothing of it
    is left for the next.

    Where `convention.causal_yields`, a call with a mask leaves out the switch `causal_by`, because the two exclude each other:
    such a mask must be causal itself.
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
        """The output and the pattern, detached copies. `inputs.allowed` needs a `mask`, `inputs.real` a `padding`. Raises what
        it raises, and ValueError where a mask tells apart what its form has no axis for."""
        call = copy.deepcopy(self.built.call) if self.is_forgetful else self.built.call
        setting = CallSetting(sides_of(inputs, self.convention), self.dtype, self.device, training, self.tensors)
        return read_answer(call_with(call, self.convention, inputs, setting, CallMasks(mask, padding)), self.convention)

    def of(self, call: Callable[..., Any], dtype: torch.dtype) -> UserAttention:
        """The same convention for another copy of it."""
        module = call if isinstance(call, nn.Module) else None
        tensors = {name: tensor.to(dtype) for name, tensor in self.tensors.items()}
        built = replace(self.built, call=call, module=module)
        return replace(self, built=built, dtype=dtype, tensors=tensors, is_forgetful=False)


def drawer_of(attention: UserAttention, seed: int) -> InputDrawer:
    """Inputs for this attention, in float64 on the CPU, with separate values where it takes them."""
    n_heads = attention.n_heads if attention.is_function else None
    return InputDrawer(attention.sizes, seed=seed, n_heads=n_heads, separate_values=attention.n_rows > 2)


def ask(
    attention: UserAttention,
    inputs: Inputs,
    *,
    mask: MaskForm | None = None,
    padding: MaskForm | None = None,
    training: bool = False,
    seed: int | None = None,
) -> AttentionOutput:
    """The answer to inputs of any dtype and device, without gradients; what is random begins with `seed` where one is given.
    Raises what the attention raises."""
    given = map_rows(inputs, lambda rows: rows.to(attention.device, attention.dtype))
    allowed, real = (None if t is None else t.to(attention.device) for t in (inputs.allowed, inputs.real))
    with nullcontext() if seed is None else seeded(seed, attention.device), torch.no_grad():
        return attention(given._replace(allowed=allowed, real=real), mask=mask, padding=padding, training=training)


def fresh_copy(attention: UserAttention) -> UserAttention:
    """The attention over a copy of what it calls, so that its calls change nothing in the first; itself where it has no copy."""
    call = copied(attention.built.call)
    return attention if call is attention.built.call else attention.of(call, attention.dtype)
