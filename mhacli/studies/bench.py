"""`mha bench`: attention backends at many sizes, timed in turns, with the error and the memory of each beside its time."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from tempfile import TemporaryDirectory
from typing import Protocol

import torch

from mhacli.benchmark import BenchEnvironment, Benchmark, Ceiling, Control, Row
from mhacli.config import Dtype
from mhacli.studies.ceilings import measure_ceiling
from mhacli.studies.contest import Contest
from mhacli.studies.devices import choose_device, cpu_name, driver, environment
from mhacli.studies.footprint import FreshProcesses, fresh_processes
from mhacli.studies.rounds import Clock, clock_for
from mhacli.sweep import Sweep
from mhacli.workload import Workload


class Told(Protocol):
    """Somebody who is told how far the run is: a share of the whole, and what it does next."""

    def __call__(self, share: float, doing: str) -> None:
        """Called from time to time, with shares that grow from 0 to 1."""


@dataclass(frozen=True)
class Options:
    """How to measure: rounds (None: until they are enough), seconds for the rounds of one size, the seed of the inputs."""

    repeat: int | None = None
    budget_s: float = 4.0
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
    about, clock = _environment(device, device_name), clock_for(device)
    tell(0.0, "a matrix product and a copy")
    before = _ceilings(workloads, device, clock, options.seed)
    with _from_scratch(), _fresh_processes_on(device) as fresh:
        results = []
        for place, workload in enumerate(workloads):

            def tell_part(share: float, doing: str, place: int = place) -> None:
                tell((place + share) / len(workloads), doing)

            results.append(_contest(workload, device, clock, full.backends, options, fresh, tell_part))
    after = _ceilings(workloads, device, clock, options.seed)
    ceilings = {dtype: before[dtype].or_higher(after[dtype]) for dtype in before}
    rows = tuple(row.under(ceilings[row.dtype]) for of_size, _ in results for row in of_size)
    controls = tuple(control for _, control in results if control is not None)
    return Benchmark(options.command, options.seed, about, full, tuple(ceilings.values()), rows, controls)


def _contest(
    workload: Workload, device: torch.device, clock: Clock, backends: Sequence[str], options: Options,
    fresh: FreshProcesses | None, tell: Told,
) -> tuple[list[Row], Control | None]:  # fmt: skip
    """One size: every backend enters, and those that can run do so in turns."""
    contest = Contest(workload, device, clock, seed=options.seed, fresh=fresh)
    for step, backend in enumerate(backends):
        tell(step / len(backends) / 2, f"{backend}, {workload.k_len} tokens")
        contest.enter(backend)
    tell(0.5, f"rounds, {workload.k_len} tokens")
    control = contest.run(repeat=options.repeat, budget_s=options.budget_s)
    return contest.rows, control


def _fresh_processes_on(device: torch.device) -> AbstractContextManager[FreshProcesses | None]:
    """Processes to measure memory in, on the CPU of a system that tells a process its high-water mark."""
    return fresh_processes() if device.type == "cpu" and sys.platform == "linux" else nullcontext()


@contextmanager
def _from_scratch() -> Iterator[None]:
    """Within it, a first call compiles all that it needs, and torch's profiler does not tell of itself on stderr."""
    with TemporaryDirectory(prefix="mha-") as folder:
        ours = {
            "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "KINETO_LOG_LEVEL": "99"
        }  # fmt: skip
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _ceilings(workloads: Sequence[Workload], device: torch.device, clock: Clock, seed: int) -> dict[Dtype, Ceiling]:
    """One for each dtype; measured before the rest and after it, for a busy moment must not lower them."""
    return {dtype: measure_ceiling(dtype, device, clock, seed) for dtype in {workload.dtype for workload in workloads}}


def _environment(device: torch.device, asked: str) -> BenchEnvironment:
    return BenchEnvironment(
        **asdict(environment(device, asked)),
        cpu_name=cpu_name(),
        n_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        driver=driver() if device.type == "cuda" else None,
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )
