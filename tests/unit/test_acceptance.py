"""What becomes of a report: mistakes that are accepted where there was no time for all behaviours,
and targets that are refused.
"""

from __future__ import annotations

import pytest

from mhacli.commands.check import run
from mhacli.commands.check.acceptance import with_accepted
from mhacli.commands.check.result import (
    Accepted,
    Behaviour,
    CheckRequest,
    Examination,
    Finding,
)
from mhacli.errors import MhaError


@pytest.mark.parametrize(
    ("late", "verdict", "exit_code"), [("batch", "unknown", 1), ("dtype", "wrong", 0)]
)
def test_an_accepted_mistake_hides_none_for_which_there_was_no_time(
    late: str, verdict: str, exit_code: int
) -> None:
    leak = Finding("sees-the-future", "it sees them", "", "", parts=("lower",))
    report = Examination(
        "wrong",
        "my.py:GPT",
        "",
        findings=(leak,),
        not_examined=(late,),
        behaviour=(
            Behaviour(name="causality", ok=False, reason="an output depends on later tokens"),
            Behaviour(name="prefix", ok=None, reason="not tried: causality fails"),
            Behaviour(name=late, ok=None, reason="not tried: 3 seconds were over"),
        ),
    )
    stated = with_accepted(report, [Accepted("sees-the-future", None, "as meant")])
    assert (stated.verdict, stated.exit_code, stated.ok) == (verdict, exit_code, not exit_code)
    assert (f"{late}: not tried: 3 seconds were over" in stated.sentence) is not stated.ok
    assert [finding.accepted for finding in stated.findings] == [True]


def test_a_refusal_is_a_report_and_a_fault_of_mha_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(code: str) -> Examination:
        def examine(*_: object, **__: object) -> Examination:
            raise MhaError("it went wrong", code=code)

        monkeypatch.setattr(run, "examine_in_child", examine)
        return run.examined_or_refused(CheckRequest(target="a.py:A"))

    assert refuse("no-target").verdict == "unknown"
    with pytest.raises(MhaError, match="it went wrong"):
        refuse("internal")
