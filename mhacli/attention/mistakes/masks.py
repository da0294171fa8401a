"""Mistakes in causality, masks and padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.stages import Forms, ReferenceLayer, mistakes, require

_TRIANGLE = ("tril", "triu")
_FILLING = (r"masked_fill|where\(",)


# ------------------------------------------------------------------------------------------------------------------- causality


def past(shift: int, layer: ReferenceLayer, q_len: int, k_len: int) -> Tensor:
    """The keys up to the query's position, shifted."""
    return torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len + shift)


def future(shift: int, layer: ReferenceLayer, q_len: int, k_len: int) -> Tensor:
    """The keys from the query's position on, shifted."""
    return torch.ones(q_len, k_len, dtype=torch.bool).triu(k_len - q_len + shift)


@mistakes("causal_rule", needs=("causal",))
def causal_missing() -> Forms:
    """Every key."""
    yield "causal-missing", "every token sees every other", lambda layer, *sizes: torch.ones(sizes, dtype=torch.bool)


@mistakes("causal_rule", at=_TRIANGLE)
def causality() -> Forms:
    """Another triangle."""
    yield "causal-off-by-one, without itself", "a token does not see itself, only earlier ones", partial(past, -1)
    yield "causal-off-by-one, with the next", "a token also sees the next one", partial(past, 1)
    yield "causal-transposed", "a token sees itself and later ones only", partial(future, 0)


@mistakes("causal_rule", at=(*_TRIANGLE, "is_causal"))
def causal_top_left() -> Forms:
    """A triangle that starts at the first key."""
    sentence = "the triangle begins at the first key when queries are fewer than keys"
    yield "causal-top-left", sentence, lambda layer, *sizes: torch.ones(sizes, dtype=torch.bool).tril()


def callers_alone(layer: ReferenceLayer, rules: tuple[Tensor | None, ...]) -> Tensor | None:
    """The caller's masks alone."""
    layer_rule, caller_mask, padding = rules
    require(layer_rule is not None and (caller_mask is not None or padding is not None))
    return stages.together(layer, (None, caller_mask, padding))


@mistakes("together")
def causal_lost() -> Forms:
    """No causality beside another mask."""
    yield "causal-lost", "a mask that is given takes the place of the causal one", callers_alone


# --------------------------------------------------------------------------------------------------- which cells a mask allows


@mistakes("mask_rule", at=_FILLING)
def mask_inverted() -> Forms:
    """The other cells."""
    yield "mask-inverted", "the mask is read the other way round", lambda layer, allowed: ~allowed


@mistakes("causal_rule", at=_FILLING)
def causal_mask_inverted() -> Forms:
    """The future without the token itself."""
    yield "mask-inverted, of the layer", "the causal triangle is read the other way round", partial(future, 1)


@mistakes("mask_rule")
def mask_rules() -> Forms:
    """All cells, and those of keys for queries."""
    yield "mask-ignored", "the mask is not read", lambda layer, allowed: torch.ones_like(allowed)
    yield "mask-transposed", "the mask is read with queries and keys swapped", lambda layer, allowed: allowed.mT


# --------------------------------------------------------------------------------------------------- how a mask acts on scores


def added_where_masked(value: float, layer: ReferenceLayer, scores: Tensor, keep: Tensor) -> Tensor:
    """Scores with a number added where masked."""
    return scores + (~keep).to(scores.dtype) * value


def filled_with(value: float, layer: ReferenceLayer, scores: Tensor, keep: Tensor) -> Tensor:
    """Scores set to a number where masked."""
    return scores.masked_fill(~keep, value)


def with_planes_moved(layer: ReferenceLayer, scores: Tensor, keep: Tensor) -> Tensor:
    """Scores with the planes of the mask in the order head, batch."""
    batch, n_heads, q_len, k_len = scores.shape
    planes = keep.expand(batch, 1, q_len, k_len).flatten(0, 1).repeat(n_heads, 1, 1)
    return stages.mask(layer, scores, planes.view(batch, n_heads, q_len, k_len))


