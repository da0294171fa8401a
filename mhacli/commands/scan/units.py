"""Units: fixed groups of consecutive documents that are computed, written and repeated as a whole; and the files of their sums.

The file of sums is the one from which units are merged: the statistics of heads in each document, sums over documents, sinks and
strong cells.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np

from mhacli.errors import bad_file
from mhacli.io.data import decode, load_json, plain
from mhacli.io.safetensors import METADATA_KEY, read_tensor_file
from mhacli.record.arrays import Array
from mhacli.record.corpus import BadEntry, CorpusCell, CorpusHead, named
from mhacli.record.effect import EFFECT_NUMBERS, Effect
from mhacli.record.heads import MAX_LARGEST, STATISTICS, Averages
from mhacli.record.record import InspectedLayer
from mhacli.text.corpus import Document

UNIT_SIZE = 16
"""Documents in a unit, bad ones counted; the last unit of a corpus may have fewer."""
MAX_FILE_BYTES = 4 << 30
UnitFiles = tuple[bytes, bytes, bytes]
"""The contents of the files of a unit: rows, example and sums. The example is empty if it is not wanted or no text is good."""


class Unit(NamedTuple):
    """Consecutive documents of a corpus, by their number from 0.

    The `name` contains a digest of the settings and documents, which determine the results. With `wants_example`, the record of
    one of the documents is kept as an example.
    """

    number: int
    name: str
    documents: tuple[Document, ...]
    wants_example: bool = False

    @property
    def named(self) -> str:
        """The first and last document, for messages: `corpus.jsonl:1 to corpus.jsonl:16`."""
        first, last = self.documents[0], self.documents[-1]
        return f"{named(first.file, first.place)} to {named(last.file, last.place)}"


def units(documents: Iterable[Document], settings_digest: str) -> Iterator[Unit]:
    """The units of a corpus in order. They depend only on documents and settings."""
    remaining = iter(documents)
    for number in count():
        members = tuple(islice(remaining, UNIT_SIZE))
        if not members:
            return
        yield Unit(number, unit_name(number, members, settings_digest), members)


def unit_name(number: int, documents: Iterable[Document], settings_digest: str) -> str:
    """The number, so that names sort like the documents, and a digest of settings and documents."""
    text = "\n".join([settings_digest, *map(document_digest, documents)])
    return f"{number:08d}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def number_of(unit_name: str) -> int:
    """The number of the unit of this name."""
    return int(unit_name.partition("-")[0])


def document_digest(document: Document) -> str:
    """The sha256 of a document with its place, or of a bad document with the reason."""
    kind = "BadDocument" if document.reason else "Document"  # as in the folders of earlier versions
    parts = [kind, document.file, str(document.place), document.reason or document.text]
    lengths = [str(len(part)) for part in parts]  # so that different documents have different texts
    return hashlib.sha256("\0".join([*lengths, *parts]).encode("utf-8", "surrogatepass")).hexdigest()


# --------------------------------------------------------------------------------------------------- the file of sums


@dataclass(frozen=True)
class UnitDocument:
    """A good document of a unit: its file and place in it, the sha256 of text and place, and its number of tokens."""

    file: str
    place: int
    digest: str
    n_tokens: int
    n_documents: int = 1


@dataclass(frozen=True)
class UnitFacts:
    """The documents and heads of a unit, and how its arrays are to be read.

    `rows` is the sha256 of its file of rows. `layers` are those of the longest document, with the worst result of each check over
    all documents; empty if no document is good. `identical` says whether the model's outputs were the same bits without
    inspection.

    The array `statistics` `[statistic, document, head]` is float64, NaN for a missing value, and `statistics` names its first
    axis; `kinds` `[document, head]` are indices into `HEAD_TYPES`. Sums over documents are `uniform` `[statistic, head]` for
    uniform attention, over `uniform_counts` documents, and `profile` and `uniform_profile` `[head, step]`. With spans there are
    `span_mass` and `uniform_span_mass` `[head, span, span]`, over `span_counts` `[span, span]` documents.
    """

    number: int
    settings: str
    device: str
    rows: str
    documents: tuple[UnitDocument, ...]
    bad: tuple[BadEntry, ...]
    statistics: tuple[str, ...]
    heads: tuple[CorpusHead, ...]
    layers: tuple[InspectedLayer, ...]
    identical: bool

    @property
    def n_tokens(self) -> int:
        """The tokens of all good documents."""
        return sum(document.n_tokens for document in self.documents)


def sums_to_bytes(facts: UnitFacts, arrays: Mapping[str, Array]) -> bytes:
    """The contents of the file."""
    from safetensors.numpy import save

    facts_text = json.dumps(plain(facts), separators=(",", ":"), allow_nan=False)
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    document = {"facts": facts_text, "digest": _digest(facts_text, contiguous)}
    return save(contiguous, metadata={METADATA_KEY: json.dumps(document)})


def read_sums(path: str) -> tuple[UnitFacts, Mapping[str, Array]]:
    """The facts and arrays in a file. Raises `MhaError` for a missing or damaged file."""
    from safetensors.numpy import load

    file = read_tensor_file(path, MAX_FILE_BYTES)
    document = file.metadata if isinstance(file.metadata, dict) else {}
    facts_text, arrays = str(document.get("facts")), load(file.data)
    if document.get("digest") != _digest(facts_text, arrays):
        raise bad_file(path, f"{path} is damaged: its content is not what was written")
    return decode(UnitFacts, load_json(facts_text, path), path), arrays


def _digest(facts_text: str, arrays: Mapping[str, Array]) -> str:
    digest = hashlib.sha256(facts_text.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


# --------------------------------------------------------------------------------------------- statistics of documents

PATTERN, UNIFORM_AT_OFFSET = "pattern_", "uniform_at_offset"
"""The prefix of the names of conditions, as in tables; and the name of the uniform weight at a head's strongest distance."""
WITHOUT_MEAN = ("offset", "at_offset", UNIFORM_AT_OFFSET)
"""Statistics without a mean over documents: they belong to a distance that may differ between documents."""
EFFECTS = tuple(name for name in EFFECT_NUMBERS if name != "first_order")
"""The numbers of a removal: fields of `Effect`."""
EARLIER_EFFECTS = ("direct", "later")
"""Numbers of removals in the units of earlier versions, which are not merged."""


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


def add_sum(sums: dict[str, Array], name: str, array: Array) -> None:
    """Adds an array to the sum of this name. The shorter of the two is padded with zeros in its last axis."""
    if name in sums:
        width = max(sums[name].shape[-1], array.shape[-1])
        array = widened(sums[name], width) + widened(array, width)
    sums[name] = array


def widened(array: Array, width: int) -> Array:
    """The array padded with zeros in its last axis."""
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])])


def strongest(cells: Sequence[CorpusCell]) -> list[CorpusCell]:
    """The cells with the largest ratio to uniform; among equal ones, the first."""
    return sorted(cells, key=lambda cell: -cell.lift)[:MAX_LARGEST]
