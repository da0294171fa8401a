"""`--max-time` ends an examination with a verdict, which is never `right` and names what was not
tried.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support import cases
from support.mha import run_together

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
def test_an_import_and_a_constructor_that_never_end_are_ended_and_shown_mistakes_are_wrong(
    tmp_path: Path,
) -> None:
    """Each command waits for a limit of about a minute, and so they run at the same time."""
    endless = [cases.read(SLOW.with_name(name)) for name in ("never_built.py", "never_imported.py")]
    for path in (CASES / "attention.py", *(case.path for case in endless)):
        shutil.copy(path, tmp_path)
    *unended, shown = run_together(
        tmp_path,
        *(f"check {case.comments['words']} --json" for case in endless),
        "check slow.py:SlowWithLargeScores --max-time 40 --time-limit 60 --json",
    )
    for case, ended in zip(endless, unended, strict=True):
        assert ended.code == 1
        assert [ended.error["code"]] == case.expect
        assert ended.missing(*case.comments["mentions"].split("|")) == []
    assert shown.code == 3
    assert [finding["code"] for finding in shown.json["findings"]] == ["scale-missing"]
    assert shown.json["not_examined"] == ["cache"]
