"""Modules in another dtype: what is real stays real, and what is complex stays complex."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def cast(module: Module, dtype: torch.dtype, device: torch.device | str | None = None) -> Module:
    """The module itself with its floating parameters and buffers in `dtype`, on `device` where one is given.

    Complex numbers become those of the same precision, complex64 at least, because few operations take narrower ones.
    Integers and truth values stay as they are. `nn.Module.to` would drop the imaginary parts, and with them the angles of a
    rotary table.
    """
    module._apply(lambda t: t.to(device=device, dtype=cast_dtype(t, dtype)))  # type: ignore[no-untyped-call]
    return module


def cast_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a tensor has in a module whose floating numbers are in `dtype`."""
    if tensor.is_complex():
        return torch.promote_types(dtype, torch.float32).to_complex()
    return dtype if tensor.is_floating_point() else tensor.dtype
