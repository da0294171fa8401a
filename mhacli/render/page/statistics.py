"""The statistics of heads as a table: that of the terminal, with all its columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.table import Table
from rich.text import Text

from mhacli.render.base.options import ViewOptions
from mhacli.render.base.selection import chosen_heads, chosen_layers
from mhacli.render.heads.head_map import DrawableHead
from mhacli.render.heads.table import overview
from mhacli.render.heads.view import legend
from mhacli.render.page.html import WIDE, Html, joined, tag, text
from mhacli.results.record.heads import HeadStatistics, in_order
from mhacli.results.record.record import Record

DECIMALS = 3
"""Digits of a share that a page has at least: it has more room than a screen."""
NONE = "–"
"""In place of a number that there is not."""
_TERMINAL_SINK = ("mass on: sink the first token", "mass on: the first token")
"""On a page `sink` is what a head's picture takes as one: what the first token alone gets has its own name."""
_NAMES, _WORDS = ("layer", "head"), ("kind", "distance →")


def statistics(record: Record, options: ViewOptions, heads: Sequence[DrawableHead]) -> Html:
    """A section with a row for each head that was looked at, uniform attention below; nothing where no head was."""
    listed = in_order(_listed(record, options), options.sort)
    if not listed:
        return Html("")
    exact = replace(options, precision=max(options.precision, DECIMALS))
    drawn = overview(record, listed, exact, WIDE)
    places = {key_of(head.statistics): place for place, head in enumerate(heads) if head.statistics is not None}
    body, foot = _rows(drawn, [places.get(key_of(head)) for head in listed])
    names = [str(column.header) for column in drawn.columns]
    named = (text("first token" if name == "sink" else name) for name in names)
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in named)))
    caption = tag("caption", text("means over all queries that see a key, of all sequences"))
    whole = tag("table", caption, head, tag("tbody", *body), *([tag("tfoot", *foot)] if foot else []))
    title = tag("h2", text("statistics"))
    return tag("section", title, tag("div", whole, class_="scroll"), *_legend(record, listed, exact), id="statistics")


def _listed(record: Record, options: ViewOptions) -> tuple[HeadStatistics, ...]:
    if record.model is not None:
        return chosen_heads(chosen_layers(record, options), options)
    return tuple(head for head in record.heads if options.heads is None or head.head in options.heads)


def key_of(head: HeadStatistics) -> tuple[int, str, int]:
    """What tells a head from all others of a record."""
    return head.layer, head.attention, head.head


def _rows(drawn: Table, places: Sequence[int | None]) -> tuple[list[Html], list[Html]]:
    """The rows of heads, each with its place among those that are drawn, and the rows below them."""
    columns = [(str(column.header), list(column.cells)) for column in drawn.columns]
    rows = []
    for row in range(drawn.row_count):
        cells = [_cell(name, _plain(own[row])) for name, own in columns]
        at = places[row] if row < len(places) else None
        rows.append(tag("tr", *cells, **({} if at is None else {"data_head": str(at)})))
    return rows[: len(places)], rows[len(places) :]


def _cell(name: str, words: str) -> Html:
    """A cell; beside a number that is told with signs, the number itself, to sort by, and nothing where there is none."""
    if name in _NAMES:
        return tag("th", text(words), scope="row")
    if name in _WORDS:
        return tag("td", text(words), class_="word")
    number = "" if words == NONE else words.replace(",", "").removesuffix("%")
    return tag("td", text(words), **({} if number == words else {"data_value": number}))


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def _legend(record: Record, listed: Sequence[HeadStatistics], options: ViewOptions) -> Iterator[Html]:
    """What the headings mean."""
    lines = [line.plain.replace(*_TERMINAL_SINK) for line in legend(record, listed, options, WIDE)]
    yield joined(tag("p", text(line), class_="dim") for line in lines)