@mistakes("mask")
def masking() -> Forms:
    """Masked scores that are not −∞, or others that are."""
    yield "mask-multiplied", "masked scores become 0 before the softmax", lambda layer, scores, keep: scores * keep
    yield "mask-multiplied", "visible scores become 0 before the softmax", lambda layer, scores, keep: scores * ~keep
    added = "1 is added to visible scores and nothing to the others"
    yield "mask-added-as-01", added, lambda layer, scores, keep: scores + keep
    yield "mask-added-as-01", "1 is added to masked scores", partial(added_where_masked, 1.0)
    moved = "the mask is repeated for the heads in the other order than the scores"
    yield "mask-head-order", moved, with_planes_moved
    yield "mask-sign", "masked scores are set to 10⁹", partial(filled_with, 1e9)
    yield "mask-sign", "masked scores are set to +∞", partial(filled_with, math.inf)


@mistakes("mask", may_be_nan=True)
def mask_not_finite() -> Forms:
    """Scores plus mask · −∞; 0 · −∞ is NaN."""
    yield "mask-not-finite", "mask · −∞ is added to the scores", partial(added_where_masked, -math.inf)
    added = "mask · −∞ is added to the scores, of those that are visible"
    yield "mask-not-finite", added, lambda layer, scores, keep: scores + keep.to(scores.dtype) * -math.inf


def sentinels(value: float) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Masked scores that are set to a number, or get it added."""
    yield f"masked scores are set to {value:g}", partial(filled_with, value)
    yield f"{value:g} is added to masked scores", partial(added_where_masked, value)


@mistakes("mask", at=("masked_fill", "where"), shown_by="large")
def mask_sentinel_too_small() -> Forms:
    """A number that large scores reach."""
    for value in (-1e3, -1e2, -50.0, -30.0, -20.0, -10.0, -5.0):
        for sentence, mask in sentinels(value):
            yield "mask-sentinel-too-small", sentence, mask
    zero = "masked scores are set to 0, or next to it such as 1e-9"
    yield "mask-sentinel-too-small", zero, partial(filled_with, 1e-9)


def by_neighbours(layer: ReferenceLayer, scores: Tensor, keep: Tensor) -> Tensor:
    """Scores with periodic masks, 0 1 0 1, applied to neighbours, 0 0 1 1."""
    batch = len(scores)
    require(len(keep) == batch)
    periods = (n for n in range(2, batch) if batch % n == 0)
    period = next(n for n in periods if torch.equal(keep, keep[:n].repeat(batch // n, 1, 1, 1)))
    return stages.mask(layer, scores, keep[:period].repeat_interleave(batch // period, dim=0))


@mistakes("mask", shown_by="windows")
def mask_window_order() -> Forms:
    """The masks of other windows."""
    yield "mask-window-order", "each mask of a window serves neighbours in the batch", by_neighbours


def filled_after_softmax(
    value: float, layer: ReferenceLayer, pattern: Tensor, scaled: Tensor, keep: Tensor | None
) -> Tensor:
    """Weights of all scores, set to a number where masked after the softmax."""
    return pattern if keep is None else stages.softmax(layer, scaled).masked_fill(~keep, value)


@mistakes("value_weights")
def mask_after_softmax() -> Forms:
    """Weights that are not renormalised."""
    for number, value in (("0", 0.0), ("−∞", -math.inf), ("−10⁹", -1e9)):
        sentence = f"masked weights are set to {number} after the softmax, and the rest is not renormalised"
        yield "mask-after-softmax", sentence, partial(filled_after_softmax, value)


# --------------------------------------------------------------------------------------------------------------------- padding


@mistakes("padding_rule")
def padding() -> Forms:
    """Other keys than the real ones. For real queries, hidden queries look like ignored padding."""
    yield "padding-of-queries", "padding hides queries instead of keys", lambda layer, real: real[:, None, :, None]
    seen = "padding is seen like any token"
    yield "padding-ignored", seen, lambda layer, real: torch.ones_like(real)[:, None, None, :]
    inverted = "real tokens are hidden and padding is seen"
    yield "padding-inverted", inverted, lambda layer, real: ~real[:, None, None, :]
    first = "every sequence is taken to be padded like the first"
    yield "padding-of-first-sequence", first, lambda layer, real: real[:1, None, None, :]
