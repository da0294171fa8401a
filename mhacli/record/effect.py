"""The effects in a record: how much the output of a model changes when attention is removed."""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from mhacli.settings import AttentionKind

from .checks import SelfCheck

Replacement = Literal["zero", "mean", "resample", "renormalise"]
"""The replacement of the removed part. The output of a head is replaced by zeros, or by its mean
over the positions of the text; in records of earlier versions also by its output for another text
(resample). For an edge, the other weights of its row are scaled so that the row keeps its sum."""
EFFECT_NUMBERS = ("d_logit", "first_order", "d_logprob", "kl", "rank", "d_output")
"""The numbers of an effect: fields of `Effect`."""
Measured = Literal["token", "class", "tag", "span", "score", "metric", "vector"]
"""What is measured: the logit of a token, of a class of the whole text, or of a tag of one token;
the sum of the logits of the start and the end of an answer; the only score of a text; the value of
a user's metric; or only the output vector."""
HeadReplacement = Literal["zero", "mean"]
"""What a removal can put in place of the output of a head: a subset of `Replacement`."""


class Effect(Struct, frozen=True):
    """One removal, and the change of the output at one position: with the removal minus without it.

    A head is removed only at position `at`, or at all positions for None. `heads` are several heads
    removed together, as (layer, number); `kinds` are their kinds of attention if these differ,
    otherwise all are of `kind`. An edge is the attention weight of `query` on `key` in one `head`,
    or in all heads of the layer for None. With `spans`, tokens of the second span see none of the
    first, in all heads of `layers`. A layer of mha has number 0.

    `d_logit` is the change of the target token's logit, or of its difference from the logit of the
    token compared with; `d_logprob` is that of its log probability, in nats. `kl` is the divergence
    KL(without ‖ with the removal) of the whole distribution, in nats. `rank` is that of the target
    token with the removal, 0 for the likeliest. All four are None for a model that gives a vector,
    and the last three for a single score. `d_output` is ‖change‖ ÷ ‖output‖ of the last hidden
    state, or of the logits of a model without a language head. Changes below the noise floor are 0.

    `masked` says that the removed weights were masked already, so nothing changes. `first_order` is
    the estimate of `d_logit` by the gradient, None without a screening.
    """

    layer: int | None
    kind: AttentionKind
    head: int | None
    query: int | None
    key: int | None
    removed: Literal["head", "heads", "edge", "spans"]
    replace: Replacement
    at: int | None
    d_logit: float | None
    d_logprob: float | None
    kl: float | None
    rank: int | None
    d_output: float
    heads: tuple[tuple[int, int], ...] = ()
    spans: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    masked: bool = False
    first_order: float | None = None
    kinds: tuple[AttentionKind, ...] = ()


class Screening(Struct, frozen=True):
    """A screening: of `n_heads` removals estimated to first order, the `n_largest` and `n_others`
    random ones were computed.

    `correlation` is Spearman's, between the sizes of estimates and of computed changes; None if
    either are all equal.
    """

    n_heads: int
    n_largest: int
    n_others: int
    correlation: float | None


class EffectSummary(Struct, frozen=True):
    """The measured quantity, and the checks of the effects.

    `metric` is the field of `Effect` that ranks removals, and `measured` says what the model gives.
    `target` and `versus` are tokens, or names of classes, tags or answers; None for a vector;
    `logit`, `logprob` and `rank` are those without removals. `floor` is the noise floor of the
    metric. `screening` is None unless requested.
    """

    metric: Literal["d_logit", "d_output"]
    position: int
    target: str | None
    target_id: int | None
    versus: str | None
    versus_id: int | None
    logit: float | None
    logprob: float | None
    rank: int | None
    floor: float
    n_passes: int
    verified: SelfCheck
    screening: Screening | None = None
    measured: Measured = "token"

    def change_of(self, effect: Effect) -> float | None:
        """The change by which removals are ranked."""
        change: float | None = getattr(effect, self.metric)
        return change


def numbers_of(effects: Sequence[Effect]) -> tuple[str, ...]:
    """The columns of numbers that at least one effect has, in the order of display."""
    return tuple(
        name
        for name in EFFECT_NUMBERS
        if any(getattr(effect, name) is not None for effect in effects)
    )
