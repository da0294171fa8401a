"""What all parts of the viewer's screens are: a widget that paints its own lines, and knows which are on the screen."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from textual.geometry import Size
from textual.strip import Strip
from textual.widget import Widget

from mhacli.viewer.pictures.lines import Line


class Pane(Widget, can_focus=False):
    """A part of a screen that paints lines; they are painted once, until `repaint` says that they are stale."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self._lines: Sequence[Line] | None = None
        self._painted_for = Size(0, 0)

    @abstractmethod
    def paint(self, width: int, height: int) -> Sequence[Line]:
        """The lines from the top, at most `height` of them; each is cut at `width`."""

    def repaint(self) -> None:
        """Paints anew, soon."""
        self._lines = None
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """A line for the screen."""
        size = self.size
        if self._lines is None or size != self._painted_for:
            self._lines, self._painted_for = self.paint(size.width, size.height), size
        line = self._lines[y] if y < len(self._lines) else ()
        return Strip(line).adjust_cell_length(size.width)

    def on_focus(self) -> None:
        """Shows that keys go here."""
        self.repaint()

    def on_blur(self) -> None:
        """Shows that they no longer do."""
        self.repaint()


class Lines(Pane):
    """A few lines of text that the screen sets."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self._tell: Callable[[int], Sequence[Line]] = lambda width: ()

    def show(self, tell: Callable[[int], Sequence[Line]]) -> None:
        """Shows other lines: `tell` is asked for them when they are painted, and how wide they may be is known."""
        self._tell = tell
        self.repaint()

    def paint(self, width: int, height: int) -> Sequence[Line]:
        """The lines, as many as there is room for."""
        return self._tell(width)[:height]
