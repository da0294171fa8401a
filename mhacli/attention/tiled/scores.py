"""Scores and pattern as a question, tile by tile, and from them z and the log-sum-exp: nothing of `[query, key]` is whole.

Weights are asked for as logarithms to base 2: `log2 p = log2(e) · (score − lse)`, with the log-sum-exp of the row. Base 2
because torch's `exp2` is several times as fast as its `exp` on a CPU, and the factor hides in the scale. A forbidden cell
gets a penalty instead of −∞: its weight is exactly 0 all the same, and 0 · log2 p is no NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mhacli.attention.core import Allowed, is_finite
from mhacli.attention.fused import Attended, fused_lse
from mhacli.attention.masks import Mask, of_heads, of_queries
from mhacli.attention.tiled.statistics import RowSums
from mhacli.attention.tiled.tiles import (
    PENALTY,
    PatternTiles,
    TileRegion,
    hide,
    indices,
    rectangles,
    reduce_tiles,
    tile_shape,
)
from mhacli.spec.sites import alibi_slopes

LOG2_E = math.log2(math.e)

Bias = Callable[[int, int, Int[Tensor, " query"], Int[Tensor, " key"]], Float[Tensor, "query key"]]
"""What is added to the scores, as a question: `(sequence, head, q_idx, k_idx)`. Every number of it is finite."""


@dataclass(frozen=True)
class Scores:
    """What softmax is taken of: `softcap(scale · q kᵀ) + bias` where `allowed`, as `attend` defines it.

    Query head `h` reads kv head `h // (head / kv_head)`. 16-bit numbers are widened to float32 tile by tile. A dot product is
    summed in `n_parts`, which round less where it is large. With `is_wide` all of it is computed in float64.
    """

    q: Float[Tensor, "batch head query d_head"]
    k: Float[Tensor, "batch kv_head key d_head"]
    scale: float
    softcap: float | None = None
    bias: Bias | None = None
    allowed: Allowed | None = None
    n_parts: int = 1
    is_wide: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(batch, head, query, key)`."""
        return (*self.q.shape[:3], self.k.shape[2])

    @property
    def like(self) -> Tensor:
        """An empty tensor with the dtype of the maths, on the device of the queries."""
        dtype = torch.float64 if self.is_wide else torch.promote_types(self.q.dtype, torch.float32)
        return self.q.new_empty(0, dtype=dtype)

    def of_heads(self, heads: range) -> Scores:
        """The scores of some neighbouring query heads, without a copy: whole groups of those that share a kv head, or a part
        of one group."""
        group = self.q.shape[1] // self.k.shape[1]
        kv_heads = slice(heads.start // group, (heads.stop - 1) // group + 1)
        bias = self.bias
        return replace(
            self,
            q=self.q[:, heads.start : heads.stop],
            k=self.k[:, kv_heads],
            bias=None if bias is None else lambda b, h, q_idx, k_idx: bias(b, heads.start + h, q_idx, k_idx),
            allowed=None if self.allowed is None else of_heads(self.allowed, heads),
        )

    def of_queries(self, queries: Int[Tensor, " query"]) -> Scores:
        """The scores of some queries, wherever they stand."""
        bias = self.bias
        return replace(
            self,
            q=self.q[:, :, queries],
            bias=None if bias is None else lambda b, h, q_idx, k_idx: bias(b, h, queries[q_idx], k_idx),
            allowed=None if self.allowed is None else of_queries(self.allowed, queries),
        )

    @property
    def is_plain(self) -> bool:
        """Whether a score is a scaled dot product and nothing else."""
        return self.softcap is None and self.bias is None

    def log2_into(
        self,
        out: Float[Tensor, "query key"],
        batch_head: tuple[int, int],
        rectangle: TileRegion,
        lse: Float[Tensor, "batch head all_queries"] | None = None,
    ) -> None:
        """Writes `log2(e) · (score − lse)` of a tile of sequence and head `batch_head`; `lse` None is 0.

        `PENALTY` or less stands where the mask forbids a cell.
        """
        self._unmasked_into(out, batch_head, rectangle, lse)
        hide(out, rectangle.hidden, batch_head)

    def _unmasked_into(
        self, out: Tensor, batch_head: tuple[int, int], rectangle: TileRegion, lse: Tensor | None
    ) -> None:
        (batch, head), queries, keys = batch_head, rectangle.queries, rectangle.keys
        group = self.q.shape[1] // self.k.shape[1]
        q = self.q[batch, head, queries.start : queries.stop].to(out.dtype)
        k = self.k[batch, head // group, keys.start : keys.stop].to(out.dtype)
        start = (
            out.new_zeros(1) if lse is None else lse[batch_head][queries.start : queries.stop].to(out.dtype) * -LOG2_E
        )
        scale, width = self.scale * (LOG2_E if self.is_plain else 1.0), -(-q.shape[1] // self.n_parts)
        first = start if self.is_plain else out.new_zeros(1)
        torch.addmm(first.unsqueeze(-1), q[:, :width], k[:, :width].mT, alpha=scale, out=out)
        for part in range(width, q.shape[1], width):
            out.addmm_(q[:, part : part + width], k[:, part : part + width].mT, alpha=scale)
        if self.is_plain:
            return
        self._finish(out, batch_head, indices(queries, out), indices(keys, out))
        out.mul_(LOG2_E).add_(start.unsqueeze(-1))

    def _finish(
        self, scaled: Float[Tensor, "query key"], batch_head: tuple[int, int], q_idx: Tensor, k_idx: Tensor
    ) -> None:
        """From scaled products to scores, in place: all that comes after the scale, in this one place."""
        if self.softcap is not None:
            scaled.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.bias is not None:
            scaled.add_(self.bias(*batch_head, q_idx, k_idx))

    @property
    def formula(self) -> str:
        """How a score follows from `qk`, in symbols."""
        scaled, c = f"{self.scale:.6g} · qk", self.softcap
        capped = scaled if c is None else f"{c:g} · tanh({scaled} / {c:g})"
        return capped if self.bias is None else f"{capped} + position bias"

    def matrices(self) -> tuple[Float[Tensor, "batch head query key"], Float[Tensor, "batch head query key"]]:
        """The products `qk` and the scores of all cells, without the mask, each as one matrix in the dtype of the maths."""
        dtype, (batch, n_heads, n_queries, n_keys) = self.like.dtype, self.shape
        qk = self.q.to(dtype) @ self.k.to(dtype).repeat_interleave(n_heads // self.k.shape[1], dim=1).mT
        scores = qk * self.scale
        q_idx, k_idx = indices(range(n_queries), qk), indices(range(n_keys), qk)
        if not self.is_plain:
            for batch_head in ((b, h) for b in range(batch) for h in range(n_heads)):
                self._finish(scores[batch_head], batch_head, q_idx, k_idx)
        return qk, scores


@dataclass(frozen=True)
class VirtualPattern:
    """The pattern of scores whose log-sum-exp is known: `p = exp(score − lse)`."""

    scores: Scores
    lse: Float[Tensor, "batch head query"]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(batch, head, query, key)`."""
        return self.scores.shape

    @property
    def like(self) -> Tensor:
        """An empty tensor with the dtype of the maths, on the device of the queries."""
        return self.scores.like

    @property
    def allowed(self) -> Allowed | None:
        """The mask."""
        return self.scores.allowed

    def tile_into(self, log2: Tensor, weights: Tensor, batch_head: tuple[int, int], rectangle: TileRegion) -> None:
        """Writes log2 p and p of a tile."""
        self.scores.log2_into(log2, batch_head, rectangle, self.lse)
        torch.exp2(log2, out=weights)

    def of_heads(self, heads: range) -> VirtualPattern:
        """The pattern of some neighbouring heads."""
        return VirtualPattern(self.scores.of_heads(heads), self.lse[:, heads.start : heads.stop])

    def of_queries(self, queries: Int[Tensor, " query"]) -> VirtualPattern:
        """The rows of some queries, wherever they stand."""
        return VirtualPattern(self.scores.of_queries(queries), self.lse[:, :, queries])


@dataclass(frozen=True)
class ComputedPattern:
    """A pattern that was computed whole, for the same questions, in float64. Forbidden weights are 0 in it."""

    pattern: Float[Tensor, "batch head query key"]
    allowed: Allowed | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(batch, head, query, key)`."""
        return tuple(self.pattern.shape)  # type: ignore[return-value]

    @property
    def like(self) -> Tensor:
        """An empty float64 tensor on the pattern's device."""
        return self.pattern.new_empty(0, dtype=torch.float64)

    def tile_into(self, log2: Tensor, weights: Tensor, batch_head: tuple[int, int], rectangle: TileRegion) -> None:
        """Writes log2 p and p of a tile."""
        rows, columns = (slice(span.start, span.stop) for span in (rectangle.queries, rectangle.keys))
        weights.copy_(self.pattern[batch_head][rows, columns])
        torch.log2(weights, out=log2).clamp_(min=PENALTY)

    def of_heads(self, heads: range) -> ComputedPattern:
        """The pattern of some neighbouring heads."""
        allowed = None if self.allowed is None else of_heads(self.allowed, heads)
        return replace(self, pattern=self.pattern[:, heads.start : heads.stop], allowed=allowed)

    def of_queries(self, queries: Int[Tensor, " query"]) -> ComputedPattern:
        """The rows of some queries, wherever they stand."""
        allowed = None if self.allowed is None else of_queries(self.allowed, queries)
        return replace(self, pattern=self.pattern[:, :, queries], allowed=allowed)


@dataclass(frozen=True)
class AttentionResult:
    """What some neighbouring heads computed: their pattern to ask, z, and what both were made of.

    `lse` is the log-sum-exp of the scores of each query's keys, `kernel` what made it. `sink_logits` are the scores of learned
    sinks, with axes of 1 where batch or query do not matter: they take part in the softmax and are no keys. `v` None: the
    values were not seen, and `z` is 0.
    """

    heads: range
    pattern: PatternTiles
    lse: Float[Tensor, "batch head query"]
    z: Float[Tensor, "batch head query d_v"]
    v: Float[Tensor, "batch kv_head key d_v"] | None
    kernel: str
    sink_logits: Float[Tensor, "_batch head _query"] | None = None

    @property
    def scores(self) -> Scores | None:
        """What the pattern is the softmax of; None where it was computed whole."""
        return self.pattern.scores if isinstance(self.pattern, VirtualPattern) else None

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


def uniform(visible: Float[Tensor, "batch head query"], k_len: int, allowed: Allowed | None) -> VirtualPattern:
    """Attention that treats all visible keys alike: the baseline of every statistic, from the same code.

    Its scores are all 0, so that its log-sum-exp is the log of the number of `visible` keys.
    """
    q = visible.new_zeros(()).expand(*visible.shape, 1)
    k = visible.new_zeros(()).expand(visible.shape[0], visible.shape[1], k_len, 1)
    return VirtualPattern(Scores(q, k, scale=1.0, allowed=allowed), visible.clamp(min=1).log())


def distance_bias(
    n_heads: int,
    q_places: Int[Tensor, "*#batch query"],
    k_places: Int[Tensor, "*#batch key"],
    *,
    dtype: torch.dtype,
) -> Bias:
    """What distance costs under ALiBi, tile by tile: `−m[h] · |i − j|`, as `positions.alibi` has it whole."""
    slopes = alibi_slopes(n_heads)
    q_rows, k_rows = torch.atleast_2d(q_places), torch.atleast_2d(k_places)

    def bias(batch: int, head: int, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        q_row, k_row = (rows[min(batch, rows.shape[0] - 1)] for rows in (q_rows, k_rows))
        cost: Tensor = (q_row[q_idx][:, None] - k_row[k_idx]).abs().to(dtype) * -slopes[head]
        return cost

    return bias


def tensor_bias(numbers: Float[Tensor, "..."]) -> Bias:
    """A tensor that broadcasts to `[batch, head, query, key]`, tile by tile."""
    full = numbers.reshape((1,) * (4 - numbers.ndim) + tuple(numbers.shape))

    def bias(batch: int, head: int, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        plane: Tensor = full[min(batch, full.shape[0] - 1), min(head, full.shape[1] - 1)]
        rows: Tensor = plane if plane.shape[0] == 1 else plane[q_idx]
        return rows if plane.shape[1] == 1 else rows[:, k_idx]

    return bias


def sum_of_biases(*biases: Bias) -> Bias:
    """What several biases add together."""
    return lambda batch, head, q_idx, k_idx: sum(b(batch, head, q_idx, k_idx) for b in biases)  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------------ z and the log-sum-exp


SHARP_LSE, SHARP_PARTS = 16.0, 4
"""A log-sum-exp above which scores are large: that of a hundred thousand normal scores is 12. Each part of a sum rounds at a
quarter of its size."""
WIDE_LSE = 512.0
"""A log-sum-exp beyond this is rounded in float32 by more than weights may be: half a step of it is 3e-5."""
_LOWEST = PENALTY / 10
"""Where a running maximum begins: above every forbidden cell, so that 2^(penalty − maximum) is 0 and not 1."""


def attend_lse(scores: Scores, v: Float[Tensor, "batch kv_head key d_v"]) -> Attended:
    """`attend`'s z with the log-sum-exp of each query's scores, at the cost of fused attention."""
    is_causal = isinstance(scores.allowed, Mask) and scores.allowed.causal_offset == 0
    if scores.is_plain and scores.scale > 0 and (scores.allowed is None or is_causal):
        fused = fused_lse(scores.q, scores.k, v, scale=scores.scale, causal=is_causal)
        if fused is not None:
            return fused
    return tiled_attend(scores, v)


def pattern_of(scores: Scores, lse: Float[Tensor, "batch head query"]) -> VirtualPattern:
    """The pattern that follows from a log-sum-exp, its weights within 1e-5 of themselves in float32.

    Large scores, those of sharp heads, round too much: then dot products are summed in parts, or in float64 where float32
    cannot hold the scores themselves, and the log-sum-exp is mended by what the weights of each query add up to, in a pass of
    its own.
    """
    if scores.like.dtype == torch.float64 or not bool((lse.abs() > SHARP_LSE).any()):
        return VirtualPattern(scores, lse)
    if bool((lse.abs() > WIDE_LSE).any()) and lse.device.type != "mps":  # which has no float64
        finer = VirtualPattern(replace(scores, is_wide=True), lse.double())
    else:
        finer = VirtualPattern(replace(scores, n_parts=SHARP_PARTS), lse)
    mass = RowSums(finer)
    reduce_tiles(finer, [mass])
    return replace(finer, lse=finer.lse + torch.where(mass.per_query > 0, mass.per_query, 1.0).log())


def tiled_attend(scores: Scores, v: Float[Tensor, "batch kv_head key d_v"]) -> Attended:
    """The same by our own tiles, for every mask, bias and softcap: softmax with a running maximum, to base 2.

    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3; Dao et al. 2022.
    """
    state = _Running(scores, v)
    _, _, n_queries, n_keys = scores.shape
    shape = tile_shape(v.device)
    buffer = scores.like.new_empty(shape.queries * shape.keys)
    for rectangle in rectangles(range(n_queries), range(n_keys), scores.allowed, shape, scores.like):
        queries, keys, _ = rectangle
        tile = buffer[: len(queries) * len(keys)].view(len(queries), len(keys))
        for batch_head in ((b, h) for b in range(scores.shape[0]) for h in range(scores.shape[1])):
            scores.log2_into(tile, batch_head, rectangle)
            state.add(tile, batch_head, queries, keys)
    return state.result()


class _Running:
    """What is known of each query so far: its largest score, and the sums of weights and of weighted values relative to it."""

    def __init__(self, scores: Scores, v: Tensor) -> None:
        batch, head, query, _ = scores.shape
        self._v, self._group = v, head // v.shape[1]
        self._is_finite = is_finite(v)
        self._largest = scores.like.new_full((batch, head, query), _LOWEST)
        self._mass = scores.like.new_zeros(batch, head, query)
        self._z = scores.like.new_zeros(batch, head, query, v.shape[3])

    def add(self, log2: Float[Tensor, "query key"], batch_head: tuple[int, int], queries: range, keys: range) -> None:
        """Takes a tile of scores, in place: what was summed is scaled down where a larger score has come."""
        batch, head = batch_head
        rows = slice(queries.start, queries.stop)
        largest, mass, z = self._largest[batch_head][rows], self._mass[batch_head][rows], self._z[batch_head][rows]
        now = torch.maximum(largest, log2.amax(dim=1))
        shrunk = torch.exp2(largest - now)
        weights = log2.sub_(now.unsqueeze(-1)).exp2_()
        mass.mul_(shrunk).add_(weights.sum(dim=1))
        values = self._v[batch, head // self._group, keys.start : keys.stop].to(log2.dtype)
        if not self._is_finite:  # 0 · NaN is NaN, and a forbidden key may hold anything
            values = values.masked_fill((weights == 0).all(dim=0).unsqueeze(-1), 0.0)
        z.mul_(shrunk.unsqueeze(-1)).addmm_(weights, values)
        largest.copy_(now)

    def result(self) -> Attended:
        """Sums become means; a query without keys has zeros."""
        has_keys = self._mass > 0
        mass = torch.where(has_keys, self._mass, 1.0)
        lse = torch.where(has_keys, (self._largest + mass.log2()) * math.log(2), 0.0)
        return Attended(self._z.div_(mass.unsqueeze(-1)).to(self._v.dtype), lse, "tiles")
