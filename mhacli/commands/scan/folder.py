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
from typing import Any, Literal

from mhacli.commands.scan.request import ScanSettings
from mhacli.commands.scan.sums import MAX_FILE_BYTES, UnitFacts, read_sums
from mhacli.commands.scan.units import Unit, UnitFiles, number_of, unit_name
from mhacli.errors import MhaError, UsageError
from mhacli.io.data import decode, load_json, plain
from mhacli.io.files import TEMPORARY, read_whole, write_whole
from mhacli.io.scan_folder import MANIFEST, SUMMARY

_ROWS, _UNITS, _EXAMPLE, _SAFETENSORS = "rows", "units", "example-", ".safetensors"
_MAX_MANIFEST_BYTES = 1 << 30
_TEMPORARY_S = 3600.0
"""Seconds that no write of a file takes; older temporary files belong to killed processes."""
_HINT = "--out another folder starts anew"


@dataclass(frozen=True)
class Manifest:
    """The settings of each kind of device that computed units. A finished scan adds facts about the corpus, for people alone."""

    schema: Literal["mha.scan/1"]
    settings: tuple[ScanSettings, ...]


@dataclass(frozen=True)
class ScanFolder:
    """An open folder. `settings` are those of this scan, then those of other devices that computed units."""

    path: str
    settings: tuple[ScanSettings, ...]

    def finished(self, unit: Unit, note: Callable[[str], None]) -> tuple[str, UnitFacts] | None:
        """The name and facts of a finished unit, None for an unfinished one. Its sums are read and checked, and its rows compared
        with their digest; `note` receives the fault of damaged files."""
        for name in filter(self.has, self.names_of(unit)):
            rows = self.rows_path(name)
            try:
                facts = read_sums(self.sums_path(name)).facts
                if hashlib.sha256(read_whole(rows, MAX_FILE_BYTES)).hexdigest() == facts.rows:
                    return name, facts
                note(f"{rows} is damaged: its content is not what was written; it is computed again")
            except MhaError as fault:
                note(f"{fault.message}; it is computed again")
        return None

    def names_of(self, unit: Unit) -> tuple[str, ...]:
        """The names of the unit with the settings of each device."""
        return tuple(unit_name(unit.number, unit.documents, settings.digest) for settings in self.settings)

    def has(self, name: str) -> bool:
        """Whether there is a unit of this name, intact or not."""
        return os.path.lexists(self.sums_path(name))

    def write(self, unit: Unit, files: UnitFiles) -> None:
        """Writes the files of a unit, last the one that marks it as finished. Raises `MhaError` if one cannot be written."""
        write_whole(self.rows_path(unit.name), files.rows, force=True)
        if files.example:
            write_whole(self.example_path(unit.number), files.example, force=True)
        write_whole(self.sums_path(unit.name), files.sums, force=True)

    def rows_path(self, name: str) -> str:
        """The path of a unit's rows."""
        return os.path.join(self.path, _ROWS, f"{name}.{self.settings[0].row_format}")

    def sums_path(self, name: str) -> str:
        """The path of a unit's sums, from which units are merged."""
        return os.path.join(self.path, _UNITS, name + _SAFETENSORS)

    def example_path(self, number: int) -> str:
        """The path of the example of a unit, the record of one of its documents."""
        return os.path.join(self.path, f"{_EXAMPLE}{number:08d}{_SAFETENSORS}")

    def examples(self) -> list[int]:
        """The sorted numbers of the units with an example."""
        names = (name.removeprefix(_EXAMPLE) for name in os.listdir(self.path) if name.startswith(_EXAMPLE))
        return sorted(int(name.removesuffix(_SAFETENSORS)) for name in names)

    def unit_names(self) -> list[str]:
        """The sorted names of all units with files, finished or not."""
        files = [*os.listdir(os.path.join(self.path, _ROWS)), *os.listdir(os.path.join(self.path, _UNITS))]
        return sorted({name.partition(".")[0] for name in files if not name.startswith(".")})

    def remove(self, name: str) -> None:
        """Removes the files of a unit, first the one that marks it as finished, and its example."""
        _remove(self.sums_path(name), self.rows_path(name), self.example_path(number_of(name)))

    def finish(self, summary: bytes, facts: Mapping[str, Any]) -> None:
        """Writes the summary and the manifest with `facts`, and removes unneeded examples and temporary files of killed
        processes. Recent ones are kept, because another rank may be writing them."""
        write_whole(os.path.join(self.path, SUMMARY), summary, force=True)
        _write_manifest(self.path, self.settings, facts)
        _remove(*map(self.example_path, self.examples()[1:]))
        for directory in (self.path, os.path.join(self.path, _ROWS), os.path.join(self.path, _UNITS)):
            for entry in [*os.scandir(directory)]:
                with suppress(FileNotFoundError):
                    if _is_temporary(entry.name) and time.time() - entry.stat().st_mtime > _TEMPORARY_S:
                        os.unlink(entry)


