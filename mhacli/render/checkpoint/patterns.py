"""The patterns of chosen layers and heads of a checkpoint, all on one scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from mhacli.render.base.colours import KIND_SIGNS
from mhacli.render.base.format import share_text
from mhacli.render.base.options import Screen, Selection, ViewOptions, balanced
from mhacli.render.base.rows import first_produced, rows_in
from mhacli.render.base.selection import LayerView, names_of, places_of
from mhacli.render.base.tables import title_rule
from mhacli.render.base.tokens import hidden
from mhacli.render.checkpoint import words as merged
from mhacli.render.checkpoint.attended import looked_at
from mhacli.render.heads.cells import where
from mhacli.render.heads.drawing import drawing, kv_head_of, matrix_caption
from mhacli.render.heads.head_map import HeadPattern, largest_of
from mhacli.render.heads.heatmap import scale_caption
from mhacli.results.record.heads import HeadStatistics
from mhacli.results.record.record import InspectedLayer
from mhacli.text.tokenizers.pieces import words_of

MAX_DRAWN = 8
HINT = "--layer N --head H draws a pattern"


@dataclass(frozen=True)
class _Drawn:
    """One head of one sequence of one layer, to be drawn."""

    said: InspectedLayer
    of: HeadStatistics
    head: HeadPattern


def patterns_view(
    layers: Sequence[LayerView], sequences: Sequence[int], options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """The patterns that layers or heads were chosen for, with their common scale; a hint where none was."""
    if options.view == "none" or not any(layer.has_pattern for layer in layers):
        return
    is_about_spans = bool(layers and layers[0].record.spans)  # then layers are chosen for their masses
    if options.heads is None and (options.layers is None or is_about_spans):
        yield from [Text(HINT, style="dim")] if options.rows is None else looked_at(layers, sequences, options, screen)
        return
    missing = [layer.inspected for layer in layers if not layer.has_pattern]
    if missing:
        said = f"the pattern of {names_of(missing)} is not in this record, so it is not drawn; --keep-limit makes room"
        yield Text(said, style="yellow")
    groups = [*_groups([layer for layer in layers if layer.has_pattern], sequences, options)]
    shown = [[group[place] for place in selection.shown] for group, selection in groups]
    heads = [one.head for group in shown for one in group]
    largest = largest_of(heads)
    for group, (_, selection) in zip(shown, groups, strict=True):
        for place, one in enumerate(group):
            if selection.hidden and place == selection.before:
                yield hidden(selection.hidden, "pattern", "--all, --layer, --head")
            yield Group(_title(one), drawing(one.head, largest, options, screen))
    captions = [*_captions(heads, largest, options, screen)] if heads else []
    yield from [Group(*captions)] if captions else []


def _groups(
    layers: Sequence[LayerView], sequences: Sequence[int], options: ViewOptions
) -> Iterator[tuple[list[_Drawn], Selection]]:
    """What is to be drawn, in groups of which a part may be left out: of each layer that was chosen its heads, or of heads
    that were chosen in all layers, all together."""
    drawn = [[*_of_layer(layer, b, options)] for layer in layers for b in sequences]
    if options.layers is None:
        drawn = [[one for group in drawn for one in group]]
    is_asked = options.everything or (options.layers is not None and options.heads is not None)
    for group in drawn:
        yield group, balanced(len(group), len(group) if is_asked else MAX_DRAWN)


def _of_layer(layer: LayerView, sequence: int, options: ViewOptions) -> Iterator[_Drawn]:
    """The heads of a layer that were asked for, or all; with words in place of tokens where these were."""
    view, said = layer.record, layer.inspected
    produced = first_produced(said.kind, None if view.model is None else view.model.generated, sequence)
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
            yield _Drawn(said, head, HeadPattern(view, sequence, place, "pattern", rows, produced, said))


def _title(one: _Drawn) -> Rule:
    view, kind = one.head.record, one.of.kind
    sure = "" if one.of.certainty is None or kind == "mixed" else f" {share_text(one.of.certainty, 2)}"
    name = where(view, one.head.sequence, one.said.label, one.of.head) + kv_head_of(view, one.of.head)
    title = Text(name, style="bold")
    if not one.said.verified:
        title.append(" · NOT verified", style="bold red")
    title.append(" · ").append(f"{KIND_SIGNS[kind][0]} {kind}{sure}", style=KIND_SIGNS[kind][1])
    return title_rule(title)


def _captions(heads: Sequence[HeadPattern], largest: float, options: ViewOptions, screen: Screen) -> Iterator[Text]:
    """The common scale, what a learned sink took, what the names of rows mean, and what words are."""
    if options.view == "matrix":
        yield matrix_caption(heads, largest, options)
    if options.view == "heatmap":
        yield scale_caption(heads[0].record, largest, screen, options.precision)
    if options.view != "matrix" and any(head.has_learned_sink for head in heads):
        yield Text("rows sum to less than 1: a learned sink, which is no key, takes the rest, σ", style="dim")
    if any(head.is_followed(row) for head in heads for row in range(len(head.shares))):
        yield Text("a → b: the query a, of which the model made the next token b", style="dim")
    if options.words:
        yield Text(merged.CAPTION, style="dim")
