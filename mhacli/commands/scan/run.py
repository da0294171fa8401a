"""The scan of a corpus: finished units are kept, an engine computes the others, and all are merged into one record."""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

from mhacli.commands.scan.engines.ranks import Share, on_own_gpu, share_here
from mhacli.commands.scan.engines.ray import RayEngine
from mhacli.commands.scan.engines.single import Engine, SingleEngine
from mhacli.commands.scan.folder import ANEW, ScanFolder, open_folder
from mhacli.commands.scan.merge import merge
from mhacli.commands.scan.progress import ScanProgress
from mhacli.commands.scan.request import ScanRequest
from mhacli.commands.scan.units import (
    UNIT_SIZE,
    Unit,
    UnitFacts,
    UnitFiles,
    document_digest,
    number_of,
    read_sums,
    units,
)
from mhacli.commands.scan.worker import Worker
from mhacli.errors import MhaError, UsageError
from mhacli.record import storage
from mhacli.record.record import Record
from mhacli.text.corpus import documents


def make_study(request: ScanRequest, command: tuple[str, ...], note: Callable[[str], None]) -> ScanStudy:
    """The scan of this process, with what distributes the units to workers. Raises `UsageError` for workers in a rank."""
    share = share_here()
    if request.ray is None and request.workers is None:
        return ScanStudy(on_own_gpu(request), SingleEngine(), share or Share(), command, note)
    if share is not None:
        raise UsageError(
            f"{'--ray' if request.ray is not None else '--workers'} does not work in a rank (RANK and WORLD_SIZE are set)",
            hint="one process with --ray uses all nodes of a Ray cluster",
        )
    model = request.run.model
    n_cpus = request.cpus_per_worker or model.threads or 1
    engine = RayEngine(request.ray or "local", request.workers, n_cpus, model.device, note)
    return ScanStudy(on_own_gpu(request), engine, Share(), command, note)


@dataclass
class ScanStudy:
    """A scan, computed by `run`: this process computes its `share` of the units, others compute the rest in the same folder.

    `command` is the command line for the record; `note` receives messages for the user.
    """

    request: ScanRequest
    engine: Engine
    share: Share
    command: tuple[str, ...]
    note: Callable[[str], None]
    progress: ScanProgress = field(default_factory=ScanProgress)
    _names: list[str] = field(default_factory=list)
    _example: float = float("inf")

    def run(self, report: Callable[[ScanProgress], None], is_stopped: Callable[[], bool]) -> Record | None:
        """The record of the corpus, also written to the folder; None if the scan was stopped or other ranks have unfinished
        units.

        `report` receives the progress. Once `is_stopped` returns True, no further unit is started. Raises `UsageError` for a
        folder with other settings or documents, and `MhaError` for documents, computations or files that fail.
        """
        try:
            return self._run(report, is_stopped)
        finally:
            self.engine.end()

    def _run(self, report: Callable[[ScanProgress], None], is_stopped: Callable[[], bool]) -> Record | None:
        documents(self.request.sources, self.request.form)  # a source that cannot be read leaves no folder
        settings = self.engine.settings(self.request)
        folder = open_folder(self.request.out, settings, mixed=self.request.mixed)
        self._example = self._first_example(folder)
        self.progress.of_documents = self._n_documents()
        began = perf_counter()

        def on_done(unit: Unit, files: UnitFiles, worker: str) -> None:
            folder.write(unit, files)
            facts, _ = read_sums(folder.sums_path(unit.name))
            self._count(facts, worker, perf_counter() - began)
            report(self.progress)

        report(self.progress)
        unfinished = self._unfinished(folder, settings.digest, is_stopped)
        self.engine.run(unfinished, partial(Worker, self.request, settings), on_done)
        if is_stopped():
            return None
        if self.progress.of_documents is None:  # only the end of a stream shows its length
            self.progress.of_documents = self.progress.n_documents
        report(self.progress)  # the last documents may have been finished by an earlier run
        if not all(map(folder.has, self._names)):
            return None
        return merge(folder, self._names, self.command)

    def _unfinished(self, folder: ScanFolder, digest: str, is_stopped: Callable[[], bool]) -> Iterator[Unit]:
        """The unfinished units of this process."""
        names_by_number = defaultdict[int, list[str]](list)
        for name in folder.unit_names():
            names_by_number[number_of(name)].append(name)
        for unit in units(documents(self.request.sources, self.request.form), digest):
            if is_stopped():
                return
            self._require_same_documents(folder, unit, names_by_number.pop(unit.number, []))
            finished, wants_example = folder.finished(unit, self.note), unit.number < self._example
            if finished is not None and not (finished[1].documents and wants_example):
                self._names.append(finished[0])
                self._count(finished[1])
                continue
            self._names.append(unit.name)
            if self.share.has(unit.number):
                yield unit._replace(wants_example=wants_example)
                self._example = self._first_example(folder) if wants_example else self._example
        if names_by_number:
            message = f"{self.request.out} has {len(names_by_number)} units of documents that the corpus does not have"
            raise UsageError(message, hint=ANEW, path=self.request.out)

    def _count(self, facts: UnitFacts, worker: str | None = None, seconds: float = 0.0) -> None:
        """Counts the documents of a unit that a worker, or for None an earlier run, has finished. Raises `MhaError` for bad ones
        with `--strict`."""
        if self.share.has(facts.number):
            self.progress.add(len(facts.documents), len(facts.bad), facts.n_tokens, worker, seconds)
        if self.request.strict and facts.bad:
            bad = facts.bad[0]
            message = f"--strict: {bad.named}: {bad.reason}"
            raise MhaError(message, hint="without --strict it is left out", code="bad-document", path=bad.file)

    def _require_same_documents(self, folder: ScanFolder, unit: Unit, names: Sequence[str]) -> None:
        """Removes an earlier form of a unit. Raises `UsageError` for a unit of other documents."""
        for name in set(names) - set(folder.names_of(unit)):
            if not self._is_earlier(folder, unit, name):
                message = f"{self.request.out} was made of other documents: {unit.named} have changed"
                raise UsageError(message, hint=ANEW, path=self.request.out)
            folder.remove(name)
            self._example = self._first_example(folder)

    @staticmethod
    def _is_earlier(folder: ScanFolder, unit: Unit, name: str) -> bool:
        """Whether the good documents of the unit `name` are in this one too, or it cannot be read. It was the last of a shorter
        corpus, or has bad documents that have changed, or whose faults had other words."""
        try:
            facts, _ = read_sums(folder.sums_path(name))
        except MhaError:
            return True
        n_documents = len(facts.documents) + len(facts.bad)
        digests = {document_digest(document) for document in unit.documents}
        return n_documents <= len(unit.documents) and {document.digest for document in facts.documents} <= digests

    def _first_example(self, folder: ScanFolder) -> float:
        """The number of the first unit with an example, infinity if there is none. Damaged examples are removed."""
        for number in folder.examples():
            path = folder.example_path(number)
            try:
                storage.load(path)
            except MhaError as fault:
                self.note(f"{fault.message}; it is computed again")
                os.unlink(path)
            else:
                return number
        return float("inf")

    def _n_documents(self) -> int | None:
        """The number of documents of this process, None for a corpus that can be read only once."""
        if any(source == "-" or _is_pipe(source) for source in self.request.sources):
            return None
        numbered = enumerate(documents(self.request.sources, self.request.form))
        return sum(self.share.has(number // UNIT_SIZE) for number, _ in numbered)


def _is_pipe(source: str) -> bool:
    return os.path.exists(source) and stat.S_ISFIFO(os.stat(source).st_mode)
