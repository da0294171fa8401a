"""`--max-time` ends an examination with a verdict, which is never `right` and names what was not
tried.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

SLOW = Path(__file__).parent / "cases" / "slow" / "attention.py"
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
def test_a_mistake_that_was_shown_before_time_was_over_is_wrong(mha) -> None:
    limits = ("--max-time", "40", "--time-limit", "60")
    ended = mha("check", "slow.py:SlowWithLargeScores", *limits, "--json", code=3)
    assert [finding["code"] for finding in ended.json["findings"]] == ["scale-missing"]
    assert ended.json["not_examined"] == ["cache"]
