"""`mha` with another home, without one, in a folder that was deleted, and with little memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from support.mha import NO_TORCH, PLAIN_SHELL, WITHOUT_ROOT_RIGHTS, run

READ_ONLY = WITHOUT_ROOT_RIGHTS if os.geteuid() == 0 else PLAIN_SHELL
DELETED = f"mkdir gone; cd gone; rmdir ../gone; {PLAIN_SHELL}"
MIB = 1 << 20
SMALL = 256 * MIB
"""An address space that holds Python and the largest text that is read, but no text without end."""


def limited(n_bytes: int) -> str:
    """A shell script that gives the process so much address space."""
    return f"ulimit -v {n_bytes // 1024}; {PLAIN_SHELL}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a record `r`."""
    place = tmp_path_factory.mktemp("surroundings")
    run(place, "run", "the cat sat", "--repeat", "1", "--save", "r")
    return place


# ------------------------------------------------------------------------------------------ folders


@pytest.mark.parametrize("home", [None, "", "/no/such/home"], ids=str)
def test_commands_print_the_same_with_a_home_that_is_not_there(
    folder: Path, home: str | None
) -> None:
    for words in (["vocab", "a"], ["show", "r"], ["run", "a", "--repeat", "1", "--json"]):
        shown = run(folder, *words, env={"HOME": home, "USER": None})
        expected = run(folder, *words)
        if "--json" in words:
            assert shown.json["pattern"] == expected.json["pattern"]
        else:
            assert shown.stdout == expected.stdout
        assert shown.stderr == expected.stderr == ""


@pytest.mark.real
def test_commands_print_the_same_with_a_home_that_cannot_be_written(folder: Path) -> None:
    (folder / "locked").mkdir(0o555, exist_ok=True)
    env = {"HOME": "locked", "XDG_CACHE_HOME": "locked", "TMPDIR": "locked", "USER": None}
    words = ("run", "a b", "--json")
    computed = run(folder, *words, env=env, shell=READ_ONLY)
    assert computed.json["pattern"] == run(folder, *words).json["pattern"]
    shown = run(folder, "show", "r", env=env, shell=READ_ONLY, modules=NO_TORCH)
    assert shown.stdout == run(folder, "show", "r").stdout


def test_a_deleted_working_folder_does_not_matter_to_files_elsewhere(folder: Path) -> None:
    elsewhere = {"shell": DELETED, "modules": NO_TORCH}
    run(folder, "vocab", "a b", "--save", folder / "v", "--force", **elsewhere)
    assert [row["token"] for row in json.loads((folder / "v").read_text())["tokens"]] == ["a", "b"]
    shown = run(folder, "show", folder / "r", "--json", **elsewhere)
    assert shown.json["sequences"][0]["tokens"] == ["the", "cat", "sat"]
    assert "w" in run(folder, "run", "a", "--weights", "w", code=1, **elsewhere).said


@pytest.mark.real
def test_a_file_in_a_deleted_working_folder_is_refused(folder: Path) -> None:
    for words in (
        ["vocab", "a", "--save", "v"],
        ["run", "a", "--save-weights", "v"],
        ["show", folder / "r", "--html", "v"],
    ):
        assert "v" in run(folder, *words, code=1, shell=DELETED, modules=NO_TORCH).said


@pytest.mark.parametrize(
    "words",
    [
        ["run", "a"],
        pytest.param(["scan", "texts", "--model", "m", "--out", "s"], marks=pytest.mark.real),
        pytest.param(["check", "my.py:Attention"], marks=pytest.mark.real),
    ],
    ids=lambda words: words[0],
)
def test_a_computation_in_a_deleted_working_folder_says_so(folder: Path, words: list[str]) -> None:
    ended = run(folder, *words, "--json", code=1, shell=DELETED)
    assert ended.error["code"] in ("no-folder", "unreadable")


@pytest.mark.parametrize(
    "words",
    [["run", "a b"], pytest.param(["check", "my.py:Attention"], marks=pytest.mark.real)],
    ids=lambda words: words[0],
)
def test_a_variable_that_torch_refuses_is_named(folder: Path, words: list[str]) -> None:
    (folder / "my.py").write_text("def attention(q, k, v): return v")
    ended = run(folder, *words, "--json", code=1, env={"TORCH_LOGS": "nonsense"}, cold=True)
    assert ended.error["code"] == "broken-library"
    assert "nonsense" in ended.error["message"]


# ------------------------------------------------------------------------------------------- memory


VOCAB = pytest.param(["vocab", "--max-bytes", "8M", "--json"], id="vocab", marks=pytest.mark.real)


@pytest.mark.parametrize("words", [pytest.param(["run"], id="run"), VOCAB])
def test_a_file_of_100_mb_is_refused_in_little_memory(tmp_path: Path, words: list[str]) -> None:
    with (tmp_path / "text.txt").open("wb") as file:
        file.write(b"many words " * 9_600_000)
    shell = limited(SMALL)
    done = run(tmp_path, *words, "--file", "text.txt", code=1, shell=shell, modules=NO_TORCH)
    assert done.missing("text.txt", "--max-bytes") == []


@pytest.mark.parametrize("words", [pytest.param(["run"], id="run"), VOCAB])
def test_a_stdin_without_end_is_refused_in_little_memory(tmp_path: Path, words: list[str]) -> None:
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless:
        assert endless.stdout is not None
        fd = endless.stdout.fileno()
        done = run(tmp_path, *words, "-", code=1, stdin=fd, shell=limited(SMALL), modules=NO_TORCH)
        endless.kill()
    assert done.missing("stdin", "--max-bytes") == []


@pytest.mark.parametrize("words", [pytest.param(["run"], id="run"), VOCAB])
def test_a_word_of_a_million_letters_is_refused_with_its_limit(
    tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "text.txt").write_text("a " + "b" * 1_000_000)
    shell = limited(SMALL)
    done = run(tmp_path, *words, "--file", "text.txt", code=1, shell=shell, modules=NO_TORCH)
    assert done.missing("1000", "--max-token-len") == []


@pytest.mark.real
def test_a_run_that_does_not_fit_is_refused_with_what_it_takes_and_with_a_length_that_does_fit(
    tmp_path: Path,
) -> None:
    """The same run without the limit takes at least half of the predicted memory, and no more."""
    words = ("run", "-", "--device", "cpu", "--view", "none")
    done = run(tmp_path, *words, code=1, stdin="word " * 2200, shell=limited(1500 * MIB))
    needed = re.search(r"([\d.]+) MiB needed, ([\d.]+) MiB available", done.said)
    assert needed
    predicted, available = float(needed[1]) * MIB, float(needed[2]) * MIB
    assert available < 1500 * MIB
    (fits,) = re.findall(r"--max-tokens (\d+)", done.said)
    run(tmp_path, *words, stdin="word " * int(fits), shell=limited(1500 * MIB))
    peak = (Path(__file__).parent / "cases" / "peak.py").read_text()
    run(tmp_path, *words, stdin="word " * 2200, modules={"sitecustomize": peak})
    measured = int((tmp_path / "modules" / "peak").read_text()) * 1024
    assert measured <= predicted <= 2 * measured
