"""`mha diff` as a Python function."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from mhacli.commands.diff.compare import compare
from mhacli.commands.diff.result import Differences
from mhacli.errors import UsageError
from mhacli.record.display import Shown
from mhacli.record.record import Record
from mhacli.record.storage import load


@dataclass(frozen=True, repr=False)
class RecordDiff(Shown):
    """The differences of two records, the first of which is the reference. `names` are their labels."""

    differences: Differences
    records: tuple[Record, Record]
    names: tuple[str, str]

    def views(self, screen: Any) -> Iterator[Any]:
        """What `mha diff` prints on a screen."""
        from mhacli.commands.diff.views.view import diff_view
        from mhacli.render.base.options import ViewOptions

        options = ViewOptions(view="heatmap")
        yield diff_view(self.differences, self.records, self.names, options=options, screen=screen)

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
        from mhacli.commands.diff.views.json import diff_document

        document = diff_document(self.differences, self.records, self.names)
        plain: dict[str, Any] = json.loads(json.dumps(document, allow_nan=False))
        return plain


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
