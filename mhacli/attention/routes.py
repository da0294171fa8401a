"""Three ways in which people write the same multi-head attention, over the weights of one layer.

`separate`: four projections (the layer's own `forward`). `fused`: one qkv projection, then cut. `per-head`: a weight per
head, with batched products, and the heads' outputs added up. The tensors on the way differ; the result must not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mhacli.attention.core import Allowed, Tap
from mhacli.attention.layer import KeyRows, MultiHeadAttention, Places, TokenVectors, split_heads


class RouteInputs(NamedTuple):
    """What a layer reads, and how: rows, the context where keys and values come from one, mask, bias, places."""

    x: TokenVectors
    context: KeyRows | None = None
    allowed: Allowed | None = None
    bias: Float[Tensor, "..."] | None = None
    places: Places | None = None


Route = Callable[[MultiHeadAttention, RouteInputs, Tap], Float[Tensor, "batch query d_out"]]
"""`(layer, reading, tap) -> out`."""


def separate(layer: MultiHeadAttention, reading: RouteInputs, tap: Tap) -> Tensor:
    """Four projections, as the layer itself computes."""
    x, context, allowed, bias, places = reading
    return layer(x, context, allowed=allowed, bias=bias, places=places, tap=tap)[0]  # type: ignore[no-any-return]


def fused(layer: MultiHeadAttention, reading: RouteInputs, tap: Tap) -> Tensor:
    """One product for queries, keys and values (for keys and values, where they come from a context), then cut."""
    x, context = reading.x, reading.context
    if context is None:
        qkv = _side_by_side(x, layer.q_proj, layer.k_proj, layer.v_proj)
        tap("qkv", qkv)
        q, k, v = qkv.split([layer.q_proj.out_features, layer.k_proj.out_features, layer.v_proj.out_features], dim=-1)
    else:
        q = layer.q_proj(x)
        tap("q_proj", q)
        kv = _side_by_side(context, layer.k_proj, layer.v_proj)
        tap("kv", kv)
        k, v = kv.split([layer.k_proj.out_features, layer.v_proj.out_features], dim=-1)
    heads_q = split_heads(q, layer.n_heads)
    tap("q", heads_q)
    heads_k = split_heads(k, layer.n_kv_heads)
    tap("k", heads_k)
    heads_v = split_heads(v, layer.n_kv_heads)
    tap("v", heads_v)
    return layer.joined(_attended(layer, reading, heads_q, heads_k, heads_v, tap), tap)


def per_head(layer: MultiHeadAttention, reading: RouteInputs, tap: Tap) -> Tensor:
    """A small weight per head, all heads in one batched product; each head's share of the output, then their sum."""
    rows = reading.x if reading.context is None else reading.context
    q = _each_head(reading.x, layer.q_proj, layer.n_heads)
    tap("q_per_head", q)
    k = _each_head(rows, layer.k_proj, layer.n_kv_heads)
    tap("k_per_head", k)
    v = _each_head(rows, layer.v_proj, layer.n_kv_heads)
    tap("v_per_head", v)
    z = _attended(layer, reading, q, k, v, tap)
    if layer.o_proj is None:
        return layer.joined(z, tap)
    w_o = layer.o_proj.weight.unflatten(1, (layer.n_heads, layer.d_v)).permute(1, 2, 0)  # [head, d_v, d_model]
    head_out = z @ w_o
    tap("head_out", head_out)
    out: Tensor = head_out.sum(dim=1) if layer.o_proj.bias is None else head_out.sum(dim=1) + layer.o_proj.bias
    tap("out_sum", out)
    return out


ROUTES: Mapping[str, Route] = {"separate": separate, "fused": fused, "per-head": per_head}
"""Every route by the name that the command line uses."""


def _attended(layer: MultiHeadAttention, reading: RouteInputs, q: Tensor, k: Tensor, v: Tensor, tap: Tap) -> Tensor:
    places = reading.places
    key_places = places if reading.context is None else None
    q, k = layer.rotated(q, k, places, key_places, tap)
    allowed, bias = reading.allowed, reading.bias
    return layer.attended(q, k, v, places=places, key_places=key_places, allowed=allowed, bias=bias, tap=tap)[0]


def _side_by_side(
    rows: Float[Tensor, "batch length d_input"], *projections: nn.Linear
) -> Float[Tensor, "batch length width"]:
    weight = torch.cat([projection.weight for projection in projections])
    biases: list[Tensor] = [projection.bias for projection in projections if projection.bias is not None]
    return nn.functional.linear(rows, weight, torch.cat(biases) if biases else None)


def _each_head(
    rows: Float[Tensor, "batch length d_input"], projection: nn.Linear, n_heads: int
) -> Float[Tensor, "batch {n_heads} length d"]:
    w = projection.weight.unflatten(0, (n_heads, -1)).mT  # [head, d_input, d]
    heads: Tensor = rows[:, None] @ w
    if projection.bias is None:
        return heads
    biased: Tensor = heads + projection.bias.unflatten(0, (n_heads, 1, -1))
    return biased
