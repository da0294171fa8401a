"""The file from which units are merged: statistics of heads in each document, sums over documents, sinks and strong cells."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mhacli.errors import MhaError
from mhacli.io.data import decode, load_json, plain
from mhacli.io.safetensors import METADATA_KEY, read_tensor_file
from mhacli.record.arrays import Array
from mhacli.record.corpus import BadEntry, CorpusCell, TokenSink
from mhacli.record.effect import EFFECT_NUMBERS, Effect
from mhacli.record.heads import MAX_LARGEST, STATISTICS, Averages
from mhacli.record.record import InspectedLayer

MAX_FILE_BYTES = 4 << 30
PATTERN, UNIFORM_AT_OFFSET = "pattern_", "uniform_at_offset"
"""The prefix of the names of conditions, as in tables; and the name of the uniform weight at a head's strongest distance."""
WITHOUT_MEAN = ("offset", "at_offset", UNIFORM_AT_OFFSET)
"""Statistics without a mean over documents: they belong to a distance that may differ between documents."""
EFFECTS = tuple(name for name in EFFECT_NUMBERS if name != "first_order")
"""The numbers of a removal: fields and properties of `Effect`."""


def statistic_names(n_conditions: int) -> tuple[str, ...]:
    """The statistics stored for every head in every document."""
    names = (row.field for row in STATISTICS if row.field != "certainty")
    return (*names, *(f"{PATTERN}{number + 1}" for number in range(n_conditions)), UNIFORM_AT_OFFSET)


def uniform_names(n_conditions: int) -> tuple[str, ...]:
    """The statistics of uniform attention that are averaged over documents."""
    return tuple(name for name in statistic_names(n_conditions) if name not in (*WITHOUT_MEAN, "max_score"))


def values(heads: Sequence[Sequence[Averages | Effect]], names: Sequence[str]) -> Array:
    """The statistics `[statistic, document, head]` of heads, or of their removals, in documents; NaN for None."""
    numbers = [[[_value(head, name) for head in of_document] for of_document in heads] for name in names]
    return np.array(numbers, dtype=np.float64)  # None becomes NaN


def _value(head: Any, name: str) -> float | None:
    if name == UNIFORM_AT_OFFSET:
        return head.uniform and head.uniform.at_offset  # type: ignore[no-any-return]
    if name.startswith(PATTERN):
        return head.patterns[int(name.removeprefix(PATTERN)) - 1]  # type: ignore[no-any-return]
    return getattr(head, name)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------------ the file


@dataclass(frozen=True)
class UnitDocument:
    """A good document of a unit: its file and place in it, the sha256 of text and place, and its number of tokens."""

    file: str
    place: int
    digest: str
    n_tokens: int
    n_documents: int = 1


@dataclass(frozen=True)
class UnitHead:
    """A head in the documents of a unit: its sink tokens and its strongest cells."""

    layer: int
    attention: str
    head: int
    sinks: tuple[TokenSink, ...]
    cells: tuple[CorpusCell, ...]


@dataclass(frozen=True)
class UnitFacts:
    """The documents and heads of a unit, without arrays.

    `rows` is the sha256 of its file of rows, `statistics` names the first axis of the array of that name. `layers` are those of
    the longest document, with the worst result of each check over all documents; empty if no document is good.
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

    `statistics` `[statistic, document, head]` are float64, NaN for a missing value; `kinds` `[document, head]` are indices into
    `HEAD_TYPES`. Sums over documents are `uniform` `[statistic, head]` for uniform attention, over `uniform_counts` documents,
    and `profile` and `uniform_profile` `[head, step]`. With spans there are `span_mass` and `uniform_span_mass`
    `[head, span, span]`, over `span_counts` `[span, span]` documents.
    """

    facts: UnitFacts
    arrays: Mapping[str, Array]

    def to_bytes(self) -> bytes:
        """The contents of the file."""
        from safetensors.numpy import save

        facts_text = json.dumps(plain(self.facts), separators=(",", ":"), allow_nan=False)
        document = {"facts": facts_text, "digest": _digest(facts_text, self.arrays)}
        arrays = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        return save(arrays, metadata={METADATA_KEY: json.dumps(document)})


def read_sums(path: str) -> UnitSums:
    """The sums in a file. Raises `MhaError` for a missing or damaged file."""
    from safetensors.numpy import load

    file = read_tensor_file(path, MAX_FILE_BYTES)
    document = file.metadata if isinstance(file.metadata, dict) else {}
    facts_text, arrays = document.get("facts"), load(file.data)
    if not isinstance(facts_text, str) or document.get("digest") != _digest(facts_text, arrays):
        raise MhaError(f"{path} is damaged: its content is not what was written", code="bad-file", path=path)
    return UnitSums(decode(UnitFacts, load_json(facts_text, path), path), arrays)


def add_sum(sums: dict[str, Array], name: str, array: Array) -> None:
    """Adds an array to the sum of this name. The shorter of the two is padded with zeros in its last axis."""
    if name in sums:
        width = max(sums[name].shape[-1], array.shape[-1])
        array = widened(sums[name], width) + widened(array, width)
    sums[name] = array


def widened(array: Array, width: int) -> Array:
    """The array padded with zeros in its last axis."""
    n_zeros = width - array.shape[-1]
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, n_zeros)]) if n_zeros else array


def strongest(cells: Sequence[CorpusCell]) -> list[CorpusCell]:
    """The cells with the largest ratio to uniform; among equal ones, the first."""
    return sorted(cells, key=lambda cell: -cell.lift)[:MAX_LARGEST]


def _digest(facts_text: str, arrays: Mapping[str, Array]) -> str:
    digest = hashlib.sha256(facts_text.encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
