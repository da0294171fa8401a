"""Confidence intervals of medians: by hand, against the standard library, and in simulated runs."""

from __future__ import annotations

import math
import random
import statistics
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhacli.results.bench.intervals import (
    CONFIDENCE,
    Interval,
    median_interval,
    paired_ratio,
    quartiles,
    reached_confidence,
)

numbers = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40)


def left_out_by(n: int) -> int:
    """How many samples at each end the interval of `n` samples leaves out."""
    found = median_interval([float(i) for i in range(n)])
    assert found.low + found.high == n - 1
    return int(found.low)


def test_by_hand_the_interval_of_a_few_samples() -> None:
    assert median_interval([4.0, 1.0, 3.0, 2.0, 9.0, 5.0]) == Interval(3.5, 1.0, 9.0)
    assert median_interval([5.0]) == Interval(5.0, 5.0, 5.0)
    assert median_interval([7.0, 3.0]) == Interval(5.0, 3.0, 7.0)
    # of nine, one may be left out at each end: 1 − 2 · (1 + 9) / 512 = 0.961; of eight, none: 1 − 2 · (1 + 8) / 256 = 0.93
    assert median_interval([9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0, 5.0]) == Interval(5.0, 2.0, 8.0)
    assert median_interval([1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0, 5.0]) == Interval(4.5, 1.0, 8.0)


@pytest.mark.parametrize(
    ("n", "reached"),
    [(1, 0), (2, 1 / 2), (3, 3 / 4), (4, 7 / 8), (5, 15 / 16), (6, 31 / 32), (7, 63 / 64), (9, 1 - 20 / 512)],
)
def test_by_hand_the_confidence_that_few_samples_reach(n: int, reached: float) -> None:
    assert reached_confidence(n) == reached


def test_six_samples_are_the_fewest_that_reach_the_confidence() -> None:
    assert all(reached_confidence(n) < CONFIDENCE for n in range(1, 6))
    assert all(reached_confidence(n) >= CONFIDENCE for n in range(6, 200))


@pytest.mark.parametrize("n", range(6, 15))
def test_the_ranks_are_the_innermost_that_hold_the_median_often_enough_over_all_draws(n: int) -> None:
    """Every sample falls below the true median or above it, evenly: all 2ⁿ ways, counted."""
    k = left_out_by(n)
    n_below = [sum(draw) for draw in product((0, 1), repeat=n)]

    def holding(rank: int) -> float:
        return sum(rank < below < n - rank for below in n_below) / 2**n

    assert reached_confidence(n) == pytest.approx(holding(k), abs=1e-12)
    assert holding(k) >= CONFIDENCE
    assert 2 * (k + 1) >= n or holding(k + 1) < CONFIDENCE


@pytest.mark.parametrize("n", [31, 100, 400])
def test_the_ranks_of_many_samples_are_near_those_of_the_normal_distribution(n: int) -> None:
    """Half a sample of the deviation's distance is for counts being whole."""
    assert left_out_by(n) == math.floor(n / 2 - 1.96 * math.sqrt(n) / 2 - 0.5)


def test_the_ranks_of_thousands_of_samples_are_found_at_once() -> None:
    assert left_out_by(3001) == math.floor(1500.5 - 1.96 * math.sqrt(3001) / 2 - 0.5)
    assert reached_confidence(3001) == pytest.approx(0.95, abs=0.002)


@pytest.mark.parametrize("n", [7, 12, 30])
@pytest.mark.parametrize("distribution", ["lognormal", "exponential"])
def test_in_simulated_runs_the_interval_holds_the_true_median(n: int, distribution: str) -> None:
    dice = random.Random(n)
    draws = {
        "lognormal": (lambda: dice.lognormvariate(0, 1), 1.0),
        "exponential": (lambda: dice.expovariate(1), math.log(2)),
    }
    draw, median = draws[distribution]
    intervals = [median_interval([draw() for _ in range(n)]) for _ in range(2000)]
    coverage = sum(found.low <= median <= found.high for found in intervals) / 2000
    assert coverage >= 0.93
    assert coverage == pytest.approx(reached_confidence(n), abs=0.015)


