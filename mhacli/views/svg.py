"""Draws tables as SVG, in monospaced text."""

from __future__ import annotations

from rich.cells import cell_len

from mhacli.render.base.format import count_of
from mhacli.render.base.options import balanced
from mhacli.render.figures.svg import FAINT, INK, MONO_EM, SOFT, Piece, element, written
from mhacli.views.doc import Row, Table

_SIZE, _LINE, _GAP = 10.0, 17.0, 2
"""The size of the text, the height of a line, and the characters between columns."""


def table(of: Table[Row]) -> Piece:
    """The table with all columns; of more than `most` rows the first and the last."""
    selection = balanced(len(of.rows), len(of.rows) if of.most is None else of.most)
    lines = [[column.text(of.rows[place]) for column in of.columns] for place in selection.shown]
    headings = [column.heading for column in of.columns]
    widths = [max(map(cell_len, cells)) for cells in zip(headings, *lines, strict=True)]
    starts = [sum(widths[:place]) + place * _GAP for place in range(len(widths))]
    cell = MONO_EM * _SIZE
    width = (sum(widths) + _GAP * (len(widths) - 1)) * cell

    def line(texts: list[str], y: float, fill: str) -> str:
        parts = []
        for text, column, start, size in zip(texts, of.columns, starts, widths, strict=True):
            is_left = column.unit == "word"
            x = start if is_left else start + size
            anchor = None if is_left else "end"
            parts.append(written(x * cell, y + 0.7 * _LINE, text, _SIZE, fill=fill, text_anchor=anchor))
        return "".join(parts)

    content, y = line(headings, 0, SOFT), _LINE
    for place, texts in enumerate(lines):
        if selection.hidden and place == selection.before:
            more = f"⋮ {count_of(selection.hidden, 'row')} not drawn"
            content += written(0, y + 0.7 * _LINE, more, _SIZE, fill=SOFT)
            y += _LINE
        content += element("line", x1=0, y1=y, x2=width, y2=y, stroke=FAINT, stroke_width=0.5)
        content += line(texts, y, INK)
        y += _LINE
    return Piece(content, width, y)
