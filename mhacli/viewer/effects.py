"""The screen of effects: heads in a grid or the texts they read, in colours, and the numbers of the removal under the cursor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Static

from mhacli.record.effect import Effect, numbers_of
from mhacli.render.base.cells import CHANGES, cell
from mhacli.render.base.format import flowing, number_text
from mhacli.render.base.options import Screen as Paper
from mhacli.render.checkpoint.effect import effect_words, number_column, removal_words
from mhacli.render.checkpoint.effect_map import EffectMap, removal_name
from mhacli.viewer.parts import PLAIN, HeadsScreen, Items, entitle, key
from mhacli.viewer.session import Session

_NUMBER = 6
"""The width of a cell with a number."""


class EffectsScreen(HeadsScreen):
    """The effects in a record of `mha effect`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("home", "move('home')", "Home End", "the removal with the largest change, or with the smallest", "largest"),
        key("enter,ctrl+j", "open", "Enter", "open the head that was removed", "open"),
        key("e", "app.back"),
    ]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether a key acts on effects."""
        return action not in ("scale", "sinks", "sequence", "say") and super().check_action(action, parameters)

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.shown = EffectMap.of(session.record)
        self.items = Items(self._go, id="effects")
        entitle(self.items, "effects")
        self.question, self.numbers = Static(id="question"), Static(id="numbers")
        removals = session.record.effects if self.shown.summary.verified.ok else ()
        self.ranked = sorted(removals, key=lambda effect: -abs(self.shown.summary.change_of(effect) or 0.0))
        self._together = [effect for effect in removals if effect.removed in ("heads", "spans")]
        self._effects: list[Effect | None] = [effect for row in self.shown.rows for effect in row.effects]
        self._effects += [edge for read in self.shown.texts for edge in read.effects]
        self._effects += self._together
        self._at = self._effects.index(self.ranked[0]) if removals else 0

    def compose(self) -> ComposeResult:
        """The panes from the top."""
        yield from (self.question, self.items, self.numbers, self.note, self.footer)

    def draw(self) -> None:
        """Redraws the screen."""
        paper = Paper(self.size.width, self.session.colour)
        words = effect_words(self.session.record, paper)
        self.question.update(Group(words[0]))
        below: list[RenderableType] = [words[-1]]
        effect = self._effects[self._at] if self.ranked else None
        if effect is not None:
            self._draw_items(paper.width)
            entitle(self.numbers, removal_words(effect, self.session.record))
            below = [flowing([*self._numbers(effect)], paper.width, "  "), self._scale(paper), *below]
        self.numbers.update(Group(*below))

    def _numbers(self, effect: Effect) -> Iterator[Text]:
        """All numbers of a removal."""
        for column in map(number_column, numbers_of(self.session.record.effects)):
            yield Text.assemble((f"{column.heading} ", "dim"), (column.text(effect), "bold"))

    def _scale(self, paper: Paper) -> Text:
        """The scale of changes, in colours or in the signs used without them, and its meaning."""
        shown, swatches = self.shown, Text.assemble(*CHANGES.swatches(colour=paper.colour))
        swatches = swatches if shown.has_signs else swatches[len(swatches) // 2 :]  # no change is below 0
        ramp = Text(f"{shown.low} ").append_text(swatches).append(f" {number_text(shown.largest)}")
        return flowing([ramp, Text(shown.meaning, "dim")], paper.width)

    def _draw_items(self, width: int) -> None:
        """Draws the removals: heads by layer, edges by text, then joint removals."""
        shown, colour = self.shown, self.session.colour
        names = ("layer", *(row.name for row in shown.rows), *(read.name for read in shown.texts))
        label = max(map(cell_len, names))
        is_numbered = label + 2 + shown.n_columns * _NUMBER < width

        def word(effect: Effect | None) -> str:
            if is_numbered or effect is None:
                return f"{shown.word(effect):>{_NUMBER - 1 if is_numbered else 1}}"
            return "·" if colour else cell(shown.level(effect), colour=False, ramp=CHANGES)[0]

        rows = [(f"{row.name:>{label}}", [word(effect) for effect in row.effects]) for row in shown.rows]
        rows += [(f"{read.name:>{label}}", list(read.tokens)) for read in shown.texts]
        rows += [("", [f"{removal_name(effect, shown.record)} {shown.word(effect)}"]) for effect in self._together]
        axis = f"{'head':>{label}}   {_head_axis(shown.n_columns, _NUMBER if is_numbered else 2)}" if shown.rows else ""
        self.items.fill((width, shown), lambda: rows, axis)

        def look(item: int) -> tuple[str, Style, Style]:
            effect = self._effects[item]
            sign, style = cell(shown.level(effect), colour=colour, ramp=CHANGES)
            is_word = effect is not None and effect.removed != "head"
            return sign if is_word and not colour else " ", PLAIN, style

        self.items.show(range(self._at, self._at + 1), look)

    def _go(self, item: int) -> None:
        self._at = item
        self.draw()

    def action_move(self, direction: str) -> None:
        """Selects another removal."""
        if self.ranked:
            ends = {"home": self.ranked[0], "end": self.ranked[-1]}
            self._go(self._effects.index(ends[direction]) if direction in ends else self.items.moved(direction))

    def action_open(self) -> None:
        """Opens the removed head."""
        effect = self._effects[self._at] if self.ranked else None
        for place, head in self.session.heads.items():
            layer = (None, None) if head.layer is None else (head.layer.kind, head.layer.layer)
            if effect is not None and head.head == effect.head and layer in ((None, None), (effect.kind, effect.layer)):
                self.open_head(place)
                return
        self.action_say("no single head was removed here")


def _head_axis(n_heads: int, width: int) -> str:
    """The head numbers above their columns; every fifth if the cells are narrow."""
    if width == _NUMBER:
        return "".join(f"{head:>{width - 1}} " for head in range(n_heads)).rstrip()
    return "".join(f"{head:<{5 * width}}" for head in range(0, n_heads, 5)).rstrip()
