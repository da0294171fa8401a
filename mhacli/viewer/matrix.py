"""A head's picture: its map on the common scale, with or without sinks, in cells of any size; and the pane that draws it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.style import Style
from textual import events

from mhacli.io.data import Array, finite
from mhacli.render.base.colours import EMPTY, WEIGHTS, glyph, picked
from mhacli.render.base.format import fitted
from mhacli.render.base.grids import FORBIDDEN, cell, half_cells, levels, ticks
from mhacli.render.base.options import Scale
from mhacli.render.base.selection import DrawableHead
from mhacli.render.heads.head_map import head_map
from mhacli.text.escape import token_label, without_surrogates
from mhacli.text.numbers import shown
from mhacli.viewer.heads import HeadsScreen
from mhacli.viewer.panes import ACCENT, CURSOR, DIM, PLAIN, Cell, Lines, Pane, window

ROW_SCHEMA = "mha.row/1"
QUERY, KEY = 0, 1
"""The axes of a map: queries downward, keys from left to right."""
TAKEN_SIGN = "–"
"""The sign of a removed sink's weight. `.00` would be a small weight."""
HALF, TIGHT = 1, 4
"""The columns of a cell that is half a character high, and of one whose number has no frame."""
_DECIMALS = {TIGHT: 2, 6: 2, 8: 4}
"""The decimals of weights in cells of so many columns."""


