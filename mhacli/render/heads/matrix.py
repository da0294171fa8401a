"""One head's pattern as a table: tokens on both axes, shaded, the row maximum marked, and nothing cut silently."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mhacli.render.base.colours import EMPTY, level_of, shade
from mhacli.render.base.format import fitted, share_text, token_text
from mhacli.render.base.options import Screen, Selection, ViewOptions, balanced
from mhacli.results.record.arrays import Array
from mhacli.results.record.record import Record

MAX_ROWS = 24
_LABEL_WIDTH, _KEY_WIDTH, _ENTROPY_WIDTH, _STRONGEST_WIDTH = 12, 10, 5, 12
_NARROW_LABEL = 6
_NEXT_WIDTH = 10
"""Of a name that is followed by what the model made of it."""
_HIDDEN = "… {} …"


@dataclass(frozen=True)
class Head:
    """One head of one sequence, cut out of the record: real queries × padded keys.

    `head` is its place on the head axis. `rows` are the queries that are wanted, None for all. From the query `produced` on,
    the token that follows is what the model made of it. `sinks`: a learned sink takes what a row lacks to 1.
    """

    record: Record
    sequence: int
    head: int
    site: str
    rows: tuple[int, ...] | None = None
    produced: int | None = None
    sinks: bool = False

    @property
    def queries(self) -> slice | Array:
        """The rows of the array that are the sequence's own tokens, those of them that are wanted."""
        first = self.record.first_query(self.sequence)
        if self.rows is not None:
            return first + np.array(self.rows, dtype=int)
        return slice(first, first + len(self.record.sequences[self.sequence].tokens))

    @property
    def shares(self) -> Array:
        """The pattern `[query, key]`; padded keys included, padded queries not."""
        return self._rows(self.record.arrays[self.site][self.sequence, self.head])

    @property
    def allowed(self) -> Array:
        """Which cells may be attended to, `[query, key]`."""
        allowed = self.record.arrays["allowed"]
        return self._rows(allowed[self.sequence, min(self.head, allowed.shape[1] - 1)])

    @property
    def entropy(self) -> Array:
        """Nats of each query's row."""
        return self._rows(self.record.arrays["entropy"][self.sequence, self.head])

    def _rows(self, array: Array) -> Array:
        rows: Array = array[self.queries]
        return rows

    def sink_share(self, row: int) -> float:
        """What no key gets of a row."""
        return max(0.0, 1 - float(self.shares[row].sum(dtype=np.float64)))

    def query_index(self, row: int) -> int:
        """The index of a row's token in its sequence."""
        return row if self.rows is None else self.rows[row]

    def query_name(self, row: int) -> str:
        """The query token at a row, `is → Paris` where the model made the next token of it."""
        index, sequence = self.query_index(row), self.record.sequences[self.sequence]
        name = token_text(sequence, index)
        return f"{name} → {token_text(sequence, index + 1)}" if self.is_followed(row) else name

    def is_followed(self, row: int) -> bool:
        """Whether the token after that of a row is what the model made of it."""
        last = len(self.record.sequences[self.sequence].tokens) - 1
        return self.produced is not None and self.produced <= self.query_index(row) < last

    def row_label(self, row: int) -> str:
        """The name of a row, with its index where not all rows are wanted."""
        return self.query_name(row) if self.rows is None else f"{self.query_index(row)} {self.query_name(row)}"

    def key_index(self, column: int) -> int:
        """The index of a column's token in its sequence; outside of it where the column is padding."""
        return column - self.record.first_key(self.sequence)

    def key_name(self, column: int) -> str:
        """The key token at a column, or the sign for padding."""
        return token_text(self.record.keys[self.sequence], self.key_index(column))

    def is_padding(self, column: int) -> bool:
        """Whether a column is padding."""
        return not 0 <= self.key_index(column) < len(self.record.keys[self.sequence].tokens)


