"""The grid of all heads: a row per layer, with thumbnails if all fit; otherwise signs of head types, and thumbnails of
the selected layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.segment import Segment
from textual import events
from textual.geometry import Region
from textual.message import Message
from textual.timer import Timer

from mhacli.io.memory import uncollected
from mhacli.record.heads import words_of_type
from mhacli.render.base.format import count_of, fitted
from mhacli.viewer.head_table import HeadTable, TableHead
from mhacli.viewer.lines import ACCENT, CURSOR, DIM, PLAIN, Line, Pane, kind_sign, kind_words, ruled, segment, segments

if TYPE_CHECKING:  # numpy is imported after the first screen is visible
    from mhacli.viewer.picture import Picture

_MOST_WIDTH, _MOST_LABEL = 5, 12
_CELLS_AT_ONCE, _PAUSE_S = 1_000_000, 0.01
"""Cells of thumbnails drawn at a time, and the pause in which keys are handled."""


@dataclass(frozen=True)
class GridLayout:
    """The layout of the grid: the widths of layer names and heads, the height of heads, and the visible rows and
    columns.

    `side_by_side` heads are on one line.
    """

    label: int
    width: int
    height: int
    rows: range
    columns: range
    side_by_side: int
    thumbnail: ThumbnailSize | None = None

    def bands(self) -> list[tuple[int, range]]:
        """The row and the columns of each line of heads, from the top."""
        starts = range(self.columns.start, self.columns.stop, self.side_by_side)
        parts = [range(start, min(self.columns.stop, start + self.side_by_side)) for start in starts]
        return [(row, part) for row in self.rows for part in parts]


class HeadGrid(Pane, can_focus=True):
    """The grid of heads. Posts `Moved` on a click."""

    class Moved(Message):
        """A head was selected by row and column; `again` if it was selected already."""

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
        self._shown_as: tuple[object, ...] = ()
        self._sizes: dict[tuple[range, tuple[int, int]], ThumbnailSize | None] = {}
        self._budget = 0
        self._thumbnail: Callable[..., Sequence[Line]] | None = None
        self._coming: Timer | None = None

    def show(self, place: tuple[int, int], shown_as: tuple[object, ...]) -> None:
        """Selects a head. If thumbnails are `shown_as` before, only lines with the cursor are redrawn."""
        before, self.place = (self.place, self._shown_as), place
        self._shown_as = shown_as
        layout = self.layout_for(self.size.width, self.size.height)
        tiles = self.tiles_for(self.size.width, self.size.height)
        has_other_pictures = layout.thumbnail is None and before[0][0] != place[0]
        if tiles is None or has_other_pictures or before[1] != shown_as or before[0] == place:
            self.repaint()
            return
        lines = [] if layout.thumbnail is not None else [2 + place[0] - layout.rows.start]
        for number, (row, columns) in enumerate(tiles[1].bands()):
            is_title = any(at[0] == row and at[1] in columns for at in (before[0], place))
            lines += [tiles[0] + tiles[1].height * number] if is_title else []
        self._lines = None
        self.refresh(*(Region(0, line, self.size.width, 1) for line in lines))

    def layout_for(self, width: int, height: int) -> GridLayout:
        """The layout with thumbnails if they fit, else with signs; it includes the selected head."""
        label = max(cell_len(fitted(row.name, _MOST_LABEL)) for row in self.head_table.rows)
        label = max(label, len("layer")) + 1 if len(self.head_table.rows) > 1 else 0
        n_rows, n_columns = len(self.head_table.rows), len(self.head_table.columns)
        room = width - label, height - 1
        size = self._size_in(range(n_rows), room)
        if size is not None:
            return GridLayout(label, *size.tile, range(n_rows), range(n_columns), size.side_by_side, size)
        least = max(len(str(number)) for number in self.head_table.columns) + 1
        is_tight = n_columns <= room[0] < 2 * n_columns
        cell = 1 if is_tight else max(2, min(_MOST_WIDTH, least, room[0] // n_columns))
        shown = max(1, min(n_columns, room[0] // cell))
        self._left = max(0, min(max(self._left, self.place[1] - shown + 1), self.place[1], n_columns - shown))
        lines = max(1, min(n_rows, height - 2))
        self._top = max(0, min(max(self._top, self.place[0] - lines + 1), self.place[0], n_rows - lines))
        rows, columns = range(self._top, self._top + lines), range(self._left, self._left + shown)
        return GridLayout(label, cell, 1, rows, columns, shown)

    def tiles_for(self, width: int, height: int) -> tuple[int, GridLayout] | None:
        """The first line and the layout of thumbnails: of all heads, or of the selected layer below the signs. None if
        they do not fit."""
        layout, row = self.layout_for(width, height), self.place[0]
        if layout.thumbnail is not None:
            return 1, layout
        top = len(layout.rows) + 3
        size = self._size_in(range(row, row + 1), (width, height - top))
        if size is None:
            return None
        columns = range(len(self.head_table.columns))
        return top, GridLayout(0, *size.tile, range(row, row + 1), columns, size.side_by_side, size)

    def _size_in(self, rows: range, room: tuple[int, int]) -> ThumbnailSize | None:
        if (rows, room) not in self._sizes:
            part = HeadTable(self.head_table.rows[rows.start : rows.stop], self.head_table.columns)
            self._sizes[rows, room] = thumbnail_size(part, room)
        return self._sizes[rows, room]

    @cached_property
    def widest_title(self) -> int:
        """The width of the longest title of a thumbnail."""
        heads = (self.head_table.head_at(*place) for place in self.head_table.places)
        return max(len(f"{head.head} * {_type_name(head)}") for head in heads if head is not None)

    def beneath(self, place: tuple[int, int], step: int) -> tuple[int, int]:
        """The head below or above another: in another layer, or in another line of the same layer."""
        layout = self.layout_for(self.size.width, self.size.height)
        column = place[1] + step * layout.side_by_side
        is_there = layout.thumbnail is not None and self.head_table.head_at(place[0], column) is not None
        return (place[0], column) if is_there else self.head_table.above(place, step)

    def paint(self, width: int, height: int) -> Sequence[Line]:
        """The title, the head numbers, and the layers."""
        n_heads, self._budget = len(self.head_table.places), _CELLS_AT_ONCE
        layout = self.layout_for(width, height)
        title = count_of(n_heads, "head")
        if layout.label:
            are_columns = layout.side_by_side >= len(layout.columns)
            title += f"{' (columns)' * are_columns} in {count_of(len(self.head_table.rows), 'layer')} (rows)"
        for shown, every, word in (
            (layout.rows, self.head_table.rows, "rows"),
            (layout.columns, self.head_table.columns, "columns"),
        ):
            if len(shown) < len(every):
                title += f" · {word} {shown.start}–{shown.stop - 1} of {len(every)}"
        lines: list[Line] = [ruled(title, width, focused=self.has_focus)]
        tiles = self.tiles_for(width, height)
        if layout.thumbnail is None:
            lines += [self._numbers(layout), *(self._signs(row, layout) for row in layout.rows)]
            lines += (
                []
                if tiles is None
                else [ruled(f"layer {self.head_table.rows[self.place[0]].name}", width, focused=False)]
            )
        if tiles is not None:
            for row, columns in tiles[1].bands():
                lines += self._thumbnails(row, columns, tiles[1])
            if self._coming is None and (self._thumbnail is None or self._budget <= 0):
                self._coming = self.set_timer(_PAUSE_S, self._draw_more)
        return lines[:height]

    def _numbers(self, layout: GridLayout) -> Line:
        """The head numbers, not all if columns are narrow."""
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

    def _thumbnails(self, row: int, columns: range, layout: GridLayout) -> list[Line]:
        """A line of thumbnails with titles. The first line has the heading of layer names."""
        size = layout.thumbnail
        assert size is not None, "a layout of small pictures"
        title: list[Segment] = []
        lines: list[list[Segment]] = [[] for _ in range(size.height)]
        gap = size.tile[0] - size.width
        for number, column in enumerate(columns):
            head = self.head_table.head_at(row, column)
            is_cursor = (row, column) == self.place
            if number == 0 and layout.label:
                names = [fitted(self.head_table.rows[row].name, layout.label - 1), *[""] * (size.height - 1)]
                heading = "layer" if row == layout.rows.start else ""
                title.append(segment(f"{heading:<{layout.label}}", DIM))
                for line, name in zip(lines, names, strict=True):
                    line.append(segment(f"{name:>{layout.label - 1}} ", ACCENT))
            title += [*_thumbnail_title(head, size.tile[0] - 1, is_cursor), segment(" ")]
            small = blank(size) if head is None else self._small_of(head, size)
            for line, thumbnail in zip(lines, small, strict=True):
                line += [*thumbnail, segment(" " * gap)]
        return [title, *lines, *[[]] * (size.tile[1] - size.height - 1)]

    def _draw_more(self) -> None:
        """Draws thumbnails in parts after the rest, because importing numpy takes long."""
        self._coming = None
        if self._thumbnail is None:
            with uncollected():
                from mhacli.viewer.picture import thumbnail

                self._thumbnail = thumbnail
        self.repaint()

    def _small_of(self, head: TableHead, size: ThumbnailSize) -> Sequence[Line]:
        """A thumbnail, cached until anything but the cursor changes; blank until it is drawn."""
        if self._thumbnail is None or (picture := self._picture_of(head)) is None:
            return blank(size)
        shown_as = (size, picture.sequence, picture.scale, picture.hides_sinks)
        if shown_as != self._small_as:
            self._small, self._small_as = {}, shown_as
        if head not in self._small:
            if self._budget <= 0:
                return blank(size)
            self._small[head] = self._thumbnail(picture, size.width, size.height, colour=self.colour)
            self._budget -= picture.n_rows * picture.n_columns
        return self._small[head]

    def on_click(self, event: events.Click) -> None:
        """Selects the head under the mouse."""
        top, layout = 2, self.layout_for(self.size.width, self.size.height)
        tiles = self.tiles_for(self.size.width, self.size.height)
        if tiles is not None and event.y >= tiles[0]:
            top, layout = tiles
        bands, line = layout.bands(), (event.y - top) // layout.height
        if not 0 <= line < len(bands) or event.x < layout.label:
            return
        row, columns = bands[line]
        column = columns.start + (event.x - layout.label) // layout.width
        if column in columns and self.head_table.head_at(row, column) is not None:
            self.post_message(self.Moved((row, column), again=(row, column) == self.place))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Selects the next layer."""
        self.post_message(self.Moved(self.beneath(self.place, 1), again=False))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Selects the previous layer."""
        self.post_message(self.Moved(self.beneath(self.place, -1), again=False))


def _thumbnail_title(head: TableHead | None, width: int, is_cursor: bool) -> list[Segment]:
    """The head's number, the sign of its type, and as much of the type's name as fits."""
    if head is None:
        return [segment(" " * width)]
    (sign, style), number = kind_sign(head.statistics), f"{head.head} "
    titles = (f"{sign} {words}" for words in (kind_words(head.statistics), _type_name(head)))
    title = next((title for title in titles if cell_len(number + title) <= width), sign)
    space = segment(" " * (width - cell_len(number + title)))
    if is_cursor:
        return [segment(number + title, CURSOR), space]
    return [segment(number, DIM), segment(title, style), space]


def _type_name(head: TableHead) -> str:
    return "" if head.statistics is None else words_of_type(head.statistics.kind).name


# ---------------------------------------------------------------------------------------------------------- thumbnails


_LEAST, _MOST_TILE, _ROOMY = (8, 3), (64, 32), (12, 8)
"""Columns and lines of a thumbnail: the least, the most, and the least size of a tile for a blank after it."""
_MOST_CELL = 8
"""The most useful columns per cell of a thumbnail."""
_MOST_CELLS = 64_000_000
"""The most cells of all heads for which thumbnails are fast enough."""


@dataclass(frozen=True)
class ThumbnailSize:
    """The columns and lines of a thumbnail, and of its `tile` with title and gaps. `side_by_side` tiles fit on a line."""

    width: int
    height: int
    tile: tuple[int, int]
    side_by_side: int


def thumbnail_size(head_table: HeadTable, room: tuple[int, int]) -> ThumbnailSize | None:
    """The largest tiles with which all heads fit; None if they would be too small, or have too many cells."""
    drawables = [head.drawable for row in head_table.rows for head in row.heads if head is not None]
    if not drawables or any(drawable is None for drawable in drawables) or any(row.instead for row in head_table.rows):
        return None
    facts = [drawable.record.facts for drawable in drawables if drawable is not None]
    if (
        sum(
            f.q_len * f.k_len
            for f, drawable in zip(facts, drawables, strict=True)
            if drawable and "pattern" in drawable.record.arrays
        )
        > _MOST_CELLS
    ):
        return None
    steepest, longest = max(f.q_len / f.k_len for f in facts), max(max(f.q_len, f.k_len) for f in facts)
    n_rows, n_columns = len(head_table.rows), len(head_table.columns)
    lines = range(1, n_columns + 1 if n_rows == 1 else 2)  # several layers are stacked
    sizes = [
        _tiled((room[0] // across, room[1] // (n_rows * n)), across, steepest)
        for n in lines
        if (across := ceil(n_columns / n))
    ]
    fitting = [size for size in sizes if size.width >= _LEAST[0] and size.height >= _LEAST[1]]
    return max(
        fitting,
        key=lambda size: min(size.width, 2 * size.height / steepest, _MOST_CELL * longest),
        default=None,
    )


def _tiled(tile: tuple[int, int], across: int, steepest: float) -> ThumbnailSize:
    """The thumbnail in a tile, no higher than its width times `steepest`, the largest ratio of queries to keys."""
    gap, below = (2 if tile[0] >= _ROOMY[0] else 1), (1 if tile[1] >= _ROOMY[1] else 0)
    width = min(_MOST_TILE[0], tile[0] - gap)
    height = min(_MOST_TILE[1], tile[1] - 1 - below, max(_LEAST[1], ceil(width * steepest / 2)))
    return ThumbnailSize(width, height, (width + gap, height + 1 + below), across)


def blank(size: ThumbnailSize) -> Sequence[list[Segment]]:
    """The lines of a thumbnail that is not drawn yet."""
    return [[segment(" " * size.width)] for _ in range(size.height)]
