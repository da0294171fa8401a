"""All statistics of a pattern in one pass over its tiles, and the means that are told of each head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mhacli.attention.tiled.conditions import Matches
from mhacli.attention.tiled.rectangles import rectangles, tile_shape
from mhacli.attention.tiled.reducers import (
    Between,
    Distance,
    Entropy,
    Lifted,
    Marked,
    Mass,
    Matched,
    Peak,
    PerQuery,
    Profile,
    Received,
    SameLabel,
    Squares,
)
from mhacli.attention.tiled.scores import Shares
from mhacli.attention.tiled.tiles import Reducer, reduce_tiles


@dataclass(frozen=True)
class Asked:
    """What to ask of a pattern besides what is always asked: the cells of its map, tokens, marked keys, matching cells.

    `block` queries and keys make a cell of the map. `q_tokens` and `k_tokens` are ids, below 0 where there is no token;
    `before_k` is the token before each key in its text. With `is_self` a key is no duplicate of itself. `first` marks the
    first key of every text, `leading` the first few. `matches` has, for each further pattern, one predicate per sequence.
    `q_spans` and `k_spans` mark the tokens of named parts of the texts, between which mass is counted.
    """

    block: int
    q_tokens: Int[Tensor, "batch query"]
    k_tokens: Int[Tensor, "batch key"]
    before_k: Int[Tensor, "batch key"]
    first: Bool[Tensor, "batch key"]
    leading: Bool[Tensor, "batch key"]
    is_self: bool = True
    matches: tuple[tuple[Matches, ...], ...] = ()
    q_spans: Bool[Tensor, "batch span query"] | None = None
    k_spans: Bool[Tensor, "batch span key"] | None = None

    def on(self, device: torch.device | str) -> Asked:
        """The same with its tensors on a device."""
        return self._with(lambda tensor: tensor.to(device))

    def beginning(self, n: int) -> Asked:
        """The same of the first `n` tokens of the first sequence, without the further patterns and the spans."""
        return replace(self._with(lambda tensor: tensor[:1, :n]), matches=(), q_spans=None, k_spans=None)

    def _with(self, change: Callable[[Tensor], Tensor]) -> Asked:
        names = ("q_tokens", "k_tokens", "before_k", "first", "leading")
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in names}
        return replace(self, **changed)


@dataclass(frozen=True)
class Statistics:
    """What one pass finds.

    Per query: `mass`, nats of `entropy`, `squares`, `distance` in tokens, the shares of the `first` and the `leading` keys, all
    sums over keys; and `peak`, the largest `ln p`. `received` are sums over queries per key, `lifted` the number of queries
    that give a key so many times its uniform share as was asked, `map` per cell, `profile` per signed distance, of which index
    `n_queries − 1` is 0. Per head: the mass on `duplicate` tokens, on those after one (`induction`), on each further pattern
    (`matched`), and `between` spans, from queries to keys.
    """

    mass: PerQuery
    entropy: PerQuery
    squares: PerQuery
    peak: PerQuery
    distance: PerQuery
    first: PerQuery
    leading: PerQuery
    received: Float[Tensor, "batch head key"]
    lifted: Float[Tensor, "batch head key"]
    map: Float[Tensor, "batch head query_block key_block"]
    profile: Float[Tensor, "batch head distance"]
    duplicate: Float[Tensor, "batch head"]
    induction: Float[Tensor, "batch head"]
    matched: Float[Tensor, "batch head n_patterns"]
    between: Float[Tensor, "batch head span span"]

    def of_heads(self, heads: slice) -> Statistics:
        """Those of some heads."""
        return Statistics(*(getattr(self, f.name)[:, heads] for f in fields(self)))


def summarise(
    pattern: Shares,
    asked: Asked,
    tell: Callable[[int], None] = lambda cells: None,
    *,
    visible: Float[Tensor, "batch _head query"] | None = None,
    lift: float = 0.0,
) -> Statistics:
    """Every statistic of a pattern, in one pass over its tiles and O(T) memory. `tell` hears of the cells looked at.

    With the number of keys that are `visible` to each query, those queries are counted that give a key `lift` times its uniform
    share, 1 / visible; without it nothing is.
    """
    mass, entropy, squares, peak = Mass(pattern), Entropy(pattern), Squares(pattern), Peak(pattern)
    distance, received, profile = Distance(pattern), Received(pattern, asked.block), Profile(pattern)
    first, leading = Marked(pattern, asked.first), Marked(pattern, asked.leading)
    lifted = [] if visible is None else [Lifted(pattern, torch.where(visible > 0, lift / visible, torch.inf))]
    duplicate, induction = (
        SameLabel(pattern, asked.q_tokens, labels, shift=shift if asked.is_self else None)
        for shift, labels in enumerate((asked.k_tokens, asked.before_k))
    )
    matched = [Matched(pattern, matches) for matches in asked.matches]
    per_query: list[Reducer] = [mass, entropy, squares, peak, distance, first, leading]
    spans = [] if asked.q_spans is None or asked.k_spans is None else [Between(pattern, asked.q_spans, asked.k_spans)]
    reduce_tiles(pattern, [*per_query, received, *lifted, profile, duplicate, induction, *matched, *spans], tell)
    none = pattern.like.new_zeros((*pattern.shape[:2], 0), dtype=torch.float64)
    return Statistics(
        mass=mass.per_query,
        entropy=entropy.per_query,
        squares=squares.per_query,
        peak=peak.per_query,
        distance=distance.per_query,
        first=first.per_query,
        leading=leading.per_query,
        received=received.per_key,
        lifted=lifted[0].per_key if lifted else torch.zeros_like(received.per_key),
        map=received.map,
        profile=profile.mass,
        duplicate=duplicate.mass,
        induction=induction.mass,
        matched=torch.stack([m.mass for m in matched], dim=-1) if matched else none,
        between=spans[0].mass if spans else none.unsqueeze(-1)[..., :0],
    )


def with_sink(statistics: Statistics, sink_mass: PerQuery) -> Statistics:
    """The statistics of queries that give `sink_mass` to a learned sink, which is no key, and the rest to keys.

    The sink is one more outcome of entropy and squares; the distance is the mean over what keys get. The other masses stay
    what was computed: with the sink's they add up to 1. Source: Xiao et al. 2023; the learned sinks of gpt-oss.
    """
    keys = torch.where(statistics.mass > 0, statistics.mass, 1.0)
    return replace(
        statistics,
        entropy=statistics.entropy + torch.special.entr(sink_mass),
        squares=statistics.squares + sink_mass.square(),
        distance=statistics.distance / keys,
    )


def strongest_key(pattern: Float[Tensor, "batch head query key"]) -> Int[Tensor, "batch head query"]:
    """The key with the largest share, the first of equals; −1 for a row of zeros."""
    share, key = pattern.max(dim=-1)
    return torch.where(share > 0, key, -1)


def entropy_share(entropy: PerQuery, visible: Shaped[Tensor, "#batch #head query"]) -> PerQuery:
    """Entropy divided by its largest possible value, `ln(visible keys)`: 1 is uniform. Rows with one key or none: 0."""
    largest = visible.double().log()
    return torch.where(visible > 1, entropy / largest, 0.0)


def mean_over(per_query: PerQuery, queries: Bool[Tensor, "#batch #head query"]) -> Float[Tensor, " head"]:
    """The mean over the queries marked True, per head; NaN where there is none."""
    weight = queries.double().expand(per_query.shape)
    return (per_query * weight).sum(dim=(0, 2)) / weight.sum(dim=(0, 2))


def distances_folded(profile: Float[Tensor, "head distance"], zero: int) -> Float[Tensor, "head absolute"]:
    """The mass at each distance |i − j|, from that at each signed one, of which index `zero` is 0."""
    before, after = profile[:, : zero + 1].flip(1), profile[:, zero:]
    longest = max(before.shape[1], after.shape[1])
    both = [torch.nn.functional.pad(side, (0, longest - side.shape[1])) for side in (before, after)]
    folded = both[0] + both[1]
    folded[:, 0] = profile[:, zero]
    return folded


def window_of(folded: Float[Tensor, "head absolute"], share: float) -> Int[Tensor, " head"]:
    """The least distance within which at least `share` of the mass lies; rounding of a millionth is forgiven."""
    within = folded.double().cumsum(dim=1)
    wanted = (share - 1e-6) * within[:, -1:]
    return torch.searchsorted(within, wanted).squeeze(1)


def in_steps(folded: Float[Tensor, "head absolute"], steps: Sequence[int]) -> Float[Tensor, "head step"]:
    """The mass of distances up to each of the steps, and beyond the step before: a profile in bins that double."""
    within = torch.nn.functional.pad(folded.double().cumsum(dim=1), (1, 0))
    ends = torch.tensor([min(step + 1, folded.shape[1]) for step in steps], device=folded.device)
    return within[:, ends].diff(dim=1, prepend=within[:, :1])


def doubling_steps(longest: int) -> tuple[int, ...]:
    """The upper ends of the bins 0, 1, 2, 3–4, 5–8, … up to the longest distance.

    >>> doubling_steps(5)
    (0, 1, 2, 4, 5)
    """
    powers = (1 << power for power in range((longest - 1).bit_length())) if longest else ()
    return (0, *powers, longest) if longest else (0,)


def shares_of(pattern: Shares, place: tuple[int, int], queries: range, keys: range) -> Float[Tensor, "query key"]:
    """Any corner of a pattern, cell by cell: exact, in time and memory of that corner alone."""
    shares = pattern.like.new_zeros(len(queries), len(keys))
    for rectangle in rectangles(queries, keys, pattern.allowed, tile_shape(shares.device), shares):
        rows, columns, _ = rectangle
        top, left = rows.start - queries.start, columns.start - keys.start
        own = shares[top : top + len(rows), left : left + len(columns)]
        pattern.tile_into(torch.empty_like(own), own, place, rectangle)
    return shares
