"""What people put in the place of a stage of attention: each function here is a mistake, `mhacli.attention.mistakes` names it.

A function that has nothing to do in a layer, such as leaving out a bias that is not there, raises `Inapplicable`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import permutations

import torch
from torch import Tensor

from mhacli.attention import stages
from mhacli.attention.stages import Layer, Pairing, Projection, Rows, turned


class Inapplicable(Exception):
    """A mistake that cannot be made in this layer."""


# ------------------------------------------------------------------------------------------------------------ projections


def out_of(layer: Layer) -> Projection:
    """The output projection. Raises `Inapplicable` where there is none."""
    if layer.weights is None or layer.weights.out is None:
        raise Inapplicable
    return layer.weights.out


def unbiased(*of: str) -> Callable[..., tuple[Tensor, ...]]:
    """Projections, named by their letters, without their biases."""

    def project(layer: Layer, rows: Rows) -> tuple[Tensor, ...]:
        made = []
        for letter, projection, given in zip("qkv", inputs_of(layer), rows[:3], strict=True):
            if letter in of and projection.bias is None:
                raise Inapplicable
            made.append((projection._replace(bias=None) if letter in of else projection)(given))
        return tuple(made)

    return project


def inputs_of(layer: Layer) -> tuple[Projection, Projection, Projection]:
    """The projections of queries, keys and values. Raises `Inapplicable` where nothing is projected."""
    if layer.weights is None:
        raise Inapplicable
    return layer.weights.q, layer.weights.k, layer.weights.v


def transposed_inputs(layer: Layer, rows: Rows) -> tuple[Tensor, ...]:
    """Square projections of queries, keys and values, applied the other way round."""
    turned_round = [p._replace(weight=p.weight.mT) for p in inputs_of(layer)]
    return tuple(projection(given) for projection, given in zip(turned_round, rows[:3], strict=True))


def order_of(order: str) -> Callable[..., tuple[Tensor, ...]]:
    """The projections that lie as q, k, v taken in another order: `order` says what each is taken for."""

    def project(layer: Layer, rows: Rows) -> tuple[Tensor, ...]:
        laid = dict(zip(order, inputs_of(layer), strict=True))
        return tuple(laid[letter](given) for letter, given in zip("qkv", rows[:3], strict=True))

    return project


def fused_flat(layer: Layer, rows: Rows) -> tuple[Tensor, ...]:
    """One projection of all three, reshaped to `[batch, 3, head, length, d_head]`, as rows that are cut right afterwards."""
    fused = torch.cat([projection(rows.queries) for projection in inputs_of(layer)], dim=-1)
    if layer.n_heads != layer.n_kv_heads or layer.n_heads == 1:
        raise Inapplicable
    cut = fused.reshape(fused.shape[0], 3, layer.n_heads, fused.shape[1], -1)
    return tuple(part.transpose(1, 2).flatten(2) for part in cut.unbind(1))


OTHER_ORDERS = tuple("".join(order) for order in permutations("qkv") if "".join(order) != "qkv")


def values_from_keys(layer: Layer, rows: Rows) -> tuple[Tensor, ...]:
    """Values made with the weights of the keys."""
    q, k, _ = inputs_of(layer)
    return q(rows.queries), k(rows.keys), k(rows.values)


def values_are_keys(layer: Layer, rows: Rows) -> tuple[Tensor, ...]:
    """The projected keys as values."""
    q, k, _ = inputs_of(layer)
    return q(rows.queries), k(rows.keys), k(rows.keys)


def rows_for(order: str) -> Callable[..., tuple[Tensor, ...]]:
    """Queries, keys and values made from other rows: `order` says from whose, "qkk" the values from those of the keys."""

    def project(layer: Layer, rows: Rows) -> tuple[Tensor, ...]:
        given = dict(zip("qkv", rows[:3], strict=True))
        return tuple(projection(given[letter]) for projection, letter in zip(inputs_of(layer), order, strict=True))

    return project


def rows_as_they_are(layer: Layer, rows: Tensor) -> Tensor:
    """The heads side by side as the output, although there is a projection."""
    out_of(layer)
    return rows


def out_transposed(layer: Layer, rows: Tensor) -> Tensor:
    """The output projection applied the other way round."""
    out = out_of(layer)
    return out._replace(weight=out.weight.mT)(rows)


def out_unbiased(layer: Layer, rows: Tensor) -> Tensor:
    """The output projection without its bias."""
    if out_of(layer).bias is None:
        raise Inapplicable
    return out_of(layer)._replace(bias=None)(rows)


# ------------------------------------------------------------------------------------------------------------------ heads


def split_flat(*of: str) -> Callable[..., Tensor]:
    """Rows read as heads without moving the axis, for some of q, k and v."""

    def split(layer: Layer, rows: Tensor, n_heads: int, which: str) -> Tensor:
        if n_heads == 1:
            raise Inapplicable
        if which not in of:
            return stages.split(layer, rows, n_heads, which)
        return rows.reshape(rows.shape[0], n_heads, rows.shape[1], -1)

    return split


def values_whole(layer: Layer, rows: Tensor, n_heads: int, which: str) -> Tensor:
    """Values that are not cut: every head weighs whole rows."""
    if n_heads == 1:
        raise Inapplicable
    return rows[:, None] if which == "v" else stages.split(layer, rows, n_heads, which)


def merge_flat(layer: Layer, z: Tensor) -> Tensor:
    """Heads read as rows without moving the axis back."""
    if z.shape[1] == 1:
        raise Inapplicable
    return z.reshape(z.shape[0], z.shape[2], -1)


def heads_as(reduced: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Heads made one by a mean or a sum, as wide as the output projection reads."""

    def merge(layer: Layer, z: Tensor) -> Tensor:
        if z.shape[1] == 1:
            raise Inapplicable
        one = reduced(z)
        wide = layer.weights is not None and layer.weights.out is not None
        return one if not wide or out_of(layer).weight.shape[1] == one.shape[-1] else one.repeat(1, 1, z.shape[1])

    return merge


