"""The screen of one head: its matrix, a query's strongest keys, and the texts, with a common cursor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container

from mhacli.errors import first_names
from mhacli.render.base import format as words
from mhacli.render.base.colours import EMPTY, NAN_SIGN, WEIGHTS
from mhacli.render.base.grids import FORBIDDEN, cell, ends
from mhacli.text.escape import visible
from mhacli.text.numbers import shown
from mhacli.viewer.heads import HeadsScreen, doubts, key, kind_sign, kind_words
from mhacli.viewer.matrix import KEY, QUERY, TAKEN_SIGN, TIGHT, Matrix, Picture
from mhacli.viewer.panes import CURSOR, PLAIN, Cell, Lines, Pane, Words, at, named, window, wrapped
from mhacli.viewer.session import Session

_MOST = (3, 5, 8, 12, 20, 50, 100, 1000)
"""The most top keys to list."""
_MOST_SINKS = 6
"""The most sinks that a caption names."""
_DECIMALS, _MOST_NAME = 5, 18
"""The decimals of weights in the list of top keys, and its widest name."""
_AXES = ("query", "key")
_GAP = Text("  ")
_SEARCHED = "Tab other axis · Enter take · Esc go back"


class HeadScreen(HeadsScreen):
    """One head with the cursor on a query and a key."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("shift+pageup", "page(0, -1)", "⇧PgUp ⇧PgDn", "a page to the left or right"),
        key("shift+pagedown", "page(0, 1)"),
        key("end", "end"),
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
        self.matrix, self.list = Matrix(self, picture), Pane(self._top_keys, id="list")
        self.keys, self.queries = (Pane(partial(self._text, axis), id=_AXES[axis]) for axis in (KEY, QUERY))
        self.about = Words(self._about, id="about")
        self._most: int | None = None
        self._listed: list[int] = []
        self._axis, self._typed, self._found = QUERY, "", list[int]()
        self._before: tuple[int, int] | None = None
        row = picture.weights.shape[QUERY] - 1
        self.at = row, next((column for column, _ in picture.top_keys(row)), 0)

    def compose(self) -> ComposeResult:
        """The panes from the top."""
        yield self.top
        yield Container(self.matrix, self.list, self.keys, self.queries, id="body")
        yield from (self.about, self.note, self.footer)

    @property
    def picture(self) -> Picture:
        """The picture that is drawn."""
        return self.matrix.picture

    def draw(self) -> None:
        """Draws the session's head, with the cursor on the same tokens as before if possible."""
        before, picture = self.picture, self.session.picture()
        if picture is not None and picture is not before:
            query, key_place = (before.places(axis, self.at[axis]).start for axis in (QUERY, KEY))
            self.matrix.picture, self.at = picture, (picture.cell_of(QUERY, query), picture.cell_of(KEY, key_place))
        super().draw()

    def above(self, width: int) -> Iterator[Text]:
        """The head, its type, its sequence, and doubts."""
        head, n_sequences = self.session.head, len(self.session.record.sequences)
        line = Text.assemble(
            (head.label, "bold cyan"), "  ", kind_sign(head.statistics), f" {kind_words(head.statistics)}"
        )
        if n_sequences > 1:
            line.append(f"  sequence {self.session.sequence} of 0–{n_sequences - 1}", style="bold")
        yield line.append_text(doubts(head))

    # ---------------------------------------------------------------------------------------------------------- panes

    def _top_keys(self, width: int, height: int) -> tuple[str, Lines]:
        """The strongest keys of the row, as many as fit if no number was chosen, then what the others get."""
        picture, (row, column) = self.picture, self.at
        keys, label = picture.top_keys(row), min(_MOST_NAME, max(6, width - _DECIMALS - 12))
        most = self._most or (height if len(keys) <= height else max(1, height - 1))
        listed, others, lines = keys[:most], keys[most:], list[list[Cell]]()
        self._listed = [place for place, _ in listed]
        for place, weight in listed:
            name = set_cell_size(words.fitted(picture.name(KEY, place), label), label)
            number = f" {name} {shown(weight, 'weight', _DECIMALS):>{_DECIMALS + 2}} "
            bar = "█" * round(np.nan_to_num(weight / (listed[0][1] or 1.0)) * (width - cell_len(number) - 1))
            there = at(row, place)
            lines.append([(number, there + CURSOR if place == column else there), (bar, there)])
        if others:
            rest = shown(sum(weight for _, weight in others), "weight", _DECIMALS)
            lines.append([(f"  {len(others)} more get {rest}", PLAIN)])
        visible_lines = window(0, height, self._listed.index(column) if column in self._listed else 0, len(lines))
        title = f"top {len(listed)} of {words.count_of(len(keys), picture.unit)}"
        return title, [lines[number] for number in visible_lines]

    def _text(self, axis: int, width: int, height: int) -> tuple[str, Lines]:
        """The lines around the cursor of keys as their cells in the cursor's row, or of queries as theirs in its column."""
        picture, other = self.picture, 1 - axis
        title = f"{('queries of key', 'keys of query')[axis]} {picture.name(other, self.at[other])}"
        of_cells = np.take(picture.levels(1), self.at[other], axis=other)
        names, places, width = picture.words(axis), picture.places(axis, self.at[axis]), max(4, width)

        def token(place: int) -> Cell:
            """A token in the colours of its cell, or without colours behind its sign."""
            here = picture.cell_of(axis, place)
            sign, style = cell(int(of_cells[here]), colour=self.session.colour)
            style = EMPTY if of_cells[here] == FORBIDDEN else style
            place_of = (here, self.at[KEY]) if axis == QUERY else (self.at[QUERY], here)
            return ("▸" if place in places else sign) + words.fitted(names[place], width - 1), style + at(*place_of)

        lines = wrapped(names, width)
        row = next(row for row, line in enumerate(lines) if places.start in line)
        return title, [map(token, lines[number]) for number in window(row - height // 2, height, row, len(lines))]

    def _about(self, width: int) -> Iterator[Text]:
        """What is under the cursor, and what shades mean; or why nothing is drawn."""
        if self.session.picture() is None:
            yield Text(self.session.why_nothing(), "bold yellow")
        else:
            yield from self._read_out(width)
            yield words.flowing([*self._legend()], width)

    def _read_out(self, width: int) -> Iterator[Text]:
        """The query, key and weight under the cursor, and the row's entropy, sink weight and sum."""
        picture, (row, column) = self.picture, self.at
        base, entropy, is_taken = picture.base, picture.entropy(row), picture.is_taken[row, column]
        number = float(base.weights[row, column])
        weight = "masked" if number == FORBIDDEN else "taken out" if is_taken else shown(number, "weight", 4)
        exact = f" ({number:.6g})" if np.isfinite(number) and number > 0 else ""
        room = max(6, (width - cell_len(f"query   key   weight {weight}{exact}")) // 2)
        names = [named(_AXES[axis], words.fitted(picture.name(axis, self.at[axis]), room)) for axis in (QUERY, KEY)]
        yield _GAP.join([*names, named("weight", weight).append(exact, "dim")])
        if entropy is None:
            yield Text("this query sees no key", "bold yellow")
            return
        numbers = [
            named("entropy with sinks" if picture.hides_sinks else "entropy", f"{shown(entropy, 'number')} nats")
        ]
        if picture.hides_sinks:
            numbers.append(named("taken out", shown(float(base.sink_weights[row]), "weight", 4)))
        if base.learned is not None:
            numbers.append(named("sink logit", shown(float(base.learned[row]), "weight", 4)))
        yield _GAP.join([*numbers, named("row sum", shown(float(base.sums[row]), "weight", 4))])

    def _legend(self) -> Iterator[Text]:
        """The meaning of shades, and what was removed or not drawn."""
        self.matrix.fit()  # it may be drawn later
        picture, base, has_numbers = self.picture, self.picture.base, self.matrix.width >= TIGHT
        weights = picture.map(self.matrix.factor).weights
        low, high = ends(picture.scale, picture.top, largest=float(np.nanmax(weights, initial=0.0)))
        swatches = WEIGHTS.swatches(8, colour=self.session.colour)
        yield Text.assemble(f"scale {picture.scale}, {low} … {high} ", *swatches)
        if base.sinks:
            keys = first_names(map(str, base.sinks), _MOST_SINKS)
            yield Text(f"sink: key {keys}, {shown(base.sink_mass, 'percent')} of a row on average")
        if base.learned_mass is not None:
            yield Text(f"sink logit: {shown(base.learned_mass, 'percent')} of a row on average")
        notes = {
            "sinks taken out, rows renormalised": picture.hides_sinks,
            "before dropout": picture.head.record.config.train,
            "0: masked" if has_numbers else "blank: masked": (weights == FORBIDDEN).any(),
            f"{TAKEN_SIGN if has_numbers else 'blank'}: taken out": picture.is_taken.any(),
            f"{NAN_SIGN}: not a number": np.isnan(weights).any(),
        }
        yield from (Text(note, "dim") for note, holds in notes.items() if holds)

    # -------------------------------------------------------------------------------------------------------- cursor

    def action_move(self, down: int, right: int, times: int = 1) -> None:
        """Moves the cursor; an arrow in the list or a text goes to the key or query before or behind."""
        (row, column), step = self.at, down + right
        if times > 1 or self.focused not in (self.list, self.keys, self.queries):
            self._go_near(row + down * times * self.matrix.factor, column + right * times * self.matrix.factor)
        elif self.focused is self.list and self._listed:
            place = self._listed.index(column) + step if column in self._listed else 0
            self.go(row, self._listed[max(0, min(len(self._listed) - 1, place))])
        elif self.focused is self.keys:
            self._go_near(row, column + step)
        elif self.focused is self.queries:
            self._go_near(row + step, column)

    def _go_near(self, row: int, column: int) -> None:
        """Moves the cursor to the cell that is nearest to a place."""
        n_rows, n_columns = self.picture.weights.shape
        self.go(max(0, min(n_rows - 1, row)), max(0, min(n_columns - 1, column)))

    def action_end(self) -> None:
        """Moves the cursor to the last key that its query sees."""
        query = self.at[QUERY]
        self.go(query, int(np.flatnonzero(self.picture.base.is_open[query]).max(initial=0)))

    def _go_to(self, place: int) -> None:
        """Moves the cursor to a query or key by its position."""
        there = self.picture.cell_of(self._axis, place)
        self.go(*((there, self.at[KEY]) if self._axis == QUERY else (self.at[QUERY], there)))

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
        self.matrix.zoomed = self.matrix.zoomed + step if step else 0
        self.draw()

    def action_most(self, step: int) -> None:
        """Lists more or fewer top keys."""
        now = self._most or len(self._listed)
        more, fewer = [n for n in _MOST if n > now], [n for n in _MOST if n < now]
        self._most = min(more, default=now) if step > 0 else max(fewer, default=now)
        self.draw()

    def action_copy(self) -> None:
        """Copies the row as JSON to the terminal's clipboard."""
        text = json.dumps(self.picture.row_document(self.at[QUERY]), allow_nan=False)
        self.app.copy_to_clipboard(text)
        name = self.picture.name(QUERY, self.at[QUERY])
        self.action_say(f"copied query {name} as JSON by OSC 52: {len(text):,} bytes")

    # ------------------------------------------------------------------------------------------------------------ jumping

    def action_jump(self) -> None:
        """Begins a search for a token or a position, among the keys if they are focused, else among the queries."""
        self._before = self.at
        self._axis = KEY if self.focused in (self.keys, self.list) else QUERY
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
            self.set_focus(self.keys if self._axis == KEY else self.matrix)
            is_missed = event.key == "enter" and self._typed and not self._found
            self.action_say(f"no {_AXES[self._axis]} matches {visible(self._typed)}" if is_missed else "")
            if event.key == "escape":
                self.go(*before)
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
            self._go_to(self._found[0])
        else:
            self.go(*self._before)

    def action_match(self, step: int) -> None:
        """Goes to the next or previous match."""
        if not self._found:
            self.action_say("no search yet: press /")
            return
        self._found = self._found[step:] + self._found[:step]
        self._go_to(self._found[0])


def matches(picture: Picture, axis: int, typed: str, begin: int) -> list[int]:
    """The positions of tokens that contain the typed text in any case, from `begin` on; of a number, that position first."""
    tokens, needle = picture.texts[axis], typed.casefold()
    names = zip(tokens, picture.words(axis), strict=True)
    places = [place for place, name in enumerate(names) if typed and needle in "\n".join(name).casefold()]
    number = int(typed) if typed.isascii() and typed.isdigit() and len(typed) < 10 else -1
    places += [number] if 0 <= number < len(tokens) and number not in places else []
    return sorted(places, key=lambda place: (place != number, (place - begin) % len(tokens)))
