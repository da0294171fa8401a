"""Reads a record from its file: checks the header's description, and reads arrays on demand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from mhacli.errors import MhaError, UsageError
from mhacli.io.data import decode
from mhacli.io.memory import uncollected
from mhacli.io.safetensors import (
    TensorFile,
    TensorInfo,
    read_tensor_file,
    read_tensor_header,
    read_tensors_of,
    shown_name,
    tensors_of,
)
from mhacli.io.scan_folder import summary_of
from mhacli.record.arrays import Array, LateArrays, Prefixed
from mhacli.record.consistency import impossible
from mhacli.record.record import SCHEMA, Record, layer_prefix
from mhacli.settings import with_earlier_config
from mhacli.sites import SITES

if TYPE_CHECKING:  # imported only for records with arrays
    from mhacli.record.heads import HeadsSummary
    from mhacli.record.record import Cell, Step
    from mhacli.settings import Config
    from mhacli.sites import Facts

MAX_FILE_BYTES = 64 << 30
_PER_QUERY = ("entropy", "strongest_key", "allowed")
_ROUNDING = 1e-3
_NO_FLOATS = {"ids": "int", "strongest_key": "int", "visible": "int", "top_keys": "int", "allowed": "bool"}
_KINDS = {"int": "whole numbers", "bool": "true or false", "float": "floating point numbers"}
_READABLE = {"F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64", "I32": "int32", "BOOL": "bool"}


def load(path: str) -> Record:
    """The record in a file or in the folder of a scan. Raises `MhaError` for a file that is no record or is
    inconsistent."""
    file = read_tensor_file(summary_of(path), MAX_FILE_BYTES)
    record = _described(file, lambda: file)
    return dataclasses.replace(record, arrays=dict(record.arrays))


def load_late(path: str) -> Record:
    """The record in a file or in the folder of a scan. Arrays are read, and numpy imported, on first access.

    Raises `MhaError` for a file that is no record or is inconsistent. Reading an array raises it for numbers out of
    range, and if the file was replaced.
    """
    header = read_tensor_header(summary_of(path))
    return _described(header, lambda: read_tensors_of(header, MAX_FILE_BYTES))


def _described(file: TensorFile, read: Callable[[], TensorFile]) -> Record:
    """The record that a header describes; `read` gives the file with its numbers."""
    path, document = file.path, file.metadata
    schema = document.get("schema", document.get("format")) if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise MhaError(
            f"{path} is not a record of schema {SCHEMA}: it has {'no schema' if schema is None else repr(schema)}",
            hint="mha run TEXT --save FILE writes a record" if schema is None else None,
            code="bad-file",
            path=path,
        )
    record = decode(Record, with_earlier_config(document), path)
    _require_whole(record, path)
    record = dataclasses.replace(record, config=_resolved(record.config, path))
    views = {layer_prefix(i): record.of_layer(i) for i in range(len(record.layers))} or {"": record}
    return dataclasses.replace(record, arrays=_stored(file, {} if record.module else views, read))


def _resolved(config: Config, path: str) -> Config:
    try:
        return config.resolved()
    except UsageError as fault:
        from mhacli.settings import about_file

        raise MhaError(f"{path}: {about_file(fault.message)}", code="bad-file", path=path) from None


def _require_whole(record: Record, path: str) -> None:
    if not record.sequences or len(record.keys) != len(record.sequences):
        raise MhaError(f"{path} must have sequences, and either no contexts or as many", code="bad-file", path=path)
    for sequence in (*record.sequences, *record.keys):
        if not len(sequence.tokens) == len(sequence.ids) == len(sequence.offsets) > 0:
            raise MhaError(f"{path} must give every token its id and offsets", code="bad-file", path=path)
        if not {len(sequence.documents), len(sequence.pieces)} <= {0, len(sequence.tokens)}:
            raise MhaError(f"{path} must give every token its document and piece, or none", code="bad-file", path=path)
    fault = impossible(record)
    if fault is not None:
        raise MhaError(f"{path}: {fault}", code="bad-file", path=path)
    if record.decoding is not None and not all(_is_step(step, record) for step in record.trace):
        raise MhaError(f"{path}: every step of a decoding must have tokens and a shape", code="bad-file", path=path)
    views = [record.of_layer(index) for index in range(len(record.layers))] or [record]
    if record.cell is not None and not _is_inside(record.cell, views[0]):  # only records of one layer follow a cell
        raise MhaError(f"{path}: cell must lie within the record", code="bad-file", path=path)
    if any(view.survey is not None and not _is_survey(view.survey, view) for view in views):
        raise MhaError(f"{path}: heads and survey must lie within the record", code="bad-file", path=path)
    if bool(record.layers) != (record.model is not None) or sum(len(view.heads) for view in views) != len(record.heads):
        raise MhaError(
            f"{path} must have layers for its model, and every head in one of them", code="bad-file", path=path
        )
    generated = None if record.model is None else record.model.generated
    if generated is not None and not _are_prompts(generated.prompt_lens, record):
        raise MhaError(
            f"{path}: generated.prompt_lens must have a number from 1 to its length for every sequence",
            code="bad-file",
            path=path,
        )
    for span in record.spans:
        if len(span.tokens) != len(record.sequences) or not all(
            0 <= i < len(s.tokens) for s, tokens in zip(record.sequences, span.tokens, strict=True) for i in tokens
        ):
            raise MhaError(f"{path}: spans must lie within their sequences", code="bad-file", path=path)


def _are_prompts(prompt_lens: Sequence[int], record: Record) -> bool:
    lengths = [len(sequence.tokens) for sequence in record.sequences]
    return len(prompt_lens) == len(lengths) and all(1 <= p <= n for p, n in zip(prompt_lens, lengths, strict=True))


def _is_step(step: Step, record: Record) -> bool:
    if step.cache is None or len(step.shape) != 3 or step.shape[1] < 1:
        return False
    is_placed = 0 <= step.cache.start <= record.facts.q_len - step.shape[1]
    return is_placed and len(step.cache.tokens) == len(record.sequences)


def _is_inside(cell: Cell, record: Record) -> bool:
    if not 0 <= cell.sequence < len(record.sequences):
        return False
    n_queries, n_keys = (len(family[cell.sequence].tokens) for family in (record.sequences, record.keys))
    is_placed = 0 <= cell.head < record.config.n_heads and 0 <= cell.query < n_queries and 0 <= cell.key < n_keys
    return is_placed and len(cell.scores_row) == len(cell.pattern_row) == n_keys


def _is_survey(survey: HeadsSummary, record: Record) -> bool:
    from mhacli.record.heads import Corner

    facts, heads = record.facts, [head.head for head in record.heads]
    are_heads = heads and len(set(heads)) == len(heads) and all(0 <= head < record.config.n_heads for head in heads)
    are_steps = survey.steps and survey.steps[0] == 0 and all(a < b for a, b in pairwise(survey.steps))
    is_block = 1 <= survey.block <= 1 << 31 and not survey.block & (survey.block - 1)
    is_top = is_block and bool(survey.checks) and survey.kept.top >= bool(survey.kept.queries)
    c = survey.kept.corner or Corner(0, 1, 0, 1)
    is_corner = c.n_queries >= 1 <= c.n_keys and c.first_query >= 0 <= c.first_key
    is_within = c.first_query + c.n_queries <= facts.q_len and c.first_key + c.n_keys <= facts.k_len
    places = [(sink.sequence, sink.key) for head in record.heads for sink in head.sinks]
    places += [(cell.sequence, cell.key) for head in record.heads for cell in head.largest]
    places += [(head.max_score_at[0], head.max_score_at[2]) for head in record.heads if head.max_score_at]
    queries = [(0, query) for query in survey.kept.queries]
    queries += [(cell.sequence, cell.query) for head in record.heads for cell in head.largest]
    queries += [head.max_score_at[:2] for head in record.heads if head.max_score_at]
    return bool(
        are_heads and are_steps and is_top and is_corner and is_within
        and all(0 <= b < facts.batch and 0 <= key < facts.k_len for b, key in places)
        and all(0 <= b < facts.batch and 0 <= query < facts.q_len for b, query in queries)
        and all(len(head.patterns) == len(survey.patterns) for head in record.heads)
        and all(head.uniform is None or len(head.uniform.patterns) == len(survey.patterns) for head in record.heads)
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- arrays


def _stored(file: TensorFile, views: Mapping[str, Record], read: Callable[[], TensorFile]) -> LateArrays:
    """The arrays of a file that belong to the record.

    `views` are the record or its layers, by the prefix of their array names; `read` gives the file with its numbers.
    Raises `MhaError` for shapes that do not fit, and on access for numbers out of range.
    """
    _require_readable(file)
    names = [prefix + name for prefix, view in views.items() for name in _fitting(view, file, prefix)]

    def arrays() -> Mapping[str, Array]:
        loaded = read()
        every = _loaded(loaded)
        stored = {name: every[name] for name in names}
        for prefix, view in views.items():
            _require_meaning(Prefixed(stored, prefix), view.facts, loaded.path)
        return stored

    return LateArrays(names, arrays)


def _require_readable(file: TensorFile) -> None:
    for name, info in file.tensors.items():
        if info.dtype not in _READABLE:
            raise MhaError(
                f"{file.path}: array {shown_name(name)} has dtype {info.dtype}, which is not one of {', '.join(_READABLE)}",
                code="bad-file",
                path=file.path,
            )


def _loaded(file: TensorFile) -> Mapping[str, Array]:
    with uncollected():
        from safetensors.numpy import load
    return tensors_of(file, load)


def _fitting(view: Record, file: TensorFile, prefix: str) -> Iterator[str]:
    """The names of the arrays in a file that belong to a record or layer. Raises `MhaError` for shapes that do not fit.
    `prefix` is that of their names in the file."""
    path, shapes = file.path, _shapes(view)
    arrays = {name: info for name, info in Prefixed(file.tensors, prefix).items() if name in shapes}
    for name, info in arrays.items():
        _require_fitting(name, info, shapes[name], path)
    required = _PER_QUERY if view.survey is None else _required_of_survey(shapes, arrays)
    for name in required:
        if name not in arrays:
            raise MhaError(f"{path} lacks the array {prefix}{name}", code="bad-file", path=path)
    yield from arrays


_Shapes = Mapping[str, tuple[tuple[int, ...], ...]]


def _shapes(record: Record) -> _Shapes:
    """The arrays that a record may hold, with their allowed shapes, the usual one first."""
    facts = record.facts
    if record.survey is not None:
        return _shapes_of_survey(record.survey, record)
    whole = SITES["pattern"].shape_for(facts)
    expected = {name: (site.shape_for(facts),) for name, site in SITES.items()}
    for_all_heads = (whole[0], 1, *whole[2:])
    per_query = {"entropy": (whole[:3],), "strongest_key": (whole[:3],)}
    return {**expected, **per_query, "allowed": (for_all_heads, whole)}  # masks may differ between heads


def _shapes_of_survey(survey: HeadsSummary, record: Record) -> _Shapes:
    from mhacli.record.heads import FOR_ALL_HEADS, summary_shapes

    facts = record.facts
    shapes = summary_shapes(
        survey,
        batch=facts.batch,
        n_heads=len(record.heads),
        q_len=facts.q_len,
        k_len=facts.k_len,
        d_v=record.config.d_v or 0,
        n_spans=len(record.spans),
    )
    return {
        name: ((shape[0], 1, *shape[2:]), shape) if name in FOR_ALL_HEADS else (shape,)
        for name, shape in shapes.items()
    }


def _required_of_survey(shapes: Iterable[str], stored: Container[str]) -> Iterable[str]:
    from mhacli.record.heads import MATRICES, OPTIONAL

    yield from (name for name in shapes if name not in OPTIONAL)
    if any(name in stored for name in MATRICES):  # matrices need their mask
        yield "allowed"


def _require_fitting(name: str, info: TensorInfo, shapes: tuple[tuple[int, ...], ...], path: str) -> None:
    """Raises `MhaError` if an array contradicts the tokens, because it would be drawn under the wrong labels."""
    if info.shape not in shapes:
        raise MhaError(
            f"{path}: {name} has the shape {list(info.shape)}, but its tokens and heads need {list(shapes[0])}",
            code="bad-file",
            path=path,
        )
    dtype, kind = _READABLE[info.dtype], _NO_FLOATS.get(name, "float")
    if not dtype.startswith(kind):
        raise MhaError(f"{path}: {name} must hold {_KINDS[kind]}, got {dtype}", code="bad-file", path=path)


def _require_meaning(arrays: Mapping[str, Array], facts: Facts, path: str) -> None:
    """Raises `MhaError` for numbers out of range that views use as indices or scales. NaN is allowed, and shown."""
    import numpy as np

    last_key, most = facts.k_len - 1, facts.q_len * (1 + _ROUNDING)
    keys, weights = (-1, last_key, f"key positions from -1 to {last_key}"), (0, 1 + _ROUNDING, "weights from 0 to 1")
    limits: dict[str, tuple[float, float, str]] = {"strongest_key": keys, "top_keys": keys}
    limits |= dict.fromkeys(
        ("pattern", "map", "corner", "top_shares", "sink", "profile", "uniform_profile", "span_mass"), weights
    )
    limits |= dict.fromkeys(("uniform_map", "uniform_span_mass"), weights)
    limits |= dict.fromkeys(("received", "uniform_received"), (0, most, f"sums of weights of {facts.q_len} queries"))
    limits["visible"] = (0, facts.k_len, f"counts of keys from 0 to {facts.k_len}")
    limits["entropy"] = (-_ROUNDING, 1e3, "nats that are finite and not negative")
    limits["distance"] = (-_ROUNDING, 1.01 * max(facts.q_len, facts.k_len), "distances within the text")
    for name, (low, high, meaning) in limits.items():
        if name in arrays and (
            np.fmin.reduce(arrays[name], axis=None) < low or np.fmax.reduce(arrays[name], axis=None) > high
        ):
            raise MhaError(f"{path}: {name} must hold {meaning}", code="bad-file", path=path)
    if "allowed" in arrays and arrays["allowed"].view(np.uint8).max() > 1:
        raise MhaError(f"{path}: allowed must hold bytes of 0 and 1", code="bad-file", path=path)
