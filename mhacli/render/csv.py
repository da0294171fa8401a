"""A record's patterns as CSV: one line for each sequence, head, query and key."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from io import StringIO

import numpy as np

from mhacli.errors import MhaError
from mhacli.heads import Averages, HeadStatistics
from mhacli.parts import TokenSequence
from mhacli.record import Record

HEADER = ("sequence", "head", "query", "query_token", "key", "key_token", "allowed", "pattern")


def pieces(record: Record) -> Iterator[str]:
    """The lines, RFC 4180, with a header: of a record of heads one for each head, else one for each cell without padding.

    Tokens are JSON strings: they begin with a quotation mark, so no spreadsheet takes one for a formula, and
    `json.loads` gives the token back. Raises `MhaError` when the record holds no pattern.
    """
    if record.survey is not None:
        yield from _heads(record.heads)
        return
    if "pattern" not in record.arrays:
        raise MhaError(
            "csv must have the pattern, got a record without it", hint="--keep pattern keeps it", code="not-kept"
        )
    yield _lines([HEADER])
    pattern, allowed = record.arrays["pattern"], record.arrays["allowed"]
    for b, sequence in enumerate(record.sequences):
        queries, keys, first = _quoted(sequence), _quoted(record.keys[b]), record.first_key(b)
        own = slice(first, first + len(keys))
        for h in range(pattern.shape[1]):
            for i, query in enumerate(queries):
                row = record.first_query(b) + i
                shares = pattern[b, h, row, own]
                words = np.where(np.isfinite(shares), shares.astype("U32"), "").tolist()
                open_ = allowed[b, min(h, allowed.shape[1] - 1), row, own].astype(int).tolist()
                yield _lines([(b, h, i, query, j, key, open_[j], words[j]) for j, key in enumerate(keys)])


def _heads(heads: Sequence[HeadStatistics]) -> Iterator[str]:
    """A line per head: its kind, its numbers, and the same numbers of uniform attention. What is missing is empty."""
    numbers = [f.name for f in fields(Averages) if f.name != "patterns"]
    patterns = [f"pattern_{index + 1}" for index in range(len(heads[0].patterns))]
    own = ["layer", "head", "kind", "certainty", "max_score"]
    yield _lines([(*own, *numbers, *patterns, *(f"uniform_{name}" for name in (*numbers, *patterns)))])
    for head in heads:
        both = (head, head.uniform or Averages(patterns=(None,) * len(patterns)))
        values = [value for of in both for value in (*(getattr(of, name) for name in numbers), *of.patterns)]
        yield _lines([(*(getattr(head, name) for name in own), *values)])


def _quoted(sequence: TokenSequence) -> list[str]:
    return [json.dumps(token) for token in sequence.tokens]


def _lines(rows: list[tuple[object, ...]]) -> str:
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
