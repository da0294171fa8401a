"""The folder of a scan: its manifest, the rows and sums of finished units, and the summary.

A unit is finished when its file in `units` exists and is intact; this file is written last. Every file is written completely or
not at all, so a scan may be killed at any moment and resumes from the finished units.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mhacli.commands.scan.request import ScanSettings
from mhacli.commands.scan.totals import Totals, read_totals
from mhacli.commands.scan.units import (
    MAX_FILE_BYTES,
    Unit,
    UnitFiles,
    document_digest,
    number_of,
    unit_name,
)
from mhacli.errors import MhaError, UsageError, bad_file
from mhacli.io.data import decode, load_json, plain
from mhacli.io.files import TEMPORARY, read_whole, write_whole
from mhacli.io.scan_folder import MANIFEST, SUMMARY
from mhacli.record import storage

_SCHEMA, _ROWS, _UNITS = "mha.scan/1", "rows", "units"
_TEMPORARY_NAME = f".*{TEMPORARY}"
_TEMPORARY_S = 3600.0
"""Seconds that no write of a file takes; older temporary files belong to killed processes."""
_MAX_MANIFEST_BYTES = 1 << 30
ANEW = "--out another folder starts anew"
"""The hint for a folder that cannot be resumed."""


@dataclass(frozen=True)
class ScanFolder:
    """An open folder. `settings` are those of this scan, then those of other devices that computed units."""

    path: Path
    settings: tuple[ScanSettings, ...]

    def finished(self, unit: Unit, note: Callable[[str], None]) -> tuple[str, Totals] | None:
        """The name and sums of a finished unit, None for an unfinished one. Its sums are read and checked, and its rows compared
        with their digest; `note` receives the fault of damaged files."""
        for name in filter(self.has, self.names_of(unit)):
            rows = self._paths(name)[0]
            try:
                totals = read_totals(self.sums_path(name))
                if hashlib.sha256(read_whole(rows, MAX_FILE_BYTES)).hexdigest() == totals.rows:
                    return name, totals
                note(f"{rows} is damaged: its content is not what was written; it is computed again")
            except MhaError as fault:
                note(f"{fault.message}; it is computed again")
        return None

    def require_same_documents(self, unit: Unit, names: Sequence[str]) -> None:
        """Removes earlier forms of a unit, whose number these `names` have: the last one of a shorter corpus, one that cannot be
        read, or one with bad documents that have changed. Raises `UsageError` for a unit of other documents."""
        digests = {document_digest(document) for document in unit.documents}
        for name in set(names) - set(self.names_of(unit)):
            try:
                totals = read_totals(self.sums_path(name))
                is_shorter = totals.n_documents + totals.n_bad <= len(unit.documents)
                is_earlier = is_shorter and set(totals.digests) <= digests
            except MhaError:
                is_earlier = True
            if not is_earlier:
                message = f"{self.path} was made of other documents: {unit.named} have changed"
                raise UsageError(message, hint=ANEW, path=str(self.path))
            self.remove(name)

    def names_of(self, unit: Unit) -> tuple[str, ...]:
        """The names of the unit with the settings of each device."""
        return tuple(unit_name(unit.number, unit.documents, settings.digest) for settings in self.settings)

    def has(self, name: str) -> bool:
        """Whether there is a unit of this name, intact or not."""
        return os.path.lexists(self.sums_path(name))

    def write(self, unit: Unit, files: UnitFiles) -> None:
        """Writes the files of a unit. Raises `MhaError` if one cannot be written."""
        for path, content in zip(self._paths(unit.name), files, strict=True):
            if content is not None:
                write_whole(path, content, force=True)

    def _paths(self, name: str) -> tuple[str, str, str]:
        """The paths of a unit's rows, its example, and its sums, which mark it as finished."""
        rows = self.path / _ROWS / f"{name}.{self.settings[0].row_format}"
        return str(rows), self.example_path(number_of(name)), self.sums_path(name)

    def sums_path(self, name: str) -> str:
        """The path of a unit's sums, from which units are merged."""
        return str(self.path / _UNITS / f"{name}.safetensors")

    def example_path(self, number: int) -> str:
        """The path of the example of a unit, the record of one of its documents."""
        return str(self.path / f"example-{number:08d}.safetensors")

    def examples(self) -> list[int]:
        """The sorted numbers of the units with an example."""
        return sorted(int(path.stem.partition("-")[2]) for path in self.path.glob("example-*"))

    def remove_damaged_examples(self, note: Callable[[str], None]) -> None:
        """Removes examples that cannot be read; `note` receives their faults."""
        for path in map(self.example_path, self.examples()):
            try:
                storage.load(path)
            except MhaError as fault:
                note(f"{fault.message}; it is computed again")
                os.unlink(path)

    def unit_names(self) -> list[str]:
        """The sorted names of all units with files, finished or not."""
        files = (path.name for part in (_ROWS, _UNITS) for path in (self.path / part).glob("[!.]*"))
        return sorted({name.partition(".")[0] for name in files})

    def remove(self, name: str) -> None:
        """Removes the files of a unit, first the one that marks it as finished."""
        for path in reversed(self._paths(name)):
            Path(path).unlink(missing_ok=True)

    def finish(self, summary: bytes, facts: Mapping[str, Any]) -> None:
        """Writes the summary and the manifest with `facts` for people, and removes unneeded examples and temporary files of
        killed processes. Recent ones are kept, because another rank may be writing them."""
        write_whole(str(self.path / SUMMARY), summary, force=True)
        _write_manifest(self.path, self.settings, facts)
        for number in self.examples()[1:]:
            Path(self.example_path(number)).unlink(missing_ok=True)
        for path in [*self.path.rglob(_TEMPORARY_NAME)]:
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _TEMPORARY_S:
                    path.unlink()


