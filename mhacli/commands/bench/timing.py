"""Interleaved timing: in each round every backend takes its turn, on the clock that suits the device."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch

from mhacli.commands.bench.intervals import MIN_ROUNDS, median_interval
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


def time_in_turns(
    entries: Mapping[str, Timed], clock: Clock, *, repeat: int | None, budget_s: float, seed: int
) -> tuple[dict[str, tuple[float, ...]], dict[str, int]]:
    """The seconds of each entry by round, and the calls of each per sample.

    In each round all entries take their turn, in a new random order, until there are enough rounds: `repeat` of them,
    or as many as put the interval of every median within 1 % of it, or fill `budget_s` seconds; at least six. The
    intervals are checked after 6, 12, 24, … rounds, since checking after each would stop at a lucky moment.
    """
    names = list(entries)
    with _undisturbed():
        once = [(entries[name], 1) for name in names]
        clock.round(once)  # to warm up
        estimates = dict(zip(names, clock.round(once), strict=True))
        n_calls = {name: _calls(entries[name], estimates[name], clock) for name in names}
        samples: dict[str, list[float]] = {name: [] for name in names}
        order, began = random.Random(seed), perf_counter()
        while not _enough(list(samples.values()), repeat, perf_counter() - began, budget_s):
            turn = order.sample(names, len(names))
            seconds = clock.round([(entries[name], n_calls[name]) for name in turn])
            for name, sample in zip(turn, seconds, strict=True):
                samples[name].append(sample)
    return {name: tuple(column) for name, column in samples.items()}, n_calls


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


# ---------------------------------------------------------------------------------------------------- a matrix product


_PRODUCT_WIDTHS = {"cpu": 512, "cuda": 8192, "mps": 4096}


def product_rate(dtype: Dtype, device: torch.device, clock: Clock) -> float:
    """Operations per second of a square matrix product: more than attention reaches in this dtype.

    A kernel may widen 16-bit numbers, so their rate is the better of their own product's and of float32's.
    """
    n = _PRODUCT_WIDTHS[device.type]
    seconds = math.inf
    for name in dict.fromkeys((dtype, "float32") if ITEM_BYTES[dtype] == 2 else (dtype,)):
        numbers = torch.ones(n, n, dtype=getattr(torch, name), device=device)
        turn = [(Timed(partial(torch.mm, numbers, numbers)), 1)]
        seconds = min(seconds, *(clock.round(turn)[0] for _ in range(4)))
    return 2 * n**3 / seconds
