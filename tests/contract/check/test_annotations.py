"""`mha check` in a workflow of GitHub: what is found as annotations on stderr."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

SAMPLES = Path(__file__).parents[3] / "sample_texts"
ATTENTION = ("my_attention.py:MultiHeadAttention", "--arg", "d_model=64", "--arg", "n_heads=8")


def test_findings_are_annotations_beside_an_unchanged_stdout(
    mha: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "my_attention.py").write_text((SAMPLES / "my_attention.py").read_text())
    workflow = {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(tmp_path)}
    report = mha("check", *ATTENTION, "--json", env=workflow, code=3)
    ((line, words),) = [(each["line"], each["message"]) for each in report.json["findings"]]
    (shown,) = report.stderr.splitlines()
    assert re.match(f"::error title=[^:]*,file=my_attention.py,line={line}::.*{words}", shown)
    elsewhere = workflow | {"GITHUB_WORKSPACE": "/nowhere"}
    for env, options, n in ((elsewhere, (), 1), (workflow, ("--no-annotations",), 0), ({}, (), 0)):
        ended = mha("check", *ATTENTION, *options, env=env, code=3)
        assert len(ended.stderr.splitlines()) == n
        assert "file=" not in ended.stderr
