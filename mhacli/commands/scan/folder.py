"""The folder of a scan: its manifest, the rows and sums of finished units, and the summary.

A unit is finished when its file in `units` exists and is intact; this file is written last. Every file is written completely or
not at all, so a scan may be killed at any moment and resumes from the finished units.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from mhacli.commands.scan.settings import ScanSettings, differences
from mhacli.commands.scan.sums import MAX_FILE_BYTES, UnitFacts, read_sums
from mhacli.commands.scan.unit import Unit, UnitFiles, unit_name
from mhacli.errors import MhaError, UsageError
from mhacli.io.files import TEMPORARY, read_whole, write_whole
from mhacli.io.json_schema import decode, load_json, plain
from mhacli.io.scan_folder import MANIFEST, SUMMARY

SCHEMA = "mha.scan/1"
ROWS, UNITS, EXAMPLE = "rows", "units", "example-"
SAFETENSORS = ".safetensors"
_MAX_MANIFEST_BYTES = 1 << 30
TEMPORARY_S = 3600.0
"""Seconds that no write of a file takes; older temporary files belong to killed processes."""


class Finished(NamedTuple):
    """The name and facts of a finished unit, None for an unfinished one; and the fault of its damaged files."""

    name: str | None
    facts: UnitFacts | None
    fault: str | None


@dataclass(frozen=True)
class ScanFolder:
    """An open folder. `settings` are those of this scan, then those of other devices that computed units."""

    path: str
    settings: tuple[ScanSettings, ...]

    @property
    def suffix(self) -> str:
        """The ending of the files of rows."""
        return f".{self.settings[0].rows.split()[0]}"

    def finished(self, unit: Unit) -> Finished:
        """Whether a unit is finished. Its sums are read and checked, and its rows compared with their digest."""
        fault = None
        for name in self.names_of(unit):
            if not os.path.lexists(self.sums_path(name)):
                continue
            try:
                facts = read_sums(self.sums_path(name)).facts
                self._require_rows(name, facts)
            except MhaError as error:
                fault = error.message
            else:
                return Finished(name, facts, None)
        return Finished(None, None, fault)

    def names_of(self, unit: Unit) -> tuple[str, ...]:
        """The names of the unit with the settings of each device."""
        return tuple(unit_name(unit.number, unit.documents, settings.digest) for settings in self.settings)

    def _require_rows(self, name: str, facts: UnitFacts) -> None:
        path = self.rows_path(name)
        if hashlib.sha256(read_whole(path, MAX_FILE_BYTES)).hexdigest() != facts.rows:
            raise MhaError(f"{path} is damaged: its content is not what was written", code="bad-file", path=path)

    def write(self, unit: Unit, files: UnitFiles) -> None:
        """Writes the files of a unit, last the one that marks it as finished. Raises `MhaError` if one cannot be written."""
        write_whole(self.rows_path(unit.name), files.rows, force=True)
        if files.example:
            write_whole(self.example_path(unit.number), files.example, force=True)
        write_whole(self.sums_path(unit.name), files.sums, force=True)

    def rows_path(self, name: str) -> str:
        """The path of a unit's rows."""
        return os.path.join(self.path, ROWS, name + self.suffix)

    def sums_path(self, name: str) -> str:
        """The path of a unit's sums, from which units are merged."""
        return os.path.join(self.path, UNITS, name + SAFETENSORS)

    def example_path(self, number: int) -> str:
        """The path of the example of a unit, the record of one of its documents."""
        return os.path.join(self.path, f"{EXAMPLE}{number:08d}{SAFETENSORS}")

    @property
    def summary_path(self) -> str:
        """The path of the record of the corpus."""
        return os.path.join(self.path, SUMMARY)

    def examples(self) -> list[int]:
        """The sorted numbers of the units with an example."""
        names = (name.removeprefix(EXAMPLE) for name in os.listdir(self.path) if name.startswith(EXAMPLE))
        return sorted(int(name.removesuffix(SAFETENSORS)) for name in names)

    def unit_names(self) -> list[str]:
        """The sorted names of all units with files, finished or not."""
        files = [*os.listdir(os.path.join(self.path, ROWS)), *os.listdir(os.path.join(self.path, UNITS))]
        return sorted({name.partition(".")[0] for name in files if not name.startswith(".")})

    def remove(self, name: str) -> None:
        """Removes the files of a unit, first the one that marks it as finished, and its example."""
        for path in (self.sums_path(name), self.rows_path(name), self.example_path(int(name.partition("-")[0]))):
            with suppress(FileNotFoundError):
                os.unlink(path)

    def finish(self, summary: bytes, facts: Mapping[str, Any]) -> None:
        """Writes the summary and the manifest with `facts`, and removes unneeded examples."""
        write_whole(self.summary_path, summary, force=True)
        write_whole(os.path.join(self.path, MANIFEST), _manifest(self.settings, facts), force=True)
        for number in self.examples()[1:]:
            with suppress(FileNotFoundError):
                os.unlink(self.example_path(number))
        for directory in (self.path, os.path.join(self.path, ROWS), os.path.join(self.path, UNITS)):
            _remove_temporary(directory)


