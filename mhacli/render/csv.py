"""A record's patterns as CSV: one line for each sequence, head, query and key."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from io import StringIO

import numpy as np

from mhacli.errors import MhaError
from mhacli.parts import TokenSequence
from mhacli.record import Record

HEADER = ("sequence", "head", "query", "query_token", "key", "key_token", "allowed", "pattern")


def pieces(record: Record) -> Iterator[str]:
    """The lines, RFC 4180, with a header. Padding is left out.

    Tokens are JSON strings: they begin with a quotation mark, so no spreadsheet takes one for a formula, and
    `json.loads` gives the token back. Raises `MhaError` when the record holds no pattern.
    """
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


def _quoted(sequence: TokenSequence) -> list[str]:
    return [json.dumps(token) for token in sequence.tokens]


def _lines(rows: list[tuple[object, ...]]) -> str:
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
