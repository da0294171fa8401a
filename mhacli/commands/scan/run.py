"""The scan of a corpus: finished units are kept, an engine computes the others, and all are merged into one record."""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

from mhacli.commands.scan.engines import Computed, RayEngine, Start, computed_here, on_own_gpu, rank_here
from mhacli.commands.scan.folder import ANEW, ScanFolder, open_folder
from mhacli.commands.scan.merge import merge
from mhacli.commands.scan.progress import ScanProgress
from mhacli.commands.scan.request import ScanRequest, ScanSettings
from mhacli.commands.scan.units import UNIT_SIZE, Unit, UnitFacts, number_of, read_sums, units
from mhacli.commands.scan.worker import Worker, settings_here
from mhacli.errors import MhaError, UsageError
from mhacli.record.record import Record
from mhacli.text.corpus import documents


@dataclass
class ScanStudy:
    """A scan of the corpus of `request`, computed by `run`. Other ranks compute their units in the same folder.

    `command` is the command line for the record; `note` receives messages for the user.
    """

    request: ScanRequest
    command: tuple[str, ...]
    note: Callable[[str], None]
    progress: ScanProgress = field(default_factory=ScanProgress)
    _names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Finds the engine, and the units of this process. Raises `UsageError` for workers in a rank."""
        rank = rank_here()
        self._rank, self._n_ranks = rank or (0, 1)
        given, model = self.request, self.request.run.model
        self.request = on_own_gpu(given)
        self._engine: RayEngine | None = None
        if given.ray is not None or given.workers is not None:
            n_cpus = given.cpus_per_worker or model.threads or 1
            self._engine = RayEngine(given.ray or "local", given.workers, n_cpus, model.device)
            if rank is not None:
                raise UsageError(
                    f"{'--workers' if given.ray is None else '--ray'} does not work in a rank (RANK and WORLD_SIZE are set)",
                    hint="one process with --ray uses all nodes of a Ray cluster",
                )

    def run(self, report: Callable[[ScanProgress], None], is_stopped: Callable[[], bool]) -> Record | None:
        """The record of the corpus, also written to the folder; None if the scan was stopped or other ranks have unfinished
        units.

        `report` receives the progress. Once `is_stopped` returns True, no further unit is started. Raises `UsageError` for a
        folder with other settings or documents, and `MhaError` for documents, computations or files that fail.
        """
        documents(self.request.sources, self.request.form)  # a source that cannot be read leaves no folder
        if self._engine is None:
            return self._run(settings_here(self.request), computed_here, report, is_stopped)
        try:
            return self._run(self._engine.settings(self.request), self._engine.computed, report, is_stopped)
        except SystemError as fault:  # compiled functions of Ray raise it instead of an interruption
            raise fault.__cause__ or fault from None
        finally:
            self._engine.end()

    def _run(
        self,
        settings: ScanSettings,
        computed: Callable[[Iterator[Unit], Start], Iterator[Computed]],
        report: Callable[[ScanProgress], None],
        is_stopped: Callable[[], bool],
    ) -> Record | None:
        folder = open_folder(self.request.out, settings, mixed=self.request.mixed)
        folder.remove_damaged_examples(self.note)
        self.progress.of_documents = self._n_documents()
        report(self.progress)
        began = perf_counter()
        unfinished = self._unfinished(folder, settings.digest, is_stopped)
        for unit, files, worker in computed(unfinished, partial(Worker, self.request, settings)):
            folder.write(unit, files)
            facts, _ = read_sums(folder.sums_path(unit.name))
            self._count(facts, worker, perf_counter() - began)
            report(self.progress)
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
            folder.require_same_documents(unit, names_by_number.pop(unit.number, []))
            finished, wants_example = folder.finished(unit, self.note), unit.number < folder.first_example()
            if finished is not None and not (finished[1].documents and wants_example):
                self._names.append(finished[0])
                self._count(finished[1])
                continue
            self._names.append(unit.name)
            if self._is_own(unit.number):
                yield unit._replace(wants_example=wants_example)
        if names_by_number:
            message = f"{self.request.out} has {len(names_by_number)} units of documents that the corpus does not have"
            raise UsageError(message, hint=ANEW, path=self.request.out)

    def _is_own(self, number: int) -> bool:
        """Whether this process computes the unit of this number."""
        return number % self._n_ranks == self._rank

    def _count(self, facts: UnitFacts, worker: str | None = None, seconds: float = 0.0) -> None:
        """Counts the documents of a unit that a worker, or for None an earlier run, has finished. Raises `MhaError` for bad ones
        with `--strict`."""
        if self._is_own(facts.number):
            self.progress.add(len(facts.documents), len(facts.bad), facts.n_tokens, worker, seconds)
        if self.request.strict and facts.bad:
            bad = facts.bad[0]
            message = f"--strict: {bad.named}: {bad.reason}"
            raise MhaError(message, hint="without --strict it is left out", code="bad-document", path=bad.file)

    def _n_documents(self) -> int | None:
        """The number of documents of this process, None for a corpus that can be read only once."""
        sources = self.request.sources
        if "-" in sources or any(
            os.path.exists(source) and stat.S_ISFIFO(os.stat(source).st_mode) for source in sources
        ):
            return None
        numbered = enumerate(documents(sources, self.request.form))
        return sum(self._is_own(number // UNIT_SIZE) for number, _ in numbered)
