"""The folder of a scan: its manifest, the rows and sums of finished units, and the summary.

A unit is done when its file in `units` is there and whole; that is written last. Every file is written whole or not at all, so
a scan may be killed at any moment and goes on with what is done.
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

from mhacli.errors import MhaError, UsageError
from mhacli.io.files import TEMPORARY, read_whole, write_whole
from mhacli.io.json_schema import decode, load_json, plain
from mhacli.io.scan_folder import MANIFEST, SUMMARY
from mhacli.results.scan.settings import ScanSettings, differences
from mhacli.results.scan.sums import MAX_FILE_BYTES, UnitFacts, read_sums
from mhacli.results.scan.unit import Unit, UnitFiles, unit_name

SCHEMA = "mha.scan/1"
ROWS, UNITS, EXAMPLE = "rows", "units", "example-"
SAFETENSORS = ".safetensors"
_MAX_MANIFEST_BYTES = 1 << 30
LEFT_S = 3600.0
"""No write of a file takes so many seconds."""


class Finished(NamedTuple):
    """The name under which a unit is done and its facts, None where it is not; and what is wrong with what there is of it."""

    name: str | None
    facts: UnitFacts | None
    fault: str | None


@dataclass(frozen=True)
class ScanFolder:
    """An open folder. `settings` are those of this scan first, then those of other devices that took part."""

    path: str
    settings: tuple[ScanSettings, ...]

    @property
    def suffix(self) -> str:
        """The ending of files of rows."""
        return f".{self.settings[0].rows.split()[0]}"

    def finished(self, unit: Unit) -> Finished:
        """What there is of a unit. The sums are read and checked, and the rows against the digest in them."""
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
        """The names that the unit has by the settings of each device."""
        return tuple(unit_name(unit.number, unit.documents, settings.digest) for settings in self.settings)

    def _require_rows(self, name: str, facts: UnitFacts) -> None:
        path = self.rows_path(name)
        if hashlib.sha256(read_whole(path, MAX_FILE_BYTES)).hexdigest() != facts.rows:
            raise MhaError(f"{path} is damaged: its content is not what was written", code="bad-file", path=path)

    def write(self, unit: Unit, files: UnitFiles) -> None:
        """The files of a unit, that which says that it is done last. Raises `MhaError` where one cannot be written."""
        write_whole(self.rows_path(unit.name), files.rows, force=True)
        if files.example:
            write_whole(self.example_path(unit.number), files.example, force=True)
        write_whole(self.sums_path(unit.name), files.sums, force=True)

    def rows_path(self, name: str) -> str:
        """The file of a unit's rows."""
        return os.path.join(self.path, ROWS, name + self.suffix)

    def sums_path(self, name: str) -> str:
        """The file of what the merge needs of a unit."""
        return os.path.join(self.path, UNITS, name + SAFETENSORS)

    def example_path(self, number: int) -> str:
        """The record of one document of a unit."""
        return os.path.join(self.path, f"{EXAMPLE}{number:08d}{SAFETENSORS}")

    @property
    def summary_path(self) -> str:
        """The record of the corpus."""
        return os.path.join(self.path, SUMMARY)

    def examples(self) -> list[int]:
        """The numbers of the units that have an example, in their order."""
        names = (name.removeprefix(EXAMPLE) for name in os.listdir(self.path) if name.startswith(EXAMPLE))
        return sorted(int(name.removesuffix(SAFETENSORS)) for name in names)

    def unit_names(self) -> list[str]:
        """The units that there are files of, finished or not, in their order."""
        files = [*os.listdir(os.path.join(self.path, ROWS)), *os.listdir(os.path.join(self.path, UNITS))]
        return sorted({name.partition(".")[0] for name in files if not name.startswith(".")})

    def remove(self, name: str) -> None:
        """Takes away the files of a unit, that which says that it is done first."""
        for path in (self.sums_path(name), self.rows_path(name)):
            with suppress(FileNotFoundError):
                os.unlink(path)

    def finish(self, summary: bytes, facts: Mapping[str, Any]) -> None:
        """Writes the summary, and the manifest with what was found; the examples that it does not need are removed."""
        write_whole(self.summary_path, summary, force=True)
        write_whole(os.path.join(self.path, MANIFEST), _manifest(self.settings, facts), force=True)
        for number in self.examples()[1:]:
            with suppress(FileNotFoundError):
                os.unlink(self.example_path(number))
        for room in (self.path, os.path.join(self.path, ROWS), os.path.join(self.path, UNITS)):
            _remove_left(room)


