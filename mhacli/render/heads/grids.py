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
from mhacli.render.base.format import PADDING, fitted, token_at, token_text
from mhacli.render.base.grids import MAX_LINES, Form, grids
from mhacli.render.base.options import Scale, Screen, View, ViewOptions
from mhacli.render.base.terminal import table
from mhacli.render.base.tokens import MAX_TOKEN_ROWS
from mhacli.render.heads.drawable import usual_scale
from mhacli.render.heads.head_map import HeadMap, block_map, where
from mhacli.text.numbers import shown

AXES = "keys from left to right, queries downward"
"""What runs along the axes of a picture of a head."""
_NAME, _NAME_WITH_NEXT = 12, 22
"""The widest name of a query, alone and followed by the generated next token."""
_MEANING = "attention weights query → key"
_FORMS: Mapping[View, Form] = {"matrix": "numbers", "heatmap": "shades"}
_SINK_WIDTH, _LONGEST, _LEAST_KEYS = 5, 28, 30


def cell_meaning(block: int, *, of_queries: bool = False) -> str:
    """What a cell of a picture means, which stands for `block` keys, and for as many queries or, `of_queries`, for one."""
    if block == 1:
        return "a cell is the attention weight that a query (row) gives to a key (column)"
    queries = "a query (row) gives" if of_queries else f"{block} queries (a row) give on average"
    return f"a cell is the attention weight that {queries} to {block} keys (a column) together"


def grid_of(cells: HeadMap, title: str, *, scale: Scale, top: float | None = None, digits: int | None = None) -> Grid:
    """The cells or blocks of a head with the names of its queries and keys, up to `top` (None: its largest weight)."""
    n_rows, n_columns = cells.weights.shape
    return Grid(
        title=title,
        values=np.where(cells.is_open, cells.weights, 0.0),
        allowed=cells.is_open,
        rows=[cells.query_name(row) for row in range(n_rows)],
        columns=[cells.key_name(key) for key in range(n_columns)],
        places=[cells.key_index(key) for key in range(n_columns)],
        top=top or cells.largest or 1.0,
        scale=scale,
        digits=digits,
    )


def patterns(
    heads: Sequence[tuple[str, HeadMap]],
    largest: float,
    options: ViewOptions,
    screen: Screen,
    *,
    most: int | None = None,
    n_more: int = 0,
) -> Iterator[RenderableType]:
    """Patterns with their titles in the chosen view, on a scale with the top `largest`: as matrices, as shades, or as each
    query's top keys. Of more than `most` lines the first are drawn; `n_more` are left out before."""
    drawn = [(title, cells) for title, cells in heads if len(cells.weights)]
    for title in (title for title, cells in heads if not len(cells.weights)):
        yield Text(f"{title}: none of the chosen rows is in this text", style="yellow")
    if options.view == "top":
        for title, cells in drawn:
            yield from table(_top_keys(title, cells, options), screen.width)
        return
    scale = options.map_scale or usual_scale(cells.keys for _, cells in drawn)
    panels = [_pattern_grid(title, cells, options, scale=scale, top=largest) for title, cells in drawn]
    if any(PADDING in panel.columns for panel in panels):
        panels = [replace(panel, meaning=f"{_MEANING} ({PADDING} padding)") for panel in panels]
    yield from grids(
        panels,
        screen,
        form=_FORMS.get(options.view, "auto"),
        everything=options.everything,
        most=most,
        n_more=n_more,
    )


