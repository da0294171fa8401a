"""What a record says of effects: how much the output of a model changes when attention is removed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mhacli.spec.tokens import AttentionKind

Replacement = Literal["zero", "mean", "renormalise"]
"""What stands in the place of what is removed. For the output of a head: zeros, or its mean over the positions of the text. For
an edge: the other weights of its row, which grow in proportion until the row sums to what it did."""


@dataclass(frozen=True)
class Effect:
    """One removal, and how far it moves the output at one position: removed minus untouched.

    A head is removed at position `at` alone, or at all positions where that is None; `heads` are several of them together, as
    layer and number. An edge is the weight that `query` gives to `key`, in one `head`, or in all heads of the layer where that
    is None. Of `spans` the tokens of the second see none of the first, in all heads of `layers`.

    `d_logit` is of the target token, or of the difference between it and the one that it is compared with; `d_logprob` (nats) of
    the target token. `kl` is the divergence KL(untouched ‖ removed) of the whole distribution, in nats. `rank` is that of the
    target token with the removal, 0 being the likeliest. All four are None for a model without a language head. `d_output` is
    ‖change‖ ÷ ‖output‖ of the last hidden state. A change below the noise floor is 0.
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
class EffectSummary:
    """What was measured, and how sure it is.

    `metric` is the field of `Effect` that ranks. `target` and `versus` are tokens, None without a language head; `logit`,
    `logprob` and `rank` are those of the untouched model. `floor` is the largest change of the metric that an untouched row of a
    batch showed.
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
