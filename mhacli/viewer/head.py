"""The screen of one head: its matrix, a query's top keys, and the texts, with a common cursor."""

from __future__ import annotations

import json
from functools import partial
from typing import ClassVar

import numpy as np
from rich.cells import cell_len
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container

from mhacli.render.base.cells import FORBIDDEN, WEIGHTS
from mhacli.render.base.format import count_of, fitted, number_text, weight_text
from mhacli.render.heads.drawable import is_before_dropout
from mhacli.text.escape import visible
from mhacli.viewer.lines import BOLD, DIM, PLAIN, WARNING, Line, Lines, StyledText, flowed, heading, segments
from mhacli.viewer.panes.matrix import Matrix
from mhacli.viewer.panes.tokens import Prompt, Search, SearchAxis, Tokens, TopKeys, searched
from mhacli.viewer.picture import TAKEN_SIGN, Picture, Shades, Zoom, scale_range, sink_words
from mhacli.viewer.screen import HEAD_KEYS, HeadsScreen, bindings, keys_line
from mhacli.viewer.session import Session

_WIDE = 120
_LEGENDS = ((16, 3), (12, 2), (9, 1), (0, 0))
"""The least screen height for each number of legend lines."""
_MOST = (3, 5, 8, 12, 20, 50, 100, 1000)
"""The most top keys to list."""
_CLIPBOARD = 74_000
"""The most bytes that terminals copy by OSC 52. Source: the 100 000 bytes of hterm's osc52.sh, of which base64 leaves
three quarters."""


