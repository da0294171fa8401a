"""The screen of one head: its matrix, a query's strongest keys, and the texts, with a common cursor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from mhacli.errors import first_names
from mhacli.render.base import format as words
from mhacli.render.base.cells import FORBIDDEN, NOT_A_NUMBER, ends
from mhacli.render.base.colours import EMPTY, NAN_SIGN, WEIGHTS, glyph
from mhacli.text.escape import visible
from mhacli.text.numbers import shown
from mhacli.text.tokens import TokenSequence
from mhacli.viewer.matrix import TAKEN_SIGN, TIGHT, Matrix, Picture
from mhacli.viewer.parts import PLAIN, HeadsScreen, Tokens, doubts, entitle, key, kind_sign, one_line
from mhacli.viewer.session import Session

Axis = Literal["query", "key"]
AXES: tuple[Axis, Axis] = ("key", "query")
_MOST = (3, 5, 8, 12, 20, 50, 100, 1000)
"""The most top keys to list."""
_MOST_SINKS = 6
"""The most sinks that a caption names."""


class HeadScreen(HeadsScreen):
    """One head with the cursor on a query and a key."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("shift+pageup", "move('page_left')", "⇧PgUp ⇧PgDn", "a page to the left or right"),
        key("shift+pagedown", "move('page_right')"),
        key("tab", "app.focus_next", "Tab", "which part the arrows move in: matrix, list, keys, queries", "part"),
        key("shift+tab", "app.focus_previous"),
        key("h,right_square_bracket", "head(1)", "h ]", "the next head", "head"),
        key("H,left_square_bracket", "head(-1)", "H [", "the previous head"),
        key("l,right_curly_bracket", "layer(1)", "l }", "the same head of the next layer", "layer"),
        key("L,left_curly_bracket", "layer(-1)", "L {", "the same head of the previous layer"),
        key("plus,equals_sign", "zoom(1)", "+ -", "larger or smaller cells; 0 so that all fit", "zoom"),
        key("minus", "zoom(-1)"),
        key("0", "zoom(0)"),
        Binding("slash", "jump", "find", key_display="/", tooltip="jump to a token by typing it, or to a place by its number",
                priority=True),  # or the next keys would arrive before the line is open
        key("n", "match(1)", "n N", "the next or previous match"),
        key("N", "match(-1)"),
        key("t", "most(1)", "t T", "more or fewer of the strongest keys"),
        key("T", "most(-1)"),
        key("y", "copy", "y", "copy the row as JSON to the terminal's clipboard (OSC 52)", "copy"),
    ]  # fmt: skip

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.picture: Picture | None = None
        self.matrix = Matrix(self.go, colour=session.colour)
        self.list = OptionList(id="list", compact=True, markup=False)
        self.keys, self.queries = (Tokens(partial(self._go_to, axis), id=axis) for axis in AXES)
        self.read_out, self.legend = Static(id="read-out"), Static(id="legend")
        self.asked, self.count, self.search = Static(id="asked"), Static(id="count"), Search(compact=True)
        self.prompt = Horizontal(self.asked, self.search, self.count, id="prompt")
        self._places = (0, 0)
        self._most: int | None = None
        self._listed: list[int] = []
        self._axis: Axis = "query"
        self._found: list[int] = []
        self._before = (0, 0)

    def compose(self) -> ComposeResult:
        """The panes from the top."""
        yield self.top_line
        yield Container(self.matrix, self.list, self.keys, self.queries, id="body")
        yield from (self.read_out, self.legend, self.prompt, self.note, self.footer)

    def on_mount(self) -> None:
        """Focuses the matrix, and takes a picture, for keys that arrive before the layout."""
        self.set_focus(self.matrix)
        self.draw()

    def draw(self) -> None:
        """Draws the session's head, with the cursor on the same tokens as before if possible."""
        picture, matrix = self.session.picture(), self.matrix
        self.top_line.update(one_line(*self._heading()))
        if picture is None:
            self.read_out.update(Text(self.session.why_nothing(), "bold yellow"))
            return
        row, column = matrix.row, matrix.column
        if self.picture is None:
            row = picture.n_rows - 1
            column = next((strongest for strongest, _ in picture.top_keys(row)), 0)
        elif self.picture is not picture:
            row, column = picture.row_of(self._places[0]), picture.column_of(self._places[1])
        self._places = picture.base.query_places(row)[0], picture.base.key_places(column)[0]
        self.picture = picture
        matrix.show(picture, row, column)
        if not matrix.size:  # before the layout
            return
        self._draw_list(picture, row, column)
        self._draw_texts(picture, row, column)
        self.read_out.update(Group(*read_out(picture, row, column, self.size.width)))
        legend = captions(picture, matrix.factor, has_numbers=matrix.width >= TIGHT, colour=self.session.colour)
        self.legend.update(Group(words.flowing([*legend], self.size.width)))

    def _draw_list(self, picture: Picture, row: int, column: int) -> None:
        """Draws the strongest keys of the row, as many as fit if no number was chosen, then what the others get."""
        keys, size = picture.top_keys(row), self.list.size
        room = max(1, size.height)
        most = self._most or (room if len(keys) <= room else max(1, room - 1))
        self._listed = [listed for listed, _ in keys[:most]]
        noun = "key" if picture.base.block == 1 else "block"
        none = f"no {noun} but sinks" if picture.is_taken[row].any() else f"no visible {noun}"
        entitle(self.list, f"top {len(self._listed)} of {words.count_of(len(keys), noun)}" if keys else none)
        self.list.set_options(Option(line) for line in key_lines(picture, keys[:most], size.width))
        if len(keys) > most:
            rest = shown(sum(weight for _, weight in keys[most:]), "weight", DECIMALS)
            self.list.add_option(Option(f" {len(keys) - most} more get {rest}", disabled=True))
        self.list.highlighted = self._listed.index(column) if column in self._listed else None

    def _heading(self) -> Iterator[tuple[str, str | Style]]:
        """The head, its type, its sequence, and doubts."""
        head, sequence, n_sequences = self.session.head, self.session.sequence, len(self.session.record.sequences)
        yield head.label, "bold cyan"
        sign, style = kind_sign(head.statistics)
        yield f"  {sign}", style
        yield f" {'no statistics' if head.statistics is None else words.type_text(head.statistics)}", PLAIN
        if n_sequences > 1:
            yield f"  sequence {sequence} of 0–{n_sequences - 1}", "bold"
        yield from doubts(self.session)

    def _draw_texts(self, picture: Picture, row: int, column: int) -> None:
        """Draws the keys as their cells in the cursor's row, and the queries as theirs in its column."""
        levels, base = picture.levels(1), picture.base
        look = partial(token_look, colour=self.session.colour)
        entitle(self.keys, f"keys of query {picture.query_name(row)}")
        entitle(self.queries, f"queries of key {picture.key_name(column)}")
        self.keys.show(base.keys, base.key_places(column), lambda key: look(levels[row, picture.column_of(key)]))
        self.queries.show(
            base.queries, base.query_places(row), lambda query: look(levels[picture.row_of(query), column])
        )

    # -------------------------------------------------------------------------------------------------------- cursor

    def go(self, row: int, column: int) -> None:
        """Moves the cursor to a cell of the finest map."""
        self.matrix.row, self.matrix.column = row, column
        self.draw()

    def _go_to(self, axis: Axis, place: int) -> None:
        """Moves the cursor to a key or query by its position."""
        if self.picture is not None and axis == "key":
            self.go(self.matrix.row, self.picture.column_of(place))
        elif self.picture is not None:
            self.go(self.picture.row_of(place), self.matrix.column)

    def on_option_list_option_highlighted(self) -> None:
        """Moves the cursor to a key of the list."""
        listed = self.list.highlighted
        if listed is not None and self._listed[listed] != self.matrix.column:
            self.go(self.matrix.row, self._listed[listed])

    def action_move(self, direction: str) -> None:
        """Moves the cursor in the focused pane; in a text to the token before or behind it."""
        axis: Axis = "key" if self.focused is self.keys else "query"
        if isinstance(self.focused, Tokens) and direction.startswith("cursor"):
            self._go_to(axis, self.focused.beside(-1 if direction in ("cursor_left", "cursor_up") else 1))
        elif self.picture is not None:
            self.go(*self.matrix.moved(direction))

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
        if step == 0:
            self.matrix.chosen = None
        else:
            self.matrix.zoom(step)
        self.draw()

    def action_most(self, step: int) -> None:
        """Lists more or fewer top keys."""
        now = len(self._listed)
        more, fewer = [n for n in _MOST if n > now], [n for n in _MOST if n < now]
        self._most = (more or _MOST[-1:])[0] if step > 0 else (fewer or _MOST[:1])[-1]
        self.draw()

    def action_copy(self) -> None:
        """Copies the row as JSON to the terminal's clipboard."""
        if self.picture is not None:
            text = json.dumps(self.picture.row_document(self.matrix.row), allow_nan=False)
            self.app.copy_to_clipboard(text)
            name = self.picture.query_name(self.matrix.row)
            self.action_say(f"copied query {name} as JSON by OSC 52: {len(text):,} bytes")

    # ------------------------------------------------------------------------------------------------------------ jumping

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether a key has its action: not a slash that is typed to search for it."""
        return not self.search.has_focus if action == "jump" else super().check_action(action, parameters)

    def action_jump(self) -> None:
        """Opens the search for a token or a position, among the keys if they are focused, else among the queries."""
        if self.picture is not None:
            self._before = self.matrix.row, self.matrix.column
            self._axis = "key" if self.focused in (self.keys, self.list) else "query"
            self.search.value = ""
            self.prompt.display, self.legend.display = True, False
            self.set_focus(self.search)
            self._find("")

    def _find(self, typed: str) -> None:
        """Goes to the first match, or back if there is none."""
        assert self.picture is not None
        text = self.picture.base.keys if self._axis == "key" else self.picture.base.queries
        self.matrix.row, self.matrix.column = self._before
        self._found = matches(text, typed, self._places[self._axis == "key"])
        self.asked.update(Text(asked := f"to a {self._axis}: ", "bold"))
        self.asked.styles.width = len(asked)
        count = "no match" if typed else "token or place"
        self.count.update(f"1 of {len(self._found)}" if self._found else count)
        if self._found:
            self._go_to(self._axis, self._found[0])
        else:
            self.draw()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Searches what is typed."""
        if self.search.has_focus:
            self._find(event.value)

    def action_turn(self) -> None:
        """Searches the other axis."""
        self._axis = "query" if self._axis == "key" else "key"
        self._find(self.search.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Stays at the match."""
        self._close_search()
        if event.value and not self._found:
            self.action_say(f"no {self._axis} matches {visible(event.value)}")

    def action_forget(self) -> None:
        """Returns to where the search began."""
        self._found = []
        self._close_search()
        self.go(*self._before)

    def _close_search(self) -> None:
        self.set_focus(self.keys if self._axis == "key" else self.matrix)
        self.prompt.display, self.legend.display = False, True

    def action_match(self, step: int) -> None:
        """Goes to the next or previous match."""
        if not self._found:
            self.action_say("no search yet: press /")
            return
        self._found = self._found[step:] + self._found[:step]
        self._go_to(self._axis, self._found[0])


class Search(Input):
    """The line for what to jump to."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("enter", "submit", "Enter", short="take"),
        key("escape", "screen.forget", "Esc", short="go back"),
        key("tab", "screen.turn", "Tab", short="other axis"),
    ]

    def on_key(self, event: events.Key) -> None:
        """Deletes a letter at once: as the action of a key it would wait for letters that are typed behind it."""
        if event.key == "backspace":
            event.prevent_default()
            event.stop()
            self.action_delete_left()


