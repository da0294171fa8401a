"""The terminal view of a checkpoint's record: the model, its tokens, all heads of all layers, and what was chosen of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.render.base.format import count_of, flowing, percent_text
from mhacli.render.base.options import Screen, ViewOptions, drawn_sequences
from mhacli.render.base.selection import (
    LayerView,
    chosen_heads,
    chosen_layers,
    places_of,
    require_inspected_heads,
    short_name,
    survey_of,
)
from mhacli.render.base.tokens import hidden, token_tables
from mhacli.render.checkpoint.grid import grid
from mhacli.render.checkpoint.header import checks_view, model_header
from mhacli.render.checkpoint.patterns import patterns_view
from mhacli.render.checkpoint.spans import span_view
from mhacli.render.heads.cells import corner_view, key_name, strong_places, strongest_keys
from mhacli.render.heads.heatmap import pooled_map
from mhacli.render.heads.table import legend, overview
from mhacli.render.heads.view import sinks_are
from mhacli.results.record.heads import HeadStatistics, in_order
from mhacli.results.record.record import Record

MAX_LISTED, MAX_DRAWN, MAX_SINKS = 24, 8, 6
_NO_NAME = ("mixed", "uniform")


def layers_view(record: Record, options: ViewOptions, screen: Screen) -> RenderableType:
    """Everything that is printed of a record of a checkpoint. Raises `UsageError` for a layer, head or sequence that the record
    does not have."""
    assert record.model is not None, "a record of a checkpoint has its model"
    layers = chosen_layers(record, options)
    heads = chosen_heads(layers, options)
    require_inspected_heads(layers, options.maps)
    sequences = drawn_sequences(options, len(record.sequences))
    listed, told = listed_heads(heads, options)
    table = overview(record, listed, options, screen)
    sections: list[RenderableType] = [
        model_header(record, record.model, screen, everything=options.everything),
        *token_tables(record, sequences, options, screen),
        grid(record, layers, screen),
        Group(*told, table, *legend(record, listed, options, screen), _sinks(record, layers, heads, screen)),
        *_strong_places(layers, listed, options, screen),
    ]
    if any("span_mass" in layer.record.arrays for layer in layers):
        sections.append(span_view(record, layers, sequences.shown, options, screen))
    sections += patterns_view(layers, sequences.shown, options, screen)
    sections += _maps(layers, sequences.shown, options, screen)
    sections += _cells(layers, listed, sequences.shown, options, screen)
    sections.append(checks_view(record, screen))
    return Group(*[part for section in sections for part in (Text(""), section)][1:])


def listed_heads(
    heads: Sequence[HeadStatistics], options: ViewOptions
) -> tuple[tuple[HeadStatistics, ...], tuple[Text, ...]]:
    """The heads that get a row, in order, and how they were picked where that is not all of them: by the order that was asked
    for, or of several layers those that are surest to be of a kind."""
    ordered = in_order(heads, options.sort)
    if options.everything or len(ordered) <= MAX_LISTED:
        return ordered, ()
    n_layers = len({(head.layer, head.attention) for head in heads})
    named = [head for head in heads if head.kind not in _NO_NAME]
    if options.sort == "head" and n_layers > 1 and named:
        listed = in_order(named, "certainty")[:MAX_LISTED]
        said = f"{len(listed)} of {len(ordered)} heads, the surest of their kind first, mixed and uniform ones left out"
    else:
        listed, by = ordered[:MAX_LISTED], "" if options.sort == "head" else f" by {options.sort}"
        said = f"the first {len(listed)} of {len(ordered)} heads{by}"
    return listed, (Text(f"{said} (--all, --layer N, --sort)", style="dim"),)


def _sinks(record: Record, layers: Sequence[LayerView], heads: Sequence[HeadStatistics], screen: Screen) -> Text:
    """The sinks, in how many heads each is one, and where it gets most."""
    views = {(layer.inspected.layer, layer.inspected.name): layer for layer in layers}
    found: dict[str, list[tuple[float, str]]] = {}
    for head in heads:
        layer = views[head.layer, head.attention]
        half = "encoder " if record.context is not None and layer.inspected.kind in ("encoder", "cross") else ""
        for sink in head.sink_keys:
            name = f"{half}{key_name(layer.record, sink.sequence, sink.key)}"
            place = f"{short_name(layer.inspected, record.layers)}.{head.head}"
            found.setdefault(name, []).append((sink.share, place))
    what = f"{sinks_are(survey_of(record).sink_share)}:"
    if not found:
        return Text(f"{what} none", style="dim")
    ordered = sorted(found.items(), key=lambda item: (-len(item[1]), -max(item[1])[0], item[0]))
    parts = []
    for number, (name, own) in enumerate(ordered[:MAX_SINKS]):
        most, place = max(own)
        unit = "" if number else "layer.head "  # told once
        parts.append(f"{name} in {count_of(len(own), 'head')}, at most {percent_text(most)} ({unit}{place})")
    parts += [f"{len(ordered) - MAX_SINKS} others"] if len(ordered) > MAX_SINKS else []
    parts[0] = f"{what} {parts[0]}"
    return flowing([Text(part, style="magenta") for part in parts], screen.width)


def _of_layers(
    layers: Sequence[LayerView], listed: Sequence[HeadStatistics]
) -> Iterator[tuple[LayerView, list[HeadStatistics]]]:
    """The layers that have heads among the listed, with these."""
    for layer in layers:
        own = [head for head in listed if (head.layer, head.attention) == (layer.inspected.layer, layer.inspected.name)]
        if own:
            yield layer, own


def _strong_places(
    layers: Sequence[LayerView], listed: Sequence[HeadStatistics], options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """Where a few chosen heads look most."""
    if (options.layers is None and options.heads is None) or len(listed) > MAX_DRAWN:
        return
    for layer, own in _of_layers(layers, listed):
        yield Group(Text(layer.inspected.label, style="bold"), strong_places(layer.record, own, options, screen))


def _maps(
    layers: Sequence[LayerView], sequences: Sequence[int], options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """The maps of the heads that were asked for, in the chosen layers or, as far as a screen takes them, in all."""
    places = [
        (layer, place, b)
        for layer in layers
        for place in places_of(layer.record, [h for h in options.maps if h in {own.head for own in layer.record.heads}])
        for b in sequences
    ]
    room = len(places) if options.everything or options.layers is not None else MAX_DRAWN
    for layer, place, b in places[:room]:
        yield pooled_map(layer.record, place, b, options, screen, layer=layer.inspected.label)
    if len(places) > room:
        yield hidden(len(places) - room, "map", "--all or --layer")


def _cells(
    layers: Sequence[LayerView],
    listed: Sequence[HeadStatistics],
    sequences: Sequence[int],
    options: ViewOptions,
    screen: Screen,
) -> Iterator[RenderableType]:
    """What was kept cell by cell of the heads that are listed: a part of their patterns, and the keys of some queries."""
    own = [*_of_layers(layers, listed)]
    corners = [
        (layer, place, b)
        for layer, heads in own
        for place in places_of(layer.record, [head.head for head in heads])
        for b in sequences
        if "corner" in layer.record.arrays
    ]
    room = len(corners) if options.everything or options.layers is not None else MAX_DRAWN
    for layer, place, b in corners[:room]:
        corner = layer.inspected.survey.kept.corner
        assert corner is not None, "its cells are there"
        yield corner_view(layer.record, corner, place, b, options, screen, layer=layer.inspected.label)
    if len(corners) > room:
        yield hidden(len(corners) - room, "part", "--all or --layer")
    for layer, heads in own:
        if "top_keys" in layer.record.arrays:
            for b in (b for b in sequences if _has_asked(layer, b)):
                yield strongest_keys(layer.record, heads, b, options, screen, layer=layer.inspected.label)


def _has_asked(layer: LayerView, sequence: int) -> bool:
    """Whether a sequence has any of the queries that were asked for."""
    first, n = layer.record.first_query(sequence), len(layer.record.sequences[sequence].tokens)
    return any(0 <= query - first < n for query in layer.inspected.survey.kept.queries)
