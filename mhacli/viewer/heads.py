"""The screen over heads, from which the others are made; and the first screen: pictures of the heads of a layer, the signs of
all heads, and the numbers of the head under the cursor."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import ClassVar

from rich.cells import cell_len
from rich.console import RenderableType
from rich.segment import Segments
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Footer

from mhacli.io.memory import uncollected
from mhacli.record.heads import OF_REMOVAL, STATISTICS, Averages, HeadStatistics, Statistic, words_of_type
from mhacli.render.base import format as words
from mhacli.render.base.colours import EMPTY, KIND_SIGNS, type_sign
from mhacli.text.escape import visible
from mhacli.text.numbers import shown
from mhacli.viewer.panes import FAR, PLAIN, Cell, Pane, Words, segments, title_line
from mhacli.viewer.session import Place, Session

_LEAST = (9, 4)
"""The least columns and lines of a picture with its title and the gap beside it."""
_TOKENS = 100
"""The most tokens in the first line."""
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
    """A screen over the heads of a session, on whose `main` pane the keys act, with a message in its first line until the next
    key."""

    ALLOW_SELECT = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *ENDS,
        key("up", "move(-1, 0)", "↑ ↓ ← →", "move the cursor; a click does the same", "move"),
        key("down", "move(1, 0)"),
        key("left", "move(0, -1)"),
        key("right", "move(0, 1)"),
        key("pageup", "page(-1, 0)", "PgUp PgDn", "a page up or down"),
        key("pagedown", "page(1, 0)"),
        key("home", f"move(0, -{FAR})", "Home End", "the first or last of the row; with Ctrl, the first or last row"),
        key("end", "end"),
        key("ctrl+home", f"move(-{FAR}, 0)"),
        key("ctrl+end", f"move({FAR}, 0)"),
        key("e", "effects", "e", "effects of removed heads or weights, in a record of mha effect", "effects"),
        key("e", "say('the record has no effects: mha effect … --save makes one that has')"),
        key("s", "scale", "s", "how shades follow attention weights: linear or log", "scale"),
        key("x", "sinks", "x", "remove sinks and renormalise the rest of each row, or put them back", "sinks"),
        key("w", "app.read('walk')", "w", "the walkthrough: every tensor with its axes, formula, meaning and cost", "walk"),
        key("i", "app.read('origin')", "i", "where the numbers come from: command, versions, seed, self-check"),
        key("full_stop", "sequence(1)", ", .", "the previous or next sequence"),
        key("comma", "sequence(-1)"),
    ]  # fmt: skip
    main: Pane

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session, self._message = session, ""
        self.top, self.footer = Words(self._above, id="top"), Footer(compact=True)

    @abstractmethod
    def above(self, width: int) -> Iterable[Text]:
        """The words at the top."""

    def _above(self, width: int) -> Iterable[RenderableType]:
        return [Text(self._message, "bold yellow")] if self._message else self.above(width)

    def draw(self) -> None:
        """Redraws the screen."""
        for pane in self.query("Words, Pane"):
            pane.refresh(layout=True)

    def on_screen_resume(self) -> None:
        """Redraws for what was chosen on another screen."""
        self.draw()

    def on_key(self, event: events.Key) -> None:
        """Clears the message."""
        if self._message:
            self.action_say("")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether the record has effects to show."""
        return action != "effects" or self.session.record.effect is not None

    def action_say(self, message: str) -> None:
        """Shows a message in the first line until the next key."""
        self._message = message
        self.top.refresh(layout=True)

    @property
    def pane(self) -> Pane:
        """The pane on which the keys act."""
        return self.focused if isinstance(self.focused, Pane) else self.main

    def action_move(self, down: int, right: int) -> None:
        """Moves the cursor by rows and columns."""
        self.pane.move(down, right)

    def action_page(self, down: int, right: int) -> None:
        """Moves the cursor by pages."""
        self.pane.page(down, right)

    def action_end(self) -> None:
        """Moves the cursor to the end of its row."""
        self.pane.go(self.pane.row, self.pane.last(self.pane.row))

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

        picture = self.session.picture(place)
        if picture is None:
            self.action_say(self.session.why_nothing())
        else:
            self.session.place = place
            self.app.push_screen(HeadScreen(self.session, picture))


