"""SIGINT and SIGTERM end `mha` with 130 and 143, without a word and without a changed file,
wherever they arrive; only long work is answered by a line.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pyte
import pytest
from support import checkpoints
from support.mha import (
    BELONGS_TO_TEST,
    NO_TORCH,
    PATIENCE_S,
    Ended,
    environment,
    fingerprint,
    start,
)

SIGNALS = pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)

NOTHING: Mapping[str, str] = {}


def program(name: str) -> str:
    """The text of a program of `cases`."""
    return (Path(__file__).parent / "cases" / f"{name}.py").read_text()


PAUSE = program("pause")
"""It says through a FIFO that it has come to this place, and stays there."""


@pytest.fixture
def reached(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Waits until the program has come to its pause."""
    (tmp_path / BELONGS_TO_TEST).mkdir()
    os.mkfifo(tmp_path / BELONGS_TO_TEST / "reached")
    fifo = os.open(tmp_path / BELONGS_TO_TEST / "reached", os.O_RDONLY | os.O_NONBLOCK)

    def wait() -> None:
        assert select.select([fifo], [], [], PATIENCE_S)[0]

    yield wait
    os.close(fifo)


@contextlib.contextmanager
def started(
    folder: Path,
    *words: str,
    modules: Mapping[str, str],
    env: Mapping[str, str] = NOTHING,
    **streams: int,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of `mha` that finds these modules before others, and is killed at the end if it
    still runs.
    """
    (folder / BELONGS_TO_TEST).mkdir(exist_ok=True)
    for name, code in modules.items():
        (folder / BELONGS_TO_TEST / f"{name}.py").write_text(code)
    place = str(folder / BELONGS_TO_TEST)
    variables = environment(folder, PYTHONPATH=place, PYTHONDONTWRITEBYTECODE="1", **env)
    streams = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        **streams,
    }
    process = start(folder, *words, env=variables, **streams)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def end_of(process: subprocess.Popen[bytes], number: int) -> tuple[int, bytes, bytes]:
    """Exit code as a shell gives it, stdout and stderr after a signal."""
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    return (
        process.returncode if process.returncode >= 0 else 128 - process.returncode,
        stdout,
        stderr,
    )


def files(folder: Path) -> dict[str, object]:
    return {
        path.name: fingerprint(path) for path in folder.iterdir() if path.name != BELONGS_TO_TEST
    }


@SIGNALS
@pytest.mark.parametrize(
    "modules",
    [
        pytest.param({"typer": PAUSE}, id="typer"),
        pytest.param(
            {"sitecustomize": program("pause_in_import"), "pause": PAUSE},
            id="torch",
            marks=pytest.mark.real,
        ),
    ],
)
def test_a_signal_during_an_import_ends_the_process(
    tmp_path: Path, reached: Callable[[], None], modules: Mapping[str, str], number: int, code: int
) -> None:
    with started(tmp_path, "run", "a", "--save", "r", modules=modules) as process:
        reached()
        assert end_of(process, number) == (code, b"", b"")
    assert files(tmp_path) == {}


@SIGNALS
@pytest.mark.parametrize("target", ["old", pytest.param("new", marks=pytest.mark.real)])
def test_a_signal_during_a_save_leaves_the_files_as_they_were(
    tmp_path: Path, reached: Callable[[], None], target: str, number: int, code: int
) -> None:
    (tmp_path / "old").write_text("old")
    before = files(tmp_path)
    words = ("vocab", "a b", "--save", target, "--force", "--json")
    modules = {**NO_TORCH, "sitecustomize": program("pause_in_save"), "pause": PAUSE}
    with started(tmp_path, *words, modules=modules) as process:
        reached()
        assert end_of(process, number) == (code, b"", b"")
    assert files(tmp_path) == before


@SIGNALS
def test_a_signal_while_stdin_is_read_ends_the_process(
    tmp_path: Path, number: int, code: int
) -> None:
    """The writer gets no more into the pipe than it holds: the process has begun to read once more
    goes in.
    """
    reading, writing = os.pipe()
    with started(tmp_path, "vocab", "-", modules=NO_TORCH, stdin=reading) as process:
        os.close(reading)
        for _ in range(4):
            os.write(writing, b"words " * 20_000)
        assert end_of(process, number) == (code, b"", b"")
    os.close(writing)


LONG = "heads --file long.txt --max-tokens 100000 --heads 32 --device cpu --save new".split()
BENCH = "bench --device cpu --lengths 16 --backends sdpa --budget 600 --html new".split()
PROGRESS = re.compile(rb"(query|tokens, size) \d+ of ")
"""What the line of progress says of the computation."""


@pytest.mark.real
@pytest.mark.parametrize(
    ("words", "number", "code"),
    [(LONG, signal.SIGINT, 130), (BENCH, signal.SIGTERM, 143), (BENCH, signal.SIGINT, 130)],
    ids=["heads", "bench", "bench-SIGINT"],
)
def test_a_signal_during_a_computation_ends_it_with_all_its_processes_and_clears_the_terminal(
    tmp_path: Path, words: list[str], number: int, code: int
) -> None:
    """The computation would take minutes."""
    (tmp_path / "long.txt").write_text(" ".join(f"w{i % 977}" for i in range(60_000)))
    before = files(tmp_path)
    screen = pyte.Screen(80, 24)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    at_once = {"MHA_PROGRESS_AFTER": "0"}
    with started(tmp_path, *words, modules={}, env=at_once, stderr=theirs) as process:
        shown = b""
        while not PROGRESS.search(shown):
            shown += os.read(ours, 65536)
        ended, stdout, _ = end_of(process, number)
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    os.close(theirs)
    with contextlib.suppress(OSError):  # nobody is left at the other end
        while piece := os.read(ours, 65536):
            shown += piece
    os.close(ours)
    stream.feed(shown)
    assert (ended, stdout) == (code, b"")
    assert files(tmp_path) == before
    assert not screen.cursor.hidden
    lines = [line.rstrip() for line in screen.display if line.strip()]
    assert lines == ["mha: interrupted: nothing is kept"]


def test_a_signal_after_the_start_of_a_cluster_ends_the_scan(
    mha: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nodes() -> list[object]:
        """What Ray is asked first once it runs."""
        signal.raise_signal(signal.SIGTERM)
        return []

    cluster = SimpleNamespace(init=lambda *_, **__: None, nodes=nodes, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", cluster)
    (tmp_path / "corpus.txt").write_text("the cat sat")
    words = (
        "scan",
        "corpus.txt",
        "--model",
        checkpoints.folder("gpt2"),
        "--out",
        "out",
        "--ray",
        "local",
    )
    mha(*words, code=143, colour=True)  # in a process of its own


def test_an_interrupt_that_a_library_takes_for_a_failure_of_its_import_is_one(
    tmp_path: Path,
) -> None:
    torch = program("interrupted_import")
    with started(tmp_path, "run", "a", modules={"torch": torch}) as process:
        assert process.communicate(timeout=PATIENCE_S) == (b"", b"")
        assert process.returncode == 130
