"""Small pictures of all heads, where there is room for them."""

from __future__ import annotations

import numpy as np
from rich.segment import Segment

from mhacli.render.base.colours import glyph, half_block
from mhacli.render.heads.maps import NOT_A_NUMBER
from mhacli.viewer.pictures.lines import BROKEN, PLAIN, segment
from mhacli.viewer.pictures.picture import Picture
from mhacli.viewer.pictures.thumbnail_layout import Tile


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
        return segment("?", BROKEN)
    character, style = half_block(top if top >= 0 else None, bottom if bottom >= 0 else None)
    return segment(character, style or PLAIN)
