"""The panes of the screens: words, and rows of cells with a cursor. Each draws itself when the screen is painted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.segment import Segment, Segments
from rich.style import Style
from textual import events
from textual.strip import Strip
from textual.widget import Widget

from mhacli.render.base.format import fitted

PLAIN, DIM = Style.null(), Style(dim=True)
ACCENT = Style(color="cyan", bold=True)
CURSOR = Style(reverse=True)
"""The style, never bold, of the cell under the cursor."""
Cell = tuple[str, Style]
FAR = 10**9
_WHEEL = 3
"""The rows that the wheel moves."""


def title_line(title: str, width: int, *, is_chosen: bool = False) -> Cell:
    """The line above a pane with its title; heavy if keys act on the pane."""
    words, line = f" {fitted(title, max(0, width - 4))} ", "━" if is_chosen else "─"
    return line + words + line * (width - 1 - cell_len(words)), ACCENT if is_chosen else DIM


def segments(lines: Iterable[Iterable[Cell]], width: int) -> Segments:
    """Lines of cells, cut or filled to a width."""
    strips = [Strip([Segment(*cell) for cell in line]).adjust_cell_length(width) for line in lines]
    return Segments([segment for strip in strips for segment in (*strip, Segment.line())])


class Words(Widget):
    """What a function draws for the width of the screen."""

    def __init__(self, draw: Callable[[int], Iterable[RenderableType]], *, id: str) -> None:
        super().__init__(id=id)
        self._draw = draw

    def render(self) -> Group:
        """The words. In a group they keep colours for any terminal; textual's own text has one set of colours."""
        return Group(*self._draw(self.app.size.width))


class Pane(Widget, can_focus=True):
    """Rows of cells below a title, of which those around the cursor are visible.

    `fill` sets what is drawn in the current size before each drawing, and `go` takes the cursor to a row and column. A cell on
    the screen stands for `factor` rows and columns, and a line holds the cells of `per_line` of them.
    """

    factor = per_line = 1

    def __init__(self, fill: Callable[[], None], go: Callable[[int, int], None], *, id: str) -> None:
        super().__init__(id=id)
        self.fill, self.go = fill, go
        self.title = ""
        self.names: Sequence[str] = ()
        self.headings: Sequence[str] = ()
        self.cells: Callable[[int], Sequence[Cell]] = lambda row: ()
        self.n_rows = self.row = self.column = self.left = self.skipped = 0
        self.rows = self.columns = range(0)

    def render(self) -> Segments:
        """The title, the headings, and the rows around the cursor."""
        self.fill()
        self.fit()
        n_above = 2 if self.headings else 1
        room = max(1, self.size.height - n_above) * self.per_line
        self.rows = window(self.rows.start, room, self.row // self.factor, -(-self.n_rows // self.factor))
        lines = [[title_line(self.title, self.size.width, is_chosen=self.has_focus)], self.heading()]
        lines = lines[:n_above]
        for begin in self.rows[:: self.per_line]:
            lines.append(self.line(range(begin, min(begin + self.per_line, self.rows.stop))))
        return segments(lines, self.size.width)

    def fit(self) -> None:
        """Leaves out columns on the left until the cell under the cursor fits."""
        self.left = max(map(cell_len, self.names), default=-3) + 3
        under = self.cells(self.row)[: self.column + 1] if self.n_rows else ()
        self.skipped = min(self.skipped, self.column)
        while (
            self.skipped < self.column
            and sum(cell_len(text) for text, _ in under[self.skipped :]) > self.size.width - self.left
        ):
            self.skipped += 1

    def heading(self) -> Iterable[Cell]:
        """The headings of the columns."""
        return [(" " * self.left + "".join(self.headings[self.skipped :]), PLAIN)]

    def line(self, rows: range) -> Iterable[Cell]:
        """The name of a row, and its cells."""
        row = rows[0]
        if self.names:
            name = f"{' ' * (self.left - 2 - cell_len(self.names[row]))}{self.names[row]}  "
            yield name, ACCENT if row == self.row else PLAIN
        for column, (text, style) in [*enumerate(self.cells(row))][self.skipped :]:
            yield text, style + CURSOR if (row, column) == (self.row, self.column) else style

    def length(self, row: int) -> int:
        """The number of cells of a row."""
        return len(self.cells(row))

    def last(self, row: int) -> int:
        """The last column of a row to which the cursor goes."""
        return max(column for column in range(self.length(row)) if not self.is_blank(row, column))

    def is_blank(self, row: int, column: int) -> bool:
        """Whether the cursor passes over a cell."""
        return not self.cells(row)[column][0].strip()

    def column_at(self, row: int, x: int) -> int | None:
        """The column at a place of a line, if there is one."""
        end = self.left
        for column, (text, _) in [*enumerate(self.cells(row))][self.skipped :]:
            end += cell_len(text)
            if x < end:
                return column
        return None

    def move(self, down: int, right: int) -> None:
        """Moves the cursor by rows and columns to the next cell that is not blank, or not at all."""
        self.fill()  # keys may come faster than drawings
        row, column, before = self.row, self.column, (-1, -1)
        while (row, column) != before:
            before = row, column
            row = max(0, min(self.n_rows - 1, row + down * self.factor))
            column = max(0, min(self.length(row) - 1, column + right * self.factor))
            if (row, column) != before and not self.is_blank(row, column):
                self.go(row, column)
                return

    def page(self, down: int, right: int) -> None:
        """Moves the cursor by as many rows or columns as are visible."""
        self.move(down * max(1, len(self.rows) - 1), right * max(1, len(self.columns) - 1))

    def on_click(self, event: events.Click) -> None:
        """Goes to the cell under the mouse."""
        row = self.rows.start + (event.y - (2 if self.headings else 1)) * self.per_line
        column = self.column_at(row, event.x) if row in self.rows else None
        if column is not None and not self.is_blank(row, column):
            self.go(row * self.factor, column)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Moves down a few rows, or right with shift."""
        self.move(*((0, _WHEEL) if event.shift else (_WHEEL, 0)))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Moves up a few rows, or left with shift."""
        self.move(*((0, -_WHEEL) if event.shift else (-_WHEEL, 0)))


def window(begin: int, size: int, target: int, length: int) -> range:
    """The window of a size within `length`, moved as little as needed to hold `target`."""
    begin = max(min(begin, target), target - size + 1)
    begin = max(0, min(begin, length - size))
    return range(begin, min(length, begin + size))
