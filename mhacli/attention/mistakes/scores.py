"""Mistakes in the scores and the softmax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.stages import Form, Forms, ReferenceLayer, mistakes, require

# ---------------------------------------------------------------------------------------------------- products and their scale


@mistakes("products", needs=("order", "unpacked"))
def products() -> Forms:
    """The transposed products."""
    yield Form("qk-swapped", lambda layer, q, k: k @ q.mT)


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
    for code, factor, detail in (
        ("scale-missing", lambda layer, qk, d: 1.0, ""),
        ("scale-d-model", lambda layer, qk, d: model_width(layer, d) ** -0.5, ""),
        ("scale-d-model", lambda layer, qk, d: 1 / model_width(layer, d), "by d_model itself"),
        ("scale-not-root", lambda layer, qk, d: 1 / d, ""),
        ("scale-twice", lambda layer, qk, d: right_factor(layer, d) ** 2, ""),
        ("scale-one-side", lambda layer, qk, d: d**-0.25, ""),
        ("scale-length", lambda layer, qk, d: qk.shape[-1] ** -0.5, "√k_len"),
        ("scale-length", lambda layer, qk, d: qk.shape[-2] ** -0.5, "√q_len"),
        ("scale-length", lambda layer, qk, d: 1 / qk.shape[-1], "k_len"),
        ("scale-length", lambda layer, qk, d: 1 / qk.shape[-2], "q_len"),
        ("scale-batch", lambda layer, qk, d: len(qk) ** -0.5, ""),
        ("scale-heads", lambda layer, qk, d: qk.shape[1] ** -0.5, ""),
        ("scale-multiplied", lambda layer, qk, d: d**0.5, ""),
    ):
        yield Form(code, partial(scaled_by, factor), detail)


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
        yield Form("scale-after-softmax", partial(scaled_weights, factor), how)


# --------------------------------------------------------------------------------------------------------------------- the cap


@mistakes("mask", shown_by="large")
def cap_after_mask() -> Forms:
    """−c where masked."""
    yield Form("softcap-after-mask", lambda layer, scores, keep: scores.masked_fill(~keep, -layer.softcap))


@mistakes("cap")
def cap() -> Forms:
    """Scores that are not capped, or capped to ±1."""
    yield Form("softcap-not-scaled-back", lambda layer, scores: torch.tanh(scores / layer.softcap))
    yield Form("softcap-missing", lambda layer, scores: scores)


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
        yield Form("softmax-axis", partial(lambda dim, layer, scores: scores.softmax(dim), dim), f"over {name}")
    cells = "over queries and keys together"
    yield Form("softmax-axis", lambda layer, scores: scores.flatten(-2).softmax(-1).view_as(scores), cells)
    yield Form("sink-dropped-wrongly", with_another_dropped)
    yield Form("sink-without-effect", without_sinks)
    yield Form("softmax-missing", lambda layer, scores: scores)
    yield Form("softmax-twice", lambda layer, scores: stages.softmax(layer, scores).softmax(dim=-1))


@mistakes("scale")
def softmax_around_the_mask() -> Forms:
    """Weights as scores, for another softmax after the mask."""
    yield Form("softmax-twice, around the mask", lambda *inputs: stages.scale(*inputs).softmax(dim=-1))


@mistakes("softmax", shown_by="large", may_be_nan=True)
def softmax_overflow() -> Forms:
    """A softmax without subtracting the maximum."""
    yield Form("softmax-overflow", lambda layer, scores: scores.exp() / scores.exp().sum(dim=-1, keepdim=True))


@mistakes("weigh")
def weighing() -> Forms:
    """Values of queries for keys."""
    yield Form("pattern-transposed", lambda layer, pattern, v: pattern.mT @ v)
