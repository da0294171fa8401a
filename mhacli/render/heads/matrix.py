"""One head's pattern in the view that was chosen: a heatmap, each query's strongest keys, or a matrix.

A matrix is a table with tokens on both axes, shaded, the maximum of each row marked, and nothing cut silently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mhacli.render.base.colours import EMPTY, level_of, shade
from mhacli.render.base.format import PADDING, fitted, weight_text
from mhacli.render.base.options import Screen, Selection, ViewOptions, balanced
from mhacli.render.base.tokens import MAX_TOKEN_ROWS
from mhacli.render.heads.head_map import HeadPattern
from mhacli.render.heads.heatmap import HeatScale, heat_scale, heatmap
from mhacli.results.record.record import Record

MAX_ROWS = 24
_NAME, _NAME_WITH_NEXT = 16, 28
_LABEL_WIDTH, _KEY_WIDTH, _ENTROPY_WIDTH, _STRONGEST_WIDTH = 12, 10, 5, 12
_NARROW_LABEL = 6
_NEXT_WIDTH = 10
"""Of a name that is followed by what the model made of it."""
_HIDDEN = "… {} …"


def drawing(head: HeadPattern, scale: HeatScale, options: ViewOptions, screen: Screen) -> RenderableType:
    """The pattern as a matrix, a heatmap, or each query's strongest keys."""
    if not len(head.weights):
        return Text("none of the rows that were asked for is in this text", style="yellow")
    if options.view == "heatmap":
        return heatmap(head, scale, options, screen)
    if options.view == "top":
        return _top_keys(head, options)
    return matrix(head, scale.largest, options, screen)


def drawing_scale(heads: Sequence[HeadPattern], largest: float, options: ViewOptions, screen: Screen) -> HeatScale:
    """The common scale of the chosen view, where `largest` is the largest weight of a cell."""
    return heat_scale(heads, largest, options, screen) if options.view == "heatmap" else HeatScale("linear", largest)


def kv_head_of(record: Record, head: int) -> str:
    """Which kv head the query head reads, where it shares it."""
    group = record.config.heads_per_kv_head
    return f" · kv head {head // group}" if group > 1 else ""


# ------------------------------------------------------------------------------------------------------ strongest keys


def _top_keys(head: HeadPattern, options: ViewOptions) -> RenderableType:
    """For each query its strongest keys with their attention weights, the strongest first; behind them what a sink logit
    took."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    width = _NAME if head.produced is None else _NAME_WITH_NEXT
    is_whole = options.everything or head.rows is not None
    rows = balanced(len(head.weights), len(head.weights) if is_whole else MAX_TOKEN_ROWS)
    for place, query in enumerate(rows.shown):
        if rows.hidden and place == rows.before:
            table.add_row("", Text(f"⋮ {rows.hidden} rows (--all)", style="dim"))
        order = sorted(range(head.weights.shape[1]), key=lambda key: (-float(head.weights[query, key]), key))
        keys = [key for key in order if head.allowed[query, key]][: options.top]
        keys_text = ", ".join(
            f"{head.key_name(k)} {head.key_index(k)} {weight_text(float(head.weights[query, k]), options.precision)}"
            for k in keys
        )
        sink = (
            f" · s_aux {weight_text(head.learned_weight(query), options.precision)}"
            if head.has_learned_sink and keys
            else ""
        )
        name = f"{fitted(head.query_name(query), width)} {head.query_index(query)} →"
        table.add_row(name, Text((keys_text or "no key allowed") + sink))
    return table


# -------------------------------------------------------------------------------------------------------------- matrix


def matrix(head: HeadPattern, largest: float, options: ViewOptions, screen: Screen) -> RenderableType:
    """The table, or with `everything` as many tables below each other as the keys need."""
    is_whole = options.everything or head.rows is not None
    rows = balanced(len(head.weights), len(head.weights) if is_whole else MAX_ROWS)
    layout = _matrix_layout(head, rows, options.precision, screen)
    n_keys = head.weights.shape[1]
    if options.everything and n_keys > layout.room:
        starts = [*range(0, n_keys, layout.room), n_keys]
        panels = [Selection(tuple(range(a, b)), 0) for a, b in pairwise(starts)]
    else:
        panels = [balanced(n_keys, layout.room)]
    return Group(*(_table(head, rows, keys, layout, largest, options, screen) for keys in panels))


def matrix_caption(heads: Sequence[HeadPattern], largest: float, options: ViewOptions) -> Text:
    """The scale of matrices, and what their signs mean."""
    small = weight_text(0.0, options.precision)
    has_padding = any(len({len(s.tokens) for s in head.record.keys}) > 1 for head in heads)
    sums = "Σ sum of the row"
    if any(head.has_learned_sink for head in heads):
        sums += ", less than 1 where the sink logit, which is no key, takes the rest: s_aux"
    return Text(
        f"shade linear, 0 … {weight_text(largest, options.precision)}, the same for all heads · * the row's maximum · "
        f"0 not allowed, {small} small · {sums} · H its entropy in nats"
        + (f" · {PADDING} padding, masked" if has_padding else ""),
        style="dim",
    )


@dataclass(frozen=True)
class _MatrixLayout:
    """Widths in cells: of a query's name, of a key's column, of the strongest key; and how many keys fit. Where not all do,
    `weight` is the width of the strongest key's attention weight behind its name, 0 where there is no room for it."""

    label: int
    key: int
    strongest: int
    room: int
    weight: int = 0


