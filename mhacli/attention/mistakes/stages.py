"""Attention cut into stages, so that one can be exchanged: the reference that somebody's attention is compared with.

With every stage as it should be this is `mhacli.attention.core.attend` between its projections, and is tested against it.
`mhacli.attention.mistakes` holds what people put in a stage's place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mhacli.attention.core import Tap, no_tap, per_query_head

Pairing = Literal["half", "interleaved"]


class Projection(NamedTuple):
    """`y = x weightᵀ + bias`: `[width, d_in]` and `[width]`."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        """The rows, projected."""
        made = rows @ self.weight.mT
        return made if self.bias is None else made + self.bias


class Projections(NamedTuple):
    """Those of a layer. Without `out` the heads side by side are the result."""

    q: Projection
    k: Projection
    v: Projection
    out: Projection | None = None


@dataclass(frozen=True)
class Layer:
    """What a layer is told besides its input. Without `weights`, rows come cut into heads and nothing is projected.

    `pairing`: how rotary positions pair columns, None without them; `rates` are the radians by which each pair of the first
    columns is turned from place to place, None for theta^(−2j/d) in all columns.
    `interleaved_split`: a head has every n-th column, not columns side by side; `interleaved_merge`: the same on the way back.
    `causal`: the layer masks the future itself. `sees`, bool `[query, key]`, is any other mask of its own. `before` and `after`
    are what it does to its input and with its output besides, such as a norm or a residual: `after(out, input)`. `q_norm` and
    `k_norm` act on queries and keys of each head. `scale` is a number, or one for each head, `[head, 1, 1]`. `bias` gives what is
    added to the scores of some rows, `[1, head, query, key]`, None for nothing; `sinks`, `[head]`, are logits that take part in
    the softmax and are no key's.
    """

    n_heads: int
    n_kv_heads: int
    scale: float | Tensor | None = None
    weights: Projections | None = None
    softcap: float | None = None
    pairing: Pairing | None = None
    theta: float = 10000.0
    rates: Tensor | None = None
    interleaved_split: bool = False
    interleaved_merge: bool = False
    causal: bool = False
    sees: Tensor | None = None
    before: Callable[[Tensor], Tensor] | None = None
    after: Callable[[Tensor, Tensor], Tensor] | None = None
    q_norm: Callable[[Tensor], Tensor] | None = None
    k_norm: Callable[[Tensor], Tensor] | None = None
    bias: Callable[[Rows], Tensor | None] | None = None
    sinks: Tensor | None = None

    @property
    def d_head(self) -> int | None:
        """The width of a head of queries, None where it comes with the input."""
        return None if self.weights is None else self.weights.q.weight.shape[0] // self.n_heads


class Rows(NamedTuple):
    """What is asked: rows `[batch, length, d_in]` of queries, keys and values, or heads `[batch, head, length, d]`; and
    what the caller says of masks, True = may attend: `allowed` `[batch or 1, 1, query, key]`, `real` `[batch, key]`."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    allowed: Tensor | None = None
    real: Tensor | None = None


class Result(NamedTuple):
    """The output, and the cells that were allowed, None where all are."""

    out: Tensor
    keep: Tensor | None


# ------------------------------------------------------------------------------------------------------- stages as they should be


