"""`mha bench`: attention backends at many sizes, timed in turns, with the error and the memory of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import isfinite
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.profiler import profile

from mhacli.attention.devices import choose_device, driver, environment, free_bytes
from mhacli.attention.fused import kernel_among
from mhacli.commands.bench.backends import (
    Exact,
    HeadTensors,
    Prepared,
    deviation,
    draw_heads,
    exact_answer,
    explained,
    is_out_of_memory,
    outcome_of,
    prepare,
)
from mhacli.commands.bench.intervals import MIN_ROUNDS, median_interval, paired_ratio
from mhacli.commands.bench.result import BackendStatus, Benchmark, BenchRow
from mhacli.commands.bench.timing import Clock, Timed, clock_for, product_rate, time_in_turns
from mhacli.commands.bench.workload import (
    COMPILED,
    EXPECTED_FUSED,
    Direction,
    Sweep,
    Workload,
    expected_flops,
    expected_moved_bytes,
    least_bytes,
)
from mhacli.io import memory
from mhacli.io.files import format_size, temporary_folder
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
    sweep = Sweep(
        backends=tuple(backends), batch=tuple(batch), n_heads=tuple(n_heads), n_kv_heads=tuple(n_kv_heads),
        d_head=tuple(d_head), lengths=tuple(lengths), dtypes=tuple(dtypes), causal=causal, directions=tuple(directions),
        decode=decode,
    )  # fmt: skip
    return measure(
        sweep.checked(),
        device=device,
        threads=threads,
        repeat=repeat,
        budget_s=budget_s,
        call_limit_s=call_limit_s,
        seed=seed,
    )


def measure(
    sweep: Sweep,
    report_progress: Progress = no_progress,
    *,
    device: str,
    threads: int | None,
    repeat: int | None,
    budget_s: float,
    call_limit_s: float,
    seed: int,
    command: tuple[str, ...] = (),
) -> Benchmark:
    """The benchmark of every backend at every size of the sweep. A backend that cannot run has a row with the reason.

    Raises `MhaError` if the device is missing, and `UsageError` for invalid sizes.
    """
    chosen = choose_device(device)
    workloads, full = sweep.workloads(chosen.type), sweep.on(chosen.type)
    if threads is not None:
        torch.set_num_threads(threads)
    where = asdict(environment(chosen, device)) | {
        "cpu_name": cpu_name(),
        "n_cpus": n_cpus(),
        "driver": driver() if chosen.type == "cuda" else None,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }
    rows: list[BenchRow] = []
    with torch.cuda.device(chosen) if chosen.type == "cuda" else nullcontext(), _from_scratch():
        clock = clock_for(chosen)
        rates = {dtype: product_rate(dtype, chosen, clock) for dtype in dict.fromkeys(w.dtype for w in workloads)}
        for place, workload in enumerate(workloads):
            most_flops = call_limit_s * rates[workload.dtype]
            size = SizeBenchmark(workload, chosen, clock, seed=seed, most_flops=most_flops)
            for step, backend in enumerate(full.backends):
                done = (place + step / len(full.backends) / 2) / len(workloads)
                report_progress(done, f"{workload.k_len} tokens: {backend}")
                size.enter(backend)
            report_progress((place + 0.5) / len(workloads), f"{workload.k_len} tokens: rounds")
            size.run(repeat=repeat, budget_s=budget_s)
            size.close()
            rows += size.rows
    return Benchmark(command, seed, where, full, tuple(rows))


@contextmanager
def _from_scratch() -> Iterator[None]:
    """Hides earlier compilation results from torch within the context, and silences its profiler."""
    before = dict(os.environ)
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": temporary_folder(), "KINETO_LOG_LEVEL": "99"}
    try:
        yield
    finally:
        os.environ.clear()  # torch adds variables that refer to the folder
        os.environ |= before


# ------------------------------------------------------------------------------------------------------------- one size


MOST_EXACT_FLOPS = {"cpu": 2e10, "cuda": 1e12, "mps": 2e10}
"""The most operations for the exact answer in float64. Beyond it, only some queries are computed."""
_UNFUSED = ("math", "unfused")
_EXACT_BLOCKS_BYTES = 512 << 20
"""In the exact answer: the scores of a block of queries, and the tensors beside them."""
_NO_ROOM = "not enough memory to measure the error"


@dataclass
class _Entry:
    row: BenchRow
    prepared: Prepared | None = None


class _BrokeError(Exception):
    """A backend raised an error during a round."""

    def __init__(self, backend: str, fault: Exception) -> None:
        super().__init__(backend)
        self.backend, self.fault = backend, fault


class SizeBenchmark:
    """Benchmarks one size: backends enter one by one and then run in turns. `rows` has the state of each, in entry
    order."""

    def __init__(self, workload: Workload, device: torch.device, clock: Clock, *, seed: int, most_flops: float) -> None:
        self.workload, self._device, self._clock, self._seed = workload, device, clock, seed
        self._most_flops = most_flops
        self._heads: HeadTensors | None = None
        self._exact: Exact | None = None
        self._entries: dict[str, _Entry] = {}
        self._weights: dict[torch.Size, Tensor] = {}

    @property
    def rows(self) -> list[BenchRow]:
        """One row for each backend that entered."""
        return [entry.row for entry in self._entries.values()]

    def enter(self, backend: str) -> None:
        """Tries a backend: whether it fits, the first call, the memory, and the error."""
        entry = self._entries[backend] = _Entry(self._empty_row(backend))
        if entry.row.status != "ok":
            return
        failure = None
        try:
            with explained(backend):
                self._first_calls(entry)
        except Exception as fault:
            failure = outcome_of(fault)
        if failure is not None:  # outside of `except`, where the fault no longer holds the failed call's memory
            self._withdraw(backend, *failure)

    def run(self, *, repeat: int | None, budget_s: float) -> None:
        """Times the backends in turns. If one fails it is withdrawn and the rest start again.

        An error that a device reports after the call that caused it withdraws all backends.
        """
        while running := {name: e.prepared for name, e in self._entries.items() if e.prepared is not None}:
            entries = {name: self._timed(name, prepared) for name, prepared in running.items()}
            try:
                rounds = time_in_turns(entries, self._clock, repeat=repeat, budget_s=budget_s, seed=self._seed)
            except _BrokeError as broke:
                withdrawn, outcome = [broke.backend], outcome_of(broke.fault)
            except RuntimeError as fault:
                withdrawn, outcome = list(running), outcome_of(fault)
            else:
                self._judge(*rounds)
                return
            for backend in withdrawn:
                self._withdraw(backend, *outcome)

    def close(self) -> None:
        """Discards code compiled for this size, so that it does not affect the next."""
        if any(name in COMPILED and e.row.first_s is not None for name, e in self._entries.items()):
            torch.compiler.reset()

    def _empty_row(self, backend: str) -> BenchRow:
        """The row with the work to do, and the reason if the backend needs too much memory or time."""
        work, flops = self.workload, expected_flops(backend, self.workload)
        moved = expected_moved_bytes(backend, work)
        row = BenchRow(
            **asdict(work), backend=backend, status="ok", flops=flops, bytes=moved, flops_per_byte=flops / moved
        )
        needed, available = least_bytes(backend, work), free_bytes(str(self._device))
        if not memory.fits(needed, available):
            reason = f"needs {format_size(needed)}, and {format_size(available)} is available"
            return replace(row, status="too-large", reason=reason)
        if flops > self._most_flops:
            longer = flops / self._most_flops
            reason = f"a call would take {longer:.3g} × --call-limit or more, at the rate of a matrix product"
            return replace(row, status="too-slow", reason=reason)
        return row

    def _first_calls(self, entry: _Entry) -> None:
        """Times the first call, with any compilation, and finds the kernel, the memory and the error."""
        work, row = self.workload, entry.row
        if self._heads is None:
            self._heads = draw_heads(work, self._device, self._seed)
        _wait(self._device)
        began = perf_counter()
        prepared = prepare(row.backend, work, self._heads, self._seed)
        whole = partial(prepared.once, work.direction)
        whole()
        _wait(self._device)
        row = replace(row, first_s=perf_counter() - began)
        operators, peak = _watched(whole, self._device)
        n_bytes = None if peak is None else peak + prepared.mask_bytes
        row = replace(_with_what_ran(row, operators), extra_bytes=n_bytes)
        entry.row = self._with_deviation(row, prepared)
        entry.prepared = prepared

    def _with_deviation(self, row: BenchRow, prepared: Prepared) -> BenchRow:
        """The row with the error against the exact answer, or the reason why it has none."""
        most = MOST_EXACT_FLOPS[self._device.type]
        in_float64 = 8 * self.workload.input_bytes // ITEM_BYTES[self.workload.dtype]
        if not memory.fits(3 * in_float64 + _EXACT_BLOCKS_BYTES, free_bytes(str(self._device))):
            return replace(row, reason=_NO_ROOM)
        try:
            exact = self._exact
            if exact is None or prepared.leaves is not self._heads:
                exact = exact_answer(prepared, self.workload, most_flops=most)
            if prepared.leaves is self._heads:
                self._exact = exact
            error = deviation(prepared, self.workload, exact)
        except Exception as fault:
            if not is_out_of_memory(fault):
                raise
            return replace(row, reason=_NO_ROOM)
        if not isfinite(error.mean_error):
            return replace(row, reason="results are not finite", n_error_queries=error.n_queries)
        return replace(row, max_error=error.max_error, mean_error=error.mean_error, n_error_queries=error.n_queries)

    def _withdraw(self, backend: str, status: BackendStatus, reason: str) -> None:
        entry = self._entries[backend]
        entry.row, entry.prepared = replace(entry.row, status=status, reason=reason), None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _timed(self, backend: str, prepared: Prepared) -> Timed:
        """The timed and untimed parts of a call in this direction."""
        direction = self.workload.direction
        around = partial(prepared.running, direction)
        if direction == "forward":
            return Timed(_naming(backend, prepared.forward), around)
        if direction == "both":
            return Timed(_naming(backend, lambda: self._backward(prepared, prepared.forward())), around)
        graphs: list[Tensor] = []  # at most one, because a graph holds everything for backward
        run = _naming(backend, lambda: self._backward(prepared, graphs.pop()))
        return Timed(run, around, before=_naming(backend, lambda: graphs.append(prepared.forward())))

    def _backward(self, prepared: Prepared, out: Tensor) -> object:
        """The gradients of the leaves, for a fixed random gradient of the output."""
        if out.shape not in self._weights:
            generator = torch.Generator(out.device).manual_seed(self._seed)
            self._weights[out.shape] = torch.empty_like(out).normal_(generator=generator)
        return torch.autograd.grad(out, prepared.leaves, self._weights[out.shape])

    def _judge(self, samples: Mapping[str, tuple[float, ...]], n_calls: Mapping[str, int]) -> None:
        """Fills in times, ratios to the fastest, and the backends that are surely fastest."""
        medians = {name: median_interval(column) for name, column in samples.items()}
        first = min(medians, key=lambda name: medians[name].median)
        ratios = {name: paired_ratio(column, samples[first]) for name, column in samples.items()}
        is_sure = len(samples[first]) >= MIN_ROUNDS
        similar = {name for name, ratio in ratios.items() if name != first and ratio.low <= 1}
        fastest = self._fastest(similar | {first}, len(ratios)) if is_sure else set()
        for name, column in samples.items():
            middle, ratio, row = medians[name], ratios[name], self._entries[name].row
            p25, p75 = np.quantile(column, (0.25, 0.75)).tolist()
            self._entries[name].row = replace(
                row, samples_s=column, n_samples=len(column), n_calls=n_calls[name], median_s=middle.median,
                median_low_s=middle.low, median_high_s=middle.high, p25_s=p25, p75_s=p75, min_s=min(column),
                ratio=ratio.median, ratio_low=ratio.low, ratio_high=ratio.high, tflops=row.flops / middle.median / 1e12,
                is_sure=is_sure, is_similar=name in similar, is_fastest=name in fastest,
            )  # fmt: skip

    def _fastest(self, near: set[str], n_backends: int) -> set[str]:
        """The backends in `near` if they ran the same kernel and all others are surely slower; else none."""
        kernels = {self._entries[name].row.ran for name in near}
        is_one_kernel = len(near) == 1 or (len(kernels) == 1 and "unknown" not in kernels)
        return near if len(near) < n_backends and is_one_kernel else set()


def _watched(call: Callable[[], object], device: torch.device) -> tuple[frozenset[str], int | None]:
    """The operators that a call runs, and the most bytes that torch's allocator held for it at a time, results included;
    None where the allocator does not say."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with profile(use_kineto=False, profile_memory=device.type == "cpu") as seen:
        kept = call()
    assert seen.kineto_results is not None  # it has been stopped
    events = seen.kineto_results.events()
    operators = frozenset(event.name() for event in events)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return operators, torch.cuda.max_memory_allocated(device) - before
    del kept
    if device.type != "cpu":
        return operators, None
    held = peak = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda e: int(e.start_ns())):
        held += event.nbytes()
        peak = max(peak, held)
    return operators, peak


def _with_what_ran(row: BenchRow, operators: frozenset[str]) -> BenchRow:
    """The row with the observed kernel, and whether it is a fallback."""
    kernel = kernel_among(operators)
    if row.backend in COMPILED and any(name.startswith("Torch-Compiled Region") for name in operators):
        return replace(row, ran=row.backend if kernel is None else f"{row.backend}, {kernel}")
    ran = "explicit" if row.backend == "explicit" and kernel == "unfused" else kernel or "unknown"
    return replace(row, ran=ran, is_fallback=row.backend in EXPECTED_FUSED and ran in _UNFUSED)


def _naming(backend: str, call: Callable[[], Any]) -> Callable[[], Any]:
    """The call, with its errors marked by the backend."""

    def run() -> Any:
        try:
            return call()
        except Exception as fault:
            raise _BrokeError(backend, fault) from fault

    return run


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
