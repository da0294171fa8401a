"""What people put in the place of a stage of attention: each function here is a mistake, `mhacli.attention.mistakes` names it.

A function that has nothing to do in a layer, such as leaving out a bias that is not there, raises `Inapplicable`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.stages import Layer, Pairing, Projection, Rows, turned


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


def used_as(letters: str) -> Callable[..., tuple[Tensor, ...]]:
    """Projections by the letter of what each is used for, one of them twice: `qkk` makes values with that of the keys."""

    def project(layer: Layer, rows: Rows) -> tuple[Tensor, ...]:
        named = dict(zip("qkv", inputs_of(layer), strict=True))
        return tuple(named[letter](given) for letter, given in zip(letters, rows[:3], strict=True))

    return project


def not_projected(letter: str) -> Callable[..., tuple[Tensor, ...]]:
    """Rows as they are in the place of those that a projection makes of them."""

    def project(layer: Layer, rows: Rows) -> tuple[Tensor, ...]:
        return tuple(
            given if name == letter else projection(given)
            for name, projection, given in zip("qkv", inputs_of(layer), rows[:3], strict=True)
        )

    return project


def taken_as(letters: str) -> Callable[..., tuple[Tensor, ...]]:
    """Heads by the letter of what each is taken for: `qkk` weighs the keys. Heads that are shared by fewer cannot be taken for
    those that are not."""

    def take(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        if not {q.shape[1]} == {k.shape[1]} == {v.shape[1]}:
            raise Inapplicable
        named = {"q": q, "k": k, "v": v}
        return tuple(named[letter] for letter in letters)

    return take


OTHER_ORDERS = tuple("".join(order) for order in permutations("qkv") if "".join(order) != "qkv")


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


# ----------------------------------------------------------------------------------------------------------------- scores


def swapped(layer: Layer, q: Tensor, k: Tensor) -> Tensor:
    """`k qᵀ`."""
    return k @ q.mT


def scaled_by(factor: Callable[[Layer, int, float | Tensor], float | Tensor]) -> Callable[..., Tensor]:
    """Products times a factor of the layer, d_head and the right scale. Inapplicable where that is the right one."""

    def scale(layer: Layer, qk: Tensor, d_head: int) -> Tensor:
        right = d_head**-0.5 if layer.scale is None else layer.scale
        taken = factor(layer, d_head, right)
        if torch.allclose(torch.as_tensor(taken), torch.as_tensor(right), rtol=1e-9):
            raise Inapplicable
        return qk * taken

    return scale


def softmax_first(layer: Layer, qk: Tensor, d_head: int) -> Tensor:
    """Shares as the scores, which are masked and given to the softmax again."""
    return stages.scale(layer, qk, d_head).softmax(dim=-1)


def by_model_width(layer: Layer, d_head: int, right: float | Tensor) -> float:
    """1 / √d_model; of heads that come cut, d_model is their widths together."""
    return float((d_head * layer.n_heads if layer.weights is None else layer.weights.q.weight.shape[1]) ** -0.5)


def by_whole_model_width(layer: Layer, d_head: int, right: float | Tensor) -> float | Tensor:
    """1 / d_model; of one head that is 1 / d_head, another mistake."""
    return right if layer.n_heads == 1 else by_model_width(layer, d_head, right) ** 2


def scaled_by_size(axis: int, power: float) -> Callable[..., Tensor]:
    """Products times a power of the size of one of their axes: heads, queries or keys. Inapplicable where that is the right
    scale, or there is but one."""

    def scale(layer: Layer, qk: Tensor, d_head: int) -> Tensor:
        taken = float(qk.shape[axis]) ** power
        return scaled_by(lambda layer, d, right: right if qk.shape[axis] == 1 else taken)(layer, qk, d_head)

    return scale


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


# ------------------------------------------------------------------------------------------------------ what is added to scores


def bias_reversed(layer: Layer, scores: Tensor, bias: Tensor) -> Tensor:
    """A bonus for distance instead of a penalty."""
    return scores - bias


def bias_unmoved(layer: Layer, scores: Tensor, bias: Tensor) -> Tensor:
    """A table `[query, key, head]` read as `[head, query, key]`."""
    if bias.shape[1] == 1:
        raise Inapplicable
    return scores + bias[0].permute(1, 2, 0).reshape(bias.shape)


def bias_repeated_inside(layer: Layer, scores: Tensor, bias: Tensor) -> Tensor:
    """Batch and heads one axis, the batch outside in the scores and inside in the bias."""
    if bias.shape[1] == 1 or scores.shape[0] == 1:
        raise Inapplicable
    return scores + bias[0].repeat_interleave(scores.shape[0], dim=0).reshape(scores.shape[0], *bias.shape[1:])


# ---------------------------------------------------------------------------------------------------------------- softmax


def over_planes(layer: Layer, scores: Tensor) -> Tensor:
    """Shares over the planes of batch and head."""
    return scores.flatten(0, 1).softmax(dim=0).view_as(scores)


def over_both(layer: Layer, scores: Tensor) -> Tensor:
    """Shares over queries and keys together."""
    return scores.flatten(-2).softmax(dim=-1).view_as(scores)


def pattern_transposed(layer: Layer, pattern: Tensor, v: Tensor) -> Tensor:
    """Each key weighs the values by what the queries give it."""
    if pattern.shape[-1] != pattern.shape[-2]:
        raise Inapplicable
    return pattern.mT @ v


def sink_kept(layer: Layer, scores: Tensor) -> Tensor:
    """The sink's column taken for the last key's, and the first key's dropped."""
    if layer.sinks is None:
        raise Inapplicable
    return stages.with_sinks(layer, scores).softmax(dim=-1)[..., 1:]