def matches(text: TokenSequence, typed: str, begin: int) -> list[int]:
    """The positions of tokens that contain the typed text in any case, from `begin` on; of a number, that position first."""
    n_tokens, needle = len(text.tokens), typed.casefold()
    places = [
        place
        for place, token in enumerate(text.tokens)
        if typed and (needle in token.casefold() or needle in words.token_text(text, place).casefold())
    ]
    number = int(typed) if typed.isascii() and typed.isdigit() and len(typed) < 10 else -1
    places += [number] if 0 <= number < n_tokens and number not in places else []
    return sorted(places, key=lambda place: (place != number, (place - begin) % n_tokens))


# ---------------------------------------------------------------------------------------------------------- strongest keys

DECIMALS, _MOST_NAME = 5, 18


def key_lines(picture: Picture, keys: Sequence[tuple[int, float]], width: int) -> Iterator[str]:
    """A line for each key of a row with its weight and a bar."""
    largest = max((weight for _, weight in keys), default=0.0) or 1.0
    label = min(_MOST_NAME, max(6, width - DECIMALS - 12))
    for column, weight in keys:
        name = set_cell_size(words.fitted(picture.key_name(column), label), label)
        number = f" {name} {shown(weight, 'weight', DECIMALS):>{DECIMALS + 2}} "
        part = np.nan_to_num(weight / largest)
        yield number + "█" * round(part * (width - cell_len(number) - 2))


