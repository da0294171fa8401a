"""A pattern in tiles, each passed to the reducers in turn: which rectangles of queries × keys a mask leaves, and their cells.

A rectangle that the mask forbids as a whole is left out; the cells of one that it allows as a whole are not evaluated.
Buffers are made once: a pass takes a few tiles of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mhacli.attention.core import Allowed, visible_cells
from mhacli.attention.masks import extent_of
from mhacli.attention.tiled.reduction import CPU_TILE, DEVICE_TILE, queries_at_once

T = TypeVar("T")


@runtime_checkable
class Grid(Protocol):
    """Shape, dtype and mask of scores or of a pattern."""

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
class PatternTiles(Grid, Protocol):
    """A pattern that is computed tile by tile: from scores, or from one that was computed whole."""

    def tile_into(
        self,
        log2: Float[Tensor, "query key"],
        weights: Float[Tensor, "query key"],
        batch_head: tuple[int, int],
        rectangle: TileRegion,
    ) -> None:
        """Writes log2 p and p of a tile of sequence and head `batch_head`: `PENALTY` or less, and 0, where it is forbidden."""

    def of_heads(self, heads: range) -> PatternTiles:
        """The pattern of some neighbouring heads."""

    def of_queries(self, queries: Int[Tensor, " query"]) -> PatternTiles:
        """The rows of some queries, wherever they stand."""


@runtime_checkable
class PatternRows(Grid, Protocol):
    """A pattern that is made of all keys of some queries at once, such as the softmax of scores."""

    def rows_into(self, tiles: Sequence[BlankTile], batch_head: tuple[int, int]) -> Float[Tensor, " query"]:
        """Writes p of all tiles of some queries of sequence and head `batch_head`, and log2 p plus a number of each query.
        Returns these numbers."""

    @property
    def peak(self) -> Float[Tensor, "batch head query"]:
        """The largest `ln p` of each query, as far as its tiles were written."""


def n_cells(pattern: Grid) -> int:
    """How many cells of all sequences and heads a pass looks at: the visible ones, and forbidden ones beside them."""
    batch, n_heads, n_queries, n_keys = pattern.shape
    return batch * n_heads * n_cells_of(n_queries, n_keys, pattern.allowed, tile_shape(pattern.like.device, n_keys))


def visible_keys(pattern: Grid) -> Float[Tensor, "#batch #head query"]:
    """How many keys each query may attend to. Batch and head have size 1 where the mask is the same for all."""
    _, _, n_queries, n_keys = pattern.shape
    like, shape = pattern.like, tile_shape(pattern.like.device, n_keys)
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
    """Weights of some queries and keys of one head: `weights` = 2^(`log2` − `bits`), exactly 0 where forbidden. Without `bits` of
    each query they are 2^`log2`.

    `number` counts the tiles of the same queries. `batch_head` is sequence and head, `head` counted among those of the pass.
    `diagonals` holds the same weights sheared:
    column c has those with key − query = `keys.start − queries.start + c − query count`, and zeros. `mass` is the sum of
    each row. `flat` is the memory of `weights` as one row, with zeros beside them.
    """

    number: int
    batch_head: tuple[int, int]
    queries: range
    keys: range
    log2: Float[Tensor, "query key"]
    weights: Float[Tensor, "query key"]
    diagonals: Float[Tensor, "query diagonal"]
    mass: Float[Tensor, " query"]
    flat: Float[Tensor, " cell"]
    bits: Float[Tensor, " query"] | None = None

    @property
    def scratch(self) -> Float[Tensor, "query key"]:
        """The memory of `log2`, to write to: reducers that read `log2` come before those that take it."""
        return self.log2

    @property
    def at_rows(self) -> tuple[int, int, slice]:
        """Where the queries are in a tensor `[batch, head, query]`."""
        return (*self.batch_head, self.rows)

    @property
    def at_columns(self) -> tuple[int, int, slice]:
        """Where the keys are in a tensor `[batch, head, key]`."""
        return (*self.batch_head, self.columns)

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
    pattern: PatternTiles | PatternRows,
    reducers: Sequence[Reducer],
    report_progress: Callable[[int], None] = lambda cells: None,
) -> None:
    """Passes every tile of a pattern to the reducers; `report_progress` receives numbers of visited cells."""
    batch, n_heads, n_queries, n_keys = pattern.shape
    shape, buffers = tile_shape(pattern.like.device, n_keys), _Buffers(pattern.like)
    of_rows = pattern if isinstance(pattern, PatternRows) else None  # once: it reads every property
    of_tiles = None if isinstance(pattern, PatternRows) else pattern
    for _, regions in groupby(
        rectangles(range(n_queries), range(n_keys), pattern.allowed, shape, pattern.like), key=lambda r: r.queries
    ):
        blanks = buffers.tiles(regions)
        for batch_head in ((b, h) for b in range(batch) for h in range(n_heads)):
            bits = None if of_rows is None else of_rows.rows_into(blanks, batch_head)
            for blank in blanks:
                if of_tiles is not None:
                    of_tiles.tile_into(blank.log2, blank.weights, batch_head, blank.region)
                tile = blank.of(batch_head, bits)
                for reducer in reducers:
                    reducer.add(tile)
        for blank in blanks:
            report_progress(batch * n_heads * blank.log2.numel())


class OfTiles(Generic[T]):
    """What is made of the places of a tile, once for all heads: all tiles of some queries come head by head."""

    def __init__(self, make: Callable[[Tile], T]) -> None:
        self._make = make
        self._rows: tuple[int, range] | None = None
        self._made: list[T] = []

    def of(self, tile: Tile) -> T:
        """What was made of these places, or is now."""
        rows = (tile.batch_head[0], tile.queries)
        if rows != self._rows:
            self._rows, self._made = rows, []
        if tile.number == len(self._made):
            self._made.append(self._make(tile))
        return self._made[tile.number]


class TileMemory:
    """Memory for each tile of a block of queries, reused for the next block: writing to new memory takes longer."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._kept: list[Tensor] = []

    def of(self, number: int, n: int) -> Float[Tensor, " cell"]:
        """Room for `n` numbers of a tile; what the earlier tile of this number held is gone."""
        self._kept += [self._like.new_empty(0)] * (number + 1 - len(self._kept))
        kept = self._kept[number].numel()
        if n > kept:  # twice as much, because blocks grow under a causal mask
            self._kept[number] = self._like.new_empty(max(n, 2 * kept))
        return self._kept[number][:n]

    def among_zeros(
        self, number: int, shape: tuple[int, int]
    ) -> tuple[Float[Tensor, " cell"], Float[Tensor, "query key"]]:
        """The memory of a tile of this shape, 0 beside its cells; and the cells, a view of it, not initialised."""
        n, m = shape
        width = n + m
        flat = self.of(number, n * width + n)
        padded = flat[: n * width].view(n, width)
        padded[:, :n].zero_()
        flat[n * width :].zero_()
        return flat, padded[:, n:]


