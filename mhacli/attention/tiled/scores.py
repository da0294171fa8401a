"""Scores and pattern tile by tile: no tensor `[query, key]` is whole.

Weights are computed as logarithms to base 2: `log2 p = log2(e) · (score − lse)`, with the log-sum-exp of the row. Base 2
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

from mhacli.attention.core import Allowed, attend, visible_cells
from mhacli.attention.masks import from_tensor, of_heads, of_queries
from mhacli.attention.tiled.tiles import (
    PENALTY,
    TileRegion,
    hide,
    indices,
)
from mhacli.sites import alibi_slopes

LOG2_E = math.log2(math.e)

Bias = Callable[[int, int, Int[Tensor, " query"], Int[Tensor, " key"]], Float[Tensor, "query key"]]
"""A bias of the scores, computed for `(sequence, head, q_idx, k_idx)`. All of it is finite."""


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

    def defined_z(
        self, batch_head: tuple[int, int], v: Float[Tensor, "batch kv_head key d_v"]
    ) -> Float[Tensor, "query d_v"]:
        """z of all queries of sequence and head `batch_head` as `attend` defines it, in float64: for a few queries."""
        (batch, head), (_, n_heads, n_queries, n_keys) = batch_head, self.shape
        kv_head = head // (n_heads // self.k.shape[1])
        q, k, values = self.q[batch, head], self.k[batch, kv_head], v[batch, kv_head]
        q_idx, k_idx = indices(range(n_queries), q), indices(range(n_keys), q)
        keep = visible_cells(self.allowed, q_idx, k_idx)
        z = attend(
            *(rows.double()[None, None] for rows in (q, k, values)),
            allowed=None
            if keep is None
            else from_tensor(keep[min(batch, len(keep) - 1), min(head, keep.shape[1] - 1)]),
            bias=None if self.bias is None else self.bias(batch, head, q_idx, k_idx).double(),
            scale=self.scale,
            softcap=self.softcap,
        )
        return z[0, 0]


class PatternOfScores:
    """The softmax of scores: its shape, dtype and mask are theirs."""

    scores: Scores

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


@dataclass(frozen=True)
class VirtualPattern(PatternOfScores):
    """The pattern of scores whose log-sum-exp is known: `p = exp(score − lse)`."""

    scores: Scores
    lse: Float[Tensor, "batch head query"]

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
    """A pattern that was computed whole, with the same methods, in float64. Forbidden weights are 0 in it."""

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
