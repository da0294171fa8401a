"""What a page shows without a script: grids as tables of coloured numbers, also for notebooks, head
statistics, and steps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mhacli.record.heads import in_order
from mhacli.record.record import DecodingRecord, EffectRecord, Record, is_a
from mhacli.render.base.colours import UNKNOWN, hex_of, ink_on
from mhacli.render.base.doc import Column, Grid, Table
from mhacli.render.base.grids import levels, ramp_of, scale_words, swatch_levels
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.base.selection import DrawableHead, chosen_heads
from mhacli.render.checkpoint.effect import effect_grids, effect_table, effect_words
from mhacli.render.heads.table import HeadRow, head_key, heads_table
from mhacli.render.run.steps import self_check_line, steps_table
from mhacli.render.run.trace import closing, step_table

from .elements import (
    WIDE,
    Html,
    dim,
    paragraphs,
    preformatted,
    section,
    table,
    tag,
    text,
)


def grid(g: Grid) -> Html:
    """The table of a grid. A masked cell is 0, or blank among changes."""
    shades = levels(g.values, g.allowed, g.scale, g.top).tolist()

    def number(column: int, row: int) -> float | None:
        return float(g.values[row, column]) if g.allowed[row, column] else None

    def about(column: int, row: int) -> str:
        return g.about(row, column) if g.about and g.allowed[row, column] else ""

    def of_cell(row: int, column: int) -> Mapping[str, str]:
        if not g.allowed[row, column - 1]:
            return {"class_": "dim"}
        return _colour_of(g, shades[row][column - 1])

    columns: list[Column[int]] = [Column(g.corner, lambda row: g.rows[row], unit="id")]
    for column, name in enumerate(g.columns):
        columns.append(
            Column(
                name,
                partial(number, column),
                about=partial(about, column),
                unit=g.unit,
                digits=g.digits,
                none="" if g.scale == "change" else "0",
            )
        )
    rows = range(len(g.rows))
    return table(Table(columns, rows), kind="changes", of_cell=of_cell)


def _colour_of(g: Grid, level: int) -> Mapping[str, str]:
    """The attributes of an element in the colour of a level."""
    colour = UNKNOWN if level < 0 else ramp_of(g).colours[level]
    return {"style": f"background:{hex_of(colour)};color:{ink_on(colour)};padding:1px 6px"}


def legend(panels: Sequence[Grid]) -> Html:
    """The shades of the common scale of some grids, its range, and what a cell means."""
    ramp = [
        tag("span", Html("\u00a0"), **_colour_of(panels[0], level))
        for level in swatch_levels(panels)
    ]
    words = f" {scale_words(panels, panels[0].unit, panels[0].digits)} · {panels[0].meaning}"
    return tag("p", *ramp, text(words), class_="dim")


# ------------------------------------------------------------------------------------------ effects


def effects(record: Record) -> Html:
    """A section with pictures of the effects, and a row for each removal; empty without
    removals.
    """
    if not is_a(record, EffectRecord):
        return Html("")
    body = [line for part in effect_words(record, WIDE) for line in paragraphs(part)]
    if record.effect.verified.ok:
        body += effect_pictures(record)
        title = "what each removal changes, the largest change first"
        body.append(table(replace(effect_table(record), title=title)))
    return section("effects", "effects", *body)


def effect_pictures(record: EffectRecord) -> Iterator[Html]:
    """The table of heads, those of texts, and their scale."""
    panels = effect_grids(record)
    yield from map(grid, panels)
    if panels:
        yield legend(panels)


# ------------------------------------------------------------------------------------------- tables

_DECIMALS = 3
"""The least decimals of an attention weight, more than on a terminal."""


def head_statistics(
    record: Record, options: ViewOptions, heads: Sequence[DrawableHead]
) -> tuple[Html, Sequence[Mapping[str, Any]]]:
    """A section with a row per head and uniform attention below, empty without heads; and its
    orders by each column.
    """
    rows = chosen_heads(record, options)
    if not rows:
        return Html(""), ()
    exact = replace(options, precision=max(options.precision, _DECIMALS))
    places = {head_key(head.statistics): place for place, head in enumerate(heads)}

    def of_row(row: HeadRow) -> Mapping[str, str]:
        place = places.get(head_key(row.head))
        return {} if place is None or row.baseline else {"data_head": str(place)}

    over = "all queries that see a key, of all sequences"
    if record.scan is not None:
        over = "documents; in each, over all queries that see a key"
    content = heads_table(record, in_order(rows, options.sort), exact)
    content = replace(content, title=f"means over {over}")
    words = " · ".join([*content.meanings(content.columns), *content.remarks])
    rows_of_heads = table(content, of_row=of_row)
    orders = [_order(content, place, column) for place, column in enumerate(content.columns)]
    body = section("statistics", "statistics", rows_of_heads, dim(words), class_="numbers")
    return body, orders


def _order(content: Table[HeadRow], place: int, column: Column[HeadRow]) -> Mapping[str, Any]:
    """The rows that have a value, in the order that a first click on the heading asks for: numbers
    from the largest down, names from the first on, and the first column as listed.
    """
    if place == 0:
        return {"first": "ascending", "places": [*range(len(content.rows))]}
    values = [column.value(row) for row in content.rows]
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
    if is_a(record, DecodingRecord):
        heading = "decoding, step by step"
        body = [table(step_table(record, range(len(record.sequences))))]
    else:
        heading = "shapes, step by step"
        is_of_run = record.survey is None
        end = closing(record, _STORY) if is_of_run else self_check_line(record.self_check)
        body = [table(steps_table(record)), preformatted(end, _STORY.width)]
    return section("walk", heading, *body)
