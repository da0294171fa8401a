"""The screen over heads, from which the others are made; and the first screen: pictures of the heads of a layer, the signs of
all heads, and the numbers of the head under the cursor."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segments
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Footer

from mhacli.io.memory import gc_paused
from mhacli.record.heads import OF_REMOVAL, STATISTICS, Averages, HeadStatistics, Statistic, words_of_type
from mhacli.render.base import format as words
from mhacli.render.base.colours import EMPTY, KIND_SIGNS, type_sign
from mhacli.render.base.selection import DrawableHead
from mhacli.render.checkpoint.header import texts_read
from mhacli.text.escape import visible
from mhacli.text.numbers import shown
from mhacli.viewer.panes import (
    ACCENT,
    CURSOR,
    DIM,
    PLAIN,
    Cell,
    Lines,
    Pane,
    Words,
    at,
    named,
    segments,
    title_line,
    window,
)
from mhacli.viewer.session import Place, Session

_LEAST = (9, 4)
"""The least columns and lines of a picture with its title and the gap beside it."""
_TOKENS = 100
"""The most tokens in the first line."""
FAR, _WHEEL = 10**9, 3
"""More places than any row has, and the places that the wheel moves."""
_PAUSE_S = 0.05
"""The pause before numpy is imported, in which the first screen appears."""


def key(names: str, action: str, display: str = "", tip: str = "", short: str = "") -> Binding:
    """Keys for an action: their display, the description in the help, and a word for the last line, empty for keys that only
    the help lists."""
    return Binding(names, action, short, key_display=display or None, tooltip=tip)


ENDS = [
    key("escape,q", "app.back", "q Esc", "go back; on the first screen, quit", "back"),
    key("question_mark", "app.read('help')", "?", "this list", "help"),
    key("Q,ctrl+c", "app.quit", "Q Ctrl-C", "quit, from any screen"),
]


class HeadsScreen(Screen[None]):
    """A screen over the heads of a session with a cursor on a row and column, and a message in place of its keys until the
    next."""

    ALLOW_SELECT = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *ENDS,
        key("up", "move(-1, 0)", "↑ ↓ ← →", "move the cursor; a click does the same", "move"),
        key("down", "move(1, 0)"),
        key("left", "move(0, -1)"),
        key("right", "move(0, 1)"),
        key("pageup", "page(-1, 0)", "PgUp PgDn", "a page up or down"),
        key("pagedown", "page(1, 0)"),
        key("home", f"move(0, -1, {FAR})", "Home End", "the first or last of the row; with Ctrl, the first or last row"),
        key("end", f"move(0, 1, {FAR})"),
        key("ctrl+home", f"move(-1, 0, {FAR})"),
        key("ctrl+end", f"move(1, 0, {FAR})"),
        key("e", "effects", "e", "effects of removed heads or weights, in a record of mha effect", "effects"),
        key("e", "say('the record has no effects: mha effect … --save makes one that has')"),
        key("s", "scale", "s", "how shades follow attention weights: linear or log", "scale"),
        key("x", "sinks", "x", "remove sinks and renormalise the rest of each row, or put them back", "sinks"),
        key("w", "app.read('walk')", "w", "the walkthrough: every tensor with its axes, formula, meaning and cost", "walk"),
        key("i", "app.read('origin')", "i", "where the numbers come from: command, versions, seed, self-check"),
        key("full_stop", "sequence(1)", ", .", "the previous or next sequence"),
        key("comma", "sequence(-1)"),
    ]  # fmt: skip

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session, self.message = session, ""
        self.top, self.footer = Words(self.above, id="top"), Footer(compact=True)
        self.note = Words(lambda width: [Text(self.message)], id="note")
        self.at, self.rows, self.columns = (0, 0), range(0), range(0)
        self.places: Collection[tuple[int, int]] = ()

    def go(self, row: int, column: int) -> None:
        """Moves the cursor."""
        self.at = row, column
        self.draw()

    @abstractmethod
    def above(self, width: int) -> Iterable[Text]:
        """The words at the top."""

    def draw(self) -> None:
        """Redraws the screen."""
        for pane in self.query("Words, Pane"):
            pane.refresh(layout=True)

    def on_screen_resume(self) -> None:
        """Redraws for what was chosen on another screen."""
        self.draw()

    def on_key(self, event: events.Key) -> None:
        """Clears the message."""
        if self.message:
            self.action_say("")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether the record has effects to show."""
        return action != "effects" or self.session.record.effect is not None

    def action_say(self, message: str) -> None:
        """Shows a message in place of the keys until the next key."""
        self.message = message
        self.note.display, self.footer.display = bool(message), not message
        self.note.refresh()

    def action_move(self, down: int, right: int, times: int = 1) -> None:
        """Moves the cursor by as many places in a direction, or as far as there are some."""
        row, column = self.at
        ahead = [at for at in self.places if (at[0] - row) * down + (at[1] - column) * right > 0]
        ahead = sorted(at for at in ahead if (at[1] == column if down else at[0] == row))[:: down + right]
        if ahead:
            self.go(*ahead[:times][-1])

    def action_page(self, down: int, right: int) -> None:
        """Moves the cursor by as many places as are visible."""
        self.action_move(down, right, max(1, len(self.rows if down else self.columns) - 1))

    def on_click(self, event: events.Click) -> None:
        """Goes to what was clicked."""
        if "at" in event.style.meta:
            self.go(*event.style.meta["at"])

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Moves down a few rows, or right with shift."""
        self.action_move(int(not event.shift), int(event.shift), _WHEEL)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Moves up a few rows, or left with shift."""
        self.action_move(-int(not event.shift), -int(event.shift), _WHEEL)

    def lines_of(
        self, rows: Sequence[tuple[str, Sequence[Cell]]], headings: Sequence[str], width: int, height: int
    ) -> Lines:
        """The rows around the cursor, each behind its name, below headings. The first columns go until the cursor fits."""
        (row, column), left, first = self.at, max(cell_len(name) for name, _ in rows) + 3, 0
        while first < column and sum(cell_len(text) for text, _ in rows[row][1][first : column + 1]) > width - left:
            first += 1
        if headings:
            yield [(" " * left + "".join(headings[first:]), PLAIN)]
        self.rows = window(self.rows.start, height - bool(headings), row, len(rows))
        for number in self.rows:
            name, cells = rows[number]
            line = [(f"{name:>{left - 2}}  ", ACCENT if number == row else PLAIN)]
            for place, (text, style) in enumerate(cells):
                style += at(number, place) + (CURSOR if (number, place) == self.at else PLAIN)
                line += [(text, style)] * (place >= first)
            yield line

    def action_effects(self) -> None:
        """Opens the effects of removals."""
        from mhacli.viewer.effects import EffectsScreen

        if self.session.record.effect is not None:
            self.app.push_screen(EffectsScreen(self.session, self.session.record.effect))

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

        picture = self.session.picture(place)
        if picture is None:
            self.action_say(self.session.why_nothing())
        else:
            self.session.place = place
            self.app.push_screen(HeadScreen(self.session, picture))


