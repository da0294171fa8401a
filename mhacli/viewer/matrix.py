"""A head's picture: its map on the common scale, with or without sinks, in cells of any size; and the pane that draws it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import Any

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.strip import Strip
from textual.widget import Widget

from mhacli.io.data import finite
from mhacli.record.arrays import Array
from mhacli.render.base.cells import FORBIDDEN, cell, half_cells, levels, ticks
from mhacli.render.base.colours import EMPTY, WEIGHTS, glyph, picked
from mhacli.render.base.format import fitted
from mhacli.render.base.options import Scale
from mhacli.render.heads.drawable import DrawableHead
from mhacli.render.heads.head_map import HeadMap, head_map
from mhacli.text.escape import without_surrogates
from mhacli.text.numbers import shown
from mhacli.text.tokens import TokenSequence
from mhacli.viewer.parts import ACCENT, CURSOR, DIM, PLAIN, entitle

ROW_SCHEMA = "mha.row/1"
TAKEN_SIGN = "–"
"""The sign of a removed sink's weight. `.00` would be a small weight."""


class Picture:
    """A head of a sequence: its map `base`, of which sinks are removed if they are hidden, also in blocks of several cells."""

    def __init__(self, head: DrawableHead, sequence: int, scale: Scale, top: float, *, hides_sinks: bool) -> None:
        self.head, self.sequence, self.scale, self.hides_sinks = head, sequence, scale, hides_sinks
        whole = head_map(head, sequence)
        self.base = whole.without_sinks() if hides_sinks else whole
        self.n_rows, self.n_columns = map(int, self.base.weights.shape)
        self.is_taken = np.zeros(self.base.weights.shape, dtype=bool)
        if hides_sinks and self.base.block == 1:
            columns = [place - self.base.first[1] for place in self.base.sinks]
            self.is_taken[:, columns] = self.base.weights[:, columns] == 0
        self.weights = np.where(self.is_taken, FORBIDDEN, self.base.weights)
        self._top = top
        self.map, self.levels = cache(self.base.pooled), cache(self._levels)

    def top(self, factor: int) -> float:
        """The end of the scale of blocks of `factor` × `factor` cells. Blocks hold more than cells, so that it may be larger."""
        return self._top if factor == 1 else max(self._top, self.map(factor).largest)

    def _levels(self, factor: int) -> Array:
        """The cells as levels of 0 … 255. Removed cells look masked."""
        weights = self.weights if factor == 1 else self.map(factor).weights
        return levels(weights, weights != FORBIDDEN, self.scale, self.top(factor))

    def row_of(self, place: int) -> int:
        """The row of a query's position."""
        return min(self.n_rows - 1, max(0, (place - self.base.first[0]) // self.base.block))

    def column_of(self, place: int) -> int:
        """The column of a key's position."""
        return min(self.n_columns - 1, max(0, (place - self.base.first[1]) // self.base.block))

    def query_name(self, row: int) -> str:
        """A query in a sentence: `2 sat`, or `32–63`."""
        name = self.base.query_name(row)
        return name if self.base.block > 1 else f"{self.base.query_places(row)[0]} {name}"

    def key_name(self, column: int) -> str:
        """A key in a sentence."""
        name = self.base.key_name(column)
        return name if self.base.block > 1 else f"{self.base.key_places(column)[0]} {name}"

    @cached_property
    def widest_name(self) -> int:
        """The columns of the longest name of a query."""
        return max(cell_len(self.query_name(row)) for row in range(min(200, self.n_rows)))

    def top_keys(self, row: int) -> list[tuple[int, float]]:
        """The visible columns of a row that were not removed, with their weights, in descending order with NaN last."""
        weights = self.weights[row]
        seen = np.flatnonzero(weights != FORBIDDEN)
        order = seen[np.argsort(-np.nan_to_num(weights[seen], nan=-1.0), kind="stable")]
        return [(int(column), float(weights[column])) for column in order]

    def entropy(self, row: int) -> float | None:
        """The mean entropy of a row's queries in nats, with sinks; None without visible keys."""
        if not self.base.n_queries[row]:
            return None
        first, last = self.base.query_places(row)
        begin = self.head.record.first_query(self.sequence)
        nats = self.head.record.arrays["entropy"][self.sequence, self.head.place, begin + first : begin + last + 1]
        return float(nats.mean()) if self.base.block == 1 else float(np.nanmean(nats))

    def row_document(self, row: int) -> Mapping[str, Any]:
        """The row as JSON values, schema `mha.row/1`: exact numbers without removed keys; null if not finite."""
        base, head, arrays = self.base, self.head, self.head.record.arrays
        exact = float if self.hides_sinks or "pattern" not in arrays else arrays["pattern"].dtype.type
        keys = [  # with as few digits as the dtype needs
            {**_json_place(base, base.keys, base.key_places(column)), "share": finite(float(str(exact(weight))))}
            for column, weight in sorted(self.top_keys(row))
        ]
        return {
            "schema": ROW_SCHEMA,
            "layer": None if head.layer is None else head.layer.layer,
            "attention": None if head.layer is None else head.layer.name,
            "head": head.head,
            "kind": None if head.statistics is None else head.statistics.kind,
            "sequence": self.sequence,
            "query": _json_place(base, base.queries, base.query_places(row)),
            "entropy": finite(self.entropy(row)),
            "sinks": {
                "places": list(base.sinks),
                "share": finite(float(base.sink_weights[row])),
                "removed": self.hides_sinks,
            },
            "learned_sink": None if base.learned is None else finite(float(base.learned[row])),
            "shares": "renormalised without sinks" if self.hides_sinks else "as computed",
            "keys": keys,
        }


def _json_place(base: HeadMap, text: TokenSequence, places: tuple[int, int]) -> dict[str, Any]:
    first, last = places
    if base.block > 1:
        return {"first": first, "last": last}
    return {"place": first, "token": without_surrogates(text.tokens[first])}


# --------------------------------------------------------------------------------------------------------------- cells

HALF, TIGHT = 1, 4
"""The columns of a cell that is half a character high, and of one whose number has no frame."""
_DECIMALS = {TIGHT: 2, 6: 2, 8: 4}
"""The decimals of weights in cells of so many columns."""
_CURSOR_COLOUR = picked((255, 64, 64), 203, 9)
"""The cursor's colour among half blocks, which is not in the ramp."""
Cell = tuple[str, Style]


def _sizes(picture: Picture, *, colour: bool) -> list[tuple[int, int]]:
    """The sizes of cells from the smallest on: how many tokens a cell stands for in both directions, and its columns."""
    widths = (HALF, 2, TIGHT, 6, 8) if colour else (2, 3, TIGHT, 6, 8)
    powers = range(max(picture.n_rows, picture.n_columns).bit_length(), 0, -1)
    return [*((1 << power, widths[0]) for power in powers), *((1, width) for width in widths)]


def _fits(picture: Picture, size: tuple[int, int], lines: int, columns: int) -> bool:
    """Whether the whole map fits in cells of a size."""
    factor, width = size
    n_lines = -(-picture.n_rows // (factor * 2 if width == HALF else factor))
    return n_lines <= lines and -(-picture.n_columns // factor) * width <= columns


def _number_cell(level: int, weight: float, width: int, *, colour: bool) -> Cell:
    """An attention weight, without colour with the sign of its shade if there is room; `0` if masked, `–` if removed."""
    number = shown(weight, "weight", _DECIMALS[width])
    if level == FORBIDDEN:
        number = "0" if weight == FORBIDDEN else TAKEN_SIGN
    style = EMPTY if level < 0 else WEIGHTS.style(level) if colour else PLAIN
    if width == TIGHT:  # 1.0 leaves a blank between numbers
        return f"{number[: TIGHT - 1]:>{TIGHT}}", style
    sign = " " if colour or level < 0 else glyph(level)
    return f" {f'{sign}{number:>{width - 3}}'[2 - width :]} ", style  # a weight of 1 leaves no room for its sign


def _drawn_cells(picture: Picture, size: tuple[int, int], rows: range, columns: range, *, colour: bool) -> list[Cell]:
    """A line of cells of a size: one row, or two in cells that are half a character high."""
    factor, width = size
    shades, part = picture.levels(factor), slice(columns.start, columns.stop)
    upper = shades[rows[0], part].tolist()
    if width == HALF:
        lower = shades[rows[1], part].tolist() if len(rows) > 1 else None
        return [*half_cells(upper, lower)]
    if width in _DECIMALS:
        weights = picture.map(factor).weights[rows[0], part].tolist()
        return [_number_cell(*pair, width, colour=colour) for pair in zip(upper, weights, strict=True)]
    return [cell(level, width, colour=colour) for level in upper]


def _per_line(width: int) -> int:
    """The rows of cells in a line of characters."""
    return 2 if width == HALF else 1


def thumbnail(picture: Picture, lines: int, columns: int, *, colour: bool) -> Text:
    """A whole picture, in the largest cells that fit."""
    sizes = _sizes(picture, colour=colour)[:-1]
    size = [size for size in sizes if size == sizes[0] or _fits(picture, size, lines, columns)][-1]
    (n_rows, n_columns), per_line = picture.levels(size[0]).shape, _per_line(size[1])
    text = Text(no_wrap=True)
    for begin in range(0, n_rows, per_line):
        rows = range(begin, min(begin + per_line, n_rows))
        text.append_text(Text.assemble(*_drawn_cells(picture, size, rows, range(n_columns), colour=colour), "\n"))
    return text


# ------------------------------------------------------------------------------------------------------------- the pane

_MOST_LABEL, _TICKS, _WHEEL = 14, 10, 3


class Matrix(Widget, can_focus=True):
    """A picture with queries down, keys across, and a cursor, which `go` moves."""

    def __init__(self, go: Callable[[int, int], None], *, colour: bool) -> None:
        super().__init__()
        self._go, self.colour = go, colour
        self.picture: Picture | None = None
        self.row, self.column = 0, 0
        self.chosen: int | None = None
        self._zooms = range(-1, 0)
        self.factor, self.width, self.left = 1, HALF, 0
        self.rows, self.columns = range(0), range(0)

    def show(self, picture: Picture, row: int, column: int) -> None:
        """Draws a picture with the cursor on a cell of its finest map, in cells of the chosen size or the largest that fit."""
        self.picture, self.row, self.column = picture, row, column
        self.left = 2 + max(len("query"), min(_MOST_LABEL, picture.widest_name, self.size.width // 4))
        lines, room = max(1, self.size.height - 1), max(1, self.size.width - self.left)
        sizes = _sizes(picture, colour=self.colour)
        fitting = [zoom for zoom in range(-len(sizes), 0) if _fits(picture, sizes[zoom], lines, room)]
        fits = max(fitting, default=-len(sizes))
        self._zooms = range(min(fits, sizes.index((1, sizes[0][1])) - len(sizes)), 0)
        self._zoom = fits if self.chosen is None else max(self._zooms.start, self.chosen)
        self.factor, self.width = sizes[self._zoom]
        n_rows, n_columns = picture.levels(self.factor).shape
        self.rows = _held(self.rows.start, lines * _per_line(self.width), row // self.factor, n_rows)
        self.columns = _held(self.columns.start, max(1, room // self.width), column // self.factor, n_columns)
        entitle(self, self._title(picture.map(self.factor)))
        self.refresh()

    def on_resize(self) -> None:
        """Draws for the new size."""
        if self.picture is not None:
            self._go(self.row, self.column)

    def zoom(self, step: int) -> None:
        """Chooses larger or smaller cells, if there are any."""
        if self._zoom + step in self._zooms:
            self.chosen = self._zoom + step

    def render_line(self, y: int) -> Strip:
        """The keys, or below them a line of cells with the name of its query."""
        line: list[Cell] = []
        begin = self.rows.start + (y - 1) * _per_line(self.width)
        if self.picture is not None and y == 0:
            line = self._axis(self.picture)
        elif self.picture is not None and begin in self.rows:
            line = self._line(self.picture, range(begin, min(begin + _per_line(self.width), self.rows.stop)))
        return Strip([Segment(*piece) for piece in line]).adjust_cell_length(self.size.width)

    def _line(self, picture: Picture, rows: range) -> list[Cell]:
        shown, is_own = picture.map(self.factor), self.row // self.factor in rows
        cells = _drawn_cells(picture, (self.factor, self.width), rows, self.columns, colour=self.colour)
        name = picture.query_name(self.row if is_own else rows[0])
        if is_own:
            at = self.column // self.factor
            levels_at = [int(picture.levels(self.factor)[row, at]) for row in rows]
            cells[at - self.columns.start] = self._cursor(cells[at - self.columns.start], rows, levels_at)
        elif self.factor > 1:
            name = f"{shown.query_places(rows[0])[0]}–{shown.query_places(rows[-1])[1]}"
        label = set_cell_size(fitted(name, self.left - 2), self.left - 2)
        return [(label, ACCENT if is_own else PLAIN), (" ▸" if is_own else "  ", ACCENT), *cells]

    def _cursor(self, under: Cell, rows: range, levels_at: list[int]) -> Cell:
        """The cell under the cursor, marked: in its colour among half blocks, by a frame around a number, else reversed."""
        text, style = under
        if self.width == HALF:
            is_upper = self.row // self.factor == rows[0]
            rest = levels_at[-1 if is_upper else 0] if len(rows) > 1 else FORBIDDEN
            below = WEIGHTS.paints[rest] if rest >= 0 else None
            return "▀" if is_upper else "▄", Style(color=_CURSOR_COLOUR, bgcolor=below)
        if self.width == TIGHT:
            return text, CURSOR
        return f"[{text[1:-1]}]", style if self.colour and levels_at[0] >= 0 else CURSOR

    def _axis(self, picture: Picture) -> list[Cell]:
        """The keys, as tokens if they fit into cells, else some of the positions."""
        shown, width = picture.map(self.factor), self.width
        begin = f"{'query':<{self.left}}"
        if width > TIGHT and shown.block == 1:
            names = [(c, set_cell_size(fitted(shown.key_name(c), width - 1), width)) for c in self.columns]
            return [(begin, DIM), *((name, ACCENT if c == self.column else PLAIN) for c, name in names)]
        places = [shown.key_index(c) for c in self.columns]
        numbers = ticks(places, width, every=1 if width == TIGHT else _TICKS, begin=self.columns.start)
        return [(begin, DIM), (numbers, DIM)]

    def _title(self, cells: HeadMap) -> str:
        title = "matrix" if cells.block == 1 else f"matrix · {cells.block} × {cells.block} tokens a cell"
        if self.factor == 1:
            return title
        weight = float(cells.weights[self.row // self.factor, self.column // self.factor])
        return f"{title}, here {'masked' if weight == FORBIDDEN else shown(weight, 'weight', 4)}"

    def moved(self, direction: str) -> tuple[int, int]:
        """The row and column in a direction from the cursor."""
        assert self.picture is not None
        row, column, step = self.row, self.column, self.factor
        last_row, last_column = self.picture.n_rows - 1, self.picture.n_columns - 1
        down, right = max(1, len(self.rows) - 1) * step, max(1, len(self.columns) - 1) * step
        seen = np.flatnonzero(self.picture.base.is_open[row])
        to_row, to_column = {
            "cursor_up": (row - step, column),
            "cursor_down": (row + step, column),
            "cursor_left": (row, column - step),
            "cursor_right": (row, column + step),
            "page_up": (row - down, column),
            "page_down": (row + down, column),
            "page_left": (row, column - right),
            "page_right": (row, column + right),
            "scroll_home": (row, 0),
            "scroll_end": (row, int(seen[-1]) if len(seen) else 0),
            "scroll_top": (0, column),
            "scroll_bottom": (last_row, column),
        }[direction]
        return max(0, min(last_row, to_row)), max(0, min(last_column, to_column))

    def on_click(self, event: events.Click) -> None:
        """Goes to the cell under the mouse, or to the row whose name is there."""
        at = event.get_content_offset(self)
        if self.picture is not None and at is not None and at.y > 0:
            row = self.rows.start + (at.y - 1) * _per_line(self.width)
            column = self.columns.start + (at.x - self.left) // self.width
            if row in self.rows and column < self.columns.stop:
                self._go(row * self.factor, column * self.factor if column in self.columns else self.column)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Moves down a few rows, or right with shift."""
        self._wheel("cursor_right" if event.shift else "cursor_down")

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Moves up a few rows, or left with shift."""
        self._wheel("cursor_left" if event.shift else "cursor_up")

    def _wheel(self, direction: str) -> None:
        for _ in range(0 if self.picture is None else _WHEEL):
            self._go(*self.moved(direction))


def _held(begin: int, size: int, target: int, length: int) -> range:
    """The window of a size within `length`, moved as little as needed to hold `target`."""
    begin = max(min(begin, target), target - size + 1)
    begin = max(0, min(begin, length - size))
    return range(begin, min(length, begin + size))
