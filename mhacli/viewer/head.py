"""The screen of one head: its matrix, a query's strongest keys, and the texts, with a common cursor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import ClassVar

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container

from mhacli.errors import first_names
from mhacli.render.base import format as words
from mhacli.render.base.cells import FORBIDDEN, NOT_A_NUMBER, ends
from mhacli.render.base.colours import EMPTY, NAN_SIGN, WEIGHTS, glyph
from mhacli.text.escape import visible
from mhacli.text.numbers import shown
from mhacli.viewer.heads import HeadsScreen, doubts, key, kind_sign
from mhacli.viewer.matrix import KEY, QUERY, TAKEN_SIGN, TIGHT, Matrix, Picture
from mhacli.viewer.panes import PLAIN, Cell, Pane, Words
from mhacli.viewer.session import Session

_MOST = (3, 5, 8, 12, 20, 50, 100, 1000)
"""The most top keys to list."""
_MOST_SINKS = 6
"""The most sinks that a caption names."""
_DECIMALS, _MOST_NAME = 5, 18
"""The decimals of weights in the list of top keys, and its widest name."""
_AXES = ("query", "key")
_SEARCHED = "Tab other axis · Enter take · Esc go back"


class HeadScreen(HeadsScreen):
    """One head with the cursor on a query and a key."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("shift+pageup", "page(0, -1)", "⇧PgUp ⇧PgDn", "a page to the left or right"),
        key("shift+pagedown", "page(0, 1)"),
        key("tab", "app.focus_next", "Tab", "which part the arrows move in: matrix, list, keys, queries", "part"),
        key("shift+tab", "app.focus_previous"),
        key("h,right_square_bracket", "head(1)", "h ]", "the next head", "head"),
        key("H,left_square_bracket", "head(-1)", "H [", "the previous head"),
        key("l,right_curly_bracket", "layer(1)", "l }", "the same head of the next layer", "layer"),
        key("L,left_curly_bracket", "layer(-1)", "L {", "the same head of the previous layer"),
        key("plus,equals_sign", "zoom(1)", "+ -", "larger or smaller cells; 0 so that all fit", "zoom"),
        key("minus", "zoom(-1)"),
        key("0", "zoom(0)"),
        key("slash", "jump", "/", "jump to a token by typing it, or to a place by its number", "find"),
        key("n", "match(1)", "n N", "the next or previous match"),
        key("N", "match(-1)"),
        key("t", "most(1)", "t T", "more or fewer of the strongest keys"),
        key("T", "most(-1)"),
        key("y", "copy", "y", "copy the row as JSON to the terminal's clipboard (OSC 52)", "copy"),
    ]  # fmt: skip

    def __init__(self, session: Session, picture: Picture) -> None:
        super().__init__(session)
        self.main = self.matrix = Matrix(self._go, colour=session.colour)
        self.list = Pane(self._fill_list, self._choose, id="list")
        self.texts = [
            Pane(partial(self._fill_text, axis), partial(self._go_to, axis), id=_AXES[axis]) for axis in (QUERY, KEY)
        ]
        self.read_out, self.legend = Words(self._read_out, id="read-out"), Words(self._legend, id="legend")
        self._most: int | None = None
        self._listed: list[int] = []
        self._lines: list[list[range]] = [[], []]
        self._axis, self._typed, self._found = QUERY, "", list[int]()
        self._before: tuple[int, int] | None = None
        row = picture.weights.shape[QUERY] - 1
        self.matrix.show(picture, row, next((column for column, _ in picture.top_keys(row)), 0))

    def compose(self) -> ComposeResult:
        """The panes from the top."""
        yield self.top
        yield Container(self.matrix, self.list, self.texts[KEY], self.texts[QUERY], id="body")
        yield from (self.read_out, self.legend, self.footer)

    @property
    def at(self) -> tuple[int, int]:
        """The row and column of the cursor."""
        return self.matrix.row, self.matrix.column

    @property
    def picture(self) -> Picture:
        """The picture that is drawn."""
        return self.matrix.picture

    def draw(self) -> None:
        """Draws the session's head, with the cursor on the same tokens as before if possible."""
        before, picture = self.picture, self.session.picture()
        if picture is not None and picture is not before:
            places = [before.places(axis, self.at[axis]).start for axis in (QUERY, KEY)]
            self.matrix.show(picture, *(picture.cell_of(axis, places[axis]) for axis in (QUERY, KEY)))
        super().draw()

    def above(self, width: int) -> Iterator[Text]:
        """The head, its type, its sequence, and doubts."""
        head, sequence, n_sequences = self.session.head, self.session.sequence, len(self.session.record.sequences)
        kind = "no statistics" if head.statistics is None else words.type_text(head.statistics)
        line = Text.assemble((head.label, "bold cyan"), "  ", kind_sign(head.statistics), f" {kind}")
        if n_sequences > 1:
            line.append(f"  sequence {sequence} of 0–{n_sequences - 1}", style="bold")
        yield line.append_text(doubts(self.session))

    # ---------------------------------------------------------------------------------------------------------- panes

    def _fill_list(self) -> None:
        """Lists the strongest keys of the row, as many as fit if no number was chosen, then what the others get."""
        picture, pane, (row, column) = self.picture, self.list, self.at
        keys, (width, height) = picture.top_keys(row), pane.size
        most = self._most or (height - 1 if len(keys) < height else max(1, height - 2))
        self._listed = [listed for listed, _ in keys[:most]]
        noun = "key" if picture.base.block == 1 else "block"
        pane.title = f"top {len(self._listed)} of {words.count_of(len(keys), noun)}"
        if not keys:
            pane.title = f"no {noun} but sinks" if picture.is_taken[row].any() else f"no visible {noun}"
        lines = [*key_lines(picture, keys[:most], width)]
        if len(keys) > most:
            rest = shown(sum(weight for _, weight in keys[most:]), "weight", _DECIMALS)
            lines.append(f"  {len(keys) - most} more get {rest}")
        pane.n_rows, pane.cells = len(lines), lambda row: [(lines[row], PLAIN)]
        pane.row, pane.column = (self._listed.index(column), 0) if column in self._listed else (0, -1)

    def _fill_text(self, axis: int) -> None:
        """Draws keys as their cells in the cursor's row, or queries as theirs in its column, each behind a sign."""
        picture, pane, other = self.picture, self.texts[axis], 1 - axis
        pane.title = f"{('queries of key', 'keys of query')[axis]} {picture.name(other, self.at[other])}"
        levels, places = picture.levels(1), picture.places(axis, self.at[axis])
        levels = levels[:, self.at[KEY]] if axis == QUERY else levels[self.at[QUERY]]
        names, width = picture.words(axis), max(4, pane.size.width)
        lines = self._lines[axis] = wrapped(names, width)

        def cells(row: int) -> list[Cell]:
            """The tokens of a line."""
            looks = [
                token_look(levels[picture.cell_of(axis, place)], colour=self.session.colour) for place in lines[row]
            ]
            signs = ["▸" if place in places else sign for place, (sign, _) in zip(lines[row], looks, strict=True)]
            tokens = [words.fitted(names[place], width - 1) for place in lines[row]]
            return [(sign + token, style) for sign, token, (_, style) in zip(signs, tokens, looks, strict=True)]

        pane.n_rows, pane.cells = len(lines), cells
        pane.row = next(row for row, line in enumerate(lines) if places.start in line)
        pane.column = places.start - lines[pane.row].start

    def _read_out(self, width: int) -> Iterator[Text]:
        """The query, key and weight under the cursor, and the row's entropy, sink weight and sum; or why there are none."""
        if self.session.picture() is None:
            yield Text(self.session.why_nothing(), "bold yellow")
            return
        picture, (row, column) = self.picture, self.at
        base, entropy, of_row = picture.base, picture.entropy(row), picture.base.weights[row]
        weight, exact = weight_words(picture, row, column)
        room = max(6, (width - cell_len(f"query   key   weight {weight}{exact}")) // 2)
        query, key_name = (words.fitted(picture.name(axis, self.at[axis]), room) for axis in (QUERY, KEY))
        yield _named(("query", query), ("key", key_name), ("weight", weight)).append(exact, "dim")
        if entropy is None:
            yield Text("this query sees no key", "bold yellow")
            return
        numbers = [("entropy with sinks" if picture.hides_sinks else "entropy", f"{shown(entropy, 'number')} nats")]
        if picture.hides_sinks:
            numbers.append(("taken out", shown(float(base.sink_weights[row]), "weight", 4)))
        if base.learned is not None:
            numbers.append(("sink logit", shown(float(base.learned[row]), "weight", 4)))
        yield _named(*numbers, ("row sum", shown(float(of_row[of_row != FORBIDDEN].sum()), "weight", 4)))

    def _legend(self, width: int) -> Iterable[Text]:
        """The meaning of shades, and what was removed or not drawn."""
        picture, factor, has_numbers = self.picture, self.matrix.factor, self.matrix.width >= TIGHT
        weights, top = picture.map(factor).weights, picture.top(factor)
        of_scale = " … ".join(ends(picture.scale, top, largest=float(np.nanmax(weights, initial=0.0))))
        swatches = WEIGHTS.swatches(8, colour=self.session.colour)
        parts = [Text.assemble(f"scale {picture.scale}, {of_scale} ", *swatches), Text(sink_words(picture))]
        if picture.head.record.config.train:
            parts.append(Text("before dropout", "bold yellow"))
        if (weights == FORBIDDEN).any():
            parts.append(Text("0: masked" if has_numbers else "blank: masked", "dim"))
        if factor == 1 and picture.is_taken.any():
            parts.append(Text(f"{TAKEN_SIGN if has_numbers else 'blank'}: taken out", "dim"))
        if np.isnan(weights).any():
            parts.append(Text(f"{NAN_SIGN}: not a number", "bold yellow"))
        return [words.flowing(parts, width)]

    # -------------------------------------------------------------------------------------------------------- cursor

    def _go(self, row: int, column: int) -> None:
        """Moves the cursor to a cell of the finest map."""
        self.matrix.row, self.matrix.column = row, column
        self.draw()

    def _go_to(self, axis: int, row: int, column: int) -> None:
        """Moves the cursor to a token in a line of a text."""
        self._to(axis, self._lines[axis][row][column])

    def _to(self, axis: int, place: int) -> None:
        """Moves the cursor to a query or key by its position."""
        at = self.picture.cell_of(axis, place)
        self._go(*((at, self.matrix.column) if axis == QUERY else (self.matrix.row, at)))

    def _choose(self, row: int, column: int) -> None:
        """Moves the cursor to a key of the list."""
        if row < len(self._listed):
            self._go(self.matrix.row, self._listed[row])

    # ------------------------------------------------------------------------------------------------------ what is drawn

    def action_head(self, step: int) -> None:
        """Shows another head, across layers and around the ends."""
        places = list(self.session.heads)
        self.session.place = places[(places.index(self.session.place) + step) % len(places)]
        self.draw()

    def action_layer(self, step: int) -> None:
        """Shows the same head of the next or previous layer that has it."""
        row, number = self.session.place
        rows = [other for other, n in self.session.heads if n == number and (other - row) * step > 0]
        self.action_say("" if rows else "no layer there has this head")
        self.session.place = min(rows, key=lambda other: abs(other - row), default=row), number
        self.draw()

    def action_zoom(self, step: int) -> None:
        """Shows larger or smaller cells; 0 fits the whole map."""
        self.matrix.zoom(step)
        self.draw()

    def action_most(self, step: int) -> None:
        """Lists more or fewer top keys."""
        now = self._most or len(self._listed)
        more, fewer = [n for n in _MOST if n > now], [n for n in _MOST if n < now]
        self._most = (more or _MOST[-1:])[0] if step > 0 else (fewer or _MOST[:1])[-1]
        self.draw()

    def action_copy(self) -> None:
        """Copies the row as JSON to the terminal's clipboard."""
        text = json.dumps(self.picture.row_document(self.matrix.row), allow_nan=False)
        self.app.copy_to_clipboard(text)
        name = self.picture.name(QUERY, self.matrix.row)
        self.action_say(f"copied query {name} as JSON by OSC 52: {len(text):,} bytes")

    # ------------------------------------------------------------------------------------------------------------ jumping

    def action_jump(self) -> None:
        """Begins a search for a token or a position, among the keys if they are focused, else among the queries."""
        self._before = self.at
        self._axis = KEY if self.focused in (self.texts[KEY], self.list) else QUERY
        self._find("")

    def on_key(self, event: events.Key) -> None:
        """Searches what is typed, from a slash to Enter or Escape. Actions of keys would come after the keys typed behind."""
        before = self._before
        if before is None and event.key != "slash":
            return
        event.stop()
        event.prevent_default()
        if before is None:
            self.action_jump()
        elif event.key in ("enter", "escape"):
            self._before = None
            self.set_focus(self.texts[KEY] if self._axis == KEY else self.matrix)
            is_missed = event.key == "enter" and self._typed and not self._found
            self.action_say(f"no {_AXES[self._axis]} matches {visible(self._typed)}" if is_missed else "")
            if event.key == "escape":
                self._go(*before)
        elif event.key == "tab":
            self._axis = 1 - self._axis
            self._find(self._typed)
        elif event.key == "backspace":
            self._find(self._typed[:-1])
        elif event.is_printable:
            self._find(self._typed + (event.character or ""))

    def _find(self, typed: str) -> None:
        """Goes to the first match, or back if there is none."""
        assert self._before is not None
        place = self.picture.places(self._axis, self._before[self._axis]).start
        self._typed, self._found = typed, matches(self.picture, self._axis, typed, place)
        count = f"1 of {len(self._found)}" if self._found else "no match" if typed else "token or place"
        self.action_say(f"to a {_AXES[self._axis]}: {visible(typed)}  {count} · {_SEARCHED}")
        if self._found:
            self._to(self._axis, self._found[0])
        else:
            self._go(*self._before)

    def action_match(self, step: int) -> None:
        """Goes to the next or previous match."""
        if not self._found:
            self.action_say("no search yet: press /")
            return
        self._found = self._found[step:] + self._found[:step]
        self._to(self._axis, self._found[0])


@lru_cache(maxsize=8)
def wrapped(tokens: Sequence[str], width: int) -> list[range]:
    """The tokens of each line, every one behind a sign."""
    used, begins = 0, [0]
    for place, token in enumerate(tokens):
        size = 1 + min(width - 1, cell_len(token))
        if used and used + size > width:
            begins.append(place)
            used = 0
        used += size
    return [range(*ends) for ends in pairwise([*begins, len(tokens)])]


def token_look(level: int, *, colour: bool) -> tuple[str, Style]:
    """The sign before a token, and its style, for the level of its weight."""
    if level < 0:
        return NAN_SIGN if level == NOT_A_NUMBER else " ", EMPTY
    return (" ", WEIGHTS.style(level)) if colour else (glyph(level), PLAIN)


def matches(picture: Picture, axis: int, typed: str, begin: int) -> list[int]:
    """The positions of tokens that contain the typed text in any case, from `begin` on; of a number, that position first."""
    tokens, needle = picture.texts[axis].tokens, typed.casefold()
    shown = zip(tokens, picture.words(axis), strict=True)
    places = [place for place, names in enumerate(shown) if typed and any(needle in name.casefold() for name in names)]
    number = int(typed) if typed.isascii() and typed.isdigit() and len(typed) < 10 else -1
    places += [number] if 0 <= number < len(tokens) and number not in places else []
    return sorted(places, key=lambda place: (place != number, (place - begin) % len(tokens)))


# --------------------------------------------------------------------------------------------- words around the matrix


def key_lines(picture: Picture, keys: list[tuple[int, float]], width: int) -> Iterator[str]:
    """A line for each key of a row with its weight and a bar."""
    largest = max((weight for _, weight in keys), default=0.0) or 1.0
    label = min(_MOST_NAME, max(6, width - _DECIMALS - 12))
    for column, weight in keys:
        name = set_cell_size(words.fitted(picture.name(KEY, column), label), label)
        number = f" {name} {shown(weight, 'weight', _DECIMALS):>{_DECIMALS + 2}} "
        bar = "█" * round(np.nan_to_num(weight / largest) * (width - cell_len(number) - 1))
        yield set_cell_size(number + bar, width)


def _named(*numbers: tuple[str, str]) -> Text:
    return Text("  ").join(Text.assemble((f"{name} ", "dim"), (number, "bold")) for name, number in numbers)


def weight_words(picture: Picture, row: int, column: int) -> tuple[str, str]:
    """The weight under the cursor, and with more digits; or why it has none."""
    weight = float(picture.base.weights[row, column])
    if weight == FORBIDDEN:
        return "masked", ""
    if picture.is_taken[row, column]:
        return "taken out", ""
    return shown(weight, "weight", 4), f" ({weight:.6g})" if np.isfinite(weight) and weight > 0 else ""


def sink_words(picture: Picture) -> str:
    """The sink keys, their weight, and whether they are hidden."""
    base, parts = picture.base, list[str]()
    if base.sinks:
        parts.append(f"key {first_names(map(str, base.sinks), _MOST_SINKS)}, {shown(base.sink_mass, 'percent')}")
    if base.learned_mass is not None:
        parts.append(f"the sink logit, {shown(base.learned_mass, 'percent')}")
    end = "taken out, rows renormalised" if picture.hides_sinks else "of a row on average"
    return f"sink: {' and '.join(parts)} {end}" if parts else "no sink"
