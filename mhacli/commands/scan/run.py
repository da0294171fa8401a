"""The scan of a corpus: finished units are kept, workers compute the others, and all are merged into one record.

Units are computed by this process, by ranks or by workers of Ray; the results do not depend on it. Ranks are processes that
`torchrun` or `srun` has started; each computes every n-th unit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any

import torch

from mhacli.cli.console import note
from mhacli.commands.scan.command import Progress, Scan, recorded_command
from mhacli.commands.scan.folder import ANEW, UNIT_SIZE, ScanFolder, Settings, Unit, UnitFiles, open_folder
from mhacli.commands.scan.totals import Totals, merged, spreads_of, summary
from mhacli.commands.scan.worker import Worker
from mhacli.errors import MhaError, UsageError, missing_library
from mhacli.io.data import json_checksum
from mhacli.io.interrupts import uninterrupted
from mhacli.record.record import Record
from mhacli.record.storage import load
from mhacli.text.corpus import documents, is_pipe

MAX_ATTEMPTS = 4
"""The number of processes that may end while computing one unit."""
BEGIN_AND_END_S = 20.0
"""Seconds in which Ray starts on this machine, or ends, before an interruption is raised."""
_Computed = Iterator[tuple[Unit, UnitFiles, str]]


def run_scan(
    scan: Scan, done: Progress, *, report: Callable[[Progress], None], is_stopped: Callable[[], bool]
) -> Record | None:
    """The record of the corpus, also written to the folder; None if the scan was stopped or other ranks have unfinished units.

    `report` receives the progress. Once `is_stopped` returns True, no further unit is started. Raises `UsageError` for a folder
    with other settings or documents, and `MhaError` for documents, computations or files that fail.
    """
    corpus = partial(documents, scan.sources, scan.form)
    corpus()  # a source that cannot be read leaves no folder
    names: list[str] = []
    with workers_of(scan) as (settings, compute):
        folder = open_folder(scan.out, settings, mixed=scan.mixed)
        if not any(map(is_pipe, scan.sources)):
            done.of_documents = sum(_is_own(number // UNIT_SIZE) for number, _ in enumerate(corpus()))
        report(done)
        began = perf_counter()
        for unit, files, worker in compute(_unfinished(scan, folder, names, done=done, is_stopped=is_stopped)):
            name = unit.name(settings)
            folder.write(name, files)
            done.seconds = perf_counter() - began
            _count(scan, done, unit.number, totals=folder.totals(name), worker=worker)
            report(done)
    if is_stopped():
        return None
    done.of_documents = done.n_documents  # only the end of a stream shows its length
    report(done)  # the last documents may have been finished by an earlier run
    if not all(map(folder.has, names)):
        return None
    paths = [folder.paths(name)[-1] for name in names]
    totals = merged(paths, scan.summed)
    record = summary(totals, load(folder.examples()[0]), spans=scan.span_names, spreads=spreads_of(paths, totals))
    record = replace(record, command=recorded_command())
    facts = {name: getattr(totals, name) for name in ("n_documents", "n_tokens", "n_bad", "devices")}
    folder.finish(record, {**facts, "documents": json_checksum(totals.documents), "units": names})
    return record


def _unfinished(
    scan: Scan, folder: ScanFolder, names: list[str], *, done: Progress, is_stopped: Callable[[], bool]
) -> Iterator[Unit]:
    """The unfinished units of this process. Adds the names of all units to `names`, and finished ones to the progress."""
    names_by_number = folder.names()
    corpus = documents(scan.sources, scan.form)
    for number, members in enumerate(iter(lambda: tuple(islice(corpus, UNIT_SIZE)), ())):
        if is_stopped():
            return
        unit = Unit(number, members)
        name, totals = folder.finished(unit, names_by_number.pop(number, []), note)
        names.append(name)
        if totals is not None:
            _count(scan, done, number, totals=totals, worker=None)
        elif _is_own(number):
            yield unit
    if names_by_number:
        message = f"{scan.out} has {len(names_by_number)} units of documents that the corpus does not have"
        raise UsageError(message, hint=ANEW, path=scan.out)


def _count(scan: Scan, done: Progress, number: int, *, totals: Totals, worker: str | None) -> None:
    """Adds the documents of a unit, if it is one of this process. A worker, or for None an earlier run, has finished it. Raises
    `MhaError` for bad ones with `--strict`."""
    if scan.strict and totals.bad:
        bad = totals.bad[0]
        message = f"--strict: {bad.named}: {bad.reason}"
        raise MhaError(message, hint="without --strict it is left out", code="bad-document", path=bad.file)
    if _is_own(number):
        done.add(totals.n_documents, totals.n_bad, totals.n_tokens, worker=worker)


# ---------------------------------------------------------------------------------------------------------------- ranks


def _ranks() -> tuple[int, int]:
    """The number of this process and the number of all, by RANK and WORLD_SIZE. Raises `UsageError` for impossible values."""
    rank, n_ranks = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or n_ranks is None:
        return 0, 1
    if not (rank.isdecimal() and n_ranks.isdecimal() and int(rank) < int(n_ranks)):
        message = f"RANK={rank} and WORLD_SIZE={n_ranks} are not a number from 0 and a larger number of processes"
        raise UsageError(message, hint="without these two variables the process computes all units")
    return int(rank), int(n_ranks)


def _is_own(number: int) -> bool:
    """Whether this process computes the unit of this number."""
    rank, n_ranks = _ranks()
    return number % n_ranks == rank


def _on_own_gpu(scan: Scan) -> Scan:
    """The scan of a rank on its own GPU: if several are visible, the one with the number LOCAL_RANK."""
    local, n_gpus = os.environ.get("LOCAL_RANK", ""), torch.cuda.device_count()
    if scan.run.model.device not in ("auto", "cuda") or not local.isdecimal() or n_gpus < 2:
        return scan
    return replace(scan, given={**scan.given, "device": f"cuda:{int(local) % n_gpus}"})


# -------------------------------------------------------------------------------------------------------------- workers


@contextmanager
def workers_of(scan: Scan) -> Iterator[tuple[Settings, Callable[[Iterator[Unit]], _Computed]]]:
    """The settings of the workers, and a function that computes units by them as they are done: with their files and the name of
    the worker. The worker is this process, or those of Ray, which end with the context."""
    if scan.ray is None and scan.workers is None:
        worker = Worker(_on_own_gpu(scan))
        settings = worker.settings()
        yield settings, lambda units: ((unit, *worker.compute(unit, settings)) for unit in units)
        return
    if _ranks() != (0, 1):
        option, hint = (
            "--workers" if scan.ray is None else "--ray",
            "one process with --ray uses all nodes of a Ray cluster",
        )
        raise UsageError(f"{option} does not work in a rank (RANK and WORLD_SIZE are set)", hint=hint)
    try:
        import ray
    except ModuleNotFoundError:
        raise missing_library("ray", "a scan with workers") from None
    try:
        _connect(ray, scan)
        first = _new_actor(ray, scan)
        settings = _result(ray, first.settings.remote(), "say its settings")
        yield settings, lambda units: _computed(ray, scan, units, settings=settings, idle=[first])
    except SystemError as fault:  # compiled functions of Ray raise it instead of an interruption
        raise fault.__cause__ or fault from None
    finally:
        with uninterrupted(BEGIN_AND_END_S):
            ray.shutdown()  # its processes would outlive this one


def _connect(ray: Any, scan: Scan) -> None:
    """Connects to a cluster, or starts Ray on this machine. Raises `MhaError` if no cluster answers."""
    address = scan.ray or "local"
    n_cpus = scan.workers * scan.n_cpus if scan.workers and address == "local" else None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        with uninterrupted(BEGIN_AND_END_S):  # which also puts our handler of SIGTERM back
            ray.init(address, num_cpus=n_cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as fault:
        hint = "ray start --head starts a cluster here, and --ray local needs none"
        raise MhaError(f"--ray {address}: {fault}", hint=hint, code="no-cluster") from fault


def _room(ray: Any, scan: Scan) -> tuple[dict[str, int], int]:
    """What a worker takes, and the number of workers: as many as requested, at most as many as fit on idle nodes."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    device = scan.run.model.device
    on_gpu = device.startswith("cuda") or (device == "auto" and any(node.get("GPU") for node in nodes))
    needs = {"CPU": scan.n_cpus, "GPU": int(on_gpu)}
    n_possible = sum(int(min(node.get(name, 0) // n for name, n in needs.items() if n)) for node in nodes)
    return needs, min(n_possible, scan.workers or n_possible)


def _new_actor(ray: Any, scan: Scan) -> Any:
    """A further worker, which Ray starts again if it ends. Raises `MhaError` if no node has room for one."""
    needs, n_possible = _room(ray, scan)
    if not n_possible:
        resources = f"{needs['CPU']} processors{' and a GPU' * needs['GPU']}"
        hint = "--cpus-per-worker and --device say what a worker takes"
        raise MhaError(f"no node of the Ray cluster has {resources} for a worker", hint=hint, code="no-worker")
    retries = {"max_restarts": -1, "max_task_retries": MAX_ATTEMPTS - 1}
    return ray.remote(num_cpus=needs["CPU"], num_gpus=needs["GPU"], **retries)(Worker).remote(scan, os.getcwd())


def _computed(ray: Any, scan: Scan, units: Iterator[Unit], *, settings: Settings, idle: list[Any]) -> _Computed:
    """The units as workers of Ray compute them, of which there are as many as there is room for; nodes may join at any time.
    Raises `MhaError` also for a unit during which too many processes end."""
    calls = dict[Any, tuple[Any, Unit]]()
    while True:
        for unit in islice(units, max(0 if calls else 1, _room(ray, scan)[1] - len(calls))):
            actor = idle.pop() if idle else _new_actor(ray, scan)
            calls[actor.compute.remote(unit, settings)] = actor, unit
        for actor in idle:
            ray.kill(actor)  # its room may be needed by one that Ray starts again
        if not calls:
            return
        (call,), _ = ray.wait([*calls])
        actor, unit = calls.pop(call)
        idle = [actor]
        yield unit, *_result(ray, call, f"compute unit {unit.number} ({unit.named})")


def _result(ray: Any, call: Any, job: str) -> Any:
    """The result of a call. Raises its exception, and `MhaError` if too many processes have ended."""
    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError as fault:
        raise fault.cause from None
    except ray.exceptions.RayError as fault:
        hint = "its node may lack memory: --max-tokens shortens documents, --cpus-per-worker makes workers fewer"
        raise MhaError(f"no worker could {job}: {type(fault).__name__}", hint=hint, code="worker-ended") from fault
