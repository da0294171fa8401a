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
from mhacli.render.base.terminal import bare, spaced, table
from mhacli.render.base.tokens import hidden, token_tables
from mhacli.render.checkpoint.corpus import cells_table, corpus_sinks, corpus_tables
from mhacli.render.checkpoint.header import checks_view, head_footer, model_header
from mhacli.render.checkpoint.patterns import are_drawn, patterns_view
from mhacli.render.heads.table import heads_table, statistics
from mhacli.render.heads.view import cells_view, sinks_are, sinks_text, strong_places, token_name
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
    is_drawn = are_drawn(layers, options)
    is_asked = is_drawn and len(listed) == 1 and not has_all  # one head: its matrix first, how it was read last
    path = visible(record.model.path) if is_asked else ""
    drawn = Group(*patterns_view(layers, sequences.shown, options, screen, path=path))
    numbers = Group(*remarks, *statistics(of_heads, options, screen, has_name=not is_asked))
    overview: list[RenderableType] = [grid(record, layers, screen)] if len(layers) > 1 else []
    overview.append(_sinks(record, layers, heads, screen))
    sections: list[RenderableType] = [model_header(record, record.model, screen, in_brief=not options.verbose)]
    if is_asked:
        sections = [Group(drawn, numbers)]
    elif is_drawn:
        sections += [drawn, numbers, *([Group(*overview)] if has_all or options.heads is None else ())]
    else:
        sections += [Group(*overview), Group(numbers, drawn)]
    sections += corpus_tables(record, layers, listed, options, screen)
    of_layers = [*_of_layers(layers, listed)]
    is_chosen = (options.layers is not None or options.heads is not None) and len(listed) <= MAX_DRAWN
    if record.corpus is not None and is_chosen:
        sections.append(Group(*table(cells_table(record, record.corpus, layers, listed), screen.width)))
    elif has_all and is_chosen:
        for layer, of_layer in (each for each in of_layers if each[1]):
            title = Text(layer.inspected.label, style="bold")
            sections.append(Group(title, strong_places(layer.record, of_layer, options, screen)))
    sections += token_tables(record, sequences, options, screen) if options.tokens or options.verbose else ()
    if any("span_mass" in layer.record.arrays for layer in layers):
        sections.append(span_view(record, layers, sequences.shown, options, screen))
    n_drawn = max(1, MAX_DRAWN // max(1, len(options.maps)))
    if options.everything or options.layers is not None:
        n_drawn = len(of_layers)
    for layer, of_layer in of_layers[:n_drawn]:
        sections += cells_view(layer.record, of_layer, options, screen, layer.inspected.label)
    if options.maps and len(of_layers) > n_drawn:
        sections.append(hidden(len(of_layers) - n_drawn, "layer", "--all or --layer"))
    sections.append(head_footer(record, record.model, screen) if is_asked else checks)
    return spaced(sections)


def listed_heads(
    record: Record, heads: Sequence[HeadStatistics], options: ViewOptions
) -> tuple[tuple[HeadStatistics, ...], str]:
    """The heads with a table row, in order, and how they were selected if not all: by the requested order, or by
    excess."""
    ordered = in_order(heads, options.sort)
    n_layers = len({(head.layer, head.attention) for head in heads})
    ranked = MAX_RANKED if record.corpus is None else MAX_OF_CORPUS
    limit = MAX_LISTED if n_layers == 1 else ranked
    is_table = any(head.control is not None or head.d_output is not None for head in heads)  # requested: all are shown
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
    """The layers, each with its listed heads."""
    for layer in layers:
        name = (layer.inspected.layer, layer.inspected.name)
        yield layer, [head for head in listed if (head.layer, head.attention) == name]


# -------------------------------------------------------------------------------------------------------- grid of heads


def grid(record: Record, layers: Sequence[LayerView], screen: Screen) -> RenderableType:
    """A grid with a row per layer and a column per head, grouped by the kind of layer, and the number of heads by type. A layer
    without attention has its type in place of heads, and one that is not verified a !."""
    kinds = [*dict.fromkeys(layer.inspected.kind for layer in layers)]
    rows: list[tuple[int, int, str, Sequence[HeadStatistics], str]] = []
    for layer in layers:
        of = layer.inspected
        name = short_name(of, record.layers) + ("" if of.verified else " !")
        rows.append((kinds.index(of.kind), of.layer, name, layer.record.heads, ""))
    if record.model is not None and len(layers) == len(record.layers):
        group = int(kinds[0] == "encoder" and len(kinds) > 1)
        rows += [(group, of.layer, str(of.layer), (), f"– {visible(of.type)}") for of in record.model.without]
    rows.sort(key=lambda row: row[:2])
    n_heads = max(layer.inspected.n_heads for layer in layers)
    signs = [[(" ", Style.null())] * n_heads for _ in rows]
    heads = [(place, head) for place, row in enumerate(rows) for head in row[3]]
    for place, head in heads:
        signs[place][head.head] = type_sign(head.kind)
    width = max(len("layer"), *(cell_len(name) for _, _, name, _, _ in rows))
    shown = Grid(
        values=np.zeros((len(rows), n_heads)),
        allowed=np.ones((len(rows), n_heads), bool),
        rows=[f"{name:>{width}}" for _, _, name, _, _ in rows],
        columns=[str(head) for head in range(n_heads)],
        top=1.0,
        corner="layer",
        signs=signs,
        beside=[Column(heading="", value=lambda row: rows[row][4])] if any(row[4] for row in rows) else [],
        has_all_rows=True,
    )
    n_of = Counter(head.kind for _, head in heads)
    types = [kind for kind in KIND_SIGNS if n_of[kind]]
    legend = [Text.assemble(type_sign(kind), f" {words_of_type(kind).name} {n_of[kind]}") for kind in types]
    return Group(*grids([shown], screen, form="shades"), flowing(legend, screen.width))


# ---------------------------------------------------------------------------------------------------------------- spans

_MAX_ROWS, _NAME_WIDTH = 24, 12
_SpanRow = tuple[str, str, np.ndarray, np.ndarray]
"""A layer or head, the attending span, its weights `[span]`, and those of uniform attention; NaN without queries."""


def span_view(
    record: Record, layers: Sequence[LayerView], sequences: Sequence[int], options: ViewOptions, screen: Screen
) -> RenderableType:
    """Rows per layer or chosen head, one for each attending span, and the weight of each attended span."""
    names = [fitted(token_label(span.name), _NAME_WIDTH) for span in record.spans]
    rows: list[_SpanRow] = []
    for layer in layers:
        if "span_mass" in layer.record.arrays:
            rows += _span_rows(short_name(layer.inspected, record.layers), layer.record, names, sequences, options)
    columns: list[Column[_SpanRow]] = [
        Column(heading="layer", value=lambda row: row[0], unit="id"),
        Column(heading="from", value=lambda row: row[1]),
    ]
    for span, name in enumerate(names):
        columns += _span_columns(f"to {name}", span, options.precision)
    over = ["the tokens of a row", *["heads"] * (options.heads is None), *["sequences"] * (len(sequences) > 1)]
    legend = [
        f"the weight of all tokens of a span together, averaged over {' and '.join(over)}",
        "×: its ratio to uniform attention over the same keys, which favours no long span",
    ]
    most = None if options.everything else _MAX_ROWS
    of = Table(columns=columns, rows=rows, most=most, has_ends=True, title="between spans", legend=legend)
    return Group(*table(of, screen.width))


def _span_columns(heading: str, span: int, digits: int) -> Iterator[Column[_SpanRow]]:
    """The attention weight of an attended span, and its ratio to that of uniform attention."""

    def weight(row: _SpanRow) -> float | None:
        return float(row[2][span]) if np.isfinite(row[2][span]) else None

    def ratio(row: _SpanRow) -> str:
        number, uniform = weight(row), row[3][span]
        return f"×{shown(number / uniform, 'short')}" if number is not None and uniform > 0 else "×–"

    yield Column(heading=heading, value=weight, unit="weight", digits=digits)
    yield Column(heading="", value=ratio, unit="id")


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
