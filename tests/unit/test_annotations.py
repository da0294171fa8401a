"""Annotations of GitHub: what is escaped, where files lie, and how many are printed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mhacli.commands.check.annotations import annotations, print_annotations
from mhacli.commands.check.result import Accepted, Examination, Finding


def wrong(*files: str | None, message: str = "it is", **how: object) -> Examination:
    findings = [Finding("code", message, "", "", file=file, line=7, **how) for file in files]  # type: ignore[arg-type]
    return Examination("wrong", "my.py:GPT", "", findings=tuple(findings))


def test_texts_are_escaped_as_github_reads_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    file = tmp_path / "100%, a:b\n\r.py"
    (line,) = annotations(wrong(str(file), message="1:2, 50%\nnext \x1b[31m\r::error::"))
    assert line == (
        r"::error title=mha check,file=100%25%2C a%3Ab\n\r.py,line=7"
        r"::my.py:GPT: it is".replace("it is", r"1:2, 50%25%0Anext \x1b[31m%0A::error::")
    )


def test_a_file_is_relative_to_the_workspace_and_not_named_outside_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root, link = tmp_path / "root", tmp_path / "link"
    root.mkdir()
    link.symlink_to(root)
    monkeypatch.setenv("GITHUB_WORKSPACE", str(link))
    files = (f"{root}/a/b.py", f"{link}/..c.py", f"{tmp_path}/b.py", None)
    found = [line.split("::")[1] for line in annotations(wrong(*files))]
    assert found == [
        "error title=mha check,file=a/b.py,line=7",
        "error title=mha check,file=..c.py,line=7",
        "error title=mha check",
        "error title=mha check",
    ]


def test_accepted_mistakes_are_notices_and_undecided_ones_warnings() -> None:
    reasons = (Accepted("code", None, "as meant"),)
    accepted = replace(wrong(None, accepted=True), accepted=reasons)
    unknown = Examination("unknown", "my.py:GPT", "", reason="why")
    right = Examination("right", "my.py:GPT", "")
    levels = [
        [line.split()[0] for line in annotations(each)] for each in (accepted, unknown, right)
    ]
    (line,) = annotations(accepted)
    assert line.endswith("::my.py:GPT: it is; accepted: as meant")
    assert levels == [["::notice"], ["::warning"], []]


def test_at_most_ten_of_a_level_are_printed_where_a_workflow_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"::{level} title=a::{n}" for n in range(12) for level in ("error", "notice")]
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    print_annotations(lines)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    print_annotations([*lines, *lines, "::warning title=a::0"])
    out, err = capsys.readouterr()
    assert not out
    assert sorted(err.splitlines()) == sorted([*lines[:20], "::warning title=a::0"])
