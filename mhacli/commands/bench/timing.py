"""Interleaved timing: in each round every backend takes its turn, on the clock that suits the device."""

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

from mhacli.commands.bench.result import MachinePeak
from mhacli.compute.base.devices import free_bytes
from mhacli.record.intervals import MIN_ROUNDS, median_interval
from mhacli.settings import ITEM_BYTES, Dtype

CLOSE_ENOUGH = 0.01
"""The rounds are enough if the interval of every median lies within this fraction of it."""
MAX_ROUNDS = 384
MIN_SAMPLE_S = 2e-3
"""Shorter calls are repeated within a sample, so that the overhead of clock and loop does not count."""
L2_BYTES = 256 << 20
"""More than the level-2 cache of any GPU, so that clearing so many bytes evicts the inputs.

Source: `triton.testing.do_bench`.
"""


@dataclass(frozen=True)
class Timed:
    """Code to time: `run`, within `around`, after the untimed `before`."""

    run: Callable[[], object]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    before: Callable[[], object] | None = None


class Clock(Protocol):
    """Takes one sample of each entry in turn."""

    repeats_short_calls: bool

    def round(self, turns: Sequence[tuple[Timed, int]]) -> list[float]:
        """The seconds per call of each entry, which is called the given number of times."""


class WallClock:
    """Wall-clock seconds, until `wait` returns because the device has finished."""

    repeats_short_calls = True

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self._wait = wait

    def round(self, turns: Sequence[tuple[Timed, int]]) -> list[float]:
        """One sample per entry: all its calls together, with one wait at the end."""
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
    """The device's clock: events before and after each call, with the level-2 cache cleared before.

    Within a round the host never waits and stays ahead of the device, so its own time does not count. The exception is
    a backend that itself waits, as `attend` does to find rows without a key.
    """

    repeats_short_calls = False

    def __init__(
        self, new_event: Callable[[], Any], synchronize: Callable[[], object], clear_cache: Callable[[], object]
    ) -> None:
        self._new_event, self._synchronize, self._clear_cache = new_event, synchronize, clear_cache

    def round(self, turns: Sequence[tuple[Timed, int]]) -> list[float]:
        """One sample per entry, of one call."""
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
    """Events on CUDA; elsewhere wall-clock time, with a wait for the device unless it is the CPU."""
    if device.type == "cuda":
        cache = torch.empty(L2_BYTES, dtype=torch.int8, device=device)
        return EventClock(
            lambda: torch.cuda.Event(enable_timing=True), lambda: torch.cuda.synchronize(device), cache.zero_
        )
    return WallClock() if device.type == "cpu" else WallClock(lambda: torch.accelerator.synchronize(device))


@dataclass(frozen=True)
class InterleavedSamples:
    """The seconds of each entry by round, a second series of `reference` as `control`, and the calls per sample."""

    samples: Mapping[str, tuple[float, ...]]
    reference: str
    control: tuple[float, ...]
    n_calls: Mapping[str, int]


def time_in_turns(
    entries: Mapping[str, Timed], clock: Clock, *, repeat: int | None, budget_s: float, seed: int
) -> InterleavedSamples:
    """Samples of all entries in rounds, each in a new random order, until there are enough.

    That is after `repeat` rounds, or when the interval of every median is within 1 % of it, or after `budget_s`
    seconds; there are at least six. The intervals are checked after 6, 12, 24, … rounds, since checking after each
    round would stop at a lucky moment. The entry that is fastest in a trial round takes two turns per round.
    """
    names = list(entries)
    with _undisturbed():
        once = [(entries[name], 1) for name in names]
        clock.round(once)  # to warm up
        estimates = dict(zip(names, clock.round(once), strict=True))
        reference = min(estimates, key=estimates.__getitem__)
        n_calls = {name: _calls(entries[name], estimates[name], clock) for name in names}
        turns, samples = [*names, None], [[] for _ in range(len(names) + 1)]  # type: list[str | None], list[list[float]]
        order, began = random.Random(seed), perf_counter()
        while not _enough(samples, repeat, perf_counter() - began, budget_s):
            places = order.sample(range(len(turns)), len(turns))
            turn_names = [turns[place] or reference for place in places]
            seconds = clock.round([(entries[name], n_calls[name]) for name in turn_names])
            for place, sample in zip(places, seconds, strict=True):
                samples[place].append(sample)
    *of_entries, control = map(tuple, samples)
    return InterleavedSamples(dict(zip(names, of_entries, strict=True)), reference, control, n_calls)