def _pattern_grid(title: str, cells: HeadMap, options: ViewOptions, *, scale: Scale, top: float) -> Grid:
    """The cells of a pattern with padded keys; beside them the sum of each row, if one is not 1, and the entropy."""
    width = _NAME if cells.produced is None else _NAME_WITH_NEXT
    whole = grid_of(cells, title, scale=scale, top=top, digits=options.precision)
    strongest = np.where(whole.allowed, whole.values, -1).argmax(axis=1)
    n_rows, n_columns = whole.values.shape
    names, keys = [fitted(name, width) for name in whole.rows], range(n_columns)

    def smaller(n_lines: int, n_cells: int) -> Grid:
        if cells.rows is None:
            return _map_grid(cells.of_tokens().fitting(n_lines, n_cells), title, scale, options)
        blocks = cells.of_tokens().of_rows(range(n_rows), max(1, -(-n_columns // n_cells)))  # never pooled
        return replace(_map_grid(blocks, title, scale, options), rows=names)

    return replace(
        whole,
        rows=names,
        corner="query",
        meaning=_MEANING,
        marked=(strongest[:, None] == keys) & whole.allowed & np.isfinite(whole.values),
        beside=[*_beside(cells, options.precision)],
        has_all_rows=options.everything or cells.rows is not None,
        smaller=smaller,
    )


def _beside(cells: HeadMap, digits: int) -> Iterator[Column[int]]:
    """The sum of each row, if one is not 1, what a sink logit takes, and the entropy."""
    sums, learned, entropy = cells.sums, cells.learned, cells.entropy
    if {shown(float(total), "weight", digits) for total in sums} != {shown(1.0, "weight", digits)}:
        yield Column(heading="Σ", value=lambda row: sums[row], unit="weight", digits=digits, meaning="sum of the row")
    if learned is not None:
        yield Column(
            heading="s_aux",
            value=lambda row: learned[row],
            unit="weight",
            digits=digits,
            style=lambda row: "magenta",
            meaning="weight of the sink logit, which is no key",
        )
    if entropy is not None:
        yield Column(heading="H", value=lambda row: entropy[row], unit="nats", drop=1, meaning="entropy in nats")


def _map_grid(cells: HeadMap, title: str, scale: Scale, options: ViewOptions) -> Grid:
    """The cells or blocks of a map. A row has the name and the position of its first query."""
    n, names = cells.block, []
    for row in range(len(cells.weights)):
        place = str(cells.query_places(row)[0])
        room = _NAME - len(place)
        names.append(set_cell_size(fitted(token_text(cells.queries, int(place)), room - 1), room) + place)
    whole = grid_of(cells, title, scale=scale, digits=options.precision)
    of_cell = "the weight of a key" if n == 1 else f"the mean weight that {n} queries give to {n} keys"
    columns = whole.columns if n == 1 else [""] * len(whole.columns)
    return replace(whole, rows=names, columns=columns, meaning=f"{AXES}, each cell {of_cell}")


def _top_keys(title: str, cells: HeadMap, options: ViewOptions) -> Table[int]:
    """Each query's top keys with their weights in descending order, and the weight of any sink logit."""
    learned, digits = cells.learned, options.precision

    def keys_of(row: int) -> str:
        weights = cells.weights[row]
        order = np.argsort(-weights, kind="stable")
        words = [
            f"{token_at(cells.key_name(key), cells.key_index(key), _LONGEST)} {shown(weights[key], 'weight', digits)}"
            for key in order[cells.is_open[row, order]][: options.top].tolist()
        ]
        if learned is not None and words:
            words.append(f"s_aux {shown(learned[row], 'weight', digits)}")
        return ", ".join(words) or "no visible key"

    return Table(
        columns=[
            Column(
                heading="query",
                value=lambda row: f"{token_at(cells.query_token(row), cells.query_places(row)[0], _LONGEST)} →",
                style=lambda row: "bold",
            ),
            Column(heading="strongest keys", value=keys_of, least=_LEAST_KEYS, wraps=True),
        ],
        rows=range(len(cells.weights)),
        title=title,
        most=None if options.everything or cells.rows is not None else MAX_TOKEN_ROWS,
        has_ends=True,
    )


# ------------------------------------------------------------------------------------------- the map of `mha heads`


def head_map_view(
    record: Record, place: int, sequence: int, options: ViewOptions, screen: Screen, *, layer: str = ""
) -> RenderableType:
    """The map of a head of a sequence without its sink, which stands beside it. `layer` is an optional name."""
    lines = len(record.sequences[sequence].tokens) if options.everything else MAX_LINES * (2 if screen.colour else 1)
    head = record.heads[place]
    whole = block_map(record, place, sequence).fitting(lines, screen.width - _NAME - 1 - _SINK_WIDTH)
    cells = whole.without_sinks()
    title = f"{where(record, sequence, layer, head.head)} · {words_of_type(head.kind).name}"
    grid = _map_grid(cells, title, options.map_scale or "log", options)
    if cells.sinks:
        sink: Column[int] = Column(
            heading="sink",
            value=lambda row: cells.sink_weights[row] if cells.n_queries[row] else None,
            unit="fraction",
            style=lambda row: "magenta",
        )
        grid = replace(grid, beside=[sink])
    return Group(*grids([grid], screen, form="shades"), _taken(cells, options.precision))


def _taken(cells: HeadMap, digits: int) -> Text:
    """What was removed from a map, with its part of all attention."""
    sink, learned = cells.sink_mass, cells.learned_mass or 0.0
    parts = [f"sink {shown(sink, 'weight', digits)}"] if cells.sinks else []
    parts += [] if cells.learned is None else [f"sink logit {shown(learned, 'weight', digits)}"]
    parts.append(f"shown {shown(1 - sink - learned, 'weight', digits)} of all attention")
    why = "the first token is no sink of this head" + "; the rest is renormalised" * (len(parts) > 1)
    if cells.sinks:
        why = "the first token, a sink, stands beside the rest of each row, which is renormalised"
    return Text(" · ".join(parts), style="bold").append(f": {why}", style="not bold")
