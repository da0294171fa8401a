"""The statistics of heads as arrays: which there are, under which names, and their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np

from mhacli.results.columns import EFFECT_NUMBERS
from mhacli.results.record.arrays import Array
from mhacli.results.record.effect import Effect
from mhacli.results.record.head_statistics import STATISTICS, Averages

PATTERN, UNIFORM_AT_OFFSET = "pattern_", "uniform_at_offset"
"""What the names of conditions begin with, as in tables; and the uniform weight at a head's own strongest distance."""
_OF_ONE_DOCUMENT = ("offset", "at_offset", "certainty")
"""Statistics of which no mean over documents is taken: they are of a distance, or a type, that may be another in each."""
EFFECTS = tuple(name for name in EFFECT_NUMBERS if name != "first_order")
"""What removing a head changes: fields and properties of `Effect`."""


def statistic_names(n_patterns: int) -> tuple[str, ...]:
    """What is kept of every head in every document."""
    names = (row.field for row in STATISTICS if row.field != "certainty")
    return (*names, *_patterns(n_patterns), UNIFORM_AT_OFFSET)


def spread_names(n_patterns: int) -> tuple[str, ...]:
    """Those whose spread over the documents has a meaning."""
    names = (row.field for row in STATISTICS if row.field not in _OF_ONE_DOCUMENT)
    return (*names, *_patterns(n_patterns))


def uniform_names(n_patterns: int) -> tuple[str, ...]:
    """What is known of uniform attention, whose mean over the documents is taken."""
    names = (field.name for field in fields(Averages) if field.name not in (*_OF_ONE_DOCUMENT, "patterns"))
    return (*names, *_patterns(n_patterns))


def _patterns(n: int) -> tuple[str, ...]:
    return tuple(f"{PATTERN}{number + 1}" for number in range(n))


def values(heads: Sequence[Sequence[Averages | Effect]], names: Sequence[str]) -> Array:
    """The statistics `[statistic, document, head]` of heads, or of their removal, in documents; NaN where there is no value."""
    numbers = [[list(map(_getter(name), of)) for of in heads] for name in names]
    return np.array(numbers, dtype=np.float64)  # which makes NaN of None


def _getter(name: str) -> Callable[[Any], float | None]:
    """What takes a statistic from a head."""
    if name.startswith(PATTERN):
        index = int(name.removeprefix(PATTERN)) - 1
        return lambda head: head.patterns[index]
    if name == UNIFORM_AT_OFFSET:
        return lambda head: None if head.uniform is None else head.uniform.at_offset
    return attrgetter(name)
