"""Time per site, on a scripted clock."""

from __future__ import annotations

import pytest
import torch

from mhacli.compute.base import taps as clock
from mhacli.compute.base.taps import TOTAL, Stopwatch, time_stages, timing

CPU = torch.device("cpu")


@pytest.fixture
def tick(monkeypatch):
    """A clock that stands still until it is told how many seconds have passed."""
    now = [100.0]
    monkeypatch.setattr(clock, "perf_counter", lambda: now[0])

    def pass_time(seconds):
        now[0] += seconds

    return pass_time


def test_by_hand_quartiles_of_five_samples():
    found = timing(9.0, [5.0, 1.0, 4.0, 2.0, 8.0])  # sorted 1 2 4 5 8: quartiles 2, 4, 5
    assert (found.first_s, found.samples_s, found.median_s, found.iqr_s) == (9.0, (5.0, 1.0, 4.0, 2.0, 8.0), 4.0, 3.0)


def test_by_hand_quartiles_between_two_samples():
    found = timing(0.0, [1.0, 3.0])  # quartiles 1.5, 2, 2.5
    assert (found.median_s, found.iqr_s) == (2.0, 1.0)


def test_one_sample_has_no_spread():
    found = timing(0.5, [3.0])
    assert (found.samples_s, found.median_s, found.iqr_s) == ((3.0,), 3.0, 0.0)


def test_every_site_gets_the_time_since_the_site_before_it(tick):
    watch = Stopwatch(CPU)
    tick(2.0)
    watch("q_proj", torch.zeros(1))
    tick(0.5)
    watch("q", torch.zeros(1))
    assert watch.seconds == {"q_proj": 2.0, "q": 0.5}


def test_the_work_of_the_other_tap_is_off_the_clock(tick):
    watch = Stopwatch(CPU, then=lambda site, tensor, **where: tick(50.0))
    tick(1.0)
    watch("q", torch.zeros(1))
    tick(3.0)
    watch("k", torch.zeros(1))
    assert watch.seconds == {"q": 1.0, "k": 3.0}


def test_tensors_are_passed_on_as_they_are():
    heard = []
    watch = Stopwatch(CPU, then=lambda site, tensor, **where: heard.append((site, tensor, where)))
    tensor = torch.arange(3.0)
    watch("z", tensor, layer=7)
    ((site, passed, where),) = heard
    assert (site, where) == ("z", {"layer": 7})
    assert passed is tensor


def stage_runner(tick, seconds_per_run):
    """A run whose two sites take one and three quarters of the next of the given durations."""
    durations = iter(seconds_per_run)

    def run(tap):
        duration = next(durations)
        tick(duration / 4)
        tap("q", torch.zeros(1))
        tick(duration * 3 / 4)
        tap("k", torch.zeros(1))

    return run


def test_stages_are_timed_apart_from_the_first_run_and_summed_as_total(tick):
    found = time_stages(stage_runner(tick, [4.0, 8.0, 16.0]), {"q": 7.0, "k": 5.0}, CPU, 3)
    assert found["q"] == timing(7.0, [1.0, 2.0, 4.0])
    assert found["k"] == timing(5.0, [3.0, 6.0, 12.0])
    assert found[TOTAL] == timing(12.0, [4.0, 8.0, 16.0])
    assert list(found) == ["q", "k", TOTAL]


@pytest.mark.parametrize(("seconds", "n_runs"), [(0.01, 5), (0.4, 3), (0.6, 2), (30.0, 2)])
def test_by_default_slow_runs_are_repeated_less(tick, seconds, n_runs):
    found = time_stages(stage_runner(tick, [seconds] * 9), {"q": 0.0, "k": 0.0}, CPU, None)
    assert len(found[TOTAL].samples_s) == n_runs


def test_a_count_of_runs_that_was_requested_is_kept_however_slow(tick):
    found = time_stages(stage_runner(tick, [30.0] * 9), {"q": 0.0, "k": 0.0}, CPU, 7)
    assert len(found[TOTAL].samples_s) == 7
