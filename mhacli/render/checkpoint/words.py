"""A layer's pattern with the parts of words put together, for display: what was given to a word, by a word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mhacli.results.record.arrays import Array
from mhacli.results.record.record import Record
from mhacli.spec.tokens import TokenSequence
from mhacli.text.pieces import words_of

CAPTION = (
    "words: shares summed over the tokens of a word that is looked at, averaged over those of the word that looks; "
    "rows count words, not tokens; entropy is that of the rows drawn"
)

Words = Sequence[range]


def merged(view: Record) -> Record:
    """The record of one layer with a word where it had tokens: its `pattern`, `allowed`, `entropy` and `strongest_key`.

    Shares are summed over the keys of a word and averaged over its queries that see a key, so rows sum to what they did. A
    pair of words is allowed where any pair of their tokens is. What a row lacks to 1, for a learned sink, counts in its entropy.
    """
    queries = [words_of(sequence) for sequence in view.sequences]
    keys = queries if view.context is None else [words_of(sequence) for sequence in view.context]
    sequences = tuple(map(_merged_sequence, view.sequences, queries))
    context = None if view.context is None else tuple(map(_merged_sequence, view.context, keys))
    made = replace(view, sequences=sequences, context=context, survey=None, arrays={})
    parts = [_merged_text(view, made, b, queries[b], keys[b]) for b in range(len(sequences))]
    pattern = np.stack([pattern for pattern, _ in parts])
    allowed = np.stack([allowed for _, allowed in parts])
    entropy, strongest = _entropy(pattern), _strongest(pattern, allowed)
    arrays = {"pattern": pattern, "allowed": allowed, "entropy": entropy, "strongest_key": strongest}
    return replace(made, arrays=arrays)


def words_with(sequence: TokenSequence, tokens: Sequence[int]) -> tuple[int, ...]:
    """The words that hold any of these tokens, by their place."""
    return tuple(i for i, word in enumerate(words_of(sequence)) if any(token in word for token in tokens))


def _merged_sequence(sequence: TokenSequence, words: Words) -> TokenSequence:
    """A word as a token: the characters that all its tokens stand for."""
    documents = tuple(sequence.documents[word[0]] for word in words) if sequence.documents else ()
    return TokenSequence(
        sequence.text,
        tuple(_word_text(sequence, word) for word in words),
        tuple(sequence.ids[word[0]] for word in words),
        tuple((sequence.offsets[word[0]][0], sequence.offsets[word[-1]][1]) for word in words),
        documents,
    )


def _word_text(sequence: TokenSequence, word: range) -> str:
    """Bytes are joined before they are read, so that a character that is cut into tokens is whole again."""
    if len(word) == 1:
        return sequence.tokens[word[0]]
    try:
        joined = b"".join(bytes.fromhex(sequence.pieces[i].bytes) for i in word)
    except ValueError:  # a record from elsewhere may hold anything
        return "".join(sequence.tokens[i] for i in word)
    return joined.decode("utf-8", "surrogateescape")


def _merged_text(view: Record, made: Record, b: int, queries: Words, keys: Words) -> tuple[Array, Array]:
    """The pattern and what is allowed of one text, in the columns that it has among the others."""
    rows = slice(view.first_query(b), view.first_query(b) + len(view.sequences[b].tokens))
    columns = slice(view.first_key(b), view.first_key(b) + len(view.keys[b].tokens))
    shares = view.arrays["pattern"][b, :, rows, columns].astype(np.float64)
    allowed = view.arrays["allowed"][b, :, rows, columns]
    q_starts, k_starts = ([word[0] for word in words] for words in (queries, keys))
    n_seeing = np.maximum(1, np.add.reduceat(allowed.any(axis=-1).astype(int), q_starts, axis=1))
    sums = np.add.reduceat(np.add.reduceat(shares, k_starts, axis=2), q_starts, axis=1)
    any_allowed = np.logical_or.reduceat(np.logical_or.reduceat(allowed, k_starts, axis=2), q_starts, axis=1)
    size = (made.facts.q_len, made.facts.k_len)
    place = (
        slice(None),
        slice(made.first_query(b), made.first_query(b) + len(queries)),
        slice(made.first_key(b), made.first_key(b) + len(keys)),
    )
    pattern, keep = np.zeros((len(shares), *size)), np.zeros((len(allowed), *size), bool)
    pattern[place], keep[place] = sums / n_seeing[..., None], any_allowed
    return pattern, keep


def _entropy(pattern: Array) -> Array:
    """Nats of each row, with what it lacks to 1 as one more outcome."""
    lacking = 1 - pattern.sum(axis=-1, keepdims=True)
    has_keys = pattern.any(axis=-1, keepdims=True)
    outcomes = np.concatenate([pattern, np.where(has_keys & (lacking > _ROUNDING), lacking, 0.0)], axis=-1)
    logarithms = np.log(np.where(outcomes > 0, outcomes, 1.0))
    entropy: Array = np.abs((outcomes * logarithms).sum(axis=-1))
    return entropy


_ROUNDING = 1e-4


def _strongest(pattern: Array, allowed: Array) -> Array:
    return np.where(allowed.any(axis=-1), pattern.argmax(axis=-1), -1)
