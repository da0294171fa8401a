"""What changes in what is said of each head: its kind, and every mean."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from mhacli.results.diff.result import HeadChange, StatisticChange
from mhacli.results.record.heads import STATISTICS, HeadStatistics

_ORDER = {"weight": 0, "fraction": 1}
CHANGES = (
    *sorted((row for row in STATISTICS if row.is_change), key=lambda row: _ORDER[row.unit]),
    *(row for row in STATISTICS if not row.is_change),
)
"""The statistics in the order in which changes are listed: those that say how far a head changed come first."""
UNIT_OF = {row.field: row.unit for row in STATISTICS}
SIZES = frozenset(row.field for row in STATISTICS if row.is_change)
"""Statistics from 0 to 1, by which changes are ordered."""

_Heads = Sequence[tuple[HeadStatistics, HeadStatistics]]
"""Heads that belong together, of one layer."""


def changed_heads(layers: Sequence[tuple[str, _Heads]], tolerance: float) -> tuple[tuple[HeadChange, ...], ...]:
    """For each layer, given by its label and heads, those heads of which something changed by more than the tolerance, which is
    relative to the largest value of that statistic among all heads of both."""
    scales = {
        name: _scale([pair for _, heads in layers for pair in heads], name) for name in (row.field for row in CHANGES)
    }
    return tuple(tuple(_changed(label, heads, scales, tolerance)) for label, heads in layers)


def _changed(label: str, heads: _Heads, scales: Mapping[str, float], tolerance: float) -> Iterator[HeadChange]:
    for a, b in heads:
        changes = tuple(_changes(a, b, scales, tolerance))
        if changes or a.kind != b.kind:
            yield HeadChange(label, a.head, a.kind, b.kind, _size(changes), changes)


def by_size(changes: Sequence[HeadChange]) -> tuple[HeadChange, ...]:
    """The largest changes first: those where a number is gone or new, then by their shares."""
    return tuple(sorted(changes, key=lambda change: -math.inf if change.size is None else -change.size))


def _changes(
    a: HeadStatistics, b: HeadStatistics, scales: Mapping[str, float], tolerance: float
) -> Iterator[StatisticChange]:
    for name in (row.field for row in CHANGES):
        one, other = getattr(a, name), getattr(b, name)
        if one is None and other is None:
            continue
        if one is None or other is None or abs(other - one) > tolerance * scales[name]:
            yield StatisticChange(name, one, other)


def _scale(heads: _Heads, name: str) -> float:
    values = (getattr(head, name) for both in heads for head in both)
    return max((abs(value) for value in values if value is not None), default=0.0)


def _size(changes: Sequence[StatisticChange]) -> float | None:
    """The largest change of a share."""
    if any((change.a is None) != (change.b is None) for change in changes):
        return None
    return max((abs((c.b or 0.0) - (c.a or 0.0)) for c in changes if c.name in SIZES), default=0.0)
