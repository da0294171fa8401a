"""One attention pattern as an HTML table: numbers if they fit, else shades, pooled for many tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mhacli.record.arrays import Array
from mhacli.render.base.cells import FORBIDDEN, NOT_A_NUMBER, levels, range_text
from mhacli.render.base.colours import NAN_SIGN, UNKNOWN, glyph, hex_of, ink_on, ramp_colour
from mhacli.render.base.format import fitted, weight_text
from mhacli.render.base.options import Scale
from mhacli.render.heads.head_map import HeadMap
from mhacli.render.page.elements import Html, joined, tag, text

MOST_CELLS = 32
"""The most cells per side before pooling."""
_NUMBERS = 16
"""The most cells per side for numbers in cells."""
_NAME, _DECIMALS = 12, 3


def matrix(cells: HeadMap, scale: Scale, title: str) -> Html:
    """The cells of a pattern under a title, with the scale below. A row is a query, a column a key."""
    shown = cells.fitting(MOST_CELLS, MOST_CELLS)
    top, has_numbers = shown.largest or 1.0, max(shown.weights.shape) <= _NUMBERS
    shades = levels(shown.weights, scale, top)
    columns = range(shown.weights.shape[1])
    head = [tag("th", text("query ↓ key →"), class_="word"), *(_column(shown, j, upright=has_numbers) for j in columns)]
    names = (tag("th", text(fitted(shown.query_name(i), _NAME)), class_="word") for i in range(len(shown.weights)))
    rows = (tag("tr", name, *_cells(shown, shades, i, has_numbers=has_numbers)) for i, name in enumerate(names))
    body = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows))
    is_exceeded = bool((np.nan_to_num(shown.weights) > 1.0001 * top).any())
    notes = [*_notes(shown), f"scale: {scale}, {range_text(scale, top, is_exceeded=is_exceeded)}"]
    return joined(
        [
            tag("p", tag("b", text(title))),
            tag("div", body),
            tag("p", *_ramp(), text(f" {' · '.join(notes)}"), class_="dim"),
        ]
    )


def _column(shown: HeadMap, column: int, *, upright: bool) -> Html:
    name = text(fitted(shown.key_name(column), _NAME))
    return tag("th", name) if upright else tag("th", name, style="writing-mode:vertical-rl;padding:0;text-align:left")


def _cells(shown: HeadMap, shades: Array, row: int, *, has_numbers: bool) -> Iterator[Html]:
    """The cells of a row. Cells without a number have a sign in their own colour, visible without colours."""
    for column, level in enumerate(shades[row].astype(int).tolist()):
        if level == FORBIDDEN:
            yield tag("td", text("0" if has_numbers else ""), class_="dim")
            continue
        is_number = level != NOT_A_NUMBER
        number = weight_text(float(shown.weights[row, column]), 2 if has_numbers else _DECIMALS)
        colour = ramp_colour(level) if is_number else UNKNOWN
        if has_numbers:
            yield tag("td", text(number), style=f"background:{hex_of(colour)};color:{ink_on(colour)}")
        else:
            sign, ground = glyph(level) if is_number else NAN_SIGN, hex_of(colour)
            title = f"{shown.query_name(row)} → {shown.key_name(column)} {number}"
            yield tag("td", text(sign), style=f"background:{ground};color:{ground};padding:0 3px", title=title)


def _notes(shown: HeadMap) -> Iterator[str]:
    """The meaning of a cell, and of masked cells."""
    n = shown.block
    if n == 1:
        yield "a cell is the attention weight that a query (row) gives to a key (column)"
    else:
        yield f"pooled: a cell stands for {n} × {n} tokens, the mean weight that the queries of a row give to its keys"
    if not shown.is_open.all():
        yield "0 is masked" if max(shown.weights.shape) <= _NUMBERS else "empty cells are masked"


def _ramp() -> Iterator[Html]:
    for level in range(0, 256, 51):
        colour = hex_of(ramp_colour(level))
        yield tag("span", text(glyph(level)), style=f"background:{colour};color:{colour}")
