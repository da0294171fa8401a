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


def test_a_target_that_is_refused_is_an_annotation(mha: Callable[..., Any]) -> None:
    for words, options, n in (
        (("missing.py:GPT",), (), 1),
        (("no_such_module:GPT",), (), 1),
        (("missing.py:GPT",), ("--no-annotations",), 0),
    ):
        ended = mha("check", *words, *options, env={"GITHUB_ACTIONS": "true"}, code=1)
        assert len(re.findall(f"^::warning .*{words[0]}: ", ended.stderr, flags=re.M)) == n
        assert "mha: error: " in ended.stderr
