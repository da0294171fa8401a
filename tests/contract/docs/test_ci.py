"""The workflow of docs/CI.md, run step by step, over a sample and over what mends it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.documents import ROOT, blocks
from support.workflow import run_workflow

PAGE = (ROOT / "docs" / "CI.md").read_text()
(WORKFLOW,) = blocks(PAGE, "yaml")
STATED, ACCEPTED = blocks(PAGE, "toml")
WRONG = (ROOT / "sample_texts" / "my_gpt.py").read_text()
MENDED = WRONG.replace("diagonal=1", "diagonal=0")


@pytest.mark.real
@pytest.mark.parametrize(
    ("table", "code", "exit_code", "level"),
    [
        (STATED, WRONG, 1, "error"),
        (STATED, MENDED, 0, None),
        (ACCEPTED, WRONG, 0, "notice"),
        (ACCEPTED, MENDED, 1, "error"),
    ],
    ids=["wrong", "mended", "accepted", "accepted and mended"],
)
def test_the_workflow_runs_as_it_is(
    table: str, code: str, exit_code: int, level: str | None, tmp_path: Path
) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(table)
    (folder / "my_gpt.py").write_text(code)
    assert len(WORKFLOW.splitlines()) <= 12
    *before, check = run_workflow(WORKFLOW, folder)
    assert [step.line.split()[:3] for step in before] == [["pip", "install", "mhacli"]]
    assert check.code == exit_code, check
    shown = re.findall(r"^::(\w+) .*?::", check.stderr, flags=re.MULTILINE)
    assert set(shown) == ({level} if level else set()), check.stderr
    if level is not None and code == WRONG:
        line = WRONG[: WRONG.index("diagonal=1")].count("\n") + 1
        assert f",file=my_gpt.py,line={line}::" in check.stderr
    if table == ACCEPTED and code == WRONG:
        assert "as in our paper" in check.stdout
        assert "as in our paper" in check.stderr
