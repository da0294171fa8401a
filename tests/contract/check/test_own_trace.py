"""`mha trace FILE.py:NAME`: the tensors of the user's code with their axes, lines and warnings."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import cases
from support.cases import Case
from support.mha import Ended, run

CASES = Path(__file__).parent / "cases"
TRACED = CASES / "traced"
"""Programs that say which axes their tensors have, and words of the lines that make them."""
SITES = ("q", "k", "v", "qk", "scores", "pattern", "z", "concat", "out")


def trace(folder: Path, *words: str, **how: Any) -> Ended:
    """`mha trace` in a folder with the programs."""
    for path in (*TRACED.glob("*.py"), CASES / "endless.py"):
        shutil.copy(path, folder)
    return run(folder, "trace", *words, **how)


def steps(ended: Ended) -> dict[str, dict[str, Any]]:
    return {step["site"]: step for step in ended.json["trace"]}


def line_of(words: str, case: Case) -> int:
    """The number of the line of the program with these words; its first comments do not count."""
    lines = enumerate(case.text.splitlines(), 1)
    return next(number for number, line in lines if words in line and not line.startswith("# "))


def pairs(text: str) -> dict[str, str]:
    """The lines `site = value` of a comment."""
    return dict(line.split(" = ", 1) for line in text.splitlines())


@pytest.mark.parametrize("case", cases.parameters(TRACED))
def test_each_tensor_has_its_axes_and_the_line_that_makes_it(tmp_path: Path, case: Case) -> None:
    target = f"{case.path.name}:{case.comments['target']}"
    ended = trace(tmp_path, target, "--json")
    document, found = ended.json, steps(ended)
    assert (document["schema"], document["module"]["target"]) == ("mha.record/1", target)
    axes, lines = pairs(case.comments["expect"]), pairs(case.comments["lines"])
    assert {site: " ".join(found[site]["axes"]) for site in axes} == axes
    numbers = {site: line_of(words, case) for site, words in lines.items()}
    assert {site: found[site]["line"] for site in lines} == numbers
    assert [site for site in SITES if site in found] == [site for site in found if site in SITES]
    for step in document["trace"]:
        assert len(step["shape"]) == len(step["axes"])
        assert step["remark"] == ""
    if "qk" in found and case.path.stem != "grouped":
        *planes, q_len, k_len = found["qk"]["shape"]
        d_head = found["z"]["shape"][-1]
        assert found["qk"]["flops"] == 2 * planes[0] * planes[1] * q_len * k_len * d_head


@pytest.mark.real
@pytest.mark.parametrize(
    ("words", "site", "mentions"),
    [
        (("--arg", "axis=-2"), "pattern", ("query", "key")),
        (("--arg", "mixed=true"), "concat", ("head", "query")),
    ],
)
def test_a_tensor_that_mixes_axes_has_a_warning(tmp_path, words, site: str, mentions) -> None:
    remarks = {
        name: step["remark"]
        for name, step in steps(trace(tmp_path, "fused.py:Fused", *words, "--json")).items()
    }
    assert [name for name, remark in remarks.items() if remark] == [site]
    assert all(word in remarks[site] for word in mentions)


@pytest.mark.real
def test_the_screen_shows_lines_and_steps_and_a_saved_trace_shows_the_same(tmp_path) -> None:
    shown = trace(tmp_path, "fused.py:Fused", "--save", "walk.safetensors", env={"COLUMNS": "80"})
    flat = " ".join(shown.stdout.split())
    line = line_of("weights = F.softmax", cases.read(TRACED / "fused.py"))
    assert f"line {line}: weights = F.softmax" in flat
    assert "batch head query key" in flat
    assert "\\x1b[31mloud" in flat
    assert max(map(len, shown.stdout.splitlines())) <= 80
    again = run(tmp_path, "show", "walk.safetensors", env={"COLUMNS": "80"}).stdout
    assert again.splitlines()[:20] == shown.stdout.splitlines()[:20]
    assert "--csv" in run(tmp_path, "show", "walk.safetensors", "--csv", code=2).said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("separate.py:Separate", "the cat"), "the cat"),
        (("separate.py:Separate", "--cell", "0,1,2"), "--cell"),
        (("separate.py:Separate", "--heads", "4"), "--heads"),
        (("separate.py:Separate", "--mask"), "--mask"),
        (("separate.py:Separate", "--context", "cat"), "--context"),
        (("separate.py:Separate", "--arg", "d_model"), "d_model"),
        (("the cat", "--arg", "d_model=8"), "--arg"),
        (("the cat", "--time-limit", "3"), "--time-limit"),
        (("separate.py",), "separate.py:Separate"),
    ],
)
def test_words_that_do_not_go_together_are_a_usage_error(tmp_path, words, says: str) -> None:
    assert says in trace(tmp_path, *words, code=2).said


@pytest.mark.parametrize(
    "words", [("12:30",), ("so separate.py:Separate it is",), ("the cat", "--text", "fused.py")]
)
def test_other_words_with_a_colon_or_a_file_are_texts(tmp_path, words) -> None:
    document = trace(tmp_path, *words, "--mask", "--d-model", "8", "--heads", "2", "--json").json
    assert document["sequences"][0]["text"] == words[0]


@pytest.mark.real
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("missing.py:A",), "missing.py"),
        (("fused.py:Missing",), "Missing"),
        (("endless.py:Endless", "--time-limit", "1.5"), "1.5"),
    ],
)
def test_code_that_cannot_be_traced_is_reported(tmp_path, words, says: str) -> None:
    assert says in trace(tmp_path, *words, code=1).said


def test_a_trace_that_cannot_be_saved_is_refused_before_the_code_runs(tmp_path) -> None:
    shutil.copy(CASES / "leaves_a_file.py", tmp_path)
    run(tmp_path, "trace", "leaves_a_file.py:attend", "--save", "none/r.safetensors", code=1)
    assert not (tmp_path / "ran").exists()


def test_the_parts_of_a_fused_projection_are_counted_in_their_order(
    mha: Any, tmp_path: Path
) -> None:
    shutil.copy(CASES / "chunked.py", tmp_path)
    steps = mha("trace", "chunked.py:Fused", "--json").json["trace"]
    parts = [
        re.findall(r"\d+", step["formula"])
        for step in steps
        if "chunk" in step["formula"].partition("=")[2]
    ]
    assert parts[:3] == [["1"], ["2"], ["3"]]
