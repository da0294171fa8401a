"""Single cells of heads on a terminal: the strongest, a block, and the top keys of requested
queries.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from rich.console import Group, RenderableType

from mhacli.io.data import Array
from mhacli.numbers import shown
from mhacli.record.heads import Corner, HeadStatistics
from mhacli.record.record import LayerView, Record
from mhacli.render.base.doc import Column, Table
from mhacli.render.base.format import count_of, flowing
from mhacli.render.base.grids import grids
from mhacli.render.base.options import Screen, ViewOptions, sequences_to_draw
from mhacli.render.base.selection import places_of
from mhacli.render.base.terminal import table

from .head_map import cell_map, grid_of, where
from .table import TOKEN_WIDTH, token_name

MAX_PLACES = 8
"""The most heads whose strongest keys and cells are listed."""
_MOST = 3
"""The most keys and cells of a head that are listed."""
_MAX_ROWS = 40
"""The most rows of a block of the pattern."""
_LEAST = 40
"""The least width of a column of cells or keys."""
_SHORT_TOKEN = 9
"""The largest width of two tokens on a line."""


def strong_places(
    record: Record, listed: Sequence[HeadStatistics], options: ViewOptions, screen: Screen
) -> RenderableType:
    """Per head the keys with most attention, the cells with the largest ratio to uniform, and the
    largest score.
    """

    def cell_name(sequence: int, query: int, key: int, width: int = TOKEN_WIDTH) -> str:
        query_name = token_name(record.sequences, sequence, query, width)
        return f"{query_name} → {token_name(record.keys, sequence, key, width)}"

    def standing_out(head: HeadStatistics) -> str:
        cells = (cell for cell in head.largest[:_MOST] if cell.lift > 1)
        return "\n".join(
            f"{shown(cell.share, 'weight', options.precision)} ×{shown(cell.lift, 'short')} "
            f"{cell_name(cell.sequence, cell.query, cell.key, _SHORT_TOKEN)}"
            for cell in cells
        )

    def top_score(head: HeadStatistics) -> str | None:
        at = head.max_score_at
        return None if at is None else f"{shown(head.max_score, 'short')} at {cell_name(*at)}"

    columns: list[Column[HeadStatistics]] = [
        Column("head", lambda head: head.head, unit="id"),
        Column(
            "receives most",
            lambda head: _receivers(record, head),
            meaning="share of all attention, × uniform attention, key",
            drop=1,
        ),
        Column(
            "stands out",
            standing_out,
            least=_LEAST,
            meaning="weight, × uniform attention, query → key",
        ),
        Column("largest score", top_score, drop=2),
    ]
    most = None if options.everything else MAX_PLACES
    return Group(*table(Table(columns, listed, most=most), screen.width))


def _receivers(record: Record, head: HeadStatistics) -> str:
    """The keys with most attention over all sequences: `3.4 % ×5.2 12 “the”`."""
    place = [other.head for other in record.heads].index(head.head)
    received = record.arrays["received"][:, place]
    uniform = record.arrays["uniform_received"]
    uniform = uniform[:, min(place, uniform.shape[1] - 1)]
    totals = np.nansum(received.astype(np.float64), axis=1, keepdims=True)
    weights = np.nan_to_num(received / np.where(totals > 0, totals, 1.0))
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        ratios = np.nan_to_num(received.astype(np.float64) / uniform)
    lines = []
    for flat in np.argsort(-weights.ravel(), kind="stable")[:_MOST].tolist():
        b, key = divmod(flat, received.shape[1])
        name = token_name(record.keys, b, key - record.first_key(b), _SHORT_TOKEN)
        lines.append(
            f"{shown(float(weights[b, key]), 'percent')} ×{shown(float(ratios[b, key]), 'short')}"
            f" {name}"
        )
    return "\n".join(lines)


_ROUNDING = 1e-5
"""A smaller rest of a row is a rounding error."""


def cells_view(
    layer: LayerView, listed: Sequence[HeadStatistics], options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """Of the listed heads of a layer the kept block of the pattern, and the top keys of the
    requested queries.
    """
    record, corner = layer.record, layer.inspected.survey.kept.corner
    for b in sequences_to_draw(options, len(record.sequences)).shown:
        if listed and corner is not None:
            yield Group(*_corner_view(layer, corner, listed, b, options, screen))
        if listed and "top_keys" in record.arrays and requested_queries(layer, b):
            yield Group(*_strongest_keys(layer, listed, b, options, screen))


def _corner_view(
    layer: LayerView,
    corner: Corner,
    listed: Sequence[HeadStatistics],
    sequence: int,
    options: ViewOptions,
    screen: Screen,
) -> Iterator[RenderableType]:
    """The kept block of the pattern of each head, cell by cell, as far as it fits."""
    record = layer.record
    tokens = record.sequences[sequence].tokens
    keys = record.keys[sequence].tokens
    arrays = record.arrays
    queries = slice(corner.first_query, corner.first_query + corner.n_queries)
    visible = arrays["visible"][sequence]
    first_query = corner.first_query - record.first_query(sequence)
    first_key = corner.first_key - record.first_key(sequence)
    rows = tuple(range(first_query, first_query + corner.n_queries))
    span = f"keys {first_key}–{first_key + corner.n_keys - 1}"
    panels = []
    for place in places_of(record, [head.head for head in listed]):
        weights = arrays["corner"][sequence, place]
        entropy = arrays["entropy"][sequence, place, queries]
        has_keys = visible[min(place, len(visible) - 1), queries] > 0
        is_broken = has_keys & np.isnan(entropy)  # a cell is NaN where masked, and in rows of NaN
        allowed = ~np.isnan(weights) | is_broken[:, None]
        cells = replace(cell_map(tokens, keys, weights, allowed), first=(0, first_key), rows=rows)
        head = f"head {record.heads[place].head}"
        title = where(record, sequence, layer.label, head, span)
        g = grid_of(cells, title, scale="linear", digits=options.precision)
        has_all_rows = options.everything or corner.n_queries <= _MAX_ROWS
        panels.append(replace(g, corner="query", has_all_rows=has_all_rows))
    yield from grids(panels, screen, form="numbers", everything=options.everything)


def requested_queries(layer: LayerView, sequence: int) -> list[tuple[int, int]]:
    """The requested queries within a sequence, each after its index in the request."""
    rows, _ = layer.record.inside(sequence)
    return [
        (number, q)
        for number, q in enumerate(layer.inspected.survey.kept.queries)
        if rows.start <= q < rows.stop
    ]


def _strongest_keys(
    layer: LayerView,
    listed: Sequence[HeadStatistics],
    sequence: int,
    options: ViewOptions,
    screen: Screen,
) -> Iterator[RenderableType]:
    """The top keys of the requested queries in every head, in descending order, and the weight of
    the others.
    """
    record = layer.record
    first_key = record.first_key(sequence)
    digits = options.precision

    def strongest(number: int, head: HeadStatistics) -> str:
        (place,) = places_of(record, [head.head])
        keys = record.arrays["top_keys"][sequence, place, number].tolist()
        weights = record.arrays["top_shares"][sequence, place, number].tolist()
        words = [
            f"{token_name(record.keys, sequence, key - first_key)}"
            f" {shown(weight, 'weight', digits)}"
            for key, weight in zip(keys, weights, strict=True)
            if key >= 0
        ]
        if not words:
            return "not a number" if any(map(math.isnan, weights)) else "no visible key"
        rest = 1 - sum(weights)
        if rest > _ROUNDING:
            name = "the rest" if head.learned_sink is None else "the rest and the sink logit"
            words.append(f"{name} {shown(rest, 'weight', digits)}")
        return flowing(words, screen.width - len("head  "), ", ").plain

    for number, query in requested_queries(layer, sequence):
        columns: list[Column[HeadStatistics]] = [
            Column("head", lambda head: head.head, unit="id"),
            Column(
                "strongest weights",
                partial(strongest, number),
                least=_LEAST,
                wraps=True,
            ),
        ]
        name = token_name(record.sequences, sequence, query - record.first_query(sequence))
        n_keys = _n_visible_keys(record.arrays["visible"][sequence, :, query], digits)
        title = where(record, sequence, layer.label, f"query {name}", n_keys)
        yield from table(Table(columns, listed, title=title), screen.width)


def _n_visible_keys(n_of_heads: Array, digits: int) -> str:
    """The keys that heads see from a query, and the uniform weight if it is the same for all."""
    least, largest = int(n_of_heads.min()), int(n_of_heads.max())
    if least < largest:
        return f"{least:,} to {largest:,} visible keys"
    words = count_of(least, "visible key")
    return f"{words}, {shown(1 / least, 'weight', digits)} each if uniform" if least else words
