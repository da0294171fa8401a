"""Confidence intervals of medians, for any distribution of the samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cache

CONFIDENCE = 0.95
"""The probability with which an interval contains the true median."""
MIN_ROUNDS = 6
"""The fewest samples whose interval reaches this probability."""


Interval = tuple[float, float, float]
"""A median, or a ratio of two medians, and the ends of its interval."""


def median_interval(samples: Sequence[float]) -> Interval:
    """The median and its 95 % interval, for any distribution: from the k-th smallest to the k-th largest sample.

    With fewer than six samples, the smallest and the largest. Source: David and Nagaraja
    2003, "Order Statistics", section 7.1.

    >>> median_interval([4.0, 1.0, 3.0, 2.0, 9.0, 5.0])
    (3.5, 1.0, 9.0)
    """
    ordered = sorted(samples)
    k = _rank(len(ordered))
    return statistics.median(ordered), ordered[k], ordered[-1 - k]


def paired_ratio(samples: Sequence[float], reference: Sequence[float]) -> Interval:
    """The ratio of two medians from the same rounds, with its interval. Effects on a whole round cancel out.

    The interval is that of the median of the ratios per round, widened to include the ratio of the medians.

    >>> paired_ratio([2.0, 6.0, 3.0], [1.0, 2.0, 3.0])
    (1.5, 1.0, 3.0)
    """
    _, low, high = median_interval([ours / theirs for ours, theirs in zip(samples, reference, strict=True)])
    ratio = statistics.median(samples) / statistics.median(reference)
    return ratio, min(low, ratio), max(high, ratio)


def ratio_text(ratio: float) -> str:
    """A ratio in three digits: `0.98`, `3.40`, `24.6`, `1,234`."""
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:,.0f}"


@cache
def _rank(n: int) -> int:
    """The largest number of samples to drop at each end without losing the confidence."""
    k, exactly, at_most = 0, 1, 1  # counts of outcomes with exactly k samples below the median, and with at most k
    while k + 1 <= (n - 1) // 2:
        exactly = exactly * (n - k) // (k + 1)
        at_most += exactly
        if 1 - at_most / 2 ** (n - 1) < CONFIDENCE:
            break
        k += 1
    return k
