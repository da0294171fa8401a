"""The panes of the screens, which functions draw when the screen is painted, and their lines of cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text
from textual.strip import Strip
from textual.widget import Widget

from mhacli.render.base.format import fitted

PLAIN, DIM = Style.null(), Style(dim=True)
ACCENT = Style(color="cyan", bold=True)
CURSOR = Style(reverse=True)
"""The style, never bold, of the cell under the cursor."""
Cell = tuple[str, Style]
Lines = Iterable[Iterable[Cell]]


class Words(Widget):
    """What a function draws for the width of the screen."""

    def __init__(self, draw: Callable[[int], Iterable[RenderableType]], *, id: str) -> None:
        super().__init__(id=id)
        self._draw = draw

    def render(self) -> Group:
        """The words. In a group they keep colours for any terminal; textual's own text has one set of colours."""
        return Group(*self._draw(self.app.size.width))


class Pane(Widget, can_focus=True):
    """The title and the lines that a function draws for a width and a number of lines."""

    def __init__(self, draw: Callable[[int, int], tuple[str, Lines]], *, id: str) -> None:
        super().__init__(id=id)
        self._draw = draw

    def render(self) -> Segments:
        """The lines below the title."""
        width, height = self.size
        title, lines = self._draw(width, max(1, height - 1))
        return segments([[title_line(title, width, is_chosen=self.has_focus)], *lines], width)


def title_line(title: str, width: int, *, is_chosen: bool = False) -> Cell:
    """The line above a pane with its title; heavy if keys act on the pane."""
    words, line = f" {fitted(title, max(0, width - 4))} ", "━" if is_chosen else "─"
    return line + words + line * (width - 1 - cell_len(words)), ACCENT if is_chosen else DIM


def segments(lines: Lines, width: int) -> Segments:
    """Lines of cells, cut or filled to a width."""
    strips = [Strip([Segment(*cell) for cell in line]).adjust_cell_length(width) for line in lines]
    return Segments([segment for strip in strips for segment in (*strip, Segment.line())])


def named(name: str, value: str) -> Text:
    """A value behind its name."""
    return Text.assemble((f"{name} ", "dim"), (value, "bold"))


def at(row: int, column: int) -> Style:
    """The style of what takes the cursor to a place when it is clicked."""
    return Style(meta={"at": (row, column)})


def window(begin: int, size: int, target: int, length: int) -> range:
    """The window of a size within `length`, moved as little as needed to hold `target`."""
    begin = max(min(begin, target), target - size + 1)
    begin = max(0, min(begin, length - size))
    return range(begin, min(length, begin + size))


@lru_cache(maxsize=8)
def wrapped(words: Sequence[str], width: int) -> list[range]:
    """The words of each line, every one behind a sign."""
    used, begins = 0, [0]
    for place, word in enumerate(words):
        size = 1 + min(width - 1, cell_len(word))
        if used and used + size > width:
            begins.append(place)
            used = 0
        used += size
    return [range(*ends) for ends in pairwise([*begins, len(words)])]
