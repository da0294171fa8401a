"""Sums of the statistics of heads over many documents or passes, from which their means follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mhacli.record.arrays import Array
from mhacli.record.heads import Averages, HeadStatistics, with_kind

HeadKey = tuple[int, str, int]
"""The layer, the module and the number of a head."""
CONDITION = "pattern_"
"""The prefix of the names of conditions, as in tables."""
WINDOWS = ("window_50", "window_90", "window_99")
MEANS = (
    "entropy", "entropy_share", "effective_keys", "participation", "distance", *WINDOWS, "sink", "leading", "diagonal",
    "previous", "duplicate", "induction", "near", "learned_sink",
)  # fmt: skip
"""The statistics that have a mean, besides conditions; the strongest distance has none."""


def key_of(head: HeadStatistics) -> HeadKey:
    """The key of a head."""
    return head.layer, head.attention, head.head


def values(heads: Sequence[Any], names: Iterable[str]) -> Array:
    """The statistics `[statistic, head]` of heads, or of their removals, in float64; NaN for None."""

    def value(head: Any, name: str) -> Any:
        if name.startswith(CONDITION):
            return head.patterns[int(name.removeprefix(CONDITION)) - 1] if head.patterns else None
        return getattr(head, name)

    return np.array([[value(head, name) for head in heads] for name in names], dtype=np.float64)  # None becomes NaN


@dataclass
class HeadTotals:
    """Sums by head and name. `names` are those of the statistics in the arrays `means`, `[attention or uniform, sum or weight,
    statistic]`; `max_score` is the largest score, and every other array a sum."""

    names: tuple[str, ...]
    of_head: dict[HeadKey, dict[str, Array]] = field(default_factory=dict)

    def add(self, head: HeadStatistics, weights: Array | float = 1.0, **sums: Array) -> None:
        """Adds a head in one document or pass, whose statistics count by their `weights` `[statistic]`, and other sums."""
        numbers = values([head, head.uniform or Averages()], self.names).T
        known = np.isfinite(numbers)
        sums["means"] = np.stack([np.where(known, numbers, 0.0) * weights, known * weights], axis=1)
        sums["max_score"] = values([head], ["max_score"])[0, 0]
        self._add(key_of(head), sums)

    def merge(self, other: HeadTotals) -> None:
        """Adds the sums of other documents or passes."""
        for key, sums in other.of_head.items():
            self._add(key, sums)

    def _add(self, key: HeadKey, sums: Mapping[str, Array]) -> None:
        mine = self.of_head.setdefault(key, {})
        for name, array in sums.items():
            if name not in mine:
                mine[name] = array
            elif name == "max_score":
                mine[name] = np.fmax(mine[name], array)
            else:
                width = max(mine[name].shape[-1], array.shape[-1])
                mine[name] = widened(mine[name], width) + widened(array, width)

    def head(
        self, key: HeadKey, offset: int | None = None, at_offset: tuple[float | None, float | None] = (None, None)
    ) -> HeadStatistics:
        """The means of a head with the type that follows from them, the largest score, and its strongest distance if it has one,
        with the weights of attention and of uniform attention there."""
        layer, attention, head = key
        own, uniform = (self._fields(*sums) for sums in self.of_head[key]["means"])
        largest = float(self.of_head[key]["max_score"])
        return with_kind(
            HeadStatistics(
                layer=layer,
                attention=attention,
                head=head,
                max_score=None if np.isnan(largest) else largest,
                uniform=Averages(**uniform, at_offset=at_offset[1]),
                offset=offset,
                at_offset=at_offset[0],
                **own,
            )
        )

    def _fields(self, sums: Array, weights: Array) -> dict[str, Any]:
        """Means as fields of `Averages`: distances are whole numbers, and conditions are one field."""
        means = {name: total / n if n else None for name, total, n in zip(self.names, sums, weights, strict=True)}
        means |= {name: round(mean) for name, mean in means.items() if name in WINDOWS and mean is not None}
        conditions = tuple(means.pop(name) for name in self.names if name.startswith(CONDITION))
        return {**means, "patterns": conditions}


def widened(array: Array, width: int) -> Array:
    """The array padded with zeros in its last axis."""
    more = width - array.shape[-1]
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, more)]) if more else array
