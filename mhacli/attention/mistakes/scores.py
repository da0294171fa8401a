"""Mistakes in the scores and the softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.stages import Forms, ReferenceLayer, mistake, require

# ---------------------------------------------------------------------------------------------------- products and their scale


@mistake("qk-swapped", "products", needs=("order", "unpacked"))
def qk_swapped() -> Forms:
    """The transposed products."""
    yield "the scores are k qᵀ instead of q kᵀ", lambda layer, q, k: k @ q.mT


Factor = Callable[[ReferenceLayer, int, float | Tensor], float | Tensor]
"""A factor of the scores, of the layer, d_head and the right factor."""


def scaled_by(factor: Factor) -> Callable[..., Tensor]:
    """Products times another factor than the right one."""

    def scale(layer: ReferenceLayer, qk: Tensor, d_head: int) -> Tensor:
        right = d_head**-0.5 if layer.scale is None else layer.scale
        wrong = factor(layer, d_head, right)
        require(not torch.allclose(torch.as_tensor(wrong), torch.as_tensor(right), rtol=1e-9))
        return qk * wrong

    return scale


def by_head_width(layer: ReferenceLayer, d_head: int, right: float | Tensor) -> float:
    """1 / d_head."""
    return 1 / d_head


def by_model_width(layer: ReferenceLayer, d_head: int, right: float | Tensor) -> float:
    """1 / √d_model; for split heads, d_model is the sum of their widths."""
    return float((d_head * layer.n_heads if layer.weights is None else layer.weights.q.weight.shape[1]) ** -0.5)


def by_whole_model_width(layer: ReferenceLayer, d_head: int, right: float | Tensor) -> float | Tensor:
    """1 / d_model; for a single head the right scale, because 1 / d_head is another mistake."""
    return right if layer.n_heads == 1 else by_model_width(layer, d_head, right) ** 2


def scaled_by_size(axis: int, power: float) -> Callable[..., Tensor]:
    """Products times a power of the size of an axis."""

    def scale(layer: ReferenceLayer, qk: Tensor, d_head: int) -> Tensor:
        size = qk.shape[axis]
        require(size > 1)
        return scaled_by(lambda layer, d, right: float(size) ** power)(layer, qk, d_head)

    return scale


@mistake("scale-missing", "scale")
def scale_missing() -> Forms:
    """The products as they are."""
    yield "the scores are not scaled at all", scaled_by(lambda layer, d, right: 1.0)


@mistake("scale-d-model", "scale")
def scale_d_model() -> Forms:
    """The width of the model in place of that of a head."""
    yield "the scores are divided by √d_model", scaled_by(by_model_width)
    yield "the scores are divided by d_model", scaled_by(by_whole_model_width)


@mistake("scale-not-root", "scale")
def scale_not_root() -> Forms:
    """The width of a head in place of its root."""
    yield "the scores are divided by d_head", scaled_by(by_head_width)


@mistake("scale-twice", "scale")
def scale_twice() -> Forms:
    """The square of the right factor."""
    yield "the scores are scaled twice", scaled_by(lambda layer, d, right: right * right)


@mistake("scale-one-side", "scale")
def scale_one_side() -> Forms:
    """The root of the right factor."""
    yield "the scores are divided by the fourth root of d_head", scaled_by(lambda layer, d, right: d**-0.25)


@mistake("scale-length", "scale")
def scale_length() -> Forms:
    """A length in place of the width of a head."""
    yield "the scores are divided by √k_len", scaled_by_size(-1, -0.5)
    yield "the scores are divided by √q_len", scaled_by_size(-2, -0.5)
    yield "the scores are divided by k_len", scaled_by_size(-1, -1.0)
    yield "the scores are divided by q_len", scaled_by_size(-2, -1.0)


@mistake("scale-batch", "scale")
def scale_batch() -> Forms:
    """The size of the batch in place of the width of a head."""
    yield "the scores are divided by the root of the size of the batch", scaled_by_size(0, -0.5)


@mistake("scale-heads", "scale")
def scale_heads() -> Forms:
    """The number of heads in place of their width."""
    yield "the scores are divided by √n_heads", scaled_by_size(1, -0.5)


@mistake("scale-multiplied", "scale")
def scale_multiplied() -> Forms:
    """The inverse of the right factor."""
    yield "the scores are multiplied by √d_head", scaled_by(lambda layer, d, right: d**0.5)


@mistake("scale-after-softmax", "value_weights")
def scale_after_softmax() -> Forms:
    """Weights of unscaled scores, scaled after the softmax."""

    def weights(factor: Factor, layer: ReferenceLayer, pattern: Tensor, scaled: Tensor, keep: Tensor | None) -> Tensor:
        require(layer.scale is not None or layer.d_head is not None)
        d_head = layer.d_head or 1
        right = d_head**-0.5 if layer.scale is None else layer.scale
        unscaled = scaled / right
        masked = unscaled if keep is None else stages.mask(layer, unscaled, keep)
        return stages.softmax(layer, masked) * factor(layer, d_head, right)

    for how, factor in (
        ("scaled", lambda layer, d, right: right),
        ("divided by √d_model", by_model_width),
        ("divided by d_head", by_head_width),
        ("divided by d_model", by_whole_model_width),
    ):
        yield f"the softmax is over unscaled scores, and its result is {how}", partial(weights, factor)


# --------------------------------------------------------------------------------------------------------------------- the cap


@mistake("softcap-after-mask", "cap", site="scores", shown_by="large")
def softcap_after_mask() -> Forms:
    """Scores capped after the mask, −c where masked."""

    def cap(layer: ReferenceLayer, scores: Tensor, keep: Tensor | None) -> tuple[Tensor, bool]:
        require(layer.softcap is not None)
        c = layer.softcap or 0.0
        masked = scores if keep is None else scores.masked_fill(~keep, -math.inf)
        return c * torch.tanh(masked / c), False

    yield "masked scores are capped like the others", cap


@mistake("softcap-not-scaled-back", "cap")
def softcap_not_scaled_back() -> Forms:
    """Scores capped to ±1."""
    capped = "tanh(score / c) stands without the factor c"
    yield capped, lambda layer, scores, keep: (torch.tanh(scores / layer.softcap), True)


@mistake("softcap-missing", "cap")
def softcap_missing() -> Forms:
    """Scores without the cap."""
    yield "the scores are not capped", lambda layer, scores, keep: (scores, True)


# ------------------------------------------------------------------------------------------------------------------- bias


@mistake("bias-reversed", "add_bias")
def bias_reversed() -> Forms:
    """A bonus for distance instead of a penalty."""
    yield "the penalty for distance is added instead of subtracted", lambda layer, scores, bias: scores - bias


@mistake("bias-head-order", "add_bias")
def bias_head_order() -> Forms:
    """A bias `[query, key, head]` read as `[head, query, key]`."""

    def add(layer: ReferenceLayer, scores: Tensor, bias: Tensor) -> Tensor:
        return scores + bias[0].permute(1, 2, 0).reshape(bias.shape)

    yield "the bias is reshaped to [head, query, key] without a permute", add


@mistake("bias-head-order", "add_bias", form="batched")
def bias_head_order_batched() -> Forms:
    """A bias repeated in the wrong order of batch and heads."""

    def add(layer: ReferenceLayer, scores: Tensor, bias: Tensor) -> Tensor:
        return scores + bias[0].repeat_interleave(scores.shape[0], dim=0).reshape(scores.shape[0], *bias.shape[1:])

    yield "the bias is repeated for the sequences in the other order than the scores", add


# ----------------------------------------------------------------------------------------------------------------- the softmax


@mistake("softmax-axis", "softmax")
def softmax_axis() -> Forms:
    """A softmax over another axis than the keys."""

    def over_planes(layer: ReferenceLayer, scores: Tensor) -> Tensor:
        return scores.flatten(0, 1).softmax(dim=0).view_as(scores)

    def over_cells(layer: ReferenceLayer, scores: Tensor) -> Tensor:
        return scores.flatten(-2).softmax(dim=-1).view_as(scores)

    yield "the softmax runs over queries instead of keys", lambda layer, scores: scores.softmax(dim=-2)
    yield "the softmax runs over heads instead of keys", lambda layer, scores: scores.softmax(dim=1)
    yield (
        "the softmax runs over the sequences of the batch instead of keys",
        lambda layer, scores: scores.softmax(dim=0),
    )
    yield "the softmax runs over the planes of batch and head", over_planes
    yield "the softmax runs over queries and keys together", over_cells


@mistake("pattern-transposed", "weigh")
def pattern_transposed() -> Forms:
    """Values of queries for keys."""
    yield "the values are weighed by the transposed pattern", lambda layer, pattern, v: pattern.mT @ v


@mistake("sink-dropped-wrongly", "softmax")
def sink_dropped_wrongly() -> Forms:
    """Weights with the sink's column kept and the first key's dropped."""

    def softmax(layer: ReferenceLayer, scores: Tensor) -> Tensor:
        require(layer.sinks is not None)
        return stages.with_sinks(layer, scores).softmax(dim=-1)[..., 1:]

    yield "the column of the first key is dropped instead of the sink's", softmax


@mistake("sink-without-effect", "softmax")
def sink_without_effect() -> Forms:
    """Weights without the sink in the denominator."""

    def softmax(layer: ReferenceLayer, scores: Tensor) -> Tensor:
        require(layer.sinks is not None)
        return scores.softmax(dim=-1)

    yield "the sink takes no part", softmax


@mistake("softmax-missing", "softmax")
def softmax_missing() -> Forms:
    """Scores in place of weights."""
    yield "the scores themselves weigh the values", lambda layer, scores: scores


@mistake("softmax-twice", "softmax")
def softmax_twice() -> Forms:
    """A softmax of the weights."""
    yield (
        "the softmax is applied to its own result",
        lambda layer, scores: stages.softmax(layer, scores).softmax(dim=-1),
    )


@mistake("softmax-twice", "scale", form="around the mask")
def softmax_around_the_mask() -> Forms:
    """Weights as scores, for another softmax after the mask."""

    def scale(layer: ReferenceLayer, qk: Tensor, d_head: int) -> Tensor:
        return stages.scale(layer, qk, d_head).softmax(dim=-1)

    yield "the softmax is applied to the scores before the mask too", scale


@mistake("softmax-overflow", "softmax", shown_by="large", may_be_nan=True)
def softmax_overflow() -> Forms:
    """A softmax without subtracting the maximum."""

    def softmax(layer: ReferenceLayer, scores: Tensor) -> Tensor:
        powers = scores.exp()
        return powers / powers.sum(dim=-1, keepdim=True)

    yield "exponentials are taken of the scores as they are", softmax
