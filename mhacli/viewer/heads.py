"""The first screen: pictures of the heads of a layer, the signs of all heads, and the numbers of the head under the cursor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from typing import ClassVar

from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Group
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Static

from mhacli.io.memory import uncollected
from mhacli.record.heads import OF_REMOVAL, STATISTICS, Statistic, words_of_type
from mhacli.render.base import format as words
from mhacli.render.base.colours import KIND_SIGNS, type_sign
from mhacli.render.heads.drawable import DrawableHead
from mhacli.text.escape import visible
from mhacli.viewer.parts import ENDS, MOVES, PLAIN, SHARED, HeadsScreen, Items, entitle, key, kind_sign, one_line
from mhacli.viewer.session import Session

_LEAST, _GAP, _MOST_NAME = (8, 3), 2, 16
"""The least columns and lines of a picture, the gap beside it, and the columns of a layer's name."""
_PAUSE_S = 0.01
"""The pause before numpy is imported, in which the first screen appears."""


class Overview(HeadsScreen):
    """All heads of a record."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("up", "move('up')", "↑ ↓ ← →", "move from head to head; a click does the same", "move"),
        key("enter,ctrl+j", "open", "Enter", "open the head; so does a click on the head under the cursor", "open"),
        key("pageup", "move('pageup')", "PgUp PgDn", "a page of layers up or down"),
        key("home", "move('home')", "Home End", "the first or last head; with Ctrl, the first or last layer"),
        *[*MOVES, *ENDS, *SHARED],
    ]

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.pictures = Thumbnails(self._go_in_layer)
        self.signs = Items(self._go, id="signs")
        self.signs.can_focus = False
        self.numbers, self.legend = Static(id="numbers"), Static(id="legend")
        numbers = sorted({number for _, number in session.heads})
        self._places = [(row, number) for row in range(len(session.rows)) for number in numbers]
        self._numbers = numbers

    def compose(self) -> ComposeResult:
        """The panes from the top."""
        yield from (self.top_line, self.pictures, self.signs, self.numbers, self.legend, self.note, self.footer)

    def on_mount(self) -> None:
        """Draws the pictures after the first screen, because importing numpy takes long."""
        self.set_timer(_PAUSE_S, self.pictures.begin)

    def draw(self) -> None:
        """Redraws the screen."""
        session, width = self.session, self.size.width
        self.top_line.update(one_line(*_record_words(session)))
        self.pictures.show(session)
        self._draw_signs()
        entitle(self.numbers, f"{session.head.label} · numbers (if uniform)")
        self.numbers.update(Group(words.flowing([*_numbers(session.head)], width, "  ")))
        self.legend.update(Group(words.flowing([*self._legend()], width, "  ")))

    def _draw_signs(self) -> None:
        session, numbers = self.session, self._numbers
        of_layers = f" (columns) in {len(session.rows)} layers (rows)" if len(session.rows) > 1 else ""
        entitle(self.signs, words.count_of(len(session.heads), "head") + of_layers)
        names = [words.fitted(name, _MOST_NAME) for name in session.rows]
        indent = max(map(cell_len, names)) + 2 if any(names) else 0
        width = max(len(str(number)) for number in numbers)
        heads = map(session.heads.get, self._places)
        statistics = [None if head is None else head.statistics for head in heads]
        signs = [
            " " * width if place not in session.heads else f"{kind_sign(of)[0]:<{width}}"
            for place, of in zip(self._places, statistics, strict=True)
        ]
        rows = [(name, signs[row * len(numbers) :][: len(numbers)]) for row, name in enumerate(names)]
        header = " " * indent + "".join(f" {number:<{width}}" for number in numbers)
        self.signs.fill(session, lambda: rows, header)
        at = self._places.index(session.place)
        self.signs.show(range(at, at + 1), lambda item: (" ", PLAIN, kind_sign(statistics[item])[1]))

    def _legend(self) -> Iterator[Text]:
        """The shading of pictures, and the signs of the types that occur."""
        session = self.session
        hidden = "sinks taken out, rows renormalised" if session.hides_sinks else ""
        scale = f"pictures: {session.scale_of(session.head)}, one scale for all heads"
        yield Text(" · ".join(filter(None, (scale, hidden))), "dim")
        kinds = {head.statistics.kind for head in session.heads.values() if head.statistics is not None}
        for kind in KIND_SIGNS:
            if kind in kinds:
                yield Text.assemble(type_sign(kind), f" {words_of_type(kind).name}")

    # ------------------------------------------------------------------------------------------------------------ moving

    def _go(self, item: int) -> None:
        """Moves to a head; opens it if the cursor is there."""
        if self._places[item] == self.session.place:
            self.action_open()
        self.session.place = self._places[item]
        self.draw()

    def _go_in_layer(self, head: int) -> None:
        self._go(self._places.index((self.session.place[0], self.session.of_layer()[head].head)))

    def action_move(self, direction: str) -> None:
        """Moves to another head."""
        self.session.place = self._places[self.signs.moved(direction)]
        self.draw()

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
    if not record.self_check.ok:
        yield f"  self-check {words.check_text(record.self_check)}", "bold yellow"
    if session.contradicts_itself():
        yield "  contradicts itself: press i", "bold yellow"
    yield f"  sequence {sequence}:" if len(record.sequences) > 1 else "", "bold"
    yield "".join(f" {words.token_text(text, place)}" for place in range(min(100, len(text.tokens)))), "dim"


def _numbers(head: DrawableHead) -> Iterator[Text]:
    """The type of a head, and its statistics with uniform attention in parentheses."""
    statistics = head.statistics
    if statistics is None:
        yield Text("no statistics")
        return
    yield Text.assemble(kind_sign(statistics), (f" {words.type_text(statistics)}", "bold"))
    if head.layer is not None and not head.layer.verified:
        yield Text("not verified", "bold yellow")
    for statistic in (*STATISTICS, *OF_REMOVAL):
        value, uniform = (getattr(each, statistic.field, None) for each in (statistics, statistics.uniform))
        if statistic.is_main and value is not None:
            beside = "" if uniform is None else f" ({_in_words(statistic, uniform)})"
            name = statistic.words.name or statistic.words.heading
            yield Text.assemble((f"{name} ", "dim"), (_in_words(statistic, value), "bold"), (beside, "dim"))


def _in_words(statistic: Statistic, number: float) -> str:
    if statistic.unit == "weight":
        return words.weight_text(number, 3)
    unit = " nats" if statistic.unit == "nats" else ""
    return f"{100 * number:.0f} %" if statistic.unit == "fraction" else words.short_text(number) + unit


# ------------------------------------------------------------------------------------------------------------ pictures


class Thumbnails(Static):
    """A small picture of each head of the layer under the cursor; `go` follows a click on one."""

    def __init__(self, go: Callable[[int], None]) -> None:
        super().__init__(id="pictures")
        self._go = go
        self._session: Session | None = None
        self._has_begun = False
        self._across, self._tile = 1, (1, 1)

    def begin(self) -> None:
        """Draws from now on."""
        self._has_begun = True
        self.on_resize()

    def on_resize(self) -> None:
        """Draws for the new size."""
        if self._session is not None:
            self.show(self._session)

    def show(self, session: Session) -> None:
        """Draws the heads of the session's layer, as large as all fit side by side and below each other."""
        self._session, heads, sizes = session, session.of_layer(), []
        entitle(self, f"layer {session.rows[session.place[0]]}" if len(session.rows) > 1 else "pictures")
        for n_lines in range(1, len(heads) + 1):
            across = ceil(len(heads) / n_lines)
            width, height = self.size.width // across - _GAP, self.size.height // n_lines - 1
            if width >= _LEAST[0] and height >= _LEAST[1]:
                sizes.append((min(width, 2 * height), across, width, height))
        if not sizes or not self._has_begun:
            self.update("")
            return
        _, self._across, width, height = max(sizes)
        self._tile = width + _GAP, height + 1
        with uncollected():
            drawn = [_drawn(session, head, width, height) for head in heads]
        self.update(Columns(drawn, width=width, padding=(0, _GAP, 0, 0)))

    def on_click(self, event: events.Click) -> None:
        """Chooses the head under the mouse."""
        at = event.get_content_offset(self)
        if at is not None and self._session is not None:
            head = at.y // self._tile[1] * self._across + at.x // self._tile[0]
            if head < len(self._session.of_layer()):
                self._go(head)


def _drawn(session: Session, head: DrawableHead, width: int, height: int) -> Text:
    """A head's number and type over its picture."""
    from mhacli.viewer.matrix import HALF, cell_size, fitting, painted

    sign, style = kind_sign(head.statistics)
    kind = "" if head.statistics is None else words_of_type(head.statistics.kind).name
    title = sign if cell_len(f"{head.head} {sign} {kind}") > width else f"{sign} {kind}"
    is_own = head is session.head
    lines = [Text.assemble((f"{head.head} {title}", Style(reverse=True) if is_own else style))]
    picture = session.picture(head)
    if picture is not None:
        factor, size = cell_size(fitting(picture, height, width, colour=session.colour), colour=session.colour)
        shades, step = picture.at(factor), 2 if size == HALF else 1
        n_rows, n_columns = shades.cells.shape
        for begin in range(0, n_rows, step):
            rows = range(begin, min(n_rows, begin + step))
            lines.append(Text.assemble(*painted(shades, size, rows, range(n_columns), None, colour=session.colour)))
    lines += [Text()] * (1 + height - len(lines))
    return Text("\n", no_wrap=True).join(lines)
