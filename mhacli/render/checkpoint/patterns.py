"""The patterns of chosen layers and heads of a checkpoint on one scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from mhacli.record.record import Record
from mhacli.render.base.colours import KIND_SIGNS
from mhacli.render.base.format import type_text
from mhacli.render.base.grids import MAX_LINES
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.base.selection import DrawableHead, LayerView, drawable_heads, names_of
from mhacli.render.heads.head_map import HeadMap, cell_map, head_map, kv_head_of, patterns, where
from mhacli.text.tokens import TokenSequence

MAX_DRAWN = 16
HINT = "--layer N --head H draws a pattern"


def are_drawn(layers: Sequence[LayerView], options: ViewOptions) -> bool:
    """Whether layers or heads were chosen for their patterns. In a record with spans, layers are
    chosen for span masses.
    """
    is_about_spans = bool(layers and layers[0].record.spans)
    is_chosen = options.heads is not None or (options.layers is not None and not is_about_spans)
    return is_chosen and options.view != "none" and any(layer.has_pattern for layer in layers)


def patterns_view(
    record: Record,
    layers: Sequence[LayerView],
    sequences: Sequence[int],
    options: ViewOptions,
    screen: Screen,
) -> Iterator[RenderableType]:
    """The patterns of chosen layers or heads on a common scale; without a choice, how to choose."""
    if options.view == "none" or not any(layer.has_pattern for layer in layers):
        return
    if not are_drawn(layers, options):
        yield Text(HINT, style="dim")
        return
    missing = [layer.inspected for layer in layers if not layer.has_pattern]
    if missing:
        why = "is not in this record, so it is not drawn; --keep-limit makes room"
        yield Text(f"the pattern of {names_of(missing)} {why}", style="yellow")
    heads = [head for head in drawable_heads(record, options) if "pattern" in head.record.arrays]
    chosen = [*product(heads, sequences)]
    is_requested = options.everything or (options.layers is not None and options.heads is not None)
    drawn = [
        _with_title(*each, options, is_alone=len(chosen) == 1)
        for each in (chosen if is_requested else chosen[:MAX_DRAWN])
    ]
    maps = [cells for _, cells in drawn]
    if options.view == "auto" and options.rows is None and not is_requested:
        options = replace(options, view="heatmap")
    most = None if is_requested else MAX_LINES
    yield from patterns(drawn, options, screen, most=most, n_more=len(chosen) - len(drawn))
    if any(cells.is_followed(row) for cells in maps for row in range(len(cells.weights))):
        yield Text("a → b: after query a the model generated token b", style="dim")
    if options.words:
        yield Text(WORDS_CAPTION, style="dim")


def _with_title(
    head: DrawableHead, sequence: int, options: ViewOptions, *, is_alone: bool
) -> tuple[str, HeadMap]:
    """The map of a head with its title, of words on request. A head that `is_alone` has its type in
    words.
    """
    record, of = head.record, head.statistics
    rows, produced = queries_of(head, sequence, options)
    cells = replace(
        words_map(head, sequence) if options.words else head_map(head, sequence), produced=produced
    )
    doubt = "" if head.layer is None or head.layer.verified else "NOT verified"
    kind = f"{KIND_SIGNS[of.kind][0]} {type_text(of)}" if is_alone else KIND_SIGNS[of.kind][0]
    title = where(record, sequence, head.label + kv_head_of(record, of.head), doubt, kind)
    return title, cells if rows is None else cells.of_rows(rows)


def queries_of(
    head: DrawableHead, sequence: int, options: ViewOptions
) -> tuple[tuple[int, ...] | None, int | None]:
    """The requested queries of a text (None: all), and the first whose next token was generated, if
    any; of words on request.
    """
    record, kind = head.record, "self" if head.layer is None else head.layer.kind
    text, generated = (
        record.sequences[sequence],
        None if record.model is None else record.model.generated,
    )
    produced = (
        None if generated is None or kind == "encoder" else generated.prompt_lens[sequence] - 1
    )
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


# -------------------------------------------------------------------------------------------- words

WORDS_CAPTION = (
    "words: attention weights summed over the tokens of the attended word, averaged over those of"
    " the attending word; rows count words, not tokens"
)


def words_map(head: DrawableHead, sequence: int) -> HeadMap:
    """The map of a head with words in place of tokens.

    Weights are summed over the keys of a word and averaged over its queries with a visible key, so
    row sums are preserved. A pair of words is visible if any pair of their tokens is.
    """
    cells, queries, keys = (
        head_map(head, sequence),
        head.record.sequences[sequence],
        head.record.keys[sequence],
    )
    q_starts, k_starts = ([word[0] for word in text.words] for text in (queries, keys))
    n_queries = np.maximum(1, np.add.reduceat(cells.n_queries, q_starts))
    of_keys = np.add.reduceat(np.where(cells.is_open, cells.weights, 0.0), k_starts, axis=1)
    is_open = np.logical_or.reduceat(
        np.logical_or.reduceat(cells.is_open, k_starts, axis=1), q_starts
    )
    weights = np.add.reduceat(of_keys, q_starts) / n_queries[:, None]
    learned = (
        None if cells.learned is None else np.add.reduceat(cells.learned, q_starts) / n_queries
    )
    merged = cell_map(
        _names(queries), _names(keys), weights, is_open, sinks=words_with(keys, cells.sinks)
    )
    return replace(merged, learned=learned)


def words_with(text: TokenSequence, tokens: Sequence[int]) -> tuple[int, ...]:
    """The indices of the words that contain any of these tokens."""
    return tuple(i for i, word in enumerate(text.words) if any(token in word for token in tokens))


def _names(text: TokenSequence) -> tuple[str, ...]:
    """The words of a text: their only token, or their characters."""
    names = []
    for word in text.words:
        begin, end = text.offsets[word[0]][0], text.offsets[word[-1]][1]
        names.append(text.tokens[word[0]] if len(word) == 1 else text.text[begin:end])
    return tuple(names)
