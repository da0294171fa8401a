"""The table of head statistics of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.text import Text

from mhacli.record.heads import HeadStatistics, in_order, words_of_type
from mhacli.record.record import Record
from mhacli.render.base.options import ViewOptions
from mhacli.render.base.selection import chosen_heads, chosen_layers
from mhacli.render.heads.drawable import DrawableHead
from mhacli.render.heads.table import OverviewColumn, head_key, legend_parts, overview_cells
from mhacli.render.page.elements import WIDE, Html, tag, text

# ---------------------------------------------------------------------------------------------------------- statistics


DECIMALS = 3
"""The least decimals of an attention weight, more than on a terminal."""
NONE = "–"
"""The sign for a missing number."""


def statistics(record: Record, options: ViewOptions, heads: Sequence[DrawableHead]) -> Html:
    """A section with a row per head, and uniform attention below; empty without heads."""
    listed = in_order(_listed(record, options), options.sort)
    if not listed:
        return Html("")
    exact = replace(options, precision=max(options.precision, DECIMALS))
    cells = overview_cells(record, listed, exact, WIDE)
    places = {head_key(head.statistics): place for place, head in enumerate(heads) if head.statistics is not None}
    body = [
        _statistics_row(cells.columns, row, places.get(head_key(head)), head)
        for row, head in zip(cells.heads, listed, strict=True)
    ]
    foot = [_statistics_row(cells.columns, row) for row in cells.baselines]
    head = tag("thead", tag("tr", *map(_heading, cells.columns)))
    over = (
        "documents; in each, over all queries that see a key"
        if record.corpus is not None
        else "all queries that see a key, of all sequences"
    )
    caption = tag("caption", text(f"means over {over}"))
    whole = tag("table", caption, head, tag("tbody", *body), *([tag("tfoot", *foot)] if foot else []))
    title = tag("h2", text("statistics"))
    legend = tag("p", text(" · ".join(legend_parts(cells.columns, listed))), class_="dim")
    return tag("section", title, tag("div", whole, class_="scroll"), legend, id="statistics")


def _listed(record: Record, options: ViewOptions) -> tuple[HeadStatistics, ...]:
    if record.model is not None:
        return chosen_heads(chosen_layers(record, options), options)
    return tuple(head for head in record.heads if options.heads is None or head.head in options.heads)


def _heading(column: OverviewColumn) -> Html:
    """The heading of a column, with its explanation as tooltip."""
    return tag("th", text(column.heading), scope="col", **({"title": column.explanation} if column.explanation else {}))


def _statistics_row(
    columns: Sequence[OverviewColumn],
    cells: Sequence[Text],
    place: int | None = None,
    head: HeadStatistics | None = None,
) -> Html:
    """A row with the index of its head among the drawn ones, and the meaning of its type."""
    meaning = {} if head is None else {"title": words_of_type(head.kind).explanation}
    html = [
        _cell(column, cell.plain, meaning if column.field == "kind" else {})
        for column, cell in zip(columns, cells, strict=True)
    ]
    return tag("tr", *html, **({} if place is None else {"data_head": str(place)}))


def _cell(column: OverviewColumn, words: str, attributes: Mapping[str, str]) -> Html:
    """A cell, with its number as sort key."""
    if column.cells == "name":
        return tag("th", text(words), scope="row")
    if column.cells == "word":
        return tag("td", text(words), class_="word", **attributes)
    number = "" if words == NONE else words.replace(",", "").removesuffix("%")
    return tag("td", text(words), **({} if number == words else {"data_value": number}))
