"""Examinations in the tests of a user: what a failure shows, and what the plugin costs a run that
does not use it.
"""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path

import pytest
from support import user_code
from support.mha import run_pytest

import mhacli

CASES = Path(__file__).parent / "cases"
UNUSED = """
import sys
from importlib.machinery import SourceFileLoader

def test_unused():
    before = set(sys.modules)
    assert "torch" not in before
    assert not any(name.startswith("mhacli.commands") for name in before)
    import mhacli.commands.check.run
    ours = {name for name in set(sys.modules) - before if name.startswith("mhacli.")}
    assert len(ours) > 20
    assert {type(sys.modules[name].__loader__) for name in ours} == {SourceFileLoader}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(CASES / "attention.py", tmp_path)
    shutil.copy(CASES / "user_tests.py", tmp_path / "test_user.py")
    return tmp_path


def parts(output: str) -> dict[str, str]:
    """What pytest prints of each failure, by its name."""
    pieces = re.split(
        r"^_{3,} (?:ERROR at setup of )?(\w+) _{3,}$",
        output.partition("short test summary")[0],
        flags=re.M,
    )
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


@pytest.mark.real
def test_the_report_stands_below_an_assertion_about_it(folder: Path) -> None:
    ended = run_pytest(folder, "test_user.py", GITHUB_ACTIONS="true")
    said = re.findall(r"^(?:FAILED|ERROR) test_user.py::(\w+) - (.+)$", ended.stdout, flags=re.M)
    sentences = dict(said)
    line = (CASES / "attention.py").read_text().splitlines().index(
        "    return (q @ k.mT).softmax(-1) @ v"
    ) + 1
    about = {name for name, said in sentences.items() if said.startswith(f"attention.py:{line}")}
    assert about == {
        "test_wrong",
        "test_wrong_with_a_name_and_a_message",
        "test_asserted",
        "test_prepared",
    }
    assert set(sentences) == {*about, "test_what_is_found"}
    assert "1 passed, 1 xfailed" in ended.stdout
    shown = parts(ended.stdout)
    for name in sentences:
        assert shown[name].count("✗ wrong") == (name in about), shown[name]
    assert len(re.findall("^::error ", ended.stderr, flags=re.M)) == 1  # the same mistake each time


def test_without_the_plugin_the_representation_stands_whole(folder: Path) -> None:
    words = ("test_user.py", "-k", "test_wrong", "-p", "no:mha")
    ended = run_pytest(folder, *words)
    report = user_code.check(f"{folder}/attention.py:without_scale")
    assert report.findings[0].message in ended.stdout
    assert "✗ wrong" not in ended.stdout
    assert len(
        re.findall(r"where False = <.*\(attention\.py:\d+\)>\.ok$", ended.stdout, flags=re.M)
    )
    assert run_pytest(folder, "--mha", "attention.py:right", "-p", "no:mha").returncode == 4


def test_a_representation_names_the_first_mistake_and_its_line(tmp_path: Path) -> None:
    deep = tmp_path / ("long name " * 9) / "\n\u202e"
    deep.mkdir(parents=True)
    shutil.copy(CASES / "attention.py", deep)
    (right, wrong) = (
        user_code.check(f"{deep}/attention.py:{name}") for name in ("right", "without_scale")
    )
    for report in (right, wrong):
        assert len(repr(report)) <= 200
        assert repr(report).isprintable()
        assert f": {report.verdict}: " in repr(report)
    assert wrong.findings[0].message in repr(wrong)
    assert repr(wrong).endswith(f"attention.py:{wrong.findings[0].line})>")
    assert str(wrong).splitlines()[0].startswith(wrong.findings[0].code)
    assert max(map(len, str(right).splitlines())) <= 80


def test_assert_right_takes_what_check_takes() -> None:
    ours, theirs = map(inspect.signature, (mhacli.assert_right, mhacli.check))
    assert ours.parameters == theirs.parameters
    with pytest.raises(mhacli.MhaError):
        mhacli.assert_right(7)


def test_a_run_that_does_not_use_it_imports_nothing_and_rewrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_unused.py").write_text(UNUSED)
    ended = run_pytest(tmp_path, "-W", "error", "test_unused.py", cold=True)
    assert ended.returncode == 0, ended.stdout
