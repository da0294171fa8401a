"""Small pictures of all heads, where there is room for them."""

from __future__ import annotations

import numpy as np
from rich.segment import Segment

from mhacli.render.base.cells import FORBIDDEN, cell, half_cells
from mhacli.viewer.pictures.lines import BROKEN, segment
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
    blank = np.full((rows - len(grown), grown.shape[1]), FORBIDDEN, dtype=grown.dtype)
    lines = np.vstack([grown, blank]).tolist()
    rest = segment(" " * (tile.width - grown.shape[1]))
    if not colour:
        return [[*(segment(*cell(level, colour=False)) for level in line), rest] for line in lines]
    pairs = zip(lines[::2], lines[1::2], strict=True)
    return [[*(segment(*painted) for painted in half_cells(*pair, broken=BROKEN)), rest] for pair in pairs]
