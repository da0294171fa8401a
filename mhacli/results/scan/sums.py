"""What the merge needs of a unit: the statistics of its heads in each document, sums over them, and what stands out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mhacli.errors import MhaError
from mhacli.io.json_schema import decode, load_json, plain
from mhacli.io.safetensors import METADATA_KEY, read_tensor_file, tensors_of
from mhacli.results.record.arrays import Array
from mhacli.results.record.corpus import BadEntry, CorpusCell, TokenSink
from mhacli.results.record.head_statistics import MAX_LARGEST
from mhacli.results.record.record import InspectedLayer

MAX_FILE_BYTES = 4 << 30


@dataclass(frozen=True)
class UnitDocument:
    """A good document of a unit: where it is from, the sha256 of its text and place, and its tokens."""

    file: str
    place: int
    digest: str
    n_tokens: int


@dataclass(frozen=True)
class UnitHead:
    """A head in the documents of a unit: the tokens that are sinks, and the cells that stand out most."""

    layer: int
    attention: str
    head: int
    sinks: tuple[TokenSink, ...]
    cells: tuple[CorpusCell, ...]


@dataclass(frozen=True)
class UnitFacts:
    """What a unit says of its documents and heads beside numbers.

    `rows` is the sha256 of its file of rows, `statistics` names the first axis of the array of that name. `layers` are those of
    the longest document, with the checks that came nearest to their tolerance in any; none where no document is good.
    `identical` says whether the model's outputs were the same bits without inspection.
    """

    number: int
    settings: str
    device: str
    rows: str
    documents: tuple[UnitDocument, ...]
    bad: tuple[BadEntry, ...]
    statistics: tuple[str, ...]
    heads: tuple[UnitHead, ...]
    layers: tuple[InspectedLayer, ...]
    identical: bool


@dataclass(frozen=True)
class UnitSums:
    """The facts of a unit, and its arrays.

    `statistics` `[statistic, document, head]` are float64, NaN where there is no value; `kinds` `[document, head]` are places
    in `HEAD_TYPES`. Sums over the documents: `uniform` `[statistic, head]` of uniform attention, of so many documents as
    `uniform_counts`, and `profile`, `uniform_profile` `[head, step]`. Where there are spans, `span_mass` and
    `uniform_span_mass` `[head, span, span]`, of so many documents as `span_counts` `[span, span]`.
    """

    facts: UnitFacts
    arrays: Mapping[str, Array]

    def to_bytes(self) -> bytes:
        """The file of the unit."""
        from safetensors.numpy import save

        words = json.dumps(plain(self.facts), separators=(",", ":"), allow_nan=False)
        document = {"facts": words, "digest": _digest(words, self.arrays)}
        arrays = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        return save(arrays, metadata={METADATA_KEY: json.dumps(document)})


def read_sums(path: str) -> UnitSums:
    """The sums in a file. Raises `MhaError` for a file that is missing, damaged, or not what was written."""
    from safetensors.numpy import load

    file = read_tensor_file(path, MAX_FILE_BYTES)
    document = file.metadata if isinstance(file.metadata, dict) else {}
    words, arrays = document.get("facts"), tensors_of(file, load)
    if not isinstance(words, str) or document.get("digest") != _digest(words, arrays):
        raise MhaError(f"{path} is damaged: its content is not what was written", code="bad-file", path=path)
    return UnitSums(decode(UnitFacts, load_json(words, path), path), arrays)


def add_sum(sums: dict[str, Array], name: str, array: Array) -> None:
    """Adds an array to the sum of this name. Of two, the shorter has zeros behind its last axis."""
    if name in sums:
        width = max(sums[name].shape[-1], array.shape[-1])
        array = widened(sums[name], width) + widened(array, width)
    sums[name] = array


def widened(array: Array, width: int) -> Array:
    """The array with zeros behind its last axis."""
    n_zeros = width - array.shape[-1]
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, n_zeros)]) if n_zeros else array


def strongest(cells: Sequence[CorpusCell]) -> list[CorpusCell]:
    """The cells that stand out most; of equal ones those that come first."""
    return sorted(cells, key=lambda cell: -cell.lift)[:MAX_LARGEST]


def _digest(words: str, arrays: Mapping[str, Array]) -> str:
    digest = hashlib.sha256(words.encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
