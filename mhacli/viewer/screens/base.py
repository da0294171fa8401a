"""What all screens of the viewer share: the last line, a message, and the way to what is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rich.cells import cell_len
from textual import events
from textual.geometry import Size
from textual.screen import Screen

from mhacli.viewer.pictures.lines import ACCENT, DIM, WARNING, Line, segments
from mhacli.viewer.screens.keys import Key, last_line

if TYPE_CHECKING:
    from mhacli.viewer.app import Viewer


class ViewerScreen(Screen[None]):
    """A screen of the viewer."""

    ALLOW_SELECT = False

    def _screen_resized(self, size: Size) -> None:
        """Lies as large as the terminal is by now. Of two sizes in short order Textual answers each with the other, for ever."""
        super()._screen_resized(self.app.size)

    @property
    def viewer(self) -> Viewer:
        """The app, by its own type."""
        return cast("Viewer", self.app)

    def take(self, event: events.Key) -> bool:
        """Takes a key that no part of the screen took; False where it means nothing here."""
        return False

    def action_back(self) -> None:
        """Closes this screen, the first one with the app."""
        self.viewer.back()

    def action_quit(self) -> None:
        """Ends the app."""
        self.viewer.leave()

    def action_help(self) -> None:
        """All keys."""
        self.viewer.show_help()

    def action_walk(self) -> None:
        """The walkthrough."""
        self.viewer.show_walk()

    def action_origin(self) -> None:
        """Where the numbers come from."""
        self.viewer.show_origin()


def keys_line(keys: tuple[Key, ...], width: int, *, message: str = "", without: tuple[str, ...] = ()) -> Line:
    """The last line of a screen: a message where there is one, else the main keys, as many as fit, `?` among them."""
    if message:
        return segments([(message, WARNING)])
    shown = last_line(keys, without=without)
    parts: list[tuple[str, str]] = []
    while shown and sum(cell_len(f"{key} {word}") + 2 for key, word in shown) > width:
        spare = next((i for i in range(len(shown) - 1, -1, -1) if shown[i][1] not in ("help", "back")), 0)
        shown.pop(spare)
    for key, word in shown:
        parts.append((key, word))
    return segments([piece for key, word in parts for piece in ((key, ACCENT), (f" {word}  ", DIM))])
