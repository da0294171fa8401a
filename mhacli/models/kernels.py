"""Finds which of torch's kernels computes an attention, where torch dispatches operators to devices."""

from __future__ import annotations

import re
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_FUSED = re.compile(r"_scaled_dot_product_(?:fused_)?(\w+?)_?attention(?:_for_cpu|_overrideable)?$")


class KernelWatch(TorchDispatchMode):
    """Records which of torch's kernels computed an attention, and the log-sum-exp that it returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernel: str | None = None
        self.lse: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator, and records it if it is an attention."""
        result = func(*args, **(kwargs or {}))
        found = _FUSED.search(func.overloadpacket.__name__)
        if found is not None and self.kernel is None:  # later kernels are computations of another capture
            self.kernel = found[1]
            lse = result[1] if isinstance(result, tuple) and len(result) > 1 else None
            is_lse = isinstance(lse, Tensor) and lse.ndim == 3 and lse.numel() > 0
            self.lse = lse if is_lse and found[1] != "math" else None
        return result

    def lse_of(self, q: Float[Tensor, "batch head query d_head"]) -> Float[Tensor, "batch head query"] | None:
        """The log-sum-exp of these queries; None if the kernel returned none, or rounded it to 16 bits like its inputs."""
        if self.lse is None or q.dtype not in (torch.float32, torch.float64):
            return None
        lse = self.lse[..., : q.shape[2]]
        return lse if tuple(lse.shape) == tuple(q.shape[:3]) else None
