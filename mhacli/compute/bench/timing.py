"""Timing in rounds, in which every backend takes its turn, on the clock that suits the device."""

from __future__ import annotations

import gc
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Protocol

import torch

from mhacli.compute.base.devices import free_bytes
from mhacli.results.bench.intervals import MIN_ROUNDS, median_interval
from mhacli.results.bench.result import MachinePeak
from mhacli.spec.config import ITEM_BYTES, Dtype

CLOSE_ENOUGH = 0.01
"""Enough rounds: the interval of every median lies within this share of it."""
MAX_ROUNDS = 384
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
class InterleavedSamples:
    """Seconds of each entry, round by round; those of `reference` a second time, as `control`; calls per sample."""

    samples: Mapping[str, tuple[float, ...]]
    reference: str
    control: tuple[float, ...]
    n_calls: Mapping[str, int]


def time_in_turns(
    entries: Mapping[str, Timed], clock: Clock, *, repeat: int | None, budget_s: float, seed: int
) -> InterleavedSamples:
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
    return InterleavedSamples(dict(zip(names, of_entries, strict=True)), reference, control, n_calls)


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


# ---------------------------------------------------------------------------------------------- the peak of the machine


_COPY_BYTES = 512 << 20
"""More than fits in any cache, and a sixteenth of what is free at most."""
_SMALLEST, _LARGEST = 256, 8192
_LONG_ENOUGH_S, _SAMPLES = 0.04, 8


def measure_peak(dtype: Dtype, device: torch.device, clock: Clock, seed: int) -> MachinePeak:
    """The best of several square matrix products and of several copies.

    A kernel may widen 16-bit numbers, so theirs is the better rate of their own product and of float32's.
    """
    generator = torch.Generator(device).manual_seed(seed)
    formats = dict.fromkeys((dtype, "float32") if ITEM_BYTES[dtype] == 2 else (dtype,))
    rate = max(_matmul_rate(getattr(torch, name), generator, clock) for name in formats)
    n_bytes = min(_COPY_BYTES, free_bytes(str(device)) // 16)
    numbers = torch.ones(
        n_bytes // ITEM_BYTES[dtype], dtype=getattr(torch, dtype), device=device
    )  # a copy takes as long
    copy_s = _best(partial(torch.empty_like(numbers).copy_, numbers), clock, _SAMPLES)
    return MachinePeak(dtype, rate / 1e12, 2 * n_bytes / copy_s / 1e9)


def _matmul_rate(dtype: torch.dtype, generator: torch.Generator, clock: Clock) -> float:
    """Operations per second of a square product, of a size that takes 40 ms, or the largest."""
    n = _SMALLEST
    while True:
        a, b = (torch.randn(n, n, generator=generator, dtype=dtype, device=generator.device) for _ in range(2))
        seconds = _best(partial(torch.mm, a, b), clock, 2)
        if seconds >= _LONG_ENOUGH_S or n == _LARGEST:
            return 2 * n**3 / min(seconds, _best(partial(torch.mm, a, b), clock, _SAMPLES))
        n *= 2


def _best(call: Callable[[], object], clock: Clock, n_samples: int) -> float:
    """The shortest of several samples, after one that warms up."""
    turn = [(Timed(call), 1)]
    return min(clock.round(turn)[0] for _ in range(n_samples + 1))


# --------------------------------------------------------------------------------------------------- the load of others


class ForeignLoad:
    """From its making on: how many of this process's CPUs others kept busy, on average."""

    def __init__(self) -> None:
        self._busy_s, self._own_s, self._began = _busy_s(), process_time(), perf_counter()

    def cpus(self) -> float | None:
        """The average until now; None where the system does not tell."""
        busy_s, elapsed_s = _busy_s(), perf_counter() - self._began
        if busy_s is None or self._busy_s is None or elapsed_s <= 0:
            return None
        return max(0.0, (busy_s - self._busy_s - (process_time() - self._own_s)) / elapsed_s)


def is_crowded(foreign_load: float | None, n_threads: int, n_cpus: int) -> bool:
    """Whether others took CPUs that the threads needed; a quarter of one is what any system takes."""
    return foreign_load is not None and foreign_load > max(0.25, n_cpus - n_threads)


def _busy_s() -> float | None:
    """Seconds that the CPUs this process may use have been busy since the system began, for anybody."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        times = [line.split()[1:9] for line in lines if line.split()[0] in ours]
        ticks = [
            sum(map(int, of_cpu)) - int(of_cpu[3]) - int(of_cpu[4]) for of_cpu in times
        ]  # but idle and waiting for disks
        return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None
    except (OSError, AttributeError, ValueError, IndexError):
        return None
