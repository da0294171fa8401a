"""Means of the statistics of heads over passes or documents."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np

from mhacli.io.data import Array
from mhacli.record.exports import HeadTable
from mhacli.record.heads import Averages, HeadKey, HeadStatistics, where_possible, with_kind
from mhacli.record.record import Record

CONDITION = "pattern_"
"""The prefix of the names of conditions, as in tables."""
WINDOWS = ("window_50", "window_90", "window_99")
_LEAST_KEYS = {"entropy_share": 1, **dict.fromkeys(WINDOWS, np.inf)}
"""The number of keys that a query must exceed to count in a mean, if it is not 0; quantiles of the
distance have no mean."""
COUNTS = {where_possible(name): f"n_{name}_queries" for name in ("duplicate", "induction")}
"""The numbers of queries over which these statistics are means."""
MEANS = tuple(
    each.name
    for each in fields(Averages)
    if each.name not in ("offset", "at_offset", "patterns", *COUNTS.values())
)
"""The statistics that have a mean, besides conditions. The strongest distance has none."""


def mean_head(
    key: HeadKey, numbers: Mapping[str, float], uniform: Mapping[str, float]
) -> HeadStatistics:
    """A head with these means and its largest score, by statistic, the means of uniform attention,
    and the type that follows. NaN is no number.
    """

    def averages(numbers: Mapping[str, float]) -> dict[str, Any]:
        """Numbers as fields: distances and counts are whole, and conditions are one field."""
        known = {name: float(x) if np.isfinite(x) else None for name, x in numbers.items()}
        conditions = tuple(known.pop(name) for name in numbers if name.startswith(CONDITION))
        for name in (*WINDOWS, *COUNTS.values(), "offset"):
            if (distance := known.get(name)) is not None:
                known[name] = round(distance)
        return {**known, "patterns": conditions}

    place: dict[str, Any] = dict(zip(("layer", "attention", "head"), key, strict=True))
    return with_kind(
        HeadStatistics(**place, uniform=Averages(**averages(uniform)), **averages(numbers))
    )


@dataclass
class HeadSums:
    """Sums of the statistics of heads over passes. A query counts in a mean if it sees more keys
    than the statistic needs.
    """

    _sums: dict[HeadKey, Array] = field(default_factory=dict)
    _largest: dict[HeadKey, Array] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Adds the heads of a pass."""
        for layer in (each.record for each in record.attentions):
            n_keys = np.asarray(layer.arrays["visible"])
            heads = layer.heads
            n_queries = {n: (n_keys > n).sum(axis=(0, 2)) for n in {0, *_LEAST_KEYS.values()}}
            counts = [np.resize(n_queries[_LEAST_KEYS.get(name, 0)], len(heads)) for name in MEANS]
            for name, count in COUNTS.items():
                counts[MEANS.index(name)] = np.array([getattr(head, count) or 0 for head in heads])
            both = [(head, head.uniform or Averages()) for head in heads]
            rows = [[[*map(partial(getattr, each), MEANS)] for each in pair] for pair in both]
            numbers = np.array(rows, np.float64)
            weights = np.isfinite(numbers) * np.stack(counts, axis=1)[:, None]
            sums = np.stack([np.nan_to_num(numbers) * weights, weights], axis=1)
            scores = np.array([head.max_score for head in heads], np.float64)
            for head, of_head, score in zip(heads, sums, scores, strict=True):
                key = (head.layer, head.attention, head.head)
                self._sums[key] = self._sums.get(key, 0) + of_head
                self._largest[key] = np.fmax(self._largest.get(key, score), score)

    def table(self) -> HeadTable:
        """The heads with their means, and the largest score of all passes."""
        heads = []
        for key, (weighted, n) in self._sums.items():
            means = weighted / np.where(n, n, np.nan)
            of_head, uniform = (dict(zip(MEANS, row, strict=True)) for row in means)
            for name, count in COUNTS.items():
                of_head[count] = uniform[count] = n[0, MEANS.index(name)]
            of_head["max_score"] = float(self._largest[key])
            heads.append(mean_head(key, of_head, uniform))
        return HeadTable(heads)
