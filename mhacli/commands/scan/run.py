"""The scan of a corpus: finished units are kept, an engine computes the others, and all are merged into one record."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from mhacli.commands.scan.engines.ranks import Share
from mhacli.commands.scan.engines.single import Engine
from mhacli.commands.scan.folder import ScanFolder, open_folder
from mhacli.commands.scan.merge import merge
from mhacli.commands.scan.progress import ScanProgress
from mhacli.commands.scan.request import ScanRequest
from mhacli.commands.scan.sums import UnitFacts, read_sums
from mhacli.commands.scan.units import UNIT_SIZE, Unit, UnitFiles, document_digest, number_of, units
from mhacli.commands.scan.worker import WorkerStart
from mhacli.errors import MhaError, UsageError
from mhacli.record import storage
from mhacli.record.corpus import BadEntry
from mhacli.record.record import Record
from mhacli.text.corpus import documents


@dataclass
class ScanStudy:
    """A scan, computed by `run`: this process computes its `share` of the units, others compute the rest in the same folder.

    `report_progress` receives the progress and `note` messages for the user. Once `is_stopped` returns True, no further unit
    is started.
    """

    request: ScanRequest
    engine: Engine
    share: Share
    report_progress: Callable[[ScanProgress], None] = lambda progress: None
    note: Callable[[str], None] = lambda message: None
    is_stopped: Callable[[], bool] = lambda: False
    progress: ScanProgress = field(default_factory=ScanProgress)
    _names: list[str] = field(default_factory=list)
    _example: float = float("inf")

    def run(self) -> Record | None:
        """The record of the corpus, also written to the folder; None if the scan was stopped or other ranks have unfinished
        units.

        Raises `UsageError` for a folder with other settings or documents, and `MhaError` for documents, computations or files
        that fail.
        """
        try:
            return self._run()
        finally:
            self.engine.end()

    def _run(self) -> Record | None:
        documents(self.request.sources, self.request.form)  # a source that cannot be read leaves no folder
        settings = self.engine.settings(self.request)
        folder = open_folder(self.request.out, settings, mixed=self.request.mixed)
        self._example = self._first_example(folder)
        self.progress.of_documents = self._n_documents()
        began = perf_counter()

        def on_done(unit: Unit, files: UnitFiles, worker: str) -> None:
            folder.write(unit, files)
            self.progress.add(worker, files.n_documents, files.n_bad, files.n_tokens, seconds=perf_counter() - began)
            self.report_progress(self.progress)
            if self.request.strict and files.n_bad:
                self._refuse(read_sums(folder.sums_path(unit.name)).facts.bad[0])

        self.report_progress(self.progress)
        self.engine.run(self._unfinished(folder, settings.digest), WorkerStart(self.request, settings), on_done)
        if self.is_stopped():
            return None
        if self.progress.of_documents is None:  # only the end of a stream shows its length
            self.progress.of_documents = self.progress.n_documents
        self.report_progress(self.progress)  # the last documents may have been finished by an earlier run
        if not all(map(folder.has, self._names)):
            return None
        return merge(folder, self._names, self.request.command)

    def _unfinished(self, folder: ScanFolder, digest: str) -> Iterator[Unit]:
        """The unfinished units of this process."""
        names_by_number = _by_number(folder.unit_names())
        for unit in units(documents(self.request.sources, self.request.form), digest):
            if self.is_stopped():
                return
            self._require_same_documents(folder, unit, names_by_number.pop(unit.number, []))
            finished, wants_example = folder.finished(unit, self.note), unit.number < self._example
            if finished is not None and not (finished[1].documents and wants_example):
                self._count_finished(*finished, is_assigned=self.share.has(unit.number))
                continue
            self._names.append(unit.name)
            if self.share.has(unit.number):
                yield unit._replace(wants_example=wants_example)
                self._example = self._first_example(folder) if wants_example else self._example
        if names_by_number:
            raise UsageError(
                f"{self.request.out} has {len(names_by_number)} units of documents that the corpus does not have",
                hint="--out another folder starts anew",
                path=self.request.out,
            )

    def _count_finished(self, name: str, facts: UnitFacts, *, is_assigned: bool) -> None:
        self._names.append(name)
        if is_assigned:
            n_tokens = sum(document.n_tokens for document in facts.documents)
            self.progress.leave(len(facts.documents), len(facts.bad), n_tokens)
        if self.request.strict and facts.bad:
            self._refuse(facts.bad[0])

    def _refuse(self, bad: BadEntry) -> None:
        raise MhaError(
            f"--strict: {bad.named}: {bad.reason}",
            hint="without --strict it is left out",
            code="bad-document",
            path=bad.file,
        )

    def _require_same_documents(self, folder: ScanFolder, unit: Unit, names: Sequence[str]) -> None:
        """Removes an earlier form of a unit. Raises `UsageError` for a unit of other documents."""
        for name in set(names) - set(folder.names_of(unit)):
            if not self._is_earlier(folder, unit, name):
                raise UsageError(
                    f"{self.request.out} was made of other documents: {unit.named} have changed",
                    hint="--out another folder starts anew",
                    path=self.request.out,
                )
            folder.remove(name)
            self._example = self._first_example(folder)

    @staticmethod
    def _is_earlier(folder: ScanFolder, unit: Unit, name: str) -> bool:
        """Whether the good documents of the unit `name` are in this one too, or it cannot be read. It was the last of a shorter
        corpus, or has bad documents that have changed, or whose faults had other words."""
        try:
            facts = read_sums(folder.sums_path(name)).facts
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


def _by_number(names: Sequence[str]) -> dict[int, list[str]]:
    """The names of units by their number."""
    grouped: dict[int, list[str]] = {}
    for name in names:
        grouped.setdefault(number_of(name), []).append(name)
    return grouped
