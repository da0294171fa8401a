"""Lines of the viewer: styled segments, names of heads, and widgets that paint lines."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Size
from textual.strip import Strip
from textual.widget import Widget

from mhacli.record.heads import HeadStatistics
from mhacli.render.base.colours import EMPTY, type_sign
from mhacli.render.base.format import fitted, type_text
from mhacli.viewer.head_table import TableHead

Line = Sequence[Segment]
PLAIN, DIM, BOLD = Style.null(), Style(dim=True), Style(bold=True)
ACCENT, WARNING = Style(color="cyan", bold=True), Style(color="yellow", bold=True)
CURSOR, BROKEN = Style(reverse=True), Style(color="yellow")
"""The styles, never bold, of the cell under the cursor and of NaN cells."""

RULE_WIDTH = 3
"""The width of a rule without its title."""


def segment(text: str, style: Style = PLAIN) -> Segment:
    """A segment of a line. `text` must be escaped."""
    return Segment(text, style)


def segments(parts: Iterable[tuple[str, Style]]) -> Line:
    """A line of styled segments."""
    return [Segment(text, style) for text, style in parts]


def ruled(title: str, width: int, *, focused: bool) -> Line:
    """The title line of a pane with a rule to the end, highlighted if focused."""
    text = fitted(title, max(0, width - RULE_WIDTH))
    rule = "─" * max(0, width - cell_len(text) - RULE_WIDTH)
    return segments(
        [
            ("▸ " if focused else "─ ", ACCENT if focused else DIM),
            (text, ACCENT if focused else BOLD),
            (f" {rule}", DIM),
        ]
    )


# --------------------------------------------------------------------------------------------------------------- heads


StyledText = tuple[str, Style]


def kind_sign(statistics: HeadStatistics | None) -> StyledText:
    """The sign of a head's type in its colour; a question mark without statistics."""
    return ("?", EMPTY) if statistics is None else type_sign(statistics.kind)


def kind_words(statistics: HeadStatistics | None) -> str:
    """The type of a head with its excess."""
    return "no statistics" if statistics is None else type_text(statistics)


def heading(head: TableHead, sequence: int, *, failed: bool, doubtful: bool = False) -> Line:
    """The first line: the head, its sequence and its type."""
    parts: list[StyledText] = [
        (head.label, ACCENT),
        ("  ", PLAIN),
        kind_sign(head.statistics),
        (f" {kind_words(head.statistics)}", PLAIN),
    ]
    n_sequences = len(head.record.sequences)
    if n_sequences > 1:
        parts.append((f"  sequence {sequence}", BOLD))
        parts.append((f" of 0–{n_sequences - 1}", DIM))
    if failed:
        parts.append(("  self-check FAILED: press i", WARNING))
    if doubtful:
        parts.append(("  the record contradicts itself: press i", WARNING))
    if head.layer is not None and not head.layer.verified:
        parts.append(("  not verified", WARNING))
    return segments(parts)


def flowed(parts: Sequence[Sequence[StyledText]], width: int, between: str = " · ") -> list[Line]:
    """The parts in lines that break between them."""
    lines: list[list[StyledText]] = [[]]
    used = 0
    for part in parts:
        size = sum(cell_len(text) for text, _ in part)
        if lines[-1] and used + len(between) + size > width:
            lines.append([])
            used = 0
        if lines[-1]:
            lines[-1].append((between, DIM))
            used += len(between)
        lines[-1] += part
        used += size
    return [segments(line) for line in lines]


# ------------------------------------------------------------------------------------------------------------- widgets


class Pane(Widget, can_focus=False):
    """A part of a screen that paints lines. They are cached until `repaint`."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self._lines: Sequence[Line] | None = None
        self._painted_for = Size(0, 0)

    @abstractmethod
    def paint(self, width: int, height: int) -> Sequence[Line]:
        """The lines from the top, at most `height`; each is cut at `width`."""

    def repaint(self) -> None:
        """Discards the cached lines."""
        self._lines = None
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """One line for the screen."""
        size = self.size
        if self._lines is None or size != self._painted_for:
            self._lines, self._painted_for = self.paint(size.width, size.height), size
        line = self._lines[y] if y < len(self._lines) else ()
        return Strip(line).adjust_cell_length(size.width)

    def on_focus(self) -> None:
        """Shows the focus."""
        self.repaint()

    def on_blur(self) -> None:
        """Shows the loss of focus."""
        self.repaint()


class ScrolledPane(Pane, can_focus=True):
    """A pane that shows lines from `top` on. The wheel scrolls by `wheel_lines`."""

    wheel_lines = 1

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.top = 0

    def scroll_lines(self, step: int) -> None:
        """Scrolls by `step` lines."""
        self.top += step
        self.repaint()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scrolls down."""
        self.scroll_lines(self.wheel_lines)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Scrolls up."""
        self.scroll_lines(-self.wheel_lines)


class Lines(Pane):
    """A few lines of text set by the screen."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self._draw: Callable[[int], Sequence[Line]] = lambda width: ()

    def show(self, draw: Callable[[int], Sequence[Line]]) -> None:
        """Shows the lines that `draw` returns for the available width."""
        self._draw = draw
        self.repaint()

    def paint(self, width: int, height: int) -> Sequence[Line]:
        """The lines that fit."""
        return self._draw(width)[:height]
