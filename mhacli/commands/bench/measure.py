"""`mha bench`: attention backends at many sizes, timed in turns, with the error and the memory of each."""

from __future__ import annotations

import math
import os
import random
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate
from operator import truediv
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import grad

from mhacli.attention.devices import choose_device, driver, environment, free_bytes
from mhacli.attention.fused import KERNELS, only
from mhacli.commands.bench.backends import COMPILED, Problem, answers, call_of, outcome_of, problem_of, watched
from mhacli.commands.bench.result import Benchmark
from mhacli.commands.bench.workload import LAYERS, MIN_ROUNDS, BenchRow, Direction, Interval, Sweep
from mhacli.io.files import format_size
from mhacli.io.memory import cpu_name, fits, n_cpus, uncollected
from mhacli.io.progress import Progress, no_progress
from mhacli.settings import Dtype

Clock = Callable[[int], float]
"""Takes a number of calls, and gives the seconds of one."""
_EXPECTED_FUSED = ("sdpa", "flex", "compiled", "torch-mha")


def bench(
    lengths: Sequence[int] = (),
    *,
    backends: Sequence[str] = (),
    batch: Sequence[int] = (),
    n_heads: Sequence[int] = (),
    n_kv_heads: Sequence[int] = (),
    d_head: Sequence[int] = (),
    dtypes: Sequence[Dtype] = (),
    directions: Sequence[Direction] = ("forward",),
    causal: bool = False,
    decode: bool = False,
    device: str = "auto",
    threads: int | None = None,
    repeat: int | None = None,
    budget_s: float = 3.0,
    call_limit_s: float = 5.0,
    seed: int = 0,
) -> Benchmark:
    """The time of each attention backend at each size, as `mha bench` prints it.

    All lists are crossed; an empty list takes what suits the device. `lengths` are numbers of tokens, or of keys with
    `decode`. Rounds of one size continue until medians are precise to 1 %, `repeat` rounds are done, or `budget_s`
    seconds have passed. A backend whose single call is predicted to take longer than `call_limit_s` is skipped. Raises
    `MhaError` for a missing device and for invalid sizes.
    """
    lists: dict[str, Any] = {
        "lengths": lengths, "backends": backends, "batch": batch, "n_heads": n_heads, "n_kv_heads": n_kv_heads,
        "d_head": d_head, "dtypes": dtypes, "directions": directions,
    }  # fmt: skip
    lists = {name: tuple(value) if isinstance(value, Iterable) else value for name, value in lists.items()}
    sweep = Sweep(
        **lists, causal=causal, decode=decode, device=device, threads=threads, repeat=repeat, budget=budget_s,
        call_limit=call_limit_s, seed=seed,
    )  # fmt: skip
    return measure(sweep.checked())


def measure(sweep: Sweep, report_progress: Progress = no_progress) -> Benchmark:
    """The benchmark of every backend at every size of the sweep. A backend that cannot run has a row with the reason.

    Raises `MhaError` if the device is missing, and `UsageError` for invalid sizes.
    """
    device = choose_device(sweep.device)
    sizes = sweep.sizes(device.type)
    if sweep.threads is not None:
        torch.set_num_threads(sweep.threads)
    where = asdict(environment(device, sweep.device)) | {
        "cpu_name": cpu_name(),
        "n_cpus": n_cpus(),
        "driver": driver() if device.type == "cuda" else None,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }
    rows: list[BenchRow] = []
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        rates = {dtype: product_rate(dtype, device) for dtype in dict.fromkeys(size[0].dtype for size in sizes)}
        for place, planned in enumerate(sizes):
            report_progress(place / len(sizes), f"{planned[0].k_len} tokens")
            rows += _measured(planned, rates[planned[0].dtype], device, sweep)
    return Benchmark((), sweep.seed, where, sweep.on(device.type), tuple(rows))


def _measured(planned: Sequence[BenchRow], rate: float, device: torch.device, sweep: Sweep) -> list[BenchRow]:
    """The rows of one size: first calls one by one, then all backends in turns."""
    rows: dict[str, BenchRow] = {}
    clocks: dict[str, Clock] = {}
    problems: dict[bool, Problem] = {}
    for plan in planned:
        name, is_layer = plan.backend, plan.backend in LAYERS
        rows[name] = row = _admitted(plan, rate * sweep.call_limit, free_bytes(str(device)))
        if row.status != "ok":
            continue
        with warnings.catch_warnings(record=True) as warned, _running(row):
            warnings.simplefilter("always")
            try:
                problems[is_layer] = problems.get(is_layer) or problem_of(row, device, sweep.seed)
                rows[name], clocks[name] = _first_calls(row, problems[is_layer], device, sweep.seed)
            except Exception as fault:
                reasons = [str(each.message).partition(" (Triggered")[0] for each in warned]
                status, reason = outcome_of(name, fault, reasons)
                rows[name] = replace(row, status=status, reason=reason)
    if clocks:
        is_single = device.type == "cuda" or planned[0].direction == "backward"
        rows |= _ranked(rows, *time_in_turns(clocks, sweep, most_calls=1 if is_single else 1000))
    if not rows.keys().isdisjoint(COMPILED):
        torch.compiler.reset()  # compiled code must not affect the next size
    return [*rows.values()]


