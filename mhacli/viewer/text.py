"""Text screens: the walkthrough, the provenance, and the keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType

from mhacli.record.record import Record
from mhacli.render.base.format import provenance
from mhacli.render.base.options import Screen as Paper
from mhacli.viewer.lines import Line, Lines, ScrolledPane, ruled
from mhacli.viewer.screen import EFFECT_KEYS, GRID_KEYS, HEAD_KEYS, TEXT_KEYS, ViewerScreen, bindings, keys_line

PageContent = Callable[[int], Sequence[RenderableType]]
"""The lines of a page at a width."""


class Page(ScrolledPane):
    """A long text that scrolls."""

    wheel_lines = 3

    def __init__(self, title: str, draw: PageContent) -> None:
        super().__init__(id="page")
        self.title, self._draw = title, draw
        self._whole: tuple[int, list[Line]] = (0, [])

    def whole(self, width: int) -> list[Line]:
        """All lines, drawn once per width."""
        if self._whole[0] != width:
            self._whole = width, rendered_lines(self._draw(width), width)
        return self._whole[1]

    def paint(self, width: int, height: int) -> Sequence[Line]:
        """The title and the visible lines."""
        lines, room = self.whole(width), max(1, height - 1)
        self.top = max(0, min(self.top, len(lines) - room))
        shown = lines[self.top : self.top + room]
        title = self.title
        if len(lines) > room:
            title += f" · lines {self.top + 1}–{self.top + len(shown)} of {len(lines)}"
        return [ruled(title, width, focused=True), *shown]


class TextScreen(ViewerScreen):
    """A screen with one page."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(TEXT_KEYS)

    def __init__(self, title: str, draw: PageContent) -> None:
        super().__init__()
        self._page = Page(title, draw)
        self._last = Lines(id="last")

    def compose(self) -> ComposeResult:
        """The page, with its keys below."""
        yield self._page
        yield self._last

    def on_mount(self) -> None:
        """Focuses the page, and shows the keys that fit."""
        self._page.focus()
        self._last.show(lambda width: [keys_line(TEXT_KEYS, width)])

    def action_read(self, step: int) -> None:
        """Scrolls by some lines."""
        self._page.scroll_lines(step)

    def action_page(self, step: int) -> None:
        """Scrolls by a screenful."""
        self._page.scroll_lines(step * max(1, self._page.size.height - 2))

    def action_edge(self, end: int) -> None:
        """Goes to the beginning or the end."""
        self._page.scroll_lines((1 if end else -1) * len(self._page.whole(self._page.size.width)))


def rendered_lines(blocks: Sequence[RenderableType], width: int) -> list[Line]:
    """The lines that rich renders. No markup is parsed from any text."""
    console = Console(
        width=width, markup=False, emoji=False, highlight=False, legacy_windows=False, force_terminal=True
    )
    options = console.options.update(width=width, height=None)
    return [line for block in blocks for line in console.render_lines(block, options, pad=False)]


def walk_page(record: Record, *, colour: bool) -> PageContent:
    """The walkthrough of a record; for decoding its steps."""

    def draw(width: int) -> Sequence[RenderableType]:
        paper = Paper(width, colour)
        if record.decoding is not None:
            from mhacli.render.base.options import ViewOptions
            from mhacli.render.run.decode import decode_view

            return [decode_view(record, ViewOptions(everything=True), paper)]
        from mhacli.render.run.trace import closing, header, step_blocks

        if not record.trace:
            shows = "mha trace TEXT" if record.model is None else "mha trace TEXT --model DIR --layer N"
            return [*header(record, paper), Text(f"\nThis record holds no steps. {shows} shows those of a layer.")]
        return [*step_blocks(record, paper), closing(record, paper)]

    return draw


def origin_page(record: Record, picture_facts: Sequence[tuple[str, str]]) -> PageContent:
    """The provenance of the record, and the settings of the picture: its scale, and what was hidden."""

    def draw(width: int) -> Sequence[RenderableType]:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for word, line in (*provenance(record), *picture_facts):
            table.add_row(Text(word), Text(line))
        return [table]

    return draw


_EXPLAINED = (
    (
        "the mouse",
        "A click chooses a head, a cell, a token or a key of the list; the wheel scrolls, with Shift sideways.",
    ),
    (
        "the matrix",
        "A row is a query, a column a key, a cell the attention weight between them. If not all cells fit, each cell stands for "
        "a block: the attention that its queries give, on average, to all its keys.",
    ),
    (
        "the texts and the list",
        "Keys are shaded by the weight that the cursor's query gives them, queries by the weight that they give to the "
        "cursor's key, each up to the largest. The length of a bar is a key's weight relative to the strongest key's.",
    ),
)


def help_page() -> PageContent:
    """All keys, and the use of the mouse."""

    def draw(width: int) -> Sequence[RenderableType]:
        blocks: list[RenderableType] = []
        for title, keys in (
            ("a head", HEAD_KEYS),
            ("all heads", GRID_KEYS),
            ("effects", EFFECT_KEYS[:-4]),
            ("a text to read", TEXT_KEYS[:-2]),
        ):
            table = Table(box=None, padding=(0, 2, 0, 1), pad_edge=True, show_header=False)
            table.add_column(style="bold cyan", no_wrap=True, width=10)
            table.add_column(overflow="fold")
            for key in keys:
                if key.shown:
                    table.add_row(Text(key.shown), Text(key.words))
            blocks += [Text(title, style="bold"), table, Text("")]
        for title, words in _EXPLAINED:
            blocks += [Text(title, style="bold"), Padding(Text(words), (0, 0, 1, 1))]
        return blocks

    return draw
