"""Ray: workers on this machine or on a cluster, as actors that load the model once.

Ray finds places for actors, starts their processes and says which have ended. Here is only who has which unit: an actor has at
most two, that which it computes and the next, so that units wait in the corpus and not in memory. A unit whose actor or node has
ended goes to another, and gives the same bytes there.
"""

from __future__ import annotations

import os
import signal
import statistics
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

from mhacli.compute.scan.engines.single import OnDone, name_here
from mhacli.compute.scan.worker import Worker, WorkerStart, settings_here
from mhacli.errors import MhaError, installing
from mhacli.requests.scan import ScanRequest
from mhacli.results.scan.settings import ScanSettings
from mhacli.results.scan.unit import Unit, UnitFiles

IN_FLIGHT = 2
"""Most units that a worker has."""
MOST_ATTEMPTS = 4
"""So many workers may end over one unit, or in a row while they load the model."""
CHECK_S = 5.0
"""How often the cluster is asked for workers that have become possible, and what takes long is noted."""
SLOW, SLOW_S = 5, 60.0
"""A unit takes long beyond so many times the median of the others, and so many seconds; a worker that loads its model, beyond
the seconds."""

_LOADING = -1
"""What stands for the number of a unit while a worker loads the model."""


class _Actor:
    """What runs in a process of Ray."""

    def load(self, start: WorkerStart, folder: str) -> str:
        """Loads the model, and says where. Relative paths mean the same as in the process that began the scan."""
        with suppress(OSError):
            os.chdir(folder)
        self._worker: Worker = start.load()
        return name_here()

    def compute(self, unit: Unit) -> UnitFiles:
        """The files of a unit."""
        return self._worker.compute(unit)


def _settings_there(request: ScanRequest, folder: str) -> ScanSettings:
    """The settings of a process of Ray."""
    with suppress(OSError):
        os.chdir(folder)
    return settings_here(request)