def sink_left_out(layer: Layer, scores: Tensor) -> Tensor:
    """The shares of the keys made to sum to 1 again, so that the sink takes nothing."""
    if layer.sinks is None:
        raise Inapplicable
    return scores.softmax(dim=-1)


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


def turned_one_way(layer: Layer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Both columns of a pair get the sine of the other with the same sign: no rotation."""
    if layer.pairing is None:
        raise Inapplicable
    start = k.shape[2] - q.shape[2]
    return _one_signed(q, layer, start, layer.pairing), _one_signed(k, layer, 0, layer.pairing)


def _one_signed(t: Tensor, layer: Layer, start: int, pairing: Pairing) -> Tensor:
    forth, back = turned(t, layer, start, pairing), turned(t, layer, start, pairing, sign=-1)
    column = torch.arange(t.shape[-1], device=t.device)
    is_first = column < t.shape[-1] // 2 if pairing == "half" else column % 2 == 0
    return torch.where(is_first, back, forth)


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


def turned_keys(layer: Layer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries are not turned."""
    if layer.pairing is None:
        raise Inapplicable
    return q, stages.turn(layer, q, k)[1]


def turned_off_by(places: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Queries turned by the place of a neighbour."""

    def turn(layer: Layer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if layer.pairing is None:
            raise Inapplicable
        start = k.shape[2] - q.shape[2]
        return turned(q, layer, start + places, layer.pairing), turned(k, layer, 0, layer.pairing)

    return turn


def normed_as(of_q: str | None, of_k: str | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """Queries and keys normed by the norm of queries or of keys, or by none."""

    def norm(layer: Layer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if layer.q_norm is None or layer.k_norm is None or layer.q_norm is layer.k_norm:
            raise Inapplicable
        chosen = {"q": layer.q_norm, "k": layer.k_norm}
        return q if of_q is None else chosen[of_q](q), k if of_k is None else chosen[of_k](k)

    return norm


def turned_by_head(layer: Layer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The number of a head taken for a place."""
    if layer.pairing is None or q.shape[1] == 1:
        raise Inapplicable
    q, k = (turned(t.transpose(1, 2), layer, 0, layer.pairing).transpose(1, 2) for t in (q, k))
    return q, k


def turned_with(rates: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Other rates than theta^(−2j/d): `rates` makes them of the right ones."""

    def turn(layer: Layer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if layer.pairing is None or layer.rates is not None or q.shape[-1] < 4:
            raise Inapplicable
        d = q.shape[-1]
        right = layer.theta ** -(torch.arange(0, d, 2, dtype=q.dtype, device=q.device) / d)
        return stages.turn(replace(layer, rates=rates(right)), q, k)

    return turn


def turned_values(layer: Layer, v: Tensor) -> Tensor:
    """Values turned like keys."""
    if layer.pairing is None:
        raise Inapplicable
    return turned(v, layer, 0, layer.pairing)
