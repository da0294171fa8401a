"""The first screen: pictures of the heads of a layer, the signs of all heads, and the numbers of the head under the cursor."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import ClassVar

from rich.console import Group
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container
from textual.widgets import Static

from mhacli.io.memory import uncollected
from mhacli.record.heads import OF_REMOVAL, STATISTICS, Statistic, words_of_type
from mhacli.render.base import format as words
from mhacli.render.base.colours import KIND_SIGNS, type_sign
from mhacli.render.heads.drawable import DrawableHead
from mhacli.text.escape import visible
from mhacli.text.numbers import shown
from mhacli.viewer.parts import Cells, HeadsScreen, doubts, entitle, key, kind_sign, one_line
from mhacli.viewer.session import Place, Session

_LEAST = (8, 3)
"""The least columns and lines of a picture."""
_PAUSE_S = 0.05
"""The pause before numpy is imported, in which the first screen appears."""


class Overview(HeadsScreen):
    """All heads of a record."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("enter,ctrl+j", "open", "Enter", "open the head; so does a click on the head under the cursor", "open")
    ]

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._numbers = sorted({number for _, number in session.heads})
        self._panes = {number: Static() for number in self._numbers}
        self._has_numpy = False
        self.pictures = Container(*self._panes.values(), id="pictures")
        self.signs = Cells(id="signs", cell_padding=0)
        self.numbers, self.legend = Static(id="numbers"), Static(id="legend")

    def compose(self) -> ComposeResult:
        """The panes from the top."""
        yield from (self.top_line, self.pictures, self.signs, self.numbers, self.legend, self.note, self.footer)

    def on_mount(self) -> None:
        """Draws the signs, and the pictures after the first screen, because importing numpy takes long."""
        rows = [
            (name, [self._sign((row, number)) for number in self._numbers])
            for row, name in enumerate(self.session.rows)
        ]
        self.signs.fill([*map(str, self._numbers)], rows, len(str(self._numbers[-1])) + 1)
        self._point()
        self.call_after_refresh(self.set_timer, _PAUSE_S, self._add_pictures)

    def _point(self) -> None:
        """Moves the cursor of the signs to the head under the session's cursor."""
        row, number = self.session.place
        self.signs.move_cursor(row=row, column=self._numbers.index(number))

    def _sign(self, place: Place) -> Text:
        head = self.session.heads.get(place)
        return Text() if head is None else Text(*kind_sign(head.statistics))

    def _add_pictures(self) -> None:
        with uncollected():
            import mhacli.viewer.matrix  # noqa: F401
        self._has_numpy = True
        self.draw()

    def draw(self) -> None:
        """Redraws the screen."""
        session, width = self.session, self.size.width
        self._point()
        self.top_line.update(one_line(*_record_words(session)))
        self._draw_pictures()
        of_layers = f" (columns) in {len(session.rows)} layers (rows)" if len(session.rows) > 1 else ""
        entitle(self.signs, words.count_of(len(session.heads), "head") + of_layers)
        entitle(self.numbers, f"{session.head.label} · numbers (if uniform)")
        self.numbers.update(Group(words.flowing([*_numbers(session.head)], width, "  ")))
        self.legend.update(Group(words.flowing([*self._legend()], width, "  ")))

    def _draw_pictures(self) -> None:
        """Draws the heads of the layer, as large as all fit side by side and below each other."""
        row, size, sizes = self.session.place[0], self.pictures.size, [(0, 1, 0, 0)]
        name = self.session.rows[row]
        entitle(self.pictures, f"layer {name}" if name else "pictures")
        for n_lines in range(1, len(self._panes) + 1):
            across = ceil(len(self._panes) / n_lines)
            width, height = size.width // across - 1, size.height // n_lines - 1
            if width >= _LEAST[0] and height >= _LEAST[1]:
                sizes.append((min(width, 2 * height), across, width, height))
        best, self.pictures.styles.grid_size_columns, width, height = max(sizes)
        for number, pane in self._panes.items():
            head = self.session.heads.get((row, number))
            pane.visible = head is not None and best > 0
            if head is not None and best:
                kind = "no statistics" if head.statistics is None else words_of_type(head.statistics.kind).name
                mark = "▸" if head is self.session.head else ""
                entitle(pane, f"{mark}{number} {kind_sign(head.statistics)[0]} {kind}")
                pane.update(self._thumbnail(head, width, height))

    def _thumbnail(self, head: DrawableHead, width: int, height: int) -> Group:
        """The picture of a head; nothing without its weights, or before numpy is imported."""
        picture = self.session.picture(head) if self._has_numpy else None
        if picture is None:
            return Group()
        from mhacli.viewer.matrix import thumbnail

        return Group(thumbnail(picture, height, width, colour=self.session.colour))

    def _legend(self) -> Iterator[Text]:
        """The shading of pictures, and the signs of the types that occur."""
        session = self.session
        hidden = " · sinks taken out, rows renormalised" if session.hides_sinks else ""
        yield Text(f"pictures: {session.scale_of(session.head)}, one scale for all heads{hidden}", "dim")
        kinds = {head.statistics.kind for head in session.heads.values() if head.statistics is not None}
        for kind in KIND_SIGNS:
            if kind in kinds:
                yield Text.assemble(type_sign(kind), f" {words_of_type(kind).name}")

    # ------------------------------------------------------------------------------------------------------------ moving

    def on_click(self, event: events.Click) -> None:
        """Moves to the head whose picture was clicked; opens it if the cursor is there."""
        for number, pane in self._panes.items():
            if event.widget is pane and number == self.session.place[1]:
                self.action_open()
            elif event.widget is pane:
                self.session.place = self.session.place[0], number
                self.draw()

    def on_data_table_cell_highlighted(self) -> None:
        """Moves to another head."""
        place = self.signs.cursor_row, self._numbers[self.signs.cursor_column]
        if self.is_current and place != self.session.place:
            self.session.place = place if place in self.session.heads else self.session.place
            self.draw()

    def on_data_table_cell_selected(self) -> None:
        """Opens the head under the cursor, which was clicked."""
        self.action_open()

    def action_move(self, direction: str) -> None:
        """Moves to another head."""
        self.signs.move(direction)
        self.on_data_table_cell_highlighted()

    def action_open(self) -> None:
        """Opens the head under the cursor."""
        self.open_head(self.session.place)


