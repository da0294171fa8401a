"""The first screen: pictures of the heads of a layer, the signs of all heads, and the numbers of
the head under the cursor.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

from rich.cells import cell_len
from rich.text import Text
from textual import events

from mhacli.io.memory import gc_paused
from mhacli.numbers import shown
from mhacli.record.heads import OF_REMOVAL, STATISTICS, Averages, Statistic, words_of_type
from mhacli.render.base import format as words
from mhacli.render.base.colours import DIM, KIND_SIGNS, PLAIN, type_sign
from mhacli.render.checkpoint.header import texts_read
from mhacli.text.escape import token_label, visible

from .keys import KEYS
from .screen import (
    Cell,
    HeadsScreen,
    Lines,
    Pane,
    Row,
    Words,
    at,
    named,
    title_line,
    type_words,
    window,
)
from .session import Place, Session

_LEAST_COLUMNS = 9
"""The least columns of a picture with the gap beside it."""
_LEAST_LINES = 4
"""The least lines of a picture with its title."""
_HIGH = 30
"""The lines of a screen with room for all statistics."""
_ALL = 6
"""The least priority of the statistics that such a screen shows."""
_FEW = 2
"""The least priority of those that a lower screen shows."""
_FRAME = 4
"""The columns around the title of a picture."""


class Overview(HeadsScreen):
    """All heads of a record."""

    BINDINGS = KEYS["all heads"]

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.places = session.heads.keys()
        self.at = session.place
        signs = Pane(self._signs, id="signs")
        signs.styles.height = 2 + len(session.rows)
        pictures = Pane(self._pictures, id="pictures")
        numbers = Words(self._about_head, id="numbers")
        self.panes = Words(self._above, id="top"), pictures, signs, numbers

    def on_show(self) -> None:
        """Draws the pictures after the first screen, because importing numpy takes long."""
        with gc_paused():
            import mhacli.viewer.picture  # noqa: F401
        self.draw()

    def _above(self, width: int) -> Iterator[Text]:
        """The checkpoint or layer, the text, and doubts."""
        record = self.session.record
        sequence = self.session.sequence
        subject = "a layer of mha" if record.model is None else record.model.family
        name = visible(" · ".join(filter(None, (subject, record.words_of_random))))
        tokens = map(token_label, record.sequences[sequence].tokens[:width])
        heading = f"  {visible(' · '.join(texts_read(record)))}"
        if len(record.sequences) > 1:
            heading += f"  sequence {sequence}:"
        yield Text.assemble((name, "bold cyan"), (heading, "bold"), (f" {' '.join(tokens)}", "dim"))

    def on_screen_resume(self) -> None:
        """Takes the head that was chosen on another screen."""
        self.take_place()

    def take_place(self) -> None:
        """Moves to the head at the place of the session."""
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
        if len(rows) > 1:
            title += f" (columns) in {len(rows)} layers (rows)"
        headings = [f"{number:<{size}}" for number in range(n_heads)]
        return title, self.lines_of(rows, headings, width, height)

    def _pictures(self, width: int, height: int) -> tuple[str, Lines]:
        """The heads of the layer, as large as all fit side by side and below each other."""
        row, _ = self.at
        heads = [place for place in self.places if place[0] == row]
        n_fit = (width // _LEAST_COLUMNS) * (height // _LEAST_LINES)
        if not n_fit:
            return "pictures", [[("pictures of the heads need a larger window", DIM)]]
        part = window(0, n_fit, heads.index(self.at), len(heads))
        places = heads[part.start : part.stop]
        sizes = {n: (width // n, height // -(-len(places) // n)) for n in range(len(places), 0, -1)}
        # a line is as high as two columns are wide
        across = max(sizes, key=lambda n: min(sizes[n][0], 2 * sizes[n][1]))
        blocks = [self._picture(place, *sizes[across]) for place in places]
        lines: list[Iterable[Cell]] = []
        for begin in range(0, len(places), across):
            lines += map(chain.from_iterable, zip(*blocks[begin : begin + across], strict=True))
        name = self.session.rows[row]
        title = f"layer {name}" if name else "pictures"
        if len(places) < len(heads):
            title += f" · {len(places)} of {len(heads)} heads"
        return title, lines

    def _picture(self, place: Place, width: int, height: int) -> Iterator[list[Cell]]:
        """The lines of a head: its title and picture; blank without its weights, or before numpy is
        imported.
        """
        kind = self.session.heads[place].statistics.kind
        number = f"{place[1]} {type_sign(kind)[0]}"
        titles = [f"{number} {words_of_type(kind).name}", f"{number} {words_of_type(kind).short}"]
        title = next((title for title in titles if cell_len(title) < width - _FRAME), number)
        lines: list[list[Cell]] = [[title_line(title, width - 1, is_chosen=place == self.at)]]
        picture = self.session.picture(place)
        if picture is not None:
            lines += picture.thumbnail(height - 1, width - 1)
        lines += [[] for _ in range(height - len(lines))]
        for line in lines:
            blank = " " * (width - sum(cell_len(text) for text, _ in line))
            yield [(text, style + at(*place)) for text, style in (*line, (blank, PLAIN))]

    def _about_head(self, width: int) -> Iterator[Text]:
        """The type of the head under the cursor, its statistics with uniform attention in
        parentheses, and what signs mean.
        """
        session = self.session
        yield Text(*title_line(f"{session.head.label} · numbers (if uniform)", width))
        yield words.flowing([type_words(session), *self._statistics()], width, "  ")
        picture = session.picture()
        if picture is None:
            about = Text(session.why_nothing(), "bold yellow")
        else:
            from mhacli.render.base.grids import scale_words

            note = " · sinks taken out, rows renormalised" if session.hides_sinks else ""
            scale = scale_words([picture.grid(1)])
            about = Text(f"pictures: {scale}, one scale for all heads{note}", "dim")
        kinds = {head.statistics.kind for head in session.heads.values()}
        signs = [
            Text.assemble(type_sign(kind), f" {words_of_type(kind).name}")
            for kind in KIND_SIGNS
            if kind in kinds
        ]
        yield words.flowing([about, *signs], width, "  ")

    def _statistics(self) -> Iterator[Text]:
        """The statistics of the head under the cursor that the screen has room for."""
        statistics = self.session.head.statistics
        least = _ALL if self.app.size.height >= _HIGH else _FEW
        for statistic in (*STATISTICS, *OF_REMOVAL):
            value = _in_words(statistics, statistic)
            uniform = _in_words(statistics.uniform, statistic)
            if statistic.priority is not None and statistic.priority <= least and value:
                name = statistic.words.name or statistic.words.heading
                yield named(name, value).append(f" ({uniform})" if uniform else "", "dim")

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
    value = getattr(averages, statistic.field, None)
    if value is None:
        return ""
    unit = words.UNITS.get(statistic.unit, "short")
    return f"{shown(value, unit)} nats" if unit == "nats" else shown(value, unit)
