import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.scans import SETTINGS

from mhacli.errors import EXIT_USAGE, MhaError, UsageError
from mhacli.io.files import write_whole
from mhacli.results.scan.folder import ScanFolder, open_folder
from mhacli.results.scan.sums import UnitFacts, UnitSums
from mhacli.results.scan.unit import Unit, UnitFiles, units
from mhacli.text.corpus import Document

UNIT = next(units([Document("a.txt", 1, "a"), Document("a.txt", 2, "b")], SETTINGS.digest))
ROWS = b'{"head":0}\n'


def facts_of(unit: Unit) -> UnitFacts:
    digest = hashlib.sha256(ROWS).hexdigest()
    return UnitFacts(unit.number, SETTINGS.digest, SETTINGS.device, digest, (), (), (), (), (), identical=True)


def files_of(unit: Unit) -> UnitFiles:
    return UnitFiles(ROWS, UnitSums(facts_of(unit), {}).to_bytes(), b"example", 2, 0, 5)


@pytest.fixture
def folder(tmp_path: Path) -> ScanFolder:
    return open_folder(str(tmp_path / "out"), SETTINGS)


def test_a_unit_is_done_once_it_is_written(folder: ScanFolder) -> None:
    assert folder.finished(UNIT) == (None, None, None)
    folder.write(UNIT, files_of(UNIT))
    assert folder.finished(UNIT) == (UNIT.name, facts_of(UNIT), None)
    assert folder.unit_names() == [UNIT.name]
    assert folder.examples() == [0]


def test_a_unit_of_other_documents_is_not_done(folder: ScanFolder) -> None:
    folder.write(UNIT, files_of(UNIT))
    other = next(units([Document("a.txt", 1, "a"), Document("a.txt", 2, "c")], SETTINGS.digest))
    assert folder.finished(other) == (None, None, None)