def largest_share(record: Record, site: str) -> float:
    """The top of the common scale of all heads: the largest share of a query that had a choice of keys."""
    return _largest(record.arrays[site], record.arrays["allowed"]) or 1.0


def largest_of(heads: Sequence[Head]) -> float:
    """The top of the common scale of some heads, as `largest_share`."""
    return max((_largest(head.shares, head.allowed) for head in heads), default=0.0) or 1.0


def _largest(shares: Array, allowed: Array) -> float:
    choice = allowed.sum(axis=-1) > 1
    rows = shares.max(axis=-1, where=np.isfinite(shares), initial=0.0)
    return float(np.where(np.broadcast_to(choice, rows.shape), rows, 0.0).max(initial=0.0))


@dataclass(frozen=True)
class _Layout:
    """Widths in cells: of a query's name, of a key's column, of the strongest key; and how many keys fit. Where not all do,
    `share` is the width of the strongest key's share behind its name, 0 where there is no room for it."""

    label: int
    key: int
    strongest: int
    room: int
    share: int = 0


def matrix(head: Head, largest: float, options: ViewOptions, screen: Screen) -> RenderableType:
    """The table, or with `everything` as many tables below each other as the keys need."""
    is_whole = options.everything or head.rows is not None
    rows = balanced(len(head.shares), len(head.shares) if is_whole else MAX_ROWS)
    layout = _layout(head, rows, options.precision, screen)
    n_keys = head.shares.shape[1]
    if options.everything and n_keys > layout.room:
        starts = [*range(0, n_keys, layout.room), n_keys]
        panels = [Selection(tuple(range(a, b)), 0) for a, b in pairwise(starts)]
    else:
        panels = [balanced(n_keys, layout.room)]
    return Group(*(_table(head, rows, keys, layout, largest, options, screen) for keys in panels))


def _layout(head: Head, rows: Selection, precision: int, screen: Screen) -> _Layout:
    """The roomiest layout in which two keys and the count of the hidden ones fit."""
    n_keys = head.shares.shape[1]
    number, total = _number_widths(head, precision)
    names = max(cell_len(head.key_name(j)) for j in range(n_keys))
    labels = max(len("query"), len(_gap(rows, 0)), *(cell_len(head.row_label(i)) for i in rows.shown))
    sums = (2 if head.sinks else 1) * (total + 1)
    extra = 0 if head.produced is None else _NEXT_WIDTH
    gap = len(_HIDDEN.format(n_keys)) + 1
    narrow = max(len("max"), len(str(n_keys - 1)))
    tried = (
        (_LABEL_WIDTH, _STRONGEST_WIDTH, number - 1),
        (_NARROW_LABEL, narrow, number - 1),
        (_NARROW_LABEL, narrow, 0),
    )
    for most, strongest, share in tried:
        label = min(labels, max(most + extra, len(_gap(rows, 0))))
        left = screen.width - (label + 1) - sums - (_ENTROPY_WIDTH + 1) - strongest
        for width in range(max(number, min(names, _KEY_WIDTH)), number - 1, -1):
            if n_keys * (width + 1) <= left:
                return _Layout(label, width, strongest, n_keys)
        room = (left - gap - (share + 1 if share else 0)) // (number + 1)
        if room >= 2:
            break
    return _Layout(label, number, strongest, max(2, room), share)


def _number_widths(head: Head, precision: int) -> tuple[int, int]:
    """Of a share with its mark, and of a row's sum."""
    shares = [1.0, float(np.fmax.reduce(head.shares, axis=None))]
    sums = [1.0, float(np.fmax.reduce(head.shares.sum(axis=1)))]
    widest = [max(len(share_text(x, precision)) for x in numbers) for numbers in (shares, sums)]
    return max(widest[0], len("drop") if head.site == "dropped" else 0) + 1, widest[1]


def _gap(rows: Selection, width: int) -> str:
    """How many rows are hidden, in words where there is room."""
    said = f"⋮ {rows.hidden} rows"
    return said if len(said) <= width else f"⋮ {rows.hidden}"


