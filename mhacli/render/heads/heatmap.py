"""One head's pattern as a picture: half-block cells where there is colour, a ramp of characters where there is none."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from mhacli.render.base.colours import GLYPHS, NAN_SIGN, glyph, half_block, level_of, shade
from mhacli.render.base.format import fitted, share_text
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.heads.head_map import HeadPattern
from mhacli.results.record.arrays import Array
from mhacli.results.record.record import Record

MAX_LINES = 40
SMALL = 24
"""Up to so many tokens on both axes every cell gets a line of its own, with its token's name."""
_LABEL_WIDTH = 12
FORBIDDEN, NOT_A_NUMBER = -1, -2


@dataclass(frozen=True)
class Grid:
    """Levels of 0 … 255 for blocks of `block` × `block` cells, or `FORBIDDEN` (every cell of a block), or `NOT_A_NUMBER`."""

    levels: Array
    block: int


def heatmap(head: HeadPattern, largest: float, options: ViewOptions, screen: Screen) -> Text:
    """The picture, with tokens or positions on its axes; long patterns show the largest share of each block."""
    n_queries, n_keys = head.shares.shape
    if max(n_queries, n_keys) <= SMALL and n_keys * 3 + _LABEL_WIDTH + 1 <= screen.width:
        return _named_cells(head, largest, screen)
    lines = n_queries if options.everything or head.rows is not None else MAX_LINES
    room = screen.width - _LABEL_WIDTH - 1
    grid = pooled(head, largest, max(1, room), max(1, 2 * lines if screen.colour else lines))
    picture = _half_blocks(head, grid) if screen.colour else _characters(head, grid)
    return Text("\n").join([_key_axis(head, grid), *picture])


def scale_caption(record: Record, largest: float, screen: Screen, precision: int) -> Text:
    """The scale in use: its range and kind, what the signs mean, and that all heads share it."""
    caption = Text(f"scale linear, 0 … {share_text(largest, precision)}, the same for all heads: ")
    if screen.colour:
        for level in range(0, 256, 17):
            caption.append(" ", style=shade(level))
    else:
        caption.append(GLYPHS)
    caption.append(" from small to large, a blank is not allowed")
    return caption.append(f", {NAN_SIGN} is not a number") if np.isnan(record.arrays["pattern"]).any() else caption


def pooled(head: HeadPattern, largest: float, max_columns: int, max_rows: int) -> Grid:
    """The levels of blocks that fit: each block shows its largest share, so that a single strong cell stays visible."""
    n_queries, n_keys = head.shares.shape
    block = max(1, -(-n_keys // max_columns), -(-n_queries // max_rows))
    shares = np.where(head.allowed, head.shares, -1.0)
    padded = np.pad(shares, [(0, -n_queries % block), (0, -n_keys % block)], constant_values=-1.0)
    tiles = padded.reshape(padded.shape[0] // block, block, padded.shape[1] // block, block).max(axis=(1, 3))
    levels = np.rint(255 * np.clip(tiles / largest, 0, 1))
    return Grid(np.select([np.isnan(tiles), tiles < 0], [NOT_A_NUMBER, FORBIDDEN], levels).astype(int), block)


def _named_cells(head: HeadPattern, largest: float, screen: Screen) -> Text:
    n_queries, n_keys = head.shares.shape
    label = min(_LABEL_WIDTH, max(cell_len(head.row_label(i)) for i in range(n_queries)))
    width = max(3, min(8, (screen.width - label - 1) // n_keys))
    picture = Text(" " * (label + 1))
    for key in range(n_keys):
        name = fitted(head.key_name(key), width - 1)
        picture.append(name + " " * (width - cell_len(name)), style="dim")
    for query in range(n_queries):
        name = fitted(head.row_label(query), label)
        picture.append("\n" + name + " " * (label - cell_len(name) + 1), style="bold")
        for key in range(n_keys):
            share = float(head.shares[query, key])
            level = 0 if math.isnan(share) else level_of(share, largest)
            if not head.allowed[query, key]:
                picture.append(" " * width)
            elif math.isnan(share):
                picture.append(NAN_SIGN * (width - 1) + " ")
            elif screen.colour:
                picture.append(" " * width, style=shade(level))
            else:
                picture.append(glyph(level) * (width - 1) + " ")
    return picture


def _key_axis(head: HeadPattern, grid: Grid) -> Text:
    """Key positions along the top, every tenth column, and what a cell stands for."""
    columns = grid.levels.shape[1]
    axis = [" "] * columns
    for column in range(0, columns, 10):
        index = head.key_index(column * grid.block)
        number = str(index) if index >= 0 else ""
        if column + len(number) <= columns:
            axis[column : column + len(number)] = number
    cells = "one cell" if grid.block == 1 else f"the largest of {grid.block} × {grid.block} cells"
    note = f"{'':{_LABEL_WIDTH}} keys from left to right, queries downward, each mark {cells}\n"
    return Text(note + " " * (_LABEL_WIDTH + 1) + "".join(axis), style="dim")


def _line_label(head: HeadPattern, query: int) -> Text:
    """The beginning of a line; its style is its own, and not that of the cells that are put behind it."""
    number = str(head.query_index(query))
    name = fitted(head.query_name(query), _LABEL_WIDTH - len(number) - 1)
    return Text().append(f"{name}{' ' * (_LABEL_WIDTH - len(number) - cell_len(name))}{number} ", style="dim")


def _half_blocks(head: HeadPattern, grid: Grid) -> list[Text]:
    lines = []
    for row in range(0, len(grid.levels), 2):
        line = _line_label(head, row * grid.block)
        upper = grid.levels[row]
        lower = grid.levels[row + 1] if row + 1 < len(grid.levels) else np.full_like(upper, -1)
        for top, bottom in zip(upper.tolist(), lower.tolist(), strict=True):
            if NOT_A_NUMBER in (top, bottom):
                line.append(NAN_SIGN)
            else:
                line.append(*half_block(top if top >= 0 else None, bottom if bottom >= 0 else None))
        lines.append(line)
    return lines


def _characters(head: HeadPattern, grid: Grid) -> list[Text]:
    lines, signs = [], {FORBIDDEN: " ", NOT_A_NUMBER: NAN_SIGN}
    for row, levels in enumerate(grid.levels.tolist()):
        line = _line_label(head, row * grid.block)
        line.append("".join(signs.get(level) or glyph(level) for level in levels))
        lines.append(line)
    return lines
