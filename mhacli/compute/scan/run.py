"""The study of a corpus: what is done is left alone, the rest is computed by an engine, and all of it becomes one record."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from mhacli.compute.scan.engines.single import Engine
from mhacli.compute.scan.merge import merge
from mhacli.compute.scan.progress import ScanProgress
from mhacli.compute.scan.worker import WorkerStart
from mhacli.errors import MhaError, UsageError
from mhacli.requests.scan import ScanRequest
from mhacli.results.record import storage
from mhacli.results.record.corpus import BadEntry
from mhacli.results.record.record import Record
from mhacli.results.scan.folder import ScanFolder, open_folder
from mhacli.results.scan.sums import UnitFacts, read_sums
from mhacli.results.scan.unit import UNIT_SIZE, Unit, UnitFiles, document_digest, units
from mhacli.text.corpus import CorpusFormat, documents


@dataclass
class ScanStudy:
    """A scan of `sources` into the folder `out`. `run` does it.

    With `share` (rank, world size) every so-many-th unit is computed, and others compute the rest in the same folder. `strict`
    refuses bad documents; `mixed` takes units of other devices. `tell` hears how far the scan is, `note` what a reader must
    know; once `is_stopped` says so, no further unit is begun.
    """

    request: ScanRequest
    sources: Sequence[str]
    form: CorpusFormat
    out: str
    engine: Engine
    command: tuple[str, ...] = ()
    share: tuple[int, int] = (0, 1)
    strict: bool = False
    mixed: bool = False
    tell: Callable[[ScanProgress], None] = lambda progress: None
    note: Callable[[str], None] = lambda message: None
    is_stopped: Callable[[], bool] = lambda: False
    progress: ScanProgress = field(default_factory=ScanProgress)
    _names: list[str] = field(default_factory=list)
    _example: float = float("inf")

    def run(self) -> Record | None:
        """The record of the corpus, in the folder too; None where the scan was stopped, or others have units to compute.

        Raises `UsageError` for a folder that was made with other settings, or of other documents, and `MhaError` for what cannot
        be read, computed or written.
        """
        settings = self.engine.settings(self.request)
        folder = open_folder(self.out, settings, mixed=self.mixed)
        self._example = self._known_example(folder)
        self.progress.of_documents = self._n_documents()
        began = perf_counter()

        def on_done(unit: Unit, files: UnitFiles, worker: str) -> None:
            folder.write(unit, files)
            self.progress.add(worker, files.n_documents, files.n_bad, files.n_tokens, seconds=perf_counter() - began)
            self.tell(self.progress)
            if self.strict and files.n_bad:
                self._refuse(read_sums(folder.sums_path(unit.name)).facts.bad[0])

        self.tell(self.progress)
        self.engine.run(self._unfinished(folder, settings.digest), WorkerStart(self.request, settings), on_done)
        if self.is_stopped():
            return None
        if self.progress.of_documents is None:  # which is known of a stream at its end
            self.progress.of_documents = self.progress.n_documents
        self.tell(self.progress)  # the last documents may be some that were done before
        if not all(os.path.lexists(folder.sums_path(name)) for name in self._names):
            return None
        return merge(folder, self._names, self.command)

    def _unfinished(self, folder: ScanFolder, digest: str) -> Iterator[Unit]:
        """The units of this share that are not done."""
        others = _by_number(folder.unit_names())
        for unit in units(documents(self.sources, self.form), digest):
            if self.is_stopped():
                return
            self._require_same_documents(folder, unit, others.pop(unit.number, []))
            done = folder.finished(unit)
            if done.fault is not None:
                self.note(f"{done.fault}; it is computed again")
            lacks_example = done.facts is not None and bool(done.facts.documents) and unit.number < self._example
            if done.name is not None and done.facts is not None and not lacks_example:
                self._leave_done(done.name, done.facts, is_own=self._is_own(unit.number))
                continue
            self._names.append(unit.name)
            if self._is_own(unit.number):
                wants_example = unit.number < self._example
                yield unit._replace(wants_example=wants_example)
                self._example = self._known_example(folder) if wants_example else self._example
        if others:
            raise UsageError(
                f"{self.out} has {len(others)} units of documents that the corpus does not have",
                hint="--out another folder starts anew",
                path=self.out,
            )

    def _is_own(self, number: int) -> bool:
        """Whether this share has the unit with a number."""
        rank, world = self.share
        return number % world == rank

    def _leave_done(self, name: str, facts: UnitFacts, *, is_own: bool) -> None:
        self._names.append(name)
        if is_own:
            n_tokens = sum(document.n_tokens for document in facts.documents)
            self.progress.leave(len(facts.documents), len(facts.bad), n_tokens)
        if self.strict and facts.bad:
            self._refuse(facts.bad[0])

    def _refuse(self, bad: BadEntry) -> None:
        raise MhaError(
            f"--strict: {bad.named}: {bad.reason}",
            hint="without --strict it is left out",
            code="bad-document",
            path=bad.file,
        )

    def _require_same_documents(self, folder: ScanFolder, unit: Unit, names: Sequence[str]) -> None:
        """Removes a unit that was the last when the corpus was shorter. Raises `UsageError` for a unit of other documents."""
        for name in set(names) - set(folder.names_of(unit)):
            if not _has_grown(folder, unit, name):
                raise UsageError(
                    f"{self.out} was made of other documents: {unit.named} have changed",
                    hint="--out another folder starts anew",
                    path=self.out,
                )
            folder.remove(name)

    def _known_example(self, folder: ScanFolder) -> float:
        """The number of the first unit that has an example, infinity where there is none. A damaged one is removed."""
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
        """How many documents this share has, None for a corpus that can be read once only."""
        if any(source == "-" or _is_pipe(source) for source in self.sources):
            return None
        numbered = enumerate(documents(self.sources, self.form))
        return sum(self._is_own(number // UNIT_SIZE) for number, _ in numbered)


def _is_pipe(source: str) -> bool:
    return os.path.exists(source) and stat.S_ISFIFO(os.stat(source).st_mode)


def _by_number(names: Sequence[str]) -> dict[int, list[str]]:
    """The names of units by their number."""
    known: dict[int, list[str]] = {}
    for name in names:
        known.setdefault(int(name.partition("-")[0]), []).append(name)
    return known


def _has_grown(folder: ScanFolder, unit: Unit, name: str) -> bool:
    """Whether an earlier unit has the first documents of this one and no others, or cannot be read."""
    try:
        facts = read_sums(folder.sums_path(name)).facts
    except MhaError:
        return True
    n_documents = len(facts.documents) + len(facts.bad)
    now = {document_digest(document) for document in unit.documents[:n_documents]}
    return n_documents < len(unit.documents) and {document.digest for document in facts.documents} <= now
