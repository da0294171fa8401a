"""Grids as HTML tables of coloured numbers, and their scale, for pages and notebooks; and the effects of a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mhacli.record.record import Record
from mhacli.render.base.doc import Column, Grid, Table
from mhacli.render.base.grids import levels, scale_words, swatch_levels
from mhacli.render.checkpoint.effect import effect_grids, effect_table, effect_words
from mhacli.render.page.elements import WIDE, Html, change_class, lines_of, table, tag, text

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


# ------------------------------------------------------------------------------------------------------------- effects


def effects(record: Record) -> Html:
    """A section with pictures of the effects, and a row for each removal; empty without removals."""
    if record.effect is None:
        return Html("")
    words = [tag("p", line) for part in effect_words(record, WIDE) for line in lines_of(part, WIDE.width)]
    body = []
    if record.effect.verified.ok:
        body = [*effect_pictures(record, lambda level: {"class_": change_class(level)})]
        title = "what each removal changes, the largest change first"
        body += [table(replace(effect_table(record, record.effect), title=title))]
    return tag("section", tag("h2", text("effects")), *words, *body, id="effects")


def effect_pictures(record: Record, paint: Paint) -> Iterator[Html]:
    """The table of heads, those of texts, and their scale."""
    drawn = effect_grids(record)
    yield from (grid(of, paint) for of in drawn)
    if drawn:
        yield legend(drawn, paint)
