"""What never ends before the first call is ended, and the error says by which limit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support import cases
from support.documents import ROOT
from support.mha import run_together

from mhacli.usercode import process

CASES = ROOT / "tests" / "contract" / "check" / "cases"


@pytest.mark.real
def test_an_import_and_a_constructor_that_never_end_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert process.FIRST_LIMIT_S == 60  # as CHECK says
    monkeypatch.setattr("mhacli.usercode.process.FIRST_LIMIT_S", 3.0)
    names = ("never_built.py", "never_imported.py")
    endless = [cases.read(CASES / "slow" / name) for name in names]
    for path in (CASES / "attention.py", *(case.path for case in endless)):
        shutil.copy(path, tmp_path)
    words = [f"check {case.comments['words']} --json" for case in endless]
    for case, ended in zip(endless, run_together(tmp_path, *words), strict=True):
        assert ended.code == 1
        assert [ended.error["code"]] == case.expect
        assert ended.missing(*case.comments["mentions"].split("|")) == []
