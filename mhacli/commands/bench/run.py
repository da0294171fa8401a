"""`mha bench`: attention backends at many sizes, timed in turns, with the error and the memory of each."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TextIO, cast

import torch
from torch import Tensor

from mhacli.attention.fused import kernel_among, operators_of
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
from mhacli.commands.bench.result import (
    BackendStatus,
    BenchEnvironment,
    Benchmark,
    BenchRow,
    MachinePeak,
    NoiseBaseline,
)
from mhacli.commands.bench.timing import (
    Clock,
    ForeignLoad,
    InterleavedSamples,
    Timed,
    clock_for,
    is_crowded,
    measure_peak,
    time_in_turns,
)
from mhacli.commands.bench.workload import (
    BACKENDS,
    Sweep,
    Workload,
    exact_bytes,
    expected_extra_bytes,
    expected_flops,
)
from mhacli.compute.base.devices import choose_device, driver, environment, free_bytes
from mhacli.io import memory
from mhacli.io.files import format_size, temporary_folder
from mhacli.io.memory import cpu_name, n_cpus
from mhacli.io.progress import Progress, no_progress
from mhacli.record.intervals import MIN_ROUNDS, is_sufficient, median_interval, paired_ratio, quartiles
from mhacli.settings import Dtype


@dataclass(frozen=True)
class BenchOptions:
    """The number of rounds (None: until precise enough), the seconds for one size's rounds, and the limit of one call."""

    repeat: int | None = None
    budget_s: float = 3.0
    call_limit_s: float = 5.0
    seed: int = 0
    threads: int | None = None
    command: tuple[str, ...] = ()


def bench(
    sweep: Sweep,
    device_name: str,
    options: BenchOptions,
    report_progress: Progress = no_progress,
    announce: Callable[[float, int], None] = lambda seconds, n_sizes: None,
) -> Benchmark:
    """The benchmark of every backend at every size of the sweep. A backend that cannot run has a row with the reason.

    Before the first size, `announce` receives the estimated total seconds and the number of sizes. Raises `MhaError` if
    the device is missing, and `UsageError` for invalid sizes.
    """
    device = choose_device(device_name)
    workloads, full = sweep.workloads(device.type), sweep.on(device.type)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    where = _environment(device, device_name)
    report_progress(0.0, "a matrix product and a copy")
    with _on(device), _from_scratch():
        clock = clock_for(device)
        ceilings = _peaks(workloads, device, clock, options.seed)
        announce(
            sum(expected_s(work, full.backends, ceilings[work.dtype], options) for work in workloads), len(workloads)
        )
        results: list[tuple[list[BenchRow], NoiseBaseline | None]] = []
        with _fresh_processes_on(device) as fresh:
            for place, workload in enumerate(workloads):
                timed = [row for of_size, _ in results for row in of_size]
                most_flops = options.call_limit_s * _best_rate(timed, ceilings[workload.dtype])
                if max(expected_flops(backend, workload) for backend in full.backends) > most_flops:
                    peak = measure_peak(workload.dtype, device, clock, options.seed)
                    ceilings[workload.dtype] = ceilings[workload.dtype].or_higher(peak)
                    most_flops = options.call_limit_s * _best_rate(timed, ceilings[workload.dtype])
                benchmark = SizeBenchmark(
                    workload, device, clock, seed=options.seed, most_flops=most_flops, fresh=fresh
                )
                report_size = partial(_report_size, report_progress, place, len(workloads))
                results.append(_measured_size(benchmark, full.backends, options, report_size))
        report_progress(1.0, "a matrix product and a copy again")
        with suppress(RuntimeError, MemoryError):  # a failing device must not lose the rows
            for dtype, peak in _peaks(workloads, device, clock, options.seed).items():
                ceilings[dtype] = ceilings[dtype].or_higher(peak)
    rows = tuple(row.under(ceilings[row.dtype]) for of_size, _ in results for row in of_size)
    controls = tuple(control for _, control in results if control is not None)
    return Benchmark(options.command, options.seed, where, full, tuple(ceilings.values()), rows, controls)


_USUAL_FRACTION = 0.4
"""The usual speed of a backend as a fraction of the machine's matrix product."""
_CALLS_BEFORE, _PREPARING_S = 6, 0.3
"""Per backend and size, before the rounds: the number of calls (fresh process, kernel, error), and other seconds."""


