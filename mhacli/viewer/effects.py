"""The screen of effects: heads in a grid or the texts they read, in colours, and the numbers of the removal under the cursor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import numpy as np
from rich.cells import cell_len
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType

from mhacli.record.effect import Effect, numbers_of
from mhacli.render.base.cells import cell, levels
from mhacli.render.base.colours import CHANGES
from mhacli.render.base.format import flowing
from mhacli.render.base.options import Screen as Paper
from mhacli.render.checkpoint.effect import (
    EffectRow,
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
from mhacli.viewer.panes import Cell, Pane, Words, title_line
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

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.main, self.numbers = Pane(lambda: None, self._go, id="effects"), Words(self._numbers, id="numbers")
        self.main.title = "effects"
        self.rows: list[EffectRow] = []

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether a key acts on effects."""
        return action not in ("scale", "sinks", "sequence", "say") and super().check_action(action, parameters)

    def compose(self) -> ComposeResult:
        """The panes from the top."""
        yield from (self.top, self.main, self.numbers, self.footer)

    def on_mount(self) -> None:
        """Takes the removals, with the cursor on the one with the largest change."""
        summary = self.session.record.effect
        if summary is not None and summary.verified.ok:
            self.rows = [*self._rows()]
            self.main.names, self.main.n_rows = [row.name for row in self.rows], len(self.rows)
            self.main.styles.height = 2 + len(self.rows)
            if not self.rows[0].tokens:
                n_columns = max(len(row.effects) for row in self.rows)
                self.main.headings = [f"{head:>{_NUMBER}}" for head in range(n_columns)]
            self.main.cells = self._cells
            self.action_largest(0)

    def _rows(self) -> Iterator[EffectRow]:
        """Heads by layer, edges by text in parts that fit, then joint removals."""
        record = self.session.record
        for row in effect_rows(record):
            room, step = self.app.size.width - cell_len(row.name) - 3, len(row.effects)
            if row.tokens:
                step = max(1, room // (max(map(cell_len, row.tokens)) + 2))
            for begin in range(0, len(row.effects), step):
                part = slice(begin, begin + step)
                yield EffectRow(row.name, row.effects[part], row.tokens[part])
        for effect in record.effects:
            if effect.removed in ("heads", "spans"):
                yield EffectRow(removal_name(effect, record), (effect,))

    def _change(self, effect: Effect | None) -> float:
        """The change by a removal; NaN if it is not known."""
        summary = self.session.record.effect
        change = None if effect is None or summary is None else summary.change_of(effect)
        return np.nan if change is None else change

    def _cells(self, row: int) -> list[Cell]:
        """Numbers, or the tokens of edges, in the colours of the changes, or without colours tokens behind signs."""
        changes, tokens, cells = (
            np.array([*map(self._change, self.rows[row].effects)]),
            self.rows[row].tokens,
            list[Cell](),
        )
        of_row = levels(changes, ~np.isnan(changes), "change", largest_change(self.session.record))
        for place, level in enumerate(of_row.tolist()):
            sign, style = cell(level, colour=self.session.colour, ramp=CHANGES)
            number = "" if np.isnan(changes[place]) else shown(changes[place], "brief")
            cells.append((f" {sign}{tokens[place]}" if tokens else f"{number:>{_NUMBER}}", style))
        return cells

    @property
    def effect(self) -> Effect | None:
        """The removal under the cursor."""
        return self.rows[self.main.row].effects[self.main.column] if self.rows else None

    def above(self, width: int) -> Iterable[Text]:
        """The answer, and what was measured and removed."""
        return effect_words(self.session.record, Paper(width, self.session.colour))[:-1]

    def _numbers(self, width: int) -> Iterator[Text]:
        """The numbers of the removal under the cursor, the scale, and the verification."""
        record, effect, summary = self.session.record, self.effect, self.session.record.effect
        if effect is not None and summary is not None:
            yield Text(*title_line(removal_words(effect, record), width))
            columns = map(number_column, numbers_of(record.effects))
            numbers = [Text.assemble((f"{of.heading} ", "dim"), (of.text(effect), "bold")) for of in columns]
            yield flowing(numbers, width, "  ")
            swatches, high = CHANGES.swatches(colour=self.session.colour), shown(largest_change(record), "number")
            low = f"-{high} "
            if summary.metric != "d_logit":  # no change is below 0
                swatches, low = swatches[len(swatches) // 2 :], "0 "
            yield flowing([Text.assemble(low, *swatches, f" {high}"), Text(meaning_of(summary), "dim")], width)
        yield effect_words(record, Paper(width, self.session.colour))[-1]

    def _go(self, row: int, column: int) -> None:
        self.main.row, self.main.column = row, column
        self.draw()

    def action_largest(self, rank: int) -> None:
        """Moves to the removal with the largest change, or with the smallest."""
        places = [
            (row, column) for row, of in enumerate(self.rows) for column, effect in enumerate(of.effects) if effect
        ]
        ranked = sorted(places, key=lambda at: -abs(np.nan_to_num(self._change(self.rows[at[0]].effects[at[1]]))))
        if ranked:
            self._go(*ranked[rank])

    def action_open(self) -> None:
        """Opens the removed head."""
        effect = self.effect
        for place, head in self.session.heads.items():
            layer = (None, None) if head.layer is None else (head.layer.kind, head.layer.layer)
            if effect is not None and head.head == effect.head and layer in ((None, None), (effect.kind, effect.layer)):
                self.open_head(place)
                return
        self.action_say("no single head was removed here")
