"""Where small pictures of all heads stand: how large each may be, and what is there until it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from rich.segment import Segment

from mhacli.viewer.pictures.gallery import Gallery
from mhacli.viewer.pictures.lines import segment

_LEAST = (8, 3)
_MOST_CELLS = 64_000_000
"""Cells of all heads together beyond which small pictures would keep one waiting."""


@dataclass(frozen=True)
class Tile:
    """Columns and lines of a small picture, the line of its title and the gap beside it not counted."""

    width: int
    height: int


def tile_for(gallery: Gallery, room: tuple[int, int]) -> Tile | None:
    """The largest tiles with which all heads fit into columns and lines; None where they would be too small, or too many cells
    to look at."""
    drawn = [entry.drawn for row in gallery.rows for entry in row.entries if entry is not None]
    if not drawn or any(one is None for one in drawn) or any(row.instead for row in gallery.rows):
        return None
    facts = [one.view.facts for one in drawn if one is not None]
    if (
        sum(f.q_len * f.k_len for f, one in zip(facts, drawn, strict=True) if one and "pattern" in one.view.arrays)
        > _MOST_CELLS
    ):
        return None
    width = min(40, room[0] // len(gallery.columns) - 2)
    steepest = max(f.q_len / f.k_len for f in facts)
    tile = Tile(width, min(16, room[1] // len(gallery.rows) - 2, max(_LEAST[1], ceil(width * steepest / 2))))
    return tile if tile.width >= _LEAST[0] and tile.height >= _LEAST[1] else None


def blank(tile: Tile) -> Sequence[list[Segment]]:
    """The lines of a tile without a picture."""
    return [[segment(" " * tile.width)] for _ in range(tile.height)]