def _record_words(session: Session) -> Iterator[tuple[str, str]]:
    """The checkpoint or layer, the text, and doubts."""
    record, sequence = session.record, session.sequence
    c, text = record.config, record.sequences[sequence]
    name = f"d_model {c.d_model} · {words.count_of(c.n_heads, 'head')} × d_head {c.d_head}"
    if record.model is not None:
        name = f"{visible(record.model.path.rstrip('/').rpartition('/')[2])} · {visible(record.model.family)}"
    yield name, "bold cyan"
    yield f"  {' · '.join(words.texts_in_words(record))}", "bold"
    yield from doubts(session)
    yield f"  sequence {sequence}:" if len(record.sequences) > 1 else "", "bold"
    yield "".join(f" {words.token_text(text, place)}" for place in range(min(100, len(text.tokens)))), "dim"


def _numbers(head: DrawableHead) -> Iterator[Text]:
    """The type of a head, and its statistics with uniform attention in parentheses."""
    statistics = head.statistics
    if statistics is None:
        yield Text("no statistics")
        return
    yield Text.assemble(kind_sign(statistics), (f" {words.type_text(statistics)}", "bold"))
    for statistic in (*STATISTICS, *OF_REMOVAL):
        value, uniform = (getattr(each, statistic.field, None) for each in (statistics, statistics.uniform))
        if statistic.is_main and value is not None:
            beside = "" if uniform is None else f" ({_in_words(statistic, uniform)})"
            name = statistic.words.name or statistic.words.heading
            yield Text.assemble((f"{name} ", "dim"), (_in_words(statistic, value), "bold"), (beside, "dim"))


def _in_words(statistic: Statistic, number: float) -> str:
    if statistic.unit == "weight":
        return shown(number, "weight", 3)
    unit = " nats" if statistic.unit == "nats" else ""
    return shown(number, "percent") if statistic.unit == "fraction" else shown(number, "short") + unit
