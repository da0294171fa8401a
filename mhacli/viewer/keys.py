"""The keys of all screens, and the lines of the help about them. keys.toml has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct, toml
from textual.binding import Binding, BindingType


class Line(Struct, frozen=True, forbid_unknown_fields=True):
    """Keys with their actions, a line of the help if it has a `tip`."""

    actions: dict[str, str]
    shown: str = ""
    tip: str = ""
    short: str = ""

    def bindings(self) -> Iterator[BindingType]:
        """The keys. The last line of the screen has the first one of a line of the help."""
        (names, action), *others = self.actions.items()
        yield Binding(
            names, action, self.short, bool(self.tip), key_display=self.shown, tooltip=self.tip
        )
        for names, action in others:
            yield Binding(names, action, show=False)


LINES = toml.decode(Path(__file__).with_name("keys.toml").read_bytes(), type=dict[str, list[Line]])
"""By screen."""
_ENDS = LINES.pop("ends")
for _screen in ("everywhere", "a text to read"):
    LINES[_screen][:0] = _ENDS
KEYS = {
    screen: [binding for line in lines for binding in line.bindings()]
    for screen, lines in LINES.items()
}