class BlankTile(NamedTuple):
    """The memory of a tile: its weights stand among zeros, so that a sheared view of them has empty corners.

    Row r of the sheared view begins r + 1 numbers later than the row before it: its column c holds key c + r − n of the
    tile. Source of the trick: strides, as in the relative attention of Huang et al. 2018, "Music Transformer", section 3.4.
    """

    number: int
    region: TileRegion
    log2: Float[Tensor, "query key"]
    weights: Float[Tensor, "query key"]
    diagonals: Float[Tensor, "query diagonal"]
    flat: Float[Tensor, " cell"]

    def of(self, batch_head: tuple[int, int], bits: Float[Tensor, " query"] | None) -> Tile:
        """The tile, when it is written."""
        queries, keys, _ = self.region
        mass = self.weights.sum(dim=1)
        return Tile(
            self.number, batch_head, queries, keys, self.log2, self.weights, self.diagonals, mass, self.flat, bits
        )


class _Buffers:
    """The memory of a pass: all tiles of some queries."""

    def __init__(self, like: Tensor) -> None:
        self._log2, self._weights = TileMemory(like), TileMemory(like)

    def tiles(self, regions: Iterable[TileRegion]) -> list[BlankTile]:
        """Tiles for these rectangles; what earlier ones held is gone."""
        return [self._tile(number, region) for number, region in enumerate(regions)]

    def _tile(self, number: int, region: TileRegion) -> BlankTile:
        n, m = shape = len(region.queries), len(region.keys)
        flat, weights = self._weights.among_zeros(number, shape)
        diagonals = flat.as_strided((n, n + m), (n + m + 1, 1))
        return BlankTile(number, region, self._log2.of(number, n * m).view(n, m), weights, diagonals, flat)


# ----------------------------------------------------------------------------------------------------------- rectangles