def _table(
    head: Head, rows: Selection, keys: Selection, layout: _Layout, largest: float, options: ViewOptions, screen: Screen
) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="")
    table.add_column(Text("query", style="dim"), no_wrap=True, max_width=layout.label)
    for place, key in enumerate(keys.shown):
        if keys.hidden and place == keys.before:
            table.add_column(Text(_HIDDEN.format(keys.hidden), style="dim"), justify="center", no_wrap=True)
        table.add_column(_key_header(head, key, layout.key), justify="right", no_wrap=True, min_width=layout.key)
    table.add_column(Text("Σ", style="dim"), justify="right", no_wrap=True)
    if head.sinks:
        table.add_column(Text("σ", style="dim"), justify="right", no_wrap=True)
    table.add_column(Text("H", style="dim"), justify="right", no_wrap=True)
    strongest = "strongest" if layout.strongest >= len("strongest") else "max"
    table.add_column(Text(strongest, style="dim"), no_wrap=True)
    for place, query in enumerate(rows.shown):
        if rows.hidden and place == rows.before:
            table.add_row(Text(_gap(rows, layout.label), style="dim"))
        table.add_row(*_row(head, query, keys, layout, largest, options, screen))
    return table


def _key_header(head: Head, key: int, width: int) -> Text:
    return Text(fitted(head.key_name(key), width), style="dim" if head.is_padding(key) else "bold")


def _row(
    head: Head, query: int, keys: Selection, layout: _Layout, largest: float, options: ViewOptions, screen: Screen
) -> list[Text]:
    shares, allowed = head.shares[query], head.allowed[query]
    strongest = int(shares.argmax()) if allowed.any() and not np.isnan(shares).any() else -1
    cells = [Text(fitted(head.row_label(query), layout.label), style="bold")]
    for place, key in enumerate(keys.shown):
        if keys.hidden and place == keys.before:
            hidden = slice(keys.shown[place - 1] + 1, key)
            mass = share_text(float(shares[hidden].sum(dtype=np.float64)), options.precision)
            cells.append(Text(mass if allowed[hidden].any() else "0", style="dim italic"))
        cells.append(_cell(head, query, key, key == strongest, largest, options, screen))
    total = float(shares.sum(dtype=np.float64))
    cells.append(Text(share_text(total, options.precision)))
    cells += [Text(share_text(head.sink_share(query), options.precision), style="magenta")] if head.sinks else []
    cells.append(Text(_entropy_text(head, query)))
    named = _strongest_text(head, strongest, layout, "not a number" if allowed.any() else "none allowed")
    if layout.share and strongest >= 0:
        named.append(" " * (layout.strongest - named.cell_len + 1))
        named.append(f"{share_text(float(shares[strongest]), options.precision):>{layout.share}}")
    return [*cells, named]


def _strongest_text(head: Head, key: int, layout: _Layout, none: str) -> Text:
    """The key's position, and its name where there is room; `none` where there is no such key."""
    index = str(head.key_index(key))
    if layout.strongest < _STRONGEST_WIDTH:
        return Text(index if key >= 0 else "–")
    if key < 0:
        return Text(none, style="dim")
    return Text(fitted(f"{index} {head.key_name(key)}", layout.strongest))


def _entropy_text(head: Head, query: int) -> str:
    """Entropy belongs to the pattern; what dropout leaves of a row is no distribution."""
    return f"{head.entropy[query]:.2f}" if head.site == "pattern" else "–"


def _cell(
    head: Head, query: int, key: int, is_largest: bool, largest: float, options: ViewOptions, screen: Screen
) -> Text:
    share = float(head.shares[query, key])
    if not head.allowed[query, key]:
        return Text("0 ", style=EMPTY)
    if head.site == "dropped" and share == 0:
        return Text("drop ", style=EMPTY)
    text = share_text(share, options.precision) + ("*" if is_largest else " ")
    return Text(text, style=shade(level_of(share, largest)) if screen.colour and not math.isnan(share) else "")
