"""What a page shows without a script: grids as tables of coloured numbers, also for notebooks, head
statistics, and steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mhacli.record.heads import in_order
from mhacli.record.record import Record
from mhacli.render.base.colours import UNKNOWN, hex_of, ink_on
from mhacli.render.base.doc import Column, Grid, Table
from mhacli.render.base.grids import levels, ramp_of, scale_words, swatch_levels
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.base.selection import DrawableHead, chosen_heads, chosen_layers
from mhacli.render.checkpoint.effect import effect_grids, effect_table, effect_words
from mhacli.render.heads.table import HeadRow, head_key, heads_table
from mhacli.render.page.elements import WIDE, Html, lines_of, preformatted, table, tag, text
from mhacli.render.run.steps import steps_table
from mhacli.render.run.trace import closing, step_table
from mhacli.render.run.view import self_check_line


def grid(of: Grid) -> Html:
    """The table of a grid. A masked cell is 0, or blank among changes."""
    shades = levels(of.values, of.allowed, of.scale, of.top).tolist()

    def number(column: int, row: int) -> float | None:
        return float(of.values[row, column]) if of.allowed[row, column] else None

    def about(column: int, row: int) -> str:
        return of.about(row, column) if of.about and of.allowed[row, column] else ""

    def of_cell(row: int, column: int) -> Mapping[str, str]:
        return (
            _painted(of, shades[row][column - 1])
            if of.allowed[row, column - 1]
            else {"class_": "dim"}
        )

    how: Mapping[str, Any] = {
        "unit": of.unit,
        "digits": of.digits,
        "none": "" if of.scale == "change" else "0",
    }
    names: Column[int] = Column(heading=of.corner, value=lambda row: of.rows[row], unit="id")
    columns = [
        Column(heading=name, value=partial(number, column), about=partial(about, column), **how)
        for column, name in enumerate(of.columns)
    ]
    return table(
        Table(columns=[names, *columns], rows=range(len(of.rows))), kind="changes", of_cell=of_cell
    )


def _painted(of: Grid, level: int) -> Mapping[str, str]:
    """The attributes of an element in the colour of a level."""
    colour = UNKNOWN if level < 0 else ramp_of(of).colours[level]
    return {"style": f"background:{hex_of(colour)};color:{ink_on(colour)};padding:1px 6px"}


def legend(every: Sequence[Grid]) -> Html:
    """The shades of the common scale of some grids, its range, and what a cell means."""
    ramp = [
        tag("span", text("\u00a0"), **_painted(every[0], level)) for level in swatch_levels(every)
    ]
    words = f" {scale_words(every, every[0].unit, every[0].digits)} · {every[0].meaning}"
    return tag("p", *ramp, text(words), class_="dim")


# ------------------------------------------------------------------------------------------ effects


def effects(record: Record) -> Html:
    """A section with pictures of the effects, and a row for each removal; empty without
    removals.
    """
    if record.effect is None:
        return Html("")
    words = [
        tag("p", line) for part in effect_words(record, WIDE) for line in lines_of(part, WIDE.width)
    ]
    body = []
    if record.effect.verified.ok:
        body = [*effect_pictures(record)]
        title = "what each removal changes, the largest change first"
        body += [table(replace(effect_table(record, record.effect), title=title))]
    return tag("section", tag("h2", text("effects")), *words, *body, id="effects")


def effect_pictures(record: Record) -> Iterator[Html]:
    """The table of heads, those of texts, and their scale."""
    drawn = effect_grids(record)
    yield from map(grid, drawn)
    if drawn:
        yield legend(drawn)


# ------------------------------------------------------------------------------------------- tables

_DECIMALS = 3
"""The least decimals of an attention weight, more than on a terminal."""


def head_statistics(
    record: Record, options: ViewOptions, heads: Sequence[DrawableHead]
) -> tuple[Html, Sequence[Mapping[str, Any]]]:
    """A section with a row per head and uniform attention below, empty without heads; and its
    orders by each column.
    """
    listed = [head for head in record.heads if options.shows_head(head.head)]
    if record.model is not None:
        listed = [*chosen_heads(chosen_layers(record, options), options)]
    if not listed:
        return Html(""), ()
    exact = replace(options, precision=max(options.precision, _DECIMALS))
    places = {head_key(head.statistics): place for place, head in enumerate(heads)}

    def of_row(row: HeadRow) -> Mapping[str, str]:
        place = places.get(head_key(row.head))
        return {} if place is None or row.baseline else {"data_head": str(place)}

    over = "all queries that see a key, of all sequences"
    if record.corpus is not None:
        over = "documents; in each, over all queries that see a key"
    shown = replace(
        heads_table(record, in_order(listed, options.sort), exact), title=f"means over {over}"
    )
    legend = tag(
        "p", text(" · ".join([*shown.meanings(shown.columns), *shown.legend])), class_="dim"
    )
    body = [tag("h2", text("statistics")), table(shown, of_row=of_row), legend]
    orders = [_order(shown, place, column) for place, column in enumerate(shown.columns)]
    return tag("section", *body, id="statistics", class_="numbers"), orders


def _order(of: Table[HeadRow], place: int, column: Column[HeadRow]) -> Mapping[str, Any]:
    """The rows that have a value, in the order that a first click on the heading asks for: numbers
    from the largest down, names from the first on, and the first column as listed.
    """
    if place == 0:
        return {"first": "ascending", "places": [*range(len(of.rows))]}
    values = [column.value(row) for row in of.rows]
    known = [row for row, value in enumerate(values) if value is not None and value == value]
    is_number = column.unit not in ("word", "id")
    # a column has values of one type
    known.sort(key=values.__getitem__, reverse=is_number)  # type: ignore[arg-type]
    return {"first": "descending" if is_number else "ascending", "places": known}


# -------------------------------------------------------------------------------------------- steps


_STORY = Screen(width=100, colour=False)


def walkthrough(record: Record) -> Html:
    """A section with the steps of a run or of decoding, in the order of execution; empty without
    steps.
    """
    if not record.trace:
        return Html("")
    if record.decoding is None:
        end = (
            closing(record, _STORY) if record.survey is None else self_check_line(record.self_check)
        )
        heading, body = (
            "shapes, step by step",
            [table(steps_table(record)), preformatted(end, _STORY.width)],
        )
    else:
        shown = step_table(record.trace, range(len(record.sequences)))
        heading, body = "decoding, step by step", [table(shown)]
    return tag("section", tag("h2", text(heading)), *body, id="walk")
