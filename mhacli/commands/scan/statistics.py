"""The statistics of heads as arrays: their names and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np

from mhacli.record.arrays import Array
from mhacli.record.columns import EFFECT_NUMBERS
from mhacli.record.effect import Effect
from mhacli.record.heads import STATISTICS, Averages

PATTERN, UNIFORM_AT_OFFSET = "pattern_", "uniform_at_offset"
"""The prefix of the names of conditions, as in tables; and the name of the uniform weight at a head's strongest distance."""
_OF_ONE_DOCUMENT = ("offset", "at_offset", "certainty")
"""Statistics without a mean over documents: they belong to a distance or type that may differ between documents."""
EFFECTS = tuple(name for name in EFFECT_NUMBERS if name != "first_order")
"""The numbers of a removal: fields and properties of `Effect`."""


def statistic_names(n_patterns: int) -> tuple[str, ...]:
    """The statistics stored for every head in every document."""
    names = (row.field for row in STATISTICS if row.field != "certainty")
    return (*names, *_patterns(n_patterns), UNIFORM_AT_OFFSET)


def spread_names(n_patterns: int) -> tuple[str, ...]:
    """The statistics whose spread over documents is meaningful."""
    names = (row.field for row in STATISTICS if row.field not in _OF_ONE_DOCUMENT)
    return (*names, *_patterns(n_patterns))


def uniform_names(n_patterns: int) -> tuple[str, ...]:
    """The statistics of uniform attention that are averaged over documents."""
    names = (field.name for field in fields(Averages) if field.name not in (*_OF_ONE_DOCUMENT, "patterns"))
    return (*names, *_patterns(n_patterns))


def _patterns(n: int) -> tuple[str, ...]:
    return tuple(f"{PATTERN}{number + 1}" for number in range(n))


def values(heads: Sequence[Sequence[Averages | Effect]], names: Sequence[str]) -> Array:
    """The statistics `[statistic, document, head]` of heads, or of their removals, in documents; NaN for None."""
    numbers = [[list(map(_getter(name), document_heads)) for document_heads in heads] for name in names]
    return np.array(numbers, dtype=np.float64)  # None becomes NaN


def _getter(name: str) -> Callable[[Any], float | None]:
    """The function that reads a statistic of a head."""
    if name.startswith(PATTERN):
        index = int(name.removeprefix(PATTERN)) - 1
        return lambda head: head.patterns[index]
    if name == UNIFORM_AT_OFFSET:
        return lambda head: None if head.uniform is None else head.uniform.at_offset
    return attrgetter(name)
