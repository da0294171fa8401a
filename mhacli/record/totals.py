"""Sums of the statistics of heads over many documents or passes, from which their means follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mhacli.io.data import Array
from mhacli.record.heads import Averages, HeadStatistics, with_kind

HeadKey = tuple[int, str, int]
"""The layer, the module and the number of a head."""
CONDITION = "pattern_"
"""The prefix of the names of conditions, as in tables."""
LARGEST = "max_score"
"""The statistic of which the largest value is kept besides the mean."""
WINDOWS = ("window_50", "window_90", "window_99")
SUMMED = (
    "entropy", "entropy_share", "effective_keys", "participation", "distance", *WINDOWS, "sink", "leading", "diagonal",
    "previous", "duplicate", "induction", "near", "learned_sink", LARGEST,
)  # fmt: skip
"""The statistics that are summed, besides conditions. The strongest distance has no mean."""


def values(heads: Sequence[Any], names: Iterable[str]) -> Array:
    """The statistics `[statistic, head]` of heads, or of their removals, in float64; NaN for None."""

    def value(head: Any, name: str) -> Any:
        if name.startswith(CONDITION):
            return head.patterns[int(name.removeprefix(CONDITION)) - 1] if head.patterns else None
        return getattr(head, name, None)

    return np.array([[value(head, name) for head in heads] for name in names], dtype=np.float64)  # None becomes NaN


@dataclass
class HeadTotals:
    """Sums over documents or passes. The first axis of each array of `sums` is that of the heads `keys`; their last axes may
    have different lengths, and zeros fill them up.

    `means` are `[head, attention or uniform, sum or weight, statistic]`, for the statistics `names`. `max_score` is the largest
    score. Every other array is a sum.
    """

    names: tuple[str, ...] = SUMMED
    keys: list[HeadKey] = field(default_factory=list)
    sums: dict[str, Array] = field(default_factory=dict)

    def add(self, heads: Sequence[HeadStatistics], weights: Array | float = 1.0, **sums: Array) -> None:
        """Adds the heads of a document or pass, whose statistics count by their `weights` `[statistic, head]`, and other
        sums."""
        numbers = np.stack([values(heads, self.names), values([h.uniform or Averages() for h in heads], self.names)])
        known = np.isfinite(numbers)
        means = np.stack([np.where(known, numbers, 0.0) * weights, known * weights])
        largest = numbers[0, self.names.index(LARGEST), :, None]
        keys = [(head.layer, head.attention, head.head) for head in heads]
        self.merge(HeadTotals(self.names, keys, {"means": means.transpose(3, 1, 0, 2), LARGEST: largest, **sums}))

    def merge(self, other: HeadTotals) -> None:
        """Adds the sums of other documents or passes, which may be of other heads."""
        number_of = {key: number for number, key in enumerate(dict.fromkeys([*self.keys, *other.keys]))}
        self.keys = [*number_of]
        numbers = [number_of[key] for key in other.keys]
        for name, array in other.sums.items():
            mine = self.sums.get(name, array[:0])
            shape = (len(self.keys), *array.shape[1:-1], max(mine.shape[-1], array.shape[-1]))
            total = np.full(shape, np.nan if name == LARGEST else 0, array.dtype)
            total[: len(mine), ..., : mine.shape[-1]] = mine
            combine = np.fmax if name == LARGEST else np.add
            before = total[numbers, ..., : array.shape[-1]]
            total[numbers, ..., : array.shape[-1]] = combine(before, array)
            self.sums[name] = total

    def head(
        self, number: int, offset: int | None = None, at_offset: tuple[float | None, float | None] = (None, None)
    ) -> HeadStatistics:
        """The means of a head with the type that follows from them, the largest score, and its strongest distance if it has one,
        with the weights of attention and of uniform attention there."""
        layer, attention, head = self.keys[number]
        means, uniform = (self._averages(*sums) for sums in self.sums["means"][number])
        largest = float(self.sums[LARGEST][number, 0])
        return with_kind(
            HeadStatistics(
                layer=layer,
                attention=attention,
                head=head,
                max_score=None if np.isnan(largest) else largest,
                uniform=Averages(**uniform, at_offset=at_offset[1]),
                offset=offset,
                at_offset=at_offset[0],
                **means,
            )
        )

    def _averages(self, sums: Array, weights: Array) -> dict[str, Any]:
        """Means as fields of `Averages`: distances are whole numbers, and conditions are one field."""
        means = {name: total / n if n else None for name, total, n in zip(self.names, sums, weights, strict=True)}
        means |= {name: round(mean) for name, mean in means.items() if name in WINDOWS and mean is not None}
        conditions = tuple(means.pop(name) for name in self.names if name.startswith(CONDITION))
        del means[LARGEST]
        return {**means, "patterns": conditions}
