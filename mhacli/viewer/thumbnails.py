"""Small pictures of all heads, where there is room for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from rich.segment import Segment

from mhacli.render.colours import glyph, half_block
from mhacli.render.headmaps import NOT_A_NUMBER
from mhacli.viewer.gallery import Gallery
from mhacli.viewer.pane import PLAIN, WARNING, segment
from mhacli.viewer.picture import Picture

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


def thumbnail(picture: Picture, tile: Tile, *, colour: bool) -> list[list[Segment]]:
    """The lines of a small picture, each `tile.width` columns wide."""
    rows = tile.height * (2 if colour else 1)
    shape = picture.n_rows, picture.n_columns
    factor = max(1, -(-shape[0] // rows), -(-shape[1] // tile.width))
    cells = picture.at(factor).cells
    times = max(1, min(tile.width // cells.shape[1], rows * (1 if colour else 2) // cells.shape[0]))
    down = times if colour else max(1, times // 2)
    grown = np.repeat(np.repeat(cells, times, axis=1), down, axis=0)[:rows]
    blank = np.full((rows - len(grown), grown.shape[1]), -1, dtype=grown.dtype)
    levels = np.vstack([grown, blank]).tolist()
    rest = segment(" " * (tile.width - grown.shape[1]))
    if not colour:
        return [[*map(_sign, row), rest] for row in levels]
    pairs = zip(levels[::2], levels[1::2], strict=True)
    return [[*(_half(top, bottom) for top, bottom in zip(*pair, strict=True)), rest] for pair in pairs]


def _sign(level: int) -> Segment:
    return segment("?" if level == NOT_A_NUMBER else " " if level < 0 else glyph(level))


def _half(top: int, bottom: int) -> Segment:
    if NOT_A_NUMBER in (top, bottom):
        return segment("?", WARNING)
    character, style = half_block(top if top >= 0 else None, bottom if bottom >= 0 else None)
    return segment(character, style or PLAIN)


def blank(tile: Tile) -> Sequence[list[Segment]]:
    """The lines of a tile without a picture."""
    return [[segment(" " * tile.width)] for _ in range(tile.height)]
