"""Ray: workers on this machine or on a cluster, as actors that load the model once.

Ray places actors on nodes, starts their processes and reports which have ended. This module assigns units: an actor has at most
two, the current and the next, so that units wait in the corpus and not in memory. The units of an actor that ended go to another
one, where they give the same bytes.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

from mhacli.commands.scan.engines.single import OnDone, Start, name_here
from mhacli.commands.scan.request import ScanRequest, ScanSettings
from mhacli.commands.scan.units import Unit, UnitFiles
from mhacli.commands.scan.worker import Worker, settings_here
from mhacli.errors import MhaError, missing_library
from mhacli.io.interrupts import Terminated, uninterrupted

IN_FLIGHT = 2
"""The largest number of units assigned to a worker."""
MOST_ATTEMPTS = 4
"""The number of workers that may end while computing one unit, or in a row while loading the model."""
CHECK_S = 5.0
"""The interval between checks for room for further workers and for slow units."""
SLOW, SLOW_S = 5, 60.0
"""A unit is slow after `SLOW` times the median of the others and `SLOW_S` seconds; loading a model is slow after `SLOW_S`."""
BEGIN_AND_END_S = 20.0
"""Seconds in which Ray starts on this machine, or ends, before an interruption is raised."""

_LOADING = -1
"""Takes the place of a unit number while a worker loads the model."""


class _Actor:
    """The worker in a process of Ray."""

    def load(self, start: Start, folder: str) -> str:
        """Loads the model and returns the name of the process. Relative paths are those of the process that started the scan."""
        with suppress(OSError):
            os.chdir(folder)
        self._worker: Worker = start()
        return name_here()

    def compute(self, unit: Unit) -> UnitFiles:
        """The files of a unit."""
        return self._worker.compute(unit)


def _remote_settings(request: ScanRequest, folder: str) -> ScanSettings:
    """The settings of a process of Ray."""
    with suppress(OSError):
        os.chdir(folder)
    return settings_here(request)


@contextmanager
def _plain_interruption() -> Iterator[None]:
    """Raises an interruption as it was where compiled functions of Ray have turned it into a `SystemError`."""
    try:
        yield
    except SystemError as fault:
        if isinstance(fault.__cause__, (KeyboardInterrupt, Terminated)):
            raise fault.__cause__ from None
        raise


@dataclass
class RayEngine:
    """The engine of `--ray`: `address` is `local`, which starts Ray on this machine, `auto`, or the address of a cluster.

    With `workers` None there is one per GPU, or without GPUs one per `cpus_per_worker` processors. Nodes that join later get
    workers too. `note` receives messages on workers that ended and on slow units.
    """

    address: str
    workers: int | None = None
    cpus_per_worker: int = 1
    device: str = "auto"
    note: Callable[[str], None] = lambda message: None
    _began_ray: bool = False

    @_plain_interruption()
    def settings(self, request: ScanRequest) -> ScanSettings:
        """The settings of a worker. Ray runs until `run` has ended or `end` is called."""
        ray = self._connected()
        remote_settings = ray.remote(_remote_settings).options(**self.needs())
        settings: ScanSettings = _result(remote_settings.remote(request, os.getcwd()))
        return settings

    @_plain_interruption()
    def run(self, units: Iterator[Unit], start: Start, on_done: OnDone) -> None:
        """Computes all units. Raises `MhaError` also for a unit during which several workers have ended."""
        try:
            first = next(units, None)
            if first is not None:
                self._connected()
                _Crew(self, start, units, on_done, deque([first])).run()
        finally:
            self.end()

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
        n_cpus = self.workers * self.cpus_per_worker if self.workers and self.address == "local" else None
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray._private.worker._worker_logs_enabled = False  # they would go to stdout, and no option turns them off
        ray._private.utils.set_sigterm_handler = lambda handler: None  # ours ends the process
        try:
            with uninterrupted(BEGIN_AND_END_S) if self.address == "local" else nullcontext():
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

    def capacity(self, needs: Mapping[str, float]) -> int:
        """The number of workers: as many as requested, at most as many as fit on the present nodes if these are otherwise
        idle."""
        names = {"num_cpus": "CPU", "num_gpus": "GPU"}
        nodes = [node["Resources"] for node in _ray().nodes() if node["Alive"]]
        n_possible = sum(int(min(node.get(names[name], 0) // n for name, n in needs.items() if n)) for node in nodes)
        return min(n_possible, self.workers or n_possible)

    def needs(self) -> dict[str, float]:
        """The resources of a worker. Raises `MhaError` if no node has them."""
        has_gpu = _ray().cluster_resources().get("GPU", 0) > 0
        on_gpu = self.device.startswith("cuda") or (self.device == "auto" and has_gpu)
        needs: dict[str, float] = {"num_cpus": self.cpus_per_worker, "num_gpus": int(on_gpu)}
        if not self.capacity(needs):
            resources = f"{self.cpus_per_worker} processors{' and a GPU' * on_gpu}"
            hint = "--cpus-per-worker and --device say what a worker takes"
            raise MhaError(f"no node of the Ray cluster has {resources} for a worker", hint=hint, code="no-worker")
        return needs


def _ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError:
        raise missing_library("ray", "a scan with workers") from None
    return ray


def _result(ref: Any) -> Any:
    """The result of a call in a process of Ray. Raises its exception, or `RayError` if the process has ended."""
    ray = _ray()
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as fault:
        raise fault.cause from None


@dataclass
class _Member:
    """An actor. `where` is its process, None until the model is loaded. It has computed the first of its `units` since
    `since`."""

    actor: Any
    where: str | None = None
    units: deque[Unit] = field(default_factory=deque)
    since: float = 0.0


@dataclass
class _Crew:
    """The actors of a scan and their units. `again` are waiting units of actors that ended."""

    engine: RayEngine
    start: Start
    units: Iterator[Unit]
    on_done: OnDone
    again: deque[Unit]
    members: list[_Member] = field(default_factory=list)
    calls: dict[Any, _Member] = field(default_factory=dict)
    attempts: Counter[int] = field(default_factory=Counter)
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=200))
    slow: set[int] = field(default_factory=set)
    next_check: float = 0.0

    def run(self) -> None:
        """Computes all units."""
        ray = _ray()
        needs = self.engine.needs()
        actors, start = ray.remote(_Actor).options(**needs), ray.put(self.start)
        try:
            while self._assign():
                if monotonic() >= self.next_check:
                    for _ in range(self.engine.capacity(needs) - len(self.members)):
                        self._add(actors.remote(), start)
                    self._note_slow()
                    self.next_check = monotonic() + CHECK_S
                if not self.calls:  # no node is left
                    sleep(CHECK_S)
                    continue
                for call in ray.wait(list(self.calls), timeout=CHECK_S)[0]:
                    self._handle_end(call)
        finally:
            for member in self.members:
                ray.kill(member.actor)

    def _add(self, actor: Any, start: Any) -> None:
        member = _Member(actor, since=monotonic())
        self.members.append(member)
        self.calls[actor.load.remote(start, os.getcwd())] = member

    def _assign(self) -> bool:
        """Assigns units to loaded actors, to those with fewer units first. Returns whether any unit is waiting or in progress."""
        for n_units in range(IN_FLIGHT):
            for member in self.members:
                if member.where is not None and len(member.units) == n_units:
                    unit = self.again.popleft() if self.again else next(self.units, None)
                    if unit is None:
                        break
                    member.since = member.since if member.units else monotonic()
                    member.units.append(unit)
                    self.calls[member.actor.compute.remote(unit)] = member
        return bool(self.again) or any(member.units for member in self.members)

    def _handle_end(self, call: Any) -> None:
        """Handles the end of a call. The calls of an actor end in their order."""
        member = self.calls.pop(call, None)
        if member is None:  # its actor has ended meanwhile
            return
        try:
            result = _result(call)
        except _ray().exceptions.RayError as fault:
            self._put_back(member, fault)
            return
        if member.where is None:
            member.where = result
            self.attempts[_LOADING] = 0
            return
        unit, now = member.units.popleft(), monotonic()
        self.seconds.append(now - member.since)
        member.since = now
        self.on_done(unit, result, member.where)

    def _put_back(self, member: _Member, fault: Exception) -> None:
        """Puts back the units of an actor that ended. Raises `MhaError` if too many actors have ended this way."""
        _ray().kill(member.actor)
        self.members.remove(member)
        self.calls = {call: owner for call, owner in self.calls.items() if owner is not member}
        self.again.extendleft(reversed(member.units))
        self.next_check = 0.0
        current = member.units[0] if member.units else None
        number = current.number if current else _LOADING
        self.attempts[number] += 1
        event = f"worker ended ({type(fault).__name__})" + (
            f" on {member.where}" if member.where else " while it loaded the model"
        )
        if self.attempts[number] >= MOST_ATTEMPTS:
            hint = "its node may lack memory: --max-tokens shortens documents, --cpus-per-worker makes workers fewer"
            during = f" over {_named(current)}" if current else ""
            raise MhaError(f"the {MOST_ATTEMPTS}th {event}{during}", hint=hint, code="worker-ended")
        self.engine.note(f"a {event}" + (f"; {_named(current)} begins anew" if current else ""))

    def _note_slow(self) -> None:
        """Prints a message on each slow unit or worker, once."""
        now = monotonic()
        usual = statistics.median(self.seconds) if self.seconds else 0.0
        for member in self.members:
            number = member.units[0].number if member.units else _LOADING
            is_slow = now - member.since > max(SLOW_S, SLOW * usual)
            if not is_slow or number in self.slow or (member.where is not None and not member.units):
                continue
            self.slow.add(number)
            duration = f"after {now - member.since:.0f} s"
            if member.where is None:
                self.engine.note(f"a worker has not begun {duration}: the cluster may be busy")
            else:
                self.engine.note(
                    f"{_named(member.units[0])} is not done {duration} on {member.where}; others take {usual:.1f} s"
                )


def _named(unit: Unit) -> str:
    """A unit by its number and documents."""
    return f"unit {unit.number} ({unit.named})"
