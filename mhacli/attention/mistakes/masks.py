"""Mistakes in causality, masks and padding."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.stages import Form, Forms, Mistake, ReferenceLayer, mistakes, require

_TRIANGLE = ("tril", "triu")
_FILLING = (r"masked_fill|where\(",)
_FILLED = ("masked_fill", "where")


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
    yield Form("causal-missing", lambda layer, *sizes: torch.ones(sizes, dtype=torch.bool))


@mistakes("causal_rule", at=_TRIANGLE)
def causality() -> Forms:
    """Another triangle."""
    yield Form("causal-off-by-one, without itself", partial(past, -1), "a token does not see itself")
    yield Form("causal-off-by-one, with the next", partial(past, 1), "a token also sees the next one")
    yield Form("causal-transposed", partial(future, 0))


@mistakes("causal_rule", at=(*_TRIANGLE, "is_causal"))
def causal_top_left() -> Forms:
    """A triangle that starts at the first key."""
    yield Form("causal-top-left", lambda layer, *sizes: torch.ones(sizes, dtype=torch.bool).tril())


def callers_alone(layer: ReferenceLayer, rules: tuple[Tensor | None, ...]) -> Tensor | None:
    """The caller's masks alone."""
    layer_rule, caller_mask, padding = rules
    require(layer_rule is not None and (caller_mask is not None or padding is not None))
    return stages.together(layer, (None, caller_mask, padding))


@mistakes("together")
def causal_lost() -> Forms:
    """No causality beside another mask."""
    yield Form("causal-lost", callers_alone)


# --------------------------------------------------------------------------------------------------- which cells a mask allows


@mistakes("mask_rule", at=_FILLING)
def mask_inverted() -> Forms:
    """The other cells."""
    yield Form("mask-inverted", lambda layer, allowed: ~allowed)


@mistakes("causal_rule", at=_FILLING)
def causal_mask_inverted() -> Forms:
    """The future without the token itself."""
    yield Form("mask-inverted, of the layer", partial(future, 1))


@mistakes("mask_rule")
def mask_rules() -> Forms:
    """All cells, and those of keys for queries."""
    yield Form("mask-ignored", lambda layer, allowed: torch.ones_like(allowed))
    yield Form("mask-transposed", lambda layer, allowed: allowed.mT)


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
    yield Form("mask-multiplied", lambda layer, scores, keep: scores * keep)
    yield Form("mask-multiplied", lambda layer, scores, keep: scores * ~keep, "the visible ones become 0")
    yield Form("mask-added-as-01", lambda layer, scores, keep: scores + keep, "1 is added to visible scores")
    yield Form("mask-added-as-01", partial(added_where_masked, 1.0), "1 is added to masked scores")
    yield Form("mask-head-order", with_planes_moved)
    yield Form("mask-sign", partial(filled_with, 1e9), "10⁹")
    yield Form("mask-sign", partial(filled_with, math.inf), "+∞")


@mistakes("mask", may_be_nan=True)
def mask_not_finite() -> Forms:
    """Scores plus mask · −∞; 0 · −∞ is NaN."""
    yield Form("mask-not-finite", partial(added_where_masked, -math.inf))
    of_visible = "the mask of those that are visible"
    yield Form("mask-not-finite", lambda layer, scores, keep: scores + keep.to(scores.dtype) * -math.inf, of_visible)


def sentinels(value: float) -> list[Mistake]:
    """Masked scores that are set to a number that large scores reach, or get it added."""
    fields: dict[str, Any] = {"site": "scores", "at": _FILLED, "shown_by": "large"}
    return [
        Mistake("mask-sentinel-too-small", "mask", {"mask": partial(way, value)}, detail, **fields)
        for way, detail in ((filled_with, f"{value:g}"), (added_where_masked, f"{value:g} is added"))
    ]


@mistakes("mask", at=_FILLED, shown_by="large")
def mask_sentinel_too_small() -> Forms:
    """A number near 0; others are read from a run."""
    yield Form("mask-sentinel-too-small", partial(filled_with, 1e-9), "0, or next to it such as 1e-9")


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
    yield Form("mask-window-order", by_neighbours)


def filled_after_softmax(
    value: float, layer: ReferenceLayer, pattern: Tensor, scaled: Tensor, keep: Tensor | None
) -> Tensor:
    """Weights of all scores, set to a number where masked after the softmax."""
    return pattern if keep is None else stages.softmax(layer, scaled).masked_fill(~keep, value)


@mistakes("value_weights")
def mask_after_softmax() -> Forms:
    """Weights that are not renormalised."""
    for number, value in (("0", 0.0), ("−∞", -math.inf), ("−10⁹", -1e9)):
        yield Form("mask-after-softmax", partial(filled_after_softmax, value), f"masked weights are set to {number}")


# --------------------------------------------------------------------------------------------------------------------- padding


@mistakes("padding_rule")
def padding() -> Forms:
    """Other keys than the real ones. For real queries, hidden queries look like ignored padding."""
    yield Form("padding-of-queries", lambda layer, real: real[:, None, :, None])
    yield Form("padding-ignored", lambda layer, real: torch.ones_like(real)[:, None, None, :])
    yield Form("padding-inverted", lambda layer, real: ~real[:, None, None, :])
    yield Form("padding-of-first-sequence", lambda layer, real: real[:1, None, None, :])
