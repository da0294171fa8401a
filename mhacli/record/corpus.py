"""The statistics of heads over the documents of a corpus."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from .heads import Kind

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""The quantiles over documents."""
CONFIDENCE = 0.95
"""The probability of intervals of means."""
MAX_LISTED_BAD = 1000


class Spread(Struct, frozen=True):
    """The distribution of a head's statistic over the `n` documents in which it has a value.

    `std` is the sample's. `low` and `high` are the bootstrap interval of the mean with probability
    `CONFIDENCE`. `quantiles` are at `QUANTILES`. Numbers that `n` documents cannot give are None.
    """

    statistic: str
    n: int
    mean: float
    std: float | None
    low: float | None
    high: float | None
    quantiles: tuple[float, ...]


class TokenSink(Struct, frozen=True):
    """A token that is a sink of a head in `documents` documents. `share` is its mean fraction of
    all attention there.
    """

    token: str
    documents: int
    share: float


class CorpusCell(Struct, frozen=True):
    """An attention weight (`share`) in a document. `lift` is its ratio to the query's uniform
    weight. A packed text is named by the first of its `n_documents` documents.
    """

    file: str
    place: int
    query: int
    key: int
    query_token: str
    key_token: str
    share: float
    lift: float
    n_documents: int = 1


class BadEntry(Struct, frozen=True):
    """A document that was skipped, and the reason. `place` is its line or row from 1, or 0 for a
    whole file.
    """

    file: str
    place: int
    reason: str
    n_documents: int = 1

    @property
    def named(self) -> str:
        """The document's name: `corpus.jsonl:17`."""
        return named(self.file, self.place, self.n_documents)


def named(file: str, place: int, n_documents: int = 1) -> str:
    """A document's name in messages: `corpus.jsonl:17`, the file's for a whole file,
    `corpus.jsonl:17 and 3 more` for a packed text.
    """
    return (f"{file}:{place}" if place else file) + (
        f" and {n_documents - 1} more" if n_documents > 1 else ""
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusHead:
    """One head over all documents.

    `kinds` counts the documents by head type. `agree` is the fraction with the type of the mean
    statistics. The unit of a scan has the sinks and cells of its documents alone.
    """

    layer: int
    attention: str
    head: int
    agree: float = 0.0
    kinds: Mapping[Kind, int] = field(default_factory=dict, hash=False)
    spreads: tuple[Spread, ...] = ()
    sinks: tuple[TokenSink, ...]
    cells: tuple[CorpusCell, ...]

    def spread(self, statistic: str) -> Spread | None:
        """The distribution of a statistic; None if no document has a value."""
        return next((spread for spread in self.spreads if spread.statistic == statistic), None)


@dataclass(frozen=True, slots=True)
class CorpusSummary:
    """The scanned documents, and the heads over them, in the order of the record's `heads`.

    `n_tokens` and `longest` are the total and the largest length of good documents. `bad` has the
    first `MAX_LISTED_BAD` of the `n_bad` skipped documents. `example_file` and `example_place` name
    the document of the record's arrays; `example_documents` is above 1 for a packed text. `devices`
    are the types of devices used.
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
    example_documents: int = 1

    @property
    def example_named(self) -> str:
        """The example's name: `corpus.jsonl:17`."""
        return named(self.example_file, self.example_place, self.example_documents)
