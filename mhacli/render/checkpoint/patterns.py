"""The patterns of chosen layers and heads of a checkpoint, all on one scale; where none is chosen, the keys of chosen queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from mhacli.render.base.colours import KIND_SIGNS
from mhacli.render.base.format import fitted, percent_text, share_text
from mhacli.render.base.options import Screen, Selection, ViewOptions, balanced
from mhacli.render.base.rows import first_produced, rows_in
from mhacli.render.base.selection import LayerView, names_of, places_of
from mhacli.render.base.tables import plain_table, title_rule
from mhacli.render.base.tokens import hidden
from mhacli.render.checkpoint import words as merged
from mhacli.render.heads.cells import where
from mhacli.render.heads.head_map import HeadPattern, largest_of
from mhacli.render.heads.heatmap import HeatScale, scale_caption
from mhacli.render.heads.matrix import drawing, drawing_scale, kv_head_of, matrix_caption
from mhacli.results.record.arrays import Array
from mhacli.text.pieces import words_of

MAX_DRAWN = 8
HINT = "--layer N --head H draws a pattern"


def patterns_view(
    layers: Sequence[LayerView], sequences: Sequence[int], options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """The patterns that layers or heads were chosen for, with their common scale; a hint where none was."""
    if options.view == "none" or not any(layer.has_pattern for layer in layers):
        return
    is_about_spans = bool(layers and layers[0].record.spans)  # then layers are chosen for their masses
    if options.heads is None and (options.layers is None or is_about_spans):
        yield from (
            [Text(HINT, style="dim")] if options.rows is None else top_keys_of_rows(layers, sequences, options, screen)
        )
        return
    missing = [layer.inspected for layer in layers if not layer.has_pattern]
    if missing:
        said = f"the pattern of {names_of(missing)} is not in this record, so it is not drawn; --keep-limit makes room"
        yield Text(said, style="yellow")
    groups = [*_groups([layer for layer in layers if layer.has_pattern], sequences, options)]
    shown = [[group[place] for place in selection.shown] for group, selection in groups]
    heads = [head for group in shown for head in group]
    scale = drawing_scale(heads, largest_of(heads), options, screen)
    for group, (_, selection) in zip(shown, groups, strict=True):
        for place, head in enumerate(group):
            if selection.hidden and place == selection.before:
                yield hidden(selection.hidden, "pattern", "--all, --layer, --head")
            yield Group(_title(head), drawing(head, scale, options, screen))
    captions = [*_captions(heads, scale, options, screen)] if heads else []
    yield from [Group(*captions)] if captions else []


def _groups(
    layers: Sequence[LayerView], sequences: Sequence[int], options: ViewOptions
) -> Iterator[tuple[list[HeadPattern], Selection]]:
    """What is to be drawn, in groups of which a part may be left out: of each layer that was chosen its heads, or of heads
    that were chosen in all layers, all together."""
    drawn = [[*_of_layer(layer, b, options)] for layer in layers for b in sequences]
    if options.layers is None:
        drawn = [[head for group in drawn for head in group]]
    is_asked = options.everything or (options.layers is not None and options.heads is not None)
    for group in drawn:
        yield group, balanced(len(group), len(group) if is_asked else MAX_DRAWN)


def _of_layer(layer: LayerView, sequence: int, options: ViewOptions) -> Iterator[HeadPattern]:
    """The heads of a layer that were asked for, or all; with words in place of tokens where these were."""
    view, inspected = layer.record, layer.inspected
    produced = first_produced(inspected.kind, None if view.model is None else view.model.generated, sequence)
    rows = None if options.rows is None else rows_in(options.rows, view.sequences[sequence], produced)
    if options.words:
        words = words_of(view.sequences[sequence])
        rows = None if rows is None else merged.words_with(view.sequences[sequence], rows)
        if produced is not None:  # the word before the first that begins behind the prompt
            produced = sum(word[0] <= produced for word in words) - 1
        view = merged.merged(view)
    for head in view.heads:
        if options.heads is None or head.head in options.heads:
            (place,) = places_of(view, [head.head])
            yield HeadPattern(view, sequence, place, "pattern", rows, produced, inspected)


def _title(head: HeadPattern) -> Rule:
    layer, statistics = head.layer, head.statistics
    assert layer is not None, "a head of a checkpoint is of a layer"
    kind, certainty = statistics.kind, statistics.certainty
    strength = "" if certainty is None or kind == "mixed" else f" {share_text(certainty, 2)}"
    name = where(head.record, head.sequence, layer.label, statistics.head) + kv_head_of(head.record, statistics.head)
    title = Text(name, style="bold")
    if not layer.verified:
        title.append(" · NOT verified", style="bold red")
    title.append(" · ").append(f"{KIND_SIGNS[kind][0]} {kind}{strength}", style=KIND_SIGNS[kind][1])
    return title_rule(title)


def _captions(heads: Sequence[HeadPattern], scale: HeatScale, options: ViewOptions, screen: Screen) -> Iterator[Text]:
    """The common scale, what a learned sink took, what the names of rows mean, and what words are."""
    if options.view == "matrix":
        yield matrix_caption(heads, scale.largest, options)
    if options.view == "heatmap":
        yield scale_caption(heads, scale, screen, options.precision)
    if options.view != "matrix" and any(head.has_learned_sink for head in heads):
        yield Text("rows sum to less than 1: a learned sink, which is no key, takes the rest, σ", style="dim")
    if any(head.is_followed(row) for head in heads for row in range(len(head.shares))):
        yield Text("a → b: the query a, of which the model made the next token b", style="dim")
    if options.words:
        yield Text(merged.CAPTION, style="dim")


# -------------------------------------------------------------------------------------------- the keys of chosen queries

_MOST_NAME = 16


def top_keys_of_rows(
    layers: Sequence[LayerView], sequences: Sequence[int], options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """For each of the chosen rows the weight of the first token, the keys that get most of the rest, and the token that the model
    made of it: means over all heads of the layers that read the text itself. It shows where to look for a head to draw."""
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
            table.add_row(*_keys_of_row(head, means[row], row, produced, options))
        said = f"sequence {b} · mean over all heads of {names_of([layer.inspected for layer in own])}"
        note = Text("a mean hides what single heads do: --layer N --head H draws one", style="dim")
        yield Group(title_rule(said), table, note)


def _keys_of_row(head: HeadPattern, shares: Array, row: int, produced: int | None, options: ViewOptions) -> list[Text]:
    """A query's line. Keys are named with their place."""
    first = head.record.first_key(head.sequence)
    n_keys = len(head.record.keys[head.sequence].tokens)
    order = sorted(range(first + 1, first + n_keys), key=lambda key: -float(shares[key]))
    keys = [key for key in order if shares[key] > 0][: options.top]
    listed = ", ".join(
        f"{_name_and_place(head.key_name(key), head.key_index(key))} {percent_text(float(shares[key]))}" for key in keys
    )
    cells = [Text(_name_and_place(head.query_name(row), row), style="bold")]
    if produced is not None:
        cells.append(Text(fitted(head.query_name(row + 1), _MOST_NAME) if row >= produced else "", style="cyan"))
    return [*cells, Text(percent_text(float(shares[first]))), Text(listed or "nothing else")]


def _name_and_place(name: str, place: int) -> str:
    return f"{fitted(name, _MOST_NAME)} {place}"
