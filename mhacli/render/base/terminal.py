"""Draws tables on a terminal: the columns that fit, the rows that are shown, and what the headings mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from mhacli.render.base.doc import Column, Row, Table
from mhacli.render.base.format import count_of, flowing
from mhacli.render.base.options import balanced

_GAP, _MOST = 2, 500
"""The blanks between columns, and the widest cell."""


def table(of: Table[Row], width: int, *notes: str) -> Iterator[RenderableType]:
    """The table at a width, and lines about its headings, the rows and columns that are left out, and `notes`."""
    n_shown = len(of.rows) if of.most is None else min(of.most, len(of.rows))
    n_hidden = len(of.rows) - n_shown
    places = balanced(len(of.rows), n_shown).shown if of.has_ends else range(n_shown)
    rows = [of.rows[place] for place in places]
    more = f"{n_hidden} more (--all)" if n_hidden else ""
    natural = {c.heading: max(map(cell_len, (c.heading, *map(c.text, rows)))) for c in of.columns}
    words = [c for c in of.columns if c.unit == "word"] or of.columns
    main = max(words, key=lambda c: (c.least is not None, natural[c.heading]))
    if of.has_ends:
        natural[main.heading] = max(natural[main.heading], len(more))
    least = natural | {main.heading: max(len(more), min(main.least or _MOST, natural[main.heading]))}
    columns = list(of.columns)
    while _width(columns, least) > width and any(c.drop for c in columns):
        columns.remove(max(reversed(columns), key=lambda c: c.drop))
    excess = max(0, _width(columns, natural) - width)
    natural[main.heading] = max(cell_len(main.heading), natural[main.heading] - excess)
    drawn = RichTable(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for c in columns:
        justify: Literal["left", "right"] = "left" if c.unit == "word" else "right"
        drawn.add_column(c.heading, justify=justify, no_wrap=True, width=natural[c.heading])
    gap = [Text("⋮" if c is columns[0] else more if c is main else "", "dim") for c in columns]
    for number, row in enumerate(rows):
        if n_hidden and of.has_ends and number == (n_shown + 1) // 2:
            drawn.add_row(*gap)
        drawn.add_row(*(Text(c.text(row), c.style(row), overflow="ellipsis") for c in columns))
    if of.title:
        yield Text(of.title, style="bold")
    yield drawn
    lines = [f"{c.heading} = {c.meaning}" for c in columns if c.meaning]
    lines += [] if of.has_ends or not more else [more]
    n_dropped = len(of.columns) - len(columns)
    lines += [f"{count_of(n_dropped, 'more column')} on a wider screen or with --csv"] if n_dropped else []
    lines += notes
    if lines:
        yield flowing([Text(line, style="dim") for line in lines], width)


def _width(columns: Sequence[Column[Row]], widths: Mapping[str, int]) -> int:
    return sum(widths[c.heading] + _GAP for c in columns) - _GAP