def expected_s(workload: Workload, backends: Sequence[str], ceiling: MachinePeak, options: BenchOptions) -> float:
    """The estimated seconds for a size, without backends that are too slow."""
    calls = [expected_flops(backend, workload) / (ceiling.matmul_tflops * 1e12) for backend in backends]
    calls = [seconds / _USUAL_FRACTION for seconds in calls if seconds <= options.call_limit_s]
    one_round = sum(calls) + min(calls, default=0.0)
    least = (MIN_ROUNDS if options.repeat is None else options.repeat) * one_round
    rounds = max(least, options.budget_s if options.repeat is None and calls else 0.0)
    return sum(_PREPARING_S + _CALLS_BEFORE * seconds for seconds in calls) + rounds


def _report_size(report_progress: Progress, place: int, n_places: int, fraction: float, doing: str) -> None:
    report_progress((place + fraction) / n_places, doing)


def _best_rate(timed: Sequence[BenchRow], ceiling: MachinePeak) -> float:
    """Operations per second of the matrix product or of a faster backend, because the machine may have been busy."""
    reached = (row.tflops or 0.0 for row in timed if row.dtype == ceiling.dtype)
    return max(ceiling.matmul_tflops, *reached, 0.0) * 1e12


def _measured_size(
    benchmark: SizeBenchmark, backends: Sequence[str], options: BenchOptions, report_progress: Progress
) -> tuple[list[BenchRow], NoiseBaseline | None]:
    """The rows of one size: every backend is prepared, and those that can run are timed in turns."""
    for step, backend in enumerate(backends):
        report_progress(step / len(backends) / 2, f"{benchmark.workload.k_len} tokens: {backend}")
        benchmark.enter(backend)
    report_progress(0.5, f"{benchmark.workload.k_len} tokens: rounds")
    control = benchmark.run(repeat=options.repeat, budget_s=options.budget_s)
    benchmark.close()
    return benchmark.rows, control


def _fresh_processes_on(device: torch.device) -> AbstractContextManager[FreshProcesses | None]:
    """Processes for measuring CPU memory, on systems that report a process's peak."""
    return fresh_processes() if device.type == "cpu" and sys.platform == "linux" else nullcontext()


@contextmanager
def _from_scratch() -> Iterator[None]:
    """Hides earlier compilation results from torch within the context, and silences its profiler."""
    before = dict(os.environ)
    with temporary_folder() as folder:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "KINETO_LOG_LEVEL": "99"}
        try:
            yield
        finally:
            os.environ.clear()  # torch adds variables that refer to the folder
            os.environ |= before


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _peaks(workloads: Sequence[Workload], device: torch.device, clock: Clock, seed: int) -> dict[Dtype, MachinePeak]:
    """The machine's peak for each dtype. It is measured before and after all else, since a busy moment would lower it."""
    return {
        dtype: measure_peak(dtype, device, clock, seed)
        for dtype in dict.fromkeys(workload.dtype for workload in workloads)
    }