PENALTY = -1e30
"""Added to log2 p of a forbidden cell. Far below what any score brings, far above where float32 ends."""


class TileShape(NamedTuple):
    """Queries and keys of a tile at most, and the keys for which a mask is evaluated at once."""

    queries: int
    keys: int
    grain: int


CPU_TILES = TileShape(*CPU_TILE, 256)
DEVICE_TILES = TileShape(*DEVICE_TILE, 512)


def tile_shape(device: torch.device, n_keys: int) -> TileShape:
    """The tiles of so many keys on a device: all keys of some queries are in memory, of fewer queries where the text is long."""
    whole = CPU_TILES if device.type == "cpu" else DEVICE_TILES
    queries = queries_at_once(whole[:2], n_keys)
    fewer = whole.queries // queries
    return TileShape(queries, whole.keys * fewer, whole.grain * fewer)


class MaskedColumns(NamedTuple):
    """Columns of a rectangle that hold forbidden cells: `PENALTY` there, 0 where allowed. Axes of size 1 hold for all."""

    columns: slice
    penalty: Float[Tensor, "#batch #head query columns"]


class TileRegion(NamedTuple):
    """Queries and keys to look at together, and where the mask forbids cells of it."""

    queries: range
    keys: range
    hidden: tuple[MaskedColumns, ...]


def rectangles(
    queries: range, keys: range, allowed: Allowed | None, shape: TileShape, like: Tensor
) -> Iterator[TileRegion]:
    """Every rectangle with a visible cell, queries first: all keys of a block of queries come before the next block."""
    for rows in _blocks(queries, shape.queries):
        for columns, strips in _runs(rows, keys, allowed, shape):
            hidden = tuple(_hidden(rows, strip, columns.start, allowed, like) for strip in strips)
            yield TileRegion(rows, columns, hidden)


def n_cells_of(n_queries: int, n_keys: int, allowed: Allowed | None, shape: TileShape) -> int:
    """How many cells the rectangles of all queries and keys have."""
    keys = range(n_keys)
    blocks = _blocks(range(n_queries), shape.queries)
    return sum(len(rows) * sum(len(columns) for columns, _ in _runs(rows, keys, allowed, shape)) for rows in blocks)


def _runs(rows: range, keys: range, allowed: Allowed | None, shape: TileShape) -> Iterator[tuple[range, list[range]]]:
    """Neighbouring strips of keys that are not forbidden as a whole, up to a tile's width, and which of them are mixed."""
    start, end, mixed = keys.start, keys.start, list[range]()
    for strip in _blocks(keys, shape.grain):
        extent = extent_of(allowed, rows, strip)
        if end > start and (extent == "none" or strip.stop - start > shape.keys):
            yield range(start, end), mixed
            start, mixed = strip.start, []
        if extent == "none":
            start = strip.stop
        elif extent == "some":
            mixed = _joined(mixed, strip)
        end = strip.stop
    if end > start:
        yield range(start, end), mixed


def _blocks(span: range, size: int) -> Iterator[range]:
    return (range(start, min(start + size, span.stop)) for start in range(span.start, span.stop, size))


def _joined(strips: list[range], strip: range) -> list[range]:
    """The strips with one more, joined to its neighbour."""
    if strips and strips[-1].stop == strip.start:
        return [*strips[:-1], range(strips[-1].start, strip.stop)]
    return [*strips, strip]


def _hidden(rows: range, strip: range, first: int, allowed: Allowed | None, like: Tensor) -> MaskedColumns:
    keep = visible_cells(allowed, indices(rows, like), indices(strip, like))
    assert keep is not None  # without a mask nothing is mixed
    penalty = torch.where(keep, 0.0, PENALTY).to(like.dtype).expand(-1, -1, len(rows), len(strip))
    return MaskedColumns(slice(strip.start - first, strip.stop - first), penalty)


def hide(tile: Float[Tensor, "query key"], hidden: Sequence[MaskedColumns], batch_head: tuple[int, int]) -> None:
    """Adds the penalties of a sequence and head to log2 p."""
    for columns, penalty in hidden:
        own = penalty[min(batch_head[0], penalty.shape[0] - 1), min(batch_head[1], penalty.shape[1] - 1)]
        tile[:, columns].add_(own)


def indices(span: range, like: Tensor) -> Int[Tensor, " idx"]:
    """The numbers of a range on the device of another tensor; 32 bits, which masks compare faster."""
    return torch.arange(span.start, span.stop, dtype=torch.int32, device=like.device)
