"""What all screens of the viewer share: their size, the keys that no part takes, and the last line."""

from __future__ import annotations

from rich.cells import cell_len
from textual import events
from textual.geometry import Size
from textual.screen import Screen

from mhacli.viewer.pictures.lines import ACCENT, DIM, WARNING, Line, segments
from mhacli.viewer.screens.keys import Key, last_line


class ViewerScreen(Screen[None]):
    """A screen of the viewer."""

    ALLOW_SELECT = False

    def _screen_resized(self, size: Size) -> None:
        """Lies as large as the terminal is by now. Of two sizes in short order Textual answers each with the other, for ever."""
        super()._screen_resized(self.app.size)

    def take(self, event: events.Key) -> bool:
        """Takes a key that no part of the screen took; False where it means nothing here."""
        return False


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
