"""Mistakes in causality, masks and padding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.stages import Mistake, ReferenceLayer, require

_TRIANGLE = ("tril", "triu")
_FILLING = (r"masked_fill|where\(",)
_FILLED = ("masked_fill", "where")


def mistakes() -> Iterator[Mistake]:
    """Other cells than those that causality, a mask and padding allow, and masked scores that are not −∞."""
    every = {"causal_rule": lambda layer, *sizes: torch.ones(sizes, dtype=torch.bool)}
    yield Mistake("causal-missing", every, needs=("causal",))
    without, with_next = {"causal_rule": partial(past, -1)}, {"causal_rule": partial(past, 1)}
    yield Mistake("causal-off-by-one, without itself", without, "a token does not see itself", at=_TRIANGLE)
    yield Mistake("causal-off-by-one, with the next", with_next, "a token also sees the next one", at=_TRIANGLE)
    yield Mistake("causal-transposed", {"causal_rule": partial(future, 0)}, at=_TRIANGLE)
    top_left = {"causal_rule": lambda layer, *sizes: torch.ones(sizes, dtype=torch.bool).tril()}
    yield Mistake("causal-top-left", top_left, at=(*_TRIANGLE, "is_causal"))
    yield Mistake("causal-lost", {"together": callers_alone})

    yield Mistake("mask-inverted", {"mask_rule": lambda layer, allowed: ~allowed}, at=_FILLING)
    yield Mistake("mask-inverted, of the layer", {"causal_rule": partial(future, 1)}, at=_FILLING)
    yield Mistake("mask-ignored", {"mask_rule": lambda layer, allowed: torch.ones_like(allowed)})
    yield Mistake("mask-transposed", {"mask_rule": lambda layer, allowed: allowed.mT})
    for code, wrong, detail in (
        ("mask-multiplied", lambda layer, scores, keep: scores * keep, ""),
        ("mask-multiplied", lambda layer, scores, keep: scores * ~keep, "the visible ones become 0"),
        ("mask-added-as-01", lambda layer, scores, keep: scores + keep, "1 is added to visible scores"),
        ("mask-added-as-01", partial(added_where_masked, 1.0), "1 is added to masked scores"),
        ("mask-head-order", with_planes_moved, ""),
        ("mask-sign", partial(filled_with, 1e9), "10⁹"),
        ("mask-sign", partial(filled_with, math.inf), "+∞"),
    ):
        yield Mistake(code, {"mask": wrong}, detail)
    yield Mistake("mask-not-finite", {"mask": partial(added_where_masked, -math.inf)}, may_be_nan=True)
    visible = {"mask": lambda layer, scores, keep: scores + keep.to(scores.dtype) * -math.inf}
    yield Mistake("mask-not-finite", visible, "the mask of those that are visible", may_be_nan=True)
    yield sentinels(1e-9, "0, or next to it such as 1e-9")[0]
    yield Mistake("mask-window-order", {"mask": by_neighbours}, shown_by="further")
    for number, value in (("0", 0.0), ("−∞", -math.inf), ("−10⁹", -1e9)):
        late = {"value_weights": partial(filled_after_softmax, value)}
        yield Mistake("mask-after-softmax", late, f"masked weights are set to {number}")

    for code, padding in (  # for real queries, hidden queries look like ignored padding
        ("padding-of-queries", lambda layer, real: real[:, None, :, None]),
        ("padding-ignored", lambda layer, real: torch.ones_like(real)[:, None, None, :]),
        ("padding-inverted", lambda layer, real: ~real[:, None, None, :]),
        ("padding-of-first-sequence", lambda layer, real: real[:1, None, None, :]),
    ):
        yield Mistake(code, {"padding_rule": padding})


def sentinels(value: float, words: str = "") -> list[Mistake]:
    """Masked scores that are set to a number that large scores reach, or get it added."""
    number = words or f"{value:g}"
    forms = ((partial(filled_with, value), number), (partial(added_where_masked, value), f"{number} is added"))
    at = partial(Mistake, "mask-sentinel-too-small", at=_FILLED, shown_by="further")
    return [at({"mask": wrong}, detail) for wrong, detail in forms]


def past(shift: int, layer: ReferenceLayer, q_len: int, k_len: int) -> Tensor:
    """The keys up to the query's position, shifted."""
    return torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len + shift)


def future(shift: int, layer: ReferenceLayer, q_len: int, k_len: int) -> Tensor:
    """The keys from the query's position on, shifted."""
    return torch.ones(q_len, k_len, dtype=torch.bool).triu(k_len - q_len + shift)


def callers_alone(layer: ReferenceLayer, rules: tuple[Tensor | None, ...]) -> Tensor | None:
    """The caller's masks alone, without causality."""
    layer_rule, caller_mask, padding = rules
    require(layer_rule is not None and (caller_mask is not None or padding is not None))
    return stages.together(layer, (None, caller_mask, padding))


def added_where_masked(value: float, layer: ReferenceLayer, scores: Tensor, keep: Tensor) -> Tensor:
    """Scores with a number added where masked; 0 · −∞ is NaN."""
    return scores + (~keep).to(scores.dtype) * value


def filled_with(value: float, layer: ReferenceLayer, scores: Tensor, keep: Tensor) -> Tensor:
    """Scores set to a number where masked."""
    return scores.masked_fill(~keep, value)


def with_planes_moved(layer: ReferenceLayer, scores: Tensor, keep: Tensor) -> Tensor:
    """Scores with the planes of the mask in the order head, batch."""
    batch, n_heads, q_len, k_len = scores.shape
    planes = keep.expand(batch, 1, q_len, k_len).flatten(0, 1).repeat(n_heads, 1, 1)
    return stages.mask(layer, scores, planes.view(batch, n_heads, q_len, k_len))


def by_neighbours(layer: ReferenceLayer, scores: Tensor, keep: Tensor) -> Tensor:
    """Scores with the masks of two windows, 0 1 0 1, applied to neighbours, 0 0 1 1."""
    batch = len(scores)
    require(len(keep) == batch > 2 and torch.equal(keep, keep[:2].repeat(batch // 2, 1, 1, 1)))
    return stages.mask(layer, scores, keep[:2].repeat_interleave(batch // 2, dim=0))


def filled_after_softmax(
    value: float, layer: ReferenceLayer, pattern: Tensor, scaled: Tensor, keep: Tensor | None
) -> Tensor:
    """Weights of all scores, set to a number where masked after the softmax."""
    return pattern if keep is None else stages.softmax(layer, scaled).masked_fill(~keep, value)