def _calls(timed: Timed, estimate_s: float, clock: Clock) -> int:
    """The calls per sample: one if `before` must precede each."""
    if timed.before is not None or not clock.repeats_short_calls:
        return 1
    return max(1, min(1000, math.ceil(MIN_SAMPLE_S / max(estimate_s, 1e-9))))


def _enough(samples: Sequence[Sequence[float]], repeat: int | None, elapsed_s: float, budget_s: float) -> bool:
    n_rounds = len(samples[0])
    if repeat is not None or n_rounds < MIN_ROUNDS:
        return n_rounds == repeat
    if n_rounds >= MAX_ROUNDS or elapsed_s > budget_s:
        return True
    is_checkpoint = n_rounds % MIN_ROUNDS == 0 and (n_rounds // MIN_ROUNDS).bit_count() == 1
    return is_checkpoint and all(median_interval(column).relative_width <= CLOSE_ENOUGH for column in samples)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Switches garbage collection off within the context, where it would disturb single samples."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# --------------------------------------------------------------------------------------------------------- machine peak


_COPY_BYTES = 512 << 20
"""More than fits into any cache. The copy takes at most a sixteenth of the free memory."""
_SMALLEST, _LARGEST = 256, 8192
_LONG_ENOUGH_S, _SAMPLES = 0.04, 8


def measure_peak(dtype: Dtype, device: torch.device, clock: Clock, seed: int) -> MachinePeak:
    """The best rates of square matrix products and of copies.

    A kernel may widen 16-bit numbers, so their rate is the better of their own product's and of float32's.
    """
    generator = torch.Generator(device).manual_seed(seed)
    formats = dict.fromkeys((dtype, "float32") if ITEM_BYTES[dtype] == 2 else (dtype,))
    rate = max(_matmul_rate(getattr(torch, name), generator, clock) for name in formats)
    n_bytes = min(_COPY_BYTES, free_bytes(str(device)) // 16)
    numbers = torch.ones(
        n_bytes // ITEM_BYTES[dtype], dtype=getattr(torch, dtype), device=device
    )  # copies take as long
    copy_s = _best(partial(torch.empty_like(numbers).copy_, numbers), clock, _SAMPLES)
    return MachinePeak(dtype, rate / 1e12, 2 * n_bytes / copy_s / 1e9)


def _matmul_rate(dtype: torch.dtype, generator: torch.Generator, clock: Clock) -> float:
    """Operations per second of a square product that takes 40 ms, or of the largest."""
    n = _SMALLEST
    while True:
        a, b = (torch.randn(n, n, generator=generator, dtype=dtype, device=generator.device) for _ in range(2))
        seconds = _best(partial(torch.mm, a, b), clock, 2)
        if seconds >= _LONG_ENOUGH_S or n == _LARGEST:
            return 2 * n**3 / min(seconds, _best(partial(torch.mm, a, b), clock, _SAMPLES))
        n *= 2


def _best(call: Callable[[], object], clock: Clock, n_samples: int) -> float:
    turn = [(Timed(call), 1)]
    return min(clock.round(turn)[0] for _ in range(n_samples + 1))


# --------------------------------------------------------------------------------------------------------- foreign load


class ForeignLoad:
    """The average number of this process's CPUs that other processes kept busy since this object was made."""

    def __init__(self) -> None:
        self._busy_s, self._own_s, self._began = _busy_s(), process_time(), perf_counter()

    def cpus(self) -> float | None:
        """The average until now; None if the system does not report it."""
        busy_s, elapsed_s = _busy_s(), perf_counter() - self._began
        if busy_s is None or self._busy_s is None or elapsed_s <= 0:
            return None
        return max(0.0, (busy_s - self._busy_s - (process_time() - self._own_s)) / elapsed_s)


def is_crowded(foreign_load: float | None, n_threads: int, n_cpus: int) -> bool:
    """Whether other processes took CPUs that the threads needed. A quarter of a CPU is normal."""
    return foreign_load is not None and foreign_load > max(0.25, n_cpus - n_threads)


def _busy_s() -> float | None:
    """The busy seconds, for all processes, of the CPUs that this process may use, since boot."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        times = [line.split()[1:9] for line in lines if line.split()[0] in ours]
        ticks = [
            sum(map(int, of_cpu)) - int(of_cpu[3]) - int(of_cpu[4]) for of_cpu in times
        ]  # without idle time and waiting for disks
        return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None
    except (OSError, AttributeError, ValueError, IndexError):
        return None
