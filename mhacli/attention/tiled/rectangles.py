"""Which rectangles of queries × keys a mask leaves to look at, and what it forbids inside them.

A rectangle that the mask forbids as a whole is left out, one that it allows as a whole is never asked cell by cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mhacli.attention.core import Allowed, visible_cells
from mhacli.attention.masks import extent_of

PENALTY = -1e30
"""Added to log2 p of a forbidden cell. Far below what any score brings, far above where float32 ends."""


class TileShape(NamedTuple):
    """Queries and keys of a tile at most, and the keys that a mask is asked about at once."""

    queries: int
    keys: int
    grain: int


CPU_TILES = TileShape(512, 1024, 256)
"""The best of seven shapes on two cores with 1 MiB of second-level cache each: small enough to stay near, large enough
that a call per tile costs nothing."""
DEVICE_TILES = TileShape(2048, 8192, 1024)
"""Elsewhere a call must bring enough work to fill the device."""


def tile_shape(device: torch.device) -> TileShape:
    """The tiles for a device."""
    return CPU_TILES if device.type == "cpu" else DEVICE_TILES


class Hidden(NamedTuple):
    """Columns of a rectangle that hold forbidden cells: `PENALTY` there, 0 where allowed. Axes of size 1 hold for all."""

    columns: slice
    penalty: Float[Tensor, "#batch #head query columns"]


class Rectangle(NamedTuple):
    """Queries and keys to look at together, and where the mask forbids cells of it."""

    queries: range
    keys: range
    hidden: tuple[Hidden, ...]


def rectangles(
    queries: range, keys: range, allowed: Allowed | None, shape: TileShape, like: Tensor
) -> Iterator[Rectangle]:
    """Every rectangle with a visible cell, queries first: all keys of a block of queries come before the next block."""
    for rows in _blocks(queries, shape.queries):
        for columns, strips in _runs(rows, keys, allowed, shape):
            hidden = tuple(_hidden(rows, strip, columns.start, allowed, like) for strip in strips)
            yield Rectangle(rows, columns, hidden)


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


def _hidden(rows: range, strip: range, first: int, allowed: Allowed | None, like: Tensor) -> Hidden:
    keep = visible_cells(allowed, indices(rows, like), indices(strip, like))
    assert keep is not None  # without a mask nothing is mixed
    penalty = torch.where(keep, 0.0, PENALTY).to(like.dtype).expand(-1, -1, len(rows), len(strip))
    return Hidden(slice(strip.start - first, strip.stop - first), penalty)


def hide(tile: Float[Tensor, "query key"], hidden: Sequence[Hidden], place: tuple[int, int]) -> None:
    """Adds the penalties of a sequence and head to log2 p."""
    for columns, penalty in hidden:
        own = penalty[min(place[0], penalty.shape[0] - 1), min(place[1], penalty.shape[1] - 1)]
        tile[:, columns].add_(own)


def indices(span: range, like: Tensor) -> Int[Tensor, " idx"]:
    """The numbers of a range on the device of another tensor; 32 bits, which masks compare faster."""
    return torch.arange(span.start, span.stop, dtype=torch.int32, device=like.device)
