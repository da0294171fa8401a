"""How numbers spread over documents: exact sums and quantiles, and a bootstrap interval, the same bits on every machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from mhacli.results.record.arrays import Array
from mhacli.results.record.corpus import CONFIDENCE, QUANTILES, Spread

N_RESAMPLES, SEED = 1000, 0
_BLOCK, _AT_ONCE = 2048, 256
"""Documents whose weights are drawn together, and those that are added up together."""
_EXACT_BITS = 52
"""Whole numbers of so many bits, and their sums, are exact in float64."""
_MOST_COUNT = 20
"""No document is drawn more often: the probability is below 1e-18."""


def spreads(statistic: str, values: Array) -> list[Spread | None]:
    """The spread of each column of `values` `[document, head]`, NaN where a document has no value; None for a column of NaN."""
    n_of = np.isfinite(values).sum(axis=0)
    ordered, bounds = np.sort(values, axis=0), _intervals(values)  # NaN comes last
    return [
        _spread(statistic, ordered[:n, head], bounds[:, head]) if n else None for head, n in enumerate(n_of.tolist())
    ]


def _spread(statistic: str, ordered: Array, bounds: Array) -> Spread:
    """The spread of some numbers in their order."""
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
        tuple(float(ordered[math.ceil(part * n) - 1]) for part in QUANTILES),
    )


def _intervals(values: Array) -> Array:
    """The bounds `[bound, head]` within which the mean lies in the part `CONFIDENCE` of the resamples.

    Each document is drawn so often as a Poisson variable of mean 1 says, as resampling with replacement comes to for many.
    Source: Hanley and MacGibbon 2006, "Creating non-parametric bootstrap samples using Poisson frequencies".
    Numbers are rounded to whole ones of so many bits that their sums are exact, in whatever order a library adds them.
    """
    known = np.isfinite(values)
    filled = np.where(known, values, 0.0)
    _, exponent = np.frexp(np.abs(filled).max(axis=0, initial=0.0))
    shift = _EXACT_BITS - math.ceil(math.log2(4 * len(values) + 64)) - exponent
    whole = np.rint(np.ldexp(filled, shift))
    totals, counts = np.zeros((2, N_RESAMPLES, values.shape[1]))
    for start, weights in _weights(len(values)):
        rows = slice(start, start + weights.shape[1])
        totals += weights @ whole[rows]
        counts += weights @ known[rows].astype(np.float64)
    with np.errstate(invalid="ignore"):  # a resample may have drawn no document
        means = np.sort(np.ldexp(totals, -shift) / counts, axis=0)
    n_known = np.isfinite(means).sum(axis=0)
    left_out = ((1 - CONFIDENCE) / 2 * n_known).astype(np.int64)
    places = np.stack([left_out, np.maximum(n_known - 1 - left_out, 0)])
    bounds: Array = np.take_along_axis(means, places, axis=0)
    return bounds


def _weights(n_documents: int) -> Iterator[tuple[int, Array]]:
    """How often each document is drawn in each resample, `[resample, document]`, some documents at a time from the first on."""
    for start in range(0, n_documents, _AT_ONCE):
        number, place = divmod(start, _BLOCK)
        yield start, _draws(number)[:, place : place + min(_AT_ONCE, n_documents - start)].astype(np.float64)


@lru_cache(maxsize=16)
def _draws(number: int) -> Array:
    """The counts of a block of documents. Only raw bits are drawn, which every version of numpy gives alike."""
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
