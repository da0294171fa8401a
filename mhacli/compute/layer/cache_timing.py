"""The ways of keeping the past, side by side: what a step of decoding takes with each, at given lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from time import perf_counter
from typing import get_args

import torch
from torch import Tensor

from mhacli.attention import masks
from mhacli.attention.cache import CACHES
from mhacli.attention.layer import MultiHeadAttention, Past
from mhacli.compute.base.stopwatch import timing
from mhacli.results.record.measures import Timing
from mhacli.results.record.sections import Way
from mhacli.spec import decode_costs as costs
from mhacli.spec.config import Config
from mhacli.spec.decode_costs import CacheKind

KINDS: tuple[CacheKind, ...] = get_args(CacheKind)
N_TIMED = 9
"""Lengths from 1 to the whole at which steps are timed; the steps between are interpolated."""
_MIN_ROUNDS, _MAX_ROUNDS, _BUDGET_S, _LAST_BUDGET_S = 5, 50, 0.05, 0.5


def compare_ways(layer: MultiHeadAttention, config: Config, lengths: Sequence[int], batch: int) -> tuple[Way, ...]:
    """Each way at each length, over random rows with a causal mask. Rounds A B C A B C, so that noise meets all alike."""
    ways: list[Way] = []
    for length in sorted(set(lengths)):
        grid = sorted({round(1 + (length - 1) * part / (N_TIMED - 1)) for part in range(N_TIMED)})
        timings = {point: _time_steps(layer, batch, point, is_last=point == length) for point in grid}
        ways += [_way(kind, timings, config, batch) for kind in KINDS]
    return tuple(ways)


def _way(kind: CacheKind, timings: Mapping[int, Mapping[str, Timing]], config: Config, batch: int) -> Way:
    length = max(timings)
    return Way(
        cache=kind,
        length=length,
        step=timings[length][kind],
        total_s=interpolated_sum({point: of[kind].median_s for point, of in timings.items()}),
        n_timed=len(timings),
        step_bytes=costs.moved_bytes(config, batch=batch, n_new=1, length=length, cache=kind),
        total_bytes=costs.total_moved_bytes(config, batch=batch, length=length, cache=kind),
        step_flops=costs.step_flops(config, batch=batch, n_new=1, length=length, cache=kind),
        cache_bytes=0 if kind == "none" else batch * length * costs.token_bytes(config),
    )


def interpolated_sum(known: Mapping[int, float]) -> float:
    """The sum over every whole number from the first to the last point, on straight lines between the known ones.

    >>> interpolated_sum({1: 1.0, 4: 4.0})  # 1 + 2 + 3 + 4
    10.0
    """
    points = sorted(known)
    total = known[points[0]]
    for left, right in pairwise(points):
        n = right - left
        total += n * known[left] + (known[right] - known[left]) * (n + 1) / 2
    return total


def _time_steps(layer: MultiHeadAttention, batch: int, length: int, *, is_last: bool) -> dict[str, Timing]:
    """The step from `length − 1` tokens to `length`, with each way."""
    generator = torch.Generator().manual_seed(length)
    like = layer.q_proj.weight
    rows = torch.randn(batch, length, like.shape[1], generator=generator).to(like)
    steps = {kind: _step_of(kind, layer, rows, generator) for kind in KINDS}
    first = {kind: _seconds(step, like.device) for kind, step in steps.items()}
    samples: dict[str, list[float]] = {kind: [] for kind in KINDS}
    began, budget_s = perf_counter(), _LAST_BUDGET_S if is_last else _BUDGET_S
    for round_ in range(_MAX_ROUNDS):
        if round_ >= _MIN_ROUNDS and perf_counter() - began > budget_s:
            break
        for kind, step in steps.items():
            samples[kind].append(_seconds(step, like.device))
    return {kind: timing(first[kind], samples[kind]) for kind in KINDS}


def _step_of(
    kind: CacheKind, layer: MultiHeadAttention, rows: Tensor, generator: torch.Generator
) -> Callable[[], object]:
    """One step, which can be taken again and again: the state that goes in stays as it is."""
    if kind == "none":
        return lambda: layer(rows, allowed=masks.causal())[0][:, -1:]
    batch, n_past = rows.shape[0], rows.shape[1] - 1
    past: Past = CACHES[kind](layer, batch, rows.shape[1])
    if n_past:
        shapes = [(batch, layer.n_kv_heads, n_past, width) for width in (layer.d_head, layer.d_v)]
        k, v = (torch.randn(shape, generator=generator).to(rows) for shape in shapes)
        past = past.extended(k, v)
    return lambda: layer.decode(rows[:, -1:], past)[0]


def _seconds(step: Callable[[], object], device: torch.device) -> float:
    began = perf_counter()
    step()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return perf_counter() - began
