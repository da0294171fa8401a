"""What `mha` does when stdout, stderr or stdin are closed, full, broken or endless."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.mha import NO_TORCH, PATIENCE_S, PLAIN_SHELL, environment, run, start

UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
SHORT = [
    ["vocab", "a b"],
    ["vocab", "a b", "--json"],
    ["show", "r", "--view", "none"],
    ["run", "--help"],
    ["--version"],
]
LONG = [["vocab", "--file", "many.txt", "--all"], ["show", "r", "--all", "--precision", "9"]]
MIB = 1 << 20
N_WORDS = 4000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a record, and a text of many words whose table is longer than a pipe holds."""
    place = tmp_path_factory.mktemp("streams")
    run(place, "run", " ".join(f"w{i}" for i in range(97)), "--repeat", "1", "--save", "r")
    (place / "many.txt").write_text(" ".join(f"word{i}" for i in range(N_WORDS)))
    return place


@pytest.fixture
def without_reader() -> Iterator[int]:
    """A pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


# ------------------------------------------------------------------------------- readers that leave


@pytest.mark.parametrize(
    "words", [LONG[0], pytest.param(LONG[1], marks=pytest.mark.real)], ids=["vocab", "show"]
)
def test_a_reader_that_leaves_after_one_line_of_a_long_output_causes_no_error(
    folder: Path, words: list[str]
) -> None:
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = start(folder, *words, env=environment(folder), **streams)
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline()
    process.stdout = None
    stderr = process.communicate(timeout=PATIENCE_S)[1]
    assert (process.returncode in (0, -13, 141), stderr) == (True, b"")


@pytest.mark.parametrize(
    ("words", "env"), [*((words, {}) for words in SHORT), (SHORT[1], UNBUFFERED)], ids=str
)
def test_a_reader_that_left_before_a_short_output_causes_no_error(
    folder: Path, words: list[str], env: dict[str, str], without_reader: int
) -> None:
    """The text fits the buffer, so that the pipe is broken only at the end, where Python itself
    would exit with 120.
    """
    done = run(folder, *words, code=(0, 141), stdout=without_reader, env=env, cold=bool(env))
    assert done.stderr == ""


def test_a_reader_that_left_before_the_end_of_a_computation_causes_no_error(
    folder: Path, without_reader: int
) -> None:
    for words in (["run", "a b", "--json"], ["trace", "a b"], ["heads", "a b"]):
        assert run(folder, *words, code=(0, 141), stdout=without_reader).stderr == ""


# ------------------------------------------------------------------------------ stdout that refuses


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (SHORT[0], {}),
        (SHORT[2], {}),
        (LONG[0], {}),
        *(pytest.param(words, {}, marks=pytest.mark.real) for words in (SHORT[1], *SHORT[3:])),
        pytest.param(SHORT[1], UNBUFFERED, marks=pytest.mark.real),
    ],
    ids=str,
)
def test_a_stdout_that_is_full_is_an_error(
    folder: Path, words: list[str], env: dict[str, str]
) -> None:
    """The output goes to the end of a file that has reached the size limit of the process."""
    full = os.open(folder, os.O_TMPFILE | os.O_RDWR)
    os.write(full, bytes(MIB))
    done = run(
        folder,
        *words,
        code=1,
        stdout=full,
        env=env,
        modules=NO_TORCH,
        shell=f"ulimit -f {MIB // 512}; {PLAIN_SHELL}",
    )
    assert os.fstat(full).st_size == MIB
    os.close(full)
    assert done.missing("stdout", "too large") == []


def test_a_result_that_cannot_be_printed_after_the_computation_is_an_error(folder: Path) -> None:
    """The descriptor is open for reading alone, so that every write to it fails."""
    for words in (["run", "a b"], ["trace", "a b", "--json"], ["decode", "a b"]):
        unwritable = os.open(folder / "r", os.O_RDONLY)
        assert "stdout" in run(folder, *words, code=1, stdout=unwritable).said
        os.close(unwritable)


@pytest.mark.parametrize(
    "words",
    [
        ["vocab", "a b"],
        pytest.param(["vocab", "a b", "--json"], marks=pytest.mark.real),
        pytest.param(["run", "--help"], marks=pytest.mark.real),
    ],
    ids=" ".join,
)
def test_a_closed_stdout_is_an_error_before_any_work(folder: Path, words: list[str]) -> None:
    done = run(folder, *words, code=1, modules=NO_TORCH, shell=f"{PLAIN_SHELL} >&-")
    assert done.missing("stdout", "closed") == []


def test_an_error_that_cannot_be_printed_keeps_its_exit_code(folder: Path) -> None:
    for words in (["run", "a", "--heads", "0"], ["run", "--json", "a", "--heads", "0"]):
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        process = start(
            folder, *words, env=environment(folder), shell=f"{PLAIN_SHELL} 2>&-", **streams
        )
        assert process.communicate(timeout=PATIENCE_S)[0] == b""
        assert process.returncode == 2


# -------------------------------------------------------------------------------------------- stdin


@pytest.mark.parametrize(
    "words",
    [
        ["run", "-"],
        pytest.param(["vocab", "-", "--json"], marks=pytest.mark.real),
        pytest.param(["run", "--file", "-"], marks=pytest.mark.real),
    ],
    ids=" ".join,
)
def test_a_closed_stdin_is_an_error(folder: Path, words: list[str]) -> None:
    done = run(folder, *words, code=1, modules=NO_TORCH, shell=f"{PLAIN_SHELL} <&-")
    assert done.missing("stdin", "closed") == []


def test_no_text_on_a_terminal_is_a_usage_error_and_does_not_wait(folder: Path) -> None:
    ours, theirs = pty.openpty()
    for command in ("run", "trace", "vocab", "heads", "decode"):
        assert "--file" in run(folder, command, code=2, stdin=theirs).said
    os.close(ours)
    os.close(theirs)


def test_an_error_for_programs_stays_in_one_line_on_a_terminal(folder: Path) -> None:
    ours, theirs = pty.openpty()
    words = ("run", "x", "--json", "--no-such-option-of-any-command", "--head-count", "3")
    process = start(folder, *words, env=environment(folder), stderr=theirs)
    assert process.wait(PATIENCE_S) == 2
    lines = os.read(ours, 1 << 16).decode().splitlines()
    os.close(ours)
    os.close(theirs)
    assert [json.loads(line)["error"]["exit"] for line in lines] == [2]
    assert len(lines[0]) > 80


def test_a_text_from_a_pipe_is_read_to_its_end(folder: Path) -> None:
    with subprocess.Popen(["cat", "many.txt"], cwd=folder, stdout=subprocess.PIPE) as source:
        assert source.stdout is not None
        ended = run(folder, "vocab", "-", "--json", stdin=source.stdout.fileno())
    assert len(ended.json["tokens"]) == N_WORDS
