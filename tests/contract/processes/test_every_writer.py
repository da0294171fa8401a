"""Every command that writes a file, with each of its options that names one: whatever fails or ends
it, the old file or the new one is whole, nothing else is left, and stdout of a failure is empty.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import checkpoints, some
from support.mha import PLAIN_SHELL, WITHOUT_ROOT_RIGHTS, Ended, fingerprint, run
from support.scans import corpus_file, digests, sentences
from support.terminal import viewing
from support.user_code import text_of

Mha = Callable[..., Ended]
Fault = Callable[[Path, pytest.MonkeyPatch], contextlib.AbstractContextManager[str]]
LAYER = "--heads 2 --d-model 8 --repeat 1"
COMMANDS = {
    "run": (f"'a b' {LAYER}", "save save-weights html svg png"),
    "heads": (f"'a b' {LAYER}", "save html svg png"),
    "effect": (f"'a b' {LAYER}", "save html svg png"),
    "trace": (f"'a b' {LAYER}", "save save-weights html svg png"),
    "decode": (f"'a b' {LAYER}", "save save-weights"),
    "vocab": ("'a b c d'", "save"),
    "show": ("r", "html svg png"),
    "diff": ("r r", "html"),
    "check": ("right.py:Einsum --length 8", "html"),
    "doctor": ("--model m", "html"),
    "bench": ("--backends sdpa --lengths 8 --repeat 1 --budget 0.01", "html svg"),
}
"""What stands behind a command, and its options that write a file."""
OTHERS = {"scan": "out", "view": "save save-weights", "diff": "save"}
"""Options of this kind that have tests of their own."""
WRITERS = {
    f"{name} --{option}": f"{name} {words} --{option}"
    for name, (words, options) in COMMANDS.items()
    for option in options.split()
} | {
    "diff --save": "diff m 'a b' --save",
    "diff --save of code": "diff models.py:GPT --ids 1,2 --save",
    "run --save of a model": "run 'a b' --model m --save",
}
SLOW = ("check", "doctor", "bench", "effect", "diff --save", "run --save of")
QUICK = [name for name in WRITERS if not name.startswith(SLOW) and not name.endswith("png")]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("record")
    run(folder, "run", "a b c", *LAYER.split(), "--save", "r")
    return folder / "r"


@pytest.fixture
def place(tmp_path: Path, record: Path) -> Path:
    """A folder with what the commands read, and the folder `out` with a file of another mode."""
    (tmp_path / "m").symlink_to(checkpoints.folder("gpt2"))
    for name in ("right", "models"):
        (tmp_path / f"{name}.py").write_text(text_of(f"{name}:"))
    corpus_file(tmp_path / "c.jsonl", sentences(3))
    shutil.copy(record, tmp_path / "r")
    (tmp_path / "out").mkdir()
    return tmp_path


def keep(place: Path) -> None:
    """Puts the file there that a command is to replace."""
    (place / "out" / "file").write_text("kept")
    (place / "out" / "file").chmod(0o640)


def kill(fd: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def content(folder: Path) -> dict[str, object]:
    return {path.name: fingerprint(path) for path in folder.iterdir()}


def test_every_option_that_writes_a_file_is_tested(tmp_path: Path) -> None:
    listed = run(tmp_path, "--help").stdout
    for name in re.findall(r"^  (\w+)  ", listed, re.MULTILINE):
        text = run(tmp_path, name, "--help-all").stdout
        options = re.findall(
            r"^ +--([a-z-]+) (?:FILE|DIR) +(?:Save|Write|Folder of)", text, re.MULTILINE
        )
        tested = COMMANDS.get(name, ("", ""))[1].split() + OTHERS.get(name, "").split()
        assert sorted(options) == sorted(tested), name


# ----------------------------------------------------------------------------------- what may fail


@contextlib.contextmanager
def size_limit(out: Path, patch: pytest.MonkeyPatch) -> Iterator[str]:
    """No file may have more than 256 bytes, which a message on stderr has not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard))
    try:
        yield "too large"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def full_disk(out: Path, patch: pytest.MonkeyPatch) -> Iterator[str]:
    """The disk of the folder is full."""
    words = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(out)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        keep(out.parent)
        with contextlib.suppress(OSError), open(out / "filler", "wb", 0) as filler:
            while filler.write(bytes(1024)):
                pass
        yield "No space left"
    finally:
        subprocess.run(["umount", out], check=True)


