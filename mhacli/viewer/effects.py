"""The screen of effects: heads in a grid or the texts they read, in colours, and the numbers of the selected removal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.message import Message

from mhacli.record.effect import Effect, numbers_of
from mhacli.render.base.cells import CHANGES, cell
from mhacli.render.base.format import fitted
from mhacli.render.base.options import Screen as Paper
from mhacli.render.checkpoint.effect import (
    MARK,
    NUMBER,
    effect_words,
    head_axis,
    number_column,
    removal_words,
    scale_text,
)
from mhacli.render.checkpoint.effect_map import EffectMap, removal_name
from mhacli.viewer.lines import BOLD, CURSOR, DIM, PLAIN, Line, Lines, Pane, StyledText, flowed, ruled, segments
from mhacli.viewer.screen import EFFECT_KEYS, HeadsScreen, bindings, keys_line
from mhacli.viewer.session import Session
from mhacli.viewer.text import rendered_lines

_SMALL = 16
"""The least height of a screen for the legend."""


@dataclass(frozen=True)
class _Cell:
    """The cell of a removal; None for a head that was not removed. The last column is a gap."""

    effect: Effect | None
    text: StyledText

    @property
    def width(self) -> int:
        """The width in columns."""
        return cell_len(self.text[0])


@dataclass(frozen=True)
class _EffectLine:
    """Removals on one line, with their common name."""

    name: str
    cells: tuple[_Cell, ...]


class EffectGrid(Pane, can_focus=True):
    """The grid of removals. Posts `Chosen` on a click."""

    class Chosen(Message):
        """A removal was selected."""

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
        """Selects a removal."""
        self.effect = effect
        self.repaint()

    # ----------------------------------------------------------------------------------------------- what lies where

    @property
    def _label(self) -> int:
        names = ("layer", *(row.name for row in self.shown.rows), *(read.name for read in self.shown.texts))
        return max(map(cell_len, names)) + 2

    @property
    def _above(self) -> int:
        """The number of lines above the removals: the title, and the head numbers."""
        return 2 if self.shown.rows else 1

    def _cell_width(self, width: int) -> int:
        return NUMBER if self._label + self.shown.n_columns * NUMBER <= width else MARK

    def has_signs(self, width: int) -> bool:
        """Whether changes have signs instead of colours, unless cells have numbers."""
        return self._cell_width(width) == MARK or any(effect.removed != "head" for effect in self.shown.record.effects)

    def lines(self, width: int) -> list[_EffectLine]:
        """The removals in lines of this width: heads by layer, edges by text, then joint removals."""
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

    def moved(self, direction: str) -> Effect:
        """The removal next to the selected one in a direction, or the first or last in rank."""
        if direction in ("home", "end"):
            return self.ranked[0 if direction == "home" else -1]
        places = [[*_places(line)] for line in self.lines(self.size.width)]
        row = next(i for i, line in enumerate(places) if any(effect is self.effect for _, effect in line))
        if direction in ("left", "right"):
            in_order = [effect for line in places for _, effect in line]
            at = next(i for i, effect in enumerate(in_order) if effect is self.effect)
            return in_order[max(0, min(len(in_order) - 1, at + (1 if direction == "right" else -1)))]
        x = next(x for x, effect in places[row] if effect is self.effect)
        others = places[row + 1 :] if direction == "down" else places[:row][::-1]
        line = next((line for line in others if line), places[row])
        return min(line, key=lambda place: abs(place[0] - x))[1]

    # --------------------------------------------------------------------------------------------------- on the screen

    def paint(self, width: int, height: int) -> Sequence[Line]:
        """The title, the head numbers, and as many lines as fit, including the selected one."""
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
        for removal in line.cells:
            text, style = removal.text
            style = CURSOR if removal.effect is not None and removal.effect is self.effect else style
            pieces += [(text[:-1], style), (" ", PLAIN)]
        return segments(pieces)

    def on_click(self, event: events.Click) -> None:
        """Selects the removal under the mouse."""
        lines, row = self.lines(self.size.width), self._top + event.y - self._above
        if event.y < self._above or row >= len(lines):
            return
        x = self._label
        for removal in lines[row].cells:
            if x <= event.x < x + removal.width and removal.effect is not None:
                self.post_message(self.Chosen(removal.effect))
            x += removal.width


def _wrapped(name: str, cells: Sequence[_Cell], room: int) -> Iterator[_EffectLine]:
    """The cells in lines that fit. The first line has the name."""
    line: list[_Cell] = []
    for removal in cells:
        if line and sum(placed.width for placed in line) + removal.width > room:
            yield _EffectLine(name, tuple(line))
            name, line = "", []
        line.append(removal)
    yield _EffectLine(name, tuple(line))


def _places(line: _EffectLine) -> Iterator[tuple[int, Effect]]:
    """The removals of a line with their first columns."""
    x = 0
    for removal in line.cells:
        if removal.effect is not None:
            yield x, removal.effect
        x += removal.width


class EffectsScreen(HeadsScreen):
    """The effects in a record of `mha effect`."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(EFFECT_KEYS)

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.shown = EffectMap.of(session.record)
        self.question, self.numbers, self.last = (Lines(id=name) for name in ("question", "numbers", "last"))
        self.grid: EffectGrid | None = None
        if self.shown.summary.verified.ok and session.record.effects:
            self.grid = EffectGrid(self.shown, colour=session.colour)

    def compose(self) -> ComposeResult:
        """The panes from the top."""
        yield self.question
        if self.grid is not None:
            yield self.grid
        yield self.numbers
        yield self.last

    def on_mount(self) -> None:
        """Focuses the removals."""
        if self.grid is not None:
            self.grid.focus()

    def on_resize(self) -> None:
        """Redraws for the new size."""
        self.call_after_refresh(self.draw)

    def on_screen_resume(self) -> None:
        """Redraws after another screen."""
        self.draw()

    def draw(self) -> None:
        """Redraws the screen."""
        width = self.size.width
        if not self.is_mounted or width == 0:
            return
        paper = Paper(width, self.session.colour)
        words = effect_words(self.session.record, paper)
        below = [] if self.grid is None else self._numbers(self.grid.effect, width)
        below += (
            []
            if self.grid is None
            else rendered_lines([scale_text(self.shown, paper, has_signs=self.grid.has_signs(width))], width)
        )
        below += rendered_lines([words[-1]], width)
        is_small = self.size.height < _SMALL
        shown = (self.question, rendered_lines([words[0]], width), 1), (self.numbers, below, 2)
        for pane, lines, least in shown:
            pane.styles.height = min(len(lines), least) if is_small else len(lines)
            pane.show(lambda width, lines=lines: lines)  # type: ignore[misc]
        self.last.styles.height = 1
        self.last.show(lambda width: [keys_line(EFFECT_KEYS, width, message=self._message)])

    def _numbers(self, effect: Effect, width: int) -> list[Line]:
        """The name and all numbers of a removal."""
        columns = map(number_column, numbers_of(self.session.record.effects))
        parts: list[list[StyledText]] = [[(f"{c.heading} ", DIM), (c.text(effect), BOLD)] for c in columns]
        return [ruled(removal_words(effect, self.session.record), width, focused=False), *flowed(parts, width, "  ")]

    def action_move(self, direction: str) -> None:
        """Selects another removal."""
        if self.grid is not None:
            self._choose(self.grid.moved(direction))

    def on_effect_grid_chosen(self, message: EffectGrid.Chosen) -> None:
        """Shows the removal selected by mouse."""
        self._choose(message.effect)

    def _choose(self, effect: Effect) -> None:
        if self.grid is not None:
            self._message = ""
            self.grid.show(effect)
            self.draw()

    def action_open(self) -> None:
        """Opens the removed head."""
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
        for place in self.session.head_table.places:
            head = self.session.head_table.head_at(*place)
            if head is not None and head.head == effect.head:
                layer = head.layer
                if layer is None or (layer.kind, layer.layer) == (effect.kind, effect.layer):
                    return place
        return None
