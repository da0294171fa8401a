"""Mistakes in causality, masks and padding."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.stages import (
    Inapplicable,
    Mistake,
    MistakeVariant,
    ReferenceLayer,
    Symptoms,
    require,
)

MASKING = ("masked_fill", "where", "add", "sub", "mul", "full", "full_like", "setitem")
"""The operations that mask scores, without the underscore of in-place variants."""


# ------------------------------------------------------------------------------------------------------------------- causality


def all_keys(layer: ReferenceLayer, q_len: int, k_len: int) -> Tensor:
    """Every key, without causality."""
    return torch.ones(q_len, k_len, dtype=torch.bool)


def triangle(keep: str, shift: int) -> Callable[..., Tensor]:
    """The past or the future of each query, shifted."""

    def rule(layer: ReferenceLayer, q_len: int, k_len: int) -> Tensor:
        ones = torch.ones(q_len, k_len, dtype=torch.bool)
        return ones.tril(k_len - q_len + shift) if keep == "past" else ones.triu(k_len - q_len + shift)

    return rule


def from_top_left(layer: ReferenceLayer, q_len: int, k_len: int) -> Tensor:
    """A triangle that starts at the first key."""
    return torch.ones(q_len, k_len, dtype=torch.bool).tril()


def without_layer_rule(
    layer: ReferenceLayer, rules: tuple[Tensor | None, Tensor | None, Tensor | None]
) -> Tensor | None:
    """The caller's masks only, which override the layer's own mask."""
    layer_rule, caller_mask, padding = rules
    if layer_rule is None or (caller_mask is None and padding is None):
        raise Inapplicable
    return stages.together(layer, (None, caller_mask, padding))


def _is_not_causal(symptoms: Symptoms) -> str | None:
    is_unexplained = symptoms.layer is None and not symptoms.takes_mask
    shows_future = symptoms.expects_causal and is_unexplained and (symptoms.largest_future or 0) > 0
    return symptoms.messages["causality"] if shows_future else None


_CAUSALITY = (
    Mistake(
        "causal-missing",
        "causal_rule",
        (MistakeVariant("every token sees every other", all_keys),),
        applies=lambda hints, layer: hints.expects_causal,
        symptom=_is_not_causal,
    ),
    Mistake(
        "causal-off-by-one",
        "causal_rule",
        (
            MistakeVariant(
                "a token does not see itself, only earlier ones",
                triangle("past", -1),
                effect="a token does not see itself, and the first one sees nothing",
            ),
            MistakeVariant(
                "a token also sees the next one",
                triangle("past", 1),
                effect="a token sees the next one, which it should predict: the training loss is low, generation is poor",
            ),
        ),
        operations=("tril", "triu"),
        in_source=r"tril|triu",
    ),
    Mistake(
        "causal-transposed",
        "causal_rule",
        (MistakeVariant("a token sees itself and later ones only", triangle("future", 0)),),
        operations=("tril", "triu"),
        in_source=r"tril|triu",
    ),
    Mistake(
        "causal-top-left",
        "causal_rule",
        (MistakeVariant("the triangle begins at the first key when queries are fewer than keys", from_top_left),),
        operations=("tril", "triu", "scaled_dot_product_attention"),
        in_source=r"tril|triu|is_causal",
    ),
    Mistake(
        "causal-lost",
        "together",
        (MistakeVariant("a mask that is given takes the place of the causal one", without_layer_rule),),
    ),
)


# --------------------------------------------------------------------------------------------------- which cells a mask allows


def transposed_mask(layer: ReferenceLayer, allowed: Tensor) -> Tensor:
    """The mask with queries and keys swapped."""
    require(allowed.shape[-1] == allowed.shape[-2])
    return allowed.mT


_CELLS = (
    Mistake(
        "mask-inverted",
        "mask_rule",
        (MistakeVariant("the mask is read the other way round", lambda layer, allowed: ~allowed),),
        in_source=r"masked_fill|where\(",
    ),
    Mistake(
        "mask-inverted",
        "causal_rule",
        (MistakeVariant("the causal triangle is read the other way round", triangle("future", 1)),),
        form="of the layer",
        in_source=r"masked_fill|where\(",
    ),
    Mistake(
        "mask-ignored",
        "mask_rule",
        (MistakeVariant("the mask is not read", lambda layer, allowed: torch.ones_like(allowed)),),
    ),
    Mistake(
        "mask-transposed",
        "mask_rule",
        (MistakeVariant("the mask is read with queries and keys swapped", transposed_mask),),
    ),
)


# --------------------------------------------------------------------------------------------------- how a mask acts on scores


def visible_plus_one(layer: ReferenceLayer, scores: Tensor, keep: Tensor) -> Tensor:
    """Scores with 1 added where visible."""
    return scores + keep


def masked_plus(value: float) -> Callable[..., Tensor]:
    """Scores with a number added where masked."""
    return lambda layer, scores, keep: scores + (~keep).to(scores.dtype) * value


_ACTIONS = (
    Mistake(
        "mask-multiplied",
        "mask",
        (
            MistakeVariant("masked scores become 0 before the softmax", lambda layer, scores, keep: scores * keep),
            MistakeVariant("visible scores become 0 before the softmax", lambda layer, scores, keep: scores * ~keep),
        ),
    ),
    Mistake(
        "mask-added-as-01",
        "mask",
        (
            MistakeVariant("1 is added to visible scores and nothing to the others", visible_plus_one),
            MistakeVariant("1 is added to masked scores", masked_plus(1.0)),
        ),
    ),
)


def repeated_inside(layer: ReferenceLayer, scores: Tensor, keep: Tensor) -> Tensor:
    """Scores masked with batch-and-head planes in the order head, batch."""
    batch, n_heads, q_len, k_len = scores.shape
    require(batch > 1 and n_heads > 1 and keep.shape[0] > 1)
    planes = keep.expand(batch, 1, q_len, k_len).flatten(0, 1).repeat(n_heads, 1, 1)
    return stages.mask(layer, scores, planes.view(batch, n_heads, q_len, k_len))


def shared_by_neighbours(layer: ReferenceLayer, scores: Tensor, keep: Tensor) -> Tensor:
    """Scores with periodic masks, 0 1 0 1, applied to neighbours, 0 0 1 1."""
    batch = scores.shape[0]
    periods = (n for n in range(2, batch) if keep.shape[0] == batch and batch % n == 0)
    period = next((n for n in periods if torch.equal(keep, keep[:n].repeat(batch // n, 1, 1, 1))), None)
    if period is None:
        raise Inapplicable
    return stages.mask(layer, scores, keep[:period].repeat_interleave(batch // period, dim=0))


_ORDERS = (
    Mistake(
        "mask-head-order",
        "mask",
        (MistakeVariant("the mask is repeated for the heads in the other order than the scores", repeated_inside),),
    ),
    Mistake(
        "mask-window-order",
        "mask",
        (MistakeVariant("each mask of a window serves neighbours in the batch", shared_by_neighbours),),
        shown_by=("windows",),
    ),
)


def zeroed_after_softmax(layer: ReferenceLayer, pattern: Tensor, scaled: Tensor, keep: Tensor | None) -> Tensor:
    """Weights set to 0 after the softmax where masked."""
    return pattern if keep is None else stages.softmax(layer, scaled) * keep


def infinite_after_softmax(layer: ReferenceLayer, pattern: Tensor, scaled: Tensor, keep: Tensor | None) -> Tensor:
    """Weights set to −∞ after the softmax where masked."""
    return pattern if keep is None else stages.mask(layer, stages.softmax(layer, scaled), keep)


def set_after_softmax(value: float) -> Callable[..., Tensor]:
    """Weights set to a number after the softmax where masked."""

    def value_weights(layer: ReferenceLayer, pattern: Tensor, scaled: Tensor, keep: Tensor | None) -> Tensor:
        return pattern if keep is None else stages.softmax(layer, scaled).masked_fill(~keep, value)

    return value_weights


def times_infinity(layer: ReferenceLayer, scores: Tensor, keep: Tensor) -> Tensor:
    """Scores plus mask · −∞; 0 · −∞ is NaN."""
    return scores + (~keep).to(scores.dtype) * -math.inf


def allowed_times_infinity(layer: ReferenceLayer, scores: Tensor, keep: Tensor) -> Tensor:
    """As `times_infinity`, with the mask inverted."""
    return scores + keep.to(scores.dtype) * -math.inf


_ERASED = (
    Mistake(
        "mask-after-softmax",
        "value_weights",
        (
            MistakeVariant(
                "masked weights are set to 0 after the softmax, and the rest is not renormalised", zeroed_after_softmax
            ),
            MistakeVariant("masked weights become −∞ after the softmax", infinite_after_softmax),
            MistakeVariant("masked weights become −10⁹ after the softmax", set_after_softmax(-1e9)),
        ),
    ),
    Mistake(
        "mask-not-finite",
        "mask",
        (
            MistakeVariant("mask · −∞ is added to the scores", times_infinity),
            MistakeVariant("mask · −∞ is added to the scores, of those that are visible", allowed_times_infinity),
        ),
        may_be_nan=True,
    ),
)


def filled_with(value: float) -> Callable[..., Tensor]:
    """Scores set to a finite number where masked."""
    return lambda layer, scores, keep: scores.masked_fill(~keep, value)


def sentinel_variants(value: float) -> tuple[MistakeVariant, MistakeVariant]:
    """Variants that set masked scores to a number, or add it."""
    return (
        MistakeVariant(f"masked scores are set to {value:g}", filled_with(value)),
        MistakeVariant(f"{value:g} is added to masked scores", masked_plus(value)),
    )


def _has_nan_rows(symptoms: Symptoms) -> str | None:
    rows = f"{symptoms.n_nan_rows} rows of the output are NaN when padding stands on the left"
    return f"{rows}: its own causal mask leaves them no key" if symptoms.n_nan_rows else None


_SENTINELS = (
    Mistake(
        "mask-sign",
        "mask",
        (
            MistakeVariant("masked scores are set to 10⁹", filled_with(1e9)),
            MistakeVariant("masked scores are set to +∞", filled_with(math.inf)),
        ),
    ),
    Mistake(
        "mask-sentinel-too-small",
        "mask",
        (
            *(
                variant
                for value in (-1e3, -1e2, -50.0, -30.0, -20.0, -10.0, -5.0)
                for variant in sentinel_variants(value)
            ),
            MistakeVariant("masked scores are set to 0, or next to it such as 1e-9", filled_with(1e-9)),
        ),
        operations=("masked_fill", "masked_fill_", "where"),
        shown_by=("large",),
        with_number=sentinel_variants,
    ),
    Mistake(
        "fully-masked-row",
        site="pattern",
        symptom=_has_nan_rows,
    ),
)


# --------------------------------------------------------------------------------------------------------------------- padding


def visible_padding(layer: ReferenceLayer, real: Tensor) -> Tensor:
    """Padding visible like any token."""
    return torch.ones_like(real)[:, None, None, :]


def padding_of_first_sequence(layer: ReferenceLayer, real: Tensor) -> Tensor:
    """The first sequence's padding for all."""
    return real[:1, None, None, :]


_PADDING = (
    Mistake(
        "padding-ignored",
        "padding_rule",
        (MistakeVariant("padding is seen like any token", visible_padding),),
    ),
    Mistake(
        "padding-inverted",
        "padding_rule",
        (MistakeVariant("real tokens are hidden and padding is seen", lambda layer, real: ~real[:, None, None, :]),),
    ),
    Mistake(
        "padding-of-queries",
        "padding_rule",
        (MistakeVariant("padding hides queries instead of keys", lambda layer, real: real[:, None, :, None]),),
    ),
    Mistake(
        "padding-of-first-sequence",
        "padding_rule",
        (MistakeVariant("every sequence is taken to be padded like the first", padding_of_first_sequence),),
    ),
)


MASKS = (*_CAUSALITY, *_CELLS, *_ACTIONS, *_ORDERS, *_ERASED, *_SENTINELS, *_PADDING)