@contextlib.contextmanager
def lost_folder(out: Path, patch: pytest.MonkeyPatch) -> Iterator[str]:
    """The folder is removed while a file is written."""
    sync = os.fsync

    def remove(fd: int) -> None:
        sync(fd)
        shutil.rmtree(out, ignore_errors=True)

    patch.setattr(os, "fsync", remove)
    yield "No such file"


@contextlib.contextmanager
def failing_rename(out: Path, patch: pytest.MonkeyPatch) -> Iterator[str]:
    """The last step fails."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "injected")

    for name in ("replace", "link"):
        patch.setattr(os, name, fail)
    yield "injected"


FAULTS: dict[str, Fault] = {
    "limit": size_limit,
    "disk": full_disk,
    "folder": lost_folder,
    "rename": failing_rename,
}


@pytest.mark.parametrize("writer", some(WRITERS, default=QUICK))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_write_that_fails_is_named_and_leaves_what_was_there(
    place: Path, writer: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = place / "out"
    keep(place)
    for target in ("fresh", "file"):
        with monkeypatch.context() as patch, FAULTS[fault](out, patch) as reason:
            before = content(out)
            words = (*shlex.split(WRITERS[writer]), f"out/{target}", "--force")
            ended = run(place, *words, code=1)
            stores = fault == "limit" and writer.startswith("diff --save")  # what a model computes
            name = str(place) if stores else f"out/{target}"
            assert ended.missing(name, reason) == []
            assert not ended.stdout
            if fault == "folder":
                assert not out.exists()
                out.mkdir()
                keep(place)
            else:
                assert content(out) == before


@pytest.mark.parametrize("writer", some(WRITERS, default=QUICK))
def test_a_name_of_a_folder_is_refused(place: Path, writer: str) -> None:
    ended = run(place, *shlex.split(WRITERS[writer]), "out", "--force", "--json", code=1)
    assert ended.error["code"] == "unwritable"
    assert ended.missing("out", "directory") == []
    assert [*(place / "out").iterdir()] == []


@pytest.mark.real
@pytest.mark.parametrize("writer", WRITERS)
def test_a_read_only_folder_is_refused(place: Path, writer: str) -> None:
    keep(place)
    (place / "out").chmod(0o555)
    before = content(place / "out")
    shell = WITHOUT_ROOT_RIGHTS if os.geteuid() == 0 else PLAIN_SHELL
    words = (*shlex.split(WRITERS[writer]), "out/fresh")
    assert run(place, *words, code=1, shell=shell).missing("out/fresh", "read-only") == []
    assert content(place / "out") == before


@pytest.mark.parametrize("writer", some(WRITERS, default=QUICK))
def test_a_command_that_is_killed_leaves_the_old_file_and_a_temporary_one(
    place: Path, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(place)
    before = content(place / "out")
    monkeypatch.setattr(os, "fsync", kill)
    words = (*shlex.split(WRITERS[writer]), "out/file", "--force")
    in_child = writer == "diff --save of code"  # whose end mha names
    run(place, *words, code=1 if in_child else 128 + signal.SIGKILL, colour=True)
    left = content(place / "out")
    (temporary,) = left.keys() - before.keys()
    assert re.fullmatch(r"\.file\..*\.tmp", temporary)
    assert {name: left[name] for name in before} == before
    monkeypatch.undo()
    run(place, *words)  # the temporary file is in no one's way
    assert (place / "out" / "file").stat().st_mode & 0o777 == 0o640
    assert (place / "out" / "file").stat().st_size > len("kept")


@pytest.mark.real
@pytest.mark.parametrize("option", OTHERS["view"].split())
def test_the_viewer_does_not_open_where_a_file_cannot_be_written(
    place: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(place)
    before = content(place / "out")
    words = ("a b", *LAYER.split(), f"--{option}", "out/file", "--force")
    with (
        monkeypatch.context() as patch,
        failing_rename(place / "out", patch),
        viewing(place, *words) as screen,
    ):
        ended = screen.end()
    assert ended.code == 1
    assert b"mha: error: out/file cannot be written: injected" in ended.written
    assert content(place / "out") == before
    monkeypatch.setattr(os, "fsync", kill)
    with viewing(place, *words) as screen:
        assert screen.end().code == 128 + signal.SIGKILL
    left = content(place / "out")
    assert {name: left[name] for name in before} == before


# --------------------------------------------------------------------------------- folders of scans

SCAN = ("scan", "c.jsonl", "--model", "m", "--out", "out/scan")


@pytest.fixture
def scan(place: Path) -> dict[str, str]:
    """What each file of the folder of a scan holds that nothing interrupts."""
    run(place, *SCAN)
    whole = digests(place / "out" / "scan")
    shutil.rmtree(place / "out" / "scan")
    return whole


@pytest.mark.real
@pytest.mark.parametrize("fault", ["limit", "disk", "rename"])
def test_a_scan_that_cannot_be_written_says_so_and_goes_on_later(
    place: Path, scan: dict[str, str], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = place / "out"
    with monkeypatch.context() as patch, FAULTS[fault](out, patch) as reason:
        ended = run(place, *SCAN, code=1)
        assert ended.missing("out/scan", reason) == []
        assert not ended.stdout
    run(place, *SCAN)
    assert digests(out / "scan") == scan


@pytest.mark.real
def test_a_scan_in_a_folder_that_is_lost_or_a_file_says_so(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, lost_folder(place / "out", patch) as reason:
        assert run(place, *SCAN, code=1).missing("out/scan", reason) == []
    (place / "out").mkdir()
    (place / "out" / "scan").write_text("kept")
    assert run(place, *SCAN, code=1).missing("out/scan") == []
    assert (place / "out" / "scan").read_text() == "kept"


@pytest.mark.real
def test_a_scan_that_is_killed_at_any_of_its_writes_goes_on(
    place: Path, scan: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = place / "out" / "scan"
    for n in range(99):
        shutil.rmtree(out, ignore_errors=True)
        calls = iter([os.fsync] * n + [kill])
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda fd, calls=calls: next(calls)(fd))
            ended = run(place, *SCAN, colour=True, code=(0, 128 + signal.SIGKILL))
        if ended.code == 0:
            break
        run(place, *SCAN)
        files = digests(out)
        assert {name: files.pop(name) for name in scan} == scan
        assert all(re.search(r"(^|/)\.[^/]*\.tmp$", name) for name in files)
    assert n > 4


# ------------------------------------------------------------------------------------------- stdout

PRINTERS = {
    f"{name} {form}": f"{name} {words} {form}"
    for name, (words, _) in COMMANDS.items()
    for form in ("", "--json")
} | {
    "weights": "weights m --json",
    "explain": "explain entropy",
    "help": "run --help",
    "show --csv": "show r --csv",
}


@pytest.mark.parametrize(
    "printer", some(PRINTERS, default=[name for name in PRINTERS if not name.startswith(SLOW)])
)
def test_a_stdout_that_takes_no_more_is_an_error(
    place: Path, printer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with size_limit(place, monkeypatch), open(place / "printed", "wb") as printed:
        printed.write(bytes(250))  # So even the shortest output is too long.
        printed.flush()
        ended = run(
            place,
            *shlex.split(PRINTERS[printer]),
            code=1,
            stdout=printed.fileno(),
            writes=["printed"],
        )
    assert ended.missing("stdout", "too large") == []
