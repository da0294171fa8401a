"""The screen of effects: heads in a grid or the texts they read, in colours, and the numbers of the removal under the cursor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Static

from mhacli.record.effect import Effect, numbers_of
from mhacli.render.base.cells import cell, levels
from mhacli.render.base.colours import CHANGES
from mhacli.render.base.format import flowing
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
from mhacli.viewer.parts import Cells, HeadsScreen, entitle, key
from mhacli.viewer.session import Session

_NUMBER = 6
"""The width of a cell with a number."""


class EffectsScreen(HeadsScreen):
    """The effects in a record of `mha effect`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key(
            "home",
            "move('scroll_home')",
            "Home End",
            "the removal with the largest change, or with the smallest",
            "largest",
        ),
        key("enter,ctrl+j", "open", "Enter", "open the head that was removed", "open"),
        key("e", "app.back"),
    ]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether a key acts on effects."""
        return action not in ("scale", "sinks", "sequence", "say") and super().check_action(action, parameters)

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        summary = session.record.effect
        assert summary is not None, "the key for effects acts on a record that has some"
        self.summary, self.largest = summary, largest_change(session.record)
        self.cells = Cells(id="effects", cell_padding=0)
        entitle(self.cells, "effects")
        self.question, self.numbers = Static(id="question"), Static(id="numbers")
        self.removals: dict[tuple[int, int], Effect] = {}

    def compose(self) -> ComposeResult:
        """The panes from the top."""
        yield from (self.question, self.cells, self.numbers, self.note, self.footer)

    def _fill(self, width: int) -> None:
        """Takes the removals, with the cursor on the one with the largest change."""
        rows = [*self._rows(width)]
        n_columns = max(len(effects) for _, effects, _ in rows)
        has_heads = any(effect is not None and effect.removed == "head" for effect in rows[0][1])
        headings = [f"{head:>{_NUMBER - 1}}" if has_heads else "" for head in range(n_columns)]
        self.cells.fill(headings, [(name, cells) for name, _, cells in rows])
        for row, (_, effects, _) in enumerate(rows):
            self.removals |= {(row, place): effect for place, effect in enumerate(effects) if effect is not None}
        self.action_move("scroll_home")

    def _rows(self, width: int) -> Iterator[tuple[str, Sequence[Effect | None], list[Text]]]:
        """The names and removals: heads by layer, edges by text in parts that fit, then joint removals."""
        record = self.session.record
        for row in effect_rows(record):
            words = row.tokens or [f"{self._number(effect):>{_NUMBER}}" for effect in row.effects]
            cells = [self._cell(*cell) for cell in zip(row.effects, words, strict=True)]
            room = width - cell_len(row.name) - 3
            step = max(1, room // (max(map(cell_len, row.tokens)) + 2)) if row.tokens else len(cells)
            for begin in range(0, len(cells), step):
                yield row.name, row.effects[begin : begin + step], cells[begin : begin + step]
        for effect in record.effects:
            if effect.removed in ("heads", "spans"):
                yield removal_name(effect, record), [effect], [self._cell(effect, self._number(effect))]

    def _number(self, effect: Effect | None) -> str:
        change = None if effect is None else self.summary.change_of(effect)
        return "" if change is None else shown(change, "brief")

    def _cell(self, effect: Effect | None, words: str) -> Text:
        """The words of a removal in the colour of its change, or without colours with its sign."""
        change = np.nan if effect is None else self.summary.change_of(effect)
        level = int(levels(np.array(change or 0.0), np.array(change is not None), "change", self.largest))
        sign, style = cell(level, colour=self.session.colour, ramp=CHANGES)
        is_token = effect is not None and effect.removed == "edge"
        return Text.assemble(f" {sign}" if is_token else "", (words, style))

    def draw(self) -> None:
        """Redraws what was measured, and the numbers of the removal under the cursor."""
        paper = Paper(self.size.width, self.session.colour)
        if not self.removals and self.summary.verified.ok:
            self._fill(paper.width)
        effect = self.removals.get((self.cells.cursor_row, self.cells.cursor_column))
        words = effect_words(self.session.record, paper)
        self.question.update(Group(words[0]))
        below: list[RenderableType] = [words[-1]]
        if effect is not None:
            entitle(self.numbers, removal_words(effect, self.session.record))
            columns = map(number_column, numbers_of(self.session.record.effects))
            numbers = [Text.assemble((f"{of.heading} ", "dim"), (of.text(effect), "bold")) for of in columns]
            swatches, low = CHANGES.swatches(colour=paper.colour), "0"
            if self.summary.metric == "d_logit" and self.largest:
                low = f"-{shown(self.largest, 'number')}"
            else:  # no change is below 0
                swatches = swatches[len(swatches) // 2 :]
            ramp = Text.assemble(f"{low} ", *swatches, f" {shown(self.largest, 'number')}")
            meaning = Text(meaning_of(self.summary), "dim")
            below = [flowing(numbers, paper.width, "  "), flowing([ramp, meaning], paper.width), *below]
        self.numbers.update(Group(*below))

    def on_data_table_cell_highlighted(self) -> None:
        """Draws the numbers of another removal."""
        self.draw()

    def action_move(self, direction: str) -> None:
        """Moves to another removal."""
        if self.removals and direction in ("scroll_home", "scroll_end"):
            ranked = sorted(self.removals, key=lambda at: -abs(self.summary.change_of(self.removals[at]) or 0.0))
            row, column = ranked[0 if direction == "scroll_home" else -1]
            self.cells.move_cursor(row=row, column=column)
        elif self.removals:
            self.cells.move(direction)

    def action_open(self) -> None:
        """Opens the removed head."""
        effect = self.removals.get((self.cells.cursor_row, self.cells.cursor_column))
        for place, head in self.session.heads.items():
            layer = (None, None) if head.layer is None else (head.layer.kind, head.layer.layer)
            if effect is not None and head.head == effect.head and layer in ((None, None), (effect.kind, effect.layer)):
                self.open_head(place)
                return
        self.action_say("no single head was removed here")
