"""A record's patterns as CSV: one line for each sequence, head, query and key."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from io import StringIO

import numpy as np

from mhacli.errors import MhaError
from mhacli.record import Record, TokenSequence

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
    n_heads = record.arrays["pattern"].shape[1]
    for b, sequence in enumerate(record.sequences):
        queries, keys = _quoted(sequence), _quoted(record.keys[b])
        for h in range(n_heads):
            for i, query in enumerate(queries):
                shares = record.arrays["pattern"][b, h, i]
                words = np.where(np.isfinite(shares), shares.astype("U32"), "").tolist()
                allowed = record.arrays["allowed"][b, 0, i].astype(int).tolist()
                yield _lines([(b, h, i, query, j, key, allowed[j], words[j]) for j, key in enumerate(keys)])


def _quoted(sequence: TokenSequence) -> list[str]:
    return [json.dumps(token) for token in sequence.tokens]


def _lines(rows: list[tuple[object, ...]]) -> str:
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
