"""`mha bench`: attention backends at many sizes, timed in turns, with the error and the memory of each."""

from __future__ import annotations

import gc
import math
import os
import random
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import grad

from mhacli.attention.devices import choose_device, driver, environment, free_bytes
from mhacli.commands.bench.backends import Ready, first_calls, outcome_of, running, wait
from mhacli.commands.bench.intervals import MIN_ROUNDS, median_interval, paired_ratio
from mhacli.commands.bench.result import Benchmark, BenchRow
from mhacli.commands.bench.workload import COMPILED, Direction, Sweep, Timing, Workload
from mhacli.io import memory
from mhacli.io.files import format_size
from mhacli.io.memory import cpu_name, n_cpus
from mhacli.io.progress import Progress, no_progress
from mhacli.settings import ITEM_BYTES, Dtype


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
    sweep = Sweep(**lists, causal=causal, decode=decode)
    timing = Timing(
        device=device, threads=threads, repeat=repeat, budget=budget_s, call_limit=call_limit_s, seed=seed
    )  # fmt: skip
    return measure(sweep.checked(), timing.checked())


def measure(sweep: Sweep, timing: Timing, report_progress: Progress = no_progress) -> Benchmark:
    """The benchmark of every backend at every size of the sweep. A backend that cannot run has a row with the reason.

    Raises `MhaError` if the device is missing, and `UsageError` for invalid sizes.
    """
    device = choose_device(timing.device)
    workloads, full = sweep.workloads(device.type), sweep.on(device.type)
    if timing.threads is not None:
        torch.set_num_threads(timing.threads)
    where = asdict(environment(device, timing.device)) | {
        "cpu_name": cpu_name(),
        "n_cpus": n_cpus(),
        "driver": driver() if device.type == "cuda" else None,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }
    rows: list[BenchRow] = []
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for place, work in enumerate(workloads):
            report_progress(place / len(workloads), f"{work.k_len} tokens")
            rows += _rows(work, full.backends, device, timing)
    return Benchmark((), timing.seed, where, full, tuple(rows))


# ------------------------------------------------------------------------------------------------------------- one size


def _rows(work: Workload, names: Sequence[str], device: torch.device, timing: Timing) -> list[BenchRow]:
    """A row for each backend at one size: first calls one by one, then all in turns."""
    rows: dict[str, BenchRow] = {}
    ready: dict[str, Ready] = {}
    exact: dict[bool, list[Tensor]] = {}
    most_flops, latest = timing.call_limit * product_rate(work.dtype, device), ""

    def fail(name: str, fault: Exception, warned: Sequence[str] = ()) -> None:
        status, reason = outcome_of(name, fault, warned)
        rows[name] = replace(rows[name], status=status, reason=reason)
        ready.pop(name, None)

    def sample(name: str, n_calls: int) -> float:
        nonlocal latest
        latest, ((leaves, call, _), weight) = name, ready[name]
        with running(name, work):
            if work.direction == "forward":
                return seconds_of(call, n_calls, device)
            if work.direction == "both":
                return seconds_of(lambda: grad(call(), leaves, weight), n_calls, device)
            out = call()
            return seconds_of(lambda: grad(out, leaves, weight), 1, device)

    for name in names:
        rows[name] = _planned(name, work, device, most_flops)
        if rows[name].status == "ok":
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                try:
                    generator = torch.Generator(device).manual_seed(timing.seed)
                    rows[name], ready[name] = first_calls(rows[name], exact, generator)
                except Exception as fault:
                    fail(name, fault, [str(each.message).partition(" (Triggered")[0] for each in warned])
    while ready:
        most_calls = 1 if device.type == "cuda" or work.direction == "backward" else 1000
        try:
            timed = time_in_turns([*ready], sample, timing, most_calls=most_calls)
        except Exception as fault:
            fail(latest, fault)
        else:
            rows |= _ranked(rows, *timed)
            break
    if any(name in COMPILED and row.first_s is not None for name, row in rows.items()):
        torch.compiler.reset()  # compiled code must not affect the next size
    return [*rows.values()]


def _planned(name: str, work: Workload, device: torch.device, most_flops: float) -> BenchRow:
    """The row with the work to do, and the reason if the backend needs too much memory or time."""
    (flops, moved, held), available = work.cost(name), free_bytes(str(device))
    row = BenchRow(**asdict(work), backend=name, status="ok", flops=flops, bytes=moved, flops_per_byte=flops / moved)
    if not memory.fits(held, available):
        reason = f"needs {format_size(held)}, and {format_size(available)} is available"
        return replace(row, status="too-large", reason=reason)
    if flops > most_flops:
        longer = flops / most_flops
        reason = f"a call would take {longer:.3g} × --call-limit or more, at the rate of a matrix product"
        return replace(row, status="too-slow", reason=reason)
    return row