@given(numbers)
def test_the_median_is_the_standard_library_s_and_lies_in_its_interval(samples: list[float]) -> None:
    found = median_interval(samples)
    assert found.median == statistics.median(samples)
    assert found.low <= found.median <= found.high
    assert {found.low, found.high} <= set(samples)


@given(numbers, st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(samples: list[float], dice: random.Random) -> None:
    mixed = samples[:]
    dice.shuffle(mixed)
    assert median_interval(mixed) == median_interval(samples)
    assert quartiles(mixed) == quartiles(samples)


def test_by_hand_quartiles() -> None:
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)
    assert quartiles([1.0, 2.0]) == (1.25, 1.75)
    assert quartiles([6.0]) == (6.0, 6.0)


@given(numbers)
def test_quartiles_are_those_of_numpy(samples: list[float]) -> None:
    assert quartiles(samples) == pytest.approx(tuple(np.percentile(samples, [25, 75])))


def test_by_hand_the_ratio_of_pairs() -> None:
    assert paired_ratio([2.0, 6.0, 3.0], [1.0, 2.0, 3.0]) == Interval(3.0 / 2.0, 1.0, 3.0)


def test_the_interval_of_a_ratio_holds_the_ratio_of_the_medians_and_the_median_of_the_ratios() -> None:
    slow, fast = [10.0, 1.0, 1.0, 10.0, 10.0, 10.0, 10.0], [1.0, 1.0, 1.0, 9.0, 10.0, 10.0, 9.0]
    rounds = [a / b for a, b in zip(slow, fast, strict=True)]
    found = paired_ratio(slow, fast)
    assert found.median == statistics.median(slow) / statistics.median(fast)
    assert found.low <= min(found.median, statistics.median(rounds))
    assert found.high >= max(found.median, statistics.median(rounds))
    off = paired_ratio([1.0, 2.0, 9.0], [3.0, 1.0, 8.0])  # round by round 1/3, 2 and 9/8, the medians 2 and 3
    assert off == Interval(2 / 3, 1 / 3, 2.0)
    far = paired_ratio([1.0] * 4 + [8.0] * 5, [1.0] * 5 + [8.0] * 4)  # all rounds but one have the ratio 1
    assert far == Interval(8.0, 1.0, 8.0)


def test_a_drift_that_both_share_cancels() -> None:
    dice = random.Random(3)
    drift = [2.0 ** dice.randrange(-3, 4) for _ in range(23)]
    reference = [0.75 * factor for factor in drift]
    assert paired_ratio([1.5 * factor for factor in drift], reference) == Interval(2.0, 2.0, 2.0)
    apart = median_interval([1.5 * factor for factor in drift])
    assert apart.high / apart.low > 2


def test_pairs_need_as_many_samples_on_both_sides() -> None:
    with pytest.raises(ValueError):
        paired_ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("one", "other", "overlaps"),
    [
        ((1.0, 2.0), (2.0, 3.0), True),
        ((1.0, 4.0), (2.0, 3.0), True),
        ((1.0, 1.5), (2.0, 3.0), False),
        ((2.0, 2.0), (2.0, 2.0), True),
    ],
)
def test_intervals_overlap_from_both_sides(
    one: tuple[float, float], other: tuple[float, float], overlaps: bool
) -> None:
    a, b = Interval(one[0], *one), Interval(other[0], *other)
    assert a.overlaps(b) is overlaps
    assert b.overlaps(a) is overlaps


def test_the_relative_width_is_that_of_the_wider_side() -> None:
    assert Interval(4.0, 3.0, 4.5).relative_width == 0.25
    assert Interval(4.0, 3.5, 6.0).relative_width == 0.5
    assert Interval(0.0, 0.0, 0.0).relative_width == 0.0