def doubts(session: Session) -> Text:
    """Why the numbers of the head under the cursor may be wrong."""
    head, parts = session.head, []
    if not head.record.self_check.ok:
        parts.append("  self-check FAILED: press i")
    if session.contradicts_itself():
        parts.append("  the record contradicts itself: press i")
    if head.layer is not None and not head.layer.verified:
        parts.append("  not verified")
    return Text("".join(parts), "bold yellow")


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
        self._has_numpy = False
        self._numbers = sorted({number for _, number in session.heads})
        self._grid = 1, 1, 1
        self.pictures, self.numbers = Words(self._pictures, id="pictures"), Words(self._about_head, id="numbers")
        self.legend = Words(self._legend, id="legend")
        self.main = Pane(self._fill, self._go, id="signs")
        self.main.styles.height = 2 + len(session.rows)

    def compose(self) -> ComposeResult:
        """The panes from the top."""
        yield from (self.top, self.pictures, self.main, self.numbers, self.legend, self.footer)

    def on_mount(self) -> None:
        """Draws the pictures after the first screen, because importing numpy takes long."""
        self.call_after_refresh(self.set_timer, _PAUSE_S, self._add_pictures)

    def _add_pictures(self) -> None:
        with uncollected():
            import mhacli.viewer.matrix  # noqa: F401
        self._has_numpy = True
        self.draw()

    def above(self, width: int) -> Iterable[Text]:
        """The checkpoint or layer, the text, and doubts."""
        record, text = self.session.record, self.session.record.sequences[self.session.sequence]
        c, model = record.config, record.model
        name = f"d_model {c.d_model} · {words.count_of(c.n_heads, 'head')} × d_head {c.d_head}"
        if model is not None:
            name = f"{visible(model.path.rstrip('/').rpartition('/')[2])} · {visible(model.family)}"
        line = Text.assemble((name, "bold cyan"), (f"  {' · '.join(words.texts_in_words(record))}", "bold"))
        line.append_text(doubts(self.session))
        if len(record.sequences) > 1:
            line.append(f"  sequence {self.session.sequence}:", style="bold")
        for place in range(min(_TOKENS, len(text.tokens))):
            line.append(f" {words.token_text(text, place)}", style="dim")
        yield line

    def _fill(self) -> None:
        """Draws the signs of all heads."""
        heads, pane, rows, width = self.session.heads, self.main, self.session.rows, len(str(self._numbers[-1])) + 1
        of_layers = f" (columns) in {len(rows)} layers (rows)" if len(rows) > 1 else ""
        pane.title = words.count_of(len(heads), "head") + of_layers
        pane.names, pane.headings, pane.n_rows = rows, [f"{number:<{width}}" for number in self._numbers], len(rows)
        pane.row, pane.column = self.session.place[0], self._numbers.index(self.session.place[1])

        def cells(row: int) -> list[Cell]:
            """The signs of a layer."""
            of_layer = [heads.get((row, number)) for number in self._numbers]
            signs = [("", PLAIN) if head is None else kind_sign(head.statistics) for head in of_layer]
            return [(f"{sign:<{width}}", style) for sign, style in signs]

        pane.cells = cells

    def _pictures(self, width: int) -> Iterator[Segments]:
        """The heads of the layer, as large as all fit side by side and below each other."""
        row, height, n_heads = self.session.place[0], self.pictures.size.height - 1, len(self._numbers)
        sizes = [(0, (1, 1, 1))]
        for n_lines in range(1, n_heads + 1):
            across = -(-n_heads // n_lines)
            of_one = width // across, height // n_lines
            if of_one[0] >= _LEAST[0] and of_one[1] >= _LEAST[1]:
                sizes.append((min(of_one[0], 2 * of_one[1]), (across, *of_one)))
        side, self._grid = max(sizes)
        name = self.session.rows[row]
        lines: list[Iterable[Cell]] = [[title_line(f"layer {name}" if name else "pictures", width)]]
        blocks = [self._picture((row, number)) for number in self._numbers] if side else []
        for begin in range(0, len(blocks), self._grid[0]):
            lines += map(chain.from_iterable, zip(*blocks[begin : begin + self._grid[0]], strict=True))
        yield segments(lines, width)

    def _picture(self, place: Place) -> list[list[Cell]]:
        """The lines of a head: its title and picture; blank without its weights, or before numpy is imported."""
        head, lines = self.session.heads.get(place), list[list[Cell]]()
        _, width, height = self._grid
        if head is not None:
            kind = "no statistics" if head.statistics is None else words_of_type(head.statistics.kind).name
            title = f"{head.head} {kind_sign(head.statistics)[0]} {kind}"
            lines.append([title_line(title, width - 1, is_chosen=place == self.session.place)])
            picture = self.session.picture(place) if self._has_numpy else None
            if picture is not None:
                lines += picture.thumbnail(height - 1, width - 1, colour=self.session.colour)
        lines += [[]] * (height - len(lines))
        return [[*line, (" " * (width - sum(cell_len(text) for text, _ in line)), PLAIN)] for line in lines]

    def _about_head(self, width: int) -> Iterator[Text]:
        """The type of the head under the cursor, and its statistics with uniform attention in parentheses."""
        head, statistics = self.session.head, self.session.head.statistics
        yield Text(*title_line(f"{head.label} · numbers (if uniform)", width))
        kind = "no statistics" if statistics is None else words.type_text(statistics)
        parts = [Text.assemble(kind_sign(statistics), (f" {kind}", "bold"))]
        for statistic in (*STATISTICS, *OF_REMOVAL):
            value, uniform = (_in_words(each, statistic) for each in (statistics, getattr(statistics, "uniform", None)))
            if statistic.is_main and value:
                beside = (f" ({uniform})" if uniform else "", "dim")
                parts.append(
                    Text.assemble(
                        (f"{statistic.words.name or statistic.words.heading} ", "dim"), (value, "bold"), beside
                    )
                )
        yield words.flowing(parts, width, "  ")

    def _legend(self, width: int) -> Iterator[Text]:
        """The shading of pictures, and the signs of the types that occur."""
        session = self.session
        hidden = " · sinks taken out, rows renormalised" if session.hides_sinks else ""
        parts = [Text(f"pictures: {session.scale_of(session.head)}, one scale for all heads{hidden}", "dim")]
        kinds = {head.statistics.kind for head in session.heads.values() if head.statistics is not None}
        for kind in KIND_SIGNS:
            if kind in kinds:
                parts.append(Text.assemble(type_sign(kind), f" {words_of_type(kind).name}"))
        yield words.flowing(parts, width, "  ")

    def _go(self, row: int, column: int) -> None:
        """Moves to a head; opens it if the cursor is there."""
        if (row, self._numbers[column]) == self.session.place:
            self.action_open()
        else:
            self.session.place = row, self._numbers[column]
            self.draw()

    def on_click(self, event: events.Click) -> None:
        """Moves to the head whose picture was clicked, or opens it."""
        n_across, width, height = self._grid
        across, down = event.x // width, (event.y - 1) // height
        column = down * n_across + across
        if event.widget is self.pictures and event.y > 0 and across < n_across and column < len(self._numbers):
            self._go(self.session.place[0], column)

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