def _matrix_layout(head: HeadPattern, rows: Selection, precision: int, screen: Screen) -> _MatrixLayout:
    """The roomiest layout in which two keys and the count of the hidden ones fit."""
    n_keys = head.weights.shape[1]
    number, total = _number_widths(head, precision)
    names = max(cell_len(head.key_name(j)) for j in range(n_keys))
    labels = max(len("query"), len(_gap(rows, 0)), *(cell_len(head.row_label(i)) for i in rows.shown))
    sums = (2 if head.has_learned_sink else 1) * (total + 1)
    extra = 0 if head.produced is None else _NEXT_WIDTH
    gap = len(_HIDDEN.format(n_keys)) + 1
    narrow = max(len("max"), len(str(n_keys - 1)))
    tried = (
        (_LABEL_WIDTH, _STRONGEST_WIDTH, number - 1),
        (_NARROW_LABEL, narrow, number - 1),
        (_NARROW_LABEL, narrow, 0),
    )
    for most, strongest, weight in tried:
        label = min(labels, max(most + extra, len(_gap(rows, 0))))
        left = screen.width - (label + 1) - sums - (_ENTROPY_WIDTH + 1) - strongest
        for width in range(max(number, min(names, _KEY_WIDTH)), number - 1, -1):
            if n_keys * (width + 1) <= left:
                return _MatrixLayout(label, width, strongest, n_keys)
        room = (left - gap - (weight + 1 if weight else 0)) // (number + 1)
        if room >= 2:
            break
    return _MatrixLayout(label, number, strongest, max(2, room), weight)


def _number_widths(head: HeadPattern, precision: int) -> tuple[int, int]:
    """Of an attention weight with its mark, and of a row's sum."""
    weights = [1.0, float(np.fmax.reduce(head.weights, axis=None))]
    sums = [1.0, float(np.fmax.reduce(head.weights.sum(axis=1)))]
    widest = [max(len(weight_text(x, precision)) for x in numbers) for numbers in (weights, sums)]
    return max(widest[0], len("drop") if head.site == "dropped" else 0) + 1, widest[1]


def _gap(rows: Selection, width: int) -> str:
    """How many rows are hidden, in words where there is room."""
    text = f"⋮ {rows.hidden} rows"
    return text if len(text) <= width else f"⋮ {rows.hidden}"


