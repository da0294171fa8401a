"""The scores and shares of attention as a question: nothing of `[query, key]` exists until a tile of it is asked for.

Shares are asked for as logarithms to base 2: `log2 p = log2(e) · (score − lse)`, with the log-sum-exp of the row. Base 2
because torch's `exp2` is several times as fast as its `exp` on a CPU, and the factor hides in the scale. A forbidden cell
gets a penalty instead of −∞: its share is exactly 0 all the same, and 0 · log2 p is no NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mhacli.attention.core import Allowed
from mhacli.attention.masks import of_heads
from mhacli.attention.tiled.rectangles import PENALTY, Rectangle, hide, indices
from mhacli.spec.formulas import alibi_slopes

LOG2_E = math.log2(math.e)

Bias = Callable[[int, int, Int[Tensor, " query"], Int[Tensor, " key"]], Float[Tensor, "query key"]]
"""What is added to the scores, as a question: `(sequence, head, q_idx, k_idx)`. Every number of it is finite."""


@runtime_checkable
class Grid(Protocol):
    """What is known of scores or a pattern without a number of it."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(batch, head, query, key)`."""

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype of the maths, on the pattern's device."""

    @property
    def allowed(self) -> Allowed | None:
        """The mask."""


@runtime_checkable
class Shares(Grid, Protocol):
    """A pattern that can be asked for tile by tile: from scores, or one that was computed whole."""

    def tile_into(
        self,
        log2: Float[Tensor, "query key"],
        shares: Float[Tensor, "query key"],
        place: tuple[int, int],
        rectangle: Rectangle,
    ) -> None:
        """Writes log2 p and p of a tile of sequence and head `place`: `PENALTY` or less, and 0, where it is forbidden."""


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

    @property
    def is_plain(self) -> bool:
        """Whether a score is a scaled dot product and nothing else."""
        return self.softcap is None and self.bias is None

    def log2_into(
        self,
        out: Float[Tensor, "query key"],
        place: tuple[int, int],
        rectangle: Rectangle,
        lse: Float[Tensor, "batch head all_queries"] | None = None,
    ) -> None:
        """Writes `log2(e) · (score − lse)` of a tile of sequence and head `place`; `lse` None is 0.

        `PENALTY` or less stands where the mask forbids a cell.
        """
        self._unmasked_into(out, place, rectangle, lse)
        hide(out, rectangle.hidden, place)

    def _unmasked_into(self, out: Tensor, place: tuple[int, int], rectangle: Rectangle, lse: Tensor | None) -> None:
        (batch, head), queries, keys = place, rectangle.queries, rectangle.keys
        group = self.q.shape[1] // self.k.shape[1]
        q = self.q[batch, head, queries.start : queries.stop].to(out.dtype)
        k = self.k[batch, head // group, keys.start : keys.stop].to(out.dtype)
        start = out.new_zeros(1) if lse is None else lse[place][queries.start : queries.stop].to(out.dtype) * -LOG2_E
        scale, width = self.scale * (LOG2_E if self.is_plain else 1.0), -(-q.shape[1] // self.n_parts)
        first = start if self.is_plain else out.new_zeros(1)
        torch.addmm(first.unsqueeze(-1), q[:, :width], k[:, :width].mT, alpha=scale, out=out)
        for part in range(width, q.shape[1], width):
            out.addmm_(q[:, part : part + width], k[:, part : part + width].mT, alpha=scale)
        if self.is_plain:
            return
        if self.softcap is not None:
            out.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.bias is not None:
            out.add_(self.bias(batch, head, indices(queries, out), indices(keys, out)))
        out.mul_(LOG2_E).add_(start.unsqueeze(-1))


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

    def tile_into(self, log2: Tensor, shares: Tensor, place: tuple[int, int], rectangle: Rectangle) -> None:
        """Writes log2 p and p of a tile."""
        self.scores.log2_into(log2, place, rectangle, self.lse)
        torch.exp2(log2, out=shares)


@dataclass(frozen=True)
class ComputedPattern:
    """A pattern that was computed whole, for the same questions, in float64. Forbidden shares are 0 in it."""

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

    def tile_into(self, log2: Tensor, shares: Tensor, place: tuple[int, int], rectangle: Rectangle) -> None:
        """Writes log2 p and p of a tile."""
        rows, columns = (slice(span.start, span.stop) for span in (rectangle.queries, rectangle.keys))
        shares.copy_(self.pattern[place][rows, columns])
        torch.log2(shares, out=log2).clamp_(min=PENALTY)


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
