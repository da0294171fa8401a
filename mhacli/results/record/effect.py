"""What a record says of effects: how much the output of a model changes when attention is removed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from mhacli.results.columns import EFFECT_NUMBERS
from mhacli.spec.tokens import AttentionKind

Replacement = Literal["zero", "mean", "resample", "renormalise"]
"""What stands in the place of what is removed. For the output of a head: zeros, its mean over the positions of the text, or its
output in another text at the positions that correspond. For an edge: the other weights of its row, which grow in proportion
until the row sums to what it did."""
REPLACEMENTS: tuple[Replacement, ...] = ("zero", "mean", "resample")
"""What may replace the output of a head."""


@dataclass(frozen=True)
class Effect:
    """One removal, and how far it moves the output at one position: removed minus untouched.

    A head is removed at position `at` alone, or at all positions where that is None; `heads` are several of them together, as
    layer and number. An edge is the weight that `query` gives to `key`, in one `head`, or in all heads of the layer where that
    is None. Of `spans` the tokens of the second see none of the first, in all heads of `layers`. A layer of our own is 0.
    `kinds` are those of `heads` of several kinds of attention, else all are `kind`.

    `d_logit` is of the target token, or of the difference between it and the one that it is compared with; `d_logprob` (nats) of
    the target token. `kl` is the divergence KL(untouched ‖ removed) of the whole distribution, in nats. `rank` is that of the
    target token with the removal, 0 being the likeliest. All four are None for a model without a language head. `d_output` is
    ‖change‖ ÷ ‖output‖ of the last hidden state. A change below the noise floor is 0.

    `direct` is the part of `d_logit` that needs no later layer: what the heads' own output added to the logit, taken away.
    `d_logit` − `direct` is what later layers make of the loss. None for edges and spans, and where the way is not known.
    `masked`: no query that loses a key saw it, so nothing changes.
    `first_order` estimates `d_logit` by the gradient, None without a screening.
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
    heads: tuple[tuple[int, int], ...] = field(default=(), metadata={"omit_empty": True})
    spans: tuple[str, ...] = field(default=(), metadata={"omit_empty": True})
    layers: tuple[int, ...] = field(default=(), metadata={"omit_empty": True})
    direct: float | None = None
    masked: bool = field(default=False, metadata={"omit_empty": True})
    first_order: float | None = None
    kinds: tuple[AttentionKind, ...] = field(default=(), metadata={"omit_empty": True})

    @property
    def later(self) -> float | None:
        """What later layers make of a loss, beyond its direct effect."""
        return None if self.direct is None or self.d_logit is None else self.d_logit - self.direct


@dataclass(frozen=True)
class Verification:
    """`n` removals that were computed a second time in another way, and the largest distance of their outputs.

    `identical`: a pass in which every attention is replaced by its own numbers gives the bits of the plain pass."""

    n: int
    max_abs_error: float
    tolerance: float
    identical: bool
    ok: bool


@dataclass(frozen=True)
class DirectSum:
    """The logit, or the difference of two, as a sum of what the parts of the untouched model add directly: the `embedding` with
    its positions, all `heads`, the MLPs and other parts of the blocks, and all `biases`. The final norm has the scale of this
    text.

    Each is computed by itself; `residue` is what they leave of the logit. Where it is above `tolerance`, not `ok`, the model does
    more with its parts than to add them up.
    """

    embedding: float
    heads: float
    mlps: float
    biases: float
    residue: float
    tolerance: float
    ok: bool


@dataclass(frozen=True)
class Screening:
    """Of `n_heads` removals, all estimated to first order, the `n_largest` were computed, and `n_others` by chance.

    `correlation` is Spearman's, of the sizes of the estimates with those of the changes that were computed. None where one of
    them has no order.
    """

    n_heads: int
    n_largest: int
    n_others: int
    correlation: float | None


@dataclass(frozen=True)
class Judgement:
    """How a usual picture of attention ranks `n` heads or weights: Spearman's correlation with the sizes of the changes that
    their removal makes. None where the picture is not defined for this model, or for heads."""

    picture: str
    correlation: float | None
    n: int


@dataclass(frozen=True)
class EffectSummary:
    """What was measured, and how sure it is.

    `metric` is the field of `Effect` that ranks. `target` and `versus` are tokens, None without a language head; `logit`,
    `logprob` and `rank` are those of the untouched model. `floor` is the largest change of the metric that an untouched row of a
    batch showed. `direct` is the proof of the direct effects, None where there are none. `screening` and `judgements` are None
    and empty where they were not asked for. `resampled_from` is the other text.
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
    verified: Verification
    direct: DirectSum | None = None
    screening: Screening | None = None
    judgements: tuple[Judgement, ...] = ()
    resampled_from: str | None = None

    def change_of(self, effect: Effect) -> float | None:
        """The change by which removals are ranked."""
        change: float | None = getattr(effect, self.metric)
        return change


def numbers_of(effects: Iterable[Effect]) -> tuple[str, ...]:
    """The columns of numbers that some effect has, in the order in which surfaces show them."""
    known = [*effects]
    return tuple(name for name in EFFECT_NUMBERS if any(getattr(effect, name) is not None for effect in known))
