"""The table of head statistics of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mhacli.record.heads import in_order
from mhacli.record.record import Record
from mhacli.render.base.options import ViewOptions
from mhacli.render.base.selection import chosen_heads, chosen_layers
from mhacli.render.heads.drawable import DrawableHead
from mhacli.render.heads.table import HeadRow, head_key, heads_table
from mhacli.render.page.elements import Html, table, tag, text

_DECIMALS = 3
"""The least decimals of an attention weight, more than on a terminal."""


def statistics(record: Record, options: ViewOptions, heads: Sequence[DrawableHead]) -> Html:
    """A section with a row per head, and uniform attention below; empty without heads."""
    listed = [head for head in record.heads if options.heads is None or head.head in options.heads]
    if record.model is not None:
        listed = [*chosen_heads(chosen_layers(record, options), options)]
    if not listed:
        return Html("")
    exact = replace(options, precision=max(options.precision, _DECIMALS))
    places = {head_key(head.statistics): place for place, head in enumerate(heads) if head.statistics is not None}

    def of_row(row: HeadRow) -> Mapping[str, str]:
        place = places.get(head_key(row[0]))
        return {} if place is None or row[1] else {"data_head": str(place)}

    over = "all queries that see a key, of all sequences"
    if record.corpus is not None:
        over = "documents; in each, over all queries that see a key"
    shown = replace(heads_table(record, in_order(listed, options.sort), exact), title=f"means over {over}")
    legend = tag("p", text(" · ".join(shown.meanings(shown.columns))), class_="dim")
    return tag("section", tag("h2", text("statistics")), table(shown, of_row), legend, id="statistics")
