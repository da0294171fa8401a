"""Attention by tiles in one pass: weights, z and the log-sum-exp of some queries from the scores of all their keys; or by a fused
kernel before the pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from mhacli.attention.core import is_finite
from mhacli.attention.masks import Mask
from mhacli.attention.tiled.scores import LOG2_E, PatternOfScores, Scores, VirtualPattern
from mhacli.attention.tiled.tiles import PENALTY, BlankTile, PatternTiles, reduce_tiles

TILES = "tiles"
"""What makes z where it is made with the pattern."""
SHARP, SHARP_PARTS = 16.0, 4
"""A log-sum-exp, or a largest score, above which scores are large: that of a hundred thousand normal scores is 12. Each part of a
sum rounds at a quarter of its size."""
WIDE, WIDE_ON_DEVICE = 64.0, 512.0
"""One beyond which scores are computed in float64: half a step of 64 in float32 is 4e-6. On a GPU, which may take many times as
long in float64, half a step of 512 is 3e-5."""
_MOST = 1e25
"""A score beyond which a forbidden cell does not stand out: then weights are NaN."""
_MOST_BITS = 100.0
"""By which a sink may be above all scores of a query, to base 2: its weight is then still far from overflow."""
_LOWEST = PENALTY / 10
"""The least that the largest score of a query counts as: above every forbidden cell, so that 2^(penalty − it) is 0 and not 1."""


class Attended(NamedTuple):
    """z, the natural log-sum-exp of the scores (0 for a query without keys), and the kernel that made them."""

    z: Float[Tensor, "batch head query d_v"]
    lse: Float[Tensor, "batch head query"]
    kernel: str


def attend_lse(scores: Scores, v: Float[Tensor, "batch kv_head key d_v"]) -> Attended:
    """`attend`'s z with the log-sum-exp of each query's scores, at the cost of fused attention."""
    is_causal = isinstance(scores.allowed, Mask) and scores.allowed.causal_offset == 0
    is_simple = scores.is_plain and scores.scale > 0 and (scores.allowed is None or is_causal)
    if is_simple and v.device.type == "cpu" and v.shape[3] == scores.q.shape[3]:
        return _fused(scores.q, scores.k, v, scale=scores.scale, causal=is_causal)
    return tiled_attend(scores, v)


def _fused(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> Attended:
    """By the flash kernel for CPUs. 16-bit numbers are widened, for it rounds the log-sum-exp of theirs. Heads that share keys
    become a batch of their own, whose keys have stride 0."""
    (batch, n_heads, q_len, _), dtype = q.shape, v.dtype
    shared = (batch * k.shape[1], n_heads // k.shape[1])
    q, k, v = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (q, k, v))
    if shared[1] > 1:
        q = q.reshape(*shared, *q.shape[2:])
        k, v = (t.reshape(shared[0], 1, *t.shape[2:]).expand(*shared, *t.shape[2:]) for t in (k, v))
    z, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    z, lse = z.to(dtype).reshape(batch, n_heads, q_len, -1), lse[..., :q_len].reshape(batch, n_heads, q_len)
    return Attended(z, lse, "flash")


def tiled_attend(scores: Scores, v: Float[Tensor, "batch kv_head key d_v"]) -> Attended:
    """The same by our own tiles, for every mask, bias and softcap."""
    pattern = SoftmaxPattern(scores, v)
    reduce_tiles(pattern, [])
    return Attended(pattern.z.to(v.dtype), pattern.lse.to(scores.like.dtype), TILES)


def pattern_of(
    scores: Scores,
    lse: Float[Tensor, "batch head query"] | None,
    sink_logits: Float[Tensor, "_batch head _query"] | None = None,
) -> VirtualPattern | SoftmaxPattern:
    """The pattern of scores and sinks: by the log-sum-exp of the scores where it is known and exact enough."""
    if lse is None or (scores.like.dtype != torch.float64 and bool((lse.abs() > SHARP).any())):
        return SoftmaxPattern(scores, sink_logits=sink_logits)
    return VirtualPattern(scores, lse if sink_logits is None else torch.logaddexp(lse, sink_logits.to(lse.dtype)))


def exact_enough(scores: Scores, sizes: Tensor) -> Scores:
    """The scores, computed as exactly as such large ones have to be: `sizes` are the largest, or the log-sum-exp, of queries."""
    if scores.like.dtype == torch.float64 or not bool((sizes.abs() > SHARP).any()):
        return scores
    wide = WIDE if sizes.device.type == "cpu" else WIDE_ON_DEVICE
    if sizes.device.type != "mps" and bool((sizes.abs() > wide).any()):  # which has no float64
        return replace(scores, is_wide=True)
    return replace(scores, n_parts=SHARP_PARTS)


class SoftmaxPattern(PatternOfScores):
    """The pattern of scores whose log-sum-exp is not known yet: it is computed with the tiles, from all scores of some queries.
    With values `v` their z is computed too. The pattern serves for one pass.

    The weights are within 1e-5 of themselves in float32. Large scores, those of sharp heads, round too much: then dot products
    are summed in parts, or in float64 where float32 cannot hold the scores themselves. `sink_logits` take part in the softmax.
    """

    def __init__(
        self,
        scores: Scores,
        v: Float[Tensor, "batch kv_head key d_v"] | None = None,
        sink_logits: Float[Tensor, "_batch head _query"] | None = None,
    ) -> None:
        self.scores, self.v, self._sinks = scores, v, sink_logits
        self._v_is_finite = v is None or is_finite(v)
        batch, n_heads, n_queries, _ = scores.shape
        exact = torch.float32 if scores.q.device.type == "mps" else torch.float64
        self._of_keys = scores.like.new_zeros(batch, n_heads, n_queries)
        self._peak = self._of_keys.new_full(self._of_keys.shape, PENALTY)
        self._reference = torch.zeros_like(self._of_keys, dtype=exact)
        self.z = scores.like.new_zeros(batch, n_heads, n_queries, 0 if v is None else v.shape[3])

    def of_heads(self, heads: range) -> SoftmaxPattern:
        """The pattern of some neighbouring heads, for a pass of its own."""
        assert self.v is None, "values are given for one pass"
        sinks = None if self._sinks is None else self._sinks[:, heads.start : heads.stop]
        return SoftmaxPattern(self.scores.of_heads(heads), sink_logits=sinks)

    def known(self) -> VirtualPattern:
        """The same as a pattern of which any cell can be computed, when the pass is over."""
        scores, lse = exact_enough(self.scores, self.lse), self.lse
        if self._sinks is not None:
            lse = torch.logaddexp(lse, self._sinks.to(lse.dtype))
        return VirtualPattern(scores, lse.to(scores.like.dtype))

    def rows_into(self, tiles: Sequence[BlankTile], batch_head: tuple[int, int]) -> Float[Tensor, " query"]:
        """Writes p of all tiles of some queries, and log2 p plus what the sum of a row takes from it, which it returns."""
        queries = tiles[0].region.queries
        rows = (*batch_head, slice(queries.start, queries.stop))
        sink = None if self._sinks is None else self._sink_bits(rows)
        largest, reference = self._scores_into(tiles, batch_head, sink)
        of_keys = reduce(
            torch.add, [torch.exp2(tile.log2, out=tile.weights).sum(dim=1, keepdim=True) for tile in tiles]
        )
        total = of_keys if sink is None else of_keys + torch.exp2(sink - reference).to(of_keys.dtype)
        total = torch.where(total > 0, total, 1.0)
        bits = total.log2()
        for tile in tiles:
            tile.weights.div_(total)
            self._add_values(tile, rows)
        self._of_keys[rows] = of_keys.squeeze(1)
        self._peak[rows] = (largest - bits).squeeze(1)
        self._reference[rows] = reference.squeeze(1)
        return bits.squeeze(1)

    @property
    def lse(self) -> Float[Tensor, "batch head query"]:
        """The log-sum-exp of the scores of each query's keys, when the pass is over."""
        no_keys = self._of_keys == 0
        lse = (self._reference + torch.where(no_keys, 1.0, self._of_keys).log2()) * math.log(2)
        return torch.where(no_keys, 0.0, lse)

    @property
    def peak(self) -> Float[Tensor, "batch head query"]:
        """The largest `ln p` of each query, when the pass is over; far below any weight of a float where no key is allowed."""
        return self._peak * math.log(2)

    def _scores_into(
        self, tiles: Sequence[BlankTile], batch_head: tuple[int, int], sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Writes scores to base 2, less a reference of each query where they are large, and returns their largest, and that.

        Without one, 2^score is far from overflow and underflow, and as exact.
        """
        largest = self._written(tiles, batch_head, self.scores)
        reference = torch.zeros_like(largest, dtype=self._reference.dtype)
        outcomes = largest if sink is None else torch.maximum(largest, sink)
        if bool(outcomes.abs().amax() <= SHARP * LOG2_E):
            return largest, reference
        known = torch.where(largest > _LOWEST, largest, 0.0)
        finer = exact_enough(self.scores, known * math.log(2))
        if finer.is_wide:
            reference += torch.where(known.abs() < _MOST, known, torch.nan)
            for tile in tiles:
                wide = torch.empty_like(tile.log2, dtype=torch.float64)
                finer.log2_into(wide, batch_head, tile.region)
                tile.log2.copy_(wide.sub_(reference))
            largest = _largest_of(tiles)
        elif finer is not self.scores:
            largest = self._written(tiles, batch_head, finer)
        top = largest if sink is None else torch.maximum(largest, (sink - reference - _MOST_BITS).to(largest.dtype))
        for tile in tiles:
            tile.log2.sub_(top)
        return torch.where(largest > _LOWEST, largest - top, largest), reference + top

    def _written(self, tiles: Sequence[BlankTile], batch_head: tuple[int, int], scores: Scores) -> Tensor:
        for tile in tiles:
            scores.log2_into(tile.log2, batch_head, tile.region)
        return _largest_of(tiles)

    def _sink_bits(self, rows: tuple[int, int, slice]) -> Float[Tensor, "query 1"]:
        """The sink logits of some queries to base 2."""
        assert self._sinks is not None
        of_all: Tensor = self._sinks.expand(self.shape[:3])
        return of_all[rows].unsqueeze(-1).to(self._of_keys.dtype) * LOG2_E

    def _add_values(self, tile: BlankTile, rows: tuple[int, int, slice]) -> None:
        """Adds the values of a tile's keys to z."""
        if self.v is None:
            return
        (batch, head, _), keys = rows, tile.region.keys
        group = self.shape[1] // self.v.shape[1]
        values = self.v[batch, head // group, keys.start : keys.stop].to(tile.weights.dtype)
        if not self._v_is_finite:  # 0 · NaN is NaN, and a forbidden key may hold anything
            values = values.masked_fill((tile.weights == 0).all(dim=0).unsqueeze(-1), 0.0)
        self.z[rows].addmm_(tile.weights, values)


def _largest_of(tiles: Sequence[BlankTile]) -> Float[Tensor, "query 1"]:
    """The largest number of each query in all tiles."""
    return reduce(torch.maximum, [tile.log2.amax(dim=1, keepdim=True) for tile in tiles]).clamp(min=_LOWEST)


@dataclass(frozen=True)
class AttentionResult:
    """What some neighbouring heads computed: their pattern, z, and what both are computed from.

    `lse` is the log-sum-exp of the scores of each query's keys, `kernel` the name of what made z. Where a `SoftmaxPattern`
    computes them, they hold when its pass is over: `finished`. `sink_logits` are the scores of learned sinks, with axes of 1
    where batch or query do not matter: they take part in the softmax and are no keys. `v` None: the values were not seen, and
    `z` is 0.
    """

    heads: range
    pattern: PatternTiles | SoftmaxPattern
    lse: Float[Tensor, "batch head query"]
    z: Float[Tensor, "batch head query d_v"]
    v: Float[Tensor, "batch kv_head key d_v"] | None
    kernel: str
    sink_logits: Float[Tensor, "_batch head _query"] | None = None

    @property
    def scores(self) -> Scores | None:
        """What the pattern is the softmax of; None where it was computed whole."""
        return self.pattern.scores if isinstance(self.pattern, PatternOfScores) else None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(batch, head, query, key)`."""
        return self.pattern.shape

    @property
    def n_kv_heads(self) -> int:
        """How many heads of keys there are; as many as heads where only a pattern was seen."""
        return self.shape[1] if self.scores is None else self.scores.k.shape[1]

    @property
    def sink_mass(self) -> Float[Tensor, "batch head query"] | None:
        """The weight that a sink logit takes of each query, which no key gets."""
        if self.sink_logits is None:
            return None
        assert isinstance(self.pattern, VirtualPattern)
        return (self.sink_logits.to(self.pattern.lse.dtype) - self.pattern.lse).exp()

    @property
    def is_finite(self) -> bool:
        """Whether queries, keys and values are, as far as they were seen."""
        inputs = [] if self.v is None else [self.v]
        inputs += [] if self.v is None or self.scores is None else [self.scores.q, self.scores.k]
        return all(is_finite(tensor) for tensor in inputs)

    @property
    def known_pattern(self) -> PatternTiles:
        """The pattern, of which any cell can be computed. Not before its pass."""
        assert not isinstance(self.pattern, SoftmaxPattern)
        return self.pattern

    def finished(self) -> AttentionResult:
        """The same after the pass over its pattern, of which any cell can be computed then."""
        if not isinstance(self.pattern, SoftmaxPattern):
            return self
        found, known = self.pattern, self.pattern.known()
        z = self.z if found.v is None else found.z.to(found.v.dtype)
        return replace(self, pattern=known, lse=found.lse.to(known.like.dtype), z=z)

    def of_heads(self, heads: range) -> AttentionResult:
        """The same of some of the heads: whole groups of those that share a kv head, or a part of one group."""
        span, group = slice(heads.start, heads.stop), 1 if self.v is None else self.shape[1] // self.v.shape[1]
        kv_heads = slice(heads.start // group, (heads.stop - 1) // group + 1)
        return AttentionResult(
            heads,
            self.pattern.of_heads(heads),
            self.lse[:, span],
            self.z[:, span],
            None if self.v is None else self.v[:, kv_heads],
            self.kernel,
            None if self.sink_logits is None else self.sink_logits[:, span],
        )


def attention_of(scores: Scores, v: Float[Tensor, "batch kv_head key d_v"], heads: range) -> AttentionResult:
    """The attention of some neighbouring heads, to be reduced, by the scores and the values of all."""
    group = scores.shape[1] // v.shape[1]
    scores, v = scores.of_heads(heads), v[:, heads.start // group : (heads.stop - 1) // group + 1]
    if v.device.type == "cpu":  # where one pass takes less time than a fused kernel and a pass after it
        pattern = SoftmaxPattern(scores, v)
        return AttentionResult(heads, pattern, pattern.lse, pattern.z, v, TILES)
    attended = attend_lse(scores, v)
    return AttentionResult(heads, pattern_of(scores, attended.lse), attended.lse, attended.z, v, attended.kernel)