def mean_of_heads(z: Tensor) -> Tensor:
    """`[batch, query, d_v]`."""
    return z.mean(dim=1)


def sum_of_heads(z: Tensor) -> Tensor:
    """`[batch, query, d_v]`."""
    return z.sum(dim=1)


def shared_as(chosen: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """Another kv head for each query head."""

    def share(layer: Layer, heads: Tensor) -> Tensor:
        if heads.shape[1] in (1, layer.n_heads):
            raise Inapplicable
        return chosen(heads, layer.n_heads)

    return share


def tiled(heads: Tensor, n_heads: int) -> Tensor:
    """0 1 0 1 where 0 0 1 1 is right."""
    return heads.repeat(1, n_heads // heads.shape[1], 1, 1)


def first_for_all(heads: Tensor, n_heads: int) -> Tensor:
    """Kv head 0 for every query head."""
    return heads[:, :1].expand(-1, n_heads, -1, -1)


# ----------------------------------------------------------------------------------------------------------------- scores


def swapped(layer: Layer, q: Tensor, k: Tensor) -> Tensor:
    """`k qᵀ`."""
    return k @ q.mT


def scaled_by(factor: Callable[[Layer, int, float], float]) -> Callable[..., Tensor]:
    """Products times a factor of the layer, d_head and the right scale. Inapplicable where that is the right one."""

    def scale(layer: Layer, qk: Tensor, d_head: int) -> Tensor:
        right = d_head**-0.5 if layer.scale is None else layer.scale
        taken = factor(layer, d_head, right)
        if math.isclose(taken, right):
            raise Inapplicable
        return qk * taken

    return scale


def by_model_width(layer: Layer, d_head: int, right: float) -> float:
    """1 / √d_model; of heads that come cut, d_model is their widths together."""
    return float((d_head * layer.n_heads if layer.weights is None else layer.weights.q.weight.shape[1]) ** -0.5)


def scaled_late(layer: Layer, pattern: Tensor, scaled: Tensor, keep: Tensor | None) -> Tensor:
    """Shares of unscaled scores, scaled."""
    if layer.scale is None and layer.d_head is None:
        raise Inapplicable
    right = layer.scale if layer.scale is not None else (layer.d_head or 1) ** -0.5
    unscaled = scaled / right
    return stages.softmax(layer, unscaled if keep is None else stages.mask(layer, unscaled, keep)) * right


def capped_late(layer: Layer, scores: Tensor, keep: Tensor | None) -> tuple[Tensor, bool]:
    """Forbidden scores are −c."""
    c = _cap_of(layer)
    return c * torch.tanh((scores if keep is None else scores.masked_fill(~keep, -math.inf)) / c), False


def capped_small(layer: Layer, scores: Tensor, keep: Tensor | None) -> tuple[Tensor, bool]:
    """Scores within ±1."""
    return torch.tanh(scores / _cap_of(layer)), True


def not_capped(layer: Layer, scores: Tensor, keep: Tensor | None) -> tuple[Tensor, bool]:
    """Scores as they are."""
    _cap_of(layer)
    return scores, True


def _cap_of(layer: Layer) -> float:
    if layer.softcap is None:
        raise Inapplicable
    return layer.softcap


# ---------------------------------------------------------------------------------------------------------------- softmax


def over(axis: int) -> Callable[..., Tensor]:
    """Shares over another axis than the keys."""
    return lambda layer, scores: scores.softmax(dim=axis)


def without_maximum(layer: Layer, scores: Tensor) -> Tensor:
    """Exponentials as they are."""
    powers = scores.exp()
    return powers / powers.sum(dim=-1, keepdim=True)


def no_softmax(layer: Layer, scores: Tensor) -> Tensor:
    """Scores as shares."""
    return scores


def softmax_twice(layer: Layer, scores: Tensor) -> Tensor:
    """Shares of shares."""
    return stages.softmax(layer, scores).softmax(dim=-1)


# --------------------------------------------------------------------------------------------------------------- rotation


def turned_as(pairing_q: Pairing, pairing_k: Pairing, angles: Pairing | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """Columns paired in one way, and the table of angles laid out in another."""

    def turn(layer: Layer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if layer.pairing is None:
            raise Inapplicable
        start = k.shape[2] - q.shape[2]
        return turned(q, layer, start, pairing_q, angles), turned(k, layer, 0, pairing_k, angles)

    return turn


def turned_other(layer: Layer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The other pairing than that which is meant."""
    other: Pairing = "interleaved" if layer.pairing == "half" else "half"
    return turned_as(other, other, None)(layer, q, k)


def turned_queries(layer: Layer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Keys are not turned."""
    if layer.pairing is None:
        raise Inapplicable
    return stages.turn(layer, q, k)[0], k


def turned_back(layer: Layer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries turned one way, keys the other."""
    if layer.pairing is None:
        raise Inapplicable
    return stages.turn(layer, q, k)[0], turned(k, layer, 0, layer.pairing, sign=-1)


def turned_values(layer: Layer, v: Tensor) -> Tensor:
    """Values turned like keys."""
    if layer.pairing is None:
        raise Inapplicable
    return turned(v, layer, 0, layer.pairing)
