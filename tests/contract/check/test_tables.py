"""Targets that a pyproject.toml states: which table is read, what is refused, and the reports."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import checkpoints
from support.mha import Ended, run

Mha = Callable[..., Ended]
RIGHT, WRONG, BROKEN, UNDECIDED = (
    '{ target = "masks.py:triangle", sees = "q >= k" }',
    '{ target = "masks.py:triangle", sees = "q > k" }',
    '{ target = "masks.py:raising" }',
    '{ target = "masks.py:Rows" }',
)
ACCEPTED = WRONG[:-1] + ', accept = { sees-unstated = "the first is a start" } }'
HELD = RIGHT[:-1] + ', accept = ["sees-unstated=it was once"] }'
MASKS = """
from torch import nn


def triangle(b, h, q, k):
    return q >= k


def raising(b, h, q, k):
    raise ValueError("not yet")


class Rows(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.out = nn.Linear(width, width)

    def forward(self, x):
        return self.out(x)
"""


@pytest.fixture
def states(tmp_path: Path) -> Callable[..., Path]:
    """Writes a table with these targets, and the file that they name."""

    def write(*targets: str, text: str = "", name: str = "masks.py") -> Path:
        (tmp_path / name).write_text(MASKS)
        (tmp_path / "inner" / "most").mkdir(parents=True, exist_ok=True)
        path = tmp_path / "pyproject.toml"
        path.write_text(text or f"[tool.mha.check]\ntargets = [{', '.join(targets)}]\n")
        tomllib.loads(path.read_text())
        return path

    return write


@pytest.mark.parametrize(
    ("targets", "code", "answers"),
    [
        ([RIGHT], 0, ["1 right"]),
        ([RIGHT, ACCEPTED], 0, ["1 right", "1 wrong, accepted"]),
        ([RIGHT, WRONG, UNDECIDED], 3, ["1 right", "1 wrong", "1 unknown"]),
        ([RIGHT, UNDECIDED], 1, ["1 right", "1 unknown"]),
        ([BROKEN, RIGHT], 1, ["1 unknown", "1 right"]),
        ([RIGHT, HELD], 3, ["1 right", "1 wrong"]),
    ],
)
def test_each_target_is_a_report_and_the_worst_decides(
    mha: Mha, states: Callable[..., Path], targets: list[str], code: int, answers: list[str]
) -> None:
    path = states(*targets)
    ended = mha("check", code=code)
    n = "1 target" if len(targets) == 1 else f"{len(targets)} targets"
    lines = ended.stdout.splitlines()
    assert (lines[0], lines[-1]) == (path.name, f"{n}: {'; '.join(answers)}")
    assert ended.stderr == ""
    document = mha("check", "--json", code=code).json
    assert (document["schema"], document["table"]) == ("mha.checks/1", str(path))
    assert document["summary"] == lines[-1]
    assert {report["schema"] for report in document["reports"]} == {"mha.check/1"}
    assert len(document["reports"]) == len(targets)


def test_a_table_may_begin_with_a_byte_order_mark(mha: Mha, states: Callable[..., Path]) -> None:
    path = states(RIGHT)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert mha("check", "--json").json["summary"] == "1 target: 1 right"


def test_a_refusal_is_a_report_that_says_why(mha: Mha, states: Callable[..., Path]) -> None:
    states('"missing.py:Model"', RIGHT)
    refused, right = mha("check", "--json", code=1).json["reports"]
    assert (refused["target"], refused["verdict"], right["verdict"]) == (
        "missing.py:Model",
        "unknown",
        "right",
    )
    assert re.search(r"refused: .*missing\.py does not exist", refused["reason"])


def test_targets_are_relative_to_the_table_and_files_to_where_one_is(
    mha: Mha, states: Callable[..., Path], tmp_path: Path
) -> None:
    path = states(ACCEPTED, '{ target = "masks:triangle", sees = "q >= k" }')
    (tmp_path / "inner" / "pyproject.toml").write_text("[tool.other]\nmha = 1\n")
    folder = tmp_path / "inner" / "most"
    ended = run(folder, "check", "--html", "page.html")
    assert ended.stdout.splitlines()[0] == str(path)
    page = (folder / "page.html").read_text()
    assert "the first is a start" in page
    assert page.count("masks") >= 2
    assert [report["target"] for report in run(folder, "check", "--json").json["reports"]] == [
        "masks.py:triangle",
        "masks:triangle",
    ]


def test_the_table_has_all_that_csv_and_a_page_have(
    mha: Mha, states: Callable[..., Path], tmp_path: Path
) -> None:
    states(ACCEPTED, WRONG, UNDECIDED, BROKEN)
    rows = [*csv.DictReader(io.StringIO(mha("check", "--csv", code=3).stdout))]
    found = [(row["target"], row["of"], row["name"]) for row in rows if row["of"] != "behaviour"]
    assert found == [
        ("masks.py:triangle", "verdict", "wrong"),
        ("masks.py:triangle", "finding", "sees-unstated"),
        ("masks.py:triangle", "accepted", "sees-unstated"),
        ("masks.py:triangle", "verdict", "wrong"),
        ("masks.py:triangle", "finding", "sees-unstated"),
        ("masks.py:Rows", "verdict", "unknown"),
        ("masks.py:Rows", "probe", "visible keys"),
        ("masks.py:raising", "verdict", "unknown"),
    ]
    verdicts = [row for row in rows if row["of"] == "verdict"]
    assert [row["ok"] for row in verdicts] == ["True", "False", "False", "False"]
    assert "refused: " in verdicts[-1]["message"]
    mha("check", "--html", "page.html", code=3)
    page = (tmp_path / "page.html").read_text()
    for words in ("the first is a start", "masks.py:Rows", "4 targets: "):
        assert words in page


@pytest.mark.parametrize("name", ["new\nline.py", "a::b.py", "a]b[red].py", "‮rtl.py"])
def test_any_name_of_a_file_is_a_target(mha: Mha, states: Callable[..., Path], name: str) -> None:
    target = json.dumps(f"{name}:triangle")
    states(f'{{ target = {target}, sees = "q >= k" }}', name=name)
    assert mha("check").code == 0
    (report,) = mha("check", "--json").json["reports"]
    assert (report["target"], report["verdict"]) == (f"{name}:triangle", "right")


TABLE = "[tool.mha.check]\n"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (f"{TABLE}target = []", ["'target'", "the nearest is targets"]),
        (f"{TABLE}max-time = 9", ["'max-time'", "[[tool.mha.check.targets]]"]),
        (f"{TABLE}targets = []", ["no targets"]),
        (TABLE, ["no targets"]),
        (f"{TABLE}targets = 3", ["Expected `array`"]),
        ("[tool.mha]\ncheck = 3", ["Expected `object`"]),
        (f"{TABLE}targets = [3]", ["$[0]"]),
        (f"{TABLE}targets = [{{ causal = true }}]", ["target 1", "nothing to check"]),
        (f'{TABLE}targets = ["masks.py"]', ["target 1", "'masks.py' is not of the form"]),
        ("MORE causl = true", ["target 2", "'causl'", "the nearest is causal"]),
        ("MORE max_time = 3", ["'max_time'", "the nearest is max-time"]),
        ("MORE causal = 3", ["target 2", "--causal", "Expected `bool`"]),
        ("MORE length = 'long'", ["--length", "Expected `int"]),
        ("MORE length = false", ["length", "Expected `int"]),
        ("MORE length = 1", ["--length 1 is not in the range"]),
        ("MORE arg = 3", ["--arg", "Expected `array`"]),
        ("MORE arg = ['width']", ["--arg 'width' is not NAME=VALUE"]),
        ("MORE accept = { sees-the-futur = 'x' }", ["the nearest is sees-the-future"]),
        ("MORE accept = { sees-the-future = '' }", ["CODE[@PART]=REASON"]),
        ("MORE accept = { sees-the-future = 3 }", ["accept: ", "Expected `str`"]),
        ("MORE accept = ['sees-the-future']", ["CODE[@PART]=REASON"]),
        ("MORE sees = 'q >='", ["q >="]),
        ("MORE example = 'm(x)'", ["example 'm(x)'"]),
        ("MORE causal = true, sees = 'q >= k'", ["--sees", "exclude each other"]),
        ("MORE device = 'tpu'", ["--device tpu"]),
        ("MODEL max-time = 3", ["--max-time", "--model", "exclude each other"]),
    ],
)
def test_a_table_that_cannot_mean_anything_is_refused(
    mha: Mha, states: Callable[..., Path], text: str, pieces: list[str]
) -> None:
    start, _, more = text.partition(" ")
    first = {"MORE": 'target = "masks.py:triangle"', "MODEL": 'model = "folder"'}.get(start)
    if first is not None:
        text = f'{TABLE}targets = ["masks.py:triangle", {{ {first}, {more} }}]'
    path = states(text=text)
    ended = mha("check", code=2)
    assert not ended.missing(*pieces)
    if "tpu" not in text:
        assert not ended.missing(str(path))
    error = mha("check", "--json", code=2).error
    assert (error["code"], error["path"]) == ("usage", None if "tpu" in text else str(path))


@pytest.mark.parametrize("text", ["", "[tool.mha]\n", "[tool]\nmha = 3\n", "[project]\n"])
def test_without_a_table_there_is_nothing_to_check(mha: Mha, tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    assert not mha("check", code=2).missing("there is nothing to check")
    (tmp_path / "pyproject.toml").unlink()
    os.mkfifo(tmp_path / "pyproject.toml")
    assert not mha("check", "--causal", code=2).missing("there is nothing to check")


@pytest.mark.parametrize("content", [b"[tool.mha", b"\xff", b"a = [" * 20000])
def test_a_file_that_is_no_toml_is_an_error(mha: Mha, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pyproject.toml").write_bytes(content)
    assert not mha("check", code=2).missing("pyproject.toml is not TOML")


def test_options_of_a_run_replace_those_of_the_table_and_others_need_a_target(
    mha: Mha, states: Callable[..., Path], tmp_path: Path
) -> None:
    states('{ target = "masks.py:triangle", length = 32, sees = "q >= k" }')
    assert "32 × 32 cells" in mha("check").stdout
    assert "48 × 48 cells" in mha("check", "--length", "48").stdout
    for option in (("--causal",), ("--accept", "sees-unstated=why"), ("--arg", "a=1")):
        ended = mha("check", *option, code=2)
        assert not ended.missing(f"{option[0]} needs a target", str(tmp_path / "pyproject.toml"))


def test_values_are_written_as_in_python_or_as_on_the_command_line(
    mha: Mha, states: Callable[..., Path]
) -> None:
    states(
        '{ target = "masks.py:Rows", arg = { width = 6 }, causal = false }',
        '{ target = "masks.py:Rows", arg = ["width=6"], no-causal = true, packed = false }',
    )
    reports: list[dict[str, Any]] = mha("check", "--json", code=1).json["reports"]
    for report in reports:
        assert [each["value"] for each in report["arguments"]] == ["6"]
        causality = next(e for e in report["behaviour"] if e["name"] == "causality")
        assert "may see later ones" in causality["reason"]


@pytest.mark.real
def test_a_checkpoint_and_code_in_one_table_through_the_installed_program(
    states: Callable[..., Path], tmp_path: Path
) -> None:
    folder = json.dumps(str(checkpoints.folder("gpt2")))
    states(f"{{ model = {folder}, length = 16 }}", RIGHT)
    ended = run(tmp_path / "inner" / "most", "check", "--json", cold=True)
    assert [report["verdict"] for report in ended.json["reports"]] == ["right", "right"]
    shown = run(tmp_path, "check", "--max-time", "600")
    assert shown.stdout.splitlines()[-1] == "2 targets: 2 right"