def _table(
    head: HeadPattern,
    rows: Selection,
    keys: Selection,
    layout: _MatrixLayout,
    largest: float,
    options: ViewOptions,
    screen: Screen,
) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="")
    table.add_column(Text("query", style="dim"), no_wrap=True, max_width=layout.label)
    for place, key in enumerate(keys.shown):
        if keys.hidden and place == keys.before:
            table.add_column(Text(_HIDDEN.format(keys.hidden), style="dim"), justify="center", no_wrap=True)
        table.add_column(_key_header(head, key, layout.key), justify="right", no_wrap=True, min_width=layout.key)
    table.add_column(Text("Σ", style="dim"), justify="right", no_wrap=True)
    if head.has_learned_sink:
        table.add_column(Text("s_aux", style="dim"), justify="right", no_wrap=True)
    table.add_column(Text("H", style="dim"), justify="right", no_wrap=True)
    strongest = "strongest" if layout.strongest >= len("strongest") else "max"
    table.add_column(Text(strongest, style="dim"), no_wrap=True)
    for place, query in enumerate(rows.shown):
        if rows.hidden and place == rows.before:
            table.add_row(Text(_gap(rows, layout.label), style="dim"))
        table.add_row(*_row(head, query, keys, layout, largest, options, screen))
    return table


def _key_header(head: HeadPattern, key: int, width: int) -> Text:
    return Text(fitted(head.key_name(key), width), style="dim" if head.is_padding(key) else "bold")


def _row(
    head: HeadPattern,
    query: int,
    keys: Selection,
    layout: _MatrixLayout,
    largest: float,
    options: ViewOptions,
    screen: Screen,
) -> list[Text]:
    weights, allowed = head.weights[query], head.allowed[query]
    strongest = int(weights.argmax()) if allowed.any() and not np.isnan(weights).any() else -1
    cells = [Text(fitted(head.row_label(query), layout.label), style="bold")]
    for place, key in enumerate(keys.shown):
        if keys.hidden and place == keys.before:
            hidden = slice(keys.shown[place - 1] + 1, key)
            mass = weight_text(float(weights[hidden].sum(dtype=np.float64)), options.precision)
            cells.append(Text(mass if allowed[hidden].any() else "0", style="dim italic"))
        cells.append(_cell(head, query, key, key == strongest, largest, options, screen))
    total = float(weights.sum(dtype=np.float64))
    cells.append(Text(weight_text(total, options.precision)))
    cells += (
        [Text(weight_text(head.learned_weight(query), options.precision), style="magenta")]
        if head.has_learned_sink
        else []
    )
    cells.append(Text(_entropy_text(head, query)))
    named = _strongest_text(head, strongest, layout, "not a number" if allowed.any() else "none allowed")
    if layout.weight and strongest >= 0:
        named.append(" " * (layout.strongest - named.cell_len + 1))
        named.append(f"{weight_text(float(weights[strongest]), options.precision):>{layout.weight}}")
    return [*cells, named]


def _strongest_text(head: HeadPattern, key: int, layout: _MatrixLayout, none: str) -> Text:
    """The key's position, and its name where there is room; `none` where there is no such key."""
    index = str(head.key_index(key))
    if layout.strongest < _STRONGEST_WIDTH:
        return Text(index if key >= 0 else "–")
    if key < 0:
        return Text(none, style="dim")
    return Text(fitted(f"{index} {head.key_name(key)}", layout.strongest))


def _entropy_text(head: HeadPattern, query: int) -> str:
    """Entropy belongs to the pattern; what dropout leaves of a row is no distribution."""
    return f"{head.entropy[query]:.2f}" if head.site == "pattern" else "–"


def _cell(
    head: HeadPattern, query: int, key: int, is_largest: bool, largest: float, options: ViewOptions, screen: Screen
) -> Text:
    weight = float(head.weights[query, key])
    if not head.allowed[query, key]:
        return Text("0 ", style=EMPTY)
    if head.site == "dropped" and weight == 0:
        return Text("drop ", style=EMPTY)
    text = weight_text(weight, options.precision) + ("*" if is_largest else " ")
    return Text(text, style=shade(level_of(weight, largest)) if screen.colour and not math.isnan(weight) else "")
