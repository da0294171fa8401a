"""Three ways in which people write the same multi-head attention, over the weights of one layer.

`separate`: four projections (the layer's own `forward`). `fused`: one qkv projection, then cut. `per-head`: a weight per
head, with batched products, and the heads' outputs added up. The tensors on the way differ; the result must not.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from mhacli.attention.core import Allowed, Tap
from mhacli.attention.layer import KeyRows, MultiHeadAttention, Places, TokenVectors, split_heads


def run_route(
    route: str,
    layer: MultiHeadAttention,
    x: TokenVectors,
    context: KeyRows | None,
    *,
    allowed: Allowed | None,
    bias: Float[Tensor, "..."] | None,
    places: Places | None,
    tap: Tap,
) -> Float[Tensor, "batch query d_out"]:
    """The output of the layer by one of the ways. The arguments as for `MultiHeadAttention.forward`."""
    if route == "separate":
        out: Tensor = layer(x, context, allowed=allowed, bias=bias, places=places, tap=tap)[0]
        return out
    key_places = places if context is None else None
    q, k, v = (_fused if route == "fused" else _per_head)(layer, x, context, tap)
    q, k = layer.rotated(q, k, places, key_places, tap)
    z, _ = layer.attended(q, k, v, places=places, key_places=key_places, allowed=allowed, bias=bias, tap=tap)
    if route == "fused" or layer.o_proj is None:
        return layer.joined(z, tap)
    head_out = z @ layer.o_proj.weight.unflatten(1, (layer.n_heads, layer.d_v)).permute(1, 2, 0)  # [head, d_v, d_model]
    tap("head_out", head_out)
    summed: Tensor = head_out.sum(dim=1) if layer.o_proj.bias is None else head_out.sum(dim=1) + layer.o_proj.bias
    tap("out_sum", summed)
    return summed


def _fused(layer: MultiHeadAttention, x: TokenVectors, context: KeyRows | None, tap: Tap) -> list[Tensor]:
    """Queries, keys and values by one product (keys and values, where they come from a context), then cut."""
    q, *kv = layer.q_proj, layer.k_proj, layer.v_proj
    products = [("qkv", x, [q, *kv])] if context is None else [("q_proj", x, [q]), ("kv", context, kv)]
    flat: list[Tensor] = []
    for name, rows, projections in products:
        biases: list[Tensor] = [projection.bias for projection in projections if projection.bias is not None]
        weight = torch.cat([projection.weight for projection in projections])
        joined = linear(rows, weight, torch.cat(biases) if biases else None)
        tap(name, joined)
        flat += joined.split([projection.out_features for projection in projections], dim=-1)
    counts = layer.n_heads, layer.n_kv_heads, layer.n_kv_heads
    heads = [split_heads(rows, n) for rows, n in zip(flat, counts, strict=True)]
    for name, tensor in zip("qkv", heads, strict=True):
        tap(name, tensor)
    return heads


def _per_head(layer: MultiHeadAttention, x: TokenVectors, context: KeyRows | None, tap: Tap) -> list[Tensor]:
    """Queries, keys and values by a small weight per head, all heads in one batched product."""
    heads, keys = [], x if context is None else context
    for name, rows, projection, n_heads in (
        ("q_per_head", x, layer.q_proj, layer.n_heads),
        ("k_per_head", keys, layer.k_proj, layer.n_kv_heads),
        ("v_per_head", keys, layer.v_proj, layer.n_kv_heads),
    ):
        tensor: Tensor = rows[:, None] @ projection.weight.unflatten(0, (n_heads, -1)).mT  # [head, d_input, d]
        if projection.bias is not None:
            tensor = tensor + projection.bias.unflatten(0, (n_heads, 1, -1))
        tap(name, tensor)
        heads.append(tensor)
    return heads