def open_folder(path: str, settings: ScanSettings, *, mixed: bool = False) -> ScanFolder:
    """The folder of a scan, made where it is missing.

    Raises `UsageError` for a folder of other settings, with what differs; with `mixed` the device may differ. Raises `MhaError`
    for a folder that holds something else, or cannot be written.
    """
    manifest = os.path.join(path, MANIFEST)
    try:
        if not os.path.lexists(manifest):
            if os.path.isdir(path) and any(
                name not in (ROWS, UNITS) and not _is_left(name) for name in os.listdir(path)
            ):
                raise UsageError(f"--out {path} holds other files, and no scan", hint="name a new folder", path=path)
            for room in (ROWS, UNITS):
                os.makedirs(os.path.join(path, room), exist_ok=True)
            _write_first(manifest, settings)
    except OSError as fault:
        raise MhaError(f"{path} cannot be written: {fault.strerror or fault}", code="unwritable", path=path) from fault
    known = read_settings(path)
    others = tuple(other for other in known if other.digest != settings.digest)
    if len(others) < len(known):
        return ScanFolder(path, (settings, *others))
    _require_same(path, known[0], settings, mixed=mixed)
    folder = ScanFolder(path, (settings, *known))
    write_whole(manifest, _manifest(folder.settings, {}), force=True)
    return folder


def _is_left(name: str) -> bool:
    """Whether a file is one that is being written, or that a process which was killed has left half written."""
    return name.startswith(".") and name.endswith(TEMPORARY)


def _remove_left(room: str) -> None:
    """Removes what killed processes have left; what is new may be a file that another rank writes."""
    for entry in [*os.scandir(room)]:
        with suppress(FileNotFoundError):
            if _is_left(entry.name) and time.time() - entry.stat().st_mtime > LEFT_S:
                os.unlink(entry)


def read_settings(path: str) -> tuple[ScanSettings, ...]:
    """The settings in the manifest of a folder. Raises `MhaError` for a folder that is no scan."""
    manifest = os.path.join(path, MANIFEST)
    document = load_json(read_whole(manifest, _MAX_MANIFEST_BYTES), manifest)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise MhaError(f"{manifest} is not a manifest of schema {SCHEMA}", code="bad-file", path=manifest)
    try:
        return decode(_Manifest, document, manifest).settings
    except MhaError as fault:
        raise MhaError(
            f"{fault.message}: another version of mha may have made it",
            hint="--out another folder starts anew",
            code="bad-file",
            path=manifest,
        ) from fault


@dataclass(frozen=True)
class _Manifest:
    settings: tuple[ScanSettings, ...]


def _write_first(manifest: str, settings: ScanSettings) -> None:
    """A new manifest, unless another process was quicker."""
    try:
        write_whole(manifest, _manifest((settings,), {}), force=False)
    except MhaError as fault:
        if fault.code != "exists":
            raise


def _manifest(settings: Sequence[ScanSettings], facts: Mapping[str, Any]) -> bytes:
    ordered = sorted(settings, key=lambda each: each.digest)  # whichever came first
    document = {"schema": SCHEMA, "settings": plain(ordered), **facts}
    return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()


def _require_same(path: str, old: ScanSettings, new: ScanSettings, *, mixed: bool) -> None:
    """Raises `UsageError` that says what differs, unless that is the device alone and devices may be `mixed`."""
    changed = [*differences(old, new)]
    if mixed and {name for name, _, _ in changed} == {"device"}:
        return
    words = ", ".join(f"{name} was {was} and is {now}" for name, was, now in changed)
    hint = (
        "--mixed puts results of several devices together, and says so"
        if len(changed) == 1 and "device" in words
        else ""
    )
    raise UsageError(
        f"{path} was made with other settings: {words}", hint=hint or "--out another folder starts anew", path=path
    )
