"""Mistakes in the scores and the softmax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.stages import Forms, ReferenceLayer, mistakes, require

# ---------------------------------------------------------------------------------------------------- products and their scale


@mistakes("products", needs=("order", "unpacked"))
def products() -> Forms:
    """The transposed products."""
    yield "qk-swapped", "the scores are k qᵀ instead of q kᵀ", lambda layer, q, k: k @ q.mT


def right_factor(layer: ReferenceLayer, d_head: int) -> float | Tensor:
    """The factor of the products."""
    return d_head**-0.5 if layer.scale is None else layer.scale


def model_width(layer: ReferenceLayer, d_head: int) -> int:
    """The width of the model; for split heads, the sum of their widths."""
    return d_head * layer.n_heads if layer.weights is None else layer.weights.q.weight.shape[1]


def scaled_by(factor: Callable[..., float | Tensor], layer: ReferenceLayer, qk: Tensor, d_head: int) -> Tensor:
    """Products times another factor than the right one."""
    right, wrong = right_factor(layer, d_head), factor(layer, qk, d_head)
    require(not torch.allclose(torch.as_tensor(wrong), torch.as_tensor(right), rtol=1e-9))
    return qk * wrong


@mistakes("scale")
def scale() -> Forms:
    """Products times another factor than 1 / √d_head."""
    for code, sentence, factor in (
        ("scale-missing", "the scores are not scaled at all", lambda layer, qk, d: 1.0),
        ("scale-d-model", "the scores are divided by √d_model", lambda layer, qk, d: model_width(layer, d) ** -0.5),
        ("scale-d-model", "the scores are divided by d_model", lambda layer, qk, d: 1 / model_width(layer, d)),
        ("scale-not-root", "the scores are divided by d_head", lambda layer, qk, d: 1 / d),
        ("scale-twice", "the scores are scaled twice", lambda layer, qk, d: right_factor(layer, d) ** 2),
        ("scale-one-side", "the scores are divided by the fourth root of d_head", lambda layer, qk, d: d**-0.25),
        ("scale-length", "the scores are divided by √k_len", lambda layer, qk, d: qk.shape[-1] ** -0.5),
        ("scale-length", "the scores are divided by √q_len", lambda layer, qk, d: qk.shape[-2] ** -0.5),
        ("scale-length", "the scores are divided by k_len", lambda layer, qk, d: 1 / qk.shape[-1]),
        ("scale-length", "the scores are divided by q_len", lambda layer, qk, d: 1 / qk.shape[-2]),
        ("scale-batch", "the scores are divided by the root of the batch size", lambda layer, qk, d: len(qk) ** -0.5),
        ("scale-heads", "the scores are divided by √n_heads", lambda layer, qk, d: qk.shape[1] ** -0.5),
        ("scale-multiplied", "the scores are multiplied by √d_head", lambda layer, qk, d: d**0.5),
    ):
        yield code, sentence, partial(scaled_by, factor)


def scaled_weights(
    factor: Callable[..., float | Tensor], layer: ReferenceLayer, pattern: Tensor, scaled: Tensor, keep: Tensor | None
) -> Tensor:
    """Weights of unscaled scores, scaled after the softmax."""
    require(layer.scale is not None or layer.d_head is not None)
    d_head = layer.d_head or 1
    unscaled = scaled / right_factor(layer, d_head)
    masked = unscaled if keep is None else stages.mask(layer, unscaled, keep)
    return stages.softmax(layer, masked) * factor(layer, d_head)


@mistakes("value_weights")
def scale_after_softmax() -> Forms:
    """Weights that are scaled in place of the scores."""
    for how, factor in (
        ("scaled", right_factor),
        ("divided by √d_model", lambda layer, d: model_width(layer, d) ** -0.5),
        ("divided by d_head", lambda layer, d: 1 / d),
        ("divided by d_model", lambda layer, d: 1 / model_width(layer, d)),
    ):
        sentence = f"the softmax is over unscaled scores, and its result is {how}"
        yield "scale-after-softmax", sentence, partial(scaled_weights, factor)


# --------------------------------------------------------------------------------------------------------------------- the cap


@mistakes("mask", shown_by="large")
def cap_after_mask() -> Forms:
    """−c where masked."""
    capped = "masked scores are capped like the others"
    yield "softcap-after-mask", capped, lambda layer, scores, keep: scores.masked_fill(~keep, -layer.softcap)


@mistakes("cap")
def cap() -> Forms:
    """Scores that are not capped, or capped to ±1."""
    capped = "tanh(score / c) stands without the factor c"
    yield "softcap-not-scaled-back", capped, lambda layer, scores: torch.tanh(scores / layer.softcap)
    yield "softcap-missing", "the scores are not capped", lambda layer, scores: scores


# ------------------------------------------------------------------------------------------------------------------- bias


def bias_reshaped(layer: ReferenceLayer, scores: Tensor, bias: Tensor) -> Tensor:
    """A bias `[query, key, head]` read as `[head, query, key]`."""
    return scores + bias[0].permute(1, 2, 0).reshape(bias.shape)


def bias_repeated(layer: ReferenceLayer, scores: Tensor, bias: Tensor) -> Tensor:
    """A bias repeated in the wrong order of batch and heads."""
    return scores + bias[0].repeat_interleave(len(scores), dim=0).reshape(len(scores), *bias.shape[1:])


@mistakes("add_bias")
def bias() -> Forms:
    """A bonus for distance instead of a penalty, and a bias of other heads."""
    reversed_bias = "the penalty for distance is added instead of subtracted"
    yield "bias-reversed", reversed_bias, lambda layer, scores, bias: scores - bias
    reshaped = "the bias is reshaped to [head, query, key] without a permute"
    yield "bias-head-order", reshaped, bias_reshaped
    repeated = "the bias is repeated for the sequences in the other order than the scores"
    yield "bias-head-order, batched", repeated, bias_repeated


# ----------------------------------------------------------------------------------------------------------------- the softmax


def with_another_dropped(layer: ReferenceLayer, scores: Tensor) -> Tensor:
    """Weights with the sink's column kept and the first key's dropped."""
    require(layer.sinks is not None)
    return stages.with_sinks(layer, scores).softmax(dim=-1)[..., 1:]


def without_sinks(layer: ReferenceLayer, scores: Tensor) -> Tensor:
    """Weights without the sink in the denominator."""
    require(layer.sinks is not None)
    return scores.softmax(dim=-1)


@mistakes("softmax")
def softmax() -> Forms:
    """Weights that are not those over the keys."""
    for name, dim in (("queries", -2), ("heads", 1), ("the sequences of the batch", 0)):
        over = f"the softmax runs over {name} instead of keys"
        yield "softmax-axis", over, partial(lambda dim, layer, scores: scores.softmax(dim), dim)
    cells = "the softmax runs over queries and keys together"
    yield "softmax-axis", cells, lambda layer, scores: scores.flatten(-2).softmax(-1).view_as(scores)
    dropped = "the column of the first key is dropped instead of the sink's"
    yield "sink-dropped-wrongly", dropped, with_another_dropped
    yield "sink-without-effect", "the sink takes no part", without_sinks
    yield "softmax-missing", "the scores themselves weigh the values", lambda layer, scores: scores
    twice = "the softmax is applied to its own result"
    yield "softmax-twice", twice, lambda layer, scores: stages.softmax(layer, scores).softmax(dim=-1)


@mistakes("scale")
def softmax_around_the_mask() -> Forms:
    """Weights as scores, for another softmax after the mask."""
    twice = "the softmax is applied to the scores before the mask too"
    yield "softmax-twice, around the mask", twice, lambda *inputs: stages.scale(*inputs).softmax(dim=-1)


@mistakes("softmax", shown_by="large", may_be_nan=True)
def softmax_overflow() -> Forms:
    """A softmax without subtracting the maximum."""
    raw = "exponentials are taken of the scores as they are"
    yield "softmax-overflow", raw, lambda layer, scores: scores.exp() / scores.exp().sum(dim=-1, keepdim=True)


@mistakes("weigh")
def weighing() -> Forms:
    """Values of queries for keys."""
    transposed = "the values are weighed by the transposed pattern"
    yield "pattern-transposed", transposed, lambda layer, pattern, v: pattern.mT @ v
