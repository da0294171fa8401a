"""The terminal view of a checkpoint's record: the model, all heads of all layers, the tokens, and chosen details."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.style import Style
from rich.text import Text

from mhacli.record.heads import UNTYPED, HeadStatistics, in_order, words_of_type
from mhacli.record.record import Record
from mhacli.render.base.colours import KIND_SIGNS, type_sign
from mhacli.render.base.doc import Column, Grid, Table
from mhacli.render.base.format import fitted, flowing
from mhacli.render.base.grids import grids
from mhacli.render.base.options import Screen, ViewOptions, sequences_to_draw
from mhacli.render.base.selection import (
    LayerView,
    chosen_heads,
    chosen_layers,
    require_inspected_heads,
    short_name,
    survey_of,
)
from mhacli.render.base.terminal import bare, table
from mhacli.render.base.tokens import hidden, token_tables
from mhacli.render.checkpoint.corpus import cells_table, corpus_sinks, corpus_tables
from mhacli.render.checkpoint.header import checks_view, model_header
from mhacli.render.checkpoint.patterns import are_drawn, patterns_view
from mhacli.render.heads.grids import head_map_view
from mhacli.render.heads.table import heads_table, statistics
from mhacli.render.heads.view import (
    corner_view,
    requested_queries,
    sinks_are,
    sinks_text,
    strong_places,
    strongest_keys,
    token_name,
)
from mhacli.text.escape import token_label, visible
from mhacli.text.numbers import shown

MAX_LISTED, MAX_RANKED, MAX_OF_CORPUS, MAX_DRAWN = 24, 8, 4, 8
"""The largest number of heads in the table of one layer, of several, and of a corpus, which has two tables; and of patterns."""


def layers_view(record: Record, options: ViewOptions, screen: Screen) -> RenderableType:
    """The complete view of a checkpoint's record: of chosen heads their patterns first. Raises `UsageError` for a layer, head or
    sequence that the record lacks."""
    assert record.model is not None, "a record of a checkpoint has its model"
    layers = chosen_layers(record, options)
    heads = chosen_heads(layers, options)
    require_inspected_heads(layers, options.maps)
    sequences = sequences_to_draw(options, len(record.sequences))
    listed, description = listed_heads(record, heads, options)
    remarks = [Text(f"{description} (--all, --layer N, --sort)", style="dim")] if description else []
    of_heads = heads_table(record, listed, options)
    checks = checks_view(record, screen, in_detail=options.verbose)
    if options.brief:
        return Group(*remarks, bare(of_heads, screen.width), Text(""), checks)
    has_all = options.verbose or options.everything
    header = model_header(record, record.model, screen, in_brief=not options.verbose)
    drawn = Group(*patterns_view(layers, sequences.shown, options, screen))
    numbers = Group(*remarks, *statistics(of_heads, options, screen))
    overview = Group(grid(record, layers, screen), _sinks(record, layers, heads, screen))
    sections: list[RenderableType] = [header]
    if are_drawn(layers, options):
        sections += [drawn, numbers, *([overview] if has_all or options.heads is None else ())]
    else:
        sections += [overview, Group(numbers, drawn)]
    sections += corpus_tables(record, layers, listed, options, screen)
    sections += _strong_cells(record, layers, listed, options, screen) if has_all or record.corpus is not None else ()
    sections += token_tables(record, sequences, options, screen) if options.tokens or options.verbose else ()
    if any("span_mass" in layer.record.arrays for layer in layers):
        sections.append(span_view(record, layers, sequences.shown, options, screen))
    sections += _maps(layers, sequences.shown, options, screen)
    sections += _cells(layers, listed, sequences.shown, options, screen)
    sections.append(checks)
    return Group(*[part for section in sections for part in (Text(""), section)][1:])


def listed_heads(
    record: Record, heads: Sequence[HeadStatistics], options: ViewOptions
) -> tuple[tuple[HeadStatistics, ...], str]:
    """The heads with a table row, in order, and how they were selected if not all: by the requested order, or by
    excess."""
    ordered = in_order(heads, options.sort)
    n_layers = len({(head.layer, head.attention) for head in heads})
    ranked = MAX_RANKED if record.corpus is None else MAX_OF_CORPUS
    limit = MAX_LISTED if n_layers == 1 else ranked
    is_table = any(head.control is not None or head.d_output is not None for head in heads)  # asked for: all are shown
    if options.everything or is_table or len(ordered) <= limit:
        return ordered, ""
    typed = [head for head in heads if head.kind not in UNTYPED]
    if options.sort == "head" and n_layers > 1 and typed:
        listed = in_order(typed, "certainty")[:limit]
        description = f"{len(listed)} of {len(ordered)} heads, by excess over uniform, mixed left out"
    else:
        listed, by = ordered[:limit], "" if options.sort == "head" else f" by {options.sort}"
        description = f"the first {len(listed)} of {len(ordered)} heads{by}"
    return listed, description


def _sinks(record: Record, layers: Sequence[LayerView], heads: Sequence[HeadStatistics], screen: Screen) -> Text:
    """The sink keys of all heads."""
    if record.corpus is not None:
        return corpus_sinks(record.corpus, layers, record, screen)
    views = {(layer.inspected.layer, layer.inspected.name): layer for layer in layers}
    found = []
    for head in heads:
        layer = views[head.layer, head.attention]
        stack = "encoder " if record.context is not None and layer.inspected.kind in ("encoder", "cross") else ""
        name = f"{short_name(layer.inspected, record.layers)}.{head.head}"
        keys = (
            (f"{stack}{token_name(layer.record.keys, sink.sequence, sink.key)}", sink.share) for sink in head.sink_keys
        )
        found += [(key, share, name) for key, share in keys]
    return sinks_text(found, sinks_are(survey_of(record).sink_share), "layer.head ", screen.width)


def _of_layers(
    layers: Sequence[LayerView], listed: Sequence[HeadStatistics]
) -> Iterator[tuple[LayerView, list[HeadStatistics]]]:
    """The layers with listed heads, each with these heads."""
    for layer in layers:
        heads = [
            head for head in listed if (head.layer, head.attention) == (layer.inspected.layer, layer.inspected.name)
        ]
        if heads:
            yield layer, heads


def _strong_cells(
    record: Record, layers: Sequence[LayerView], listed: Sequence[HeadStatistics], options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """The strongest keys and cells of a few chosen heads."""
    if (options.layers is None and options.heads is None) or len(listed) > MAX_DRAWN:
        return
    if record.corpus is not None:
        yield Group(*table(cells_table(record, record.corpus, layers, listed), screen.width))
        return
    for layer, heads in _of_layers(layers, listed):
        yield Group(Text(layer.inspected.label, style="bold"), strong_places(layer.record, heads, options, screen))


def _maps(
    layers: Sequence[LayerView], sequences: Sequence[int], options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """The maps of the requested heads, in the chosen layers or in as many as fit on a screen."""
    maps = [
        (layer, place, b)
        for layer in layers
        for place, head in enumerate(layer.record.heads)
        if head.head in options.maps
        for b in sequences
    ]
    limit = len(maps) if options.everything or options.layers is not None else MAX_DRAWN
    for layer, place, b in maps[:limit]:
        yield head_map_view(layer.record, place, b, options, screen, layer=layer.inspected.label)
    if len(maps) > limit:
        yield hidden(len(maps) - limit, "map", "--all or --layer")


def _cells(
    layers: Sequence[LayerView],
    listed: Sequence[HeadStatistics],
    sequences: Sequence[int],
    options: ViewOptions,
    screen: Screen,
) -> Iterator[RenderableType]:
    """The kept cells of the listed heads: a block of their patterns, and the top keys of some queries."""
    most = len(listed) if options.everything or options.layers is not None else MAX_DRAWN
    for layer, heads in _of_layers(layers, listed[:most]):
        block, numbers = layer.inspected.survey.kept.corner, [head.head for head in heads]
        if block is None or "corner" not in layer.record.arrays:
            continue
        for b in sequences:
            yield from corner_view(layer.record, block, numbers, b, options, screen, layer=layer.inspected.label)
    for layer, heads in _of_layers(layers, listed):
        for b in sequences if "top_keys" in layer.record.arrays else ():
            if requested_queries(layer.record, b):
                yield Group(*strongest_keys(layer.record, heads, b, screen, layer=layer.inspected.label))


# -------------------------------------------------------------------------------------------------------- grid of heads


def grid(record: Record, layers: Sequence[LayerView], screen: Screen) -> RenderableType:
    """A grid with a row per layer and a column per head, grouped by the kind of layer, and the number of heads by type. A layer
    without attention has its type in place of heads."""
    rows = [*_rows(record, layers)]
    n_heads = max(layer.inspected.n_heads for layer in layers)
    signs = [[(" ", Style.null())] * n_heads for _ in rows]
    without = {}
    for place, (_, row) in enumerate(rows):
        if isinstance(row, str):
            without[place] = f"– {row}"
            continue
        for head in row.record.heads:
            signs[place][head.head] = type_sign(head.kind)
    heading = max(len("layer"), *(cell_len(name) for name, _ in rows))
    shown = Grid(
        values=np.zeros((len(rows), n_heads)),
        allowed=np.ones((len(rows), n_heads), bool),
        rows=[f"{name:>{heading}}" for name, _ in rows],
        columns=[str(head) for head in range(n_heads)],
        top=1.0,
        corner="layer",
        signs=signs,
        beside=[Column(heading="", value=lambda row: without.get(row, ""))] if without else [],
        has_all_rows=True,
    )
    heads = [head for layer in layers for head in layer.record.heads]
    return Group(*grids([shown], screen, form="shades"), _legend(heads, screen))


def _rows(record: Record, layers: Sequence[LayerView]) -> Iterator[tuple[str, LayerView | str]]:
    """Row names with their layers, or the type of a layer without attention, in model order. A layer that is not verified has
    a !."""
    missing = [] if record.model is None else [*record.model.without]
    for kind in dict.fromkeys(layer.inspected.kind for layer in layers):
        rows: list[tuple[int, str, LayerView | str]] = []
        for layer in layers:
            if layer.inspected.kind == kind:
                doubt = "" if layer.inspected.verified else " !"
                rows.append((layer.inspected.layer, short_name(layer.inspected, record.layers) + doubt, layer))
        if kind != "encoder" and len(layers) == len(record.layers):
            rows += [(without.layer, str(without.layer), visible(without.type)) for without in missing]
            missing = []
        for _, name, row in sorted(rows, key=lambda row: row[0]):
            yield name, row


def _legend(heads: Sequence[HeadStatistics], screen: Screen) -> Text:
    """The signs in the grid, with the number of heads of each type."""
    n_of = Counter(head.kind for head in heads)
    parts = [
        Text.assemble(type_sign(kind), f" {words_of_type(kind).name} {n_of[kind]}") for kind in KIND_SIGNS if n_of[kind]
    ]
    return flowing(parts, screen.width)


# ---------------------------------------------------------------------------------------------------------------- spans

_MAX_ROWS, _NAME_WIDTH, _LIFT_WIDTH = 24, 12, 6
_SPANS = (
    "the attention weight of all tokens of a span together for a token of another, averaged over {over} · ×: its ratio to that "
    "of uniform attention over the same keys, so that long spans are not favoured · attention is not causation"
)
_SpanRow = tuple[str, str, np.ndarray, np.ndarray]
"""A layer or head, the attending span, its weights `[span]`, and those of uniform attention; NaN without queries."""


def span_view(
    record: Record, layers: Sequence[LayerView], sequences: Sequence[int], options: ViewOptions, screen: Screen
) -> RenderableType:
    """Rows per layer or chosen head, one for each attending span, and a column per attended span."""
    names = [fitted(token_label(span.name), _NAME_WIDTH) for span in record.spans]
    rows: list[_SpanRow] = []
    for layer in layers:
        if "span_mass" in layer.record.arrays:
            rows += _span_rows(short_name(layer.inspected, record.layers), layer.record, names, sequences, options)
    columns: list[Column[_SpanRow]] = [
        Column(heading="layer", value=lambda row: row[0], unit="id"),
        Column(heading="from", value=lambda row: row[1]),
        *(_span_column(f"to {name}", key, options.precision) for key, name in enumerate(names)),
    ]
    most = None if options.everything else _MAX_ROWS
    of_spans = Table(columns=columns, rows=rows, most=most, has_ends=True, title="between spans")
    over = [
        "the tokens of a row",
        *([] if options.heads is not None else ["heads"]),
        *(["sequences"] if len(sequences) > 1 else []),
    ]
    return Group(*table(of_spans, screen.width), Text(_SPANS.format(over=" and ".join(over)), style="dim"))


def _span_column(heading: str, key: int, digits: int) -> Column[_SpanRow]:
    def ratio(row: _SpanRow) -> float | None:
        return row[2][key] / row[3][key] if row[3][key] > 0 else None

    def cell(row: _SpanRow) -> str | None:
        weight = shown(row[2][key], "weight", digits)
        return f"{weight} {'×' + shown(ratio(row), 'short'):>{_LIFT_WIDTH}}" if np.isfinite(row[2][key]) else None

    return Column(heading=heading, value=cell, unit="id")


def _span_rows(
    name: str, view: Record, names: Sequence[str], sequences: Sequence[int], options: ViewOptions
) -> Iterator[_SpanRow]:
    """The rows of a layer, or of each of its chosen heads: means of finite numbers."""
    kept = (view.arrays[key][list(sequences)].astype(np.float64) for key in ("span_mass", "uniform_span_mass"))
    of_heads = np.broadcast_arrays(*kept)
    chosen = [place for place, head in enumerate(view.heads) if head.head in (options.heads or ())]
    groups = {f"{name} · head {view.heads[place].head}": [place] for place in chosen}
    if options.heads is None:
        groups = {name: [*range(len(view.heads))]}
    for label, heads in groups.items():
        mass, uniform = (np.ma.masked_invalid(of[:, heads]).mean(axis=(0, 1)).filled(np.nan) for of in of_heads)
        for query, span in enumerate(names):
            yield "" if query else label, span, mass[query], uniform[query]
