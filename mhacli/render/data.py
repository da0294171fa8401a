"""A record for programs: as one JSON document, schema `mha.record/1`, and as CSV, a row for each
sequence, head, query and key.

Both come in pieces, so that no copy of a large record is held.
"""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from typing import Any

import numpy as np

from mhacli.errors import MhaError
from mhacli.io.data import Array, under
from mhacli.record.exports import HeadTable, dicts_of, pattern_of_layer
from mhacli.record.heads import PER_QUERY, HeadStatistics
from mhacli.record.record import LayerView, Record, layer_prefix
from mhacli.text.escape import visible

from .base.options import ViewOptions, chosen
from .base.selection import chosen_heads, chosen_layers, require_inspected_heads

_FIRST = ("schema", "command", "config", "sequences", "context", "vocabulary", "trace")
_STATED = ("qk", "scores", "pattern", "z", "out")
_MASKED = ("qk", "scores")
_INNER = ("allowed",)
_RENAMED = {"context": "context_array"}
"""The embedded context is renamed, because `context` names its texts."""


def json_pieces(record: Record) -> Iterator[str]:
    """The document with one top-level field per line, in ASCII. Masked and non-finite numbers are
    null.

    Numbers are the shortest that parse to the same number of their dtype. `nonfinite` counts NaN
    and infinities per array, masked cells excepted. Arrays that were not kept are null.
    """
    document = record.document()
    yield "{" + ",\n".join(f'"{name}":{_compact(document.pop(name))}' for name in _FIRST)
    layers = document.pop("layers")
    if layers:
        yield ',\n"layers":['
        for index, layer in enumerate(layers):
            yield (",\n" if index else "\n") + _compact(layer)[:-1]  # arrays precede the last brace
            yield from _arrays(under(record.arrays, layer_prefix(index)))
            yield "}"
        yield "]"
    else:
        yield from _arrays(record.arrays)
    document["nonfinite"] = nonfinite(record.arrays, len(layers))
    for name, value in document.items():
        yield f',\n"{name}":{_compact(value)}'
    yield "}\n"


def _arrays(arrays: Mapping[str, Array]) -> Iterator[str]:
    """The arrays of a record or layer as fields after other fields."""
    for name in (*_STATED, *(name for name in arrays if name not in _STATED + _INNER)):
        if name not in arrays:
            yield f',\n"{name}":null'
            continue
        yield f',\n"{_RENAMED.get(name, name)}":'
        yield from _nested(*_values(arrays, name))


def nonfinite(arrays: Mapping[str, Array], n_layers: int) -> dict[str, int]:
    """The number of NaN and infinite values per array, masked cells excepted; only arrays with any.
    Those of a checkpoint are in `n_layers`.
    """
    if n_layers:
        return {
            prefix + name: count
            for prefix in map(layer_prefix, range(n_layers))
            for name, count in nonfinite(under(arrays, prefix), 0).items()
        }
    counts = {}
    for name in sorted(arrays):  # the order in files is arbitrary
        values, has_meaning = _values(arrays, name)
        count = int((~np.isfinite(values) & has_meaning).sum())
        if count:
            counts[_RENAMED.get(name, name)] = count
    return counts


