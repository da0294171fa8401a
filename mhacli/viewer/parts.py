"""What the screens of the viewer share: styles, a pane of tokens and one of cells, keys, and the screen over heads."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
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
from textual.widgets import DataTable, Footer, Static

from mhacli.record.heads import HeadStatistics
from mhacli.render.base.colours import EMPTY, type_sign
from mhacli.render.base.format import fitted, token_text
from mhacli.text.tokens import TokenSequence
from mhacli.viewer.session import Place, Session

PLAIN, DIM = Style.null(), Style(dim=True)
ACCENT = Style(color="cyan", bold=True)
CURSOR = Style(reverse=True)
"""The style, never bold, of the cell under the cursor."""


class Tokens(ScrollView, can_focus=True, inherit_bindings=False):
    """The tokens of a text in lines, with a cursor from one to another. `go` chooses another."""

    def __init__(self, go: Callable[[int], None], *, id: str) -> None:
        super().__init__(id=id)
        self._go = go
        self._text: TokenSequence | None = None
        self._words: list[str] = []
        self._lines: list[range] = []
        self._cursor = 0, 0
        self._look: Callable[[int], tuple[str, Style]] = lambda token: (" ", PLAIN)

    def show(self, text: TokenSequence, cursor: tuple[int, int], look: Callable[[int], tuple[str, Style]]) -> None:
        """Draws a text, each token with the sign before it and its style, and scrolls to those under the cursor."""
        is_other, self._text, self._cursor, self._look = text is not self._text, text, cursor, look
        if is_other:
            self.on_resize()
        line = bisect_right(self._lines, cursor[0], key=lambda line: line.start) - 1
        self.scroll_to_region(Region(0, line, 1, 1), animate=False, force=True)
        self.refresh()

    def on_resize(self) -> None:
        """Breaks the text into lines of the new width."""
        width, used, begins = max(4, self.scrollable_content_region.width), 0, [0]
        if self._text is None:
            return
        self._words = [fitted(token_text(self._text, place), width - 1) for place in range(len(self._text.tokens))]
        for place, token in enumerate(self._words):
            if used and used + 1 + cell_len(token) > width:
                begins.append(place)
                used = 0
            used += 1 + cell_len(token)
        self._lines = [range(*ends) for ends in pairwise([*begins, len(self._words)])]
        self.virtual_size = Size(width, len(self._lines))

    def beside(self, step: int) -> int:
        """The token before or behind the cursor, if there is one."""
        first, last = self._cursor
        return max(0, first - 1) if step < 0 else min(len(self._words) - 1, last + 1)

    def render_line(self, y: int) -> Strip:
        """A line of tokens, each behind its sign."""
        line, pieces = y + self.scroll_offset.y, list[Segment]()
        for place in self._lines[line] if line < len(self._lines) else ():
            sign, style = self._look(place)
            pieces.append(Segment("▸", ACCENT) if self._cursor[0] <= place <= self._cursor[1] else Segment(sign))
            pieces.append(Segment(self._words[place], style + Style(meta={"place": place})))
        return Strip(pieces).adjust_cell_length(self.size.width)

    def on_click(self, event: events.Click) -> None:
        """Chooses the token under the mouse."""
        if "place" in event.style.meta:
            self._go(event.style.meta["place"])


class Cells(DataTable[Text], inherit_bindings=False):
    """Rows of cells with a cursor, which the keys of a screen keep off empty cells."""

    def fill(
        self, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[Text]]], width: int | None = None
    ) -> None:
        """Takes rows, each with its name and cells, under headings."""
        for heading in columns:
            self.add_column(heading, width=width)
        label = max(cell_len(name) for name, _ in rows)
        for name, cells in rows:
            missing = [Text()] * (len(columns) - len(cells))
            self.add_row(*cells, *missing, label=Text(f" {name:>{label}}  ") if label else None)

    def move(self, direction: str) -> None:
        """Moves the cursor by an action of the table to the next cell that is not empty, or not at all."""
        begin, before = self.cursor_coordinate, None
        while before != self.cursor_coordinate:
            before = self.cursor_coordinate
            getattr(self, f"action_{direction}")()
            if self.get_cell_at(self.cursor_coordinate).plain.strip():
                return
        self.move_cursor(row=begin.row, column=begin.column)


# ----------------------------------------------------------------------------------------------------------------- keys


def key(names: str, action: str, shown: str = "", words: str = "", short: str = "") -> Binding:
    """Keys for an action: their display, the description in the help, and a word for the last line, empty for keys that only
    the help lists."""
    return Binding(names, action, short, key_display=shown or None, tooltip=words)


ENDS = [
    key("escape,q", "app.back", "q Esc", "go back; on the first screen, quit", "back"),
    key("question_mark", "app.read('help')", "?", "this list", "help"),
    key("Q,ctrl+c", "app.quit", "Q Ctrl-C", "quit, from any screen"),
]


# -------------------------------------------------------------------------------------------------------------- screens


class HeadsScreen(Screen[None]):
    """A screen over the heads of a session, with a message in place of its keys until the next key."""

    ALLOW_SELECT = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *ENDS,
        key("up", "move('cursor_up')", "↑ ↓ ← →", "move the cursor; a click does the same", "move"),
        key("down", "move('cursor_down')"),
        key("left", "move('cursor_left')"),
        key("right", "move('cursor_right')"),
        key("pageup", "move('page_up')", "PgUp PgDn", "a page up or down"),
        key("pagedown", "move('page_down')"),
        key(
            "home",
            "move('scroll_home')",
            "Home End",
            "the first or last of the row; with Ctrl, the first or last row",
        ),
        key("end", "move('scroll_end')"),
        key("ctrl+home", "move('scroll_top')"),
        key("ctrl+end", "move('scroll_bottom')"),
        key("e", "effects", "e", "effects of removed heads or weights, in a record of mha effect", "effects"),
        key("e", "say('the record has no effects: mha effect … --save makes one that has')"),
        key("s", "scale", "s", "how shades follow attention weights: linear or log", "scale"),
        key("x", "sinks", "x", "remove sinks and renormalise the rest of each row, or put them back", "sinks"),
        key(
            "w",
            "app.read('walk')",
            "w",
            "the walkthrough: every tensor with its axes, formula, meaning and cost",
            "walk",
        ),
        key("i", "app.read('origin')", "i", "where the numbers come from: command, versions, seed, self-check"),
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
        """Whether the record has effects to show."""
        return action != "effects" or self.session.record.effect is not None

    def action_effects(self) -> None:
        """Opens the effects of removals."""
        from mhacli.viewer.effects import EffectsScreen

        self.app.push_screen(EffectsScreen(self.session))

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
        self.session.hides_sinks = self.session.has_sinks and not self.session.hides_sinks
        self.action_say("" if self.session.has_sinks else "no head of this record has a sink to take out")
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