class HeadScreen(HeadsScreen):
    """One head with the cursor on a query and a key."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(HEAD_KEYS)

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.colour = session.colour
        self.picture: Picture | None = None
        self.row, self.column = 0, 0
        self.most: int | None = None
        self.search: Search | None = None
        self._before = (0, 0)
        self.top_line, self.read_out, self.legend, self.last = (
            Lines(id=name) for name in ("top", "read-out", "legend", "last")
        )
        self.matrix = Matrix(colour=self.colour, id="matrix")
        self.top_keys = TopKeys(id="top-keys")
        self.keys_pane, self.queries_pane = (
            Tokens(colour=self.colour, id="keys"),
            Tokens(colour=self.colour, id="queries"),
        )
        self.prompt = Prompt(id="prompt")

    def compose(self) -> ComposeResult:
        """The panes from the top."""
        yield self.top_line
        with Container(id="body"):
            yield self.matrix
            yield self.top_keys
            yield self.keys_pane
            yield self.queries_pane
        yield self.read_out
        yield self.legend
        yield self.prompt
        yield self.last

    def on_mount(self) -> None:
        """Focuses the matrix."""
        self.prompt.display = False
        self.matrix.focus()
        self.enter()

    def on_resize(self) -> None:
        """Places the texts beside the matrix on a wide screen, below it on others, and hides them on a tiny one."""
        width, height = self.size
        self.set_class(width >= _WIDE, "wide")
        self.set_class(height < 22 or width < 72, "small")
        self.set_class(height < 12 or (width < _WIDE and (height < 16 or width < 56)), "tiny")
        self.call_after_refresh(self.draw)

    def enter(self) -> None:
        """Draws the session's head, with the cursor on the same tokens as before if possible."""
        places = None if self.picture is None else (self.query_place, self.key_place)
        self.picture = self.session.picture()
        if self.picture is not None:
            if places is not None:
                self.row, self.column = self.picture.row_of(places[0]), self.picture.column_of(places[1])
            else:
                self.row = self.picture.row_of(len(self.picture.base.queries.tokens) - 1)
                self.column = self._strongest_of(self.row)
        self.draw()

    def _strongest_of(self, row: int) -> int:
        assert self.picture is not None
        keys = self.picture.top_keys(row)
        return keys[0][0] if keys else 0

    @property
    def query_place(self) -> int:
        """The position of the query under the cursor."""
        return 0 if self.picture is None else self.picture.base.query_places(self.row)[0]

    @property
    def key_place(self) -> int:
        """The position of the key under the cursor."""
        return 0 if self.picture is None else self.picture.base.key_places(self.column)[0]

    def draw(self) -> None:
        """Redraws the screen."""
        if not self.is_mounted or self.size.width == 0:
            return
        entry, picture = self.session.head(), self.picture
        failed, doubtful = not entry.record.self_check.ok, self.session.contradicts_itself()
        title = heading(entry, self.session.sequence, failed=failed, doubtful=doubtful)
        self.top_line.show(lambda width: [title])
        self.last.show(lambda width: [keys_line(HEAD_KEYS, width, message=self._message, without=self.idle())])
        self.matrix.show(picture, self.row, self.column)
        self.top_keys.show(picture, self.row, self.column, most=self.most)
        if picture is None:
            self.read_out.show(lambda width: [segments([(self.session.why_nothing(), WARNING)])])
            self.legend.show(lambda width: ())
            return
        self.read_out.styles.height = 2 if self.size.height >= 8 else 1
        self.read_out.show(partial(read_out, picture, (self.row, self.column)))
        legend = captions(picture, self.matrix.zoom(), self.size.width, colour=self.colour)
        self.legend.styles.height = min(
            len(legend), next(most for height, most in _LEGENDS if self.size.height >= height)
        )
        self.legend.show(lambda width: legend)
        self._draw_texts(picture)

    def idle(self) -> tuple[str, ...]:
        """The words of keys that do nothing for this record."""
        return super().idle() if len(self.session.head_table.rows) > 1 else (*super().idle(), "layer")

    def _draw_texts(self, picture: Picture) -> None:
        """Draws the keys shaded by the query's weights, and the queries by the key's, each relative to the largest."""
        row, of_row = picture.row_levels(self.row)
        column, of_column = picture.column_levels(self.column)
        is_taken = bool(picture.is_taken[self.row, self.column])
        of_query, of_key = ("query", "key") if picture.base.block == 1 else ("queries", "keys")
        from_query = f"from {of_query} {picture.query_name(self.row)} · max {weight_text(of_row, 4)}"
        to_key = f"to {of_key} {picture.key_name(self.column)} · max {weight_text(of_column, 4)}"
        self.keys_pane.show(
            picture.base.keys,
            picture.base.key_places(self.column),
            lambda place: row[picture.column_of(place)],
            _titles("keys", from_query),
        )
        self.queries_pane.show(
            picture.base.queries,
            picture.base.query_places(self.row),
            lambda place: column[picture.row_of(place)],
            (f"key {picture.key_name(self.column)} is taken out",) if is_taken else _titles("queries", to_key),
        )

    # -------------------------------------------------------------------------------------------------------- cursor

    def go(self, row: int, column: int) -> None:
        """Moves the cursor to a cell of the finest map, or the nearest one."""
        if self.picture is None:
            return
        self.row = min(self.picture.n_rows - 1, max(0, row))
        self.column = min(self.picture.n_columns - 1, max(0, column))
        self._message = ""
        self.draw()

    def action_move(self, direction: str) -> None:
        """Moves the cursor in the focused pane."""
        if self.picture is None:
            return
        if self.matrix.picture is None:  # a key pressed before the layout, when step sizes are unknown
            self.call_after_refresh(self.action_move, direction)
            return
        if self.focused in (self.keys_pane, self.queries_pane) and direction in ("up", "down", "left", "right"):
            self._move_in_text(direction)
        elif self.focused is self.top_keys and direction in ("up", "down"):
            self._move_in_list(1 if direction == "down" else -1)
        else:
            self._move_in_matrix(direction)

    def _move_in_matrix(self, direction: str) -> None:
        assert self.picture is not None
        factor, page = self.matrix.zoom().factor, self.matrix.page()
        row, column = self.row // factor * factor, self.column // factor * factor
        last = self.picture.n_rows - 1, self.picture.n_columns - 1
        places = {
            "up": (row - factor, self.column), "down": (row + factor, self.column),
            "left": (self.row, column - factor), "right": (self.row, column + factor),
            "pageup": (self.row - page[0], self.column), "pagedown": (self.row + page[0], self.column),
            "pageleft": (self.row, self.column - page[1]), "pageright": (self.row, self.column + page[1]),
            "home": (self.row, 0), "end": (self.row, self._last_open()),
            "top": (0, self.column), "bottom": (last[0], self.column),
        }  # fmt: skip
        to = places[direction]
        beyond = to[0] > last[0] and direction == "down", to[1] > last[1] and direction == "right"
        self.go(self.row if beyond[0] else to[0], self.column if beyond[1] else to[1])

    def _last_open(self) -> int:
        assert self.picture is not None
        seen = np.flatnonzero(self.picture.base.is_open[self.row])
        return int(seen[-1]) if len(seen) else 0

    def _move_in_text(self, direction: str) -> None:
        assert self.picture is not None
        is_keys = self.focused is self.keys_pane
        pane = self.keys_pane if is_keys else self.queries_pane
        place = pane.chosen[0] if direction in ("left", "up") else pane.chosen[1]
        n_tokens = len(pane.text.tokens) if pane.text is not None else 1
        if direction in ("left", "right"):
            place = min(n_tokens - 1, max(0, place + (1 if direction == "right" else -1)))
        else:
            place = pane.flow().below(place, 1 if direction == "down" else -1)
        self._to_place("key" if is_keys else "query", place)

    def _move_in_list(self, step: int) -> None:
        columns = [column for column, _ in self.top_keys.shown_keys]
        if columns:
            at = columns.index(self.column) + step if self.column in columns else 0
            self.go(self.row, columns[min(len(columns) - 1, max(0, at))])

    def _to_place(self, axis: SearchAxis, place: int) -> None:
        if self.picture is None:
            return
        if axis == "key":
            self.go(self.row, self.picture.column_of(place))
        else:
            self.go(self.picture.row_of(place), self.column)

    def on_matrix_moved(self, message: Matrix.Moved) -> None:
        """Follows a click on a cell."""
        self.go(message.row, message.column)

    def on_tokens_chosen(self, message: Tokens.Chosen) -> None:
        """Follows a click on a token."""
        self._to_place("key" if message.pane is self.keys_pane else "query", message.place)

    def on_top_keys_chosen(self, message: TopKeys.Chosen) -> None:
        """Follows a click on a top key."""
        self.go(self.row, message.column)

    # ------------------------------------------------------------------------------------------------------ what is drawn

    def action_head(self, step: int) -> None:
        """Shows another head."""
        self.session.to_head(step)
        self.enter()

    def action_layer(self, step: int) -> None:
        """Shows the same head of another layer."""
        self.say("" if self.session.to_layer(step) else "no layer there has this head")
        self.enter()

    def action_zoom(self, step: int) -> None:
        """Shows larger or smaller cells; 0 fits the whole map."""
        if self.picture is not None and self.matrix.picture is None:  # before the layout, as in `action_move`
            self.call_after_refresh(self.action_zoom, step)
            return
        if step == 0:
            self.matrix.chosen_zoom = None
        elif not self.matrix.zoomed(step):
            self.say("cells are as large as they get" if step > 0 else "all of it is on the screen")
            return
        self.draw()

    def action_most(self, step: int) -> None:
        """Lists more or fewer top keys."""
        now = len(self.top_keys.shown_keys)
        more, fewer = [n for n in _MOST if n > now], [n for n in _MOST if n < now]
        self.most = (more or _MOST[-1:])[0] if step > 0 else (fewer or _MOST[:1])[-1]
        self.draw()

    def action_copy(self) -> None:
        """Copies the row as JSON to the terminal's clipboard."""
        if self.picture is None:
            return
        text = json.dumps(self.picture.row_document(self.row), allow_nan=False)
        self.app.copy_to_clipboard(text)
        size = f"{len(text):,} bytes" + (", more than many terminals take" if len(text) > _CLIPBOARD else "")
        n_keys = count_of(len(self.picture.top_keys(self.row)), "key", grouped=True)
        self.say(f"copied query {self.picture.query_name(self.row)} as JSON: {n_keys}, {size}, by OSC 52")

    # ------------------------------------------------------------------------------------------------------------ jumping

    def action_jump(self) -> None:
        """Opens the search for a token or a position, among the keys if they are focused, else among the queries."""
        if self.picture is None:
            return
        self._before = self.row, self.column
        self.search = Search("key" if self.focused in (self.keys_pane, self.top_keys) else "query")
        self.prompt.open(self.search)
        self.last.display = False
        self.set_focus(self.prompt)

    def _show_search(self, search: Search) -> None:
        self.search = search
        self.prompt.show(search)
        if search.place is not None:
            self._to_place(search.axis, search.place)

    def _searched(self, axis: SearchAxis, typed: str) -> Search:
        assert self.picture is not None
        self.row, self.column = self._before
        text = self.picture.base.keys if axis == "key" else self.picture.base.queries
        return searched(text, axis, typed, self.key_place if axis == "key" else self.query_place)

    def take(self, event: events.Key) -> bool:
        """Passes keys to the open search line."""
        if not self.prompt.display:
            return False
        self.prompt.take(event)
        return True

    def on_prompt_typed(self, message: Prompt.Typed) -> None:
        """Goes to the first match, or back if there is none."""
        if self.search is not None:
            self._show_search(self._searched(self.search.axis, message.typed))
            self.draw()

    def on_prompt_turned(self) -> None:
        """Searches the other axis."""
        if self.search is not None:
            self._show_search(self._searched("query" if self.search.axis == "key" else "key", self.search.typed))
            self.draw()

    def on_prompt_ended(self, message: Prompt.Ended) -> None:
        """Stays at the match, or returns to the beginning of the search."""
        self.prompt.display, self.last.display = False, True
        (self.keys_pane if self.search is not None and self.search.axis == "key" else self.matrix).focus()
        if not message.taken:
            self.search = None
            self.go(*self._before)
        elif self.search is not None and self.search.typed and not self.search.places:
            self.say(f"no {self.search.axis} matches {visible(self.search.typed)}")

    def action_match(self, step: int) -> None:
        """Goes to the next or previous match."""
        if self.search is None or not self.search.places:
            self.say("no search yet: press /")
            return
        self._show_search(self.search.step(step))


