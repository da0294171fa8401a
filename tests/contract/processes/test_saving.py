"""A save leaves the old file or the new one whole, whatever fails or ends it, and keeps links,
modes and nodes.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.mha import (
    NO_TORCH,
    PATIENCE_S,
    PLAIN_SHELL,
    WITHOUT_ROOT_RIGHTS,
    Ended,
    fingerprint,
    run,
)

READ_ONLY = WITHOUT_ROOT_RIGHTS if os.geteuid() == 0 else PLAIN_SHELL
Mha = Callable[..., Ended]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two records of different sizes, `old` and `new`."""
    place = tmp_path_factory.mktemp("records")
    run(place, "run", "the cat sat on the mat", "--repeat", "1", "--save", "old")
    run(place, "run", "a dog ran", "--heads", "2", "--repeat", "1", "--save", "new")
    return place


@pytest.fixture
def folder(tmp_path: Path, records: Path) -> Path:
    for name in ("old", "new"):
        (tmp_path / name).write_bytes((records / name).read_bytes())
    return tmp_path


def printed_by(folder: Path, program: str) -> dict[str, Any]:
    """The JSON that a program of `cases/saving` prints, which saves records with `Record.save`."""
    path = Path(__file__).parent / "cases" / "saving" / f"{program}.py"
    done = subprocess.run(
        [sys.executable, "-B", path],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


# ------------------------------------------------------------------------------- saves that are cut


def test_whichever_call_of_a_save_fails_the_old_or_the_new_file_is_whole(folder: Path) -> None:
    counts = printed_by(folder, "failing")
    assert counts.keys() >= {"fsync"}
    assert counts.keys() & {"link", "rename", "replace"}


@pytest.mark.real
def test_wherever_a_save_is_killed_the_old_or_the_new_file_is_whole(folder: Path) -> None:
    counts = printed_by(folder, "killed")
    assert counts.keys() >= {"fsync"}
    assert counts.keys() & {"link", "rename", "replace"}


def test_a_save_over_the_size_limit_leaves_the_old_file(folder: Path) -> None:
    assert printed_by(folder, "limited") == {"limit": 6}


@pytest.mark.real
def test_writers_on_one_path_leave_one_whole_file_and_without_force_one_succeeds(
    folder: Path,
) -> None:
    assert printed_by(folder, "writers") | {"first": None} == {"forced": [0] * 5, "first": None}
    (folder / "place" / "file").unlink()
    (folder / "place").rmdir()
    assert sorted(printed_by(folder, "writers")["first"]) == [0, 1, 1, 1, 1]


# A template: the call that fails differs from case to case.
FAILING_CALL = """
import os

def fail(*_, **__):
    raise OSError(5, "injected")

os.{call} = fail
"""


@pytest.mark.parametrize("target", ["kept", pytest.param("fresh", marks=pytest.mark.real)])
@pytest.mark.parametrize(
    "call", ["replace", *(pytest.param(n, marks=pytest.mark.real) for n in ("write", "fsync"))]
)
def test_a_command_whose_save_fails_ends_with_1_and_names_file_and_reason(
    tmp_path: Path, call: str, target: str
) -> None:
    (tmp_path / "kept").write_text("kept")
    failing = FAILING_CALL.format(call=call)
    words = ("vocab", "a b", "--save", target, "--force", "--json")
    before = set(os.listdir(tmp_path))
    done = run(tmp_path, *words, code=1, modules={**NO_TORCH, "sitecustomize": failing})
    assert done.missing(target, "injected") == []
    assert (tmp_path / "kept").read_text() == "kept"
    assert set(os.listdir(tmp_path)) - {"modules"} == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small disk")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_save_on_a_full_disk_leaves_the_old_file(mha: Mha, small_disk: Path) -> None:
    (small_disk / "kept").write_text("kept")
    text = " ".join(f"w{i}" for i in range(3000))
    for target in ("kept", "fresh"):
        done = mha("vocab", "-", "--save", f"disk/{target}", "--force", code=1, stdin=text)
        assert done.missing(f"disk/{target}", "No space left") == []
    assert [(path.name, path.read_text()) for path in small_disk.iterdir()] == [("kept", "kept")]


# ------------------------------------------------------------------------------------------ targets


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_save_keeps_link_and_mode_of_its_target_and_leaves_a_hard_link_alone(
    mha: Mha, tmp_path: Path, mode: int
) -> None:
    target, twin, link = tmp_path / "target", tmp_path / "twin", tmp_path / "link"
    target.write_text("old")
    target.chmod(mode)
    twin.hardlink_to(target)
    link.symlink_to("target")
    before = os.umask(0o077)
    try:
        mha("vocab", "b a", "--save", "link", "--force", writes=["target"])
    finally:
        os.umask(before)
    assert [entry["token"] for entry in json.loads(target.read_text())["tokens"]] == ["a", "b"]
    assert stat.S_IMODE(target.stat().st_mode) == mode
    assert twin.read_text() == "old"


def test_a_save_through_a_link_to_nothing_makes_its_target(mha: Mha, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/target")
    mha("vocab", "b a", "--save", "link", writes=["there/target"])
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "there" / "target").read_text())["tokens"]