class Picture:
    """A head of a sequence: its map `base`, of which sinks are removed if they are hidden, also in blocks of several cells."""

    def __init__(self, head: DrawableHead, sequence: int, scale: Scale, top: float, *, hides_sinks: bool) -> None:
        self.head, self.sequence, self.scale, self.hides_sinks = head, sequence, scale, hides_sinks
        whole = head_map(head, sequence)
        self.base = whole.without_sinks() if hides_sinks else whole
        self.texts, self.unit = (self.base.queries, self.base.keys), "key" if self.base.block == 1 else "block"
        self.is_taken = np.zeros(self.base.weights.shape, dtype=bool)
        if hides_sinks and self.base.block == 1:
            columns = [place - self.base.first[KEY] for place in self.base.sinks]
            self.is_taken[:, columns] = self.base.weights[:, columns] == 0
        self.weights = np.where(self.is_taken, FORBIDDEN, self.base.weights)
        self.top = top
        self.map, self.levels, self.words = cache(self.base.pooled), cache(self._levels), cache(self._words)

    def _levels(self, factor: int) -> Array:
        """The cells as levels of 0 … 255. Removed cells look masked."""
        weights = self.weights if factor == 1 else self.map(factor).weights
        return levels(weights, weights != FORBIDDEN, self.scale, self.top)

    def _words(self, axis: int) -> tuple[str, ...]:
        """The tokens along an axis."""
        return tuple(token_label(token) for token in self.texts[axis])

    def cell_of(self, axis: int, place: int) -> int:
        """The row or column of a position."""
        cell_of_place = (place - self.base.first[axis]) // self.base.block
        return min(int(self.weights.shape[axis]) - 1, max(0, cell_of_place))

    def places(self, axis: int, row: int) -> range:
        """The positions of the tokens of a row or column."""
        first, last = self.base.query_places(row) if axis == QUERY else self.base.key_places(row)
        return range(first, last + 1)

    def name(self, axis: int, row: int) -> str:
        """A row or column in a sentence: `2 sat`, or `32–63`."""
        name = self.base.query_name(row) if axis == QUERY else self.base.key_name(row)
        return name if self.base.block > 1 else f"{self.places(axis, row).start} {name}"

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
        places, begin = self.places(QUERY, row), self.head.record.first_query(self.sequence)
        of_head = self.head.record.arrays["entropy"][self.sequence, self.head.place]
        nats = of_head[begin + places.start : begin + places.stop]
        return float(nats.mean()) if self.base.block == 1 else float(np.nanmean(nats))

    def row_document(self, row: int) -> Mapping[str, Any]:
        """The row as JSON values, schema `mha.row/1`: exact numbers without removed keys; null if not finite."""
        base, head, arrays = self.base, self.head, self.head.record.arrays
        exact = float if self.hides_sinks or "pattern" not in arrays else arrays["pattern"].dtype.type
        keys = [  # with as few digits as the dtype needs
            {**self._json_place(KEY, column), "share": finite(float(str(exact(weight))))}
            for column, weight in sorted(self.top_keys(row))
        ]
        return {
            "schema": ROW_SCHEMA,
            "layer": None if head.layer is None else head.layer.layer,
            "attention": None if head.layer is None else head.layer.name,
            "head": head.head,
            "kind": None if head.statistics is None else head.statistics.kind,
            "sequence": self.sequence,
            "query": self._json_place(QUERY, row),
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

    def _json_place(self, axis: int, row: int) -> dict[str, Any]:
        places = self.places(axis, row)
        if self.base.block > 1:
            return {"first": places[0], "last": places[-1]}
        return {"place": places[0], "token": without_surrogates(self.texts[axis][places[0]])}

    # ----------------------------------------------------------------------------------------------------------- cells

    def sizes(self, *, colour: bool) -> list[tuple[int, int]]:
        """The sizes of cells from the smallest on: how many tokens a cell stands for in both directions, and its columns."""
        widths = (HALF, 2, TIGHT, 6, 8) if colour else (2, 3, TIGHT, 6, 8)
        powers = range(max(self.weights.shape).bit_length(), 0, -1)
        return [*((1 << power, widths[0]) for power in powers), *((1, width) for width in widths)]

    def largest(self, sizes: Sequence[tuple[int, int]], lines: int, columns: int) -> int:
        """The place of the largest size in which all cells fit, or of the smallest size."""
        n_rows, n_columns = self.weights.shape
        for place, (factor, width) in reversed([*enumerate(sizes)]):
            n_lines = -(-n_rows // (factor * per_line(width)))
            if n_lines <= lines and -(-n_columns // factor) * width <= columns:
                return place
        return 0

    def cells(self, size: tuple[int, int], rows: range, columns: range, *, colour: bool) -> list[Cell]:
        """A line of cells of a size: one row, or two in cells that are half a character high."""
        factor, width = size
        shades, part = self.levels(factor), slice(columns.start, columns.stop)
        upper = shades[rows[0], part].tolist()
        if width == HALF:
            lower = shades[rows[1], part].tolist() if len(rows) > 1 else None
            return [*half_cells(upper, lower)]
        if width in _DECIMALS:
            weights = self.map(factor).weights[rows[0], part].tolist()
            return [_number_cell(*pair, width, colour=colour) for pair in zip(upper, weights, strict=True)]
        return [cell(level, width, colour=colour) for level in upper]

    def thumbnail(self, lines: int, columns: int, *, colour: bool) -> list[list[Cell]]:
        """The whole picture, in the largest cells that fit."""
        sizes = self.sizes(colour=colour)[:-1]
        size = sizes[self.largest(sizes, lines, columns)]
        (n_rows, n_columns), step = self.levels(size[0]).shape, per_line(size[1])
        rows = (range(begin, min(begin + step, n_rows)) for begin in range(0, n_rows, step))
        return [self.cells(size, of_line, range(n_columns), colour=colour) for of_line in rows]


def per_line(width: int) -> int:
    """The rows of cells of a width in a line of characters."""
    return 2 if width == HALF else 1


def _number_cell(level: int, weight: float, width: int, *, colour: bool) -> Cell:
    """An attention weight, without colour behind the sign of its shade if there is room; `0` if masked, `–` if removed."""
    number = shown(weight, "weight", _DECIMALS[width])
    if level == FORBIDDEN:
        number = "0" if weight == FORBIDDEN else TAKEN_SIGN
    style = EMPTY if level < 0 else WEIGHTS.style(level) if colour else PLAIN
    if width == TIGHT:  # 1.0 leaves a blank between numbers
        return f"{number[: TIGHT - 1]:>{TIGHT}}", style
    sign = " " if colour or level < 0 else glyph(level)
    return f" {f'{sign}{number:>{width - 3}}'[2 - width :]} ", style  # a weight of 1 leaves no room for its sign


# ------------------------------------------------------------------------------------------------------------- the pane

_CURSOR = Style(color=picked((255, 64, 64), 203, 9))
"""The cursor's colour among half blocks, which is not in the ramp."""
_MOST_LABEL, _TICKS, _NAMED = 14, 10, 200


class Matrix(Pane):
    """A picture in the largest cells that fit, or `zoomed` ones, queries down and keys across. The cursor is on a cell of the
    finest map, and a cell on the screen stands for `factor` × `factor` of them."""

    def __init__(self, screen: HeadsScreen, picture: Picture) -> None:
        super().__init__(self._lines, id="matrix")
        self.head_screen, self.picture = screen, picture
        self.zoomed, self.factor, self.width, self._left = 0, 1, HALF, 0

    def fit(self) -> None:
        """Takes cells of a size, and those around the cursor."""
        picture, on, (width, height) = self.picture, self.head_screen, self.size
        names = (cell_len(picture.name(QUERY, row)) for row in range(min(_NAMED, len(picture.weights))))
        self._left = 2 + max(len("query"), min(_MOST_LABEL, max(names), width // 4))
        room, sizes = max(1, width - self._left), picture.sizes(colour=on.session.colour)
        fits = picture.largest(sizes, max(1, height - 2), room)
        least = min(fits, sizes.index((1, sizes[0][1])))
        self.zoomed = max(least, min(len(sizes) - 1, fits + self.zoomed)) - fits
        self.factor, self.width = sizes[fits + self.zoomed]
        n_rows, n_columns = picture.levels(self.factor).shape
        row, column = (place // self.factor for place in on.at)
        on.rows = window(on.rows.start, max(1, height - 2) * per_line(self.width), row, n_rows)
        on.columns = window(on.columns.start, max(1, room // self.width), column, n_columns)

    def _lines(self, width: int, height: int) -> tuple[str, Lines]:
        """The lines around the cursor below the keys."""
        self.fit()
        on, cells, step = self.head_screen, self.picture.map(self.factor), per_line(self.width)
        title = "matrix" if cells.block == 1 else f"matrix · {cells.block} × {cells.block} tokens a cell"
        if self.factor > 1:
            weight = float(cells.weights[on.at[QUERY] // self.factor, on.at[KEY] // self.factor])
            title += f", here {'masked' if weight == FORBIDDEN else shown(weight, 'weight', 4)}"
        starts = on.rows[::step]
        return title, [self._axis(), *(self._line(range(start, min(start + step, on.rows.stop))) for start in starts)]

    def _axis(self) -> Iterator[Cell]:
        """The keys, as tokens if they fit into cells, else some of the positions."""
        yield f"{'query':<{self._left}}", DIM
        cells, width, columns = self.picture.map(self.factor), self.width, self.head_screen.columns
        if width > TIGHT and cells.block == 1:
            for column in columns:
                name = set_cell_size(fitted(cells.key_name(column), width - 1), width)
                yield name, ACCENT if column == self.head_screen.at[KEY] else PLAIN
            return
        places = [cells.key_index(column) for column in columns]
        yield ticks(places, width, every=1 if width == TIGHT else _TICKS, begin=columns.start), DIM

    def _line(self, rows: range) -> Sequence[Cell]:
        """The name of a query, and the cells of its line."""
        picture, on = self.picture, self.head_screen
        row, column = (place // self.factor for place in on.at)
        cells = picture.cells((self.factor, self.width), rows, on.columns, colour=on.session.colour)
        name, style, mark = picture.map(self.factor).query_name(rows[0]), PLAIN, "  "
        if row in rows:
            name, style, mark = picture.name(QUERY, on.at[QUERY]), ACCENT, " ▸"
            at = column - on.columns.start
            cells[at] = self._cursor(*cells[at], is_upper=row == rows[0])
        elif self.factor == 1:
            name = picture.name(QUERY, rows[0])
        return [(set_cell_size(fitted(name, self._left - 2), self._left - 2), style), (mark, ACCENT), *cells]

    def _cursor(self, text: str, style: Style, *, is_upper: bool) -> Cell:
        """The cell under the cursor, marked: in its colour among half blocks, by a frame around a number, else reversed."""
        if self.width == HALF:
            return "▀" if is_upper else "▄", _CURSOR
        return (text, CURSOR) if self.width == TIGHT else (f"[{text[1:-1]}]", style + CURSOR)

    def on_click(self, event: events.Click) -> None:
        """Goes to the cell under the mouse; beside the cells to the row."""
        row = self.head_screen.rows.start + (event.y - 2) * per_line(self.width)
        column = self.head_screen.columns.start + (event.x - self._left) // self.width
        if row in self.head_screen.rows:
            self.head_screen.go(
                row * self.factor,
                column * self.factor if column in self.head_screen.columns else self.head_screen.at[KEY],
            )
