"""Mistakes in causality, masks and padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.stages import Forms, ReferenceLayer, mistake, require

MASKING = ("masked_fill", "where", "add", "sub", "mul", "full", "full_like", "setitem")
"""The operations that mask scores, without the underscore of in-place variants."""
_TRIANGLE = ("tril", "triu")
_FILLING = (r"masked_fill|where\(",)


# ------------------------------------------------------------------------------------------------------------------- causality


def past(shift: int) -> Callable[..., Tensor]:
    """The keys up to the query's position, shifted."""
    return lambda layer, q_len, k_len: torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len + shift)


def future(shift: int) -> Callable[..., Tensor]:
    """The keys from the query's position on, shifted."""
    return lambda layer, q_len, k_len: torch.ones(q_len, k_len, dtype=torch.bool).triu(k_len - q_len + shift)


@mistake("causal-missing", "causal_rule", needs=("causal",))
def causal_missing() -> Forms:
    """Every key."""
    yield "every token sees every other", lambda layer, q_len, k_len: torch.ones(q_len, k_len, dtype=torch.bool)


@mistake("causal-off-by-one", "causal_rule", form="without itself", at=_TRIANGLE)
def causal_without_itself() -> Forms:
    """One key too few."""
    yield "a token does not see itself, only earlier ones", past(-1)


@mistake("causal-off-by-one", "causal_rule", form="with the next", at=_TRIANGLE)
def causal_with_the_next() -> Forms:
    """One key too many."""
    yield "a token also sees the next one", past(1)


@mistake("causal-transposed", "causal_rule", at=_TRIANGLE)
def causal_transposed() -> Forms:
    """The future."""
    yield "a token sees itself and later ones only", future(0)


@mistake("causal-top-left", "causal_rule", at=("tril", "triu", "is_causal"))
def causal_top_left() -> Forms:
    """A triangle that starts at the first key."""

    def rule(layer: ReferenceLayer, q_len: int, k_len: int) -> Tensor:
        return torch.ones(q_len, k_len, dtype=torch.bool).tril()

    yield "the triangle begins at the first key when queries are fewer than keys", rule


@mistake("causal-lost", "together")
def causal_lost() -> Forms:
    """The caller's masks alone."""

    def together(layer: ReferenceLayer, rules: tuple[Tensor | None, ...]) -> Tensor | None:
        layer_rule, caller_mask, padding = rules
        require(layer_rule is not None and (caller_mask is not None or padding is not None))
        return stages.together(layer, (None, caller_mask, padding))

    yield "a mask that is given takes the place of the causal one", together


# --------------------------------------------------------------------------------------------------- which cells a mask allows


@mistake("mask-inverted", "mask_rule", at=_FILLING)
def mask_inverted() -> Forms:
    """The other cells."""
    yield "the mask is read the other way round", lambda layer, allowed: ~allowed


@mistake("mask-inverted", "causal_rule", form="of the layer", at=_FILLING)
def causal_mask_inverted() -> Forms:
    """The future without the token itself."""
    yield "the causal triangle is read the other way round", future(1)


@mistake("mask-ignored", "mask_rule")
def mask_ignored() -> Forms:
    """All cells."""
    yield "the mask is not read", lambda layer, allowed: torch.ones_like(allowed)


@mistake("mask-transposed", "mask_rule")
def mask_transposed() -> Forms:
    """The mask of keys for queries."""
    yield "the mask is read with queries and keys swapped", lambda layer, allowed: allowed.mT


# --------------------------------------------------------------------------------------------------- how a mask acts on scores


def added_where_masked(value: float) -> Callable[..., Tensor]:
    """Scores with a number added where masked."""
    return lambda layer, scores, keep: scores + (~keep).to(scores.dtype) * value


@mistake("mask-multiplied", "mask")
def mask_multiplied() -> Forms:
    """Scores of 0."""
    yield "masked scores become 0 before the softmax", lambda layer, scores, keep: scores * keep
    yield "visible scores become 0 before the softmax", lambda layer, scores, keep: scores * ~keep


@mistake("mask-added-as-01", "mask")
def mask_added_as_01() -> Forms:
    """A mask of zeros and ones in place of 0 and −∞."""
    yield "1 is added to visible scores and nothing to the others", lambda layer, scores, keep: scores + keep
    yield "1 is added to masked scores", added_where_masked(1.0)


