"""Fused attention: torch's kernels, which never build the whole pattern, and which of them really ran."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend
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
    """The z of `attend` by the kernel that torch picks, or that `sdpa_kernel` allows, with the default scale.

    `causal` takes query i as token i, as torch does. Gradients flow. Source: Dao et al. 2022, "FlashAttention".
    """
    return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def kernel_among(operators: frozenset[str]) -> str | None:
    """The kernel of attention that left its name among operators; `unfused` for a softmax outside one; None without either."""
    for part, kernel in _TRACES.items():
        if any("_scaled_dot_product" in name and part in name for name in operators):
            return kernel
    return "unfused" if any("softmax" in name for name in operators) else None
