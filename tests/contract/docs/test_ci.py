"""The workflow of docs/CI.md, run as it stands, over a sample and over what mends it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from support.documents import ROOT, blocks
from support.mha import run_pytest

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
    (tmp_path / "pyproject.toml").write_text(table)
    (tmp_path / "my_gpt.py").write_text(code)
    assert len(WORKFLOW.splitlines()) <= 12
    (job,) = yaml.safe_load(WORKFLOW)["jobs"].values()
    install, test = (shlex.split(step["run"]) for step in job["steps"] if "run" in step)
    assert install[:3] == ["pip", "install", "mhacli"]
    assert test[0] == "pytest"
    of_runner = {"CI": "true", "GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(tmp_path)}
    ended = run_pytest(tmp_path, *test[1:], **of_runner)
    assert ended.returncode == exit_code, ended
    shown = re.findall(r"^::(\w+) .*?::", ended.stderr, flags=re.MULTILINE)
    assert set(shown) == ({level} if level else set()), ended.stderr
    if level is not None and code == WRONG:
        line = WRONG[: WRONG.index("diagonal=1")].count("\n") + 1
        assert f",file=my_gpt.py,line={line}::" in ended.stderr
    if table == ACCEPTED and code == WRONG:
        assert "as in our paper" in ended.stdout
        assert "as in our paper" in ended.stderr
