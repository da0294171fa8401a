"""The patterns of chosen layers and heads of a checkpoint on one scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from mhacli.record.record import Record
from mhacli.render.base.colours import KIND_SIGNS
from mhacli.render.base.format import type_text
from mhacli.render.base.grids import MAX_LINES
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.base.selection import DrawableHead, LayerView, drawable_heads, names_of
from mhacli.render.heads.head_map import (
    HeadMap,
    TitledMap,
    cell_map,
    head_map,
    kv_head_of,
    patterns,
    where,
)
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
        yield Text(HINT, "dim")
        return
    missing = [layer.inspected for layer in layers if not layer.has_pattern]
    if missing:
        why = "is not in this record, so it is not drawn; --keep-limit makes room"
        yield Text(f"the pattern of {names_of(missing)} {why}", "yellow")
    heads = [head for head in drawable_heads(record, options) if "pattern" in head.record.arrays]
    chosen = [*product(heads, sequences)]
    is_requested = options.everything or (options.layers is not None and options.heads is not None)
    most = None
    if not is_requested:
        most = MAX_LINES
        chosen = chosen[:MAX_DRAWN]
        if options.view == "auto" and options.rows is None:
            options = replace(options, view="heatmap")
    n_heads = len(heads) * len(sequences)
    maps = [_titled_map(head, b, options, is_alone=n_heads == 1) for head, b in chosen]
    yield from patterns(maps, options, screen, most=most, n_more=n_heads - len(maps))
    if any(cells.is_followed(row) for _, cells in maps for row in range(len(cells.weights))):
        yield Text("a → b: after query a the model generated token b", "dim")
    if options.words:
        yield Text(WORDS_CAPTION, "dim")


def _titled_map(
    head: DrawableHead, sequence: int, options: ViewOptions, *, is_alone: bool
) -> TitledMap:
    """The map of a head with its title, of words on request. A head that `is_alone` has its type in
    words.
    """
    record = head.record
    statistics = head.statistics
    queries = queries_of(head, sequence, options)
    cells = words_map(head, sequence) if options.words else head_map(head, sequence)
    cells = replace(cells, produced=queries.produced)
    if queries.rows is not None:
        cells = cells.of_rows(queries.rows)
    doubt = "" if head.layer is None or head.layer.verified else "NOT verified"
    kind = KIND_SIGNS[statistics.kind].sign
    if is_alone:
        kind += f" {type_text(statistics)}"
    label = head.label + kv_head_of(record, statistics.head)
    return TitledMap(where(record, sequence, label, doubt, kind), cells)


class Queries(NamedTuple):
    """The requested queries of a text (None: all), and the first after which a token was generated,
    if any. With merged words both are words.
    """

    rows: tuple[int, ...] | None
    produced: int | None


def queries_of(head: DrawableHead, sequence: int, options: ViewOptions) -> Queries:
    """The queries to draw of a head."""
    model = head.record.model
    generated = None if model is None else model.generated
    is_encoder = head.layer is not None and head.layer.kind == "encoder"
    produced = None if generated is None or is_encoder else generated.prompt_lens[sequence] - 1
    text = head.record.sequences[sequence]
    last = len(text.tokens) - 1
    rows: tuple[int, ...] | None
    match options.rows:
        case None:
            rows = None
        case "last":
            rows = (last,)
        case "generated":
            rows = () if produced is None else tuple(range(produced, last))
        case _:
            rows = tuple(row for row in dict.fromkeys(options.rows) if row <= last)
    if not options.words:
        return Queries(rows, produced)
    if produced is not None:  # the word before the first generated word
        produced = sum(word[0] <= produced for word in text.words) - 1
    return Queries(None if rows is None else words_with(text, rows), produced)


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
    cells = head_map(head, sequence)
    queries = head.record.sequences[sequence]
    keys = head.record.keys[sequence]
    q_starts = [word[0] for word in queries.words]
    k_starts = [word[0] for word in keys.words]
    n_queries = np.maximum(1, np.add.reduceat(cells.n_queries, q_starts))
    weights = np.add.reduceat(np.where(cells.is_open, cells.weights, 0.0), k_starts, axis=1)
    weights = np.add.reduceat(weights, q_starts) / n_queries[:, None]
    is_open = np.logical_or.reduceat(cells.is_open, k_starts, axis=1)
    is_open = np.logical_or.reduceat(is_open, q_starts)
    sinks = words_with(keys, cells.sinks)
    merged = cell_map(_names(queries), _names(keys), weights, is_open, sinks=sinks)
    if cells.learned is None:
        return merged
    return replace(merged, learned=np.add.reduceat(cells.learned, q_starts) / n_queries)


def words_with(text: TokenSequence, tokens: Sequence[int]) -> tuple[int, ...]:
    """The indices of the words that contain any of these tokens."""
    return tuple(i for i, word in enumerate(text.words) if any(token in word for token in tokens))


def _names(text: TokenSequence) -> tuple[str, ...]:
    """The words of a text: their only token, or their characters."""
    names = []
    for word in text.words:
        begin, _ = text.offsets[word[0]]
        _, end = text.offsets[word[-1]]
        names.append(text.tokens[word[0]] if len(word) == 1 else text.text[begin:end])
    return tuple(names)
