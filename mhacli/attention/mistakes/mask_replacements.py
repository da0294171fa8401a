"""What people put in the place of masks: which cells a mask allows, and how it acts on scores."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.replacements import Inapplicable
from mhacli.attention.mistakes.stages import Layer


def triangle(keep: str, shift: int) -> Callable[..., Tensor]:
    """The past or the future of each query, shifted."""

    def rule(layer: Layer, q_len: int, k_len: int) -> Tensor:
        ones = torch.ones(q_len, k_len, dtype=torch.bool)
        return ones.tril(k_len - q_len + shift) if keep == "past" else ones.triu(k_len - q_len + shift)

    return rule


def all_keys(layer: Layer, q_len: int, k_len: int) -> Tensor:
    """No causality."""
    return torch.ones(q_len, k_len, dtype=torch.bool)


def from_top_left(layer: Layer, q_len: int, k_len: int) -> Tensor:
    """The first query stands at the first key."""
    return torch.ones(q_len, k_len, dtype=torch.bool).tril()


def opposite(layer: Layer, allowed: Tensor) -> Tensor:
    """What is allowed is forbidden."""
    return ~allowed


def everything(layer: Layer, allowed: Tensor) -> Tensor:
    """The mask is not read."""
    return torch.ones_like(allowed)


def transposed_mask(layer: Layer, allowed: Tensor) -> Tensor:
    """Queries and keys of the mask swapped."""
    if allowed.shape[-1] != allowed.shape[-2]:
        raise Inapplicable
    return allowed.mT


def padding_seen(layer: Layer, real: Tensor) -> Tensor:
    """Padding like any token."""
    return torch.ones_like(real)[:, None, None, :]


def padding_alone(layer: Layer, real: Tensor) -> Tensor:
    """Only padding."""
    return ~real[:, None, None, :]


def padding_of_queries(layer: Layer, real: Tensor) -> Tensor:
    """Padding along the queries: it sees nothing, and is seen by all."""
    return real[:, None, :, None]


def padding_of_first(layer: Layer, real: Tensor) -> Tensor:
    """Every sequence as long as the first."""
    return real[:1, None, None, :]


def without_own(layer: Layer, rules: tuple[Tensor | None, Tensor | None, Tensor | None]) -> Tensor | None:
    """The layer's own rule is lost where the caller gives one."""
    own, given, padding = rules
    if own is None or (given is None and padding is None):
        raise Inapplicable
    return stages.together(layer, (None, given, padding))


def filled_with(value: float) -> Callable[..., Tensor]:
    """Forbidden scores are a number that real ones can fall below."""
    return lambda layer, scores, keep: scores.masked_fill(~keep, value)


def lowered_by(value: float) -> Callable[..., Tensor]:
    """A number is added to forbidden scores."""
    return lambda layer, scores, keep: scores + (~keep).to(scores.dtype) * value


def multiplied(layer: Layer, scores: Tensor, keep: Tensor) -> Tensor:
    """Forbidden scores are 0."""
    return scores * keep


def multiplied_hidden(layer: Layer, scores: Tensor, keep: Tensor) -> Tensor:
    """Allowed scores are 0."""
    return scores * ~keep


def added(layer: Layer, scores: Tensor, keep: Tensor) -> Tensor:
    """1 is added to allowed scores."""
    return scores + keep


def times_infinity(layer: Layer, scores: Tensor, keep: Tensor) -> Tensor:
    """0 · −∞ is NaN."""
    return scores + (~keep).to(scores.dtype) * -math.inf


def allowed_times_infinity(layer: Layer, scores: Tensor, keep: Tensor) -> Tensor:
    """The same the wrong way round."""
    return scores + keep.to(scores.dtype) * -math.inf


def repeated_inside(layer: Layer, scores: Tensor, keep: Tensor) -> Tensor:
    """Planes of batch and head, masked in the order head, batch."""
    batch, n_heads, q_len, k_len = scores.shape
    if batch == 1 or n_heads == 1 or keep.shape[0] == 1:
        raise Inapplicable
    planes = keep.expand(batch, 1, q_len, k_len).flatten(0, 1).repeat(n_heads, 1, 1)
    return stages.mask(layer, scores, planes.view(batch, n_heads, q_len, k_len))


def shared_by_neighbours(layer: Layer, scores: Tensor, keep: Tensor) -> Tensor:
    """Masks that serve the batch in turn, 0 1 0 1, serve neighbours instead, 0 0 1 1."""
    batch = scores.shape[0]
    periods = (n for n in range(2, batch) if keep.shape[0] == batch and batch % n == 0)
    period = next((n for n in periods if torch.equal(keep, keep[:n].repeat(batch // n, 1, 1, 1))), None)
    if period is None:
        raise Inapplicable
    return stages.mask(layer, scores, keep[:period].repeat_interleave(batch // period, dim=0))


def erased(layer: Layer, pattern: Tensor, scaled: Tensor, keep: Tensor | None) -> Tensor:
    """Forbidden shares are erased after the softmax."""
    return pattern if keep is None else stages.softmax(layer, scaled) * keep


def erased_to_infinity(layer: Layer, pattern: Tensor, scaled: Tensor, keep: Tensor | None) -> Tensor:
    """Forbidden shares are −∞ after the softmax."""
    return pattern if keep is None else stages.mask(layer, stages.softmax(layer, scaled), keep)


def erased_to(value: float) -> Callable[..., Tensor]:
    """Forbidden shares are a number after the softmax."""

    def shares(layer: Layer, pattern: Tensor, scaled: Tensor, keep: Tensor | None) -> Tensor:
        return pattern if keep is None else stages.softmax(layer, scaled).masked_fill(~keep, value)

    return shares
