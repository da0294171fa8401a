"""A record as one JSON document, schema `mha.record/1`, in pieces, so that no copy of a large one is held."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import numpy as np

from mhacli.io.data import Array, under
from mhacli.record.heads import PER_QUERY
from mhacli.record.record import Record, layer_prefix
from mhacli.render.base.options import ViewOptions

_FIRST = ("schema", "command", "config", "sequences", "context", "vocabulary", "trace")
_STATED = ("qk", "scores", "pattern", "z", "out")
_MASKED = ("qk", "scores")
_INNER = ("allowed",)
_RENAMED = {"context": "context_array"}
"""The embedded context is renamed, because `context` names its texts."""


def pieces(record: Record, _: ViewOptions) -> Iterator[str]:
    """The document with one top-level field per line, in ASCII. Masked and non-finite numbers are null.

    Numbers are the shortest that parse to the same number of their dtype. `nonfinite` counts NaN and infinities per
    array, masked cells excepted. Arrays that were not kept are null.
    """
    document = record.document()
    yield "{" + ",\n".join(field(name, document.pop(name)) for name in _FIRST)
    layers = document.pop("layers")
    if layers:
        yield ',\n"layers":['
        for index, layer in enumerate(layers):
            yield ("," if index else "") + "\n" + _compact(layer)[:-1]  # its arrays precede the closing brace
            yield from _arrays(under(record.arrays, layer_prefix(index)))
            yield "}"
        yield "]"
    else:
        yield from _arrays(record.arrays)
    document["nonfinite"] = nonfinite(record.arrays, len(layers))
    for name, value in document.items():
        yield ",\n" + field(name, value)
    yield "}\n"


def _arrays(arrays: Mapping[str, Array]) -> Iterator[str]:
    """The arrays of a record or layer as fields after other fields."""
    for name in (*_STATED, *(name for name in arrays if name not in _STATED + _INNER)):
        if name not in arrays:
            yield ",\n" + field(name, None)
            continue
        values, has_meaning = _values(arrays, name)
        yield f",\n{json.dumps(_RENAMED.get(name, name))}:"
        yield from _nested(values, has_meaning)


def nonfinite(arrays: Mapping[str, Array], n_layers: int) -> dict[str, int]:
    """The number of NaN and infinite values per array, masked cells excepted; only arrays with any. Those of a checkpoint are
    in `n_layers`."""
    if n_layers:
        by_layer = {prefix: nonfinite(under(arrays, prefix), 0) for prefix in map(layer_prefix, range(n_layers))}
        return {prefix + name: count for prefix, counts in by_layer.items() for name, count in counts.items()}
    counts = {}
    for name in sorted(arrays):  # the order in files is arbitrary
        values, has_meaning = _values(arrays, name)
        counts[_RENAMED.get(name, name)] = int((~np.isfinite(values) & has_meaning).sum())
    return {name: count for name, count in counts.items() if count}


def field(name: str, value: object) -> str:
    """A field of a document, without spaces. Raises `ValueError` for a non-finite number."""
    return f"{json.dumps(name)}:{_compact(value)}"


def _compact(value: object) -> str:
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
    words: list[str] = np.where(np.isfinite(values) & has_meaning, values.astype("U32"), "null").tolist()
    return words
