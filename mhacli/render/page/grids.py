"""Grids as HTML tables of coloured numbers, and their scale. Pages and notebooks colour them in different ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mhacli.render.base.cells import levels_of, ramp_of
from mhacli.render.base.doc import Grid
from mhacli.render.figures.grids import scale_words
from mhacli.render.page.elements import Html, tag, text
from mhacli.text.numbers import shown

Paint = Callable[[int], Mapping[str, str]]
"""The attributes that colour an element by its level."""
_SWATCHES = 15


def grid(of: Grid, paint: Paint) -> Html:
    """The table of a grid. A masked cell is 0, or blank among changes."""
    levels = levels_of(of).astype(int).tolist()

    def cell(row: int, column: int) -> Html:
        if not of.allowed[row, column]:
            return tag("td", text("" if of.scale == "change" else "0"), class_="dim")
        title = None if of.about is None else of.about(row, column)
        number = shown(float(of.values[row, column]), of.unit, of.digits)
        return tag("td", text(number), title=title, **paint(levels[row][column]))

    head = [tag("th", text(name), scope="col") for name in of.columns]
    rows = []
    for row, name in enumerate(of.rows):
        cells = [cell(row, column) for column in range(len(of.columns))]
        rows.append(tag("tr", tag("th", text(name), scope="row"), *cells))
    top = tag("thead", tag("tr", tag("th", text(of.corner)), *head))
    whole = tag("table", top, tag("tbody", *rows), class_="changes")
    return tag("div", whole, class_="scroll")


def legend(every: Sequence[Grid], paint: Paint) -> Html:
    """The shades of the common scale of some grids, its range, and what a cell means."""
    words = scale_words(every)
    top = ramp_of(every[0]).top
    has_less = every[0].scale != "change" or not words.startswith("0")  # of changes from 0 on, the upper half
    begin = 0 if has_less else _SWATCHES // 2
    levels = [top * place // (_SWATCHES - 1) for place in range(begin, _SWATCHES)]
    ramp = [tag("span", text("\u00a0"), **paint(level)) for level in levels]
    return tag("p", *ramp, text(f" {words} · {every[0].meaning}"), class_="dim")
