"""`mha bench`: attention backends at many sizes, timed in turns, with the error and the memory of each beside its time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial

import torch

from mhacli.compute.base.devices import choose_device, cpu_name, driver, environment
from mhacli.compute.bench.cpu_load import n_cpus
from mhacli.compute.bench.memory import FreshProcesses, fresh_processes
from mhacli.compute.bench.one_size import Contest
from mhacli.compute.bench.peak import measure_ceiling
from mhacli.compute.bench.timing import Clock, clock_for
from mhacli.io.files import temporary_folder
from mhacli.results.bench.result import BenchEnvironment, Benchmark, Ceiling, Control, Row
from mhacli.results.bench.sweep import Sweep
from mhacli.results.bench.workload import Workload
from mhacli.spec.config import Dtype

Told = Callable[[float, str], None]
"""Somebody who is told how far the run is, a share that grows from 0 to 1, and what it does next."""


@dataclass(frozen=True)
class Options:
    """How to measure: rounds (None: until they are enough), seconds for the rounds of one size, and for one call at most."""

    repeat: int | None = None
    budget_s: float = 3.0
    call_limit_s: float = 5.0
    seed: int = 0
    threads: int | None = None
    command: tuple[str, ...] = ()


def _untold(share: float, doing: str) -> None:
    """Tells nobody."""


def bench(sweep: Sweep, device_name: str, options: Options, tell: Told = _untold) -> Benchmark:
    """Every backend at every size of the sweep. What cannot run is a row that says why.

    Raises `MhaError` where the device is not there, and `UsageError` for sizes that cannot be.
    """
    device = choose_device(device_name)
    workloads, full = sweep.workloads(device.type), sweep.on(device.type)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    about = _environment(device, device_name)
    tell(0.0, "a matrix product and a copy")
    with _on(device), _from_scratch():
        clock = clock_for(device)
        ceilings = _ceilings(workloads, device, clock, options.seed)
        results = []
        with _fresh_processes_on(device) as fresh:
            for place, workload in enumerate(workloads):
                most_flops = options.call_limit_s * ceilings[workload.dtype].matmul_tflops * 1e12
                contest = Contest(workload, device, clock, seed=options.seed, most_flops=most_flops, fresh=fresh)
                part = partial(_tell_part, tell, place, len(workloads))
                results.append(_held(contest, full.backends, options, part))
        tell(1.0, "a matrix product and a copy again")
        with suppress(RuntimeError, MemoryError):  # a device in trouble must not take the rows along
            for dtype, again in _ceilings(workloads, device, clock, options.seed).items():
                ceilings[dtype] = ceilings[dtype].or_higher(again)
    rows = tuple(row.under(ceilings[row.dtype]) for of_size, _ in results for row in of_size)
    controls = tuple(control for _, control in results if control is not None)
    return Benchmark(options.command, options.seed, about, full, tuple(ceilings.values()), rows, controls)


def _tell_part(tell: Told, place: int, n_places: int, share: float, doing: str) -> None:
    """A share of one of several places, as a share of the whole."""
    tell((place + share) / n_places, doing)


def _held(contest: Contest, backends: Sequence[str], options: Options, tell: Told) -> tuple[list[Row], Control | None]:
    """One size: every backend enters, and those that can run do so in turns."""
    for step, backend in enumerate(backends):
        tell(step / len(backends) / 2, f"{contest.workload.k_len} tokens: {backend}")
        contest.enter(backend)
    tell(0.5, f"{contest.workload.k_len} tokens: rounds")
    control = contest.run(repeat=options.repeat, budget_s=options.budget_s)
    contest.close()
    return contest.rows, control


def _fresh_processes_on(device: torch.device) -> AbstractContextManager[FreshProcesses | None]:
    """Processes to measure memory in, on the CPU of a system that tells a process its high-water mark."""
    return fresh_processes() if device.type == "cpu" and sys.platform == "linux" else nullcontext()


@contextmanager
def _from_scratch() -> Iterator[None]:
    """Within it, nothing compiled in an earlier run is found, and torch's profiler does not tell of itself on stderr."""
    before = dict(os.environ)
    with temporary_folder() as folder:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "KINETO_LOG_LEVEL": "99"}
        try:
            yield
        finally:
            os.environ.clear()  # torch adds names of its own that lead into the folder
            os.environ |= before


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Within it, the device is the one that events and streams belong to."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _ceilings(workloads: Sequence[Workload], device: torch.device, clock: Clock, seed: int) -> dict[Dtype, Ceiling]:
    """One for each dtype; measured before the rest and after it, for a busy moment must not lower them."""
    return {
        dtype: measure_ceiling(dtype, device, clock, seed)
        for dtype in dict.fromkeys(workload.dtype for workload in workloads)
    }


def _environment(device: torch.device, asked: str) -> BenchEnvironment:
    return BenchEnvironment(
        **asdict(environment(device, asked)),
        cpu_name=cpu_name(),
        n_cpus=n_cpus(),
        driver=driver() if device.type == "cuda" else None,
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )
