"""The matrix of a head: queries down, keys across, a cursor, at any zoom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.message import Message

from mhacli.render.base.cells import FORBIDDEN, NOT_A_NUMBER, cell, half_cells, ticks
from mhacli.render.base.colours import EMPTY, NAN_SIGN, glyph, picked, ramp_paint, shade
from mhacli.render.base.format import fitted, weight_text
from mhacli.viewer.lines import ACCENT, BROKEN, CURSOR, DIM, PLAIN, Line, Pane, ruled, segment, segments
from mhacli.viewer.picture import SHADED, TAKEN_SIGN, TIGHT, Picture, Shades, Zoom, fitting, nearest, zoom_levels

_TOP_LINES, _MOST_LABEL, _LEAST_LABEL, _TICKS = 3, 14, 5, 10
_CURSOR_COLOUR = picked((255, 64, 64), 203, 9)
"""The cursor's colour among half blocks, which is not in the ramp."""


@dataclass(frozen=True)
class Window:
    """The visible part of a map: its first row and column, and its size."""

    top: int
    left: int
    n_rows: int
    n_columns: int

    def holding(self, row: int, column: int, shape: tuple[int, int]) -> Window:
        """The window, moved as little as needed to contain a cell within the map."""
        return Window(
            _moved(self.top, self.n_rows, row, shape[0]),
            _moved(self.left, self.n_columns, column, shape[1]),
            self.n_rows,
            self.n_columns,
        )


def _moved(begin: int, size: int, target: int, length: int) -> int:
    begin = min(begin, target) if target < begin else max(begin, target - size + 1)
    return max(0, min(begin, length - size))


