"""Draws tables on a terminal: the columns that fit, the rows that are shown, and what the headings mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from mhacli.render.base.doc import Row, Table
from mhacli.render.base.format import count_of, flowing
from mhacli.render.base.options import balanced

_MOST, _LEGEND = 500, 3
"""The widest cell, and the most lines below a table."""


def table(of: Table[Row], width: int, *notes: str, has_all: bool = False) -> Iterator[RenderableType]:
    """The table at a width, and up to three lines about its headings, the rows and columns that are left out, and `notes`; with
    `has_all` as many lines as they take."""
    n_shown = len(of.rows) if of.most is None else min(of.most, len(of.rows))
    n_hidden = len(of.rows) - n_shown
    selection = balanced(len(of.rows), n_shown) if of.has_ends else range(n_shown)
    rows = [of.rows[place] for place in (selection if isinstance(selection, range) else selection.shown)]
    more = f"{n_hidden} more (--all)" if n_hidden else ""
    cells = [[[c.heading], *(c.text(row).split("\n") for row in (*rows, *of.foot))] for c in of.columns]
    natural = [max(cell_len(line) for lines in column for line in lines) for column in cells]
    words = [place for place, c in enumerate(of.columns) if c.unit == "word"] or [*range(len(of.columns))]
    main = max(words, key=lambda place: (of.columns[place].least is not None, natural[place]))
    if of.has_ends:
        natural[main] = max(natural[main], len(more))
    shown = _fitting(of, natural, main, width)
    excess = sum(natural[place] + of.gap for place in shown) - of.gap - width
    natural[main] = max(cell_len(of.columns[main].heading), natural[main] - max(0, excess))
    drawn = RichTable(box=None, padding=(0, of.gap, 0, 0), pad_edge=False, header_style="dim")
    drawn.show_header = any(of.columns[place].heading for place in shown)
    for place in shown:
        c = of.columns[place]
        justify: Literal["left", "right"] = "left" if c.unit == "word" else "right"
        overflow: Literal["fold", "ellipsis"] = "fold" if c.wraps else "ellipsis"
        drawn.add_column(c.heading, justify=justify, overflow=overflow, no_wrap=not c.wraps, width=natural[place])
    gap = {shown[0]: Text("⋮", "dim")} | {main: Text(more, "dim")}
    for number, row in enumerate((*rows, *of.foot)):
        if n_hidden and of.has_ends and number == (n_shown + 1) // 2:
            drawn.add_row(*(gap.get(place, Text()) for place in shown))
        styles = ["dim" if number >= len(rows) else of.columns[place].style(row) for place in shown]
        texts = ["\n".join(cells[place][number + 1]) for place in shown]
        drawn.add_row(*map(Text, texts, styles))
    if of.title:
        yield Text(of.title, style="bold")
    yield drawn
    fixed = [more] if more and not of.has_ends else []
    n_dropped = len(of.columns) - len(shown)
    fixed += [f"{count_of(n_dropped, 'more column')} on a wider screen or {of.elsewhere}"] if n_dropped else []
    lines = _legend(of.meanings([of.columns[place] for place in shown]), [*fixed, *notes], width, has_all)
    if lines.plain:
        yield lines


def bare(of: Table[Row], width: int) -> RenderableType:
    """The table alone, without what its headings mean."""
    return next(table(of, width))


def _fitting(of: Table[Row], natural: Sequence[int], main: int, width: int) -> list[int]:
    """The columns that fit, by place; the main column may be as narrow as its least width."""
    least = [*natural]
    least[main] = min(of.columns[main].least or _MOST, natural[main])
    shown = [*range(len(of.columns))]
    while sum(least[place] + of.gap for place in shown) - of.gap > width and any(
        of.columns[place].drop for place in shown
    ):
        shown.remove(max(reversed(shown), key=lambda place: of.columns[place].drop))
    return shown


def _legend(meanings: list[str], fixed: list[str], width: int, has_all: bool) -> Text:
    """The meanings and what stands behind them; of many meanings the first, and where to find the others."""
    lines = flowing([Text(part, style="dim") for part in (*meanings, *fixed)], width)
    while meanings and not has_all and lines.plain.count("\n") >= _LEGEND:
        meanings.pop()
        parts = [*meanings, "more: mha explain", *fixed]
        lines = flowing([Text(part, style="dim") for part in parts], width)
    return lines
