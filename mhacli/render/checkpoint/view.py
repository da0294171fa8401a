"""The terminal view of a checkpoint's record: the model, all heads of all layers, the tokens, and chosen details."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from mhacli.record.heads import UNTYPED, HeadStatistics, in_order, words_of_type
from mhacli.record.record import InspectedLayer, Record
from mhacli.render.base.colours import KIND_SIGNS, type_sign
from mhacli.render.base.format import count_of, fitted, flowing, left_out, percent_text, short_text, weight_text
from mhacli.render.base.options import Screen, ViewOptions, balanced, sequences_to_draw
from mhacli.render.base.selection import (
    LayerView,
    chosen_heads,
    chosen_layers,
    places_of,
    require_inspected_heads,
    short_name,
    survey_of,
)
from mhacli.render.base.terminal import bare, table
from mhacli.render.base.tokens import hidden, token_tables
from mhacli.render.checkpoint.corpus import cells_view, corpus_sinks, corpus_tables
from mhacli.render.checkpoint.header import checks_view, model_header
from mhacli.render.checkpoint.patterns import pattern_hint, patterns_view
from mhacli.render.heads.heatmap import pooled_map
from mhacli.render.heads.table import heads_table
from mhacli.render.heads.view import corner_view, key_name, labelled, sinks_are, strong_places, strongest_keys
from mhacli.text.escape import token_label, visible

MAX_LISTED, MAX_RANKED, MAX_OF_CORPUS, MAX_DRAWN, MAX_SINKS = 24, 8, 4, 8, 5
"""The largest number of heads in the table of one layer, of several, and of a corpus, which has two tables; of patterns; and of
sink keys."""


def layers_view(record: Record, options: ViewOptions, screen: Screen) -> RenderableType:
    """The complete view of a checkpoint's record. Raises `UsageError` for a layer, head or sequence that the record
    lacks."""
    assert record.model is not None, "a record of a checkpoint has its model"
    layers = chosen_layers(record, options)
    heads = chosen_heads(layers, options)
    require_inspected_heads(layers, options.maps)
    sequences = sequences_to_draw(options, len(record.sequences))
    listed, description = listed_heads(record, heads, options)
    remarks = [Text(f"{description} (--all, --layer N, --sort)", style="dim")] if description else []
    of_heads = heads_table(record, listed, options)
    if options.brief:
        return Group(
            *remarks, bare(of_heads, screen.width), Text(""), checks_view(record, screen, in_detail=options.verbose)
        )
    sections: list[RenderableType] = [
        model_header(record, record.model, screen, everything=options.everything),
        Group(grid(record, layers, screen), _sinks(record, layers, heads, screen)),
        Group(*remarks, *table(of_heads, screen.width, has_all=options.verbose), *pattern_hint(layers, options)),
        *corpus_tables(record, layers, listed, options, screen),
        *_strong_cells(record, layers, listed, options, screen),
        *(token_tables(record, sequences, options, screen) if options.tokens or options.verbose else ()),
    ]
    if any("span_mass" in layer.record.arrays for layer in layers):
        sections.append(span_view(record, layers, sequences.shown, options, screen))
    sections += patterns_view(layers, sequences.shown, options, screen)
    sections += _maps(layers, sequences.shown, options, screen)
    sections += _cells(layers, listed, sequences.shown, options, screen)
    sections.append(checks_view(record, screen, in_detail=options.verbose))
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
    """The sink keys, the number of heads for each, and the head with the largest weight."""
    if record.corpus is not None:
        return corpus_sinks(record.corpus, layers, record, screen)
    views = {(layer.inspected.layer, layer.inspected.name): layer for layer in layers}
    occurrences_by_key: dict[str, list[tuple[float, str]]] = {}
    for head in heads:
        layer = views[head.layer, head.attention]
        stack = "encoder " if record.context is not None and layer.inspected.kind in ("encoder", "cross") else ""
        for sink in head.sink_keys:
            name = f"{stack}{key_name(layer.record, sink.sequence, sink.key)}"
            head_name = f"{short_name(layer.inspected, record.layers)}.{head.head}"
            occurrences_by_key.setdefault(name, []).append((sink.share, head_name))
    label = f"{sinks_are(survey_of(record).sink_share)}:"
    if not occurrences_by_key:
        return Text(f"{label} none", style="dim")
    ordered = sorted(occurrences_by_key.items(), key=lambda item: (-len(item[1]), -max(item[1])[0], item[0]))
    parts = []
    for number, (name, occurrences) in enumerate(ordered[:MAX_SINKS]):
        largest, head_name = max(occurrences)
        unit = "" if number else "layer.head "  # printed once
        parts.append(
            f"{name} in {count_of(len(occurrences), 'head')}, at most {percent_text(largest)} ({unit}{head_name})"
        )
    parts += [f"{len(ordered) - MAX_SINKS} others"] if len(ordered) > MAX_SINKS else []
    return Text("\n".join(labelled(label, parts, screen.width)), style="magenta")


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
        yield from cells_view(record.corpus, layers, listed)
        return
    for layer, heads in _of_layers(layers, listed):
        yield Group(Text(layer.inspected.label, style="bold"), strong_places(layer.record, heads, options, screen))


def _maps(
    layers: Sequence[LayerView], sequences: Sequence[int], options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """The maps of the requested heads, in the chosen layers or in as many as fit on a screen."""
    maps = [
        (layer, head_idx, b)
        for layer in layers
        for head_idx in places_of(
            layer.record, [h for h in options.maps if h in {heads.head for heads in layer.record.heads}]
        )
        for b in sequences
    ]
    limit = len(maps) if options.everything or options.layers is not None else MAX_DRAWN
    for layer, head_idx, b in maps[:limit]:
        yield pooled_map(layer.record, head_idx, b, options, screen, layer=layer.inspected.label)
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
    listed_layers = [*_of_layers(layers, listed)]
    blocks = [
        (layer, head_idx, b)
        for layer, heads in listed_layers
        for head_idx in places_of(layer.record, [head.head for head in heads])
        for b in sequences
        if "corner" in layer.record.arrays
    ]
    limit = len(blocks) if options.everything or options.layers is not None else MAX_DRAWN
    for layer, head_idx, b in blocks[:limit]:
        block = layer.inspected.survey.kept.corner
        assert block is not None, "its cells are in the record"
        yield corner_view(layer.record, block, head_idx, b, options, screen, layer=layer.inspected.label)
    if len(blocks) > limit:
        yield hidden(len(blocks) - limit, "part", "--all or --layer")
    for layer, heads in listed_layers:
        if "top_keys" in layer.record.arrays:
            for b in (b for b in sequences if _has_requested(layer, b)):
                yield strongest_keys(layer.record, heads, b, layer=layer.inspected.label)


def _has_requested(layer: LayerView, sequence: int) -> bool:
    first, n = layer.record.first_query(sequence), len(layer.record.sequences[sequence].tokens)
    return any(0 <= query - first < n for query in layer.inspected.survey.kept.queries)


# -------------------------------------------------------------------------------------------------------- grid of heads

_NOT_INSPECTED = " "
_AXIS_STEP, _MAX_NAMED = 5, 3


def grid(record: Record, layers: Sequence[LayerView], screen: Screen) -> RenderableType:
    """A grid with a row per layer and a column per head, grouped by the kind of layer, and the number of heads by type."""
    inspected = [layer.inspected for layer in layers]
    n_heads = max(layer.n_heads for layer in inspected)
    label = max(cell_len(name) for name in ("layer", *(short_name(layer, record.layers) for layer in inspected))) + 1
    width_left = screen.width - label - 1
    width = next((w for w in (len(str(n_heads - 1)) + 1, 2) if n_heads * w <= width_left), 2)
    n_panels = -(-n_heads // max(1, width_left // width))
    size = -(-n_heads // n_panels)
    panels: list[RenderableType] = []
    for start in range(0, n_heads, size):
        columns = range(start, min(n_heads, start + size))
        lines = [_axis(columns, label, width)]
        for name, row in _rows(record, layers):
            if isinstance(row, str):
                replacement = fitted(f"– {row}", max(1, width_left))
                lines.append(Text(f"{name:>{label - 1}}  {replacement}", style="dim"))
            else:
                lines.append(_row(row, name, columns, label, width))
        panels.append(Text("\n").join(lines))
    return Group(*panels, _legend(record, [head for layer in layers for head in layer.record.heads], screen))


def _rows(record: Record, layers: Sequence[LayerView]) -> Iterator[tuple[str, LayerView | str]]:
    """Row names with their layers, or the type of a layer without attention, in model order."""
    missing = [] if record.model is None else [*record.model.without]
    for kind in dict.fromkeys(layer.inspected.kind for layer in layers):
        rows: list[tuple[int, str, LayerView | str]] = [
            (layer.inspected.layer, short_name(layer.inspected, record.layers), layer)
            for layer in layers
            if layer.inspected.kind == kind
        ]
        if kind != "encoder" and len(layers) == len(record.layers):
            rows += [(without.layer, str(without.layer), visible(without.type)) for without in missing]
            missing = []
        for _, name, row in sorted(rows, key=lambda row: row[0]):
            yield name, row


def _axis(columns: range, label: int, width: int) -> Text:
    """The axis labels and those head numbers that fit."""
    axis = [" "] * (len(columns) * width + width)
    next_free = 0
    for column, head in enumerate(columns):
        number, position = str(head), column * width
        is_round = width > len(str(columns[-1])) or head % _AXIS_STEP == 0
        if position >= next_free and (column == 0 or is_round):
            axis[position : position + len(number)] = number
            next_free = position + len(number) + 1
    return Text(f"{'':{label - 1}}  head\n{'layer':>{label - 1}}  {''.join(axis).rstrip()}", style="dim")


def _row(layer: LayerView, name: str, columns: range, label: int, width: int) -> Text:
    is_verified = layer.inspected.verified
    line = Text(f"{name:>{label - 1}}", style="" if is_verified else "bold red")
    line.append(" " if is_verified else "!", style="bold red").append(" ")
    kinds = {head.head: head.kind for head in layer.record.heads}
    for head in columns:
        sign, style = type_sign(kinds[head]) if head in kinds else (_NOT_INSPECTED, Style.null())
        line.append(sign, style=style).append(" " * (width - 1))
    return line


def _legend(record: Record, heads: Sequence[HeadStatistics], screen: Screen) -> Text:
    """The signs in the grid, with the number of heads of each type, or their names if they are few."""
    names: Mapping[tuple[int, str], InspectedLayer] = {(layer.layer, layer.name): layer for layer in record.layers}
    parts: list[Text] = []
    unit = "layer.head "
    for kind in KIND_SIGNS:
        heads_of_kind = [head for head in heads if head.kind == kind]
        if not heads_of_kind:
            continue
        sign, style = type_sign(kind)
        part = Text().append(sign, style=style).append(f" {words_of_type(kind).name} {len(heads_of_kind)}")
        if len(heads_of_kind) <= _MAX_NAMED and kind not in UNTYPED:
            listed = (
                f"{short_name(names[head.layer, head.attention], record.layers)}.{head.head}" for head in heads_of_kind
            )
            part.append(f" ({unit}{', '.join(listed)})", style="dim")
            unit = ""  # printed once
        parts.append(part)
    return flowing(parts, screen.width)


# ---------------------------------------------------------------------------------------------------------------- spans

_MAX_ROWS, _NAME_WIDTH, _GAP, _LIFT_WIDTH = 16, 12, 2, 6
_MUCH, _LITTLE = 2.0, 0.5

_Pair = tuple[int, int]


def span_view(
    record: Record, layers: Sequence[LayerView], sequences: Sequence[int], options: ViewOptions, screen: Screen
) -> RenderableType:
    """A row per layer or chosen head and a column per pair of spans, in as many tables as needed."""
    rows = [
        row
        for layer in layers
        if "span_mass" in layer.record.arrays
        for row in _span_rows(record, layer, sequences, options)
    ]
    selection = balanced(len(rows), len(rows) if options.everything else _MAX_ROWS)
    names = [fitted(token_label(span.name), _NAME_WIDTH) for span in record.spans]
    label = max([len("layer"), *(cell_len(name) for name, _, _ in rows)])
    width = max(options.precision + 2 + _LIFT_WIDTH, *(cell_len(f"→ {name}") for name in names))
    tables = []
    for pairs in _panels(len(names), max(1, (screen.width - label) // (width + _GAP))):
        table = Table(box=None, padding=(0, 0, 0, _GAP), pad_edge=False, header_style="dim")
        table.add_column(Text("\nlayer"), justify="right", no_wrap=True, min_width=label)
        for query_span, key_span in pairs:
            table.add_column(
                Text(f"{names[query_span]}\n→ {names[key_span]}"), justify="right", no_wrap=True, min_width=width
            )
        for line_idx, row in enumerate(selection.shown):
            if selection.hidden and line_idx == selection.before:
                table.add_row("⋮", left_out(selection.hidden))
            name, mass, uniform = rows[row]
            cells = [_cell(float(mass[pair]), float(uniform[pair]), options.precision) for pair in pairs]
            table.add_row(name, *cells)
        tables.append(table)
    averaged = [] if options.heads is not None else ["heads"]
    averaged += ["sequences"] if len(sequences) > 1 else []
    also = "".join(f" and {name}" for name in averaged)
    caption = Text(
        f"a → b: the attention weight of all tokens of b together for a token of a, averaged over a{also} · ×: its ratio to that "
        "of uniform attention over the same keys, so that long spans are not favoured · attention is not causation",
        style="dim",
    )
    return Group(Text("between spans", style="bold"), *tables, caption)


def _panels(n_spans: int, n_columns: int) -> Iterator[list[_Pair]]:
    """The pairs of spans in parts that fit, with pairs of whole spans together if possible."""
    per_panel = n_columns // n_spans * n_spans or n_columns
    pairs = [(query_span, key_span) for query_span in range(n_spans) for key_span in range(n_spans)]
    if n_columns >= n_spans:
        yield from (pairs[start : start + per_panel] for start in range(0, len(pairs), per_panel))
        return
    for query_span in range(n_spans):
        of_query = [pair for pair in pairs if pair[0] == query_span]
        yield from (of_query[start : start + n_columns] for start in range(0, n_spans, n_columns))


def _span_rows(
    record: Record, layer: LayerView, sequences: Sequence[int], options: ViewOptions
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Row names with span masses and those of uniform attention, `[span, span]`; NaN without queries."""
    name, view = short_name(layer.inspected, record.layers), layer.record
    mass, uniform = (view.arrays[key][list(sequences)].astype(np.float64) for key in ("span_mass", "uniform_span_mass"))
    uniform = np.broadcast_to(uniform, mass.shape)
    if options.heads is None:
        yield name, _mean(mass, (0, 1)), _mean(uniform, (0, 1))
        return
    inspected = {head.head for head in view.heads}
    requested = [head for head in dict.fromkeys(options.heads) if head in inspected]
    for head, head_idx in zip(requested, places_of(view, requested), strict=True):
        yield f"{name} · head {head}", _mean(mass[:, head_idx], (0,)), _mean(uniform[:, head_idx], (0,))


def _mean(numbers: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The mean of the finite numbers; NaN if there are none."""
    counts = np.isfinite(numbers).sum(axis=axes)
    mean: np.ndarray = np.where(counts > 0, np.nansum(numbers, axis=axes) / np.maximum(counts, 1), np.nan)
    return mean


def _cell(mass: float, uniform: float, precision: int) -> Text:
    if not np.isfinite(mass):
        return Text("–", style="dim")
    lift = mass / uniform if uniform > 0 else None
    text = f"{weight_text(mass, precision)} {'–' if lift is None else f'×{short_text(lift)}':>{_LIFT_WIDTH}}"
    style = "" if lift is None else "bold" if lift >= _MUCH else "dim" if lift <= _LITTLE else ""
    return Text(text, style=style)
