"""The screen of one head: its picture, a query's strongest keys, the texts, and a common cursor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text
from textual import events
from textual.containers import Container

from mhacli.errors import first_names
from mhacli.numbers import shown
from mhacli.render.base import format as words
from mhacli.render.base.colours import ACCENT, CURSOR, DIM, EMPTY, NAN_SIGN, PLAIN, picked
from mhacli.render.base.grids import MASKED, cell, scale_words, swatches, ticks
from mhacli.render.heads.head_map import KEY, QUERY
from mhacli.text.escape import visible

from .keys import KEYS
from .picture import DECIMALS, HALF, TAKEN_SIGN, TIGHT, Picture, per_line
from .screen import (
    Cell,
    HeadsScreen,
    Lines,
    Pane,
    Words,
    at,
    named,
    type_words,
    window,
    wrapped,
)
from .session import Session

# --------------------------------------------------------------------------------------- the matrix

_CURSOR = Style(color=picked((255, 64, 64), 203, 9))
"""The cursor's colour among half blocks, which is not in the ramp."""
_MOST_LABEL = 14
"""The widest name of a query beside the matrix."""
_TICKS = 10
"""The columns between positions above the matrix."""
_NAMED = 200
"""The first queries, whose names decide the width of names."""


class Matrix(Pane):
    """The picture of a head in the largest cells that fit, or `zoomed` ones, queries down and keys
    across. The cursor is on a cell of the finest map, and a cell on the screen stands for `factor`
    × `factor` of them.
    """

    def __init__(self, screen: HeadScreen) -> None:
        super().__init__(self._lines, id="matrix")
        self.owner = screen
        self.zoomed = 0
        self.factor = 1
        self.width = HALF
        self._left = 0

    def fit(self) -> None:
        """Takes cells of a size, and those around the cursor."""
        owner = self.owner
        picture = owner.picture
        width, height = self.size
        n_named = min(_NAMED, len(picture.base.weights))
        label = max(cell_len(picture.name(QUERY, row)) for row in range(n_named))
        self._left = 2 + max(len("query"), min(_MOST_LABEL, label, width // 4))
        lines = max(1, height - 2)
        room = max(1, width - self._left)
        fits = picture.largest(lines, room)
        self.zoomed = max(0, min(len(picture.sizes) - 1, fits + self.zoomed)) - fits
        self.factor, self.width = picture.sizes[fits + self.zoomed]
        n_rows, n_columns = picture.levels(self.factor).shape
        row, column = (place // self.factor for place in owner.at)
        owner.rows = window(owner.rows.start, lines * per_line(self.width), row, n_rows)
        owner.columns = window(owner.columns.start, max(1, room // self.width), column, n_columns)

    def _lines(self, width: int, height: int) -> tuple[str, Lines]:
        """The lines around the cursor below the keys."""
        self.fit()
        rows = self.owner.rows
        row, column = (place // self.factor for place in self.owner.at)
        cells = self.owner.picture.map(self.factor)
        title = "matrix"
        if cells.block > 1:
            title += f" · {cells.block} × {cells.block} tokens a cell"
        if self.factor > 1:
            weight = float(cells.weights[row, column])
            title += f", here {'masked' if weight == MASKED else shown(weight, 'weight', 4)}"
        step = per_line(self.width)
        lines = [self._line(range(start, min(start + step, rows.stop))) for start in rows[::step]]
        return title, [self._axis(), *lines]

    def _axis(self) -> Iterator[Cell]:
        """The keys, as tokens if they fit into cells, else some of the positions."""
        yield f"{'query':<{self._left}}", DIM
        cells = self.owner.picture.map(self.factor)
        width = self.width
        columns = self.owner.columns
        if width in DECIMALS:
            for column in columns:
                name = set_cell_size(words.fitted(cells.name(KEY, column), width - 1), width)
                yield name, ACCENT if column == self.owner.at[KEY] else PLAIN
        else:
            places = [cells.place(KEY, column) for column in columns]
            yield ticks(places, width, every=_TICKS, begin=columns.start), DIM

    def _line(self, rows: range) -> Sequence[Cell]:
        """The name of a query, and the cells of its line."""
        owner = self.owner
        picture = owner.picture
        room = self._left - 2
        row, column = (place // self.factor for place in owner.at)
        cells = picture.cells((self.factor, self.width), rows, owner.columns)
        if row not in rows:
            name = words.fitted(picture.name(QUERY, rows[0], self.factor), room)
            return [(set_cell_size(name, room), PLAIN), ("  ", ACCENT), *cells]
        place = column - owner.columns.start
        cells[place] = self._cursor(*cells[place], is_upper=row == rows[0])
        name = words.fitted(picture.name(QUERY, owner.at[QUERY]), room)
        return [(set_cell_size(name, room), ACCENT), (" ▸", ACCENT), *cells]

    def _cursor(self, text: str, style: Style, *, is_upper: bool) -> Cell:
        """The cell under the cursor: in its colour among half blocks, else reversed, in a frame
        unless it is a tight number.
        """
        if self.width == HALF:
            other = style.color if (text == "▄") == is_upper else style.bgcolor
            return "▀" if is_upper else "▄", _CURSOR + Style(bgcolor=other)
        return text if self.width == TIGHT else f"[{text[1:-1]}]", style + CURSOR

    def on_click(self, event: events.Click) -> None:
        """Goes to the cell under the mouse; beside the cells to the row."""
        row = self.owner.rows.start + (event.y - 2) * per_line(self.width)
        column = self.owner.columns.start + (event.x - self._left) // self.width
        if row in self.owner.rows:
            is_beside = column not in self.owner.columns
            self.owner.go(
                row * self.factor, self.owner.at[KEY] if is_beside else column * self.factor
            )


# --------------------------------------------------------------------------------------- the screen

_MOST = (3, 5, 8, 12, 20, 50, 100, 1000)
"""The most top keys to list."""
_LIST_DECIMALS = 5
"""The decimals of weights in the list of top keys."""
_MOST_NAME = 18
"""The widest name in the list of top keys."""
_AXES = ("query", "key")
_TITLES = ("queries of key", "keys of query")
"""The titles of the texts by axis, before what they belong to."""


class HeadScreen(HeadsScreen):
    """One head with the cursor on a query and a key."""

    BINDINGS = KEYS["a head"]

    def __init__(self, session: Session, picture: Picture) -> None:
        super().__init__(session)
        self.picture = picture
        self.matrix = Matrix(self)
        self.list = Pane(self._top_keys, id="list")
        self.keys = Pane(partial(self._text, KEY), id="key")
        self.queries = Pane(partial(self._text, QUERY), id="query")
        body = Container(self.matrix, self.list, self.keys, self.queries, id="body")
        self.panes = Words(self._above, id="top"), body, Words(self._about, id="about")
        self._most: int | None = None
        self._listed: list[int] = []
        self._is_searching = False
        self._axis = QUERY
        self._typed = ""
        self._matches: list[int] = []
        self._before = self.at
        row = picture.base.weights.shape[QUERY] - 1
        self.at = row, next((column for column, _ in picture.base.strongest(row)), 0)

    def draw(self) -> None:
        """Draws the session's head, with the cursor on the same tokens as before if possible."""
        before = self.picture
        picture = self.session.picture()
        if picture is not None:
            self.picture = picture
            for axis in (QUERY, KEY):
                place = before.base.place(axis, self.at[axis])
                self.at = self._moved(axis, picture.cell_of(axis, place))
        super().draw()

    def _above(self, width: int) -> Iterator[Text]:
        """The head, its type, its sequence, and doubts."""
        n_sequences = len(self.session.record.sequences)
        sequence = ""
        if n_sequences > 1:
            sequence = f"  sequence {self.session.sequence} of 0–{n_sequences - 1}"
        label = (self.session.head.label, "bold cyan")
        yield Text.assemble(label, "  ", type_words(self.session), (sequence, "bold"))

    # ---------------------------------------------------------------------------------------- panes

    def _top_keys(self, width: int, height: int) -> tuple[str, Lines]:
        """The strongest keys of the row, as many as fit if no number was chosen, then what the
        others get.
        """
        row, column = self.at
        base = self.picture.base
        keys = base.strongest(row)
        label = min(_MOST_NAME, max(6, width - _LIST_DECIMALS - 12))
        most = self._most or max(1, height - 1)
        self._listed = [place for place, _ in keys[:most]]
        lines: list[list[Cell]] = []
        for place, weight in keys[:most]:
            name = set_cell_size(words.fitted(self.picture.name(KEY, place), label), label)
            number = f" {name} {shown(weight, 'weight', _LIST_DECIMALS):>{_LIST_DECIMALS + 2}} "
            fraction = np.nan_to_num(weight / (keys[0][1] or 1.0))
            bar = "█" * round(fraction * (width - cell_len(number) - 1))
            style = at(row, place)
            lines.append([(number, style + CURSOR if place == column else style), (bar, style)])
        others = keys[most:]
        if others:
            rest = shown(sum(weight for _, weight in others), "weight", _LIST_DECIMALS)
            lines.append([(f"  {len(others):,} more get {rest}", PLAIN)])
        place = self._listed.index(column) if column in self._listed else 0
        n_keys = words.count_of(len(keys), "key" if base.block == 1 else "block")
        title = f"top {len(self._listed):,} of {n_keys}"
        return title, [lines[number] for number in window(0, height, place, len(lines))]

    def _text(self, axis: int, width: int, height: int) -> tuple[str, Lines]:
        """The lines around the cursor of keys as their cells in the cursor's row, or of queries as
        theirs in its column.
        """
        picture = self.picture
        other = 1 - axis
        title = f"{_TITLES[axis]} {picture.name(other, self.at[other])}"
        shades = np.take(picture.levels(1), self.at[other], axis=other)
        names = picture.words[axis]
        places = picture.base.places(axis, self.at[axis])
        width = max(4, width)

        def token(place: int) -> Cell:
            """A token in the colours of its cell, or without colours behind its sign."""
            here = picture.cell_of(axis, place)
            sign, style = cell(int(shades[here]), colour=self.session.colour)
            if shades[here] == MASKED:
                style = EMPTY
            if place in places:
                sign = "▸"
            name = words.fitted(names[place], width - 1)
            return sign + name, style + at(*self._moved(axis, here))

        lines = wrapped(names, width)
        row = next(row for row, line in enumerate(lines) if places.start in line)
        return title, [
            map(token, lines[number])
            for number in window(row - height // 2, height, row, len(lines))
        ]

    def _about(self, width: int) -> Iterator[Text]:
        """The query, key and weight under the cursor, the row's entropy, sink weight and sum, and
        what shades mean; or why nothing is drawn.
        """
        if self.session.picture() is None:
            yield Text(self.session.why_nothing(), "bold yellow")
            return
        yield self._about_cell(width)
        yield self._about_row(width)
        self.matrix.fit()  # it may be drawn later
        shaded = [self.picture.grid(self.matrix.factor)]
        shades = swatches(shaded, colour=self.picture.colour)
        scale = Text.assemble(f"scale {scale_words(shaded)} ", shades)
        yield words.flowing([scale, *(Text(note, "dim") for note in self._notes())], width)

    def _about_cell(self, width: int) -> Text:
        """The query, key and weight under the cursor."""
        base = self.picture.base
        number = float(base.weights[self.at])
        if number == MASKED:
            weight = "masked"
        elif base.is_taken[self.at]:
            weight = "taken out"
        else:
            weight = shown(number, "weight", 4)
        exact = f" ({number:.6g})" if np.isfinite(number) and number > 0 else ""
        room = max(6, (width - cell_len(f"query   key   weight {weight}{exact}")) // 2)
        names = [
            named(name, words.fitted(self.picture.name(axis, self.at[axis]), room))
            for axis, name in enumerate(_AXES)
        ]
        return Text("  ").join([*names, named("weight", weight).append(exact, "dim")])

    def _about_row(self, width: int) -> Text:
        """The entropy of the cursor's row, what was taken out, and the sum."""
        base = self.picture.base
        row = self.at[QUERY]
        if not base.n_queries[row]:
            return Text("this query sees no key", "bold yellow")
        parts = []
        if base.entropy is not None:
            name = "entropy" if base.taken is None else "entropy with sinks"
            parts.append(named(name, f"{shown(float(base.entropy[row]), 'number')} nats"))
        sums = {"taken out": base.taken, "sink logit": base.learned, "row sum": base.sums}
        for name, numbers in sums.items():
            if numbers is not None:
                parts.append(named(name, shown(float(numbers[row]), "weight", 4)))
        return words.flowing(parts, width, "  ")

    def _notes(self) -> Iterator[str]:
        """What shades and signs mean, as far as they occur."""
        base = self.picture.base
        cells = self.picture.map(self.matrix.factor)
        has_numbers = self.matrix.width in DECIMALS
        if base.sinks:
            keys = first_names(map(str, base.sinks))
            yield f"sink: key {keys}, {shown(base.sink_mass, 'percent')} of a row on average"
        if base.learned is not None:
            yield f"sink logit: {shown(base.learned_mass, 'percent')} of a row on average"
        if base.taken is not None:
            yield "sinks taken out, rows renormalised"
        if self.picture.head.record.config.train:
            yield "before dropout"
        if not cells.is_open.all():
            yield "0: masked" if has_numbers else "blank: masked"
        if base.is_taken.any():
            yield f"{TAKEN_SIGN if has_numbers else 'blank'}: taken out"
        if np.isnan(cells.weights).any():
            yield f"{NAN_SIGN}: not a number"

    # --------------------------------------------------------------------------------------- cursor

    def _moved(self, axis: int, place: int) -> tuple[int, int]:
        """The cell of the cursor's column in another row, or of its row in another column; the
        nearest that there is.
        """
        place = max(0, min(self.picture.base.weights.shape[axis] - 1, place))
        return (place, self.at[KEY]) if axis == QUERY else (self.at[QUERY], place)

    def action_move(self, down: int, right: int, times: int = 1) -> None:
        """Moves the cursor; an arrow in the list or a text goes to the key or query before or
        behind.
        """
        step = down + right
        listed = self._listed
        if times > 1 or self.focused not in (self.list, self.keys, self.queries):
            axis = KEY if right else QUERY
            place = self.at[axis] + step * times * self.matrix.factor
        elif self.focused is self.list and listed:
            axis = KEY
            number = listed.index(self.at[KEY]) + step if self.at[KEY] in listed else 0
            place = listed[max(0, min(len(listed) - 1, number))]
        else:
            axis = QUERY if self.focused is self.queries else KEY
            place = self.at[axis] + step
        self.go(*self._moved(axis, place))

    def action_end(self) -> None:
        """Moves the cursor to the last key that its query sees."""
        keys = np.flatnonzero(self.picture.base.is_open[self.at[QUERY]])
        self.go(*self._moved(KEY, int(keys.max(initial=0))))

    # -------------------------------------------------------------------------------- what is drawn

    def action_zoom(self, step: int) -> None:
        """Shows larger or smaller cells; 0 fits the whole map."""
        self.matrix.zoomed = self.matrix.zoomed + step if step else 0
        self.draw()

    def action_most(self, step: int) -> None:
        """Lists more or fewer top keys."""
        now = self._most or len(self._listed)
        self._most = next((most for most in _MOST[::step] if (most - now) * step > 0), now)
        self.draw()

    def action_copy(self) -> None:
        """Copies the row as JSON to the terminal's clipboard."""
        row = self.at[QUERY]
        text = json.dumps(self.picture.row_document(row), allow_nan=False)
        self.app.copy_to_clipboard(text)
        self.action_say(
            f"copied query {self.picture.name(QUERY, row)} as JSON by OSC 52: {len(text):,} bytes"
        )

    # -------------------------------------------------------------------------------------- jumping

    def action_jump(self) -> None:
        """Begins a search for a token or a position, among the keys if they are focused, else among
        the queries.
        """
        self._before = self.at
        self._is_searching = True
        self._axis = KEY if self.focused in (self.keys, self.list) else QUERY
        self._find("")

    def on_key(self, event: events.Key) -> None:
        """Searches what is typed, from a slash to Enter or Escape. Actions of keys would come after
        the keys typed behind.
        """
        if event.key != "slash" and not self._is_searching:
            return
        event.stop()
        event.prevent_default()
        if not self._is_searching:
            self.action_jump()
        elif event.key in ("enter", "escape"):
            self._find(self._typed if event.key == "enter" else "")
            self._is_searching = False
            self.set_focus(self.keys if self._axis == KEY else self.matrix)
            is_missing = self._typed and not self._matches
            self.action_say(
                f"no {_AXES[self._axis]} matches {visible(self._typed)}" if is_missing else ""
            )
        elif event.key == "backspace":
            self._find(self._typed[:-1])
        elif event.is_printable and event.character:
            self._find(self._typed + event.character)
        else:
            if event.key == "tab":
                self._axis = 1 - self._axis
            self._find(self._typed)

    def _find(self, typed: str) -> None:
        """Goes to the first match, or back if there is none."""
        axis = self._axis
        self.at = self._before
        self._typed = typed
        begin = self.picture.base.place(axis, self.at[axis])
        self._matches = self.picture.matches(axis, typed, begin)
        if self._matches:
            count = f"1 of {len(self._matches):,}"
        else:
            count = "no match" if typed else "token or place"
        self.action_say(
            f"to a {_AXES[axis]}: {visible(typed)}  {count} · Tab other axis · Enter take · Esc go"
            " back"
        )
        self.action_match(0)

    def action_match(self, step: int) -> None:
        """Goes to the next or previous match, with 0 to the current one."""
        if step and not self._matches:
            self.action_say("no search yet: press /")
        self._matches = self._matches[step:] + self._matches[:step]
        if self._matches:
            self.at = self._moved(self._axis, self.picture.cell_of(self._axis, self._matches[0]))
        self.draw()
