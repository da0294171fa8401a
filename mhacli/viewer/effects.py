"""The screen of effects: heads in a grid or the texts they read, in colours, and the numbers of the removal under the cursor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import numpy as np
from rich.cells import cell_len
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType

from mhacli.record.effect import Effect, EffectSummary, numbers_of
from mhacli.render.base.colours import CHANGES
from mhacli.render.base.format import flowing
from mhacli.render.base.grids import cell, levels
from mhacli.render.base.options import Screen as Paper
from mhacli.render.checkpoint.effect import (
    effect_rows,
    effect_words,
    largest_change,
    meaning_of,
    number_column,
    removal_name,
    removal_words,
)
from mhacli.text.numbers import shown
from mhacli.viewer.heads import HeadsScreen, key
from mhacli.viewer.panes import Cell, Lines, Pane, Words, named, title_line, wrapped
from mhacli.viewer.session import Session

_NUMBER = 6
"""The width of a cell with a number."""


class EffectsScreen(HeadsScreen):
    """The effects in a record of `mha effect`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("home", "largest(0)", "Home End", "the removal with the largest change, or with the smallest", "largest"),
        key("end", "largest(-1)"),
        key("enter,ctrl+j", "open", "Enter", "open the head that was removed", "open"),
        key("e", "app.back"),
    ]

    def __init__(self, session: Session, summary: EffectSummary) -> None:
        super().__init__(session)
        self.summary, self.largest = summary, largest_change(session.record)
        self.places = self.removals = dict[tuple[int, int], Effect]()
        self.lines: list[tuple[str, Sequence[Cell]]] = []
        self.effects, self.numbers = Pane(self._effects, id="effects"), Words(self._numbers, id="numbers")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether a key acts on effects."""
        return action not in ("scale", "sinks", "sequence", "say") and super().check_action(action, parameters)

    def compose(self) -> ComposeResult:
        """The panes from the top."""
        yield from (self.top, self.effects, self.numbers, self.note, self.footer)

    def on_mount(self) -> None:
        """Takes the removals, with the cursor on the one with the largest change."""
        for row, (name, effects, tokens) in enumerate(self._rows() if self.summary.verified.ok else ()):
            self.removals |= {(row, column): effect for column, effect in enumerate(effects) if effect is not None}
            self.lines.append((name, [*map(self._cell, effects, tokens)]))
        self.effects.styles.height = 2 + len(self.lines)
        self.action_largest(0)

    def _effects(self, width: int, height: int) -> tuple[str, Lines]:
        """The heads by layer, or the tokens of edges, in the colours of what their removals change."""
        if not self.lines:
            return "effects", []
        longest = max(len(cells) for _, cells in self.lines)
        is_head = self.removals[self.at].removed == "head"
        headings = [f"{head:>{_NUMBER}}" for head in range(longest)] if is_head else []
        return "effects", self.lines_of(self.lines, headings, width, height)

    def _rows(self) -> Iterator[tuple[str, Sequence[Effect | None], Sequence[str]]]:
        """The names, removals and words of heads by layer, of edges by text in lines, and of joint removals."""
        record = self.session.record
        for row in effect_rows(record):
            room, whole = self.app.size.width - cell_len(row.name) - 4, [range(len(row.effects))]
            for line in wrapped(tuple(f" {token}" for token in row.tokens), room) if row.tokens else whole:
                part = slice(line.start, line.stop)
                yield row.name, row.effects[part], row.tokens[part] or [""] * len(line)
        for effect in record.effects:
            if effect.removed in ("heads", "spans"):
                yield removal_name(effect, record), [effect], [""]

    def _cell(self, effect: Effect | None, token: str) -> Cell:
        """The number of a removal, or the token of an edge, in the colour of its change, or without colours behind its sign."""
        change = None if effect is None else self.summary.change_of(effect)
        level = int(levels(np.array(change or 0.0), np.array(change is not None), "change", self.largest))
        sign, style = cell(level, colour=self.session.colour, ramp=CHANGES)
        number = "" if change is None else shown(change, "brief")
        return f" {sign}{token}" if token else f"{number:>{_NUMBER}}", style

    def above(self, width: int) -> Iterable[Text]:
        """The answer, and what was measured and removed."""
        return effect_words(self.session.record, Paper(width, self.session.colour))[:-1]

    def _numbers(self, width: int) -> Iterator[Text]:
        """The numbers of the removal under the cursor, the scale, and the verification."""
        record, effect = self.session.record, self.removals.get(self.at)
        if effect is not None:
            yield Text(*title_line(removal_words(effect, record), width))
            columns = map(number_column, numbers_of(record.effects))
            yield flowing([named(of.heading, of.text(effect)) for of in columns], width, "  ")
            swatches, high = Text.assemble(*CHANGES.swatches(colour=self.session.colour)), shown(self.largest, "number")
            scale = Text.assemble(f"-{high} ", swatches, f" {high}")
            if self.summary.metric != "d_logit":  # no change is below 0
                scale = Text.assemble("0 ", swatches[len(swatches) // 2 :], f" {high}")
            yield flowing([scale, Text(meaning_of(self.summary), "dim")], width)
        yield effect_words(record, Paper(width, self.session.colour))[-1]

    def action_largest(self, rank: int) -> None:
        """Moves to the removal with the largest change, or with the smallest."""
        ranked = sorted(self.removals, key=lambda at: -abs(self.summary.change_of(self.removals[at]) or 0.0))
        if ranked:
            self.go(*ranked[rank])

    def action_open(self) -> None:
        """Opens the removed head."""
        effect = self.removals.get(self.at)
        if effect is None or effect.head is None:
            self.action_say("no single head was removed here")
            return
        has_layers = self.session.record.model is not None
        self.session.choose(effect.head, ((effect.kind, effect.layer or 0),) if has_layers else None)
        self.open_head(self.session.place)