class Matrix(Pane, can_focus=True):
    """The matrix pane. Posts `Moved` on a click."""

    class Moved(Message):
        """A cell of the finest map was selected."""

        def __init__(self, row: int, column: int) -> None:
            super().__init__()
            self.row, self.column = row, column

    def __init__(self, *, colour: bool, id: str) -> None:
        super().__init__(id=id)
        self.colour = colour
        self.picture: Picture | None = None
        self.row, self.column = 0, 0
        self.chosen_zoom: Zoom | None = None
        self.window = Window(0, 0, 1, 1)

    def show(self, picture: Picture | None, row: int, column: int) -> None:
        """Draws a picture with the cursor on a cell of its finest map."""
        self.picture, self.row, self.column = picture, row, column
        self.repaint()

    def zoom(self) -> Zoom:
        """The current zoom: the chosen one, or the largest at which the whole map fits."""
        assert self.picture is not None
        shape, room = (self.picture.n_rows, self.picture.n_columns), self._room()
        if self.chosen_zoom is None:
            return fitting(shape, room, colour=self.colour)
        steps = zoom_levels(shape, room, colour=self.colour)
        return steps[nearest(self.chosen_zoom, steps)]

    def zoomed(self, step: int) -> bool:
        """Zooms in or out; False if that is not possible."""
        if self.picture is None:
            return False
        steps = zoom_levels((self.picture.n_rows, self.picture.n_columns), self._room(), colour=self.colour)
        place = nearest(self.zoom(), steps) + step
        if not 0 <= place < len(steps):
            return False
        self.chosen_zoom = steps[place]
        self.repaint()
        return True

    def page(self) -> tuple[int, int]:
        """Rows and columns of the finest map per page, and per step (the block of one cell)."""
        zoom = self.zoom() if self.picture is not None else Zoom()
        return max(1, self.window.n_rows - 1) * zoom.factor, max(1, self.window.n_columns - 1) * zoom.factor

    def _label_width(self) -> int:
        assert self.picture is not None
        rows = range(min(200, self.picture.n_rows))
        widest = max(cell_len(self.picture.query_name(row)) for row in rows)
        return max(_LEAST_LABEL, min(_MOST_LABEL, widest, self.size.width // 4))

    def _room(self) -> tuple[int, int]:
        return max(1, self.size.height - self._n_above()), max(1, self.size.width - self._label_width() - 2)

    def _n_above(self) -> int:
        """The lines above the cells: the title, and the keys if there is room."""
        return _TOP_LINES if self.size.height >= _TOP_LINES + 2 else 1

    # ------------------------------------------------------------------------------------------------------- painting

    def paint(self, width: int, height: int) -> Sequence[Line]:
        """The title, the keys along the top, and the rows."""
        if self.picture is None:
            return [ruled("matrix", width, focused=self.has_focus)]
        zoom, label = self.zoom(), self._label_width()
        shades = self.picture.at(zoom.factor)
        row, column = self.row // zoom.factor, self.column // zoom.factor
        lines, columns = self._room()
        shape = (int(shades.cells.shape[0]), int(shades.cells.shape[1]))
        n_rows, n_columns = min(shape[0], lines * (2 if zoom.halves else 1)), min(shape[1], columns // zoom.width or 1)
        window = Window(self.window.top, self.window.left, n_rows, n_columns).holding(row, column, shape)
        if zoom.halves and window.top % 2 and window.top + n_rows < shape[0]:
            window = Window(window.top + 1, window.left, n_rows, n_columns).holding(row, column, shape)
        self.window = window
        body = []
        if self._n_above() > 1:
            body = [self._axis(shades, zoom, window, column, label), self._mark(zoom, window, column, label)]
        step = 2 if zoom.halves else 1
        for at in range(window.top, window.top + n_rows, step):
            body.append(self._line(shades, zoom, window, at, (row, column), label))
        return [ruled(self._title(shades, zoom, window), width, focused=self.has_focus), *body][:height]

    def _title(self, shades: Shades, zoom: Zoom, window: Window) -> str:
        shape, block = shades.cells.shape, shades.map.block
        title = "matrix" if block == 1 else f"matrix · {block} × {block} tokens a cell"
        if zoom.factor > 1:
            weight = float(shades.map.weights[self.row // zoom.factor, self.column // zoom.factor])
            title += f", here {'masked' if weight == FORBIDDEN else weight_text(weight, 4)}"
        if window.n_rows < shape[0]:
            title += f" · rows {window.top}–{window.top + window.n_rows - 1} of {shape[0]}"
        if window.n_columns < shape[1]:
            title += f" · columns {window.left}–{window.left + window.n_columns - 1} of {shape[1]}"
        return title

    def _axis(self, shades: Shades, zoom: Zoom, window: Window, column: int, label: int) -> Line:
        """The keys: tokens if they fit into cells, else some of the positions."""
        shown = range(window.left, window.left + window.n_columns)
        if zoom.width > TIGHT and shades.map.block == 1:
            names = [(set_cell_size(fitted(shades.map.key_name(c), zoom.width - 1), zoom.width - 1), c) for c in shown]
            styled = [(f"{name} ", ACCENT if c == column else PLAIN) for name, c in names]
            return segments([(f"{'query':<{label + 2}}", DIM), *styled])
        every = _TICKS if zoom.width <= 2 else 1
        places = [c * shades.map.block + shades.map.first[1] for c in shown]
        numbers = ticks(places, zoom.width, every=every, begin=window.left)
        return segments([(f"{'query':<{label + 2}}", DIM), (numbers, DIM)])

    def _mark(self, zoom: Zoom, window: Window, column: int, label: int) -> Line:
        """A mark above the cursor's column, with the key's name beside it."""
        width, at = window.n_columns * zoom.width, (column - window.left) * zoom.width + (zoom.width - 1) // 2
        assert self.picture is not None
        room = max(width, self.size.width - label - 2)
        name = fitted(self.picture.key_name(self.column), max(1, room // 2))
        is_left = at + 2 + cell_len(name) > room
        mark = f"{name} ▾" if is_left else f"▾ {name}"
        begin = max(0, at - cell_len(name) - 1) if is_left else at
        return segments([(" " * (label + 2 + begin), PLAIN), (mark, ACCENT)])

    def _line(self, shades: Shades, zoom: Zoom, window: Window, at: int, cursor: tuple[int, int], label: int) -> Line:
        """One row, or two in half blocks, with the name of the cursor's row or of the first."""
        rows = (at, at + 1) if zoom.halves and at + 1 < window.top + window.n_rows else (at,)
        named = cursor[0] if cursor[0] in rows else at
        is_marked = cursor[0] in rows
        assert self.picture is not None
        base_row = self.row if is_marked else min(self.picture.n_rows - 1, named * zoom.factor)
        is_one = shades.map.block == 1 or is_marked
        shown = self.picture.query_name(base_row) if is_one else _places_of_rows(shades, rows)
        name = set_cell_size(fitted(shown, label), label)
        line = [segment(name, ACCENT if is_marked else DIM if shades.map.block > 1 else PLAIN)]
        line.append(segment(" ▸" if is_marked else "  ", ACCENT))
        columns = slice(window.left, window.left + window.n_columns)
        cursor_column = cursor[1] - window.left if is_marked else -1
        if zoom.halves:
            pair = [shades.cells[row, columns].tolist() for row in rows]
            upper, lower = pair[0], pair[1] if len(pair) > 1 else [FORBIDDEN] * len(pair[0])
            return [*line, *_halves(upper, lower, cursor_column, is_lower=cursor[0] == at + 1)]
        levels, weights = shades.cells[at, columns].tolist(), shades.map.weights[at, columns].tolist()
        return [*line, *self._cells(levels, weights, zoom, cursor_column)]

    def _cells(self, levels: Sequence[int], weights: Sequence[float], zoom: Zoom, cursor_column: int) -> list[Segment]:
        """A row of cells, each `zoom.width` columns wide, with shades, signs or numbers."""
        cells = []
        for place, (level, weight) in enumerate(zip(levels, weights, strict=True)):
            cells.append(
                _number_cell(level, weight, zoom, self.colour, place == cursor_column)
                if zoom.decimals
                else _shade_cell(level, zoom, self.colour, place == cursor_column)
            )
        return cells

    # ---------------------------------------------------------------------------------------------------------- mouse

    def on_click(self, event: events.Click) -> None:
        """Selects the cell under the mouse."""
        if self.picture is None or event.y < self._n_above():
            return
        zoom = self.zoom()
        x, y = (event.x - self._label_width() - 2) // zoom.width, event.y - self._n_above()
        row = self.window.top + (2 * y if zoom.halves else y)
        column = self.window.left + max(0, x)
        if x < self.window.n_columns and row < self.window.top + self.window.n_rows:
            self.post_message(self.Moved(row * zoom.factor, self.column if x < 0 else column * zoom.factor))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Moves down a few rows, or right with shift."""
        self._wheel(1, sideways=event.shift)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Moves up a few rows, or left with shift."""
        self._wheel(-1, sideways=event.shift)

    def _wheel(self, direction: int, *, sideways: bool) -> None:
        if self.picture is None:
            return
        step = direction * 3 * self.zoom().factor
        row, column = (self.row, self.column + step) if sideways else (self.row + step, self.column)
        last = self.picture.n_rows - 1, self.picture.n_columns - 1
        self.post_message(self.Moved(min(last[0], max(0, row)), min(last[1], max(0, column))))


def _places_of_rows(shades: Shades, rows: Sequence[int]) -> str:
    return f"{shades.map.query_name(rows[0]).partition('–')[0]}–{shades.map.query_name(rows[-1]).partition('–')[2]}"


def _halves(upper: Sequence[int], lower: Sequence[int], cursor_column: int, *, is_lower: bool) -> list[Segment]:
    cells = [segment(*painted) for painted in half_cells(upper, lower, broken=BROKEN)]
    if cursor_column >= 0 and NOT_A_NUMBER in (upper[cursor_column], lower[cursor_column]):
        cells[cursor_column] = segment(NAN_SIGN, CURSOR)
    elif cursor_column >= 0:
        rest = upper[cursor_column] if is_lower else lower[cursor_column]
        ground = ramp_paint(rest) if rest >= 0 else None
        cells[cursor_column] = segment("▄" if is_lower else "▀", Style(color=_CURSOR_COLOUR, bgcolor=ground))
    return cells


def _shade_cell(level: int, zoom: Zoom, colour: bool, is_cursor: bool) -> Segment:
    signs, style = cell(level, zoom.width, colour=colour)
    if level == NOT_A_NUMBER:
        style = BROKEN
    if not is_cursor:
        return segment(signs, style)
    if colour:
        return segment("[]" if zoom.width > SHADED else "▪", style)
    return segment(signs, CURSOR)


def _number_cell(level: int, weight: float, zoom: Zoom, colour: bool, is_cursor: bool) -> Segment:
    """An attention weight, without colour with the sign of its shade if there is room; `0` if masked, `–` if removed.

    The cursor has brackets, or its own style if they do not fit.
    """
    nothing = "0" if weight == FORBIDDEN else TAKEN_SIGN
    number = nothing if level < 0 and level != NOT_A_NUMBER else weight_text(weight, zoom.decimals)
    style = EMPTY if level < 0 else shade(level) if colour else PLAIN
    if zoom.width == TIGHT:
        return segment(
            f"{number[: TIGHT - 1]:>{TIGHT}}", CURSOR if is_cursor else style
        )  # 1.0 leaves a blank between numbers
    sign = " " if colour or level < 0 else glyph(level)
    room = zoom.width - 2
    text = f"{sign}{number:>{room - 1}}"[-room:]  # a weight of 1 leaves no room for its sign
    if is_cursor:
        return segment(f"[{text}]", CURSOR if not colour or level < 0 else style)
    return segment(f" {text} ", style)
