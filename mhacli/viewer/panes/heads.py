"""The grid of all heads: a row for each layer, a sign of its kind for each head, or a small picture where there is room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from textual import events
from textual.message import Message
from textual.timer import Timer

from mhacli.io.memory import uncollected
from mhacli.render.base.format import count_of, fitted
from mhacli.viewer.head_table import HeadTable, TableHead
from mhacli.viewer.lines import ACCENT, CURSOR, DIM, PLAIN, Line, Pane, kind_sign, kind_words, ruled, segment, segments

if TYPE_CHECKING:  # numpy is loaded when the first screen can be seen
    from mhacli.viewer.picture import Picture

_MOST_WIDTH, _MOST_LABEL = 5, 12
_CELLS_AT_ONCE, _PAUSE_S = 1_000_000, 0.01
"""Cells that small pictures are made of before keys are heard again, and how long that is waited for."""


@dataclass(frozen=True)
class GridLayout:
    """How the grid lies: columns of the layers' names, of a head, lines of a layer; and which rows and columns are shown."""

    label: int
    width: int
    height: int
    rows: range
    columns: range
    thumbnail: ThumbnailSize | None


class HeadGrid(Pane, can_focus=True):
    """The grid. It posts `Moved` and `Opened` where the mouse chooses a head."""

    class Moved(Message):
        """A head was chosen, by its row and column; `again` where it was so already."""

        def __init__(self, place: tuple[int, int], *, again: bool) -> None:
            super().__init__()
            self.place, self.again = place, again

    def __init__(
        self, head_table: HeadTable, picture_of: Callable[[TableHead], Picture | None], *, colour: bool
    ) -> None:
        super().__init__(id="heads")
        self.head_table, self.colour = head_table, colour
        self._picture_of = picture_of
        self.place = head_table.places[0]
        self._top, self._left = 0, 0
        self._small: dict[TableHead, Sequence[Line]] = {}
        self._small_as: tuple[object, ...] = ()
        self._budget = 0
        self._thumbnail: Callable[..., Sequence[Line]] | None = None
        self._coming: Timer | None = None

    def show(self, place: tuple[int, int]) -> None:
        """Puts the cursor on a head."""
        self.place = place
        self.repaint()

    def layout_for(self, width: int, height: int) -> GridLayout:
        """Small pictures where they fit, else signs, the cursor's among them."""
        label = max(cell_len(fitted(row.name, _MOST_LABEL)) for row in self.head_table.rows)
        label = max(label, len("layer")) + 1 if len(self.head_table.rows) > 1 else 0
        n_rows, n_columns = len(self.head_table.rows), len(self.head_table.columns)
        size = thumbnail_size(self.head_table, (width - label, height - 1))
        if size is not None:
            return GridLayout(label, size.width + 2, size.height + 2, range(n_rows), range(n_columns), size)
        least = max(len(str(number)) for number in self.head_table.columns) + 1
        room = width - label
        is_tight = n_columns <= room < 2 * n_columns
        cell = 1 if is_tight else max(2, min(_MOST_WIDTH, least, room // n_columns))
        shown = max(1, min(n_columns, room // cell))
        self._left = max(0, min(max(self._left, self.place[1] - shown + 1), self.place[1], n_columns - shown))
        lines = max(1, min(n_rows, height - 2))
        self._top = max(0, min(max(self._top, self.place[0] - lines + 1), self.place[0], n_rows - lines))
        return GridLayout(
            label, cell, 1, range(self._top, self._top + lines), range(self._left, self._left + shown), None
        )

    def paint(self, width: int, height: int) -> Sequence[Line]:
        """The title, the heads' numbers, and the layers."""
        n_heads, self._budget = len(self.head_table.places), _CELLS_AT_ONCE
        layout = self.layout_for(width, height)
        title = count_of(n_heads, "head") + (
            f" in {count_of(len(self.head_table.rows), 'layer')}" if layout.label else ""
        )
        for shown, every, word in (
            (layout.rows, self.head_table.rows, "rows"),
            (layout.columns, self.head_table.columns, "columns"),
        ):
            if len(shown) < len(every):
                title += f" · {word} {shown.start}–{shown.stop - 1} of {len(every)}"
        lines: list[Line] = [ruled(title, width, focused=self.has_focus)]
        if layout.thumbnail is not None:
            for row in layout.rows:
                lines += self._thumbnails(row, layout, layout.thumbnail)
            if self._coming is None and (self._thumbnail is None or self._budget <= 0):
                self._coming = self.set_timer(_PAUSE_S, self._draw_more)
        else:
            lines += [self._numbers(layout), *(self._signs(row, layout) for row in layout.rows)]
        return lines[:height]

    def _numbers(self, layout: GridLayout) -> Line:
        """The numbers of the heads, every so many where a column is narrower than a number."""
        line = [" "] * (len(layout.columns) * layout.width + 4)
        widest = max(len(str(self.head_table.columns[c])) for c in layout.columns)
        every = 1 if widest < layout.width else 5
        for c in layout.columns:
            if c % every == 0:
                at, number = (c - layout.columns.start) * layout.width, str(self.head_table.columns[c])
                line[at : at + len(number)] = number
        return segments([(f"{'layer':<{layout.label}}" if layout.label else "", DIM), ("".join(line), DIM)])

    def _signs(self, row: int, layout: GridLayout) -> Line:
        layer = self.head_table.rows[row]
        is_own = row == self.place[0]
        name = fitted(layer.name, layout.label - 1) if layout.label else ""
        line = [segment(f"{name:>{layout.label - 1}} " if layout.label else "", ACCENT if is_own else DIM)]
        if layer.instead:
            return [*line, segment(f"– {layer.instead}", DIM)]
        for column in layout.columns:
            head = self.head_table.head_at(row, column)
            sign, style = (" ", PLAIN) if head is None else kind_sign(head.statistics)
            is_cursor = (row, column) == self.place
            line += [segment(sign, CURSOR if is_cursor else style), segment(" " * (layout.width - 1))]
        return line

    def _thumbnails(self, row: int, layout: GridLayout, size: ThumbnailSize) -> list[Line]:
        """A layer of small pictures, each under its number and kind; the first layer has the heading of their column."""
        title: list[Segment] = []
        lines: list[list[Segment]] = [[] for _ in range(size.height)]
        for number, column in enumerate(layout.columns):
            head = self.head_table.head_at(row, column)
            is_cursor = (row, column) == self.place
            if number == 0 and layout.label:
                names = [fitted(self.head_table.rows[row].name, layout.label - 1), *[""] * (size.height - 1)]
                heading = "layer" if row == layout.rows.start else ""
                title.append(segment(f"{heading:<{layout.label}}", DIM))
                for line, name in zip(lines, names, strict=True):
                    line.append(segment(f"{name:>{layout.label - 1}} ", ACCENT))
            title += [*_thumbnail_title(head, size.width + 1, is_cursor), segment(" ")]
            small = blank(size) if head is None else self._small_of(head, size)
            for line, own in zip(lines, small, strict=True):
                line += [*own, segment("  ")]
        return [title, *lines, []]

    def _draw_more(self) -> None:
        """Small pictures come when the rest can be seen, for they take numpy, which is long to load; and not all at once."""
        self._coming = None
        if self._thumbnail is None:
            with uncollected():
                from mhacli.viewer.picture import thumbnail

                self._thumbnail = thumbnail
        self.repaint()

    def _small_of(self, head: TableHead, size: ThumbnailSize) -> Sequence[Line]:
        """A small picture, kept as long as nothing but the cursor changes; blank until there is time for it."""
        if self._thumbnail is None or (drawn := self._picture_of(head)) is None:
            return blank(size)
        shown_as = (size, drawn.sequence, drawn.scale, drawn.hides_sinks)
        if shown_as != self._small_as:
            self._small, self._small_as = {}, shown_as
        if head not in self._small:
            if self._budget <= 0:
                return blank(size)
            self._small[head] = self._thumbnail(drawn, size.width, size.height, colour=self.colour)
            self._budget -= drawn.n_rows * drawn.n_columns
        return self._small[head]

    def on_click(self, event: events.Click) -> None:
        """Chooses the head under the mouse."""
        layout = self.layout_for(self.size.width, self.size.height)
        row = layout.rows.start + (event.y - (1 if layout.thumbnail else 2)) // layout.height
        column = layout.columns.start + (event.x - layout.label) // layout.width
        is_there = event.x >= layout.label and row in layout.rows and column in layout.columns
        if is_there and event.y >= 1 and self.head_table.head_at(row, column) is not None:
            self.post_message(self.Moved((row, column), again=(row, column) == self.place))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """A layer further."""
        self.post_message(self.Moved(self.head_table.above(self.place, 1), again=False))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """A layer back."""
        self.post_message(self.Moved(self.head_table.above(self.place, -1), again=False))


def _thumbnail_title(head: TableHead | None, width: int, is_cursor: bool) -> list[Segment]:
    if head is None:
        return [segment(" " * width)]
    sign, style = kind_sign(head.statistics)
    kind = kind_words(head.statistics)
    if cell_len(f"{head.head} {sign} {kind}") > width:
        kind = kind.rpartition(" ")[0] or kind
    number = f"{head.head} "
    rest = set_cell_size(fitted(f"{sign} {kind}", width - len(number)), width - len(number))
    if is_cursor:
        return [segment(number + rest.rstrip(), CURSOR), segment(" " * (width - cell_len(number + rest.rstrip())))]
    return [segment(number, DIM), segment(rest, style)]


# ------------------------------------------------------------------------------------------------------ small pictures


_LEAST = (8, 3)
_MOST_CELLS = 64_000_000
"""Cells of all heads together beyond which small pictures would keep one waiting."""


@dataclass(frozen=True)
class ThumbnailSize:
    """Columns and lines of a small picture, the line of its title and the gap beside it not counted."""

    width: int
    height: int


def thumbnail_size(head_table: HeadTable, room: tuple[int, int]) -> ThumbnailSize | None:
    """The largest tiles with which all heads fit into columns and lines; None where they would be too small, or too many cells
    to look at."""
    drawn = [head.drawable for row in head_table.rows for head in row.heads if head is not None]
    if not drawn or any(one is None for one in drawn) or any(row.instead for row in head_table.rows):
        return None
    facts = [one.record.facts for one in drawn if one is not None]
    if (
        sum(f.q_len * f.k_len for f, one in zip(facts, drawn, strict=True) if one and "pattern" in one.record.arrays)
        > _MOST_CELLS
    ):
        return None
    width = min(40, room[0] // len(head_table.columns) - 2)
    steepest = max(f.q_len / f.k_len for f in facts)
    size = ThumbnailSize(
        width, min(16, room[1] // len(head_table.rows) - 2, max(_LEAST[1], ceil(width * steepest / 2)))
    )
    return size if size.width >= _LEAST[0] and size.height >= _LEAST[1] else None


def blank(size: ThumbnailSize) -> Sequence[list[Segment]]:
    """The lines of a small picture that is not there yet."""
    return [[segment(" " * size.width)] for _ in range(size.height)]
