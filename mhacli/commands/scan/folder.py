"""The folder of a scan: its manifest, the rows and sums of finished units, and the summary.

A unit is finished when its file in `units` exists and is intact; this file is written last. Every file is written completely or
not at all, so a scan may be killed at any moment and resumes from the finished units.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from mhacli.cli.console import note
from mhacli.commands.scan.totals import MAX_FILE_BYTES, Totals, read_totals
from mhacli.errors import MhaError, UsageError, bad_file
from mhacli.io.data import decode, json_checksum, load_json
from mhacli.io.files import TEMPORARY, read_whole, write_whole
from mhacli.record.corpus import named
from mhacli.record.record import Record
from mhacli.record.storage import MANIFEST, SUMMARY
from mhacli.text.reading import Document

Settings = Mapping[str, Any]
"""The settings that, with the documents, determine the results, as JSON: equal settings give equal bytes."""
UnitFiles = tuple[bytes, bytes, bytes]
"""The contents of the files of a unit: rows, the record of a document as an example, empty if none is good, and sums."""
UNIT_SIZE = 16
"""Documents in a unit, bad ones counted; the last unit of a corpus may have fewer."""
ANEW = "--out another folder starts anew"
"""The hint for a folder that cannot be resumed."""
_MAX_MANIFEST_BYTES = 1 << 30
_SCHEMA, _ROWS, _UNITS = "mha.scan/1", "rows", "units"
_OF_DEVICE = {"device", "reducer", "build"}
"""The settings in which results of several devices may differ."""
_TEMPORARY_NAME = f".*{TEMPORARY}"
_TEMPORARY_S = 3600.0
"""Seconds that no write of a file takes; older temporary files belong to killed processes."""


class Unit(NamedTuple):
    """Consecutive documents of a corpus, which are computed, written and repeated as a whole, by their number from 0."""

    number: int
    documents: tuple[Document, ...]

    @property
    def named(self) -> str:
        """The first and last document, for messages: `corpus.jsonl:1 to corpus.jsonl:16`."""
        return " to ".join(named(document.file, document.place) for document in (self.documents[0], self.documents[-1]))

    def name(self, settings: Settings) -> str:
        """The number, so that names sort like the documents, and a digest of what determines the results."""
        return f"{self.number:08d}-{json_checksum([_digest_of(settings), self.documents])[:16]}"


def _digest_of(settings: Settings) -> str:
    """The digest of settings without the name of the model, which is only its location."""
    return json_checksum(sorted({**settings, "model": ""}.items()))


def differences(old: Settings, new: Settings) -> dict[str, str]:
    """The settings that differ, with both values."""
    names = [name for name in new if old.get(name) != new[name] and name != "model"]
    return {name: f"{name} was {old.get(name)} and is {new[name]}" for name in names}


@dataclass(frozen=True)
class ScanFolder:
    """An open folder. `settings` are those of this scan, then those of other devices that computed units."""

    path: Path
    settings: tuple[Settings, ...]

    def paths(self, name: str) -> tuple[str, str, str]:
        """The paths of a unit's rows, its example, and its sums, which mark it as finished."""
        rows, example = f"{name}.{self.settings[0]['rows'].split()[0]}", f"example-{name.partition('-')[0]}.safetensors"
        paths = self.path / _ROWS / rows, self.path / example, self.path / _UNITS / f"{name}.safetensors"
        return tuple(map(str, paths))  # type: ignore[return-value]

    def write(self, name: str, files: UnitFiles) -> None:
        """Writes the files of a unit, the example only if no unit before has one. Raises `MhaError` if one cannot be written."""
        rows, example, sums = self.paths(name)
        write_whole(rows, files[0], force=True)
        if files[1] and not any(other <= example for other in self.examples()):
            write_whole(example, files[1], force=True)
        write_whole(sums, files[2], force=True)

    def totals(self, name: str) -> Totals:
        """The sums of a unit. Raises `MhaError` for a unit without its files, or with a damaged one."""
        rows, _, sums = self.paths(name)
        totals = read_totals(sums)
        if sha256(read_whole(rows, MAX_FILE_BYTES)).hexdigest() != totals.rows:
            raise bad_file(rows, f"{rows} is damaged: its content is not what was written")
        return totals

    def finished(self, unit: Unit, names: Iterable[str]) -> tuple[str, Totals | None]:
        """The name of the unit, and its sums if it is finished and the corpus has an example, of the units with its number and
        these `names`. Damaged files are named.

        Earlier forms of the unit are removed: the last one of a shorter corpus, one that cannot be read, or one with bad
        documents. Raises `UsageError` for a whole unit of other documents.
        """
        names_here = [unit.name(settings) for settings in self.settings]
        for name in names:
            totals = None
            try:
                totals = self.totals(name)
            except MhaError as fault:
                if name in names_here and self.has(name):
                    note(f"{fault.message}; it is computed again")
            if name in names_here:
                if totals is not None and self.examples():
                    return name, totals
            elif totals is not None and totals.n_documents == UNIT_SIZE:
                message = f"{self.path} was made of other documents: {unit.named} have changed"
                raise UsageError(message, hint=ANEW, path=str(self.path))
            else:
                for path in reversed(self.paths(name)):  # first the file that marks it as finished
                    Path(path).unlink(missing_ok=True)
        return names_here[0], None

    def has(self, name: str) -> bool:
        """Whether there is a unit of this name, intact or not."""
        return os.path.lexists(self.paths(name)[-1])

    def names(self) -> dict[int, list[str]]:
        """The sorted names of all units with files, finished or not, by their number."""
        files = [path.name for part in (_ROWS, _UNITS) for path in (self.path / part).glob("[!.]*")]
        names = sorted({file.partition(".")[0] for file in files})
        of_number = groupby(names, key=lambda name: int(name.partition("-")[0]))
        return {number: [*same] for number, same in of_number}

    def examples(self) -> list[str]:
        """The paths of the examples, in the order of their units."""
        return sorted(map(str, self.path.glob("example-*")))

    def finish(self, record: Record, totals: Totals, names: Sequence[str]) -> None:
        """Writes the record of the corpus, and the manifest with its sums and units for people; removes unneeded examples, and
        temporary files of killed processes. Recent ones are kept, because another rank may be writing them."""
        record.save(str(self.path / SUMMARY), force=True)
        facts = {name: getattr(totals, name) for name in ("n_documents", "n_tokens", "n_bad", "devices")}
        _write_manifest(self.path, self.settings, **facts, documents=json_checksum(totals.documents), units=names)
        for path in self.examples()[1:]:
            Path(path).unlink(missing_ok=True)
        for temporary in [*self.path.rglob(_TEMPORARY_NAME)]:
            with suppress(FileNotFoundError):
                if time.time() - temporary.stat().st_mtime > _TEMPORARY_S:
                    temporary.unlink()