def _ranked(
    rows: Mapping[str, BenchRow], samples: Mapping[str, list[float]], n_calls: Mapping[str, int]
) -> dict[str, BenchRow]:
    """The rows with times, ratios to the fastest, and the backends that are surely fastest: one, or those that ran the same
    kernel if all others are surely slower."""
    medians = {name: median_interval(column) for name, column in samples.items()}
    first = min(medians, key=lambda name: medians[name])
    ratios = {name: paired_ratio(column, samples[first]) for name, column in samples.items()}
    is_sure = len(samples[first]) >= MIN_ROUNDS
    similar = {name for name, ratio in ratios.items() if name != first and ratio[1] <= 1}
    near = similar | {first}
    kernels = {rows[name].ran for name in near}
    is_one_kernel = len(near) == 1 or (len(kernels) == 1 and "unknown" not in kernels)
    fastest = near if is_sure and is_one_kernel and len(near) < len(ratios) else set()
    ranked = {}
    for name, column in samples.items():
        (median, low, high), (ratio, ratio_low, ratio_high) = medians[name], ratios[name]
        p25, p75 = np.quantile(column, (0.25, 0.75)).tolist()
        ranked[name] = replace(
            rows[name], samples_s=tuple(column), n_samples=len(column), n_calls=n_calls[name], median_s=median,
            median_low_s=low, median_high_s=high, p25_s=p25, p75_s=p75, min_s=min(column),
            ratio=ratio, ratio_low=ratio_low, ratio_high=ratio_high,
            tflops=rows[name].flops / median / 1e12, is_sure=is_sure, is_similar=name in similar,
            is_fastest=name in fastest,
        )  # fmt: skip
    return ranked


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
    wait(device)
    start = perf_counter()
    for _ in range(n_calls):
        call()
    wait(device)
    return (perf_counter() - start) / n_calls


def time_in_turns(
    names: Sequence[str],
    sample: Callable[[str, int], float],
    timing: Timing,
    *,
    most_calls: int,
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """The seconds of each backend by round, and the calls of each per sample, at most `most_calls`. `sample` takes a name and a
    number of calls, and gives the seconds of one.

    In each round all backends take their turn, in a new random order, until there are enough rounds: `timing.repeat` of them,
    or as many as put the interval of every median within 1 % of it, or fill its budget; at least six. The
    intervals are checked after 6, 12, 24, … rounds, since checking after each would stop at a lucky moment.
    """
    collects = gc.isenabled()
    gc.collect()
    gc.disable()  # it would disturb single samples
    try:
        n_calls = {}
        for name in names:
            sample(name, 1)  # to warm up
            n_calls[name] = max(1, min(most_calls, math.ceil(MIN_SAMPLE_S / max(sample(name, 1), 1e-9))))
        samples: dict[str, list[float]] = {name: [] for name in names}
        order, began = random.Random(timing.seed), perf_counter()
        while not _enough([*samples.values()], timing, perf_counter() - began):
            for name in order.sample(names, len(names)):
                samples[name].append(sample(name, n_calls[name]))
    finally:
        if collects:
            gc.enable()
    return samples, n_calls


def _enough(samples: Sequence[Sequence[float]], timing: Timing, elapsed_s: float) -> bool:
    n_rounds = len(samples[0])
    if timing.repeat is not None or n_rounds < MIN_ROUNDS:
        return n_rounds == timing.repeat
    if n_rounds >= MAX_ROUNDS or elapsed_s > timing.budget:
        return True
    is_checkpoint = n_rounds % MIN_ROUNDS == 0 and (n_rounds // MIN_ROUNDS).bit_count() == 1
    intervals = map(median_interval, samples) if is_checkpoint else ()
    return is_checkpoint and all(max(high - mid, mid - low) <= CLOSE_ENOUGH * mid for mid, low, high in intervals)


def product_rate(dtype: Dtype, device: torch.device) -> float:
    """Operations per second of a square matrix product: more than attention reaches in this dtype.

    A kernel may widen 16-bit numbers, so their rate is the better of their own product's and of float32's.
    """
    n, seconds = {"cpu": 512, "cuda": 8192, "mps": 4096}[device.type], []
    for name in (dtype, "float32") if ITEM_BYTES[dtype] == 2 else (dtype,):
        numbers = torch.ones(n, n, dtype=getattr(torch, name), device=device)
        seconds += [seconds_of(partial(torch.mm, numbers, numbers), 1, device) for _ in range(4)]
    return 2 * n**3 / min(seconds)
