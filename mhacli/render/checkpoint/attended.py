"""What some queries of a checkpoint looked at, all heads of all layers together: where one would look for a head to draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.render.base.format import fitted, percent_text
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.base.rows import first_produced, rows_in
from mhacli.render.base.selection import LayerView, names_of
from mhacli.render.base.tables import plain_table, title_rule
from mhacli.render.heads.head_map import HeadPattern
from mhacli.results.record.arrays import Array

_MOST_NAME = 16


def looked_at(
    layers: Sequence[LayerView], sequences: Sequence[int], options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """For each of the chosen rows the first token's share, the keys that get most of the rest, and the token that was made of
    it: means over the heads of the layers that read the text itself."""
    own = [layer for layer in layers if layer.has_pattern and layer.inspected.kind in ("self", "decoder")]
    if options.rows is None or not own:
        return
    for b in sequences:
        head = HeadPattern(own[0].record, b, 0, "pattern")
        made = None if own[0].record.model is None else own[0].record.model.generated
        produced = first_produced(own[0].inspected.kind, made, b)
        rows = rows_in(options.rows, own[0].record.sequences[b], produced)
        means = np.mean([layer.record.arrays["pattern"][b, :, head.queries].mean(axis=0) for layer in own], axis=0)
        table = plain_table()
        for name in ("query", *(["made"] if produced is not None else []), "first token", "and besides"):
            table.add_column(name, no_wrap=name != "and besides", justify="right" if name == "first token" else "left")
        for row in rows:
            table.add_row(*_row(head, means[row], row, produced, options))
        said = f"sequence {b} · mean over all heads of {names_of([layer.inspected for layer in own])}"
        note = Text("a mean hides what single heads do: --layer N --head H draws one", style="dim")
        yield Group(title_rule(said), table, note)


def _row(head: HeadPattern, shares: Array, row: int, produced: int | None, options: ViewOptions) -> list[Text]:
    """A query's line. Keys are named with their place."""
    first = head.record.first_key(head.sequence)
    n_keys = len(head.record.keys[head.sequence].tokens)
    order = sorted(range(first + 1, first + n_keys), key=lambda key: -float(shares[key]))
    keys = [key for key in order if shares[key] > 0][: options.top]
    listed = ", ".join(
        f"{_named(head.key_name(key), head.key_index(key))} {percent_text(float(shares[key]))}" for key in keys
    )
    cells = [Text(_named(head.query_name(row), row), style="bold")]
    if produced is not None:
        cells.append(Text(fitted(head.query_name(row + 1), _MOST_NAME) if row >= produced else "", style="cyan"))
    return [*cells, Text(percent_text(float(shares[first]))), Text(listed or "nothing else")]


def _named(name: str, place: int) -> str:
    return f"{fitted(name, _MOST_NAME)} {place}"
