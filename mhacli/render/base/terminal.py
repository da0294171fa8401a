"""Draws tables on a terminal: the columns that fit, the rows that are shown, and what the headings
mean.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from .doc import Column, Row, Table
from .format import count_of, flowing
from .options import Selection, balanced

_MOST_LINES = 3
"""The most lines below a table."""


def spaced(sections: Iterable[RenderableType]) -> RenderableType:
    """The sections with a blank line between."""
    first, *others = sections
    return Group(first, *(part for section in others for part in (Text(""), section)))


def table(
    content: Table[Row], width: int, *notes: str, has_all: bool = False
) -> Iterator[RenderableType]:
    """The columns that fit and whose meanings fit into three lines below, beside the rows and
    columns that are left out, and `notes`; with `has_all` as many lines as they take.
    """
    rows = _visible_rows(content)
    columns = content.columns
    legend = [*content.legend]
    while True:
        widths = _fitting(content, rows, width, columns)
        parts = [*content.meanings([*widths]), *legend]
        if rows.hidden and not content.has_ends:
            parts.append(_more(rows))
        if len(widths) < len(content.columns):
            n_dropped = len(content.columns) - len(widths)
            parts.append(f"{count_of(n_dropped, 'more column')} with --json")
        below = flowing([*parts, *notes], width, style="dim")
        explained = [column for column in widths if column.drop and column.meaning]
        if has_all or below.plain.count("\n") < _MOST_LINES or not (legend or explained):
            break
        if legend:  # a column says more than a line about all of them
            legend.pop()
        else:
            widest = max(reversed(explained), key=lambda column: column.drop)
            columns = [column for column in widths if column is not widest]
    if content.title:
        yield Text(content.title, "bold")
    yield _lines(content, rows, widths)
    for words in (below, flowing(content.remarks, width, style="dim")):
        if words.plain:
            yield words


def bare(content: Table[Row], width: int) -> RenderableType:
    """The table without a title, and without what its headings mean."""
    rows = _visible_rows(content)
    return _lines(content, rows, _fitting(content, rows, width, content.columns))


def _visible_rows(content: Table[Row]) -> Selection:
    """The rows that are shown: the first, or the first and the last. A single row more takes no
    more room than its number.
    """
    n_rows = len(content.rows)
    most = n_rows if content.most is None or n_rows <= content.most + 1 else content.most
    if content.has_ends:
        return balanced(n_rows, most)
    return Selection(tuple(range(most)), n_rows - most)


def _more(rows: Selection) -> str:
    return f"{rows.hidden} more (--all)"


def _lines(
    content: Table[Row], rows: Selection, widths: Mapping[Column[Row], int]
) -> RenderableType:
    """The columns of these widths. Lines between rows part them into several tables."""
    blocks = [_empty(content, widths)]
    blocks[0].show_header = any(column.heading for column in widths)
    parts: list[RenderableType] = [*blocks]

    def insert(lines: Sequence[RenderableType]) -> None:
        """Puts lines between the rows so far and those that follow."""
        if lines:
            blocks.append(_empty(content, widths))
            parts.extend([*lines, blocks[-1]])

    for number, place in enumerate(rows.shown):
        row = content.rows[place]
        if rows.hidden and content.has_ends and number == rows.before:
            insert([Text(f"⋮ {_more(rows)}", "dim")])
        insert(content.above(row))
        blocks[-1].add_row(*(_cell(column, row) for column in widths))
        insert(content.below(row))
    for row in content.foot:
        blocks[-1].add_row(*(Text(column.text(row), "dim") for column in widths))
    return Group(*parts)


def _cell(column: Column[Row], row: Row) -> Text:
    """The cell of a row in the column's style, or with styles of its own."""
    value = column.value(row)
    return value if isinstance(value, Text) else Text(column.text(row), column.style(row))


def _empty(content: Table[Row], widths: Mapping[Column[Row], int]) -> RichTable:
    """The columns of these widths without rows and headings."""
    empty = RichTable(
        box=None,
        padding=(0, content.gap, 0, 0),
        pad_edge=False,
        header_style="dim",
        show_header=False,
    )
    for column, width in widths.items():
        empty.add_column(
            column.heading,
            justify="left" if column.unit == "word" else "right",
            overflow="fold" if column.wraps else "ellipsis",
            no_wrap=not column.wraps,
            width=width,
        )
    return empty


def _fitting(
    content: Table[Row], rows: Selection, width: int, columns: Sequence[Column[Row]]
) -> Mapping[Column[Row], int]:
    """Those of some columns that fit, with their widths. The main column, the one with a least
    width or else of the widest words, is shortened down to that width before others are dropped,
    and further where nothing else helps.
    """
    visible = [*(content.rows[place] for place in rows.shown), *content.foot]
    natural = {}
    for column in columns:
        texts = [column.heading, *map(column.text, visible)]
        natural[column] = max(cell_len(line) for text in texts for line in text.split("\n"))
    words = [column for column in columns if column.unit == "word"] or columns
    main = max(words, key=lambda column: (column.least is not None, natural[column]))
    least = {**natural, main: min(main.least or natural[main], natural[main])}

    def excess(widths: Mapping[Column[Row], int]) -> int:
        return sum(widths.values()) + content.gap * (len(widths) - 1) - width

    while excess(least) > 0 and any(column.drop for column in least):
        del least[max(reversed(least), key=lambda column: column.drop)]
    widths = {column: natural[column] for column in least}
    if main in widths:
        widths[main] = max(cell_len(main.heading), natural[main] - max(0, excess(widths)))
    return widths
