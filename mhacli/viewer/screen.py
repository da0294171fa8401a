"""The base classes of screens, with the table of keys and the line that names the main ones."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from rich.cells import cell_len
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.screen import Screen

from mhacli.viewer.lines import ACCENT, DIM, WARNING, Line, segments
from mhacli.viewer.session import Session


@dataclass(frozen=True)
class KeyBinding:
    """Keys for one action: Textual's names, the action, their display, and a description.

    `short` is the word in a screen's last line, empty for keys that only the help lists; `last` is their display there,
    if different.
    """

    names: str
    action: str
    shown: str
    words: str
    short: str = ""
    last: str = ""


EFFECTS = "effects"
"""The word of the key for records with effects."""
_CURSOR = (
    KeyBinding("up", "move('up')", "↑ ↓ ← →", "move the cursor; in a text, from token to token", "move", "↑↓←→"),
    KeyBinding("down", "move('down')", "", ""),
    KeyBinding("left", "move('left')", "", ""),
    KeyBinding("right", "move('right')", "", ""),
    KeyBinding("pageup", "move('pageup')", "PgUp PgDn", "a page up or down; with Shift, to the left or right"),
    KeyBinding("pagedown", "move('pagedown')", "", ""),
    KeyBinding("shift+pageup", "move('pageleft')", "", ""),
    KeyBinding("shift+pagedown", "move('pageright')", "", ""),
    KeyBinding(
        "home", "move('home')", "Home End", "the first or last key of the row; with Ctrl, the first or last query"
    ),
    KeyBinding("end", "move('end')", "", ""),
    KeyBinding("ctrl+home", "move('top')", "", ""),
    KeyBinding("ctrl+end", "move('bottom')", "", ""),
)
_SHARED = (
    KeyBinding("e", "app.effects", "e", "effects of removed heads or weights, in a record of mha effect", EFFECTS),
    KeyBinding("comma", "sequence(-1)", ", .", "the previous or next sequence"),
    KeyBinding("full_stop", "sequence(1)", "", ""),
    KeyBinding("s", "scale", "s", "how shades follow attention weights: linear or log", "scale"),
    KeyBinding("x", "sinks", "x", "remove sinks and renormalise the rest of each row, or put them back", "sinks"),
    KeyBinding("w", "app.walk", "w", "the walkthrough: every tensor with its axes, formula, meaning and cost", "walk"),
    KeyBinding("i", "app.origin", "i", "where the numbers come from: command, versions, seed, self-check"),
    KeyBinding("question_mark", "app.help", "?", "this list", "help"),
    KeyBinding("escape,q", "app.back", "q Esc", "go back; on the first screen, quit", "back", "q"),
    KeyBinding("Q,ctrl+c", "app.quit", "Q Ctrl-C", "quit, from any screen"),
)
GRID_KEYS = (
    KeyBinding("up", "move('up')", "↑ ↓ ← →", "move from head to head; a click does the same", "move", "↑↓←→"),
    KeyBinding("enter,ctrl+j", "open", "Enter", "open the head; so does a click on the head under the cursor", "open"),
)
OVERVIEW_KEYS = (*GRID_KEYS, *_CURSOR[1:], *_SHARED)
HEAD_KEYS = (
    *_CURSOR,
    KeyBinding("tab", "app.focus_next", "Tab", "which part the arrows move in: matrix, list, keys, queries", "part"),
    KeyBinding("shift+tab", "app.focus_previous", "", ""),
    KeyBinding("h,right_square_bracket", "head(1)", "h  ]", "the next head", "head", "[ ]"),
    KeyBinding("H,left_square_bracket", "head(-1)", "H  [", "the previous head"),
    KeyBinding("l,right_curly_bracket", "layer(1)", "l  }", "the same head of the next layer", "layer", "{ }"),
    KeyBinding("L,left_curly_bracket", "layer(-1)", "L  {", "the same head of the previous layer"),
    KeyBinding("plus,equals_sign", "zoom(1)", "+ -", "larger or smaller cells; 0 so that all fit", "zoom"),
    KeyBinding("minus", "zoom(-1)", "", ""),
    KeyBinding("0", "zoom(0)", "", ""),
    KeyBinding("slash", "jump", "/", "jump to a token by typing it, or to a place by its number", "find"),
    KeyBinding("n", "match(1)", "n N", "the next or previous match"),
    KeyBinding("N", "match(-1)", "", ""),
    KeyBinding("t", "most(1)", "t T", "more or fewer of the strongest keys"),
    KeyBinding("T", "most(-1)", "", ""),
    KeyBinding("y", "copy", "y", "copy the row as JSON to the terminal's clipboard (OSC 52)", "copy"),
    *_SHARED,
)
EFFECT_KEYS = (
    KeyBinding("up", "move('up')", "↑ ↓ ← →", "move from removal to removal; a click does the same", "move", "↑↓←→"),
    *_CURSOR[1:4],
    KeyBinding(
        "home",
        "move('home')",
        "Home End",
        "the removal with the largest change, or with the smallest",
        "largest",
        "Home",
    ),
    KeyBinding("end", "move('end')", "", ""),
    KeyBinding("enter,ctrl+j", "open", "Enter", "open the head that was removed", "open"),
    *_SHARED[-4:],
)
TEXT_KEYS = (
    KeyBinding("up", "read(-1)", "↑ ↓", "a line up or down", "scroll"),
    KeyBinding("down", "read(1)", "", ""),
    KeyBinding("pageup,b", "page(-1)", "PgUp PgDn", "a page up or down"),
    KeyBinding("pagedown,space", "page(1)", "", ""),
    KeyBinding("home,g", "edge(0)", "Home End", "the beginning or the end"),
    KeyBinding("end,G", "edge(1)", "", ""),
    _SHARED[-2],
    _SHARED[-1],
)


def bindings(keys: tuple[KeyBinding, ...]) -> list[BindingType]:
    """The keys as Textual's bindings."""
    return [Binding(key.names, key.action, key.words, show=False) for key in keys]


