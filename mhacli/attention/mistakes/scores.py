"""Mistakes in the scores and the softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.stages import Mistake, ReferenceLayer, require


def mistakes() -> Iterator[Mistake]:
    """Transposed products, another scale or cap, and weights that are not those over the keys."""
    yield Mistake("qk-swapped", {"products": lambda layer, q, k: k @ q.mT}, needs=("order", "unpacked"))
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
        yield Mistake(code, {"scale": partial(scaled_by, factor)}, detail)
    for how, late in (
        ("scaled", right_factor),
        ("divided by √d_model", lambda layer, d: model_width(layer, d) ** -0.5),
        ("divided by d_head", lambda layer, d: 1 / d),
        ("divided by d_model", lambda layer, d: 1 / model_width(layer, d)),
    ):
        yield Mistake("scale-after-softmax", {"value_weights": partial(scaled_weights, late)}, how)

    after_mask = {"mask": lambda layer, scores, keep: scores.masked_fill(~keep, -layer.softcap)}
    yield Mistake("softcap-after-mask", after_mask, shown_by="further")
    yield Mistake("softcap-not-scaled-back", {"cap": lambda layer, scores: torch.tanh(scores / layer.softcap)})
    yield Mistake("softcap-missing", {"cap": lambda layer, scores: scores})

    for code, softmax, detail in (
        ("softmax-axis", lambda layer, scores: scores.softmax(-2), "over queries"),
        ("softmax-axis", lambda layer, scores: scores.softmax(1), "over heads"),
        ("softmax-axis", lambda layer, scores: scores.softmax(0), "over the sequences of the batch"),
        ("softmax-axis", over_all_cells, "over queries and keys together"),
        ("sink-dropped-wrongly", with_another_dropped, ""),
        ("sink-without-effect", without_sinks, ""),
        ("softmax-missing", lambda layer, scores: scores, ""),
        ("softmax-twice", lambda layer, scores: stages.softmax(layer, scores).softmax(dim=-1), ""),
    ):
        yield Mistake(code, {"softmax": softmax}, detail)
    around = {"scale": lambda *inputs: stages.scale(*inputs).softmax(dim=-1)}
    yield Mistake("softmax-twice, around the mask", around)
    overflow = {"softmax": lambda layer, scores: scores.exp() / scores.exp().sum(dim=-1, keepdim=True)}
    yield Mistake("softmax-overflow", overflow, shown_by="further", may_be_nan=True)
    yield Mistake("pattern-transposed", {"weigh": lambda layer, pattern, v: pattern.mT @ v})


def right_factor(layer: ReferenceLayer, d_head: int) -> float | Tensor:
    """The factor of the products."""
    return d_head**-0.5 if layer.scale is None else layer.scale


def model_width(layer: ReferenceLayer, d_head: int) -> int:
    """The width of the model; for split heads, the sum of their widths."""
    return d_head * layer.n_heads if layer.weights is None else layer.weights.q.weight.shape[1]


def scaled_by(factor: Callable[..., float | Tensor], layer: ReferenceLayer, qk: Tensor, d_head: int) -> Tensor:
    """Products times another factor than the right one, 1 / √d_head."""
    right, wrong = right_factor(layer, d_head), factor(layer, qk, d_head)
    require(not torch.allclose(torch.as_tensor(wrong), torch.as_tensor(right), rtol=1e-9))
    return qk * wrong


def scaled_weights(
    factor: Callable[..., float | Tensor], layer: ReferenceLayer, pattern: Tensor, scaled: Tensor, keep: Tensor | None
) -> Tensor:
    """Weights of unscaled scores, scaled after the softmax."""
    require(layer.scale is not None or layer.d_head is not None)
    d_head = layer.d_head or 1
    unscaled = scaled / right_factor(layer, d_head)
    masked = unscaled if keep is None else stages.mask(layer, unscaled, keep)
    return stages.softmax(layer, masked) * factor(layer, d_head)


def over_all_cells(layer: ReferenceLayer, scores: Tensor) -> Tensor:
    """Weights that sum to 1 over queries and keys together."""
    return scores.flatten(-2).softmax(-1).view_as(scores)


def with_another_dropped(layer: ReferenceLayer, scores: Tensor) -> Tensor:
    """Weights with the sink's column kept and the first key's dropped."""
    require(layer.sinks is not None)
    return stages.with_sinks(layer, scores).softmax(dim=-1)[..., 1:]


def without_sinks(layer: ReferenceLayer, scores: Tensor) -> Tensor:
    """Weights without the sink in the denominator."""
    require(layer.sinks is not None)
    return scores.softmax(dim=-1)
