"""The patterns of chosen layers and heads of a checkpoint on one scale, or else the top keys of chosen queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.record.arrays import Array
from mhacli.record.record import Record
from mhacli.render.base.colours import KIND_SIGNS
from mhacli.render.base.format import fitted, percent_text, plain_table, title_rule, token_at, type_text
from mhacli.render.base.options import Screen, ViewOptions, balanced
from mhacli.render.base.selection import LayerView, first_produced, names_of, places_of, rows_in
from mhacli.render.base.tokens import hidden
from mhacli.render.heads.fitting_view import fitting_view
from mhacli.render.heads.head_map import HeadPattern, largest_of, where
from mhacli.render.heads.heatmap import HeatScale, scale_caption
from mhacli.render.heads.matrix import PatternGroup, TitledPattern, drawing_scale, drawings, kv_head_of, matrix_caption
from mhacli.text.tokens import TokenSequence

MAX_DRAWN = 8
HINT = "--layer N --head H draws a pattern"


def patterns_view(
    layers: Sequence[LayerView], sequences: Sequence[int], options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """The patterns of chosen layers or heads on a common scale; without a choice, the keys of chosen rows."""
    if not _are_drawable(layers, options):
        return
    if not _is_chosen(layers, options):
        yield from [] if options.rows is None else top_keys_of_rows(layers, sequences, options)
        return
    missing = [layer.inspected for layer in layers if not layer.has_pattern]
    if missing:
        message = (
            f"the pattern of {names_of(missing)} is not in this record, so it is not drawn; --keep-limit makes room"
        )
        yield Text(message, style="yellow")
    groups = [*_groups([layer for layer in layers if layer.has_pattern], sequences, options)]
    heads = [pattern.head for group in groups for pattern in group.patterns]
    options, note = fitting_view(heads, options, screen)
    if note is not None:
        yield note
    scale = drawing_scale(heads, largest_of(heads), options, screen)
    captions = [*_captions(groups, scale, options, screen)] if heads else []
    yield Group(*(drawing for group in groups for drawing in drawings(group, scale, options, screen)), *captions)


def pattern_hint(layers: Sequence[LayerView], options: ViewOptions) -> Iterator[Text]:
    """How to draw a pattern, if patterns were kept and none is drawn."""
    if _are_drawable(layers, options) and not _is_chosen(layers, options) and options.rows is None:
        yield Text(HINT, style="dim")


def _are_drawable(layers: Sequence[LayerView], options: ViewOptions) -> bool:
    return options.view != "none" and any(layer.has_pattern for layer in layers)


def _is_chosen(layers: Sequence[LayerView], options: ViewOptions) -> bool:
    """Whether layers or heads were chosen for their patterns. In a record with spans, layers are chosen for span
    masses."""
    is_about_spans = bool(layers and layers[0].record.spans)
    return options.heads is not None or (options.layers is not None and not is_about_spans)


def _groups(layers: Sequence[LayerView], sequences: Sequence[int], options: ViewOptions) -> Iterator[PatternGroup]:
    """The patterns to draw, in groups that may be shortened: by layer for chosen layers, together for chosen heads."""
    patterns = [[*_of_layer(layer, b, options)] for layer in layers for b in sequences]
    if options.layers is None:
        patterns = [[head for group in patterns for head in group]]
    is_requested = options.everything or (options.layers is not None and options.heads is not None)
    for group in patterns:
        selection = balanced(len(group), len(group) if is_requested else MAX_DRAWN)
        missing = hidden(selection.hidden, "pattern", "--all, --layer, --head") if selection.hidden else None
        titled = [TitledPattern(_title(group[idx]), group[idx]) for idx in selection.shown]
        yield PatternGroup(titled, selection.before, missing)


def _of_layer(layer: LayerView, sequence: int, options: ViewOptions) -> Iterator[HeadPattern]:
    """The requested heads of a layer, or all, with words in place of tokens on request."""
    view, inspected = layer.record, layer.inspected
    produced = first_produced(inspected.kind, None if view.model is None else view.model.generated, sequence)
    rows = None if options.rows is None else rows_in(options.rows, view.sequences[sequence], produced)
    if options.words:
        words = view.sequences[sequence].words
        rows = None if rows is None else words_with(view.sequences[sequence], rows)
        if produced is not None:  # the word before the first generated word
            produced = sum(word[0] <= produced for word in words) - 1
        view = merge_words(view)
    for head in view.heads:
        if options.heads is None or head.head in options.heads:
            (head_idx,) = places_of(view, [head.head])
            yield HeadPattern(view, sequence, head_idx, "pattern", rows, produced, inspected)


def _title(head: HeadPattern) -> Text:
    layer, statistics = head.layer, head.statistics
    assert layer is not None, "a head of a checkpoint is of a layer"
    name = where(head.record, head.sequence, layer.label, statistics.head) + kv_head_of(head.record, statistics.head)
    sign, colour = KIND_SIGNS[statistics.kind]
    title = Text(name, style="bold")
    if not layer.verified:
        title.append(" · NOT verified", style="bold red")
    return title.append(" · ").append(f"{sign} {type_text(statistics)}", style=colour)


def _captions(groups: Sequence[PatternGroup], scale: HeatScale, options: ViewOptions, screen: Screen) -> Iterator[Text]:
    """The common scale, the weights of sink logits, and the meaning of row names and words."""
    heads = [pattern.head for group in groups for pattern in group.patterns]
    if options.view == "matrix":
        yield matrix_caption(groups, scale.largest, options, screen)
    if options.view == "heatmap":
        yield scale_caption(heads, scale, screen, options.precision)
    if options.view != "matrix" and any(head.has_learned_sink for head in heads):
        yield Text("rows sum to less than 1: the sink logit takes the rest (s_aux)", style="dim")
    if any(head.is_followed(row) for head in heads for row in range(len(head.weights))):
        yield Text("a → b: after query a the model generated token b", style="dim")
    if options.words:
        yield Text(WORDS_CAPTION, style="dim")


# ------------------------------------------------------------------------------------------------------ top keys of rows

_NAME_WIDTH = 16


def top_keys_of_rows(
    layers: Sequence[LayerView], sequences: Sequence[int], options: ViewOptions
) -> Iterator[RenderableType]:
    """For each chosen row the weight of the first token, the top keys of the rest, and the generated next token.

    The weights are means over all heads of layers with self-attention on the text. They show where to look for a head.
    """
    self_layers = [layer for layer in layers if layer.has_pattern and layer.inspected.kind in ("self", "decoder")]
    if options.rows is None or not self_layers:
        return
    for b in sequences:
        head = HeadPattern(self_layers[0].record, b, 0, "pattern")
        generated = None if self_layers[0].record.model is None else self_layers[0].record.model.generated
        produced = first_produced(self_layers[0].inspected.kind, generated, b)
        rows = rows_in(options.rows, self_layers[0].record.sequences[b], produced)
        means = np.mean(
            [layer.record.arrays["pattern"][b, :, head.queries].mean(axis=0) for layer in self_layers], axis=0
        )
        table = plain_table()
        for name in ("query", *(["made"] if produced is not None else []), "first token", "and besides"):
            table.add_column(name, no_wrap=name != "and besides", justify="right" if name == "first token" else "left")
        for row in rows:
            table.add_row(*_keys_of_row(head, means[row], row, produced, options))
        title = f"sequence {b} · mean over all heads of {names_of([layer.inspected for layer in self_layers])}"
        note = Text("a mean hides what single heads do: --layer N --head H draws one", style="dim")
        yield Group(title_rule(title), table, note)


def _keys_of_row(head: HeadPattern, weights: Array, row: int, produced: int | None, options: ViewOptions) -> list[Text]:
    """The line of a query, naming keys with their positions."""
    first = head.record.first_key(head.sequence)
    n_keys = len(head.record.keys[head.sequence].tokens)
    order = sorted(range(first + 1, first + n_keys), key=lambda key: -float(weights[key]))
    keys = [key for key in order if weights[key] > 0][: options.top]
    listed = ", ".join(
        f"{token_at(head.key_name(key), head.key_index(key), _NAME_WIDTH)} {percent_text(float(weights[key]))}"
        for key in keys
    )
    cells = [Text(token_at(head.query_name(row), row, _NAME_WIDTH), style="bold")]
    if produced is not None:
        cells.append(Text(fitted(head.query_name(row + 1), _NAME_WIDTH) if row >= produced else "", style="cyan"))
    return [*cells, Text(percent_text(float(weights[first]))), Text(listed or "nothing else")]


# ---------------------------------------------------------------------------------------------------------------- words

WORDS_CAPTION = (
    "words: attention weights summed over the tokens of the attended word, averaged over those of the attending word; "
    "rows count words, not tokens; entropy is that of the rows drawn"
)

Words = Sequence[range]


def merge_words(view: Record) -> Record:
    """The record of one layer with words in place of tokens: `pattern`, `allowed`, `entropy` and `strongest_key`.

    Weights are summed over the keys of a word and averaged over its queries with a visible key, so row sums are
    preserved. A pair of words is visible if any pair of their tokens is. The weight of a sink logit counts in a row's
    entropy.
    """
    queries = [sequence.words for sequence in view.sequences]
    keys = queries if view.context is None else [sequence.words for sequence in view.context]
    sequences = tuple(map(_merged_sequence, view.sequences, queries))
    context = None if view.context is None else tuple(map(_merged_sequence, view.context, keys))
    merged = replace(view, sequences=sequences, context=context, survey=None, arrays={})
    parts = [_merged_text(view, merged, b, queries[b], keys[b]) for b in range(len(sequences))]
    pattern = np.stack([pattern for pattern, _ in parts])
    allowed = np.stack([allowed for _, allowed in parts])
    entropy, strongest = _entropy(pattern), _strongest(pattern, allowed)
    arrays = {"pattern": pattern, "allowed": allowed, "entropy": entropy, "strongest_key": strongest}
    return replace(merged, arrays=arrays)


def words_with(sequence: TokenSequence, tokens: Sequence[int]) -> tuple[int, ...]:
    """The indices of the words that contain any of these tokens."""
    return tuple(i for i, word in enumerate(sequence.words) if any(token in word for token in tokens))


def _merged_sequence(sequence: TokenSequence, words: Words) -> TokenSequence:
    documents = tuple(sequence.documents[word[0]] for word in words) if sequence.documents else ()
    return TokenSequence(
        sequence.text,
        tuple(_word_text(sequence, word) for word in words),
        tuple(sequence.ids[word[0]] for word in words),
        tuple((sequence.offsets[word[0]][0], sequence.offsets[word[-1]][1]) for word in words),
        documents,
    )


def _word_text(sequence: TokenSequence, word: range) -> str:
    """The text of a word. Bytes are joined before decoding, so that cut characters are whole again."""
    if len(word) == 1:
        return sequence.tokens[word[0]]
    try:
        joined = b"".join(bytes.fromhex(sequence.pieces[i].bytes) for i in word)
    except ValueError:  # a record from elsewhere may hold invalid hex
        return "".join(sequence.tokens[i] for i in word)
    return joined.decode("utf-8", "surrogateescape")


def _merged_text(view: Record, arrays: Record, b: int, queries: Words, keys: Words) -> tuple[Array, Array]:
    """The pattern and the mask of one text, within the padded columns."""
    rows = slice(view.first_query(b), view.first_query(b) + len(view.sequences[b].tokens))
    columns = slice(view.first_key(b), view.first_key(b) + len(view.keys[b].tokens))
    weights = view.arrays["pattern"][b, :, rows, columns].astype(np.float64)
    allowed = view.arrays["allowed"][b, :, rows, columns]
    q_starts, k_starts = ([word[0] for word in words] for words in (queries, keys))
    n_seeing = np.maximum(1, np.add.reduceat(allowed.any(axis=-1).astype(int), q_starts, axis=1))
    sums = np.add.reduceat(np.add.reduceat(weights, k_starts, axis=2), q_starts, axis=1)
    any_allowed = np.logical_or.reduceat(np.logical_or.reduceat(allowed, k_starts, axis=2), q_starts, axis=1)
    size = (arrays.facts.q_len, arrays.facts.k_len)
    index = (
        slice(None),
        slice(arrays.first_query(b), arrays.first_query(b) + len(queries)),
        slice(arrays.first_key(b), arrays.first_key(b) + len(keys)),
    )
    pattern, visible = np.zeros((len(weights), *size)), np.zeros((len(allowed), *size), bool)
    pattern[index], visible[index] = sums / n_seeing[..., None], any_allowed
    return pattern, visible


def _entropy(pattern: Array) -> Array:
    """The entropy of each row in nats, with the weight of a sink logit as another outcome."""
    lacking = 1 - pattern.sum(axis=-1, keepdims=True)
    has_keys = pattern.any(axis=-1, keepdims=True)
    outcomes = np.concatenate([pattern, np.where(has_keys & (lacking > _ROUNDING), lacking, 0.0)], axis=-1)
    logarithms = np.log(np.where(outcomes > 0, outcomes, 1.0))
    entropy: Array = np.abs((outcomes * logarithms).sum(axis=-1))
    return entropy


_ROUNDING = 1e-4


def _strongest(pattern: Array, allowed: Array) -> Array:
    return np.where(allowed.any(axis=-1), pattern.argmax(axis=-1), -1)