def _environment(device: torch.device, device_asked: str) -> BenchEnvironment:
    return BenchEnvironment(
        **asdict(environment(device, device_asked)),
        cpu_name=cpu_name(),
        n_cpus=n_cpus(),
        driver=driver() if device.type == "cuda" else None,
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


# ------------------------------------------------------------------------------------------------------------- one size


MOST_EXACT_FLOPS = {"cpu": 2e10, "cuda": 1e12, "mps": 2e10}
"""The most operations for the exact answer in float64. Beyond it, only some queries are computed."""
_UNFUSED = ("math", "unfused")
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

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        clock: Clock,
        *,
        seed: int,
        most_flops: float,
        fresh: FreshProcesses | None,
    ) -> None:
        self.workload, self._device, self._clock, self._seed, self._fresh = workload, device, clock, seed, fresh
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
        """Tries a backend: predicted memory, a fresh process, the first call, and the error."""
        entry = _Entry(self._empty_row(backend))
        self._entries[backend] = entry
        if entry.row.status != "ok":
            return
        if self._fresh is not None:
            use = self._fresh.memory_use(backend, self.workload, self._seed)
            entry.row = replace(entry.row, status=use.status, reason=use.reason, extra_bytes=use.extra_bytes)
            if use.status != "ok":
                return
        failure = None
        try:
            with explained(backend):
                self._first_calls(entry)
        except Exception as fault:
            failure = outcome_of(fault)
        if failure is not None:  # outside of `except`, where the fault no longer holds the failed call's memory
            self._withdraw(backend, *failure)

    def run(self, *, repeat: int | None, budget_s: float) -> NoiseBaseline | None:
        """Times the backends in turns. If one fails it is withdrawn and the rest start again. None if no backend is
        left.

        An error that a device reports after the call that caused it withdraws all backends.
        """
        while running := {name: e.prepared for name, e in self._entries.items() if e.prepared is not None}:
            entries = {name: self._timed(name, prepared) for name, prepared in running.items()}
            others = ForeignLoad()
            try:
                rounds = time_in_turns(entries, self._clock, repeat=repeat, budget_s=budget_s, seed=self._seed)
            except _BrokeError as broke:
                withdrawn, outcome = [broke.backend], outcome_of(broke.fault)
            except RuntimeError as fault:
                withdrawn, outcome = list(running), outcome_of(fault)
            else:
                return self._judge(rounds, others.cpus())
            for backend in withdrawn:
                self._withdraw(backend, *outcome)
        return None

    def close(self) -> None:
        """Discards code compiled for this size, so that it does not affect the next."""
        if any(BACKENDS[name].is_compiled and e.row.first_s is not None for name, e in self._entries.items()):
            torch.compiler.reset()

    def _empty_row(self, backend: str) -> BenchRow:
        """The row with predictions, and the reason if the backend needs too much memory or time."""
        work = self.workload
        predicted = expected_extra_bytes(backend, work, self._device.type)
        row = BenchRow(**asdict(work), backend=backend, status="ok", predicted_bytes=predicted)
        needed, available = predicted + work.input_bytes, free_bytes(str(self._device))
        if not memory.fits(needed, available):
            reason = f"needs {format_size(needed)}, and {format_size(available)} is available"
            return replace(row, status="too-large", reason=reason)
        if row.flops > self._most_flops:
            longer = row.flops / self._most_flops
            reason = f"a call would take {longer:.3g} × --call-limit or more, at the best rate of this run"
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
        row = _with_what_ran(row, operators_of(whole))
        if self._device.type == "cuda":
            row = replace(row, extra_bytes=cuda_memory_use(prepared, work))
        entry.row = self._with_deviation(row, prepared)
        entry.prepared = prepared

    def _with_deviation(self, row: BenchRow, prepared: Prepared) -> BenchRow:
        """The row with the error against the exact answer, or the reason why it has none."""
        most = MOST_EXACT_FLOPS[self._device.type]
        if not memory.fits(exact_bytes(self.workload), free_bytes(str(self._device))):
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

    def _judge(self, rounds: InterleavedSamples, foreign_load: float | None) -> NoiseBaseline:
        """Fills in times, ratios to the fastest, and the backends that are surely fastest. The result is the noise."""
        again = paired_ratio(rounds.control, rounds.samples[rounds.reference])
        control = NoiseBaseline(**asdict(self.workload), backend=rounds.reference, samples_s=rounds.control,
                                median_s=median_interval(rounds.control).median, foreign_load=foreign_load,
                                ratio=again.median, ratio_low=again.low, ratio_high=again.high)  # fmt: skip
        first = min(rounds.samples, key=lambda name: median_interval(rounds.samples[name]).median)
        is_sure = is_sufficient(len(rounds.control)) and not (
            self._device.type == "cpu" and is_crowded(foreign_load, torch.get_num_threads(), n_cpus())
        )
        ratios = {name: paired_ratio(samples, rounds.samples[first]) for name, samples in rounds.samples.items()}
        similar = {name for name, ratio in ratios.items() if name != first and ratio.low <= control.noise}
        fastest = self._fastest(similar | {first}, len(ratios)) if is_sure else set()
        for name, samples in rounds.samples.items():
            middle, (p25, p75), ratio = median_interval(samples), quartiles(samples), ratios[name]
            row = self._entries[name].row
            self._entries[name].row = replace(
                row, samples_s=samples, n_calls=rounds.n_calls[name], median_s=middle.median, median_low_s=middle.low,
                median_high_s=middle.high, p25_s=p25, p75_s=p75, min_s=min(samples), ratio=ratio.median,
                ratio_low=ratio.low, ratio_high=ratio.high,
                is_sure=is_sure, is_similar=name in similar, is_fastest=name in fastest,
            )  # fmt: skip
        return control

    def _fastest(self, near: set[str], n_backends: int) -> set[str]:
        """The backends in `near` if they ran the same kernel and all others are surely slower; else none."""
        kernels = {self._entries[name].row.ran for name in near}
        is_one_kernel = len(near) == 1 or (len(kernels) == 1 and "unknown" not in kernels)
        return near if len(near) < n_backends and is_one_kernel else set()


