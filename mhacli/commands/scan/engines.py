"""Where the units of a corpus are computed: by ranks, or by workers of Ray. The results do not depend on it.

Ranks are processes that `torchrun` or `srun` has started; each computes every n-th unit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mhacli.commands.scan.request import ScanRequest, ScanSettings
from mhacli.commands.scan.units import Unit, UnitFiles
from mhacli.commands.scan.worker import Worker
from mhacli.errors import MhaError, UsageError, missing_library
from mhacli.io.interrupts import uninterrupted


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


@contextmanager
def workers_of(request: ScanRequest) -> Iterator[Worker | RayEngine]:
    """This process as a worker, or those of Ray, which end with the context. Raises `UsageError` for Ray in a rank."""
    rank = rank_here()
    if request.ray is None and request.workers is None:
        yield Worker(on_own_gpu(request))
        return
    if rank:
        raise UsageError(
            f"{'--workers' if request.ray is None else '--ray'} does not work in a rank (RANK and WORLD_SIZE are set)",
            hint="one process with --ray uses all nodes of a Ray cluster",
        )
    engine = RayEngine(request)
    try:
        yield engine
    except SystemError as fault:  # compiled functions of Ray raise it instead of an interruption
        raise fault.__cause__ or fault from None
    finally:
        engine.end()


# ----------------------------------------------------------------------------------------------------------------- Ray

MAX_ATTEMPTS = 4
"""The number of processes that may end while computing one unit."""
CHECK_S = 5.0
"""The interval between checks for room for further workers."""
BEGIN_AND_END_S = 20.0
"""Seconds in which Ray starts on this machine, or ends, before an interruption is raised."""


@dataclass
class RayEngine:
    """The workers of `--ray`: of a new Ray on this machine, or of a cluster.

    Without `--workers` there are as many as fit: one per GPU, or without GPUs one per `--cpus-per-worker` processors. Nodes that
    join later get workers too. Ray starts processes that ended again, and their units.
    """

    request: ScanRequest
    _actors: list[Any] = field(default_factory=list)
    _began_ray: bool = False

    def settings(self) -> ScanSettings:
        """The settings of a worker. Raises `MhaError` if Ray is missing, no cluster answers or no node has room for a worker."""
        settings: ScanSettings = self._result(self._new_actor().settings.remote(), "say its settings")
        return settings

    def computed(self, units: Iterator[Unit], settings: ScanSettings) -> Iterator[tuple[Unit, UnitFiles, str]]:
        """The units with their files and workers, as they are done. Raises `MhaError` also for one during which processes end."""
        ray, calls, is_over = self._connected(), dict[Any, tuple[Any, Unit]](), False

        def begin(actor: Any) -> None:
            nonlocal is_over
            if unit := next(units, None):
                calls[actor.compute.remote(unit, settings)] = actor, unit
            else:
                is_over = True
                ray.kill(actor)  # its room may be needed by one that Ray starts again

        for actor in [*self._actors]:
            begin(actor)
        while not is_over or calls:
            while not is_over and len(self._actors) < self._room()[1]:
                begin(self._new_actor())
            for call in ray.wait([*calls], timeout=CHECK_S)[0] if calls else ():
                actor, unit = calls.pop(call)
                begin(actor)
                yield unit, *self._result(call, f"compute unit {unit.number} ({unit.named})")

    def end(self) -> None:
        """Ends Ray's processes that were started here, which would outlive this process."""
        if self._began_ray:
            with uninterrupted(BEGIN_AND_END_S):
                self._connected().shutdown()
                self._began_ray = False

    def _connected(self) -> Any:
        """The module ray, connected to a cluster. Raises `MhaError` if Ray is missing or no cluster answers."""
        try:
            import ray
        except ModuleNotFoundError:
            raise missing_library("ray", "a scan with workers") from None
        if ray.is_initialized():
            return ray
        address, workers = self.request.ray or "local", self.request.workers
        n_cpus = workers * self.request.n_cpus if workers and address == "local" else None
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            with uninterrupted(BEGIN_AND_END_S):  # which also puts our handler of SIGTERM back
                ray.init(address, num_cpus=n_cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
                self._began_ray = True
        except (OSError, ValueError, RuntimeError) as fault:
            hint = "ray start --head starts a cluster here, and --ray local needs none"
            raise MhaError(f"--ray {address}: {fault}", hint=hint, code="no-cluster") from fault
        return ray

    def _new_actor(self) -> Any:
        """A further worker. Raises `MhaError` if no node has room for one."""
        ray, (needs, n_possible) = self._connected(), self._room()
        if not n_possible:
            resources = f"{needs['CPU']} processors{' and a GPU' * ('GPU' in needs)}"
            hint = "--cpus-per-worker and --device say what a worker takes"
            raise MhaError(f"no node of the Ray cluster has {resources} for a worker", hint=hint, code="no-worker")
        actor = ray.remote(Worker).options(
            num_cpus=needs["CPU"],
            num_gpus=needs.get("GPU", 0),
            max_restarts=-1,
            max_task_retries=MAX_ATTEMPTS - 1,
        )
        self._actors.append(actor.remote(self.request, os.getcwd()))
        return self._actors[-1]

    def _room(self) -> tuple[dict[str, int], int]:
        """What a worker takes, and the number of workers: as many as requested, at most as many as fit on idle nodes."""
        nodes = [node["Resources"] for node in self._connected().nodes() if node["Alive"]]
        device = self.request.run.model.device
        on_gpu = device.startswith("cuda") or (device == "auto" and any(node.get("GPU") for node in nodes))
        needs = {"CPU": self.request.n_cpus, **({"GPU": 1} if on_gpu else {})}
        n_possible = sum(int(min(node.get(name, 0) // n for name, n in needs.items())) for node in nodes)
        return needs, min(n_possible, self.request.workers or n_possible)

    def _result(self, call: Any, job: str) -> Any:
        """The result of a call. Raises its exception, and `MhaError` if too many processes have ended."""
        ray = self._connected()
        try:
            return ray.get(call)
        except ray.exceptions.RayTaskError as fault:
            raise fault.cause from None
        except ray.exceptions.RayError as fault:
            hint = "its node may lack memory: --max-tokens shortens documents, --cpus-per-worker makes workers fewer"
            raise MhaError(f"no worker could {job}: {type(fault).__name__}", hint=hint, code="worker-ended") from fault
