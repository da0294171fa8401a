"""Pairs of mistakes in attention that no name calls causal, and options that contradict the code."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from support.examined import examination_of

from mhacli.requests.user_code import CheckRequest, TargetRequest
from mhacli.results.glossary import meanings

SOURCE = """
import torch
from torch import nn


class Mine(nn.Module):
    def __init__(self, d_model=40, n_heads=5):
        super().__init__()
        self.num_heads = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        b, t, d = x.shape
        h = self.num_heads
        q, k, v = (w(x).view(b, t, h, d // h).transpose(1, 2) for w in (self.q, self.k, self.v))
        logits = q @ k.transpose(-2, -1) {scale}
        logits = logits.masked_fill(torch.ones(t, t).{mask}.bool(), float("-inf"))
        pattern = logits.softmax(dim={axis})
        head_out = pattern @ v
        return self.o({joined})
"""
RIGHT = {
    "scale": "/ (d // h) ** 0.5", "mask": "triu(1)", "axis": -1, "joined": "head_out.transpose(1, 2).reshape(b, t, d)",
}  # fmt: skip


def written(folder: Path, **wrong: object) -> TargetRequest:
    path = folder / f"mine_{len(list(folder.iterdir()))}.py"
    path.write_text(textwrap.dedent(SOURCE.format(**RIGHT | wrong)))
    return TargetRequest(f"{path}:Mine")


@pytest.mark.parametrize(
    ("wrong", "codes"),
    [
        ({"scale": "/ d ** 0.5", "mask": "triu(2)"}, ["scale-d-model", "causal-off-by-one"]),
        ({"scale": "", "axis": -2}, ["scale-missing", "softmax-axis"]),
    ],
    ids=["wide and one later", "unscaled and over queries"],
)
def test_two_mistakes_are_named_without_a_statement_of_causality(
    tmp_path: Path, wrong: dict[str, object], codes: list[str]
) -> None:
    found = examination_of(CheckRequest(written(tmp_path, **wrong)))
    assert [finding.code for finding in found.findings] == codes
    assert all(finding.proven for finding in found.findings)


@pytest.fixture
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mhacli.compute.check.diagnose._LAYERS_FOR_ONE", 4)


@pytest.mark.usefixtures("few_layers")
def test_heads_that_the_code_contradicts_are_a_finding_with_what_the_code_has(tmp_path: Path) -> None:
    found = examination_of(CheckRequest(written(tmp_path), n_heads=2))
    assert found.verdict == "wrong"
    assert [finding.code for finding in found.findings] == ["heads-not-as-stated"]
    assert found.findings[0].message == "the code has 5 heads, and --heads says 2"
    assert found.findings[0].fix == "build it with --arg n_heads=2, or state --heads 5"
    assert "transpose" in found.findings[0].source


def test_heads_that_do_not_divide_the_width_are_not_offered_as_an_argument(tmp_path: Path) -> None:
    found = examination_of(CheckRequest(written(tmp_path), n_heads=3))
    assert found.findings[0].fix == "state --heads 5"


@pytest.mark.usefixtures("few_layers")
def test_a_scale_that_the_code_contradicts_is_a_finding_beside_other_mistakes(tmp_path: Path) -> None:
    found = examination_of(CheckRequest(written(tmp_path), scale=0.25))
    assert [finding.code for finding in found.findings] == ["scale-not-as-stated"]
    assert found.findings[0].message == "the code multiplies the scores by 0.3536 = 1/√d_head, and --scale says 0.25"
    assert "(d // h) ** 0.5" in found.findings[0].source
    found = examination_of(CheckRequest(written(tmp_path, axis=-2), scale=0.25))
    assert [finding.code for finding in found.findings] == ["scale-not-as-stated", "softmax-axis"]
    found = examination_of(CheckRequest(written(tmp_path), n_heads=2, scale=0.25))
    codes = [finding.code for finding in found.findings]
    assert codes == ["heads-not-as-stated", "scale-not-as-stated"]
    assert [[term.group for term in meanings(code)] for code in codes] == [["mistake"], ["mistake"]]


def test_facts_that_the_code_follows_are_no_findings(tmp_path: Path) -> None:
    assert examination_of(CheckRequest(written(tmp_path), n_heads=5, scale=8**-0.5)).verdict == "right"


@pytest.mark.usefixtures("few_layers")
def test_three_mistakes_are_not_decided_and_what_is_left_to_state_is_named(tmp_path: Path) -> None:
    wrong = written(tmp_path, scale="* 3.3", mask="triu(2)", axis=-2)
    found = examination_of(CheckRequest(wrong, scale=0.5, time_limit_s=0.01))
    assert found.verdict == "unknown"
    assert found.next_steps == (
        "check names up to two mistakes at once; if the line above is one, correct it and check again",
        "--against TARGET compares it with code that you trust",
        "--heads, --rope, --mask-means, --causal state what its code does not show",
        "without --scale, which may contradict the code",
        "--time-limit 0.02 tries more pairs of mistakes",
    )


def test_what_is_no_attention_names_the_other_classes_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "two.py"
    path.write_text(f"{textwrap.dedent(SOURCE.format(**RIGHT))}\n\nclass Rows(nn.Linear):\n    pass\n")
    found = examination_of(CheckRequest(TargetRequest(f"{path}:Rows", (("in_features", "8"), ("out_features", "8")))))
    assert found.verdict == "unknown"
    assert found.next_steps == (f"mha trace {path}:Rows shows what it computes, step by step", f"mha check {path}:Mine")


@pytest.mark.usefixtures("few_layers")
def test_a_corrected_expression_has_the_names_of_the_author(tmp_path: Path) -> None:
    def fix_of(**wrong: object) -> str:
        return examination_of(CheckRequest(written(tmp_path, **wrong))).findings[0].fix

    assert fix_of(axis=-2) == "logits.softmax(dim=-1)"
    assert (
        fix_of(joined="head_out.reshape(b, t, d)")
        == "head_out.transpose(1, 2).reshape(b, t, self.num_heads * q.size(-1))"
    )
