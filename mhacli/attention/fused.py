"""Fused attention: torch's kernels, which never build the whole pattern, and which of them really ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

KERNELS: Mapping[str, SDPBackend] = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""torch's kernels by name; `math` is the one that is not fused."""

_TRACES = {
    "_flash_attention": "flash",
    "_efficient_attention": "efficient",
    "_cudnn_attention": "cudnn",
    "_attention_math_for_mps": "mps",
    "_attention_math": "math",
    "_fused_attention_overrideable": "overrideable",
}
"""What stands in the name of the operator `aten::_scaled_dot_product…` of each kernel."""


def fused_attend(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    v: Float[Tensor, "batch kv_head key d_v"],
    *,
    causal: bool = False,
) -> Float[Tensor, "batch head query d_v"]:
    """The z of `attend` by the kernel that torch picks, or that `only` chose, with the default scale.

    `causal` takes query i as token i, as torch does. Gradients flow. Source: Dao et al. 2022, "FlashAttention".
    """
    return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def only(kernel: str) -> AbstractContextManager[None]:
    """Within it torch may use this kernel alone, and raises `RuntimeError` where that cannot take the inputs."""
    context: AbstractContextManager[None] = sdpa_kernel(KERNELS[kernel])
    return context


def kernel_among(operators: frozenset[str]) -> str | None:
    """The kernel of attention that left its name among operators; `unfused` for a softmax outside one; None without either."""
    for part, kernel in _TRACES.items():
        if any("_scaled_dot_product" in name and part in name for name in operators):
            return kernel
    return "unfused" if any("softmax" in name for name in operators) else None


class Attended(NamedTuple):
    """z, the natural log-sum-exp of the scores (0 for a query without keys), and the kernel that made them."""

    z: Float[Tensor, "batch head query d_v"]
    lse: Float[Tensor, "batch head query"]
    kernel: str


class _Operator(NamedTuple):
    """One of torch's operators that return the log-sum-exp besides the result: its kernel, and how it is called."""

    kernel: str
    call: Callable[[Tensor, Tensor, Tensor, float, bool], Sequence[Tensor]]


_aten = torch.ops.aten


def _flash_on_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Sequence[Tensor]:
    """The CPU's flash kernel. 16-bit numbers are widened, for it rounds the log-sum-exp of theirs."""
    wide = [t.to(torch.promote_types(t.dtype, torch.float32)) for t in (q, k, v)]
    z, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*wide, 0.0, causal, scale=scale)
    return z.to(v.dtype), lse


_OPERATORS: Mapping[str, tuple[_Operator, ...]] = {
    "cpu": (_Operator("flash", _flash_on_cpu),),
    "cuda": (
        _Operator(
            "flash",
            lambda q, k, v, scale, causal: _aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, causal, False, scale=scale
            ),
        ),
        _Operator(
            "efficient",
            lambda q, k, v, scale, causal: _aten._scaled_dot_product_efficient_attention(
                q, k, v, None, True, 0.0, causal, scale=scale
            ),
        ),
    ),
}
"""By kind of device, the preferred first. They are torch's own affair and may change: each is tried before it is trusted."""

_TRIAL_LEN = 33


def fused_lse(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    v: Float[Tensor, "batch kv_head key d_v"],
    *,
    scale: float,
    causal: bool,
) -> Attended | None:
    """The z of `attend` with the log-sum-exp, from one fused kernel; None where none here takes these tensors.

    `causal` takes query i as token i. Shared kv heads are repeated without a copy.
    """
    group = q.shape[1] // k.shape[1]
    for number, operator in enumerate(_OPERATORS.get(q.device.type, ())):
        leaves_square = causal and q.shape[2] != k.shape[2]
        if _is_trusted(number, q.device, q.dtype, q.shape[-1], v.shape[-1], group, leaves_square):
            z, lse = _called(operator, q, k, v, scale, causal)
            return Attended(z, lse, operator.kernel)
    return None


def _called(operator: _Operator, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """z and lse in the shapes of the house. Heads that share keys become a batch of their own, whose keys have stride 0."""
    batch, n_heads, q_len, _ = q.shape
    shared = (batch * k.shape[1], n_heads // k.shape[1])
    if shared[1] > 1:
        q = q.reshape(*shared, *q.shape[2:])
        k, v = (t.reshape(shared[0], 1, *t.shape[2:]).expand(*shared, *t.shape[2:]) for t in (k, v))
    z, lse = operator.call(q, k, v, scale, causal)[:2]
    return z.reshape(batch, n_heads, q_len, -1), lse[..., :q_len].reshape(batch, n_heads, q_len)


@lru_cache(maxsize=256)
def _is_trusted(
    number: int, device: torch.device, dtype: torch.dtype, d_head: int, d_v: int, group: int, leaves_square: bool
) -> bool:
    """Whether an operator gives what the definition gives, on a few random rows like those that it is wanted for.

    `leaves_square`: with fewer queries than keys, where some take the last query for the last key.
    """
    operator = _OPERATORS[device.type][number]
    generator = torch.Generator().manual_seed(0)
    k_len = _TRIAL_LEN + 12 * leaves_square
    shapes = ((1, 2 * group, _TRIAL_LEN, d_head), (1, 2, k_len, d_head), (1, 2, k_len, d_v))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes)
    of_z = 2e-2 if dtype.itemsize == 2 else 1e-4
    later = torch.ones(_TRIAL_LEN, k_len, dtype=torch.bool, device=device).triu(1)
    for causal in (False, True):
        try:
            z, lse = _called(operator, q, k, v, d_head**-0.5, causal)
        except (RuntimeError, NotImplementedError, AttributeError, TypeError):
            return False
        wide_k, wide_v = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
        scores = (q.float() @ wide_k.mT * d_head**-0.5).masked_fill(later & causal, -torch.inf)
        pairs = ((lse.float(), scores.logsumexp(dim=-1), 1e-3), (z.float(), scores.softmax(dim=-1) @ wide_v, of_z))
        if not all(
            ours.shape == theirs.shape and _is_near(ours, theirs, tolerance) for ours, theirs, tolerance in pairs
        ):
            return False
    return True


def _is_near(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return bool(((one - other).abs() <= tolerance).all())
