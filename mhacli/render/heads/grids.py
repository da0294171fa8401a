"""Heads as grids: the pattern of a run, and the map of head statistics, with its sink in a column of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from rich.cells import set_cell_size
from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.record.heads import words_of_type
from mhacli.record.record import Record
from mhacli.render.base.doc import Column, Grid, Table
from mhacli.render.base.format import PADDING, fitted, token_at, token_text, weight_text
from mhacli.render.base.grids import MAX_LINES, Form, grids
from mhacli.render.base.options import Scale, Screen, View, ViewOptions
from mhacli.render.base.terminal import table
from mhacli.render.base.tokens import MAX_TOKEN_ROWS
from mhacli.render.heads.drawable import usual_scale
from mhacli.render.heads.head_map import HeadMap, HeadPattern, block_map, pattern_map, where

AXES = "keys from left to right, queries downward"
"""What runs along the axes of a picture of a head."""
_NAME, _NAME_WITH_NEXT = 12, 22
"""The widest name of a query, alone and followed by the generated next token."""
_MEANING = "each row: a query's attention weights over the keys"
_FORMS: Mapping[View, Form] = {"matrix": "numbers", "heatmap": "shades"}
_SINK_WIDTH, _LONGEST, _LEAST_KEYS = 5, 28, 30


def patterns(
    heads: Sequence[tuple[str, HeadPattern]],
    largest: float,
    options: ViewOptions,
    screen: Screen,
    *,
    most: int | None = None,
    n_more: int = 0,
) -> Iterator[RenderableType]:
    """Patterns with their titles in the chosen view, on a scale with the top `largest`: as matrices, as shades, or as each
    query's top keys. Of more than `most` lines the first are drawn; `n_more` are left out before."""
    drawn = [(title, head) for title, head in heads if len(head.weights)]
    for title in (title for title, head in heads if not len(head.weights)):
        yield Text(f"{title}: none of the chosen rows is in this text", style="yellow")
    if options.view == "top":
        for title, head in drawn:
            yield from table(_top_keys(title, head, options), screen.width)
        return
    yield from grids(
        [pattern_grid(title, head, largest, options) for title, head in drawn],
        screen,
        form=_FORMS.get(options.view, "auto"),
        everything=options.everything,
        most=most,
        n_more=n_more,
        not_drawn="not drawn (--all or --head)",
    )


