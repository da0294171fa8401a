"""What the screens of the viewer share: styles, a pane of words to choose from, keys, and the screen over heads."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from rich.cells import cell_len
from rich.console import Group
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.screen import Screen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Footer, Static

from mhacli.record.heads import HeadStatistics
from mhacli.render.base.colours import EMPTY, type_sign
from mhacli.render.base.format import fitted
from mhacli.viewer.session import Place, Session

PLAIN, DIM = Style.null(), Style(dim=True)
ACCENT = Style(color="cyan", bold=True)
CURSOR = Style(reverse=True)
"""The style, never bold, of the cell under the cursor."""
Look = Callable[[int], tuple[str, Style, Style]]
"""The sign before an item, its style, and the style of the item."""


class Items(ScrollView, can_focus=True, inherit_bindings=False):
    """Rows of words, with a cursor on one or some of them. `go` chooses another; blank words cannot be chosen."""

    def __init__(self, go: Callable[[int], None], *, id: str) -> None:
        super().__init__(id=id)
        self._go = go
        self._of: object = None
        self.rows: Sequence[tuple[str, Sequence[str]]] = ()
        self.header = ""
        self.cursor = range(0)
        self._look: Look = lambda item: (" ", PLAIN, PLAIN)
        self._labels: list[str] = []
        self._columns: list[int] = []
        self._lines: list[tuple[int, str]] = []

    def fill(self, of: object, rows: Callable[[], Sequence[tuple[str, Sequence[str]]]], header: str = "") -> None:
        """Takes the rows of something else under a header: each is a name and its words."""
        if self._of != of:
            self._of, self.rows, self.header = of, rows(), header
            self._wrap()

    def show(self, cursor: range, look: Look) -> None:
        """Draws the items with a mark on those under the cursor, and scrolls there."""
        is_other, self.cursor, self._look = cursor != self.cursor, cursor, look
        if is_other:
            self._follow()
        self.refresh()

    def on_resize(self) -> None:
        """Wraps the rows for the new size."""
        self._wrap()
        self._follow()

    def _wrap(self) -> None:
        """Places every item: its column, and the first item of each line with the name of the row that begins there."""
        self._labels, self._columns, self._lines = [], [], []
        indent = max((cell_len(name) for name, _ in self.rows), default=0)
        indent += 2 if indent else 0
        width = max(indent + 4, self.scrollable_content_region.width)
        for name, words in self.rows:
            at, shown = width, f"{name:>{indent - 2}}  " if indent else ""
            for word in words:
                label = fitted(word, width - indent - 1)
                if at + 1 + cell_len(label) > width:
                    self._lines.append((len(self._labels), shown))
                    at, shown = indent, " " * indent
                self._labels.append(label)
                self._columns.append(at + 1)
                at += 1 + cell_len(label)
        self.virtual_size = Size(width, len(self._lines) + bool(self.header))
        self.refresh(layout=True)

    def _follow(self) -> None:
        if self.cursor and self._lines and self.size.height:
            above = 1 if self.header else 0
            self.scroll_to_region(Region(0, self._line_of(self.cursor.start), 1, 1 + above), animate=False, force=True)

    def _line_of(self, item: int) -> int:
        return bisect_right(self._lines, item, key=lambda line: line[0]) - 1

    def _items_of(self, line: int) -> range:
        end = self._lines[line + 1][0] if line + 1 < len(self._lines) else len(self._labels)
        return range(self._lines[line][0], end)

    def _at(self, line: int, column: int) -> list[int]:
        """The items of a line that can be chosen, the nearest to a column first."""
        items = [item for item in self._items_of(line) if not self._labels[item].isspace()]
        return sorted(items, key=lambda item: abs(self._columns[item] - column))

    def moved(self, direction: str) -> int:
        """The item in a direction from the cursor, or the one at the cursor."""
        step = -1 if direction in ("left", "up", "pageup", "home", "top") else 1
        item = self.cursor.start if step < 0 else self.cursor.stop - 1
        if direction in ("left", "right"):
            after = range(item + step, -1 if step < 0 else len(self._labels), step)
            return next((other for other in after if not self._labels[other].isspace()), item)
        if direction in ("home", "end"):
            of_line = sorted(self._at(self._line_of(item), 0))
            return of_line[0 if step < 0 else -1]
        page, last = max(1, self.size.height - 2), len(self._lines) - 1
        by = {"up": 1, "down": 1, "pageup": page, "pagedown": page}.get(direction, last)
        target = max(0, min(last, self._line_of(item) + step * by))
        lines = [*range(target, -1 if step < 0 else last + 1, step), *range(target, self._line_of(item), -step)]
        return next((found[0] for line in lines if (found := self._at(line, self._columns[item]))), item)

    def render_line(self, y: int) -> Strip:
        """The header, or a line of items below it."""
        above, width = 1 if self.header else 0, self.size.width
        line = y + self.scroll_offset.y - above
        if above and y == 0:
            return Strip([Segment(self.header, DIM)]).adjust_cell_length(width)
        if not 0 <= line < len(self._lines):
            return Strip.blank(width)
        is_own = bool(self.cursor) and self._line_of(self.cursor.start) == line
        pieces = [Segment(self._lines[line][1], ACCENT if is_own else DIM)]
        for item in self._items_of(line):
            sign, of_sign, style = self._look(item)
            pieces.append(Segment("▸", ACCENT) if item in self.cursor else Segment(sign, of_sign))
            pieces.append(Segment(self._labels[item], style))
        return Strip(pieces).adjust_cell_length(width)

    def on_click(self, event: events.Click) -> None:
        """Chooses the item under the mouse."""
        at, above = event.get_content_offset(self), 1 if self.header else 0
        line = -1 if at is None or at.y < above else at.y + self.scroll_offset.y - above
        if at is not None and 0 <= line < len(self._lines):
            under = [i for i in self._at(line, at.x) if 0 <= at.x - self._columns[i] < cell_len(self._labels[i])]
            if under:
                self._go(under[0])


# ----------------------------------------------------------------------------------------------------------------- keys


def key(names: str, action: str, shown: str = "", words: str = "", short: str = "") -> Binding:
    """Keys for an action: their display, the description in the help, and a word for the last line, empty for keys that only
    the help lists."""
    return Binding(names, action, short, key_display=shown or None, tooltip=words)


ENDS = [
    key("escape,q", "app.back", "q Esc", "go back; on the first screen, quit", "back"),
    key("question_mark", "app.help", "?", "this list", "help"),
    key("Q,ctrl+c", "app.quit", "Q Ctrl-C", "quit, from any screen"),
]
_NO_EFFECTS = "the record has no effects: mha effect … --save makes one that has"
_NO_SINKS = "no head of this record has a sink to take out"

# -------------------------------------------------------------------------------------------------------------- screens


class HeadsScreen(Screen[None]):
    """A screen over the heads of a session, with a message in place of its keys until the next key."""

    ALLOW_SELECT = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *ENDS,
        key("up", "move('up')", "↑ ↓ ← →", "move the cursor; a click does the same", "move"),
        *(key(name, f"move('{name}')") for name in ("down", "left", "right", "pagedown", "end")),
        key("pageup", "move('pageup')", "PgUp PgDn", "a page up or down"),
        key("home", "move('home')", "Home End", "the first or last of the row; with Ctrl, the first or last row"),
        key("ctrl+home", "move('top')"),
        key("ctrl+end", "move('bottom')"),
        key("e", "app.effects", "e", "effects of removed heads or weights, in a record of mha effect", "effects"),
        key("e", f"say('{_NO_EFFECTS}')"),
        key("s", "scale", "s", "how shades follow attention weights: linear or log", "scale"),
        key("x", "sinks", "x", "remove sinks and renormalise the rest of each row, or put them back", "sinks"),
        key("x", f"say('{_NO_SINKS}')"),
        key("w", "app.walk", "w", "the walkthrough: every tensor with its axes, formula, meaning and cost", "walk"),
        key("i", "app.origin", "i", "where the numbers come from: command, versions, seed, self-check"),
        key("full_stop", "sequence(1)", ", .", "the previous or next sequence"),
        key("comma", "sequence(-1)"),
    ]

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.top_line, self.note = Static(id="top"), Static(id="note", markup=False)
        self.footer = Footer(compact=True)

    @abstractmethod
    def draw(self) -> None:
        """Redraws the screen."""

    def on_resize(self) -> None:
        """Redraws for the new size."""
        self.call_after_refresh(self.draw)

    def on_screen_resume(self) -> None:
        """Redraws for what was chosen on another screen."""
        self.call_after_refresh(self.draw)

    def action_say(self, message: str) -> None:
        """Shows a message in place of the keys until the next key."""
        self.note.update(message)
        self.note.display, self.footer.display = bool(message), not message

    def on_key(self) -> None:
        """Clears the message."""
        if self.note.display:
            self.action_say("")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether the record has sinks to take out."""
        return self.session.has_sinks if action == "sinks" else True

    def action_sequence(self, step: int) -> None:
        """Shows another sequence, around the ends."""
        n_sequences = len(self.session.record.sequences)
        self.session.sequence = (self.session.sequence + step) % n_sequences
        self.action_say("" if n_sequences > 1 else "the record has no other sequence")
        self.draw()

    def action_scale(self) -> None:
        """Switches to the other scale."""
        is_linear = self.session.scale_of(self.session.head) == "linear"
        self.session.scale = "log" if is_linear else "linear"
        self.draw()

    def action_sinks(self) -> None:
        """Hides or shows sinks."""
        self.session.hides_sinks = not self.session.hides_sinks
        self.draw()

    def open_head(self, place: Place) -> None:
        """Opens the screen of a head, or says why it cannot be drawn."""
        from mhacli.viewer.head import HeadScreen

        if self.session.picture(self.session.heads[place]) is None:
            self.action_say(self.session.why_nothing())
        else:
            self.session.place = place
            self.app.push_screen(HeadScreen(self.session))


def doubts(session: Session) -> Iterator[tuple[str, str]]:
    """Why the numbers of the head under the cursor may be wrong."""
    head = session.head
    if not head.record.self_check.ok:
        yield "  self-check FAILED: press i", "bold yellow"
    if session.contradicts_itself():
        yield "  the record contradicts itself: press i", "bold yellow"
    if head.layer is not None and not head.layer.verified:
        yield "  not verified", "bold yellow"


def entitle(pane: Widget, words: str) -> None:
    """Gives a pane its title. Words are no markup."""
    pane.border_title = Text(f" {words} ")


def kind_sign(statistics: HeadStatistics | None) -> tuple[str, Style]:
    """The sign of a head's type in its colour; a question mark without statistics."""
    return ("?", EMPTY) if statistics is None else type_sign(statistics.kind)


def one_line(*parts: tuple[str, str | Style]) -> Group:
    """Styled words on one line, in the colours of any terminal: textual's own text has one set of colours."""
    return Group(Text.assemble(*parts, no_wrap=True, overflow="ellipsis"))
