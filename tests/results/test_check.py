"""The last line of `mha check`, from examinations made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.examinations import ALIKE, AXIS, RIGHT, STATE, UNKNOWN, WRONG

from mhacli.results.check import Examination, FirstDifference

MANY = ("past_key_value", "rel_bias", "head_mask", "start_pos")


@pytest.mark.parametrize(
    ("examination", "summary"),
    [
        (RIGHT, "right: on 12 inputs it gives the same output as the reference with the same weights; 1 probe passes"),
        (replace(RIGHT, comparison=None), "right: 1 probe passes"),
        (ALIKE, "right: it gives the same output as theirs.py:Attention with the same weights"),
        (
            replace(RIGHT, comparison=None, not_examined=(*MANY, "foo", "cache")),
            "right: 1 probe passes; not examined: past_key_value (cache), rel_bias (score bias), head_mask (mask), start_pos "
            "(positions), foo, cache",
        ),
        (
            WRONG,
            "wrong: the softmax runs over another axis than the keys (mine.py:31); fix: scores.softmax(dim=-1)",
        ),
        (
            replace(WRONG, findings=(replace(AXIS, file=None, fix="a\nb"), STATE, STATE)),
            "wrong: the softmax runs over another axis than the keys; fix: a; 2 more mistakes",
        ),
        (
            replace(WRONG, findings=(replace(AXIS, fix=""), replace(STATE, file="mine.py", line=7))),
            "wrong: the softmax runs over another axis than the keys (mine.py:31); and it remembers earlier calls (mine.py:7); "
            "fix: reset the cache",
        ),
        (UNKNOWN, "not decided: nothing in the catalogue explains what it answers"),
        (
            replace(WRONG, against="theirs.py:A", departure=FirstDifference("z", None, "mine.py", 28, "", "theirs.py", 7, "")),
            "wrong: the softmax runs over another axis than the keys (mine.py:31); the first difference is in z: compare "
            "mine.py:28 with theirs.py:7",
        ),
        (
            replace(WRONG, against="torch.nn:A", departure=FirstDifference("z", None, "mine.py", 28)),
            "wrong: the softmax runs over another axis than the keys (mine.py:31); the first difference is in z: compare "
            "mine.py:28 with library code of torch.nn:A",
        ),
        (
            replace(RIGHT, comparison=None, not_examined=("foo",), notes=("one", "two")),
            "right: 1 probe passes; not examined: foo; note: one; note: two",
        ),
        (replace(UNKNOWN, reason=None), "not decided: what was measured does not suffice"),
    ],
)  # fmt: skip
def test_the_summary_has_mistakes_and_fixes_or_unexamined_arguments(examination: Examination, summary: str) -> None:
    assert examination.summary == examination.to_dict()["summary"] == summary