def pattern_grid(title: str, head: HeadPattern, largest: float, options: ViewOptions) -> Grid:
    """The cells of a pattern with padded keys; beside them the sum of each row, if one is not 1, and the entropy."""
    weights, allowed = head.weights.astype(np.float64), head.allowed
    width = _NAME if head.produced is None else _NAME_WITH_NEXT
    rows, keys = [fitted(head.row_label(row), width) for row in range(len(weights))], range(weights.shape[1])
    scale = options.map_scale or usual_scale(head.record)
    strongest = np.where(allowed, weights, -1).argmax(axis=1)

    def smaller(n_rows: int, n_columns: int) -> Grid:
        cells = pattern_map(head)
        if head.rows is None:
            return map_grid(cells.fitting(n_rows, n_columns), title, scale, options)
        factor = max(1, -(-len(keys) // n_columns))  # requested rows are never pooled
        return replace(map_grid(cells.of_rows(range(len(rows)), factor), title, scale, options), rows=rows)

    return Grid(
        title=title,
        values=weights,
        allowed=allowed,
        rows=rows,
        columns=[head.key_name(key) for key in keys],
        places=[head.key_index(key) for key in keys],
        top=largest,
        scale=scale,
        digits=options.precision,
        corner="query",
        meaning=_MEANING + f" ({PADDING} padding)" * any(map(head.is_padding, keys)),
        marked=(strongest[:, None] == keys) & allowed & np.isfinite(weights),
        beside=[*_beside(head, options.precision)],
        has_all_rows=options.everything or head.rows is not None,
        smaller=smaller,
    )


def _beside(head: HeadPattern, digits: int) -> Iterator[Column[int]]:
    """The sum of each row, if one is not 1, what a sink logit takes, and the entropy."""
    sums = head.weights.sum(axis=1, dtype=np.float64)
    if {weight_text(float(total), digits) for total in sums} != {weight_text(1.0, digits)}:
        yield Column(heading="Σ", value=lambda row: sums[row], unit="weight", digits=digits, meaning="sum of the row")
    if head.has_learned_sink:
        yield Column(
            heading="s_aux",
            value=head.learned_weight,
            unit="weight",
            digits=digits,
            style=lambda row: "magenta",
            meaning="weight of the sink logit, which is no key",
        )
    if head.site == "pattern" and "entropy" in head.record.arrays:  # after dropout a row is no distribution
        entropy = head.entropy
        yield Column(heading="H", value=lambda row: entropy[row], unit="nats", drop=1, meaning="entropy in nats")


def map_grid(
    shown: HeadMap, title: str, scale: Scale, options: ViewOptions, *, beside: Sequence[Column[int]] = ()
) -> Grid:
    """The cells or blocks of a map. A row has the name and the position of its first query."""
    n, names, keys = shown.block, [], range(shown.weights.shape[1])
    for row in range(len(shown.weights)):
        place = str(shown.query_places(row)[0])
        room = _NAME - len(place)
        names.append(set_cell_size(fitted(token_text(shown.queries, int(place)), room - 1), room) + place)
    of_cell = "the weight of a key" if n == 1 else f"the mean weight that {n} queries give to {n} keys"
    return Grid(
        title=title,
        values=shown.weights,
        allowed=shown.is_open,
        rows=names,
        columns=[shown.key_name(key) if n == 1 else "" for key in keys],
        places=[key * n + shown.first[1] for key in keys],
        top=shown.largest or 1.0,
        scale=scale,
        digits=options.precision,
        meaning=f"{AXES}, each cell {of_cell}",
        beside=beside,
    )


def _top_keys(title: str, head: HeadPattern, options: ViewOptions) -> Table[int]:
    """Each query's top keys with their weights in descending order, and the weight of any sink logit."""
    weights, allowed = head.weights, head.allowed

    def keys_of(row: int) -> str:
        order = np.argsort(-weights[row], kind="stable")
        keys = order[allowed[row, order]][: options.top].tolist()
        names = [token_at(head.key_name(key), head.key_index(key), _LONGEST) for key in keys]
        numbers = [weight_text(weights[row, key], options.precision) for key in keys]
        words = [f"{name} {number}" for name, number in zip(names, numbers, strict=True)]
        if head.has_learned_sink and words:
            words.append(f"s_aux {weight_text(head.learned_weight(row), options.precision)}")
        return ", ".join(words) or "no visible key"

    has_all = options.everything or head.rows is not None
    return Table(
        columns=[
            Column(
                heading="query",
                value=lambda row: f"{token_at(head.query_name(row), head.query_index(row), _LONGEST)} →",
                style=lambda row: "bold",
            ),
            Column(heading="strongest keys", value=keys_of, least=_LEAST_KEYS, wraps=True),
        ],
        rows=range(len(weights)),
        title=title,
        most=None if has_all else MAX_TOKEN_ROWS,
        has_ends=True,
    )


# ------------------------------------------------------------------------------------------- the map of `mha heads`


def head_map_view(
    record: Record, place: int, sequence: int, options: ViewOptions, screen: Screen, *, layer: str = ""
) -> RenderableType:
    """The map of a head of a sequence without its sink, which stands beside it. `layer` is an optional name."""
    lines = len(record.sequences[sequence].tokens) if options.everything else MAX_LINES * (2 if screen.colour else 1)
    whole = block_map(record, place, sequence).fitting(lines, screen.width - _NAME - 1 - _SINK_WIDTH)
    shown, head = whole.without_sinks(), record.heads[place]
    title = f"{where(record, sequence, layer, head.head)} · {words_of_type(head.kind).name}"
    sink: Column[int] = Column(
        heading="sink",
        value=lambda row: shown.sink_weights[row] if shown.n_queries[row] else None,
        unit="fraction",
        style=lambda row: "magenta",
    )
    grid = map_grid(shown, title, options.map_scale or "log", options, beside=[sink] if shown.sinks else [])
    return Group(*grids([grid], screen, form="shades"), _taken(shown, options.precision))


def _taken(shown: HeadMap, digits: int) -> Text:
    """What was removed from a map, with its part of all attention."""
    sink, learned = shown.sink_mass, shown.learned_mass or 0.0
    parts = [f"sink {weight_text(sink, digits)}"] if shown.sinks else []
    parts += [] if shown.learned is None else [f"sink logit {weight_text(learned, digits)}"]
    parts.append(f"shown {weight_text(1 - sink - learned, digits)} of all attention")
    why = "the first token is no sink of this head" + "; the rest is renormalised" * (len(parts) > 1)
    if shown.sinks:
        why = "the first token, a sink, stands beside the rest of each row, which is renormalised"
    return Text(" · ".join(parts), style="bold").append(f": {why}", style="not bold")
