"""Draws tables on a terminal: the columns that fit, the rows that are shown, and what the headings mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from mhacli.render.base.doc import Column, Row, Table
from mhacli.render.base.format import count_of, flowing
from mhacli.render.base.options import Selection, balanced

_MOST, _LEGEND = 500, 3
"""The widest cell, and the most lines below a table."""


def spaced(sections: Iterable[RenderableType]) -> RenderableType:
    """The sections with a blank line between."""
    first, *others = sections
    return Group(first, *(part for section in others for part in (Text(""), section)))


def table(of: Table[Row], width: int, *notes: str, has_all: bool = False) -> Iterator[RenderableType]:
    """The columns that fit and whose meanings fit into three lines below, beside the rows and columns that are left out, and
    `notes`; with `has_all` as many lines as they take."""
    rows = _shown_rows(of)
    widths = _fitting(of, rows, width)
    legend = _legend(of, rows, widths, width, notes, has_all=has_all)
    while legend.plain.count("\n") >= _LEGEND and not has_all:
        explained = [place for place in widths if of.columns[place].drop and of.columns[place].meaning]
        if not explained:
            break
        widest = max(reversed(explained), key=lambda place: of.columns[place].drop)
        widths = _fitting(of, rows, width, [place for place in widths if place != widest])
        legend = _legend(of, rows, widths, width, notes)
    if of.title:
        yield Text(of.title, style="bold")
    yield _drawn(of, rows, widths)
    if legend.plain:
        yield legend


def bare(of: Table[Row], width: int) -> RenderableType:
    """The table without a title, and without what its headings mean."""
    rows = _shown_rows(of)
    return _drawn(of, rows, _fitting(of, rows, width))


def _shown_rows(of: Table[Row]) -> Selection:
    """The rows that are shown: the first, or the first and the last. A single row more takes no more room than its number."""
    n_rows = len(of.rows)
    n_shown = n_rows if of.most is None or n_rows <= of.most + 1 else of.most
    return balanced(n_rows, n_shown) if of.has_ends else Selection(tuple(range(n_shown)), n_rows - n_shown)


def _more(rows: Selection) -> str:
    return f"{rows.hidden} more (--all)" if rows.hidden else ""


def _drawn(of: Table[Row], rows: Selection, widths: dict[int, int]) -> RenderableType:
    """The columns of these widths, by place. The lines between rows part the table."""
    columns = [of.columns[place] for place in widths]
    drawn = _empty(of, widths)
    drawn.show_header = any(column.heading for column in columns)
    parts: list[RenderableType] = [drawn]
    for number, place in enumerate(rows.shown):
        if rows.hidden and of.has_ends and number == rows.before:
            main = _main(of, rows)
            gap = [_more(rows) if column is main else "" for column in columns]
            drawn.add_row(gap[0] or "⋮", *gap[1:], style="dim")
        row = of.rows[place]
        above, below = of.above(row), of.below(row)
        if above:
            drawn = _empty(of, widths)
            parts += [*above, drawn]
        drawn.add_row(*(_cell(column, row) for column in columns))
        if below:
            drawn = _empty(of, widths)
            parts += [*below, drawn]
    for row in of.foot:
        drawn.add_row(*(Text(column.text(row), "dim") for column in columns))
    return Group(*parts)


def _cell(column: Column[Row], row: Row) -> Text:
    """The cell of a row in the column's style, or with styles of its own."""
    value = column.value(row)
    return value if isinstance(value, Text) else Text(column.text(row), column.style(row))


def _empty(of: Table[Row], widths: dict[int, int]) -> RichTable:
    """The columns of these widths without rows and headings."""
    empty = RichTable(box=None, padding=(0, of.gap, 0, 0), pad_edge=False, header_style="dim", show_header=False)
    for place, width in widths.items():
        column = of.columns[place]
        justify: Literal["left", "right"] = "left" if column.unit == "word" else "right"
        overflow: Literal["fold", "ellipsis"] = "fold" if column.wraps else "ellipsis"
        empty.add_column(column.heading, justify=justify, overflow=overflow, no_wrap=not column.wraps, width=width)
    return empty


def _main(of: Table[Row], rows: Selection) -> Column[Row]:
    """The column that is shortened: the one with a least width, or else that of the widest words."""
    words = [column for column in of.columns if column.unit == "word"] or of.columns
    return max(words, key=lambda column: (column.least is not None, _natural(of, rows, column)))


def _natural(of: Table[Row], rows: Selection, column: Column[Row]) -> int:
    """The width of a column with all its words."""
    texts = [column.heading, *(column.text(of.rows[place]) for place in rows.shown), *map(column.text, of.foot)]
    return max(cell_len(line) for text in texts for line in text.split("\n"))


def _fitting(of: Table[Row], rows: Selection, width: int, places: Sequence[int] | None = None) -> dict[int, int]:
    """The widths of the columns that fit, of all or of those at some `places`, by place. The main column is shortened down to its
    least width before others are dropped, and further where nothing else helps."""
    main = of.columns.index(_main(of, rows))
    kept = range(len(of.columns)) if places is None else places
    natural = {place: _natural(of, rows, of.columns[place]) for place in kept}
    if of.has_ends and main in natural:
        natural[main] = max(natural[main], len(_more(rows)))
    least = {**natural}
    if main in natural:
        least[main] = min(of.columns[main].least or _MOST, natural[main])

    def excess(widths: dict[int, int]) -> int:
        return sum(widths.values()) + of.gap * (len(widths) - 1) - width

    while excess(least) > 0 and any(of.columns[place].drop for place in least):
        del least[max(reversed(least), key=lambda place: of.columns[place].drop)]
    widths = {place: natural[place] for place in least}
    if main not in widths:
        main = max(
            (place for place in widths if of.columns[place].unit == "word"), key=widths.__getitem__, default=main
        )
    if main in widths:
        widths[main] = max(cell_len(of.columns[main].heading), widths[main] - max(0, excess(widths)))
    return widths


def _legend(
    of: Table[Row], rows: Selection, widths: dict[int, int], width: int, notes: Sequence[str], *, has_all: bool = False
) -> Text:
    """What the headings of columns mean, and what stands behind them; what else needs an explanation as far as there is room."""
    columns = [of.columns[place] for place in widths]
    fixed = [_more(rows)] if rows.hidden and not of.has_ends else []
    n_dropped = len(of.columns) - len(columns)
    if n_dropped:
        fixed.append(f"{count_of(n_dropped, 'more column')} {of.elsewhere}")
    meanings = of.meanings(columns)
    needed = meanings[: len(meanings) - len(of.legend)]
    more = ("more: mha explain",)
    attempts = [(*meanings[:n], *more, *fixed, *notes) for n in range(len(meanings) - 1, len(needed) - 1, -1)]
    for parts in ((*meanings, *fixed, *notes), *attempts):
        lines = flowing(parts, width, style="dim")
        if has_all or lines.plain.count("\n") < _LEGEND:
            return lines
    return flowing((*needed, *fixed, *notes), width, style="dim")