def _admitted(row: BenchRow, most_flops: float, available: int) -> BenchRow:
    """The row with the work to do, and the reason if the backend needs too much memory or time."""
    flops, moved, needed = row.cost
    row = replace(row, flops=flops, bytes=moved, flops_per_byte=flops / moved)
    if not fits(needed, available):
        reason = f"needs {format_size(needed)}, and {format_size(available)} is available"
        return replace(row, status="too-large", reason=reason)
    if flops > most_flops:
        reason = f"a call would take {flops / most_flops:.3g} × --call-limit or more, at the rate of a matrix product"
        return replace(row, status="too-slow", reason=reason)
    return row


@contextmanager
def _running(row: BenchRow) -> Iterator[None]:
    """What surrounds a call: the choice of a kernel, and gradients where the direction needs them."""
    kernel = only(row.backend) if row.backend in KERNELS else nullcontext()
    with kernel, torch.set_grad_enabled(row.direction != "forward"):
        yield


def _first_calls(row: BenchRow, problem: Problem, device: torch.device, seed: int) -> tuple[BenchRow, Clock]:
    """The row with the time of the first call, compilation included, the kernel, the memory and the error; and its clock."""
    leaves, queries, exact = problem
    call, direction = call_of(row, leaves, seed), row.direction

    def whole() -> Tensor:
        out = call()
        if direction != "forward":
            grad(out, leaves, out.detach())
        return out.detach()

    first_s = seconds_of(whole, 1, device)
    ran, peak = watched(row, whole, device)
    pairs = zip(answers(call().index_select(-2, queries), leaves, direction), exact, strict=True)
    errors = torch.cat([(ours.detach().to(of.device).double() - of).abs().flatten() for ours, of in pairs])
    largest, mean, n = float(errors.max()), float(errors.mean()), len(queries)
    is_fallback = row.backend in _EXPECTED_FUSED and ran in ("math", "unfused")
    row = replace(row, first_s=first_s, ran=ran, is_fallback=is_fallback, extra_bytes=peak, n_error_queries=n)
    if math.isfinite(mean):
        row = replace(row, max_error=largest, mean_error=mean)
    else:
        row = replace(row, reason="results are not finite")
    weight = whole()

    def clock(n_calls: int) -> float:
        with _running(row):
            if direction == "forward":
                return seconds_of(call, n_calls, device)
            if direction == "both":
                return seconds_of(lambda: grad(call(), leaves, weight), n_calls, device)
            out = call()
            return seconds_of(lambda: grad(out, leaves, weight), 1, device)

    return row, clock


