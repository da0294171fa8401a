"""Grids as HTML tables of coloured numbers, and their scale. Pages and notebooks colour them in different ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mhacli.render.base.cells import levels, scale_words, swatch_levels
from mhacli.render.base.doc import Column, Grid, Table
from mhacli.render.page.elements import Html, table, tag, text

Paint = Callable[[int], Mapping[str, str]]
"""The attributes that colour an element by its level."""
_SWATCHES = 15


def grid(of: Grid, paint: Paint) -> Html:
    """The table of a grid. A masked cell is 0, or blank among changes."""
    shades = levels(of.values, of.allowed, of.scale, of.top).tolist()

    def number(column: int, row: int) -> float | None:
        return float(of.values[row, column]) if of.allowed[row, column] else None

    def about(column: int, row: int) -> str:
        return of.about(row, column) if of.about and of.allowed[row, column] else ""

    def of_cell(row: int, column: int) -> Mapping[str, str]:
        return paint(shades[row][column - 1]) if of.allowed[row, column - 1] else {"class_": "dim"}

    how: Mapping[str, Any] = {"unit": of.unit, "digits": of.digits, "none": "" if of.scale == "change" else "0"}
    names: Column[int] = Column(heading=of.corner, value=lambda row: of.rows[row], unit="id")
    columns = [
        Column(heading=name, value=partial(number, column), about=partial(about, column), **how)
        for column, name in enumerate(of.columns)
    ]
    return table(Table(columns=[names, *columns], rows=range(len(of.rows))), kind="changes", of_cell=of_cell)


def legend(every: Sequence[Grid], paint: Paint) -> Html:
    """The shades of the common scale of some grids, its range, and what a cell means."""
    ramp = [tag("span", text("\u00a0"), **paint(level)) for level in swatch_levels(every, _SWATCHES)]
    return tag("p", *ramp, text(f" {scale_words(every)} · {every[0].meaning}"), class_="dim")
