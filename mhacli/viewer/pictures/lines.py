"""Lines of the viewer: pieces of text in their styles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style

from mhacli.render.base.format import fitted

Line = Sequence[Segment]
PLAIN, DIM, BOLD = Style.null(), Style(dim=True), Style(bold=True)
ACCENT, WARNING = Style(color="cyan", bold=True), Style(color="yellow", bold=True)
CURSOR, BROKEN = Style(reverse=True), Style(color="yellow")
"""Of cells, which are never bold: the one that is chosen, and those that are no numbers."""


def segment(text: str, style: Style = PLAIN) -> Segment:
    """A piece of a line. `text` must be harmless already."""
    return Segment(text, style)


def segments(parts: Iterable[tuple[str, Style]]) -> Line:
    """A line of pieces in their styles."""
    return [Segment(text, style) for text, style in parts]


def ruled(title: str, width: int, *, focused: bool) -> Line:
    """The line above a part of the screen: its title, and a rule to the end; the part that keys go to stands out."""
    shown = fitted(title, max(0, width - 3))
    rule = "─" * max(0, width - cell_len(shown) - 3)
    return segments(
        [
            ("▸ " if focused else "─ ", ACCENT if focused else DIM),
            (shown, ACCENT if focused else BOLD),
            (f" {rule}", DIM),
        ]
    )