def open_folder(path: str, settings: ScanSettings, *, mixed: bool = False) -> ScanFolder:
    """The folder of a scan, created if it does not exist.

    Raises `UsageError` for a folder with other settings, naming them; with `mixed` the device may differ, and what follows it.
    Raises `MhaError` for a folder with other files, or one that cannot be written.
    """
    manifest = os.path.join(path, MANIFEST)
    try:
        if not os.path.lexists(manifest):
            if os.path.isdir(path) and any(
                name not in (ROWS, UNITS) and not _is_temporary(name) for name in os.listdir(path)
            ):
                raise UsageError(f"--out {path} holds other files, and no scan", hint="name a new folder", path=path)
            for directory in (ROWS, UNITS):
                os.makedirs(os.path.join(path, directory), exist_ok=True)
            _write_first(manifest, settings)
    except OSError as fault:
        raise MhaError(f"{path} cannot be written: {fault.strerror or fault}", code="unwritable", path=path) from fault
    recorded = read_settings(path)
    others = tuple(other for other in recorded if other.digest != settings.digest)
    if len(others) < len(recorded):
        return ScanFolder(path, (settings, *others))
    for other in recorded:
        _require_same(path, other, settings, mixed=mixed)
    folder = ScanFolder(path, (settings, *recorded))
    write_whole(manifest, _manifest(folder.settings, {}), force=True)
    return folder


def _is_temporary(name: str) -> bool:
    """Whether a file is temporary: being written, or left by a killed process."""
    return name.startswith(".") and name.endswith(TEMPORARY)


def _remove_temporary(directory: str) -> None:
    """Removes temporary files of killed processes. Recent ones are kept, because another rank may be writing them."""
    for entry in [*os.scandir(directory)]:
        with suppress(FileNotFoundError):
            if _is_temporary(entry.name) and time.time() - entry.stat().st_mtime > TEMPORARY_S:
                os.unlink(entry)


def read_settings(path: str) -> tuple[ScanSettings, ...]:
    """The settings in the manifest of a folder. Raises `MhaError` for a folder that is not of a scan."""
    manifest = os.path.join(path, MANIFEST)
    data = read_whole(manifest, _MAX_MANIFEST_BYTES)
    try:
        document = load_json(data, manifest)
    except MhaError as fault:
        raise _bad_manifest(manifest, fault.message) from fault
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise _bad_manifest(manifest, f"{manifest} is not a manifest of schema {SCHEMA}")
    try:
        return decode(_Manifest, document, manifest).settings
    except MhaError as fault:
        raise _bad_manifest(manifest, f"{fault.message}: another version of mha may have made it") from fault


def _bad_manifest(manifest: str, message: str) -> MhaError:
    return MhaError(message, hint="--out another folder starts anew", code="bad-file", path=manifest)


@dataclass(frozen=True)
class _Manifest:
    settings: tuple[ScanSettings, ...]


def _write_first(manifest: str, settings: ScanSettings) -> None:
    """Writes a manifest, unless another process has written it."""
    try:
        write_whole(manifest, _manifest((settings,), {}), force=False)
    except MhaError as fault:
        if fault.code != "exists":
            raise


def _manifest(settings: Sequence[ScanSettings], facts: Mapping[str, Any]) -> bytes:
    ordered = sorted(settings, key=lambda device_settings: device_settings.digest)  # whichever was first
    document = {"schema": SCHEMA, "settings": plain(ordered), **facts}
    return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()


def _require_same(path: str, old: ScanSettings, new: ScanSettings, *, mixed: bool) -> None:
    """Raises `UsageError` with the settings that differ, unless they are those of another device and `mixed` is True."""
    changed = [*differences(old, new)]
    is_other_device = old.device != new.device and all(_follows_device(*change) for change in changed)
    if mixed and is_other_device:
        return
    changes = ", ".join(f"{name} was {before} and is {after}" for name, before, after in changed)
    hint = "--mixed puts results of several devices together, and says so; " * is_other_device
    raise UsageError(
        f"{path} was made with other settings: {changes}", hint=f"{hint}--out another folder starts anew", path=path
    )


def _follows_device(name: str, before: str, after: str) -> bool:
    """Whether a setting differs as it does between devices: their reducers, and the build of torch, behind its version."""
    return name in ("device", "reducer") or (name == "torch" and before.partition("+")[0] == after.partition("+")[0])