@dataclass
class RayEngine:
    """The engine of `--ray`: `address` is `local`, which starts Ray on this machine, `auto` or that of a running cluster.

    `workers` None: as many as there are GPUs, or processors in steps of `cpus_per_worker` where there is none. Nodes that join
    get workers too. `note` hears of workers that ended, and of units that take long.
    """

    address: str
    workers: int | None = None
    cpus_per_worker: int = 1
    note: Callable[[str], None] = lambda message: None
    _began_ray: bool = False

    def settings(self, request: ScanRequest) -> ScanSettings:
        """The settings of a worker. Ray stays until `run` ends."""
        ray = self._connected()
        there = ray.remote(_settings_there).options(**self.needs(request.device))
        settings: ScanSettings = _given(there.remote(request, os.getcwd()))
        return settings

    def run(self, units: Iterator[Unit], start: WorkerStart, on_done: OnDone) -> None:
        """Computes all units. Raises `MhaError` also for a unit over which several workers have ended."""
        try:
            first = next(units, None)
            if first is not None:
                self._connected()
                _Crew(self, start, units, on_done, deque([first])).run()
        finally:
            if self._began_ray:
                _ray().shutdown()
                self._began_ray = False

    def _connected(self) -> Any:
        """The module, connected. Raises `MhaError` where Ray is missing, or no cluster answers."""
        ray = _ray()
        if ray.is_initialized():
            return ray
        n_cpus = self.workers * self.cpus_per_worker if self.workers and self.address == "local" else None
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray._private.worker._worker_logs_enabled = False  # which would be written to stdout, and has no option
        try:
            with _own_signals():
                ray.init(
                    self.address, num_cpus=n_cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
                )
        except (OSError, ValueError, RuntimeError) as fault:
            raise MhaError(
                f"--ray {self.address}: {fault}",
                hint="ray start --head starts a cluster here, and --ray local needs none",
                code="no-cluster",
            ) from fault
        self._began_ray = True
        return ray

    def capacity(self, needs: Mapping[str, float]) -> int:
        """How many workers are wanted, as far as the nodes that are there have room for them when nothing else is on them."""
        names = {"num_cpus": "CPU", "num_gpus": "GPU"}
        nodes = [node["Resources"] for node in _ray().nodes() if node["Alive"]]
        room = sum(int(min(node.get(names[name], 0) // n for name, n in needs.items() if n)) for node in nodes)
        return min(room, self.workers or room)

    def needs(self, device: str) -> dict[str, float]:
        """What a worker takes of a node. Raises `MhaError` where no node has it."""
        has_gpu = _ray().cluster_resources().get("GPU", 0) > 0
        on_gpu = device.startswith("cuda") or (device == "auto" and has_gpu)
        needs: dict[str, float] = {"num_cpus": self.cpus_per_worker, "num_gpus": int(on_gpu)}
        if not self.capacity(needs):
            what = f"{self.cpus_per_worker} processors{' and a GPU' * on_gpu}"
            hint = "--cpus-per-worker and --device say what a worker takes"
            raise MhaError(f"no node of the Ray cluster has {what} for a worker", hint=hint, code="no-worker")
        return needs


def _ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError:
        hint = f"{installing('ray')} installs it; the extra scan has it too"
        raise MhaError("workers need ray, which is not installed", hint=hint, code="missing-extra") from None
    return ray


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself when it begins; it is ours."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _given(ref: Any) -> Any:
    """What a process of Ray gave. Raises what was raised there, and `RayError` where it has ended."""
    ray = _ray()
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as fault:
        raise fault.cause from None


@dataclass
class _Member:
    """An actor. `where` is None until its model is loaded. Of `units`, which it has, it computes the first since `since`."""

    actor: Any
    where: str | None = None
    units: deque[Unit] = field(default_factory=deque)
    since: float = 0.0


@dataclass
class _Crew:
    """The actors of a scan, and the units that are with them. `again` are units that wait: those of actors that ended."""

    engine: RayEngine
    start: WorkerStart
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
        needs = self.engine.needs(self.start.request.device)
        actors, start = ray.remote(_Actor).options(**needs), ray.put(self.start)
        try:
            while self._hand_out():
                if monotonic() >= self.next_check:
                    for _ in range(self.engine.capacity(needs) - len(self.members)):
                        self._add(actors.remote(), start)
                    self._note_slow()
                    self.next_check = monotonic() + CHECK_S
                if not self.calls:  # all nodes are gone
                    sleep(CHECK_S)
                    continue
                for call in ray.wait(list(self.calls), timeout=CHECK_S)[0]:
                    self._take(call)
        finally:
            for member in self.members:
                ray.kill(member.actor)

    def _add(self, actor: Any, start: Any) -> None:
        member = _Member(actor, since=monotonic())
        self.members.append(member)
        self.calls[actor.load.remote(start, os.getcwd())] = member

    def _hand_out(self) -> bool:
        """Gives units to actors that are loaded, to those that have fewer first. Whether any unit is left or on its way."""
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

    def _take(self, call: Any) -> None:
        """What a call has come to. The calls of an actor end in their order."""
        member = self.calls.pop(call, None)
        if member is None:  # of an actor that has ended meanwhile
            return
        try:
            given = _given(call)
        except _ray().exceptions.RayError as fault:
            self._lose(member, fault)
            return
        if member.where is None:
            member.where = given
            self.attempts[_LOADING] = 0
            return
        unit, now = member.units.popleft(), monotonic()
        self.seconds.append(now - member.since)
        member.since = now
        self.on_done(unit, given, member.where)

    def _lose(self, member: _Member, fault: Exception) -> None:
        """Gives the units of an actor that has ended back. Raises `MhaError` for what ends every actor."""
        _ray().kill(member.actor)
        self.members.remove(member)
        self.calls = {call: of for call, of in self.calls.items() if of is not member}
        self.again.extendleft(reversed(member.units))
        self.next_check = 0.0
        began = member.units[0] if member.units else None
        number = began.number if began else _LOADING
        self.attempts[number] += 1
        words = f"worker ended ({type(fault).__name__})" + (
            f" on {member.where}" if member.where else " while it loaded the model"
        )
        if self.attempts[number] >= MOST_ATTEMPTS:
            hint = "its node may lack memory: --max-tokens shortens documents, --cpus-per-worker makes workers fewer"
            over = f" over {_named(began)}" if began else ""
            raise MhaError(f"the {MOST_ATTEMPTS}th {words}{over}", hint=hint, code="worker-ended")
        self.engine.note(f"a {words}" + (f"; {_named(began)} begins anew" if began else ""))

    def _note_slow(self) -> None:
        """Notes what takes long, each once."""
        now = monotonic()
        usual = statistics.median(self.seconds) if self.seconds else 0.0
        for member in self.members:
            number = member.units[0].number if member.units else _LOADING
            is_slow = now - member.since > max(SLOW_S, SLOW * usual)
            if not is_slow or number in self.slow or (member.where is not None and not member.units):
                continue
            self.slow.add(number)
            lasts = f"after {now - member.since:.0f} s"
            if member.where is None:
                self.engine.note(f"a worker has not begun {lasts}: the cluster may be busy")
            else:
                self.engine.note(
                    f"{_named(member.units[0])} is not done {lasts} on {member.where}; others take {usual:.1f} s"
                )


def _named(unit: Unit) -> str:
    """A unit by its number and documents."""
    return f"unit {unit.number} ({unit.named})"
