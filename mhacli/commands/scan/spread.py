"""The spread of numbers over documents: exact sums, quantiles and a bootstrap interval, bit for bit equal on all machines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from mhacli.record.arrays import Array
from mhacli.record.corpus import CONFIDENCE, QUANTILES, Spread

N_RESAMPLES, SEED = 1000, 0
_BLOCK, _AT_ONCE = 2048, 256
"""The number of documents whose resampling counts are drawn together, and of those summed together."""
_EXACT_BITS = 52
"""Integers of up to this number of bits, and their sums, are exact in float64."""
_MOST_COUNT = 20
"""The limit of how often a document is drawn; a larger count has a probability below 1e-18."""


def spreads(statistic: str, values: Array) -> list[Spread | None]:
    """The spread of each column of `values` `[document, head]`, NaN where a document has no value; None for a column of NaN."""
    n_documents = np.isfinite(values).sum(axis=0)
    ordered, bounds = np.sort(values, axis=0), _intervals(values)  # NaN comes last
    return [
        _spread(statistic, ordered[:n, head], bounds[:, head]) if n else None
        for head, n in enumerate(n_documents.tolist())
    ]


def _spread(statistic: str, ordered: Array, bounds: Array) -> Spread:
    """The spread of sorted numbers."""
    n = len(ordered)
    mean = math.fsum(ordered.tolist()) / n
    square = math.fsum(((ordered - mean) ** 2).tolist())
    low, high = (None, None) if n < 2 else bounds.tolist()
    return Spread(
        statistic,
        n,
        mean,
        math.sqrt(square / (n - 1)) if n > 1 else None,
        low,
        high,
        tuple(float(ordered[math.ceil(quantile * n) - 1]) for quantile in QUANTILES),
    )


def _intervals(values: Array) -> Array:
    """The bounds `[bound, head]` that contain the mean of a fraction `CONFIDENCE` of the resamples.

    The count of each document is Poisson with mean 1, the limit of resampling with replacement for many documents.
    Source: Hanley and MacGibbon 2006, "Creating non-parametric bootstrap samples using Poisson frequencies".
    Numbers are rounded to integers small enough that their sums are exact, in whatever order a library adds them.
    """
    is_finite = np.isfinite(values)
    filled = np.where(is_finite, values, 0.0)
    _, exponent = np.frexp(np.abs(filled).max(axis=0, initial=0.0))
    shift = _EXACT_BITS - math.ceil(math.log2(4 * len(values) + 64)) - exponent
    integers = np.rint(np.ldexp(filled, shift))
    totals, counts = np.zeros((2, N_RESAMPLES, values.shape[1]))
    for start, weights in _weights(len(values)):
        rows = slice(start, start + weights.shape[1])
        totals += weights @ integers[rows]
        counts += weights @ is_finite[rows].astype(np.float64)
    with np.errstate(invalid="ignore"):  # a resample may contain no document
        means = np.sort(np.ldexp(totals, -shift) / counts, axis=0)
    n_finite = np.isfinite(means).sum(axis=0)
    left_out = ((1 - CONFIDENCE) / 2 * n_finite).astype(np.int64)
    indices = np.stack([left_out, np.maximum(n_finite - 1 - left_out, 0)])
    bounds: Array = np.take_along_axis(means, indices, axis=0)
    return bounds


def _weights(n_documents: int) -> Iterator[tuple[int, Array]]:
    """The counts `[resample, document]` of successive groups of documents, each with the index of its first document."""
    for start in range(0, n_documents, _AT_ONCE):
        number, offset = divmod(start, _BLOCK)
        yield start, _draws(number)[:, offset : offset + min(_AT_ONCE, n_documents - start)].astype(np.float64)


@lru_cache(maxsize=16)
def _draws(number: int) -> Array:
    """The counts of a block of documents, from raw random bits, which are the same in every version of numpy."""
    source, limits = np.random.PCG64([SEED, number]), _cumulative()
    rows = (np.searchsorted(limits, source.random_raw(_BLOCK), side="right") for _ in range(N_RESAMPLES))
    return np.stack([row.astype(np.uint8) for row in rows])


def _cumulative() -> Array:
    """The distribution function of a Poisson variable of mean 1 at 0, 1, …, in units of 2⁻⁶⁴."""
    term = total = 1 / math.e
    parts = []
    for count in range(1, _MOST_COUNT):
        parts.append(min(int(total * 2**64), 2**64 - 1))
        term /= count
        total += term
    return np.array(parts, dtype=np.uint64)
