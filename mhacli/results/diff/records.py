"""`mha diff` as a Python function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mhacli.errors import UsageError
from mhacli.results.diff.compare import compare
from mhacli.results.diff.result import Differences
from mhacli.results.display import Shown, document_of
from mhacli.results.record.record import Record
from mhacli.results.record.storage import load


@dataclass(frozen=True, repr=False)
class RecordDiff(Shown):
    """The differences of two records, the first of which is the reference. `names` are their labels."""

    differences: Differences
    records: tuple[Record, Record]
    names: tuple[str, str]

    def __repr__(self) -> str:
        """The verdict in a sentence."""
        return f"<RecordDiff: {self.summary}>"

    @property
    def verdict(self) -> Literal["agree", "differ", "nothing"]:
        """Whether the records agree in everything that both hold; `nothing` if they have nothing in common."""
        return self.differences.verdict

    @property
    def summary(self) -> str:
        """The result in a sentence."""
        return self.differences.summary

    def to_dict(self) -> dict[str, Any]:
        """The document that `mha diff --json` prints."""
        return document_of(self)


def diff(a: Record | str, b: Record | str, *, tolerance: float | None = None) -> RecordDiff:
    """The differences of `b` from `a`, as `mha diff` prints them. Each is a record or the path of one.

    `tolerance` is relative to the largest number of a site. 0 demands equal bits; None takes the tolerance of the
    coarser dtype. Raises `MhaError` for a file that is no record.
    """
    if tolerance is not None and tolerance < 0:
        raise UsageError(f"tolerance {tolerance:g} is negative: the least is 0")
    first, second = (load(record) if isinstance(record, str) else record for record in (a, b))
    names = a if isinstance(a, str) else "the first record", b if isinstance(b, str) else "the second record"
    return RecordDiff(compare(first, second, tolerance=tolerance), (first, second), names)