def project(layer: Layer, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of queries, keys and values, `[batch, length, head·d]`."""
    assert layer.weights is not None
    return layer.weights.q(rows.queries), layer.weights.k(rows.keys), layer.weights.v(rows.values)


def split(layer: Layer, rows: Tensor, n_heads: int, which: str) -> Tensor:
    """`[batch, length, head·d]` cut into heads, `[batch, head, length, d]`; `which` says q, k or v."""
    if layer.interleaved_split:
        return rows.reshape(*rows.shape[:-1], -1, n_heads).permute(0, 3, 1, 2)
    return rows.reshape(*rows.shape[:-1], n_heads, -1).transpose(1, 2)


def norm(layer: Layer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of each head, normed where the layer norms them."""
    return q if layer.q_norm is None else layer.q_norm(q), k if layer.k_norm is None else layer.k_norm(k)


def turn(layer: Layer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by their places; queries are the last of the keys."""
    if layer.pairing is None:
        return q, k
    return turned(q, layer, k.shape[2] - q.shape[2], layer.pairing), turned(k, layer, 0, layer.pairing)


def turn_values(layer: Layer, v: Tensor) -> Tensor:
    """Values are not turned."""
    return v


def take(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What is taken for queries, keys and values in the products."""
    return q, k, v


def share(layer: Layer, heads: Tensor, which: str) -> Tensor:
    """Keys or values, `which` says k or v, with each kv head repeated for the query heads that share it: 0 0 1 1."""
    return per_query_head(heads, layer.n_heads * heads.shape[1] // layer.n_kv_heads)


def products(layer: Layer, q: Tensor, k: Tensor) -> Tensor:
    """`q kᵀ`, `[batch, head, query, key]`."""
    return q @ k.mT


def scale(layer: Layer, qk: Tensor, d_head: int) -> Tensor:
    """The products times the scale."""
    return qk * (d_head**-0.5 if layer.scale is None else layer.scale)


def cap(layer: Layer, scores: Tensor, keep: Tensor | None) -> tuple[Tensor, bool]:
    """The scores within ±softcap, where there is one, and whether the mask is still to come."""
    c = layer.softcap
    return scores if c is None else c * torch.tanh(scores / c), True


def add_bias(layer: Layer, scores: Tensor, bias: Tensor) -> Tensor:
    """The scores with their bias, `[1, head, query, key]`."""
    return scores + bias


def causal_rule(layer: Layer, q_len: int, k_len: int) -> Tensor:
    """`[query, key]`, True where the key is no later than the query; queries are the last of the keys."""
    return torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len)


def mask_rule(layer: Layer, allowed: Tensor) -> Tensor:
    """What the caller's mask allows."""
    return allowed


def padding_rule(layer: Layer, real: Tensor) -> Tensor:
    """`[batch, 1, 1, key]`: what the caller calls padding is seen by nobody."""
    return real[:, None, None, :]


def together(layer: Layer, rules: tuple[Tensor | None, Tensor | None, Tensor | None]) -> Tensor | None:
    """The cells that causality, mask and padding all allow."""
    keep = None
    for rule in rules:
        if rule is not None:
            keep = rule if keep is None else keep & rule
    return keep


def mask(layer: Layer, scores: Tensor, keep: Tensor) -> Tensor:
    """Scores that are not allowed are −∞."""
    return scores.masked_fill(~keep, -math.inf)


def softmax(layer: Layer, scores: Tensor) -> Tensor:
    """Shares over the keys, and a sink where there is one; a query without an allowed key gets zeros."""
    empty = (scores == -math.inf).all(dim=-1, keepdim=True)
    filled = scores.masked_fill(empty, 0.0)
    return with_sinks(layer, filled).softmax(dim=-1)[..., : scores.shape[-1]].masked_fill(empty, 0.0)


def with_sinks(layer: Layer, scores: Tensor) -> Tensor:
    """The scores, and behind those of the keys the sink's, where there is one."""
    if layer.sinks is None:
        return scores
    return torch.cat([scores, layer.sinks[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)


def shares(layer: Layer, pattern: Tensor, scaled: Tensor, keep: Tensor | None) -> Tensor:
    """What the values are weighted by: the pattern. `scaled` are the scores before the mask."""
    return pattern


def weigh(layer: Layer, pattern: Tensor, v: Tensor) -> Tensor:
    """`[batch, head, query, d_v]`: the values, weighted."""
    return pattern @ v


def merge(layer: Layer, z: Tensor) -> Tensor:
    """The heads side by side, `[batch, query, head·d_v]`."""
    return z.permute(0, 2, 3, 1).flatten(2) if layer.interleaved_merge else z.transpose(1, 2).flatten(2)


def project_out(layer: Layer, rows: Tensor) -> Tensor:
    """The heads mixed, where there is a projection for it."""
    return rows if layer.weights is None or layer.weights.out is None else layer.weights.out(rows)


@dataclass(frozen=True)
class Stages:
    """Every stage of attention by its name."""

    project: Callable[..., tuple[Tensor, Tensor, Tensor]] = project
    split: Callable[..., Tensor] = split
    norm: Callable[..., tuple[Tensor, Tensor]] = norm
    turn: Callable[..., tuple[Tensor, Tensor]] = turn
    turn_values: Callable[..., Tensor] = turn_values
    take: Callable[..., tuple[Tensor, Tensor, Tensor]] = take
    share: Callable[..., Tensor] = share
    products: Callable[..., Tensor] = products
    scale: Callable[..., Tensor] = scale
    cap: Callable[..., tuple[Tensor, bool]] = cap
    add_bias: Callable[..., Tensor] = add_bias
    causal_rule: Callable[..., Tensor] = causal_rule
    mask_rule: Callable[..., Tensor] = mask_rule
    padding_rule: Callable[..., Tensor] = padding_rule
    together: Callable[..., Tensor | None] = together
    mask: Callable[..., Tensor] = mask
    softmax: Callable[..., Tensor] = softmax
    shares: Callable[..., Tensor] = shares
    weigh: Callable[..., Tensor] = weigh
    merge: Callable[..., Tensor] = merge
    project_out: Callable[..., Tensor] = project_out


RIGHT = Stages()


def run(stages: Stages, layer: Layer, asked: Rows, tap: Tap = no_tap) -> Result:
    """The output of a layer with these stages. Taps: `q_proj k_proj v_proj q k v qk scaled scores pattern z concat out`."""
    rows = asked
    if layer.before is not None:
        rows = asked._replace(
            queries=layer.before(asked.queries), keys=layer.before(asked.keys), values=layer.before(asked.values)
        )
    q, k, v = heads(stages, layer, rows, tap)
    keep = _seen(stages, layer, rows, q.shape[2], k.shape[2])
    bias = None if layer.bias is None else layer.bias(asked)
    return Result(finished(stages, layer, (q, k, v), keep, bias, asked.queries, tap), keep)


def heads(stages: Stages, layer: Layer, rows: Rows, tap: Tap = no_tap) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[batch, head, length, d]`: projected, cut into heads, normed and turned."""
    q, k, v = rows.queries, rows.keys, rows.values
    if layer.weights is not None:
        made = stages.project(layer, rows)
        for site, tensor in zip(("q_proj", "k_proj", "v_proj"), made, strict=True):
            tap(site, tensor)
        q = stages.split(layer, made[0], layer.n_heads, "q")
        k = stages.split(layer, made[1], layer.n_kv_heads, "k")
        v = stages.split(layer, made[2], layer.n_kv_heads, "v")
    q, k = stages.norm(layer, q, k)
    q, k = stages.turn(layer, q, k)
    q, k, v = stages.take(layer, q, k, stages.turn_values(layer, v))
    for site, tensor in zip("qkv", (q, k, v), strict=True):
        tap(site, tensor)
    return q, k, v


def _seen(stages: Stages, layer: Layer, rows: Rows, q_len: int, k_len: int) -> Tensor | None:
    own = stages.causal_rule(layer, q_len, k_len) if layer.causal else layer.sees
    given = None if rows.allowed is None else stages.mask_rule(layer, rows.allowed)
    padding = None if rows.real is None else stages.padding_rule(layer, rows.real)
    keep = stages.together(layer, (own, given, padding))
    return None if keep is None else keep.reshape((1,) * (4 - keep.ndim) + tuple(keep.shape))


def finished(
    stages: Stages,
    layer: Layer,
    made: tuple[Tensor, Tensor, Tensor],
    keep: Tensor | None,
    bias: Tensor | None,
    queries: Tensor,
    tap: Tap = no_tap,
) -> Tensor:
    """The output that heads of queries, keys and values give; `queries` are the rows that the queries were made of."""
    z = _mixed(stages, layer, made, keep, bias, tap)
    if layer.weights is None:
        return z
    concat = stages.merge(layer, z)
    tap("concat", concat)
    out = stages.project_out(layer, concat)
    tap("out", out)
    return out if layer.after is None else layer.after(out, queries)


def _mixed(
    stages: Stages,
    layer: Layer,
    made: tuple[Tensor, Tensor, Tensor],
    keep: Tensor | None,
    bias: Tensor | None,
    tap: Tap,
) -> Tensor:
    q, k, v = made
    qk = stages.products(layer, q, stages.share(layer, k, "k"))
    tap("qk", qk)
    scaled, is_unmasked = stages.cap(layer, stages.scale(layer, qk, q.shape[-1]), keep)
    tap("scaled", scaled)
    scaled = scaled if bias is None else stages.add_bias(layer, scaled, bias)
    scores = scaled if keep is None or not is_unmasked else stages.mask(layer, scaled, keep)
    tap("scores", scores)
    pattern = stages.shares(layer, stages.softmax(layer, scores), scaled, keep)
    tap("pattern", pattern)
    z = stages.weigh(layer, pattern, stages.share(layer, v, "v"))
    tap("z", z)
    return z


# ---------------------------------------------------------------------------------------------------------------- rotation


def turned(
    t: Tensor, layer: Layer, start: int, pairing: Pairing, angles: Pairing | None = None, *, sign: int = 1
) -> Tensor:
    """Heads `[batch, head, length, d]` turned by their places, which begin at `start`: pair `j` by place · theta^(−2j/d), or by
    place · rate where the layer has rates; columns without a rate stay as they are.

    `angles` is how they lie in the table of cosines, where that is not how columns are paired. Source: Su et al. 2021,
    "RoFormer", equation 34; halves as in GPT-NeoX.
    """
    d = t.shape[-1]
    place = torch.arange(start, start + t.shape[2], dtype=t.dtype, device=t.device)
    rates = layer.rates
    if rates is None:
        rates = layer.theta ** -(torch.arange(0, d, 2, dtype=t.dtype, device=t.device) / d)
    angle = place[:, None] * rates.to(t)
    laid = torch.cat([angle, angle], dim=-1) if (angles or pairing) == "half" else angle.repeat_interleave(2, dim=-1)
    part, rest = t[..., : laid.shape[-1]], t[..., laid.shape[-1] :]
    return torch.cat([part * laid.cos() + sign * _quarter_turn(part, pairing) * laid.sin(), rest], dim=-1)


def _quarter_turn(t: Tensor, pairing: Pairing) -> Tensor:
    if pairing == "half":
        a, b = t.chunk(2, dim=-1)
        return torch.cat([-b, a], dim=-1)
    return torch.stack([-t[..., 1::2], t[..., 0::2]], dim=-1).flatten(-2)
