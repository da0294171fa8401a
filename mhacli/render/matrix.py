"""One head's pattern as a table: tokens on both axes, shaded, the row maximum marked, and nothing cut silently."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from mhacli.record import Array, Record
from mhacli.render.colours import level_of, shade
from mhacli.render.options import Screen, Selection, ViewOptions, balanced
from mhacli.render.words import fitted, share_text, token_text

MAX_ROWS = 24
_LABEL_WIDTH, _KEY_WIDTH, _STRONGEST_WIDTH = 12, 10, 12


@dataclass(frozen=True)
class Head:
    """One head of one sequence, cut out of the record: real queries × padded keys."""

    record: Record
    sequence: int
    head: int
    site: str

    @property
    def shares(self) -> Array:
        """The pattern `[query, key]`; padded keys included, padded queries not."""
        n_queries = len(self.record.sequences[self.sequence].tokens)
        return self.record.arrays[self.site][self.sequence, self.head, :n_queries]

    @property
    def allowed(self) -> Array:
        """Which cells may be attended to, `[query, key]`."""
        allowed = self.record.arrays["allowed"]
        n_queries = len(self.record.sequences[self.sequence].tokens)
        return allowed[self.sequence, min(self.head, allowed.shape[1] - 1), :n_queries]

    def query_name(self, index: int) -> str:
        """The query token at a position."""
        return token_text(self.record.sequences[self.sequence], index)

    def key_name(self, index: int) -> str:
        """The key token at a position, or the sign for padding."""
        return token_text(self.record.keys[self.sequence], index)


def largest_share(record: Record, site: str) -> float:
    """The top of the common scale of all heads: the largest share of a query that had a choice of keys."""
    shares = record.arrays[site]
    choice = record.arrays["allowed"].sum(axis=-1) > 1
    rows = shares.max(axis=-1, where=np.isfinite(shares), initial=0.0)
    return float(np.where(np.broadcast_to(choice, rows.shape), rows, 0.0).max(initial=0.0)) or 1.0


def matrix(head: Head, largest: float, options: ViewOptions, screen: Screen) -> RenderableType:
    """The table, or with `everything` as many tables side by side in text as the keys need."""
    rows = balanced(len(head.shares), len(head.shares) if options.everything else MAX_ROWS)
    width, room = _key_room(head, rows, options, screen)
    n_keys = head.shares.shape[1]
    if options.everything and n_keys > room:
        starts = [*range(0, n_keys, room), n_keys]
        panels = [Selection(tuple(range(a, b)), 0) for a, b in pairwise(starts)]
    else:
        panels = [balanced(n_keys, room)]
    return Group(*(_table(head, rows, keys, width, largest, options, screen) for keys in panels))


def _key_room(head: Head, rows: Selection, options: ViewOptions, screen: Screen) -> tuple[int, int]:
    """The width of a key column, and how many of them fit."""
    number = options.precision + 3  # 1.00* at precision 2
    names = max((cell_len(head.key_name(j)) for j in range(head.shares.shape[1])), default=1)
    label = min(_LABEL_WIDTH, max(cell_len(head.query_name(i)) for i in rows.shown))
    tail = (options.precision + 3) + 6 + _STRONGEST_WIDTH
    left = screen.width - label - 1 - tail
    for width in range(max(number, min(names, _KEY_WIDTH)), number - 1, -1):
        if head.shares.shape[1] * (width + 1) <= left:
            return width, head.shares.shape[1]
    return number, max(2, (left - 9) // (number + 1))  # 9: the column of what is hidden


def _table(
    head: Head, rows: Selection, keys: Selection, width: int, largest: float, options: ViewOptions, screen: Screen
) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="")
    table.add_column(Text("query", style="dim"), no_wrap=True, max_width=_LABEL_WIDTH)
    for place, key in enumerate(keys.shown):
        if keys.hidden and place == keys.before:
            table.add_column(Text(f"… {keys.hidden} …", style="dim"), justify="center", no_wrap=True)
        table.add_column(_key_header(head, key, width), justify="right", no_wrap=True, min_width=width)
    table.add_column(Text("Σ", style="dim"), justify="right", no_wrap=True)
    table.add_column(Text("H", style="dim"), justify="right", no_wrap=True)
    table.add_column(Text("strongest", style="dim"), no_wrap=True)
    for place, query in enumerate(rows.shown):
        if rows.hidden and place == rows.before:
            table.add_row(Text(f"⋮ {rows.hidden} rows", style="dim"))
        table.add_row(*_row(head, query, keys, largest, options, screen))
    return table


def _key_header(head: Head, key: int, width: int) -> Text:
    is_padding = key >= len(head.record.keys[head.sequence].tokens)
    return Text(fitted(head.key_name(key), width), style="dim" if is_padding else "bold")


def _row(head: Head, query: int, keys: Selection, largest: float, options: ViewOptions, screen: Screen) -> list[Text]:
    shares, allowed = head.shares[query], head.allowed[query]
    strongest = int(shares.argmax()) if allowed.any() else -1
    cells = [Text(fitted(head.query_name(query), _LABEL_WIDTH), style="bold")]
    for place, key in enumerate(keys.shown):
        if keys.hidden and place == keys.before:
            hidden = shares[keys.shown[place - 1] + 1 : key].sum(dtype=np.float64)
            cells.append(Text(share_text(float(hidden), options.precision), style="dim italic"))
        cells.append(_cell(head, query, key, key == strongest, largest, options, screen))
    total = float(shares.sum(dtype=np.float64))
    cells += [Text(share_text(total, options.precision)), Text(_entropy_text(head, query))]
    if strongest < 0:
        return [*cells, Text("no key allowed", style="dim")]
    return [*cells, Text(fitted(f"{strongest} {head.key_name(strongest)}", _STRONGEST_WIDTH))]


def _entropy_text(head: Head, query: int) -> str:
    """Entropy belongs to the pattern; what dropout leaves of a row is no distribution."""
    return f"{head.record.arrays['entropy'][head.sequence, head.head, query]:.2f}" if head.site == "pattern" else "–"


def _cell(
    head: Head, query: int, key: int, is_largest: bool, largest: float, options: ViewOptions, screen: Screen
) -> Text:
    share = float(head.shares[query, key])
    if not head.allowed[query, key]:
        return Text("0 ", style="dim")
    if head.site == "dropped" and share == 0:
        return Text("drop ", style="dim")
    text = share_text(share, options.precision) + ("*" if is_largest else " ")
    style = shade(level_of(share, largest)) if screen.colour and not math.isnan(share) else Style.null()
    return Text(text, style=style + Style(bold=True) if is_largest else style)
