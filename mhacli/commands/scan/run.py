"""The scan of a corpus: finished units are kept, an engine computes the others, and all are merged into one record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter

from mhacli.commands.scan.engines import rank_here, workers_of
from mhacli.commands.scan.folder import ANEW, ScanFolder, open_folder
from mhacli.commands.scan.merge import merge
from mhacli.commands.scan.progress import ScanProgress
from mhacli.commands.scan.request import ScanRequest
from mhacli.commands.scan.totals import Totals, read_totals
from mhacli.commands.scan.units import UNIT_SIZE, Unit, number_of, units
from mhacli.errors import MhaError, UsageError
from mhacli.record.record import Record
from mhacli.text.corpus import documents, is_pipe


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

    def run(self, report: Callable[[ScanProgress], None], is_stopped: Callable[[], bool]) -> Record | None:
        """The record of the corpus, also written to the folder; None if the scan was stopped or other ranks have unfinished
        units.

        `report` receives the progress. Once `is_stopped` returns True, no further unit is started. Raises `UsageError` for a
        folder with other settings or documents, and `MhaError` for documents, computations or files that fail.
        """
        documents(self.request.sources, self.request.form)  # a source that cannot be read leaves no folder
        with workers_of(self.request) as workers:
            settings = workers.settings()
            folder = open_folder(self.request.out, settings, mixed=self.request.mixed)
            folder.remove_damaged_examples(self.note)
            self.progress.of_documents = self._n_documents()
            report(self.progress)
            began = perf_counter()
            unfinished = self._unfinished(folder, settings.digest, is_stopped)
            for unit, files, worker in workers.computed(unfinished, settings):
                folder.write(unit, files)
                self._count(unit.number, read_totals(folder.sums_path(unit.name)), worker, perf_counter() - began)
                report(self.progress)
        if is_stopped():
            return None
        if self.progress.of_documents is None:  # only the end of a stream shows its length
            self.progress.of_documents = self.progress.n_documents
        report(self.progress)  # the last documents may have been finished by an earlier run
        return merge(folder, self._names, self.command) if all(map(folder.has, self._names)) else None

    def _unfinished(self, folder: ScanFolder, digest: str, is_stopped: Callable[[], bool]) -> Iterator[Unit]:
        """The unfinished units of this process."""
        names_by_number = defaultdict[int, list[str]](list)
        for name in folder.unit_names():
            names_by_number[number_of(name)].append(name)
        for unit in units(documents(self.request.sources, self.request.form), digest):
            if is_stopped():
                return
            folder.require_same_documents(unit, names_by_number.pop(unit.number, []))
            finished = folder.finished(unit, self.note)
            wants_example = all(unit.number < number for number in folder.examples())
            if finished is not None and not (finished[1].n_documents and wants_example):
                self._names.append(finished[0])
                self._count(unit.number, finished[1])
                continue
            self._names.append(unit.name)
            if self._is_own(unit.number):
                yield unit._replace(wants_example=wants_example)
        if names_by_number:
            message = f"{self.request.out} has {len(names_by_number)} units of documents that the corpus does not have"
            raise UsageError(message, hint=ANEW, path=self.request.out)

    def _is_own(self, number: int) -> bool:
        """Whether this process computes the unit of this number."""
        rank, n_ranks = rank_here() or (0, 1)
        return number % n_ranks == rank

    def _count(self, number: int, totals: Totals, worker: str | None = None, seconds: float = 0.0) -> None:
        """Counts the documents of a unit that a worker, or for None an earlier run, has finished. Raises `MhaError` for bad ones
        with `--strict`."""
        if self._is_own(number):
            self.progress.add(totals.n_documents, totals.n_bad, totals.n_tokens, worker, seconds)
        if self.request.strict and totals.bad:
            bad = totals.bad[0]
            message = f"--strict: {bad.named}: {bad.reason}"
            raise MhaError(message, hint="without --strict it is left out", code="bad-document", path=bad.file)

    def _n_documents(self) -> int | None:
        """The number of documents of this process, None for a corpus that can be read only once."""
        if any(map(is_pipe, self.request.sources)):
            return None
        numbered = enumerate(documents(self.request.sources, self.request.form))
        return sum(self._is_own(number // UNIT_SIZE) for number, _ in numbered)
