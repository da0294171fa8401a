"""Time per site, measured by a tap that does not count its own work."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from mhacli.attention.core import Tap
from mhacli.results.record.measures import Timing

TOTAL = "total"
MIN_RUNS, DEFAULT_RUNS, DEFAULT_BUDGET_S = 2, 5, 1.0


class Stopwatch:
    """A tap that notes how long each site took, and passes what it sees to another tap off the clock.

    On an accelerator every site waits for the device, so stage times add waiting that an unobserved run does not have.
    """

    def __init__(self, device: torch.device, then: Tap | None = None) -> None:
        self._device, self._then = device, then
        self.seconds: dict[str, float] = {}
        self._since = self._now()

    def __call__(self, site: str, tensor: Tensor, **where: Any) -> None:
        """Ends the site's interval, and begins the next when the other tap is done."""
        self.seconds[site] = self._now() - self._since
        if self._then is not None:
            self._then(site, tensor, **where)
        self._since = self._now()

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return perf_counter()


def time_stages(
    run: Callable[[Tap], object], first: Mapping[str, float], device: torch.device, repeat: int | None
) -> dict[str, Timing]:
    """Timings of every site, and of their sum as `total`, over `repeat` runs after the first, which is kept apart.

    `repeat` None means 5 runs, fewer (from 2) when they take longer than a second together.
    """
    runs: list[dict[str, float]] = []
    began = perf_counter()
    while len(runs) < (DEFAULT_RUNS if repeat is None else repeat):
        if repeat is None and len(runs) >= MIN_RUNS and perf_counter() - began > DEFAULT_BUDGET_S:
            break
        watch = Stopwatch(device)
        run(watch)
        runs.append(watch.seconds)
    stages = {site: timing(first[site], [seconds[site] for seconds in runs]) for site in first}
    return stages | {TOTAL: timing(sum(first.values()), [sum(seconds.values()) for seconds in runs])}


def timing(first_s: float, samples_s: list[float]) -> Timing:
    """The samples with their median and interquartile range (inclusive quartiles; 0 for one sample)."""
    low, middle, high = (
        statistics.quantiles(samples_s, n=4, method="inclusive") if len(samples_s) > 1 else [samples_s[0]] * 3
    )
    return Timing(first_s, tuple(samples_s), middle, high - low)
