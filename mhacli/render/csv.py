"""A record's patterns as CSV: a row for each sequence, head, query and key."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from io import StringIO
from typing import Any

import numpy as np

from mhacli.errors import MhaError
from mhacli.record.heads import Averages, HeadStatistics, removal_columns
from mhacli.record.record import Record
from mhacli.render.base.options import ViewOptions, chosen
from mhacli.render.base.selection import chosen_heads, chosen_layers, require_inspected_heads
from mhacli.text.escape import visible

HEADER = ("sequence", "head", "query", "query_token", "key", "key_token", "allowed", "pattern")


def pieces(record: Record, options: ViewOptions) -> Iterator[str]:
    """CSV rows (RFC 4180) with a header: for head statistics a row per head, otherwise a row per cell without padding. They
    are those of the chosen layers, sequences and heads, or of all.

    For effects, a row per removal; none if they are not proven. For a checkpoint, a row per cell of every layer whose
    pattern was kept, or else a row per head, with the layer's number and the attention's name. Headings are the JSON
    names. Raises `MhaError` if the record has no pattern, and `UsageError` for a layer or head that it lacks.
    """
    if record.effect is not None:
        yield from rows_csv(record.effects.to_dicts()) if record.effect.verified.ok else ()
        return
    layers = chosen_layers(record, options)
    kept = [layer for layer in layers if layer.has_pattern]
    if kept:
        require_inspected_heads(layers, options.heads or ())
        yield _lines([("layer", "attention", *HEADER)])
        for layer in kept:
            yield from _cells(layer.record, options, (layer.inspected.layer, cell_text(layer.inspected.name)))
    elif layers:
        yield from _heads(chosen_heads(layers, options), has_layers=True)
    elif record.survey is not None:
        yield from _heads([head for head in record.heads if _is_chosen(head.head, options)], has_layers=False)
    elif "pattern" in record.arrays:
        yield _lines([HEADER])
        yield from _cells(record, options)
    else:
        raise MhaError(
            "--csv needs the pattern, which the record does not have", hint="--keep pattern keeps it", code="not-kept"
        )


def _is_chosen(head: int, options: ViewOptions) -> bool:
    return options.heads is None or head in options.heads


def _cells(record: Record, options: ViewOptions, begin: tuple[object, ...] = ()) -> Iterator[str]:
    """A row per cell, sequence by sequence and head by head, beginning with its layer."""
    pattern, allowed = record.arrays["pattern"], record.arrays["allowed"]
    numbers = range(pattern.shape[1]) if record.survey is None else [head.head for head in record.heads]
    n_sequences = len(record.sequences)
    for b in chosen(options.sequences, n_sequences, n_sequences, True, "sequence").shown:
        queries, keys = ([*map(cell_text, texts[b].tokens)] for texts in (record.sequences, record.keys))
        columns = slice(record.first_key(b), record.first_key(b) + len(keys))
        for place, h in enumerate(numbers):
            if not _is_chosen(h, options):
                continue
            for i, query in enumerate(queries):
                row = record.first_query(b) + i
                weights = pattern[b, place, row, columns]
                words = np.where(np.isfinite(weights), weights.astype("U32"), "").tolist()
                open_ = allowed[b, min(place, allowed.shape[1] - 1), row, columns].astype(int).tolist()
                yield _lines([(*begin, b, h, i, query, j, key, open_[j], words[j]) for j, key in enumerate(keys)])


def _heads(heads: Sequence[HeadStatistics], *, has_layers: bool) -> Iterator[str]:
    """A row per head: its type, its statistics, and those of uniform attention. Missing values are empty. If they were requested,
    also what its removal changes, and its type and statistics on random tokens."""
    numbers = [f.name for f in fields(Averages) if f.name != "patterns"]
    kinds, removals = ["kind", "certainty", "max_score"], [row.field for row in removal_columns(heads)]

    def values(of: Averages, names: Sequence[str], prefix: str = "") -> dict[str, Any]:
        patterns = {f"{prefix}pattern_{index}": weight for index, weight in enumerate(of.patterns, 1)}
        return {prefix + name: getattr(of, name) for name in names} | patterns

    rows = []
    for head in heads:
        row = {"layer": head.layer, "attention": head.attention} if has_layers else {"layer": head.layer}
        row |= {"head": head.head, **values(head, [*kinds, *numbers])}
        row |= values(head.uniform or Averages(patterns=(None,) * len(head.patterns)), numbers, "uniform_")
        row |= {name: getattr(head, name) for name in removals}
        row |= {} if head.control is None else values(head.control, [*kinds, *numbers], "control_")
        rows.append(row)
    yield from rows_csv(rows)


def rows_csv(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Rows as CSV (RFC 4180) under the JSON names of all their fields. Missing values are empty; lists and objects are JSON."""
    names = [*dict.fromkeys(name for row in rows for name in row)]
    yield _lines([tuple(names), *(tuple(_cell(row.get(name)) for name in names) for row in rows)])


def _cell(value: Any) -> Any:
    if isinstance(value, (list, tuple, Mapping)):
        return json.dumps(value)
    return cell_text(value) if isinstance(value, str) else value


def cell_text(text: str) -> str:
    """Untrusted text as a cell. It becomes a JSON string if it looks like a formula, has invisible characters, or
    begins with a quotation mark.

    So a cell that begins with a quotation mark is always a JSON string.

    >>> cell_text("the"), cell_text("=1+1")
    ('the', '"=1+1"')
    """
    is_plain = visible(text).replace("\\\\", "\\") == text and not text.lstrip().startswith(_UNSAFE)
    return text if is_plain else json.dumps(text)


_UNSAFE = ("=", "+", "-", "@", '"')
"""Characters that begin a formula in spreadsheets, and the one that begins a JSON string."""


def _lines(rows: list[tuple[object, ...]]) -> str:
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
