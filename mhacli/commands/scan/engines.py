"""Engines compute the units of a corpus: in this process, or in workers of Ray on this machine or a cluster.

Ranks, processes that `torchrun` or `srun` has started, compute every n-th unit each. The results depend on none of this.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mhacli.commands.scan.request import ScanRequest, ScanSettings
from mhacli.commands.scan.units import Unit, UnitFiles
from mhacli.commands.scan.worker import Worker, settings_here
from mhacli.errors import MhaError, UsageError, missing_library
from mhacli.io.interrupts import uninterrupted

Start = Callable[[], Worker]
"""Loads the model in the process that calls it. Can be pickled."""
Computed = tuple[Unit, UnitFiles, str]
"""A unit with its files and the name of its worker."""


def name_here() -> str:
    """The name of this process among workers."""
    return f"{platform.node()}, process {os.getpid()}"


def computed_here(units: Iterator[Unit], start: Start) -> Iterator[Computed]:
    """The units, computed one after the other in this process. The model is loaded before the first."""
    worker = None
    for unit in units:
        worker = worker or start()
        yield unit, worker.compute(unit), name_here()


# --------------------------------------------------------------------------------------------------------------- ranks


def rank_here() -> tuple[int, int] | None:
    """The number of this process and the number of all, by RANK and WORLD_SIZE; None unless both are set. Raises `UsageError` for
    impossible values."""
    rank, n_ranks = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or n_ranks is None:
        return None
    if not (rank.isdecimal() and n_ranks.isdecimal() and int(rank) < int(n_ranks)):
        raise UsageError(
            f"RANK={rank} and WORLD_SIZE={n_ranks} are not a number from 0 and a larger number of processes",
            hint="without these two variables the process computes all units",
        )
    return int(rank), int(n_ranks)


def on_own_gpu(request: ScanRequest) -> ScanRequest:
    """The request of a rank on its own GPU: if several are visible, the one with the number LOCAL_RANK."""
    local, n_gpus = os.environ.get("LOCAL_RANK", ""), torch.cuda.device_count()
    if request.run.model.device not in ("auto", "cuda") or not local.isdecimal() or n_gpus < 2:
        return request
    return replace(request, given={**request.given, "device": f"cuda:{int(local) % n_gpus}"})


# ----------------------------------------------------------------------------------------------------------------- Ray

MAX_ATTEMPTS = 4
"""The number of processes that may end while computing one unit."""
CHECK_S = 5.0
"""The interval between checks for room for further workers."""
BEGIN_AND_END_S = 20.0
"""Seconds in which Ray starts on this machine, or ends, before an interruption is raised."""


class _Actor:
    """A worker in a process of Ray. Relative paths are those of the process that started the scan, in `folder`."""

    def __init__(self, folder: str) -> None:
        with suppress(OSError):
            os.chdir(folder)
        self._worker: Worker | None = None

    def settings(self, request: ScanRequest) -> ScanSettings:
        """The settings of the process."""
        return settings_here(request)

    def compute(self, unit: Unit, start: Start) -> tuple[UnitFiles, str]:
        """The files of a unit, and the name of the process. The first unit loads the model, so that Ray limits how often a
        process that ends while it loads is started again."""
        self._worker = self._worker or start()
        return self._worker.compute(unit), name_here()


@dataclass
class RayEngine:
    """The engine of `--ray`: `address` is `local`, which starts Ray on this machine, `auto`, or the address of a cluster.

    With `workers` None there are as many as fit: one per GPU, or without GPUs one per `n_cpus` processors. Nodes that join later
    get workers too. Ray starts processes that ended again, and their units.
    """

    address: str
    workers: int | None = None
    n_cpus: int = 1
    device: str = "auto"
    _actors: list[Any] = field(default_factory=list)
    _began_ray: bool = False

    def settings(self, request: ScanRequest) -> ScanSettings:
        """The settings of a worker. Raises `MhaError` if Ray is missing, no cluster answers or no node has room for a worker."""
        settings: ScanSettings = self._result(self._new_actor().settings.remote(request), "")
        return settings

    def computed(self, units: Iterator[Unit], start: Start) -> Iterator[Computed]:
        """The units in the order in which they are done. Raises `MhaError` also for a unit during which several processes end."""
        ray = self._connected()
        start_here, calls, is_over = ray.put(start), dict[Any, tuple[Any, Unit]](), False

        def begin(actor: Any) -> None:
            nonlocal is_over
            if unit := next(units, None):
                calls[actor.compute.remote(unit, start_here)] = actor, unit
            else:
                is_over = True
                ray.kill(actor)  # its room may be needed by one that Ray starts again

        for actor in [*self._actors]:
            begin(actor)
        while not is_over or calls:
            while not is_over and len(self._actors) < self._n_possible():
                begin(self._new_actor())
            for call in ray.wait([*calls], timeout=CHECK_S)[0] if calls else ():
                actor, unit = calls.pop(call)
                begin(actor)
                yield unit, *self._result(call, f" over unit {unit.number} ({unit.named})")

    def end(self) -> None:
        """Ends Ray's processes that were started here, which would outlive this process."""
        if self._began_ray:
            with uninterrupted(BEGIN_AND_END_S):
                _ray().shutdown()
                self._began_ray = False

    def _connected(self) -> Any:
        """The module ray, connected to a cluster. Raises `MhaError` if Ray is missing or no cluster answers."""
        ray = _ray()
        if ray.is_initialized():
            return ray
        n_cpus = self.workers * self.n_cpus if self.workers and self.address == "local" else None
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            with uninterrupted(BEGIN_AND_END_S):  # which also puts our handler of SIGTERM back
                ray.init(
                    self.address, num_cpus=n_cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
                )
                self._began_ray = True
        except (OSError, ValueError, RuntimeError) as fault:
            raise MhaError(
                f"--ray {self.address}: {fault}",
                hint="ray start --head starts a cluster here, and --ray local needs none",
                code="no-cluster",
            ) from fault
        return ray

    def _new_actor(self) -> Any:
        """A further worker. Raises `MhaError` if no node has room for one."""
        ray, needs = self._connected(), self._needs()
        if not self._n_possible():
            resources = f"{self.n_cpus} processors{' and a GPU' * needs['num_gpus']}"
            hint = "--cpus-per-worker and --device say what a worker takes"
            raise MhaError(f"no node of the Ray cluster has {resources} for a worker", hint=hint, code="no-worker")
        retries = {"max_restarts": -1, "max_task_retries": MAX_ATTEMPTS - 1}
        self._actors.append(ray.remote(_Actor).options(**needs, **retries).remote(os.getcwd()))
        return self._actors[-1]

    def _needs(self) -> dict[str, int]:
        """The resources of a worker."""
        has_gpu = _ray().cluster_resources().get("GPU", 0) > 0
        on_gpu = self.device.startswith("cuda") or (self.device == "auto" and has_gpu)
        return {"num_cpus": self.n_cpus, "num_gpus": int(on_gpu)}

    def _n_possible(self) -> int:
        """The number of workers: as many as requested, at most as many as fit on the present nodes if idle."""
        needs = {name: n for name, n in zip(("CPU", "GPU"), self._needs().values(), strict=True) if n}
        nodes = [node["Resources"] for node in _ray().nodes() if node["Alive"]]
        n_fitting = sum(int(min(node.get(name, 0) // n for name, n in needs.items())) for node in nodes)
        return min(n_fitting, self.workers or n_fitting)

    def _result(self, call: Any, during: str) -> Any:
        """The result of a call. Raises its exception, and `MhaError` if too many processes have ended."""
        ray = _ray()
        try:
            return ray.get(call)
        except ray.exceptions.RayTaskError as fault:
            raise fault.cause from None
        except ray.exceptions.RayError as fault:
            hint = "its node may lack memory: --max-tokens shortens documents, --cpus-per-worker makes workers fewer"
            message = f"{MAX_ATTEMPTS} workers ended{during}: {type(fault).__name__}"
            raise MhaError(message, hint=hint, code="worker-ended") from fault


def _ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError:
        raise missing_library("ray", "a scan with workers") from None
    return ray
