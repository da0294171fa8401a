"""A head's map in a page: encoded cells, the weights of sinks, and selected exact weights."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from mhacli.record.arrays import Array
from mhacli.render.base.cells import FORBIDDEN
from mhacli.render.heads.drawable import DrawableHead
from mhacli.render.heads.head_map import HeadMap

CodeName = Literal["f32", "u8"]
NO_KEY = 0xFFFFFFFF
MOST_KEYS = 8
"""The most top keys kept per query."""


@dataclass(frozen=True)
class CellEncoding:
    """The encoding of a record's cells: the code, and the number of cells per side merged into one."""

    code: CodeName
    factor: int

    @property
    def is_exact(self) -> bool:
        """Whether the page is as exact as the record."""
        return self == EXACT


EXACT = CellEncoding("f32", 1)


@dataclass(frozen=True)
class KeptKeys:
    """The `k` top keys of some queries with their weights, both `[query, k]`, encoded.

    `places` are the queries, None for all. `NO_KEY` fills rows with fewer visible keys.
    """

    k: int
    keys: str
    shares: str
    places: tuple[int, ...] | None = None


@dataclass(frozen=True)
class KeptRows:
    """All attention weights of some queries, `[query, key]`, encoded; `FORBIDDEN` where masked."""

    places: tuple[int, ...]
    shares: str


PARTS = ("scores", "qk", "z", "v")
"""The arrays that explain a weight and its effect, the most informative first."""


@dataclass(frozen=True)
class CellParts:
    """The arrays behind weights, encoded; None if missing from the page.

    These are the dot products `qk` and the `scores`, `[query, key]`, the head's outputs `z` `[query, d_v]` and its
    values `v` `[key, d_v]`.
    """

    qk: str | None = None
    scores: str | None = None
    z: str | None = None
    v: str | None = None


@dataclass(frozen=True)
class EncodedMap:
    """The fields of a map in a page, named as the script reads them.

    `mask` is an index into the page's masks. `removed` is the weight of sinks, `uniform` that under uniform attention,
    and `learned_mass` that of a sink logit. `first_tokens` are the sinks that begin a text or document.
    """

    mask: int
    block: int
    first: tuple[int, int]
    exact: bool
    code: CodeName
    largest: float
    cells: str
    sinks: tuple[int, ...]
    first_tokens: tuple[int, ...]
    sink_columns: tuple[int, ...]
    of_sinks: str
    learned: str | None
    seen: str
    removed: float
    uniform: float
    learned_mass: float | None
    top: KeptKeys | None = None
    rows: KeptRows | None = None
    asked: KeptKeys | None = None
    parts: CellParts = CellParts()

    @cached_property
    def json(self) -> str:
        """The map as JSON."""
        return json.dumps(asdict(self), separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True)
class MapFacts:
    """Numbers for notes on a map: the tops of its scale with and without sinks, the largest error of a weight, and the
    counts of NaN cells, masked cells, and queries with a visible key."""

    largest: float
    largest_without_sinks: float
    error: float
    n_missing: int
    n_forbidden: int
    n_queries: float


@dataclass(frozen=True)
class SinkWeights:
    """The sinks that begin a text or document, and the weight of all sinks under uniform attention."""

    first_tokens: tuple[int, ...]
    uniform: float


def sink_weights(head: DrawableHead, sequence: int, cells: HeadMap) -> SinkWeights:
    """The weight of a map's sinks under uniform attention, from single cells or from the record's map."""
    first = tuple(place for place in cells.sinks if cells.keys.places[place] == 0)
    if "pattern" in head.record.arrays:
        per_query = cells.is_open / np.maximum(1, cells.is_open.sum(axis=1, keepdims=True))
        received = per_query.sum(axis=0)
    else:
        of_all = head.record.arrays["uniform_received"][sequence]
        received = of_all[min(head.place, len(of_all) - 1), head.record.first_key(sequence) :]
    n_queries = max(1.0, float(cells.n_queries.sum()))
    return SinkWeights(first, float(received[list(cells.sinks)].sum()) / n_queries)


def encoded(head_map: HeadMap, mask: int, encoding: CellEncoding, sinks: SinkWeights) -> tuple[EncodedMap, MapFacts]:
    """The encoded map, and facts about it.

    In coarse codes, cells hold the weights without sinks, and the weights of sinks are exact. So removing sinks leaves
    no rounding errors.
    """
    is_exact = encoding.code == "f32"
    beside = head_map.weights if is_exact else head_map.weights - head_map.of_sinks
    cells = np.where(head_map.is_open, np.clip(beside, 0, None), 0.0)
    top = float(cells.max(initial=0.0, where=np.isfinite(cells)))
    numbers = cells.astype(np.float32) if is_exact else coded(cells, top)
    columns = np.flatnonzero((head_map.of_sinks != 0).any(axis=0))
    encoded_map = EncodedMap(
        mask=mask,
        block=head_map.block,
        first=head_map.first,
        exact=is_exact and head_map.block == 1,
        code=encoding.code,
        largest=top,
        cells=b64z(numbers),
        sinks=head_map.sinks,
        first_tokens=sinks.first_tokens,
        sink_columns=tuple(columns.tolist()),
        of_sinks=floats(head_map.of_sinks[:, columns]),
        learned=None if head_map.learned is None else floats(head_map.learned),
        seen=floats(head_map.n_queries),
        removed=head_map.sink_mass,
        uniform=sinks.uniform,
        learned_mass=head_map.learned_mass,
    )
    difference = np.abs((numbers.astype(np.float64) if is_exact else decoded(numbers, top)) - cells)
    return encoded_map, _facts(head_map, float(np.nan_to_num(difference).max(initial=0.0)))


def _facts(head_map: HeadMap, error: float) -> MapFacts:
    return MapFacts(
        largest=head_map.largest,
        largest_without_sinks=head_map.without_sinks().largest,
        error=error,
        n_missing=int((np.isnan(head_map.weights) & head_map.is_open).sum()),
        n_forbidden=int((~head_map.is_open).sum()),
        n_queries=float(head_map.n_queries.sum()),
    )


def top_keys(cells: HeadMap, k: int) -> tuple[Array, Array]:
    """The `k` top keys of each query with their weights, both `[query, k]`, in descending order.

    `NO_KEY` and 0 fill rows with fewer keys and rows with NaN. `cells` is a map of single cells.
    """
    open_shares = np.where(np.isnan(cells.weights).any(axis=1, keepdims=True), FORBIDDEN, cells.weights)
    k = min(k, open_shares.shape[1])
    columns = np.sort(np.argpartition(-open_shares, k - 1, axis=1)[:, :k], axis=1)
    weights = np.take_along_axis(open_shares, columns, axis=1)
    order = np.argsort(-weights, axis=1, kind="stable")
    keys, weights = np.take_along_axis(columns, order, axis=1), np.take_along_axis(weights, order, axis=1)
    missing = weights == FORBIDDEN
    return np.where(missing, NO_KEY, keys).astype(np.uint32), np.where(missing, 0.0, weights).astype(np.float32)


def with_keys(encoded_map: EncodedMap, keys: Array, weights: Array, k: int) -> EncodedMap:
    """The map with the first `k` of the top keys."""
    n = min(k, keys.shape[1])
    return replace(encoded_map, top=KeptKeys(n, b64z(keys[:, :n]), floats(weights[:, :n])))


def with_rows(encoded_map: EncodedMap, rows: Array, places: Sequence[int]) -> EncodedMap:
    """The map with some exact rows; unchanged without any."""
    return replace(encoded_map, rows=KeptRows(tuple(places), floats(rows))) if len(places) else encoded_map


def with_part(encoded_map: EncodedMap, head: DrawableHead, sequence: int, name: str) -> EncodedMap:
    """The map with one of `PARTS` for the sequence's own tokens; unchanged if the record lacks it."""
    record = head.record
    if name not in record.arrays:
        return encoded_map
    queries = slice(record.first_query(sequence), record.first_query(sequence) + len(record.sequences[sequence].tokens))
    keys = slice(record.first_key(sequence), record.first_key(sequence) + len(record.keys[sequence].tokens))
    array = record.arrays[name][sequence]
    if name == "v":
        numbers = array[head.place * len(array) // record.config.n_heads, keys]
    else:
        numbers = array[head.place, queries] if name == "z" else array[head.place, queries, keys]
    return replace(encoded_map, parts=replace(encoded_map.parts, **{name: floats(numbers)}))


def requested_keys(head: DrawableHead, sequence: int) -> KeptKeys | None:
    """The top keys of the queries requested in head statistics; None without a request."""
    record, survey = head.record, head.record.survey
    if survey is None or "top_keys" not in record.arrays:
        return None
    n, first_query, first_key = (
        len(record.sequences[sequence].tokens),
        record.first_query(sequence),
        record.first_key(sequence),
    )
    indices = [i for i, query in enumerate(survey.kept.queries) if 0 <= query - first_query < n]
    keys = record.arrays["top_keys"][sequence, head.place][indices]
    weights = record.arrays["top_shares"][sequence, head.place][indices]
    named = np.where(keys < 0, NO_KEY, keys - first_key).astype(np.uint32)
    places = tuple(survey.kept.queries[i] - first_query for i in indices)
    return KeptKeys(keys.shape[1], b64z(named), floats(np.where(keys < 0, 0.0, weights)), places) if indices else None


# --------------------------------------------------------------------------------------------------------------- codes


_MISSING = 255
"""The code of NaN. Weights have the codes below."""


def b64z(numbers: Array) -> str:
    """The numbers' bytes in row-major order, little-endian, deflated, in base64."""
    ordered = np.ascontiguousarray(numbers, dtype=numbers.dtype.newbyteorder("<"))
    return base64.b64encode(zlib.compress(ordered.tobytes(), 9)).decode("ascii")


def floats(numbers: Array) -> str:
    """32-bit floats, encoded as by `b64z`."""
    return b64z(np.asarray(numbers, dtype=np.float32))


def bits(cells: Array) -> str:
    """Booleans as bits, eight per byte, the first in the highest bit."""
    return b64z(np.packbits(cells))


def coded(weights: Array, top: float) -> Array:
    """Weights of 0 … `top` in 8 bits: the scaled square root, which gives small weights more precision. NaN has its own
    code."""
    is_missing = np.isnan(weights)
    roots = np.sqrt(np.clip(np.where(is_missing, 0.0, weights) / (top or 1.0), 0, 1))
    return np.where(is_missing, _MISSING, np.rint(roots * (_MISSING - 1))).astype(np.uint8)


def decoded(codes: Array, top: float) -> Array:
    """The weights that a reader decodes."""
    return np.where(codes == _MISSING, np.nan, top * (codes.astype(np.float64) / (_MISSING - 1)) ** 2)
