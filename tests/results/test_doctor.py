"""The summary line of `mha doctor`, from checks made by hand."""

from __future__ import annotations

import pytest

from mhacli.results.doctor import HealthCheck, Report

PASSES = HealthCheck("repeat", True, "")
OPEN = HealthCheck("cache", None, "")
WARNS = HealthCheck("bos", None, "", is_caution=True)
FAILS = HealthCheck("eager", False, "")


@pytest.mark.parametrize(
    ("checks", "summary"),
    [
        ((PASSES,), "everything works (1 check passes)"),
        ((PASSES, PASSES, OPEN), "everything works (2 checks pass, 1 does not apply)"),
        ((PASSES, PASSES, WARNS, OPEN, OPEN), "everything works; 1 warning: bos (2 checks pass, 2 do not apply)"),
        ((FAILS, WARNS, WARNS), "1 problem found: eager; 2 warnings: bos, bos (0 checks pass)"),
        ((FAILS, PASSES, FAILS), "2 problems found: eager, eager (1 check passes)"),
    ],
)
def test_the_summary_names_problems_and_warnings_and_counts_the_rest(
    checks: tuple[HealthCheck, ...], summary: str
) -> None:
    report = Report(checks, (), ())
    assert report.summary == report.to_dict()["summary"] == summary
