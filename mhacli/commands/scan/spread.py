"""The spread of numbers over documents: exact sums, quantiles and a bootstrap interval, bit for bit equal on all machines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from operator import truediv

import numpy as np

from mhacli.record.arrays import Array
from mhacli.record.corpus import CONFIDENCE, QUANTILES, Spread

N_RESAMPLES, SEED = 1000, 0
_BLOCK = 2048
"""The number of documents whose resampling counts are drawn together."""
_EXACT_BITS = 52
"""Integers of up to this number of bits, and their sums, are exact in float64."""
_MOST_COUNT = 20
"""The limit of how often a document is drawn; a larger count has a probability below 1e-18."""


def spreads(statistic: str, values: Array) -> Iterator[tuple[int, Spread]]:
    """Each column of `values` `[document, head]` with its spread, without columns of NaN, which stands where a document has no
    value."""
    intervals = _intervals(values)
    for number in np.flatnonzero(np.isfinite(values).any(axis=0)).tolist():
        ordered = np.sort(values[np.isfinite(values[:, number]), number])
        n = len(ordered)
        mean = math.fsum(ordered.tolist()) / n
        std = low = high = None
        if n > 1:
            std = math.sqrt(math.fsum(((ordered - mean) ** 2).tolist()) / (n - 1))
            low, high = intervals[:, number].tolist()
        places = [math.ceil(quantile * n) - 1 for quantile in QUANTILES]
        quantiles = tuple(ordered[places].tolist())
        yield number, Spread(statistic, n, mean, std, low, high, quantiles)


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
    for start in range(0, len(values), _BLOCK):
        rows = slice(start, start + _BLOCK)
        n_rows = len(integers[rows])
        weights = _counts(start // _BLOCK)[:, :n_rows].astype(np.float64)
        totals += weights @ integers[rows]
        counts += weights @ is_finite[rows].astype(np.float64)
    with np.errstate(invalid="ignore"):  # a resample may contain no document
        means = np.sort(np.ldexp(totals, -shift) / counts, axis=0)
    n_finite = np.isfinite(means).sum(axis=0)
    left_out = ((1 - CONFIDENCE) / 2 * n_finite).astype(np.int64)
    return np.take_along_axis(means, np.stack([left_out, np.maximum(n_finite - 1 - left_out, 0)]), axis=0)


@lru_cache(maxsize=16)
def _counts(number: int) -> Array:
    """How often each resample holds each document of a block, `[resample, document]`, from raw random bits, which are the same in
    every version of numpy."""
    bits = np.random.PCG64([SEED, number]).random_raw(N_RESAMPLES * _BLOCK).reshape(N_RESAMPLES, _BLOCK)
    probabilities = accumulate(range(1, _MOST_COUNT - 1), truediv, initial=1 / math.e)  # Poisson with mean 1
    cumulative = [min(int(total * 2**64), 2**64 - 1) for total in accumulate(probabilities)]
    return np.searchsorted(np.array(cumulative, np.uint64), bits, side="right").astype(np.uint8)
