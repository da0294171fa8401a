"""The statistics of heads over many passes: means over the queries of all passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mhacli.record.heads import Averages, HeadStatistics, with_kind
from mhacli.record.record import Record, layer_prefix
from mhacli.record.tables import HeadTable

_MEANS = (
    "entropy", "effective_keys", "participation", "distance", "sink", "leading", "diagonal", "previous", "duplicate",
    "induction", "near", "learned_sink",
)  # fmt: skip
"""Means over the queries that see a key; `entropy_share` is one over those that see more than one."""


@dataclass
class _Sums:
    """The sum of each mean times the number of its queries, and these numbers."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, means: Averages, counts: Mapping[str, int]) -> None:
        """Adds a pass."""
        for name, n in counts.items():
            value = getattr(means, name)
            if value is not None and n:
                self.sums[name] = self.sums.get(name, 0.0) + value * n
                self.counts[name] = self.counts.get(name, 0) + n

    @property
    def means(self) -> dict[str, Any]:
        """The means over all passes."""
        return {name: self.sums[name] / n for name, n in self.counts.items()}


@dataclass
class HeadSums:
    """The sums of the heads of many records, by layer, module and number."""

    _heads: dict[tuple[int, str, int], tuple[_Sums, _Sums]] = field(default_factory=dict)
    _largest: dict[tuple[int, str, int], float] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Adds a record."""
        for index, layer in enumerate(record.layers):
            visible = np.asarray(record.arrays[f"{layer_prefix(index)}visible"])
            heads = [head for head in record.heads if (head.layer, head.attention) == (layer.layer, layer.name)]
            for row, head in enumerate(heads):
                n_keys = visible[:, row if visible.shape[1] > 1 else 0]
                self._add(head, int((n_keys > 0).sum()), int((n_keys > 1).sum()))

    def _add(self, head: HeadStatistics, n_queries: int, n_choosing: int) -> None:
        place = (head.layer, head.attention, head.head)
        counts = dict.fromkeys(_MEANS, n_queries) | {"entropy_share": n_choosing}
        sums, uniform = self._heads.setdefault(place, (_Sums(), _Sums()))
        sums.add(head, counts)
        uniform.add(head.uniform or Averages(), counts)
        if head.max_score is not None:
            self._largest[place] = max(head.max_score, self._largest.get(place, head.max_score))

    def table(self) -> HeadTable:
        """The heads with their means, types and largest scores."""
        return HeadTable(
            with_kind(
                HeadStatistics(
                    layer=place[0],
                    attention=place[1],
                    head=place[2],
                    max_score=self._largest.get(place),
                    uniform=Averages(**uniform.means),
                    **sums.means,
                )
            )
            for place, (sums, uniform) in self._heads.items()
        )
