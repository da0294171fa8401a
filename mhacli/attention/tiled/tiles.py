"""A pattern in tiles, every one in turn shown to reducers. Buffers are made once: a pass takes a few tiles of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mhacli.attention.tiled.rectangles import Rectangle, TileShape, n_cells_of, rectangles, tile_shape
from mhacli.attention.tiled.scores import Grid, Shares


def n_cells(pattern: Grid) -> int:
    """How many cells of all sequences and heads a pass looks at: the visible ones, and forbidden ones beside them."""
    batch, n_heads, n_queries, n_keys = pattern.shape
    return batch * n_heads * n_cells_of(n_queries, n_keys, pattern.allowed, tile_shape(pattern.like.device))


def visible_keys(pattern: Grid) -> Float[Tensor, "#batch #head query"]:
    """How many keys each query may attend to. Batch and head have size 1 where the mask is the same for all."""
    _, _, n_queries, n_keys = pattern.shape
    like, shape = pattern.like, tile_shape(pattern.like.device)
    counts = like.new_zeros(1, 1, n_queries)
    for rows, columns, hidden in rectangles(range(n_queries), range(n_keys), pattern.allowed, shape, like):
        seen = like.new_full((1, 1, len(rows)), len(columns))
        for _, penalty in hidden:
            seen = seen - (penalty < 0).sum(dim=-1)
        wide = torch.broadcast_shapes(counts.shape[:2], seen.shape[:2])
        counts = counts.expand(*wide, -1).clone() if counts.shape[:2] != wide else counts
        counts[:, :, rows.start : rows.stop] += seen
    return counts


@dataclass(frozen=True)
class Tile:
    """Shares of some queries and keys of one head: `shares` = 2^`log2`, exactly 0 where forbidden.

    `place` is sequence and head, `head` counted among those of the pass. `diagonals` holds the same shares sheared:
    column c has those with key − query = `keys.start − queries.start + c − query count`, and zeros. `mass` is the sum of
    each row. `scratch` may be written to. `flat` is the memory of `shares` as one row.
    """

    place: tuple[int, int]
    queries: range
    keys: range
    log2: Float[Tensor, "query key"]
    shares: Float[Tensor, "query key"]
    diagonals: Float[Tensor, "query diagonal"]
    mass: Float[Tensor, " query"]
    scratch: Float[Tensor, "query key"]
    flat: Float[Tensor, " cell"]

    def flat_places(self, rows: Int[Tensor, " cell"], columns: Int[Tensor, " cell"]) -> Int[Tensor, " cell"]:
        """Where cells of `shares` are in `flat`, which is several times as fast to read from."""
        return rows * int(self.shares.stride(0)) + columns + int(self.shares.storage_offset())

    @property
    def rows(self) -> slice:
        """The queries as a slice."""
        return slice(self.queries.start, self.queries.stop)

    @property
    def columns(self) -> slice:
        """The keys as a slice."""
        return slice(self.keys.start, self.keys.stop)


@runtime_checkable
class Reducer(Protocol):
    """A statistic that is made tile by tile. Its state is as large as its result."""

    def add(self, tile: Tile) -> None:
        """Takes what a tile holds of it."""


def reduce_tiles(
    pattern: Shares, reducers: Sequence[Reducer], tell: Callable[[int], None] = lambda cells: None
) -> None:
    """Shows every tile of a pattern to the reducers; `tell` hears of the cells that were looked at, tile by tile."""
    batch, n_heads, n_queries, n_keys = pattern.shape
    shape = tile_shape(pattern.like.device)
    buffers = _Buffers(shape, pattern.like)
    for rectangle in rectangles(range(n_queries), range(n_keys), pattern.allowed, shape, pattern.like):
        for place in ((b, h) for b in range(batch) for h in range(n_heads)):
            tile = buffers.tile(pattern, place, rectangle)
            for reducer in reducers:
                reducer.add(tile)
        tell(batch * n_heads * len(rectangle.queries) * len(rectangle.keys))


class _Buffers:
    """The memory of a pass: three tiles, the shares among zeros, so that a sheared view of them has empty corners.

    Row r of the sheared view begins r + 1 numbers later than the row before it: its column c holds key c + r − n of the
    tile. Source of the trick: strides, as in the relative attention of Huang et al. 2018, "Music Transformer", section 3.4.
    """

    def __init__(self, shape: TileShape, like: Tensor) -> None:
        n, m = shape.queries, shape.keys
        self._log2, self._scratch = like.new_empty(n * m), like.new_empty(n * m)
        self._shares = like.new_empty(n * (n + m) + n)
        self._zeroed = (0, 0)

    def tile(self, pattern: Shares, place: tuple[int, int], rectangle: Rectangle) -> Tile:
        """The tile of a rectangle; what an earlier one held is gone."""
        queries, keys, _ = rectangle
        n, m = len(queries), len(keys)
        width = n + m
        log2, scratch = self._log2[: n * m].view(n, m), self._scratch[: n * m].view(n, m)
        flat = self._shares[: n * width + n]
        padded = flat[: n * width].view(n, width)
        if self._zeroed != (n, m):
            padded[:, :n].zero_()
            flat[n * width :].zero_()
            self._zeroed = (n, m)
        shares = padded[:, n:]
        pattern.tile_into(log2, shares, place, rectangle)
        diagonals = flat.as_strided((n, width), (width + 1, 1))
        return Tile(place, queries, keys, log2, shares, diagonals, shares.sum(dim=1), scratch, flat)
