"""The patterns of chosen layers and heads of a checkpoint on one scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from mhacli.record.exports import HeadTable
from mhacli.record.heads import HeadStatistics
from mhacli.record.record import Record
from mhacli.render.base.colours import KIND_SIGNS
from mhacli.render.base.format import count_of, type_text
from mhacli.render.base.grids import MAX_LINES
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.base.selection import LayerView, names_of
from mhacli.render.heads.head_map import HeadMap, kv_head_of, largest_of_maps, pattern_map, patterns, where
from mhacli.text.tokens import AttentionKind, TokenSequence

MAX_DRAWN = 16
HINT = "--layer N --head H draws a pattern"
_MOST_OF_PATH = 24
"""The most characters of the path of a checkpoint in the title of a head: its end."""


def are_drawn(layers: Sequence[LayerView], options: ViewOptions) -> bool:
    """Whether layers or heads were chosen for their patterns. In a record with spans, layers are chosen for span
    masses."""
    is_about_spans = bool(layers and layers[0].record.spans)
    is_chosen = options.heads is not None or (options.layers is not None and not is_about_spans)
    return is_chosen and options.view != "none" and any(layer.has_pattern for layer in layers)


def patterns_view(
    layers: Sequence[LayerView], sequences: Sequence[int], options: ViewOptions, screen: Screen, *, path: str = ""
) -> Iterator[RenderableType]:
    """The patterns of chosen layers or heads on a common scale; without a choice, how to choose. The title of one that is alone
    begins with a `path`."""
    if options.view == "none" or not any(layer.has_pattern for layer in layers):
        return
    if not are_drawn(layers, options):
        yield Text(HINT, style="dim")
        return
    missing = [layer.inspected for layer in layers if not layer.has_pattern]
    if missing:
        why = "is not in this record, so it is not drawn; --keep-limit makes room"
        yield Text(f"the pattern of {names_of(missing)} {why}", style="yellow")
    kept = [layer for layer in layers if layer.has_pattern]
    n_heads = len(sequences) * sum(len(_chosen(layer, options)) for layer in kept)
    is_requested = options.everything or (options.layers is not None and options.heads is not None)
    heads = (
        head
        for layer in kept
        for b in sequences
        for head in _of_layer(layer, b, options, is_alone=n_heads == 1, path=path)
    )
    drawn = [*islice(heads, n_heads if is_requested else MAX_DRAWN)]
    maps = [cells for _, cells in drawn]
    if options.view == "auto" and options.rows is None and not is_requested:
        options = replace(options, view="heatmap")
    most = None if is_requested else MAX_LINES
    yield from patterns(drawn, largest_of_maps(maps), options, screen, most=most, n_more=n_heads - len(drawn))
    if any(cells.is_followed(row) for cells in maps for row in range(len(cells.weights))):
        yield Text("a → b: after query a the model generated token b", style="dim")
    if options.words:
        yield Text(WORDS_CAPTION, style="dim")


def _chosen(layer: LayerView, options: ViewOptions) -> list[tuple[int, HeadStatistics]]:
    """The requested heads of a layer, or all, with their places in arrays."""
    heads = enumerate(layer.record.heads)
    return [(place, head) for place, head in heads if options.heads is None or head.head in options.heads]


def _of_layer(
    layer: LayerView, sequence: int, options: ViewOptions, *, is_alone: bool, path: str
) -> Iterator[tuple[str, HeadMap]]:
    """The requested heads of a layer, each with its title and its map, of words on request. A head that `is_alone` has its type
    in words, and behind a `path` the length of its text."""
    inspected, view = layer.inspected, merge_words(layer.record) if options.words else layer.record
    rows, produced = queries_of(layer.record, inspected.kind, sequence, options)
    doubt = "" if inspected.verified else " · NOT verified"
    for place, head in _chosen(layer, options):
        name = where(view, sequence, inspected.label, f"head {head.head}") + kv_head_of(view, head.head)
        cells = replace(pattern_map(view, place, sequence), produced=produced)
        title = f"{name}{doubt} · {KIND_SIGNS[head.kind][0]}" + (f" {type_text(head)}" if is_alone else "")
        if path:
            end_of_path = path if len(path) <= _MOST_OF_PATH else f"…{path[1 - _MOST_OF_PATH :]}"
            title = f"{end_of_path} · {title} · {count_of(len(view.sequences[sequence].tokens), 'token')}"
        yield title, cells if rows is None else cells.of_rows(rows)


def queries_of(
    record: Record, kind: AttentionKind, sequence: int, options: ViewOptions
) -> tuple[tuple[int, ...] | None, int | None]:
    """The requested queries of a text (None: all), and the first whose next token was generated, if any; of words on request."""
    text, generated = record.sequences[sequence], None if record.model is None else record.model.generated
    produced = None if generated is None or kind == "encoder" else generated.prompt_lens[sequence] - 1
    rows: tuple[int, ...] | None = None
    if options.rows == "last":
        rows = (len(text.tokens) - 1,)
    elif options.rows == "generated":
        rows = () if produced is None else tuple(range(produced, len(text.tokens) - 1))
    elif options.rows is not None:
        rows = tuple(row for row in dict.fromkeys(options.rows) if row < len(text.tokens))
    if options.words:
        rows = None if rows is None else words_with(text, rows)
        if produced is not None:  # the word before the first generated word
            produced = sum(word[0] <= produced for word in text.words) - 1
    return rows, produced


# ---------------------------------------------------------------------------------------------------------------- words

WORDS_CAPTION = (
    "words: attention weights summed over the tokens of the attended word, averaged over those of the attending word; "
    "rows count words, not tokens"
)


def merge_words(view: Record) -> Record:
    """The record of one layer with words in place of tokens: `pattern` and `allowed`.

    Weights are summed over the keys of a word and averaged over its queries with a visible key, so row sums are
    preserved. A pair of words is visible if any pair of their tokens is.
    """
    context = None if view.context is None else tuple(map(_in_words, view.context))
    heads = []
    for head in view.heads:
        of_sinks = [words_with(view.keys[sink.sequence], [sink.key]) for sink in head.sink_keys]
        pairs = zip(head.sink_keys, of_sinks, strict=True)
        heads.append(replace(head, sinks=tuple(replace(sink, key=word) for sink, of in pairs for word in of)))
    sequences = tuple(map(_in_words, view.sequences))
    merged = replace(view, sequences=sequences, context=context, heads=HeadTable(heads), survey=None, arrays={})
    size = (merged.dims.q_len, merged.dims.k_len)
    weights, visible = view.arrays["pattern"], view.arrays["allowed"]
    pattern, allowed = np.zeros((*weights.shape[:2], *size)), np.zeros((*visible.shape[:2], *size), bool)
    for b, (queries, keys) in enumerate(zip(view.sequences, view.keys, strict=True)):
        q_starts, k_starts = ([word[0] for word in text.words] for text in (queries, keys))
        q_tokens, k_tokens = _columns(view.first_query(b), queries.tokens), _columns(view.first_key(b), keys.tokens)
        tokens = (b, slice(None), q_tokens, k_tokens)
        words = (b, slice(None), _columns(merged.first_query(b), q_starts), _columns(merged.first_key(b), k_starts))
        n_seeing = np.add.reduceat(visible[tokens].any(axis=-1).astype(int), q_starts, axis=1)
        of_words = np.add.reduceat(weights[tokens].astype(np.float64), k_starts, axis=2)
        pattern[words] = np.add.reduceat(of_words, q_starts, axis=1) / np.maximum(1, n_seeing)[..., None]
        seen = np.logical_or.reduceat(visible[tokens], k_starts, axis=2)
        allowed[words] = np.logical_or.reduceat(seen, q_starts, axis=1)
    return replace(merged, arrays={"pattern": pattern, "allowed": allowed})


def _columns(first: int, of: Sequence[object]) -> slice:
    """The place of a text's tokens or words among padding."""
    return slice(first, first + len(of))


def words_with(sequence: TokenSequence, tokens: Sequence[int]) -> tuple[int, ...]:
    """The indices of the words that contain any of these tokens."""
    return tuple(i for i, word in enumerate(sequence.words) if any(token in word for token in tokens))


def _in_words(sequence: TokenSequence) -> TokenSequence:
    words = sequence.words
    places = [(sequence.offsets[word[0]][0], sequence.offsets[word[-1]][1]) for word in words]
    names = [
        sequence.tokens[word[0]] if len(word) == 1 else sequence.text[begin:end]
        for word, (begin, end) in zip(words, places, strict=True)
    ]
    return TokenSequence(
        sequence.text,
        tuple(names),
        tuple(sequence.ids[word[0]] for word in words),
        tuple(places),
        tuple(sequence.documents[word[0]] for word in words if sequence.documents),
    )
