"""Single cells of heads on a terminal: the strongest, a block, and the top keys of requested
queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from rich.console import Group, RenderableType

from mhacli.record.heads import HeadStatistics
from mhacli.record.record import Record
from mhacli.render.base.doc import Column, Table
from mhacli.render.base.format import count_of, flowing
from mhacli.render.base.grids import grids
from mhacli.render.base.options import Screen, ViewOptions, sequences_to_draw
from mhacli.render.base.selection import places_of, survey_of
from mhacli.render.base.terminal import table
from mhacli.render.heads.head_map import cell_map, grid_of, where
from mhacli.render.heads.table import TOKEN_WIDTH, token_name
from mhacli.text.numbers import shown

MAX_PLACES, _MOST, _MAX_ROWS, _LEAST = 8, 3, 40, 40
_SHORT_TOKEN = 9
"""The largest width of two tokens on a line."""


def strong_places(
    record: Record, listed: Sequence[HeadStatistics], options: ViewOptions, screen: Screen
) -> RenderableType:
    """Per head the keys with most attention, the cells with the largest ratio to uniform, and the
    largest score.
    """

    def cell_name(sequence: int, query: int, key: int, width: int = TOKEN_WIDTH) -> str:
        names = (
            token_name(record.sequences, sequence, query, width),
            token_name(record.keys, sequence, key, width),
        )
        return " → ".join(names)

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
        Column(heading="head", value=lambda head: head.head, unit="id"),
        Column(
            heading="receives most",
            value=lambda head: _receivers(record, head),
            meaning="part of all attention, × uniform attention, key",
            drop=1,
        ),
        Column(
            heading="stands out",
            value=standing_out,
            least=_LEAST,
            meaning="weight, × uniform attention, query → key",
        ),
        Column(heading="largest score", value=top_score, drop=2),
    ]
    most = None if options.everything else MAX_PLACES
    return Group(*table(Table(columns=columns, rows=listed, most=most), screen.width))


def _receivers(record: Record, head: HeadStatistics) -> str:
    """The keys with most attention over all sequences: `3.4 % ×5.2 12 “the”`."""
    place = [other.head for other in record.heads].index(head.head)
    received, uniform = record.arrays["received"][:, place], record.arrays["uniform_received"]
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
    record: Record,
    listed: Sequence[HeadStatistics],
    options: ViewOptions,
    screen: Screen,
    layer: str = "",
) -> Iterator[RenderableType]:
    """Of the listed heads the kept block of the pattern, and the top keys of the requested queries.
    `layer` is the name of their layer, if there are several.
    """
    for b in sequences_to_draw(options, len(record.sequences)).shown:
        if listed and "corner" in record.arrays:
            yield Group(*_corner_view(record, listed, b, options, screen, layer))
        if listed and "top_keys" in record.arrays and requested_queries(record, b):
            yield Group(*_strongest_keys(record, listed, b, options, screen, layer))


def _corner_view(
    record: Record,
    listed: Sequence[HeadStatistics],
    sequence: int,
    options: ViewOptions,
    screen: Screen,
    layer: str,
) -> Iterator[RenderableType]:
    """The kept block of the pattern of each head, cell by cell, as far as it fits."""
    corner = survey_of(record).kept.corner
    assert corner is not None, "its cells were kept"
    tokens, keys = record.sequences[sequence].tokens, record.keys[sequence].tokens
    arrays, queries = (
        record.arrays,
        slice(corner.first_query, corner.first_query + corner.n_queries),
    )
    visible = arrays["visible"][sequence]
    first_query = corner.first_query - record.first_query(sequence)
    first_key = corner.first_key - record.first_key(sequence)
    last_key, blocks = first_key + corner.n_keys - 1, []
    for place in places_of(record, [head.head for head in listed]):
        weights, entropy = (
            arrays["corner"][sequence, place],
            arrays["entropy"][sequence, place, queries],
        )
        has_keys = visible[min(place, len(visible) - 1), queries] > 0
        is_broken = has_keys & np.isnan(entropy)  # a cell is NaN where masked, and in rows of NaN
        allowed = ~np.isnan(weights) | is_broken[:, None]
        rows = tuple(range(first_query, first_query + corner.n_queries))
        cells = replace(cell_map(tokens, keys, weights, allowed), first=(0, first_key), rows=rows)
        title = where(
            record,
            sequence,
            layer,
            f"head {record.heads[place].head}",
            f"keys {first_key}–{last_key}",
        )
        grid = grid_of(cells, title, scale="linear", digits=options.precision)
        blocks.append(
            replace(
                grid,
                corner="query",
                has_all_rows=options.everything or corner.n_queries <= _MAX_ROWS,
            )
        )
    yield from grids(blocks, screen, form="numbers", everything=options.everything)


def requested_queries(record: Record, sequence: int) -> list[tuple[int, int]]:
    """The requested queries within a sequence, each after its index in the request."""
    assert record.survey is not None, "only a record of heads has them"
    first, n_tokens = record.first_query(sequence), len(record.sequences[sequence].tokens)
    return [
        (number, q)
        for number, q in enumerate(record.survey.kept.queries)
        if 0 <= q - first < n_tokens
    ]


def _strongest_keys(
    record: Record,
    listed: Sequence[HeadStatistics],
    sequence: int,
    options: ViewOptions,
    screen: Screen,
    layer: str,
) -> Iterator[RenderableType]:
    """The top keys of the requested queries in every head, in descending order, and the weight of
    the others.
    """
    first, digits = record.first_key(sequence), options.precision
    for number, query in requested_queries(record, sequence):

        def strongest(head: HeadStatistics, number: int = number) -> str:
            (place,) = places_of(record, [head.head])
            arrays = record.arrays["top_keys"], record.arrays["top_shares"]
            keys, weights = (array[sequence, place, number].tolist() for array in arrays)
            words = [
                f"{token_name(record.keys, sequence, key - first)}"
                f" {shown(weight, 'weight', digits)}"
                for key, weight in zip(keys, weights, strict=True)
                if key >= 0
            ]
            if not words:
                return "not a number" if any(map(math.isnan, weights)) else "no visible key"
            left = 1 - sum(weights)
            rest = "the rest" if head.learned_sink is None else "the rest and the sink logit"
            words += [f"{rest} {shown(left, 'weight', digits)}"] * (left > _ROUNDING)
            return flowing(words, screen.width - len("head  "), ", ").plain

        columns: list[Column[HeadStatistics]] = [
            Column(heading="head", value=lambda head: head.head, unit="id"),
            Column(heading="strongest weights", value=strongest, least=_LEAST, wraps=True),
        ]
        seen = sorted({int(n) for n in record.arrays["visible"][sequence, :, query]})
        n_visible = f"{seen[0]:,} to {seen[-1]:,} visible keys"
        if len(seen) == 1:  # all heads agree
            uniform = f", {shown(1 / seen[0], 'weight', digits)} each if uniform" if seen[0] else ""
            n_visible = count_of(seen[0], "visible key") + uniform
        name = token_name(record.sequences, sequence, query - record.first_query(sequence))
        title = where(record, sequence, layer, f"query {name}", n_visible)
        yield from table(Table(columns=columns, rows=listed, title=title), screen.width)