def test_a_scan_that_ends_at_any_write_leaves_no_unit_that_is_half_done(
    folder: ScanFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(Exception):
        pass

    for ends_at in range(3):
        writes: list[str] = []

        def write_or_end(path: str, data: bytes, *, force: bool, n: int = ends_at, done: list[str] = writes) -> None:
            if len(done) == n:
                raise KilledError
            done.append(path)
            write_whole(path, data, force=force)

        monkeypatch.setattr("mhacli.results.scan.folder.write_whole", write_or_end)
        with pytest.raises(KilledError):
            folder.write(UNIT, files_of(UNIT))
        assert folder.finished(UNIT) == (None, None, None)
    monkeypatch.setattr("mhacli.results.scan.folder.write_whole", write_whole)
    folder.write(UNIT, files_of(UNIT))
    assert folder.finished(UNIT)[0] == UNIT.name


def cut(path: str) -> None:
    os.truncate(path, os.path.getsize(path) - 1)


def change(path: str) -> None:
    content = bytearray(Path(path).read_bytes())
    content[-4] ^= 1
    Path(path).write_bytes(content)


@pytest.mark.every_row
@pytest.mark.parametrize("damage", [cut, change, os.unlink])
def test_damaged_rows_are_named_and_not_done(folder: ScanFolder, damage: Callable[[str], None]) -> None:
    folder.write(UNIT, files_of(UNIT))
    damage(folder.rows_path(UNIT.name))
    name, _, fault = folder.finished(UNIT)
    assert name is None
    assert folder.rows_path(UNIT.name) in str(fault)


@pytest.mark.every_row
@pytest.mark.parametrize("damage", [cut, change])
def test_damaged_sums_are_named_and_not_done(folder: ScanFolder, damage: Callable[[str], None]) -> None:
    folder.write(UNIT, files_of(UNIT))
    damage(folder.sums_path(UNIT.name))
    name, _, fault = folder.finished(UNIT)
    assert name is None
    assert folder.sums_path(UNIT.name) in str(fault)


def test_a_folder_of_other_settings_is_refused_with_what_differs(folder: ScanFolder) -> None:
    changed = replace(SETTINGS, model_digest="a1" * 32, max_tokens=64)
    with pytest.raises(UsageError) as refused:
        open_folder(folder.path, changed)
    assert refused.value.exit_code == EXIT_USAGE
    assert refused.value.message == (
        f"{folder.path} was made with other settings: model_digest was 5e5e5e5e5e5e and is a1a1a1a1a1a1, "
        "max_tokens was null and is 64"
    )


def test_the_same_settings_open_the_folder_again_wherever_the_model_lies(folder: ScanFolder) -> None:
    assert open_folder(folder.path, replace(SETTINGS, model="elsewhere")).settings[0].digest == SETTINGS.digest


def test_another_device_is_refused_unless_devices_are_mixed(folder: ScanFolder) -> None:
    other = replace(SETTINGS, device="cuda H100")
    with pytest.raises(UsageError, match="device was cpu AVX2 and is cuda H100"):
        open_folder(folder.path, other)
    with pytest.raises(UsageError):
        open_folder(folder.path, replace(other, threads=2), mixed=True)
    folder.write(UNIT, files_of(UNIT))
    mixed = open_folder(folder.path, other, mixed=True)
    assert {settings.device for settings in mixed.settings} == {"cpu AVX2", "cuda H100"}
    of_other = next(units(UNIT.documents, other.digest))
    assert mixed.finished(of_other).name == UNIT.name
    assert mixed.finished(UNIT)[0] == open_folder(folder.path, SETTINGS).finished(UNIT)[0] == UNIT.name


def test_the_reducer_follows_the_device_but_does_not_change_alone(folder: ScanFolder) -> None:
    with pytest.raises(UsageError, match="reducer was torch and is triton"):
        open_folder(folder.path, replace(SETTINGS, reducer="triton"), mixed=True)
    other = replace(SETTINGS, device="cuda H100", reducer="triton")
    with pytest.raises(UsageError, match="device was cpu AVX2") as refused:
        open_folder(folder.path, other)
    assert "--mixed" in str(refused.value.hint)
    assert len(open_folder(folder.path, other, mixed=True).settings) == 2
    for device in (SETTINGS.device, other.device):  # whichever setting the manifest names first
        changed = replace(SETTINGS, device=device, reducer="torch" if device == other.device else "triton")
        with pytest.raises(UsageError, match="reducer was"):
            open_folder(folder.path, changed, mixed=True)


def test_the_build_of_torch_follows_the_device_but_its_version_does_not(folder: ScanFolder) -> None:
    other = replace(SETTINGS, device="cuda H100", torch=f"{SETTINGS.torch.partition('+')[0]}+cu130")
    with pytest.raises(UsageError, match="device was cpu AVX2"):
        open_folder(folder.path, other)
    with pytest.raises(UsageError, match="torch was"):
        open_folder(folder.path, replace(other, torch="9.9.9+cu130"), mixed=True)
    with pytest.raises(UsageError, match="torch was"):
        open_folder(folder.path, replace(other, device=SETTINGS.device), mixed=True)
    assert len(open_folder(folder.path, other, mixed=True).settings) == 2


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match="holds other files, and no scan"):
        open_folder(str(tmp_path), SETTINGS)


def test_a_folder_that_cannot_be_made_is_a_clean_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MhaError, match="cannot be written"):
        open_folder(str(tmp_path / "file" / "out"), SETTINGS)


@pytest.mark.parametrize("content", [b'{"schema": ', b"\xff", b"[]", b'{"schema": "mha.scan/1", "settings": [{}]}'])
def test_a_damaged_manifest_is_named_with_what_to_do(folder: ScanFolder, content: bytes) -> None:
    manifest = Path(folder.path, "manifest.json")
    manifest.write_bytes(content)
    with pytest.raises(MhaError, match=r"manifest\.json") as refused:
        open_folder(folder.path, SETTINGS)
    assert refused.value.hint == "--out another folder starts anew"
    assert refused.value.code == "bad-file"


def test_a_first_write_that_was_killed_does_not_stand_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".manifest.json.7.0aff.tmp").write_bytes(b"{")
    assert open_folder(str(tmp_path / "out"), SETTINGS).settings == (SETTINGS,)


def test_what_a_killed_process_has_left_goes_at_the_end_unless_it_may_be_in_use(folder: ScanFolder) -> None:
    places = [Path(folder.path, room, f".x.7.0aff{number}.tmp") for room in (".", "rows", "units") for number in (0, 1)]
    for place in places:
        place.write_bytes(b"half")
    for place in places[::2]:
        os.utime(place, (0, 0))
    folder.finish(b"summary", {})
    assert [place.exists() for place in places] == [False, True] * 3