_MHA_KERNELS: Mapping[str, str | None] = {"explicit": "unfused", "tiled": None}
"""The kernel that torch's operators show for mha's own backends: an unfused softmax, or none."""


def _with_what_ran(row: BenchRow, operators: frozenset[str]) -> BenchRow:
    """The row with the observed kernel, and whether it is a fallback."""
    kernel, kind = kernel_among(operators), BACKENDS[row.backend]
    if kind.is_compiled and any(name.startswith("Torch-Compiled Region") for name in operators):
        return replace(row, ran=row.backend if kernel is None else f"{row.backend}, {kernel}")
    is_mha = row.backend in _MHA_KERNELS and kernel == _MHA_KERNELS[row.backend]
    ran = row.backend if is_mha else kernel or "unknown"
    return replace(row, ran=ran, is_fallback=kind.hopes_for_fused and ran in _UNFUSED)


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


# ------------------------------------------------------------------------------------------- memory of a fresh process


_CHILD_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Larger blocks are freed at once, so that the peak shows the memory needed at a time. One process compiles."""

_PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h."""


class MemoryUse(NamedTuple):
    """The outcome in a fresh process. The bytes are None if the system does not report them."""

    status: BackendStatus
    extra_bytes: int | None
    reason: str | None = None


def cuda_memory_use(prepared: Prepared, workload: Workload) -> int:
    """The bytes that CUDA's allocator used beyond the inputs."""
    device = prepared.leaves[0].device
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    prepared.once(workload.direction)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before + prepared.mask_bytes


class FreshProcesses:
    """Runs each backend and size in a process of its own on the CPU."""

    def __init__(self, parent: subprocess.Popen[str]) -> None:
        self._parent = parent

    def memory_use(self, backend: str, workload: Workload, seed: int) -> MemoryUse:
        """The memory and outcome of one call. A process killed by the system counts as `out-of-memory`."""
        question = {"backend": backend, "workload": asdict(workload), "seed": seed, "threads": torch.get_num_threads()}
        questions, answers = cast(TextIO, self._parent.stdin), cast(TextIO, self._parent.stdout)
        try:
            questions.write(json.dumps(question) + "\n")
            questions.flush()
            return MemoryUse(*json.loads(answers.readline()))
        except (OSError, ValueError):
            return MemoryUse("ok", None, "the process to measure memory in has ended")


@contextmanager
def fresh_processes() -> Iterator[FreshProcesses]:
    """A process that loads torch and forks for each question. It ends with the context or with this process."""
    command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with temporary_folder() as folder:
        child_environment = os.environ | _CHILD_ENVIRONMENT | {"TORCHINDUCTOR_CACHE_DIR": folder}
        with subprocess.Popen(command, text=True, env=child_environment, **pipes) as parent:
            try:
                yield FreshProcesses(parent)
            finally:
                parent.kill()
                with suppress(OSError):  # unread questions
                    cast(TextIO, parent.stdin).close()


def serve() -> None:
    """Answers each question on stdin with the outcome in a forked child."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    for line in sys.stdin:
        question = json.loads(line)
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # end with the parent
            use = _measured(
                question["backend"], Workload(**question["workload"]), question["seed"], question["threads"]
            )
            print(json.dumps(use), file=answers, flush=True)
            os._exit(0)
        _, ended = os.waitpid(child, 0)
        if ended:
            status = "out-of-memory" if os.WIFSIGNALED(ended) and os.WTERMSIG(ended) == signal.SIGKILL else "failed"
            print(json.dumps((status, None, f"its own process ended with {ended}")), file=answers, flush=True)


def _measured(backend: str, workload: Workload, seed: int, threads: int) -> MemoryUse:
    """The memory of the second call, after one to warm up."""
    torch.set_num_threads(threads)
    try:
        with explained(backend):
            prepared = prepare(backend, workload, draw_heads(workload, torch.device("cpu"), seed), seed)
            prepared.once(workload.direction)
        before = _reset_mark()
        kept = prepared.once(workload.direction)
        after = _status_bytes("VmHWM")
        del kept
    except Exception as fault:
        status, reason = outcome_of(fault)
        return MemoryUse(status, None, reason)
    if before is None or after is None:
        return MemoryUse("ok", None)
    return MemoryUse("ok", max(0, after - before) + prepared.mask_bytes)


def _reset_mark() -> int | None:
    """The resident bytes now, after a reset of the peak to them; None if the system cannot."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return None
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