_USES = (
    *("help", "back", "move", "scroll", "open", EFFECTS, "largest", "part", "head"),
    *("zoom", "sinks", "scale", "layer", "find", "walk", "copy"),
)
"""The words of the last line, the most useful first."""


def last_line(keys: tuple[KeyBinding, ...], *, without: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """The keys of a screen's last line, with a word for each."""
    return [(key.last or key.shown, key.short) for key in keys if key.short and key.short not in without]


# ------------------------------------------------------------------------------------------------------------- screens


class ViewerScreen(Screen[None]):
    """A screen of the viewer."""

    ALLOW_SELECT = False

    def _screen_resized(self, size: Size) -> None:
        """Takes the terminal's current size. Otherwise Textual alternates forever between two sizes in quick
        succession."""
        super()._screen_resized(self.app.size)

    def take(self, event: events.Key) -> bool:
        """Handles a key that no pane took; False if it means nothing here."""
        return False


class HeadsScreen(ViewerScreen):
    """A screen that draws the session's heads, with a message in its last line until the next key."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self._message = ""

    @abstractmethod
    def draw(self) -> None:
        """Redraws the screen."""

    def enter(self) -> None:
        """Draws the session's current state."""
        self.draw()

    def say(self, message: str) -> None:
        """Shows a message in place of the keys until the next key."""
        self._message = message
        self.draw()

    def idle(self) -> tuple[str, ...]:
        """The words of keys that do nothing for this record."""
        has_effects = self.session.record.effect is not None
        return (EFFECTS,) * (not has_effects) + ("sinks",) * (not self.session.has_sinks)

    def on_key(self) -> None:
        """Clears the message."""
        self._message = ""

    def action_sequence(self, step: int) -> None:
        """Shows another sequence."""
        self.say("" if self.session.to_sequence(step) else "the record has no other sequence")
        self.enter()

    def action_scale(self) -> None:
        """Switches to another scale."""
        self.session.to_next_scale()
        self.enter()

    def action_sinks(self) -> None:
        """Hides or shows sinks."""
        self.say("" if self.session.toggle_sinks() else "no head of this record has a sink to take out")
        self.enter()


def keys_line(keys: tuple[KeyBinding, ...], width: int, *, message: str = "", without: tuple[str, ...] = ()) -> Line:
    """The last line of a screen: a message, or the most useful keys that fit, beginning with `?`."""
    if message:
        return segments([(message, WARNING)])
    shown = last_line(keys, without=without)
    while len(shown) > 1 and sum(cell_len(f"{key} {word}") + 2 for key, word in shown) - 2 > width:
        shown.remove(max(shown, key=lambda part: _USES.index(part[1])))
    return segments([piece for key, word in shown for piece in ((key, ACCENT), (f" {word}  ", DIM))])
