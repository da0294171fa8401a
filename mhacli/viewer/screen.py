"""The screen over heads with its panes, from which the others are made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Footer, Static

from mhacli.record.record import EffectRecord, is_a
from mhacli.render.base import format as words
from mhacli.render.base.colours import ACCENT, CURSOR, DIM, PLAIN, type_sign
from mhacli.text.escape import harmless

from .keys import KEYS
from .session import Session, places_ahead

if TYPE_CHECKING:  # numpy is imported after the first screen is visible
    from .app import Viewer

# -------------------------------------------------------------------------------------------- panes

Cell = tuple[str, Style]
Lines = Iterable[Iterable[Cell]]


class Row(NamedTuple):
    """The name of a row, and its cells."""

    name: str
    cells: Sequence[Cell]


class Shown(Widget):
    """What is drawn, in which texts of others are obeyed by no terminal."""

    def render_line(self, y: int) -> Strip:
        """A line of the widget."""
        return Strip([Segment(harmless(text), style) for text, style, _ in super().render_line(y)])


class Words(Shown):
    """What a function draws for the width of the screen."""

    def __init__(self, draw: Callable[[int], Iterable[RenderableType]], *, id: str) -> None:
        super().__init__(id=id)
        self._draw = draw

    def render(self) -> Group:
        """The words. In a group they keep colours for any terminal; textual's own text has one set
        of colours.
        """
        return Group(*self._draw(self.app.size.width))


class Pane(Shown, can_focus=True):
    """The title and the lines that a function draws for a width and a number of lines."""

    def __init__(self, draw: Callable[[int, int], tuple[str, Lines]], *, id: str) -> None:
        super().__init__(id=id)
        self._draw = draw

    def render(self) -> Segments:
        """The lines below the title."""
        width, height = self.size
        title, lines = self._draw(width, max(1, height - 1))
        lines = [[title_line(title, width, is_chosen=self.has_focus)], *lines]
        strips = [
            Strip([Segment(*cell) for cell in line]).adjust_cell_length(width) for line in lines
        ]
        return Segments([segment for strip in strips for segment in (*strip, Segment.line())])


def title_line(title: str, width: int, *, is_chosen: bool = False) -> Cell:
    """The line above a pane with its title; heavy if keys act on the pane."""
    name = f" {words.fitted(title, max(0, width - 4))} "
    line = "━" if is_chosen else "─"
    return line + name + line * (width - 1 - cell_len(name)), ACCENT if is_chosen else DIM


def named(name: str, value: str) -> Text:
    """A value behind its name."""
    return Text.assemble((f"{name} ", "dim"), (value, "bold"))


def at(row: int, column: int) -> Style:
    """The style of what takes the cursor to a place when it is clicked."""
    return Style(meta={"at": (row, column)})


def window(begin: int, size: int, target: int, length: int) -> range:
    """The window of a size within `length`, moved as little as needed to hold `target`."""
    begin = max(min(begin, target), target - size + 1)
    begin = max(0, min(begin, length - size))
    return range(begin, min(length, begin + size))


@lru_cache(maxsize=8)
def wrapped(names: Sequence[str], width: int) -> list[range]:
    """The names of each line, every one behind a sign."""
    used = 0
    begins = [0]
    for place, name in enumerate(names):
        size = 1 + min(width - 1, cell_len(name))
        if used and used + size > width:
            begins.append(place)
            used = 0
        used += size
    return [range(*ends) for ends in pairwise([*begins, len(names)])]


# --------------------------------------------------------------------------------------- over heads

_WHEEL = 3
"""The places that the wheel moves."""


class Keys(Footer):
    """The last line, with the keys of a screen."""

    def compose(self) -> ComposeResult:
        """The keys. Each gets its class before its style, for textual would style it a second
        time.
        """
        return (key.add_class("-compact", update=False) for key in super().compose())


class HeadsScreen(Screen[None]):
    """A screen over the heads of a session: `panes`, the keys or a message below, and a cursor on a
    row and column.
    """

    ALLOW_SELECT = False
    BINDINGS = KEYS["everywhere"]
    panes: Sequence[Widget] = ()

    def __init__(self, session: Session) -> None:
        # as in most terminals: a class that comes later styles all panes again
        super().__init__(classes="-high")
        self.session = session
        self.footer = Keys(compact=True)
        self.note = Static(id="note", markup=False)
        self.at = (0, 0)
        self.rows = range(0)
        self.columns = range(0)
        self.places: Collection[tuple[int, int]] = ()

    def compose(self) -> ComposeResult:
        """The panes from the top."""
        self.footer.bindings_changed(self)
        yield from (*self.panes, self.note, self.footer)

    def refresh_bindings(self) -> None:
        """Does nothing: the keys of a screen stay, so that textual need not make its last line
        three times.
        """

    def go(self, row: int, column: int) -> None:
        """Moves the cursor."""
        self.at = row, column
        self.draw()

    def draw(self) -> None:
        """Redraws the screen."""
        self.query("Words, Pane").refresh(layout=True)

    def on_key(self, event: events.Key) -> None:
        """Clears the message."""
        if self.note.display:
            self.action_say("")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether the record has effects to show."""
        return action != "effects" or is_a(self.session.record, EffectRecord)

    def action_say(self, message: str) -> None:
        """Shows a message in place of the keys until the next key."""
        self.note.update(harmless(message))
        self.note.display = bool(message)
        self.footer.display = not message

    def action_move(self, down: int, right: int, times: int = 1) -> None:
        """Moves the cursor by as many places in a direction, or as far as there are some."""
        ahead = places_ahead(self.places, self.at, down, right)
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
        self, rows: Sequence[Row], headings: Sequence[str], width: int, height: int
    ) -> Lines:
        """The rows around the cursor, each behind its name, below headings. The first columns go
        until the cursor fits.
        """
        row, column = self.at
        label = max(cell_len(name) for name, _ in rows) + 3
        first = 0
        while first < column:
            cells = rows[row].cells[first : column + 1]
            if sum(cell_len(text) for text, _ in cells) <= width - label:
                break
            first += 1
        if headings:
            yield [(" " * label + "".join(headings[first:]), PLAIN)]
            height -= 1
        self.rows = window(self.rows.start, height, row, len(rows))
        for number in self.rows:
            name, cells = rows[number]
            line = [(f"{name:>{label - 2}}  ", ACCENT if number == row else PLAIN)]
            for place, (text, style) in enumerate(cells[first:], first):
                style += at(number, place)
                line.append((text, style + CURSOR if (number, place) == self.at else style))
            yield line

    @property
    def viewer(self) -> Viewer:
        """The app, which opens other screens: at once, so that the next key acts there."""
        return cast("Viewer", self.app)

    def action_effects(self) -> None:
        """Opens the effects of removals."""
        if is_a(self.session.record, EffectRecord):
            self.viewer.open_effects(self.session.record)

    def take_place(self) -> None:
        """Shows the head at the place of the session."""
        self.draw()

    def action_head(self, step: int) -> None:
        """Shows another head, across layers and around the ends."""
        places = list(self.session.heads)
        self.session.place = places[(places.index(self.session.place) + step) % len(places)]
        self.take_place()

    def action_layer(self, step: int) -> None:
        """Shows the same head of the next or previous layer that has it."""
        ahead = places_ahead(self.session.heads, self.session.place, step, 0)
        self.action_say("" if ahead else "no layer there has this head")
        self.session.place = next(iter(ahead), self.session.place)
        self.take_place()

    def action_sequence(self, step: int) -> None:
        """Shows another sequence, around the ends."""
        n_sequences = len(self.session.record.sequences)
        self.session.sequence = (self.session.sequence + step) % n_sequences
        self.action_say("" if n_sequences > 1 else "the record has no other sequence")
        self.draw()

    def action_scale(self) -> None:
        """Switches to the other scale."""
        self.session.scale = "log" if self.session.scale == "linear" else "linear"
        self.draw()

    def action_sinks(self) -> None:
        """Hides or shows sinks."""
        self.session.hides_sinks = self.session.has_sinks and not self.session.hides_sinks
        self.action_say(
            "" if self.session.has_sinks else "no head of this record has a sink to take out"
        )
        self.draw()

    def action_open(self) -> None:
        """Opens the screen of the head under the cursor, or says why it cannot be drawn."""
        picture = self.session.picture()
        if picture is None:
            self.action_say(self.session.why_nothing())
        else:
            self.viewer.open_head(picture)


def type_words(session: Session) -> Text:
    """The sign of the type of the head under the cursor, its name with its excess, and why its
    numbers may be wrong.
    """
    head = session.head
    statistics = head.statistics
    check = head.record.self_check
    doubts = "" if check.ok else f"  {check.words}: press i"
    if not head.layer.inspected.verified:
        doubts += "  not verified"
    name = f" {words.type_text(statistics)}"
    return Text.assemble(type_sign(statistics.kind), name, (doubts, "bold yellow"))