def _compact(value: object) -> str:
    """JSON without spaces. Raises `ValueError` for a non-finite number."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _values(arrays: Mapping[str, Array], name: str) -> tuple[Array, Array]:
    """An array, and its cells that have meaning: not masked, and of queries with a visible key."""
    array = arrays[name]
    if name in _MASKED:
        return array, np.broadcast_to(arrays["allowed"], array.shape)
    if "visible" in arrays and name in PER_QUERY:
        return array, np.broadcast_to(arrays["visible"] > 0, array.shape)
    return array, ~np.isnan(array) if name == "corner" else np.broadcast_to(np.True_, array.shape)


def _nested(values: Array, has_meaning: Array) -> Iterator[str]:
    """Nested lists, one row of the innermost axis at a time."""
    if values.ndim == 1:
        yield "[" + ",".join(_numbers(values, has_meaning)) + "]"
        return
    yield "["
    for i in range(len(values)):
        yield "," if i else ""
        yield from _nested(values[i], has_meaning[i])
    yield "]"


def _numbers(values: Array, has_meaning: Array) -> list[str]:
    if values.dtype.kind != "f":
        return [json.dumps(value) for value in values.tolist()]
    words: list[str] = np.where(
        np.isfinite(values) & has_meaning, values.astype("U32"), "null"
    ).tolist()
    return words


# ---------------------------------------------------------------------------------------------- CSV

HEADER = ("sequence", "head", "query", "query_token", "key", "key_token", "allowed", "pattern")


def csv_pieces(record: Record, options: ViewOptions) -> Iterator[str]:
    """CSV rows (RFC 4180) with a header: for head statistics a row per head, otherwise a row per
    cell without padding. They are those of the chosen layers, sequences and heads, or of all.

    For effects, a row per removal; none if they are not proven. For a checkpoint, a row per cell of
    every layer whose pattern was kept, or else a row per head, with the layer's number and the
    attention's name. Headings are the JSON names. Raises `MhaError` if the record has no pattern,
    and `UsageError` for a layer or head that it lacks.
    """
    if record.effect is not None:
        if record.effect.verified.ok:
            yield from rows_csv(record.effects.to_dicts())
        return
    layers = chosen_layers(record, options)
    with_pattern = [layer for layer in layers if layer.has_pattern]
    if with_pattern:
        require_inspected_heads(layers, options.heads or ())
        yield _lines([("layer", "attention", *HEADER)])
        for layer in with_pattern:
            name = cell_text(layer.inspected.name)
            yield from _cells(layer, options, (layer.inspected.layer, name))
    elif layers or record.survey is not None:
        yield from _heads(chosen_heads(record, options), has_layers=bool(layers))
    elif "pattern" in record.arrays:
        yield _lines([HEADER])
        yield from _cells(record.attentions[0], options)
    else:
        message = "--csv needs the pattern, which the record does not have"
        raise MhaError(message, hint="--keep pattern keeps it", code="not-kept")


def _cells(layer: LayerView, options: ViewOptions, begin: tuple[object, ...] = ()) -> Iterator[str]:
    """A row per cell, sequence by sequence and head by head, beginning with its layer."""
    n_sequences = len(layer.record.sequences)
    for b in chosen(options.sequences, n_sequences, n_sequences, True, "sequence").shown:
        pattern = pattern_of_layer(layer, head=None, batch=b)
        keys = [*map(cell_text, pattern.key_tokens)]
        for place, h in enumerate(pattern.heads):
            if not options.shows_head(h):
                continue
            for i, query in enumerate(map(cell_text, pattern.query_tokens)):
                weights = pattern.values[place, i]
                words = np.where(np.isfinite(weights), weights.astype("U32"), "").tolist()
                allowed = pattern.allowed[place, i].astype(int).tolist()
                cells = zip(keys, allowed, words, strict=True)
                yield _lines([(*begin, b, h, i, query, j, *cell) for j, cell in enumerate(cells)])


def _heads(heads: Sequence[HeadStatistics], *, has_layers: bool) -> Iterator[str]:
    """A row per head: its type, its statistics, and those of uniform attention. If they were
    requested, also what its removal changes, and its type and statistics on random tokens.
    """
    columns = HeadTable(heads).columns(has_uniform=True)
    if not has_layers:
        del columns["attention"]
    yield from rows_csv(dicts_of(columns))


def rows_csv(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Rows as CSV (RFC 4180) under the JSON names of all their fields. Missing values are empty;
    lists and objects are JSON.
    """
    names = [*dict.fromkeys(name for row in rows for name in row)]
    cells = (tuple(_cell(row.get(name)) for name in names) for row in rows)
    yield _lines([tuple(map(cell_text, names)), *cells])


def _cell(value: Any) -> Any:
    if isinstance(value, (list, tuple, Mapping)):
        return json.dumps(value)
    return cell_text(value) if isinstance(value, str) else value


def cell_text(text: str) -> str:
    """Untrusted text as a cell. It becomes a JSON string if it looks like a formula, has invisible
    characters, or begins with a quotation mark.

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