def open_folder(out: str, settings: Settings, *, mixed: bool) -> ScanFolder:
    """The folder of a scan, created if it does not exist.

    Raises `UsageError` for a folder with other settings, naming them; with `mixed` the device may differ, and what follows it.
    Raises `MhaError` for a folder with other files, or one that cannot be written.
    """
    path = Path(out)
    recorded = _recorded_settings(path) if os.path.lexists(path / MANIFEST) else _made(path)
    found = [(old, changed) for old in recorded if (changed := differences(old, settings))]
    others = [old for old, _ in found]
    if len(others) == len(recorded):
        for _, changed in found:
            is_other_device = "device" in changed and changed.keys() <= _OF_DEVICE
            if not (mixed and is_other_device):
                hint = "--mixed puts results of several devices together, and says so; " * is_other_device + ANEW
                message = f"{out} was made with other settings: {', '.join(changed.values())}"
                raise UsageError(message, hint=hint, path=out)
        _write_manifest(path, [settings, *others])
    return ScanFolder(path, (settings, *others))


def _made(path: Path) -> list[Settings]:
    """Makes the folder, in which nothing is recorded. Another rank may do the same."""
    names = path.iterdir() if path.is_dir() else ()
    if any(entry.name not in (_ROWS, _UNITS) and not entry.match(_TEMPORARY_NAME) for entry in names):
        raise UsageError(f"--out {path} holds other files, and no scan", hint="name a new folder", path=str(path))
    with suppress(OSError):  # the first file that is written says why it cannot be
        for part in (_ROWS, _UNITS):
            (path / part).mkdir(parents=True, exist_ok=True)
    return []


def _recorded_settings(path: Path) -> list[Settings]:
    """The settings of each kind of device that computed units. Raises `MhaError` for a manifest that is damaged, or of another
    version of mha."""
    manifest = str(path / MANIFEST)
    try:
        document = decode(dict[str, Any], load_json(read_whole(manifest, _MAX_MANIFEST_BYTES), manifest), manifest)
        recorded = decode(list[dict[str, Any]], document.get("settings"), manifest)
        if document.get("schema") != _SCHEMA or not all("torch" in settings for settings in recorded):
            raise bad_file(manifest, f"{manifest} is not a manifest of the schema {_SCHEMA}")
    except MhaError as fault:
        fault.hint = ANEW
        raise
    return [*recorded]


def _write_manifest(path: Path, settings: Iterable[Settings], **facts: Any) -> None:
    document = {"schema": _SCHEMA, "settings": sorted(settings, key=_digest_of), **facts}  # whichever was first
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    write_whole(str(path / MANIFEST), text.encode(), force=True)