# --------------------------------------------------------------------------------------------- texts around the matrix


def read_out(picture: Picture, cell: tuple[int, int], width: int) -> list[Line]:
    """The query, key and weight under the cursor, and the row's entropy, sink weight and sum."""
    row, column = cell
    weight = _weight_parts(picture, cell)
    room = max(6, (width - sum(cell_len(text) for text, _ in weight) - len("query   key   weight ")) // 2)
    names = [fitted(name, room) for name in (picture.query_name(row), picture.key_name(column))]
    first: list[StyledText] = [
        ("query ", DIM),
        (names[0], BOLD),
        ("  key ", DIM),
        (names[1], BOLD),
        ("  weight ", DIM),
        *weight,
    ]
    entropy = picture.entropy(row)
    if entropy is None:
        return [segments(first), segments([("this query sees no key", WARNING)])]
    numbers = [("entropy" if picture.base.block == 1 else "mean entropy", f"{number_text(entropy)} nats")]
    if picture.hides_sinks:
        numbers[0] = f"{numbers[0][0]} with sinks", numbers[0][1]
        numbers.append(("taken out", weight_text(float(picture.base.sink_weights[row]), 4)))
    if picture.base.learned is not None:
        numbers.append(("sink logit", weight_text(float(picture.base.learned[row]), 4)))
    numbers.append(("row sum", weight_text(picture.row_sum(row), 4)))
    second = [piece for word, number in numbers for piece in ((f"{word} ", DIM), (f"{number}  ", BOLD))]
    return [segments(first), segments(second)]


def _weight_parts(picture: Picture, cell: tuple[int, int]) -> list[StyledText]:
    weight = float(picture.base.weights[cell])
    if weight == FORBIDDEN:
        return [("masked", WARNING)]
    if picture.is_taken[cell]:
        return [("taken out", WARNING), (f" (was {float(picture.whole.weights[cell]):.6g})", DIM)]
    exact = f" ({weight:.6g})" if np.isfinite(weight) and weight > 0 else ""
    return [(weight_text(weight, 4), BOLD), (exact, DIM)]


def _titles(name: str, weights: str) -> tuple[str, ...]:
    """The title of a text with its weights in three lengths: `keys: attention from query 4 the · max .3025`."""
    return f"{name}: attention {weights}", f"attention {weights}", weights


def captions(picture: Picture, zoom: Zoom, width: int, *, colour: bool) -> list[Line]:
    """The legend: the meaning of shades, and what was removed or not drawn."""
    shades = picture.at(zoom.factor)
    parts: list[list[StyledText]] = [
        [(f"scale {picture.scale}, {scale_range(shades, picture.scale)} ", PLAIN), *WEIGHTS.swatches(8, colour=colour)]
    ]
    parts.append([(sink_words(picture), PLAIN)])
    if is_before_dropout(picture.drawable.record):
        parts.append([("before dropout", WARNING)])
    if picture.base.block > 1:
        parts.append(
            [(f"the record holds blocks of {picture.base.block} × {picture.base.block} tokens, no cells", PLAIN)]
        )
    parts += [[(words, DIM)] for words in _signs(picture, shades, zoom)]
    if np.isnan(shades.map.weights).any():
        parts.append([("?: not a number", WARNING)])
    return flowed(parts, width)


def _signs(picture: Picture, shades: Shades, zoom: Zoom) -> list[str]:
    is_forbidden = not bool(shades.map.is_open.all())
    is_taken = zoom.factor == 1 and bool(picture.is_taken.any())
    if zoom.decimals:
        return ["0: masked"] * is_forbidden + [f"{TAKEN_SIGN}: taken out"] * is_taken
    words = ["masked"] * is_forbidden + ["taken out"] * is_taken
    return ["blank: " + " or ".join(words)] if words else []