def median_interval(samples: Iterable[float]) -> Interval:
    """The median and its 95 % interval, for any distribution: from the k-th smallest to the k-th largest sample.

    With fewer than six samples, the smallest and the largest. Source: David and Nagaraja
    2003, "Order Statistics", section 7.1.

    >>> median_interval([4.0, 1.0, 3.0, 2.0, 9.0, 5.0])
    (3.5, 1.0, 9.0)
    """
    ordered = sorted(samples)
    n = len(ordered)
    below = accumulate(math.comb(n, k) for k in range(n // 2))  # outcomes with at most k samples below the median
    k = max(0, sum(40 * outcomes <= 2**n for outcomes in below) - 1)
    return statistics.median(ordered), ordered[k], ordered[-1 - k]


def _ranked(
    rows: Mapping[str, BenchRow], samples: Mapping[str, list[float]], n_calls: Mapping[str, int]
) -> dict[str, BenchRow]:
    """The rows with times, and ratios to the fastest. Effects on a whole round cancel out in the interval of a ratio: it is
    that of the ratios per round, widened to include the ratio of the medians. The fastest are certain if all others are
    certainly slower, and if they ran one kernel."""
    first = min(samples, key=lambda name: statistics.median(samples[name]))
    ranked = {}
    for name, column in samples.items():
        median, low, high = median_interval(column)
        _, ratio_low, ratio_high = median_interval(map(truediv, column, samples[first]))
        ratio = median / statistics.median(samples[first])
        ratio_low, ratio_high = min(ratio_low, ratio), max(ratio_high, ratio)
        p25, p75 = np.quantile(column, (0.25, 0.75)).tolist()
        ranked[name] = replace(
            rows[name], samples_s=tuple(column), n_samples=len(column), n_calls=n_calls[name], median_s=median,
            median_low_s=low, median_high_s=high, p25_s=p25, p75_s=p75, min_s=min(column),
            ratio=ratio, ratio_low=ratio_low, ratio_high=ratio_high, tflops=rows[name].flops / median / 1e12,
            is_sure=len(column) >= MIN_ROUNDS, is_similar=name != first and ratio_low <= 1,
        )  # fmt: skip
    near = [name for name, row in ranked.items() if name == first or row.is_similar]
    is_certain = ranked[first].is_sure and len(near) < len(ranked) and len({rows[name].ran for name in near}) == 1
    return ranked | {name: replace(ranked[name], is_fastest=is_certain) for name in near}


# -------------------------------------------------------------------------------------------------------------- timing


CLOSE_ENOUGH = 0.01
"""The rounds are enough if the interval of every median lies within this fraction of it."""
MAX_ROUNDS = 384
MIN_SAMPLE_S = 2e-3
"""Shorter calls are repeated within a sample, so that the overhead of clock and loop does not count."""
L2_BYTES = 256 << 20
"""More than the level-2 cache of any GPU, so that clearing so many bytes evicts the inputs.

Source: `triton.testing.do_bench`.
"""


def seconds_of(call: Callable[[], object], n_calls: int, device: torch.device) -> float:
    """The seconds of a call. On CUDA events time a single one, behind a level-2 cache that is cleared: while the device does
    this the host queues the call, so its own time does not count. Elsewhere the wall clock times all calls together."""
    if device.type == "cuda":
        torch.empty(L2_BYTES, dtype=torch.int8, device=device).zero_()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        call()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3
    start = perf_counter()
    for _ in range(n_calls):
        call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return (perf_counter() - start) / n_calls


def time_in_turns(
    clocks: Mapping[str, Clock], sweep: Sweep, *, most_calls: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """The seconds of each backend by round, and the calls of each per sample, at most `most_calls`.

    In each round all backends take their turn, in a new random order, until there are enough rounds: `sweep.repeat` of them,
    or as many as put the interval of every median within 1 % of it, or fill its budget; at least six. The
    intervals are checked after 6, 12, 24, … rounds, since checking after each would stop at a lucky moment.
    """
    samples: dict[str, list[float]] = {name: [] for name in clocks}
    n_calls, order = {}, random.Random(sweep.seed)
    with uncollected():  # a collection would disturb single samples
        for name, clock in clocks.items():
            clock(1)  # to warm up
            n_calls[name] = max(1, min(most_calls, math.ceil(MIN_SAMPLE_S / max(clock(1), 1e-9))))
        began = perf_counter()
        while not _enough([*samples.values()], sweep, perf_counter() - began):
            for name in order.sample([*clocks], len(clocks)):
                samples[name].append(clocks[name](n_calls[name]))
    return samples, n_calls


def _enough(samples: Sequence[Sequence[float]], sweep: Sweep, elapsed_s: float) -> bool:
    n_rounds = len(samples[0])
    if sweep.repeat is not None or n_rounds < MIN_ROUNDS:
        return n_rounds == sweep.repeat
    if n_rounds >= MAX_ROUNDS or elapsed_s > sweep.budget:
        return True
    is_checkpoint = n_rounds % MIN_ROUNDS == 0 and (n_rounds // MIN_ROUNDS).bit_count() == 1
    intervals = map(median_interval, samples) if is_checkpoint else ()
    return is_checkpoint and all(max(high - mid, mid - low) <= CLOSE_ENOUGH * mid for mid, low, high in intervals)


def product_rate(dtype: Dtype, device: torch.device) -> float:
    """Operations per second of a square matrix product, in this dtype or in float32, to which a kernel may widen."""
    n, seconds = {"cpu": 512, "cuda": 8192, "mps": 4096}[device.type], []
    for name in dict.fromkeys((dtype, "float32")):
        numbers = torch.ones(n, n, dtype=getattr(torch, name), device=device)
        seconds += [seconds_of(partial(torch.mm, numbers, numbers), 1, device) for _ in range(4)]
    return 2 * n**3 / min(seconds)
