"""What `mha` imports: commands that compute nothing answer without torch, and errors of usage
before any library is loaded.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from support import cases, rows
from support.mha import NO_TORCH, PATIENCE_S, run

CASES = Path(__file__).parent / "cases"
NO_LIBRARIES = {
    name: NO_TORCH["torch"] for name in ("torch", "numpy", "transformers", "tokenizers", "ray")
}
"""Modules with which a process ends with 99 if it imports a large library."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with records, weights that are none, and a baseline that is none."""
    place = tmp_path_factory.mktemp("startup")
    run(place, "run", "the cat sat", "--repeat", "1", "--save", "r")
    run(place, "run", "the cat ran", "--repeat", "1", "--save", "other")
    (place / "none.safetensors").write_bytes(bytes(7))
    (place / "none.json").write_text("{}")
    return place


@pytest.fixture
def folder(tmp_path: Path, saved: Path) -> Path:
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


class Command(NamedTuple):
    """The words of a command, its exit code, and whether it is run by default: others are of the
    same kind.
    """

    words: str
    code: int | tuple[int, ...]
    common: bool = False


WITHOUT_LIBRARIES = (
    Command("--help", 0, common=True),
    Command("--version", 0),
    Command("run --help", 0),
    Command("check --help", 0),
    Command("bench --help-all", 0),
    Command("rum", 2, common=True),
    Command("explain", 0, common=True),
    Command("explain sink", 0),
    Command("vocab the cat", 0, common=True),
    Command("run", 2, common=True),
    Command("run a --heads 5", 2),
    Command("run a --view cubist", 2),
    Command("run --file missing", 1, common=True),
    Command("run a --weights none.safetensors", 1),
    Command("run a --d-head 5 --positions rope", 2),
    Command("run a --random 2,5", 2),
    Command("decode a --heads 5", 2),
    Command("view r", 1, common=True),
    Command("heads a --heads 5", 2),
    Command("heads a --query 9", 2),
    Command("check", 2, common=True),
    Command("help weights info", 0),
    Command("doctor --model ./missing", 1, common=True),
    Command("doctor --seed -1", 2),
    Command("check missing.py:X", 1, common=True),
    Command("bench --lengths few", 2),
    Command("bench --backends sdpa3", 2),
    Command("bench --heads 9 --kv-heads 2", 2),
    Command("bench --heads 2,4", 2),
    Command("bench --fail-if slower:2", 2, common=True),  # asks every command for its options
)
WITHOUT_TORCH = (
    Command("show r", 0, common=True),
    Command("diff r other", (0, 3), common=True),
    Command("show none.safetensors", 1, common=True),
    Command("show r --json", 0),
    Command("show r --html p.html --svg p.svg --png p.png --force", 0, common=True),
    Command("show r --csv", 0),
    Command("show r --view heatmap --head 1", 0),
)


@pytest.mark.parametrize("command", rows(WITHOUT_LIBRARIES, lambda command: command.words))
def test_help_and_errors_load_no_large_library(folder: Path, command: Command) -> None:
    run(folder, *command.words.split(), code=command.code, modules=NO_LIBRARIES)


@pytest.mark.parametrize("command", rows(WITHOUT_TORCH, lambda command: command.words))
def test_saved_records_are_shown_and_compared_without_torch(folder: Path, command: Command) -> None:
    run(folder, *command.words.split(), code=command.code, modules=NO_TORCH)


def test_a_run_imports_torch_so_that_the_rows_above_can_fail(folder: Path) -> None:
    run(folder, "run", "the cat", code=99, modules=NO_TORCH)


def without(*libraries: str) -> dict[str, str]:
    """Modules that hide libraries from a cold process, as if they were not installed."""
    hidden = (CASES / "hides_libraries.py").read_text()
    hidden = hidden.replace("HIDDEN = ()", f"HIDDEN = {libraries}")
    return {"sitecustomize": hidden}


@pytest.mark.parametrize("library", ["torch", "msgspec", "typer", "rich"])
def test_a_missing_library_is_named_with_the_line_that_installs_it(
    folder: Path, library: str
) -> None:
    """`pip install --no-deps mhacli`, or an installation that was interrupted."""
    ended = run(folder, "run", "the cat", code=1, modules=without(library))
    assert library in ended.error["message"]
    assert re.fullmatch(rf'pip install "{library}[<>=0-9.,]+" .*', ended.error["hint"])
    several = without(library, "torch")
    as_json = run(folder, "run", "the cat", "--json", code=1, modules=several)
    assert as_json.error["code"] == "missing-library"
    assert {*re.findall('"([a-z]+)[<>]', as_json.error["hint"])} == {library, "torch"}


def test_without_torch_what_needs_none_still_answers(folder: Path) -> None:
    for words in (["--help"], ["run", "--help-all"], ["vocab", "the cat"], ["show", "r"]):
        run(folder, *words, modules=without("torch"))


@pytest.mark.parametrize("command", ["check", "trace"])
def test_torch_is_named_where_code_of_the_user_would_run(folder: Path, command: str) -> None:
    (folder / "code.py").write_text("class Attention: ...")
    ended = run(folder, command, "code.py:Attention", "--json", code=1, modules=without("torch"))
    assert ended.error["code"] == "missing-library"


@pytest.mark.real
def test_a_library_that_an_option_needs_is_named_before_any_work(folder: Path) -> None:
    """Three modules are missing, as they are where their extras are not installed."""
    modules = without("transformers", "resvg_py", "textual")
    for words, package in (
        (["show", "r", "--png", "q.png"], "resvg"),
        (["run", "a", "--model", "org/name"], "transformers"),
        (["view", "r"], "textual"),
    ):
        ours, theirs = pty.openpty()
        screen = {"stdin": theirs, "terminal": (80, 24)} if words[0] == "view" else {}
        done = run(folder, *words, code=1, modules=modules, **screen)
        os.close(ours)
        os.close(theirs)
        assert package in done.stdout + done.stderr
        assert "pip install" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [("", 0), ("--help", 0), ("run --help-all", 0), ("run --nope", 2), ("--version", 0)],
)
def test_help_and_a_wrong_option_do_without_what_typer_imports_for_values(
    folder: Path, words: str, code: int
) -> None:
    run(folder, *words.split(), code=code, modules={"pydantic": NO_TORCH["torch"]})


def test_the_module_is_the_program(folder: Path) -> None:
    words = [sys.executable, "-m", "mhacli", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout == run(folder, "--version", cold=True).stdout


def test_importing_the_package_loads_none_of_its_libraries() -> None:
    case = cases.read(CASES / "imports_the_package.py")
    done = subprocess.run(
        [sys.executable, case.path],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout.split() == case.expect
