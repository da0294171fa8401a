"""`--max-time` ends an examination with a verdict, which is never `right` and names what was not
tried. The limits of time hold whatever the code does, and what it started ends with it.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import pytest
from support import some, user_code
from support.mha import PATIENCE_S, environment, run_together, start

import mhacli

CASES = Path(__file__).parent / "cases"
SLOW = CASES / "slow" / "attention.py"
SHORT = ("--max-time", "0.01")


@pytest.fixture(autouse=True)
def _slow(tmp_path: Path) -> None:
    shutil.copy(SLOW, tmp_path / "slow.py")


@pytest.mark.parametrize(
    ("words", "not_tried"),
    [
        (("slow.py:Slow",), "comparison with the reference"),
        (("slow.py:Unscaled",), "comparison with the reference"),
        (("slow.py:SlowModel",), "causality"),
        (("slow.py:Slow", "--against", "slow.py:Unscaled"), "comparison with slow.py:Unscaled"),
    ],
)
def test_time_that_ends_before_a_comparison_leaves_it_undecided(mha, words, not_tried) -> None:
    ended = mha("check", *words, *SHORT, "--json", code=1)
    assert ended.json["verdict"] == "unknown"
    assert "--max-time 0.01" in ended.json["reason"]
    assert not_tried in ended.json["not_examined"]


def test_the_screen_lists_what_was_not_tried(mha) -> None:
    screen = " ".join(mha("check", "slow.py:SlowModel", *SHORT, code=1).stdout.split())
    assert "not examined: comparison with the reference" in screen
    assert "? unknown" in screen


@pytest.mark.real
def test_a_mistake_that_is_shown_before_time_ends_is_wrong(mha) -> None:
    words = ("slow.py:SlowWithLargeScores", "--max-time", "40", "--time-limit", "60", "--json")
    shown = mha("check", *words, code=3)
    assert [finding["code"] for finding in shown.json["findings"]] == ["scale-missing"]
    assert shown.json["not_examined"] == ["cache"]


# ------------------------------------------------------------------------- code that breaks a limit

PATH = CASES / "harmful.py"
HARMFUL = user_code.load(PATH)
HANGING = (
    *("ignores", "cancels", "handles", "blocks", "holds_the_interpreter", "stops", "never_says"),
    *("stops_the_group", "closes", "forks_twice", "forks", "forks_many", "starts_a_program"),
    "floods",
)
SENDING = (
    *("half_a_message", "no_message", "unknown_message", "nested_message", "not_utf8"),
    *("many_lines", "endless_line"),
)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the code notes the processes that it starts."""
    path = tmp_path / "started"
    path.touch()
    monkeypatch.setenv("STARTED", str(path))
    return path


def running(started: Path) -> list[str]:
    """The processes that still run. One that dies has its exit code at the end."""
    paths = [Path("/proc", pid, "stat") for pid in started.read_text().split()]
    states = [path.read_text() for path in paths if path.exists()]
    return [state for state in states if ") Z " not in state and state.endswith(" 0\n")]


def starts_something(name: str) -> bool:
    return name.startswith(("forks", "starts", "floods"))


@pytest.mark.parametrize("name", some([*HANGING], default=("ignores", "stops", "forks_twice")))
def test_a_limit_holds_whatever_the_code_does_and_nothing_runs_on(name, started) -> None:
    with pytest.raises(mhacli.MhaError, match="took longer than 0") as raised:
        user_code.check(getattr(HARMFUL, name), time_limit_s=0.5)
    assert raised.value.code == "too-slow"
    assert ", 65, " in str(raised.value.hint)
    assert bool(started.read_text()) == starts_something(name)
    assert running(started) == []


@pytest.mark.real
def test_the_limit_of_a_name_holds_too(tmp_path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in HANGING:
        text = PATH.read_text().replace('"../started"', f'"../{name}"')
        (folder / f"{name}.py").write_text(text)
        (tmp_path / name).touch()
    words = [f"check {name}.py:{name} --time-limit 0.5 --json" for name in HANGING]
    for name, ended in zip(HANGING, run_together(folder, *words), strict=True):
        assert (ended.code, ended.error["code"]) == (1, "too-slow"), name
        assert not ended.missing("took longer than 0", ", 65, ")
        assert bool((tmp_path / name).read_text()) == starts_something(name)
        assert running(tmp_path / name) == []


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return place


def test_temporary_files_of_code_are_removed(temporary, started) -> None:
    with pytest.raises(mhacli.MhaError, match="took longer than 0"):
        user_code.check(HARMFUL.leaves_files, time_limit_s=0.5)
    assert started.read_text()
    assert [*temporary.iterdir()] == []


@pytest.mark.real
def test_nothing_of_code_is_left_when_mha_is_killed(tmp_path, temporary, started) -> None:
    shutil.copy(PATH, tmp_path)
    words = ("check", "harmful.py:leaves_files", "--time-limit", "60")
    variables = {"TMPDIR": str(temporary), "STARTED": str(started)}
    process = start(tmp_path, *words, env=environment(tmp_path, **variables))
    wait_until(started.read_text)
    assert [*temporary.iterdir()]
    process.kill()
    process.wait()
    wait_until(lambda: running(started) == [] and not [*temporary.iterdir()])


def wait_until(holds) -> None:
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < PATIENCE_S
        time.sleep(0.02)


@pytest.mark.parametrize("name", ["leaves_and_aborts", "leaves_and_returns"])
def test_what_code_leaves_ends_with_the_examination(name, started) -> None:
    verdicts = {"leaves_and_aborts": "wrong", "leaves_and_returns": "right"}
    assert user_code.check(getattr(HARMFUL, name)).verdict == verdicts[name]
    assert started.read_text()
    assert running(started) == []


def test_code_that_writes_into_pipes_of_mha_is_named(tmp_path) -> None:
    """In forks with no pipe of the test run: it writes into every pipe."""
    shutil.copy(PATH, tmp_path)
    words = [f"check harmful.py:{name} --json" for name in SENDING]
    for name, ended in zip(SENDING, run_together(tmp_path, *words), strict=True):
        assert (ended.code, ended.error["code"]) == (1, "crashed"), name
        assert "wrote into a pipe of mha" in ended.error["message"]


def test_only_the_begin_of_a_long_text_of_an_exception_is_read() -> None:
    with pytest.raises(mhacli.MhaError, match="Long: long x") as raised:
        user_code.check(HARMFUL.says_much, time_limit_s=20)
    assert len(raised.value.message) < 1000
