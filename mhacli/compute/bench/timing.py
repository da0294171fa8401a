"""Timing that can be believed: rounds in which everything takes its turn, on the clock that suits the device."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch

from mhacli.results.bench.intervals import median_interval

CLOSE_ENOUGH = 0.01
"""Enough rounds: the interval of every median lies within this share of it."""
MIN_ROUNDS, MAX_ROUNDS = 6, 384
"""Six are the fewest whose interval can hold the median with 95 %."""
MIN_SAMPLE_S = 2e-3
"""Shorter calls are repeated within a sample, so that the clock and the loop do not count."""
L2_BYTES = 256 << 20
"""More than the level-2 cache of any GPU: clearing so much leaves nothing of the inputs there.

Source: `triton.testing.do_bench`.
"""


@dataclass(frozen=True)
class Timed:
    """Something to time: `run`, within `around`, after `before`, which is off the clock."""

    run: Callable[[], object]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    before: Callable[[], object] | None = None


class Clock(Protocol):
    """Takes one sample of each in turn."""

    repeats_short_calls: bool

    def round(self, turns: Sequence[tuple[Timed, int]]) -> list[float]:
        """Seconds of one call, of each entry, which is called so many times."""


class WallClock:
    """Seconds on the wall, until `wait` says that the device has finished."""

    repeats_short_calls = True

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self._wait = wait

    def round(self, turns: Sequence[tuple[Timed, int]]) -> list[float]:
        """One sample each: the calls together, waited for at the end only."""
        seconds = []
        for timed, n_calls in turns:
            with timed.around():
                if timed.before is not None:
                    timed.before()
                self._wait()
                began = perf_counter()
                for _ in range(n_calls):
                    timed.run()
                self._wait()
                seconds.append((perf_counter() - began) / n_calls)
        return seconds


class EventClock:
    """The device's own clock: events before and after each call, the level-2 cache cleared in between.

    Nothing here waits inside a round, so the host is ahead of the device, and its own time does not count; except for a
    backend that waits itself, as `attend` does to look for rows without a key.
    """

    repeats_short_calls = False

    def __init__(
        self, new_event: Callable[[], Any], synchronize: Callable[[], object], clear_cache: Callable[[], object]
    ) -> None:
        self._new_event, self._synchronize, self._clear_cache = new_event, synchronize, clear_cache

    def round(self, turns: Sequence[tuple[Timed, int]]) -> list[float]:
        """One sample each, of one call."""
        events = []
        for timed, _ in turns:
            with timed.around():
                if timed.before is not None:
                    timed.before()
                self._clear_cache()
                began, ended = self._new_event(), self._new_event()
                began.record()
                timed.run()
                ended.record()
                events.append((began, ended))
        self._synchronize()
        return [began.elapsed_time(ended) / 1e3 for began, ended in events]


def clock_for(device: torch.device) -> Clock:
    """Events on CUDA, the wall elsewhere, with a wait for the device where there is something to wait for."""
    if device.type == "cuda":
        cache = torch.empty(L2_BYTES, dtype=torch.int8, device=device)
        return EventClock(
            lambda: torch.cuda.Event(enable_timing=True), lambda: torch.cuda.synchronize(device), cache.zero_
        )
    return WallClock() if device.type == "cpu" else WallClock(lambda: torch.accelerator.synchronize(device))


@dataclass(frozen=True)
class Rounds:
    """Seconds of each entry, round by round; those of `reference` a second time, as `control`; calls per sample."""

    samples: Mapping[str, tuple[float, ...]]
    reference: str
    control: tuple[float, ...]
    n_calls: Mapping[str, int]


def time_in_turns(
    entries: Mapping[str, Timed], clock: Clock, *, repeat: int | None, budget_s: float, seed: int
) -> Rounds:
    """Rounds of all entries, in an order that is shuffled anew for each, until they are enough.

    Enough is `repeat` rounds, or else when the interval of every median is within 1 % of it, or when `budget_s` is over, but
    six at least. Whether they are enough is asked after 6, 12, 24, … rounds: whoever looks all the time stops at a lucky
    moment. The one that was quickest in a round that is thrown away stands in every round twice.
    """
    names = list(entries)
    with _undisturbed():
        once = [(entries[name], 1) for name in names]
        clock.round(once)  # warms up
        estimates = dict(zip(names, clock.round(once), strict=True))
        reference = min(estimates, key=estimates.__getitem__)
        n_calls = {name: _calls(entries[name], estimates[name], clock) for name in names}
        turns, samples = [*names, None], [[] for _ in range(len(names) + 1)]  # type: list[str | None], list[list[float]]
        order, began = random.Random(seed), perf_counter()
        while not _enough(samples, repeat, perf_counter() - began, budget_s):
            places = order.sample(range(len(turns)), len(turns))
            called = [turns[place] or reference for place in places]
            seconds = clock.round([(entries[name], n_calls[name]) for name in called])
            for place, sample in zip(places, seconds, strict=True):
                samples[place].append(sample)
    *of_entries, control = map(tuple, samples)
    return Rounds(dict(zip(names, of_entries, strict=True)), reference, control, n_calls)


def _calls(timed: Timed, estimate_s: float, clock: Clock) -> int:
    """How many calls make a sample: one where something must come before each."""
    if timed.before is not None or not clock.repeats_short_calls:
        return 1
    return max(1, min(1000, math.ceil(MIN_SAMPLE_S / max(estimate_s, 1e-9))))


def _enough(samples: Sequence[Sequence[float]], repeat: int | None, elapsed_s: float, budget_s: float) -> bool:
    n_rounds = len(samples[0])
    if repeat is not None or n_rounds < MIN_ROUNDS:
        return n_rounds == repeat
    if n_rounds >= MAX_ROUNDS or elapsed_s > budget_s:
        return True
    is_time_to_look = n_rounds % MIN_ROUNDS == 0 and (n_rounds // MIN_ROUNDS).bit_count() == 1
    return is_time_to_look and all(median_interval(column).relative_width <= CLOSE_ENOUGH for column in samples)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Without Python's collection of garbage, which would fall into one sample or another."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