def doubts(head: DrawableHead) -> Text:
    """Why the numbers of a head may be wrong."""
    words = "" if head.record.self_check.ok else "  self-check FAILED: press i"
    if head.layer is not None and not head.layer.verified:
        words += "  not verified"
    return Text(words, "bold yellow")


def kind_words(statistics: HeadStatistics | None) -> str:
    """The type of a head with its excess."""
    return "no statistics" if statistics is None else words.type_text(statistics)


def kind_sign(statistics: HeadStatistics | None) -> tuple[str, Style]:
    """The sign of a head's type in its colour; a question mark without statistics."""
    return ("?", EMPTY) if statistics is None else type_sign(statistics.kind)


# ----------------------------------------------------------------------------------------------------------- all heads


class Overview(HeadsScreen):
    """All heads of a record."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("enter,ctrl+j", "open", "Enter", "open the head; so does a click on the head under the cursor", "open")
    ]

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._numbers = sorted({number for _, number in session.heads})
        self._grid = 1, 1, 1
        self.pictures, self.numbers = Words(self._pictures, id="pictures"), Words(self._about_head, id="numbers")
        self.signs = Pane(self._signs, id="signs")
        self.signs.styles.height = 2 + len(session.rows)
        self.places = [(row, self._numbers.index(number)) for row, number in session.heads]
        self.on_screen_resume()

    def compose(self) -> ComposeResult:
        """The panes from the top."""
        yield from (self.top, self.pictures, self.signs, self.numbers, self.note, self.footer)

    def on_mount(self) -> None:
        """Draws the pictures after the first screen, because importing numpy takes long."""
        self.call_after_refresh(self.set_timer, _PAUSE_S, self._add_pictures)

    def _add_pictures(self) -> None:
        with gc_paused():
            import mhacli.viewer.matrix  # noqa: F401
        self.draw()

    def above(self, width: int) -> Iterator[Text]:
        """The checkpoint or layer, the text, and doubts."""
        record, sequence = self.session.record, self.session.sequence
        name = "a layer of mha" if record.model is None else visible(f"{record.model.path} · {record.model.family}")
        line = Text.assemble((name, "bold cyan"), (f"  {' · '.join(texts_read(record))}", "bold"))
        line.append_text(doubts(self.session.head))
        line.append(f"  sequence {sequence}:" if len(record.sequences) > 1 else "", style="bold")
        for place in range(min(_TOKENS, len(record.sequences[sequence].tokens))):
            line.append(f" {words.token_text(record.sequences[sequence].tokens, place)}", style="dim")
        yield line

    def on_screen_resume(self) -> None:
        """Takes the head that was chosen on another screen."""
        row, number = self.session.place
        self.at = row, self._numbers.index(number)

    def _signs(self, width: int, height: int) -> tuple[str, Lines]:
        """The signs of all heads."""
        names, numbers, size = self.session.rows, self._numbers, len(str(self._numbers[-1])) + 1

        def sign(row: int, number: int) -> Cell:
            """The sign of a head; blank where there is none."""
            head = self.session.heads.get((row, number))
            sign, style = ("", PLAIN) if head is None else kind_sign(head.statistics)
            return f"{sign:<{size}}", style

        rows = [(name, [sign(row, number) for number in numbers]) for row, name in enumerate(names)]
        title = words.count_of(len(self.session.heads), "head")
        title += f" (columns) in {len(names)} layers (rows)" if len(names) > 1 else ""
        return title, self.lines_of(rows, [f"{number:<{size}}" for number in numbers], width, height)

    def _pictures(self, width: int) -> Iterator[Segments]:
        """The heads of the layer, as large as all fit side by side and below each other."""
        row, height, n_heads = self.session.place[0], self.pictures.size.height - 1, len(self._numbers)

        def size(across: int) -> tuple[int, int]:
            """The columns and lines of a head."""
            return max(1, width // across), max(1, height // -(-n_heads // across))

        across = max(range(n_heads, 0, -1), key=lambda across: min(size(across)[0], 2 * size(across)[1]))
        self._grid = across, *size(across)
        name = self.session.rows[row]
        lines: list[Iterable[Cell]] = [[title_line(f"layer {name}" if name else "pictures", width)]]
        if self._grid[1] >= _LEAST[0] and self._grid[2] >= _LEAST[1]:
            blocks = [self._picture((row, number)) for number in self._numbers]
            for begin in range(0, n_heads, across):
                lines += map(chain.from_iterable, zip(*blocks[begin : begin + across], strict=True))
        else:
            lines.append([("pictures of the heads need a larger window", DIM)])
        yield segments(lines, width)

    def _picture(self, place: Place) -> list[list[Cell]]:
        """The lines of a head: its title and picture; blank without its weights, or before numpy is imported."""
        head, lines = self.session.heads.get(place), list[list[Cell]]()
        _, width, height = self._grid
        if head is not None:
            kind = "no statistics" if head.statistics is None else words_of_type(head.statistics.kind).name
            title = f"{head.head} {kind_sign(head.statistics)[0]} {kind}"
            lines.append([title_line(title, width - 1, is_chosen=place == self.session.place)])
            picture = self.session.picture(place) if "mhacli.viewer.matrix" in sys.modules else None
            if picture is not None:
                lines += picture.thumbnail(height - 1, width - 1, colour=self.session.colour)
        lines += [[]] * (height - len(lines))
        return [[*line, (" " * (width - sum(cell_len(text) for text, _ in line)), PLAIN)] for line in lines]

    def _about_head(self, width: int) -> Iterator[Text]:
        """The type of the head under the cursor, its statistics with uniform attention in parentheses, and what signs mean."""
        head, statistics = self.session.head, self.session.head.statistics
        yield Text(*title_line(f"{head.label} · numbers (if uniform)", width))
        parts = [Text.assemble(kind_sign(statistics), f" {kind_words(statistics)}")]
        for statistic in (*STATISTICS, *OF_REMOVAL):
            value, uniform = (_in_words(of, statistic) for of in (statistics, getattr(statistics, "uniform", None)))
            if statistic.is_main and value:
                name = statistic.words.name or statistic.words.heading
                parts.append(named(name, value).append(f" ({uniform})" if uniform else "", "dim"))
        yield words.flowing(parts, width, "  ")
        session = self.session
        hidden = " · sinks taken out, rows renormalised" if session.hides_sinks else ""
        about = Text(f"pictures: {session.scale_of(session.head)}, one scale for all heads{hidden}", "dim")
        kinds = {head.statistics.kind for head in session.heads.values() if head.statistics is not None}
        signs = [Text.assemble(type_sign(kind), f" {words_of_type(kind).name}") for kind in KIND_SIGNS if kind in kinds]
        yield words.flowing([about, *signs], width, "  ")

    def go(self, row: int, column: int) -> None:
        """Moves to a head; opens it if the cursor is there."""
        if (row, column) == self.at:
            self.action_open()
        else:
            self.session.place = row, self._numbers[column]
            super().go(row, column)

    def on_click(self, event: events.Click) -> None:
        """Moves to the head whose picture was clicked, or opens it."""
        n_across, width, height = self._grid
        column = (event.y - 1) // height * n_across + event.x // width
        if (
            event.widget is self.pictures
            and event.y > 0
            and event.x < n_across * width
            and (self.at[0], column) in self.places
        ):
            self.go(self.at[0], column)

    def action_open(self) -> None:
        """Opens the head under the cursor."""
        self.open_head(self.session.place)


def _in_words(averages: Averages | None, statistic: Statistic) -> str:
    """A statistic with its unit; empty if it is not known."""
    value = getattr(averages, statistic.field, None)
    if value is None:
        return ""
    if statistic.unit == "weight":
        return shown(value, "weight", 3)
    return shown(value, "fraction" if statistic.unit == "fraction" else "short") + " nats" * (statistic.unit == "nats")
