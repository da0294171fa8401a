"""The screen of effects: heads in a grid or the texts they read, in colours, and the numbers of the
removal under the cursor.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from mhacli.numbers import shown
from mhacli.record.effect import Effect
from mhacli.record.record import EffectRecord
from mhacli.render.base.colours import CHANGES
from mhacli.render.base.format import flowing
from mhacli.render.base.grids import cell, levels, scale_words, swatches
from mhacli.render.base.options import Screen as Paper
from mhacli.render.checkpoint import effect as view

from .keys import KEYS
from .screen import (
    Cell,
    HeadsScreen,
    Lines,
    Pane,
    Row,
    Words,
    named,
    title_line,
    wrapped,
)
from .session import Session

_NUMBER = 6
"""The width of a cell with a number."""


class EffectsScreen(HeadsScreen):
    """The effects in a record of `mha effect`."""

    BINDINGS = KEYS["effects"]

    def __init__(self, session: Session, record: EffectRecord) -> None:
        super().__init__(session)
        self.record = record
        self.summary = record.effect
        self.largest = view.largest_change(record)
        self.places = self.removals = dict[tuple[int, int], Effect]()
        self.lines = list[Row]()
        if self.summary.verified.ok:
            for row in view.effect_rows(record):
                self._add(row)
            for effect in record.effects:
                if effect.removed in ("heads", "spans"):
                    self._add(view.EffectRow(view.removal_name(effect, record), (effect,)))
        board = Pane(self._effects, id="effects")
        board.styles.height = 2 + len(self.lines)
        self.panes = Words(self._above, id="top"), board, Words(self._numbers, id="numbers")
        self.action_largest(0)

    def _add(self, row: view.EffectRow) -> None:
        """Adds the line of a layer, or those of a text that is wrapped."""
        lines = [range(len(row.effects))]
        if row.tokens:
            room = self.app.size.width - cell_len(row.name) - 4
            lines = wrapped(tuple(f" {token}" for token in row.tokens), room)
        for line in lines:
            cells = []
            for column, place in enumerate(line):
                effect = row.effects[place]
                cells.append(self._cell(effect, row.tokens[place] if row.tokens else ""))
                if effect is not None:
                    self.removals[len(self.lines), column] = effect
            self.lines.append(Row(row.name, cells))

    def _cell(self, effect: Effect | None, token: str) -> Cell:
        """The number of a removal, or the token of an edge, in the colour of its change, or without
        colours behind its sign.
        """
        change = None if effect is None else self.summary.change_of(effect)
        level = int(
            levels(np.array(change or 0.0), np.array(change is not None), "change", self.largest)
        )
        sign, style = cell(level, colour=self.session.colour, ramp=CHANGES)
        number = "" if change is None else shown(change, "brief")
        return f" {sign}{token}" if token else f"{number:>{_NUMBER}}", style

    def _effects(self, width: int, height: int) -> tuple[str, Lines]:
        """The heads by layer, or the tokens of edges, in the colours of what their removals
        change.
        """
        columns = [at[1] for at, effect in self.removals.items() if effect.removed == "head"]
        headings = [f"{head:>{_NUMBER}}" for head in range(1 + max(columns, default=-1))]
        title = "effects: heads (columns) in layers (rows)" if headings else "effects"
        return title, self.lines_of(self.lines, headings, width, height) if self.lines else []

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether an action is not one on pictures of heads."""
        return action not in ("scale", "sinks", "sequence")

    def _above(self, width: int) -> Iterable[Text]:
        """The answer, and what was measured and removed."""
        return view.effect_words(self.record, Paper(width, self.session.colour))[:-1]

    def _numbers(self, width: int) -> Iterator[Text]:
        """The numbers of the removal under the cursor, the scale, and the verification."""
        record = self.record
        colour = self.session.colour
        effect = self.removals.get(self.at)
        if effect is not None:
            yield Text(*title_line(view.removal_words(effect, record), width))
            columns = view.number_columns(record)
            numbers = [named(column.heading, column.text(effect)) for column in columns]
            yield flowing(numbers, width, "  ")
            meaning = [Text(view.meaning_of(self.summary), "dim")]
            shaded = view.effect_grids(record)
            if shaded:
                scale = f"scale {scale_words(shaded)} "
                meaning.insert(0, Text.assemble(scale, swatches(shaded, colour=colour)))
            yield flowing(meaning, width)
        yield view.effect_words(record, Paper(width, colour))[-1]

    def action_largest(self, rank: int) -> None:
        """Moves to the removal with the largest change, or with the smallest."""
        ranked = sorted(
            self.removals, key=lambda at: -abs(self.summary.change_of(self.removals[at]) or 0.0)
        )
        if ranked:
            self.go(*ranked[rank])

    def action_open(self) -> None:
        """Opens the removed head."""
        effect = self.removals.get(self.at)
        if effect is None or effect.head is None:
            self.action_say("no single head was removed here")
            return
        layers = ((effect.kind, effect.layer or 0),) if self.session.record.layers else None
        self.session.choose(effect.head, layers)
        super().action_open()