def open_folder(path: str, settings: ScanSettings, *, mixed: bool = False) -> ScanFolder:
    """The folder of a scan, created if it does not exist.

    Raises `UsageError` for a folder with other settings, naming them; with `mixed` the device may differ, and what follows it.
    Raises `MhaError` for a folder with other files, or one that cannot be written.
    """
    if not os.path.lexists(os.path.join(path, MANIFEST)):
        _create(path, settings)
    recorded = _read_manifest(os.path.join(path, MANIFEST)).settings
    others = tuple(other for other in recorded if other.digest != settings.digest)
    if len(others) == len(recorded):
        for other in others:
            _require_same(path, other, settings, mixed=mixed)
        _write_manifest(path, (settings, *others))
    return ScanFolder(path, (settings, *others))


def _create(path: str, settings: ScanSettings) -> None:
    """Makes the folder, with a manifest unless another process has written it."""
    try:
        names = os.listdir(path) if os.path.isdir(path) else []
        if any(name not in (_ROWS, _UNITS) and not _is_temporary(name) for name in names):
            raise UsageError(f"--out {path} holds other files, and no scan", hint="name a new folder", path=path)
        for directory in (_ROWS, _UNITS):
            os.makedirs(os.path.join(path, directory), exist_ok=True)
        _write_manifest(path, (settings,), force=False)
    except OSError as fault:
        raise MhaError(f"{path} cannot be written: {fault.strerror or fault}", code="unwritable", path=path) from fault
    except MhaError as fault:
        if fault.code != "exists":
            raise


def _read_manifest(path: str) -> Manifest:
    """The manifest of a folder. Raises `MhaError` for one that is damaged, or of another version of mha."""
    try:
        return decode(Manifest, load_json(read_whole(path, _MAX_MANIFEST_BYTES), path), path)
    except MhaError as fault:
        raise MhaError(fault.message, hint=_HINT, code=fault.code, path=path) from fault


def _write_manifest(
    path: str, settings: Sequence[ScanSettings], facts: Mapping[str, Any] | None = None, *, force: bool = True
) -> None:
    ordered = sorted(settings, key=lambda of_device: of_device.digest)  # whichever was first
    document = plain(Manifest("mha.scan/1", tuple(ordered))) | (facts or {})
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    write_whole(os.path.join(path, MANIFEST), text.encode(), force=force)


def _require_same(path: str, old: ScanSettings, new: ScanSettings, *, mixed: bool) -> None:
    """Raises `UsageError` with the settings that differ, unless they are those of another device and `mixed` is True."""
    changed = [*old.differences(new)]
    is_other_device = old.device != new.device and all(_follows_device(*change) for change in changed)
    if mixed and is_other_device:
        return
    changes = ", ".join(f"{name} was {before} and is {after}" for name, before, after in changed)
    hint = "--mixed puts results of several devices together, and says so; " * is_other_device
    raise UsageError(f"{path} was made with other settings: {changes}", hint=hint + _HINT, path=path)


def _follows_device(name: str, before: str, after: str) -> bool:
    """Whether a setting differs as it does between devices: their reducers, and the build of torch, behind its version."""
    return name in ("device", "reducer") or (name == "torch" and before.partition("+")[0] == after.partition("+")[0])


def _is_temporary(name: str) -> bool:
    """Whether a file is temporary: being written, or left by a killed process."""
    return name.startswith(".") and name.endswith(TEMPORARY)


def _remove(*paths: str) -> None:
    for path in paths:
        with suppress(FileNotFoundError):
            os.unlink(path)
