"""What a record says of a corpus: how the statistics of its heads spread over the documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mhacli.results.record.head_statistics import Kind

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""The parts of the documents up to which quantiles are given."""
CONFIDENCE = 0.95
"""Of intervals of means."""
MAX_LISTED_BAD = 1000


@dataclass(frozen=True)
class Spread:
    """How a statistic of a head spreads over the `n` documents in which it has a value.

    `std` is that of a sample. `low` and `high` are the bootstrap interval of the mean, with the probability `CONFIDENCE`.
    `quantiles` are values of documents, at `QUANTILES`. What `n` documents do not give is None.
    """

    statistic: str
    n: int
    mean: float
    std: float | None
    low: float | None
    high: float | None
    quantiles: tuple[float, ...]


@dataclass(frozen=True)
class TokenSink:
    """A token that is a sink of a head in so many `documents`: where it is, `share` is its mean part of all attention."""

    token: str
    documents: int
    share: float


@dataclass(frozen=True)
class CorpusCell:
    """An attention weight, `share`, in a document: `lift` is its ratio to that of the query's uniform row."""

    file: str
    place: int
    query: int
    key: int
    query_token: str
    key_token: str
    share: float
    lift: float


@dataclass(frozen=True)
class BadEntry:
    """A document that was left out, and why. `place` is its line or row from 1, or 0 for a whole file."""

    file: str
    place: int
    reason: str

    @property
    def named(self) -> str:
        """`corpus.jsonl:17`."""
        return named(self.file, self.place)


def named(file: str, place: int) -> str:
    """A document as messages name it: `corpus.jsonl:17`, or the file that it is."""
    return f"{file}:{place}" if place else file


@dataclass(frozen=True)
class CorpusHead:
    """One head over all documents. `kinds` says in how many documents it is of which type, `agree` in what part of them it is
    of the type that its mean statistics give it."""

    layer: int
    attention: str
    head: int
    agree: float
    kinds: Mapping[Kind, int] = field(hash=False)
    spreads: tuple[Spread, ...]
    sinks: tuple[TokenSink, ...]
    cells: tuple[CorpusCell, ...]

    def spread(self, statistic: str) -> Spread | None:
        """The spread of a statistic, None where no document has a value."""
        return next((spread for spread in self.spreads if spread.statistic == statistic), None)


@dataclass(frozen=True)
class CorpusSummary:
    """The documents that were scanned, and the heads over them, in the order of the record's `heads`.

    `n_tokens` are those of the good documents, `longest` the most of one. `bad` has the first `MAX_LISTED_BAD` of the `n_bad`
    documents that were left out. `example_file` and `example_place` say whose arrays the record has. `devices` are the kinds
    of devices that computed.
    """

    n_documents: int
    n_tokens: int
    n_bad: int
    longest: int
    example_file: str
    example_place: int
    devices: tuple[str, ...]
    heads: tuple[CorpusHead, ...]
    bad: tuple[BadEntry, ...] = ()

    @property
    def example_named(self) -> str:
        """`corpus.jsonl:17`."""
        return named(self.example_file, self.example_place)