def test_new_files_obey_the_umask(mha: Mha, tmp_path: Path) -> None:
    names = ("r", "w", "v", "p.html", "p.svg")
    before = os.umask(0o027)
    try:
        mha("run", "a", "--save", "r", "--save-weights", "w", "--html", "p.html", "--svg", "p.svg")
        mha("vocab", "a", "--save", "v")
    finally:
        os.umask(before)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in names} == {0o640}


SAVERS = pytest.mark.parametrize(
    "words",
    [
        ("vocab", "a", "--save"),
        ("run", "a", "--json", "--save"),
        ("trace", "a", "--save-weights"),
        ("show", "r", "--html"),
    ],
    ids=["vocab", "run", "weights", "html"],
)


@SAVERS
@pytest.mark.parametrize(
    ("target", "words_of_reason"),
    [
        ("fifo", "pipe"),
        ("folder", "directory"),
        ("folder/", "directory"),
        ("to-fifo", "pipe"),
        ("loop", "loop"),
        ("missing/new", "missing"),
        ("file/new", "folder"),
        ("file", "--force"),
        ("n" * 300, "long"),
    ],
)
def test_a_target_that_cannot_be_a_file_is_refused_before_any_work(
    mha: Mha,
    tmp_path: Path,
    records: Path,
    words: tuple[str, ...],
    target: str,
    words_of_reason: str,
) -> None:
    (tmp_path / "r").write_bytes((records / "new").read_bytes())
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("old")
    (tmp_path / "to-fifo").symlink_to("fifo")
    (tmp_path / "loop").symlink_to("loop")
    before = {path.name: fingerprint(path) for path in tmp_path.iterdir()}
    done = mha(*words, target, *(() if target == "file" else ("--force",)), code=1)
    assert done.missing(target.rstrip("/"), words_of_reason) == []
    assert {path.name: fingerprint(path) for path in tmp_path.iterdir()} == before


def test_a_device_is_refused_and_stays_what_it_was(mha: Mha, tmp_path: Path) -> None:
    node = tmp_path / "node"
    try:
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("needs the right to make a device node")
    before = fingerprint(node)
    for words in (("vocab", "a", "--save"), ("run", "a", "--save"), ("run", "a", "--html")):
        assert "device" in mha(*words, "node", "--force", code=1).said
    assert fingerprint(node) == before


@pytest.mark.parametrize("target", ["old", pytest.param("fresh", marks=pytest.mark.real)])
def test_a_folder_that_cannot_be_written_is_refused_without_torch(
    tmp_path: Path, target: str
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    (locked / "old").write_text("old")
    locked.chmod(0o555)
    words = ("run", "a", "--save", f"locked/{target}", "--force")
    assert (
        f"locked/{target}" in run(tmp_path, *words, code=1, modules=NO_TORCH, shell=READ_ONLY).said
    )
    assert (locked / "old").read_text() == "old"


def test_a_save_over_the_file_that_was_read_gives_the_new_file_whole(
    mha: Mha, tmp_path: Path
) -> None:
    words = ("run", "a b", "--save-weights", "w")
    mha(*words)
    before = (tmp_path / "w").read_bytes()
    mha(*words, "--weights", "w", "--force")
    assert (tmp_path / "w").read_bytes() == before
    (tmp_path / "t").write_text("b a")
    done = mha("vocab", "--file", "t", "--save", "t", "--force", "--json")
    assert (tmp_path / "t").read_text() == done.stdout