def open_folder(out: str, settings: ScanSettings, *, mixed: bool = False) -> ScanFolder:
    """The folder of a scan, created if it does not exist.

    Raises `UsageError` for a folder with other settings, naming them; with `mixed` the device may differ, and what follows it.
    Raises `MhaError` for a folder with other files, or one that cannot be written.
    """
    path = Path(out)
    if not os.path.lexists(path / MANIFEST):
        _create(path, settings)
    recorded = _recorded_settings(str(path / MANIFEST))
    others = tuple(other for other in recorded if other.digest != settings.digest)
    if len(others) == len(recorded):
        for old in others:
            is_other_device = old.device != settings.device and old.on_any_device() == settings.on_any_device()
            if not (mixed and is_other_device):
                hint = "--mixed puts results of several devices together, and says so; " * is_other_device + ANEW
                message = f"{out} was made with other settings: {old.differences(settings)}"
                raise UsageError(message, hint=hint, path=out)
        _write_manifest(path, (settings, *others))
    return ScanFolder(path, (settings, *others))


def _create(path: Path, settings: ScanSettings) -> None:
    """Makes the folder, with a manifest unless another process has written it."""
    names = path.iterdir() if path.is_dir() else ()
    if any(entry.name not in (_ROWS, _UNITS) and not entry.match(_TEMPORARY_NAME) for entry in names):
        raise UsageError(f"--out {path} holds other files, and no scan", hint="name a new folder", path=str(path))
    try:
        for part in (_ROWS, _UNITS):
            (path / part).mkdir(parents=True, exist_ok=True)
        _write_manifest(path, (settings,), force=False)
    except OSError as fault:
        raise MhaError(f"{path} cannot be written: {fault.strerror}", code="unwritable", path=str(path)) from fault
    except MhaError as fault:
        if fault.code != "exists":
            raise


def _recorded_settings(manifest: str) -> tuple[ScanSettings, ...]:
    """The settings of each kind of device that computed units. Raises `MhaError` for a manifest that is damaged, or of another
    version of mha."""
    try:
        document = decode(dict[str, Any], load_json(read_whole(manifest, _MAX_MANIFEST_BYTES), manifest), manifest)
        if document.get("schema") != _SCHEMA:
            raise bad_file(manifest, f"{manifest} does not have the schema {_SCHEMA}")
        return decode(tuple[ScanSettings, ...], document.get("settings"), manifest)
    except MhaError as fault:
        fault.hint = ANEW
        raise


def _write_manifest(
    path: Path, settings: Sequence[ScanSettings], facts: Mapping[str, Any] | None = None, *, force: bool = True
) -> None:
    ordered = sorted(settings, key=lambda of_device: of_device.digest)  # whichever was first
    document = {"schema": _SCHEMA, "settings": plain(ordered), **(facts or {})}
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    write_whole(str(path / MANIFEST), text.encode(), force=force)
