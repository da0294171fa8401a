"""The queries of a head that are drawn, and its map with words in place of tokens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mhacli.record.exports import Pattern
from mhacli.render.base.options import ViewOptions
from mhacli.render.base.selection import DrawableHead
from mhacli.render.heads.head_map import (
    HeadMap,
    cell_map,
    head_map,
)
from mhacli.text.tokens import TokenSequence


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
    is_encoder = head.layer.inspected.kind == "encoder"
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
            n_rows = len(text.words) if options.words else last + 1
            rows = tuple(row for row in dict.fromkeys(options.rows) if row < n_rows)
    if not options.words:
        return Queries(rows, produced)
    if produced is not None:  # the word before the first generated word
        produced = sum(word[0] <= produced for word in text.words) - 1
    if isinstance(options.rows, str):
        rows = words_with(text, rows or ())
    return Queries(rows, produced)


def mean_map(maps: Sequence[HeadMap]) -> HeadMap:
    """The mean of the maps of some heads over the same tokens. A masked cell counts as 0."""
    is_open = np.any([cells.is_open for cells in maps], axis=0)
    mean = np.mean([np.where(cells.is_open, cells.weights, 0.0) for cells in maps], axis=0)
    learned = [cells.learned for cells in maps if cells.learned is not None]
    return replace(
        cell_map(maps[0].queries, maps[0].keys, mean, is_open),
        learned=np.sum(learned, axis=0) / len(maps) if learned else None,
    )


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
    queries, keys = head.record.sequences[sequence], head.record.keys[sequence]
    number = head.statistics.head
    texts = (queries, keys)
    tokens = Pattern(cells.weights, cells.is_open, ("query", "key"), (0,), (number,), 0, *texts)
    words = tokens.of_words()
    sinks = words_with(keys, cells.sinks)
    merged = cell_map(
        words.query_tokens, words.key_tokens, words.values, words.allowed, sinks=sinks
    )
    if cells.learned is None:
        return merged
    starts = [word[0] for word in queries.words]
    n_queries = np.maximum(1, np.add.reduceat(cells.n_queries, starts))
    return replace(merged, learned=np.add.reduceat(cells.learned, starts) / n_queries)


def words_with(text: TokenSequence, tokens: Sequence[int]) -> tuple[int, ...]:
    """The indices of the words that contain any of these tokens."""
    return tuple(i for i, word in enumerate(text.words) if any(token in word for token in tokens))
