"""The screen over heads with its panes, from which the others are made; and the first screen:
pictures of the heads of a layer, the signs of all heads, and the numbers of the head under the
cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

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

from mhacli.io.memory import gc_paused
from mhacli.record.heads import OF_REMOVAL, STATISTICS, Averages, Statistic, words_of_type
from mhacli.render.base import format as words
from mhacli.render.base.colours import ACCENT, CURSOR, DIM, KIND_SIGNS, PLAIN, type_sign
from mhacli.render.checkpoint.header import texts_read
from mhacli.text.escape import token_label, visible
from mhacli.text.numbers import shown
from mhacli.viewer.keys import KEYS
from mhacli.viewer.session import Place, Session, places_ahead

# -------------------------------------------------------------------------------------------- panes

Cell = tuple[str, Style]
Lines = Iterable[Iterable[Cell]]


class Row(NamedTuple):
    """The name of a row, and its cells."""

    name: str
    cells: Sequence[Cell]


class Words(Widget):
    """What a function draws for the width of the screen."""

    def __init__(self, draw: Callable[[int], Iterable[RenderableType]], *, id: str) -> None:
        super().__init__(id=id)
        self._draw = draw

    def render(self) -> Group:
        """The words. In a group they keep colours for any terminal; textual's own text has one set
        of colours.
        """
        return Group(*self._draw(self.app.size.width))


class Pane(Widget, can_focus=True):
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
    name, line = f" {words.fitted(title, max(0, width - 4))} ", "━" if is_chosen else "─"
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
    used, begins = 0, [0]
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
        super().__init__(
            classes="-high"
        )  # as in most terminals: a class that comes later styles all panes again
        self.session, self.footer, self.note = (
            session,
            Keys(compact=True),
            Static(id="note", markup=False),
        )
        self.at, self.rows, self.columns = (0, 0), range(0), range(0)
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
        return action != "effects" or self.session.record.effect is not None

    def action_say(self, message: str) -> None:
        """Shows a message in place of the keys until the next key."""
        self.note.update(message)
        self.note.display, self.footer.display = bool(message), not message

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
        (row, column), left, first = self.at, max(cell_len(name) for name, _ in rows) + 3, 0
        while (
            first < column
            and sum(cell_len(text) for text, _ in rows[row][1][first : column + 1]) > width - left
        ):
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

        self.app.push_screen(EffectsScreen(self.session))

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
        from mhacli.viewer.head import HeadScreen

        picture = self.session.picture()
        if picture is None:
            self.action_say(self.session.why_nothing())
        else:
            self.app.push_screen(HeadScreen(self.session, picture))


def type_words(session: Session) -> Text:
    """The sign of the type of the head under the cursor, its name with its excess, and why its
    numbers may be wrong.
    """
    head, statistics = session.head, session.head.statistics
    doubts = "" if head.record.self_check.ok else "  self-check FAILED: press i"
    doubts += "  not verified" * (head.layer is not None and not head.layer.verified)
    return Text.assemble(
        type_sign(statistics.kind), f" {words.type_text(statistics)}", (doubts, "bold yellow")
    )


# ---------------------------------------------------------------------------------------- all heads

_LEAST = (9, 4)
"""The least columns and lines of a picture with its title and the gap beside it."""
_HIGH, _ALL, _FEW = 30, 6, 2
"""The lines of a screen with all statistics, and the least priority of those that such a screen and
a lower one show."""
_FRAME = 4
"""The columns around the title of a picture."""


class Overview(HeadsScreen):
    """All heads of a record."""

    BINDINGS = KEYS["all heads"]

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.places, self.at = session.heads.keys(), session.place
        signs = Pane(self._signs, id="signs")
        signs.styles.height = 2 + len(session.rows)
        pictures, numbers = (
            Pane(self._pictures, id="pictures"),
            Words(self._about_head, id="numbers"),
        )
        self.panes = Words(self._above, id="top"), pictures, signs, numbers

    def on_show(self) -> None:
        """Draws the pictures after the first screen, because importing numpy takes long."""
        with gc_paused():
            import mhacli.viewer.head  # noqa: F401
        self.draw()

    def _above(self, width: int) -> Iterator[Text]:
        """The checkpoint or layer, the text, and doubts."""
        record, sequence = self.session.record, self.session.sequence
        name = "a layer of mha" if record.model is None else visible(record.model.family)
        tokens = map(token_label, record.sequences[sequence].tokens[:width])
        heading = f"  {' · '.join(texts_read(record))}"
        heading += f"  sequence {sequence}:" if len(record.sequences) > 1 else ""
        yield Text.assemble((name, "bold cyan"), (heading, "bold"), (f" {' '.join(tokens)}", "dim"))

    def on_screen_resume(self) -> None:
        """Takes the head that was chosen on another screen."""
        self.go(*self.session.place)

    def _signs(self, width: int, height: int) -> tuple[str, Lines]:
        """The signs of all heads."""
        signs = {
            place: type_sign(head.statistics.kind) for place, head in self.session.heads.items()
        }
        rows = list[Row]()
        n_heads = 1 + max(number for _, number in signs)
        size = len(str(n_heads)) + 1
        for row, name in enumerate(self.session.rows):
            of_row = [signs.get((row, number), ("", PLAIN)) for number in range(n_heads)]
            rows.append(Row(name, [(f"{sign:<{size}}", style) for sign, style in of_row]))
        title = words.count_of(len(signs), "head")
        title += f" (columns) in {len(rows)} layers (rows)" if len(rows) > 1 else ""
        return title, self.lines_of(
            rows, [f"{number:<{size}}" for number in range(n_heads)], width, height
        )

    def _pictures(self, width: int, height: int) -> tuple[str, Lines]:
        """The heads of the layer, as large as all fit side by side and below each other."""
        of_layer, name = (
            [place for place in self.places if place[0] == self.at[0]],
            self.session.rows[self.at[0]],
        )
        n_fit = (width // _LEAST[0]) * (height // _LEAST[1])
        if not n_fit:
            return "pictures", [[("pictures of the heads need a larger window", DIM)]]
        part = window(0, n_fit, of_layer.index(self.at), len(of_layer))
        places = of_layer[part.start : part.stop]
        sizes = {n: (width // n, height // -(-len(places) // n)) for n in range(len(places), 0, -1)}
        across = max(sizes, key=lambda n: min(sizes[n][0], 2 * sizes[n][1]))
        blocks, lines = (
            [self._picture(place, *sizes[across]) for place in places],
            list[Iterable[Cell]](),
        )
        for begin in range(0, len(places), across):
            lines += map(chain.from_iterable, zip(*blocks[begin : begin + across], strict=True))
        more = f" · {len(places)} of {len(of_layer)} heads" if len(places) < len(of_layer) else ""
        return (f"layer {name}" if name else "pictures") + more, lines

    def _picture(self, place: Place, width: int, height: int) -> Iterator[list[Cell]]:
        """The lines of a head: its title and picture; blank without its weights, or before numpy is
        imported.
        """
        kind = self.session.heads[place].statistics.kind
        word, number = words_of_type(kind), f"{place[1]} {type_sign(kind)[0]}"
        titles = f"{number} {word.name}", f"{number} {word.short}"
        title = next((title for title in titles if cell_len(title) < width - _FRAME), number)
        lines: list[list[Cell]] = [[title_line(title, width - 1, is_chosen=place == self.at)]]
        picture = self.session.picture(place)
        if picture is not None:
            lines += picture.thumbnail(height - 1, width - 1)
        for line in (*lines, *[[]] * (height - len(lines))):
            blank = " " * (width - sum(cell_len(text) for text, _ in line))
            yield [(text, style + at(*place)) for text, style in (*line, (blank, PLAIN))]

    def _about_head(self, width: int) -> Iterator[Text]:
        """The type of the head under the cursor, its statistics with uniform attention in
        parentheses, and what signs mean.
        """
        session, head, statistics = self.session, self.session.head, self.session.head.statistics
        yield Text(*title_line(f"{head.label} · numbers (if uniform)", width))
        parts, least = [type_words(session)], _ALL if self.app.size.height >= _HIGH else _FEW
        for statistic in (*STATISTICS, *OF_REMOVAL):
            value, uniform = (_in_words(of, statistic) for of in (statistics, statistics.uniform))
            if statistic.priority is not None and statistic.priority <= least and value:
                name = statistic.words.name or statistic.words.heading
                parts.append(named(name, value).append(f" ({uniform})" if uniform else "", "dim"))
        yield words.flowing(parts, width, "  ")
        picture, about = session.picture(), Text(session.why_nothing(), "bold yellow")
        if picture is not None:
            from mhacli.render.base.grids import scale_words

            hidden = " · sinks taken out, rows renormalised" if session.hides_sinks else ""
            scale = scale_words([picture.grid(1)], "number")
            about = Text(f"pictures: {scale}, one scale for all heads{hidden}", "dim")
        kinds = {each.statistics.kind for each in session.heads.values()}
        signs = [
            Text.assemble(type_sign(kind), f" {words_of_type(kind).name}")
            for kind in KIND_SIGNS
            if kind in kinds
        ]
        yield words.flowing([about, *signs], width, "  ")

    def go(self, row: int, column: int) -> None:
        """Moves to a head; opens it if it was clicked before."""
        self.session.place = row, column
        super().go(row, column)

    def on_click(self, event: events.Click) -> None:
        """Goes to the head that was clicked, or opens it if the cursor is there."""
        if event.style.meta.get("at") == self.at:
            self.action_open()


def _in_words(averages: Averages | None, statistic: Statistic) -> str:
    """A statistic with its unit; empty if it is not known."""
    value, unit = getattr(averages, statistic.field, None), words.UNITS.get(statistic.unit, "short")
    return "" if value is None else shown(value, unit) + " nats" * (unit == "nats")