# --------------------------------------------------------------------------------------------- words around the matrix


def token_look(level: int, *, colour: bool) -> tuple[str, Style]:
    """The sign before a token, and its style, for the level of its weight."""
    if level < 0:
        return NAN_SIGN if level == NOT_A_NUMBER else " ", EMPTY
    return (" ", WEIGHTS.style(level)) if colour else (glyph(level), PLAIN)


def read_out(picture: Picture, row: int, column: int, width: int) -> Iterator[Text]:
    """The query, key and weight under the cursor, and the row's entropy, sink weight and sum."""
    base, entropy, of_row = picture.base, picture.entropy(row), picture.base.weights[row]
    weight, exact = weight_words(picture, row, column)
    room = max(6, (width - cell_len(f"query   key   weight {weight}{exact}")) // 2)
    query, key = (words.fitted(name, room) for name in (picture.query_name(row), picture.key_name(column)))
    yield _named({"query": query, "key": key, "weight": weight}).append(exact, "dim")
    if entropy is None:
        yield Text("this query sees no key", "bold yellow")
        return
    numbers = {"entropy with sinks" if picture.hides_sinks else "entropy": f"{shown(entropy, 'number')} nats"}
    if picture.hides_sinks:
        numbers["taken out"] = shown(float(base.sink_weights[row]), "weight", 4)
    if base.learned is not None:
        numbers["sink logit"] = shown(float(base.learned[row]), "weight", 4)
    numbers["row sum"] = shown(float(of_row[of_row != FORBIDDEN].sum()), "weight", 4)
    yield _named(numbers)


def _named(numbers: Mapping[str, str]) -> Text:
    return Text("  ").join(Text.assemble((f"{name} ", "dim"), (number, "bold")) for name, number in numbers.items())


def weight_words(picture: Picture, row: int, column: int) -> tuple[str, str]:
    """The weight under the cursor, and with more digits; or why it has none."""
    weight = float(picture.base.weights[row, column])
    if weight == FORBIDDEN:
        return "masked", ""
    if picture.is_taken[row, column]:
        return "taken out", ""
    return shown(weight, "weight", 4), f" ({weight:.6g})" if np.isfinite(weight) and weight > 0 else ""


def captions(picture: Picture, factor: int, *, has_numbers: bool, colour: bool) -> Iterator[Text]:
    """The legend: the meaning of shades, and what was removed or not drawn."""
    weights, top = picture.map(factor).weights, picture.top(factor)
    of_scale = " … ".join(ends(picture.scale, top, largest=float(np.nanmax(weights, initial=0.0))))
    yield Text.assemble(f"scale {picture.scale}, {of_scale} ", *WEIGHTS.swatches(8, colour=colour))
    yield Text(sink_words(picture))
    if picture.head.record.config.train:
        yield Text("before dropout", "bold yellow")
    if (weights == FORBIDDEN).any():
        yield Text("0: masked" if has_numbers else "blank: masked", "dim")
    if factor == 1 and picture.is_taken.any():
        yield Text(f"{TAKEN_SIGN if has_numbers else 'blank'}: taken out", "dim")
    if np.isnan(weights).any():
        yield Text(f"{NAN_SIGN}: not a number", "bold yellow")


def sink_words(picture: Picture) -> str:
    """The sink keys, their weight, and whether they are hidden."""
    base, parts = picture.base, list[str]()
    if base.sinks:
        parts.append(f"key {first_names(map(str, base.sinks), _MOST_SINKS)}, {shown(base.sink_mass, 'percent')}")
    if base.learned_mass is not None:
        parts.append(f"the sink logit, {shown(base.learned_mass, 'percent')}")
    end = "taken out, rows renormalised" if picture.hides_sinks else "of a row on average"
    return f"sink: {' and '.join(parts)} {end}" if parts else "no sink"