@mistake("mask-head-order", "mask")
def mask_head_order() -> Forms:
    """Planes in the order head, batch."""

    def mask(layer: ReferenceLayer, scores: Tensor, keep: Tensor) -> Tensor:
        batch, n_heads, q_len, k_len = scores.shape
        planes = keep.expand(batch, 1, q_len, k_len).flatten(0, 1).repeat(n_heads, 1, 1)
        return stages.mask(layer, scores, planes.view(batch, n_heads, q_len, k_len))

    yield "the mask is repeated for the heads in the other order than the scores", mask


@mistake("mask-window-order", "mask", shown_by="windows")
def mask_window_order() -> Forms:
    """Periodic masks, 0 1 0 1, applied to neighbours, 0 0 1 1."""

    def mask(layer: ReferenceLayer, scores: Tensor, keep: Tensor) -> Tensor:
        batch = scores.shape[0]
        require(keep.shape[0] == batch)
        periods = (n for n in range(2, batch) if batch % n == 0)
        period = next(n for n in periods if torch.equal(keep, keep[:n].repeat(batch // n, 1, 1, 1)))
        return stages.mask(layer, scores, keep[:period].repeat_interleave(batch // period, dim=0))

    yield "each mask of a window serves neighbours in the batch", mask


def filled_after_softmax(value: float) -> Callable[..., Tensor]:
    """Weights of all scores, set to a number where masked after the softmax."""

    def value_weights(layer: ReferenceLayer, pattern: Tensor, scaled: Tensor, keep: Tensor | None) -> Tensor:
        return pattern if keep is None else stages.softmax(layer, scaled).masked_fill(~keep, value)

    return value_weights


@mistake("mask-after-softmax", "value_weights")
def mask_after_softmax() -> Forms:
    """Weights that are not renormalised."""
    zeroed = "masked weights are set to 0 after the softmax, and the rest is not renormalised"
    yield zeroed, filled_after_softmax(0.0)
    yield "masked weights become −∞ after the softmax", filled_after_softmax(-math.inf)
    yield "masked weights become −10⁹ after the softmax", filled_after_softmax(-1e9)


@mistake("mask-not-finite", "mask", may_be_nan=True)
def mask_not_finite() -> Forms:
    """Scores plus mask · −∞; 0 · −∞ is NaN."""
    yield "mask · −∞ is added to the scores", added_where_masked(-math.inf)
    added = "mask · −∞ is added to the scores, of those that are visible"
    yield added, lambda layer, scores, keep: scores + keep.to(scores.dtype) * -math.inf


def filled_with(value: float) -> Callable[..., Tensor]:
    """Scores set to a number where masked."""
    return lambda layer, scores, keep: scores.masked_fill(~keep, value)


@mistake("mask-sign", "mask")
def mask_sign() -> Forms:
    """The largest number in place of the smallest."""
    yield "masked scores are set to 10⁹", filled_with(1e9)
    yield "masked scores are set to +∞", filled_with(math.inf)


def sentinels(value: float) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Masked scores that are set to a number, or get it added."""
    yield f"masked scores are set to {value:g}", filled_with(value)
    yield f"{value:g} is added to masked scores", added_where_masked(value)


@mistake("mask-sentinel-too-small", "mask", at=("masked_fill", "where"), shown_by="large")
def mask_sentinel_too_small() -> Forms:
    """A number that large scores reach."""
    for value in (-1e3, -1e2, -50.0, -30.0, -20.0, -10.0, -5.0):
        yield from sentinels(value)
    yield "masked scores are set to 0, or next to it such as 1e-9", filled_with(1e-9)


# --------------------------------------------------------------------------------------------------------------------- padding


@mistake("padding-ignored", "padding_rule")
def padding_ignored() -> Forms:
    """Every token."""
    yield "padding is seen like any token", lambda layer, real: torch.ones_like(real)[:, None, None, :]


@mistake("padding-inverted", "padding_rule")
def padding_inverted() -> Forms:
    """Padding alone."""
    yield "real tokens are hidden and padding is seen", lambda layer, real: ~real[:, None, None, :]


@mistake("padding-of-queries", "padding_rule")
def padding_of_queries() -> Forms:
    """Padded queries in place of padded keys."""
    yield "padding hides queries instead of keys", lambda layer, real: real[:, None, :, None]


@mistake("padding-of-first-sequence", "padding_rule")
def padding_of_first_sequence() -> Forms:
    """The first sequence's padding for all."""
    yield "every sequence is taken to be padded like the first", lambda layer, real: real[:1, None, None, :]
