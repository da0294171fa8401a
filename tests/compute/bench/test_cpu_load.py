"""The CPU load of other processes: the total without this process."""

from __future__ import annotations

import os

import pytest

from mhacli.compute.bench import timing as load
from mhacli.compute.bench.timing import ForeignLoad, is_crowded
from mhacli.io.memory import n_cpus


def measured(
    monkeypatch: pytest.MonkeyPatch, busy: list[float | None], own: list[float], wall: list[float]
) -> float | None:
    for name, readings in (("_busy_s", busy), ("process_time", own), ("perf_counter", wall)):
        left = iter(readings)
        monkeypatch.setattr(load, name, lambda left=left: next(left))
    return ForeignLoad().cpus()


def test_by_hand_what_others_took_of_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    # 14 s of work in 4 s, 6 of them our own: others kept 2 CPUs busy
    assert measured(monkeypatch, [100.0, 114.0], [1.0, 7.0], [50.0, 54.0]) == 2.0


def test_clocks_that_disagree_a_little_make_no_negative_load(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, [100.0, 101.0], [0.0, 1.01], [0.0, 1.0]) == 0.0


def test_a_system_that_does_not_report_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, [None, None], [0.0, 1.0], [0.0, 1.0]) is None


@pytest.mark.parametrize(
    ("foreign", "threads", "cpus", "crowded"),
    [
        (0.2, 2, 2, False),
        (0.3, 2, 2, True),
        (0.9, 1, 2, False),
        (1.1, 1, 2, True),
        (6.0, 8, 16, False),
        (None, 2, 2, False),
    ],
)
def test_cpus_are_crowded_where_others_take_those_that_the_threads_need(
    foreign: float | None, threads: int, cpus: int, crowded: bool
) -> None:
    assert is_crowded(foreign, threads, cpus) is crowded


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="reads the counters of Linux")
def test_the_counters_of_this_system_are_read() -> None:
    first = load._busy_s()
    sum(range(3_000_000))
    second = load._busy_s()
    assert first is not None
    assert second is not None
    assert second >= first > 0
    assert n_cpus() >= 1
