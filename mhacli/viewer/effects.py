"""The screen of effects: heads in a grid or the texts that they read, in colours, and the numbers of the one under the cursor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.message import Message

from mhacli.render.base.cells import CHANGES, cell
from mhacli.render.base.format import fitted
from mhacli.render.base.options import Screen as Paper
from mhacli.render.checkpoint.effect import (
    MARK,
    NUMBER,
    effect_words,
    head_axis,
    heading_of,
    number_words,
    removal_words,
    scale_text,
)
from mhacli.render.checkpoint.effect_map import EffectMap, removal_name
from mhacli.results.record.effect import Effect, numbers_of
from mhacli.viewer.lines import BOLD, CURSOR, DIM, PLAIN, Line, Lines, Pane, StyledText, flowed, ruled, segments
from mhacli.viewer.screen import EFFECT_KEYS, HeadsScreen, bindings, keys_line
from mhacli.viewer.session import Session
from mhacli.viewer.text import drawn_lines

_SMALL = 16
"""The lines of a screen below which words give way to the removals."""


@dataclass(frozen=True)
class _Cell:
    """What is drawn of a removal; None stands for a head that was not removed. The last column is a gap."""

    effect: Effect | None
    text: StyledText

    @property
    def width(self) -> int:
        """The columns that it takes."""
        return cell_len(self.text[0])


@dataclass(frozen=True)
class _EffectLine:
    """A line of removals beside each other, behind what they have in common."""

    name: str
    cells: tuple[_Cell, ...]


class EffectGrid(Pane, can_focus=True):
    """The removals. It posts `Chosen` where the mouse chooses one."""

    class Chosen(Message):
        """A removal was chosen."""

        def __init__(self, effect: Effect) -> None:
            super().__init__()
            self.effect = effect

    def __init__(self, shown: EffectMap, *, colour: bool) -> None:
        super().__init__(id="effects")
        self.shown, self.colour = shown, colour
        self.ranked = sorted(shown.record.effects, key=lambda effect: -abs(shown.summary.change_of(effect) or 0.0))
        self.effect = self.ranked[0]
        self._top = 0

    def show(self, effect: Effect) -> None:
        """Puts the cursor on a removal."""
        self.effect = effect
        self.repaint()

    # ----------------------------------------------------------------------------------------------- what lies where

    @property
    def _label(self) -> int:
        """The columns of the names of lines."""
        names = ("layer", *(row.name for row in self.shown.rows), *(read.name for read in self.shown.texts))
        return max(map(cell_len, names)) + 2

    @property
    def _above(self) -> int:
        """The lines above the removals: the title, and the numbers of heads."""
        return 2 if self.shown.rows else 1

    def _cell_width(self, width: int) -> int:
        return NUMBER if self._label + self.shown.n_columns * NUMBER <= width else MARK

    def has_signs(self, width: int) -> bool:
        """Whether signs stand for changes where there is no colour: not where each removal is a cell with its number."""
        return self._cell_width(width) == MARK or any(effect.removed != "head" for effect in self.shown.record.effects)

    def lines(self, width: int) -> list[_EffectLine]:
        """The removals in lines of that width: heads by layers, edges by texts, then what was removed together."""
        shown, room = self.shown, width - self._label
        size = self._cell_width(width)
        lines: list[_EffectLine] = []
        for row in shown.rows:
            lines += _wrapped(row.name, [self._head_cell(effect, size) for effect in row.heads], room)
        for read in shown.texts:
            cells = [self._word_cell(edge, token) for edge, token in zip(read.edges, read.tokens, strict=True)]
            lines += _wrapped(read.name, cells, room)
        for effect in shown.record.effects:
            if effect.removed in ("heads", "spans"):
                words = f"{removal_name(effect, shown.record)} {shown.word(effect)}"
                lines.append(_EffectLine("", (self._word_cell(effect, fitted(words, room - 2)),)))
        return lines

    def _head_cell(self, effect: Effect | None, size: int) -> _Cell:
        word = self.shown.word(effect) if size == NUMBER else ""
        return _Cell(effect, cell(self.shown.level(effect), size, colour=self.colour, ramp=CHANGES, gap=1, word=word))

    def _word_cell(self, effect: Effect, word: str) -> _Cell:
        sign, style = cell(self.shown.level(effect), 1, colour=self.colour, ramp=CHANGES)
        return _Cell(effect, (f"{word} " if self.colour else f"{sign}{word} ", style))

    def moved(self, way: str) -> Effect:
        """The removal beside, above or below that of the cursor, or the largest or smallest."""
        if way in ("home", "end"):
            return self.ranked[0 if way == "home" else -1]
        places = [[*_places(line)] for line in self.lines(self.size.width)]
        row = next(i for i, line in enumerate(places) if any(effect is self.effect for _, effect in line))
        if way in ("left", "right"):
            own = [effect for line in places for _, effect in line]
            at = next(i for i, effect in enumerate(own) if effect is self.effect)
            return own[max(0, min(len(own) - 1, at + (1 if way == "right" else -1)))]
        x = next(x for x, effect in places[row] if effect is self.effect)
        others = places[row + 1 :] if way == "down" else places[:row][::-1]
        line = next((line for line in others if line), places[row])
        return min(line, key=lambda place: abs(place[0] - x))[1]

    # --------------------------------------------------------------------------------------------------- on the screen

    def paint(self, width: int, height: int) -> Sequence[Line]:
        """The title, the numbers of the heads, and as many lines as fit, that of the cursor among them."""
        lines = self.lines(width)
        room = max(1, height - self._above)
        row = next(i for i, line in enumerate(lines) if any(effect is self.effect for _, effect in _places(line)))
        self._top = max(0, min(max(self._top, row - room + 1), row, max(0, len(lines) - room)))
        size = self._cell_width(width)
        is_whole = self._label + self.shown.n_columns * size <= width
        axis = head_axis(self.shown.n_columns, size) if is_whole else ""
        head = [segments([(f"{'head':>{self._label - 2}}  {axis}", DIM)])] if self.shown.rows else []
        painted = [self._painted(line) for line in lines[self._top : self._top + room]]
        return [ruled("effects", width, focused=self.has_focus), *head, *painted]

    def _painted(self, line: _EffectLine) -> Line:
        pieces: list[StyledText] = [(f"{line.name:>{self._label - 2}}  ", BOLD)]
        for one in line.cells:
            text, style = one.text
            style = CURSOR if one.effect is not None and one.effect is self.effect else style
            pieces += [(text[:-1], style), (" ", PLAIN)]
        return segments(pieces)

    def on_click(self, event: events.Click) -> None:
        """Chooses the removal under the mouse."""
        lines, row = self.lines(self.size.width), self._top + event.y - self._above
        if event.y < self._above or row >= len(lines):
            return
        x = self._label
        for one in lines[row].cells:
            if x <= event.x < x + one.width and one.effect is not None:
                self.post_message(self.Chosen(one.effect))
            x += one.width


def _wrapped(name: str, cells: Sequence[_Cell], room: int) -> Iterator[_EffectLine]:
    """The cells in lines that are no wider than there is room; the first has the name."""
    line: list[_Cell] = []
    for one in cells:
        if line and sum(other.width for other in line) + one.width > room:
            yield _EffectLine(name, tuple(line))
            name, line = "", []
        line.append(one)
    yield _EffectLine(name, tuple(line))


def _places(line: _EffectLine) -> Iterator[tuple[int, Effect]]:
    """The removals of a line, each with the column at which it begins."""
    x = 0
    for one in line.cells:
        if one.effect is not None:
            yield x, one.effect
        x += one.width


class EffectsScreen(HeadsScreen):
    """What removals change, of a record of `mha effect`."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(EFFECT_KEYS)

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.shown = EffectMap.of(session.record)
        self.question, self.numbers, self.last = (Lines(id=name) for name in ("question", "numbers", "last"))
        self.grid: EffectGrid | None = None
        if self.shown.summary.verified.ok and session.record.effects:
            self.grid = EffectGrid(self.shown, colour=session.colour)

    def compose(self) -> ComposeResult:
        """The parts, from the top."""
        yield self.question
        if self.grid is not None:
            yield self.grid
        yield self.numbers
        yield self.last

    def on_mount(self) -> None:
        """Keys go to the removals."""
        if self.grid is not None:
            self.grid.focus()

    def on_resize(self) -> None:
        """Everything may lie elsewhere."""
        self.call_after_refresh(self.draw)

    def on_screen_resume(self) -> None:
        """Draws again what another screen hid."""
        self.draw()

    def draw(self) -> None:
        """Shows everything anew."""
        width = self.size.width
        if not self.is_mounted or width == 0:
            return
        paper = Paper(width, self.session.colour)
        words = effect_words(self.session.record, paper)
        below = [] if self.grid is None else self._numbers(self.grid.effect, width)
        below += (
            []
            if self.grid is None
            else drawn_lines([scale_text(self.shown, paper, has_signs=self.grid.has_signs(width))], width)
        )
        below += drawn_lines([words[-1]], width)
        is_small = self.size.height < _SMALL
        shown = (self.question, drawn_lines([words[0]], width), 1), (self.numbers, below, 2)
        for pane, lines, least in shown:
            pane.styles.height = min(len(lines), least) if is_small else len(lines)
            pane.show(lambda width, lines=lines: lines)  # type: ignore[misc]
        self.last.styles.height = 1
        self.last.show(lambda width: [keys_line(EFFECT_KEYS, width, message=self._message)])

    def _numbers(self, effect: Effect, width: int) -> list[Line]:
        """Every number of a removal, below what was removed."""
        names = numbers_of(self.session.record.effects)
        parts: list[list[StyledText]] = [
            [
                (f"{heading_of(name, self.shown.summary)} ", DIM),
                (number_words(effect, name, self.shown.summary.floor), BOLD),
            ]
            for name in names
        ]
        return [ruled(removal_words(effect, self.session.record), width, focused=False), *flowed(parts, width, "  ")]

    def action_move(self, way: str) -> None:
        """Another removal."""
        if self.grid is not None:
            self._choose(self.grid.moved(way))

    def on_effect_grid_chosen(self, message: EffectGrid.Chosen) -> None:
        """A removal was chosen by the mouse."""
        self._choose(message.effect)

    def _choose(self, effect: Effect) -> None:
        if self.grid is not None:
            self._message = ""
            self.grid.show(effect)
            self.draw()

    def action_open(self) -> None:
        """Looks into the head that was removed."""
        place = None if self.grid is None else self._place_of(self.grid.effect)
        if place is None:
            self.say("no single head was removed here")
            return
        before, self.session.place = self.session.place, place
        if self.session.head().drawable is None:
            self.session.place = before
            self.say(self.session.why_nothing())
            return
        from mhacli.viewer.head import HeadScreen

        self.app.push_screen(HeadScreen(self.session))

    def _place_of(self, effect: Effect) -> tuple[int, int] | None:
        """Where the head of a removal stands among all heads."""
        for place in self.session.head_table.places:
            head = self.session.head_table.head_at(*place)
            if head is not None and head.head == effect.head:
                layer = head.layer
                if layer is None or (layer.kind, layer.layer) == (effect.kind, effect.layer):
                    return place
        return None
