"""Every known mistake, made in right attention of several styles, is named with its code, its line
and a proof.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support import edits, mistakes
from support.documents import ROOT
from support.edits import Edit
from support.mistakes import CAUSAL, examine

pytestmark = pytest.mark.filterwarnings("ignore")

USED_AT = {
    "SelfAttention": "weights @ v",
    "StoryAttention": "self.tril[:T, :T]",
    "VisionAttention": "* self.scale",
    "LengthsAttention": "scores = q @ k.mT",
    "TransformerAttention": "q / self.temperature",
    "T5Attention": "scores += self",
    "AlibiAttention": "attn_mask=self.penalty",
    "PartialNeoX": "torch.cat((part, rest)",
    "ComplexLlama": "pairs * phases",
    "RotaryAttention": "q = q * angles.cos()",
    "PastAttention": "torch.cat([past_k, k]",
    "RotaryPast": "angle = place",
    "SeparateCaches": "torch.cat([past_k, k]",
    "MultiHeadedAttention": "torch.matmul(p_attn, value)",
}
"""Where a layer uses what another line computes: a finding may name this line as well."""
NEARBY = 2
"""A mistake and what it leaves out take several lines."""


STATED = {"heads-not-as-stated", "scale-not-as-stated"}
"""Codes of statements that the code contradicts; see `test_statements.py`."""


def is_at(mistake: Edit, path: Path, line: int, named: int | None) -> bool:
    """Whether a named line is that of the mistake, or the one that uses its result."""
    if named is None:
        return False
    if abs(named - line) <= NEARBY:
        return True
    words = USED_AT.get(mistake.name)
    return words is not None and words in path.read_text().splitlines()[named - 1]


def test_each_mistake_can_be_made_in_its_layer(tmp_path: Path) -> None:
    for mistake in (*mistakes.ALL, *mistakes.LINE_WRONG_TODAY, *mistakes.WITHOUT_CODE_TODAY):
        path, line = mistake.write(tmp_path)
        first = mistake.new.split("\n")[0]
        assert first in path.read_text().splitlines()[line - 1]


@pytest.mark.parametrize("mistake", edits.parameters(mistakes.ALL))
def test_a_mistake_is_named_with_its_line_and_a_proof(mistake: Edit, tmp_path: Path) -> None:
    path, line = mistake.write(tmp_path)
    examination = examine(mistake, path)
    codes = {finding.code for finding in examination.findings}
    assert examination.verdict == "wrong"
    assert codes
    assert codes <= mistake.codes
    lines = [finding.line for finding in examination.findings]
    if mistake.is_line_named:
        assert any(is_at(mistake, path, line, named) for named in lines)
    text = path.read_text().splitlines()
    for finding in examination.findings:
        assert finding.file is None or Path(finding.file) == path
        assert not finding.source or finding.source.strip() in text[finding.line - 1]


@pytest.mark.parametrize(
    ("layer", "old", "new", "code"),
    [
        (
            "positions:PartialNeoX",
            "q = self.rotate(q, t)\n        k = self.rotate(k, t)",
            "q, k, v = self.rotate(q, t), self.rotate(k, t), self.rotate(v, t)",
            "rope-of-values",
        ),
        (
            "positions:PartialNeoX",
            "k = self.rotate(k, t)",
            "k = self.rotate(k, t)\n        v = self.rotate(v, t)",
            "rope-of-values",
        ),
        (
            "positions:ComplexLlama",
            "k = rot(k, self.phases[:t])",
            "k = rot(k, self.phases[1 : t + 1])",
            "rope-offset",
        ),
        (
            "cached:RotaryPast",
            "torch.arange(start, start + x.size(2), ",
            "torch.arange(x.size(2), ",
            "cache-position",
        ),
    ],
    ids=["on-one-line", "on-a-line-each", "other-positions", "made-from-0"],
)
def test_the_call_of_a_right_helper_or_the_positions_in_it_are_named(
    layer: str, old: str, new: str, code: str, tmp_path: Path
) -> None:
    mistake = Edit(layer, old, new, code, states=CAUSAL)
    path, line = mistake.write(tmp_path)
    (finding,) = examine(mistake, path).findings
    assert finding.code == code
    assert finding.line == line + new.count("\n")


DROPOUT_BY_HAND = (
    "att * torch.bernoulli(torch.full_like(att, 1 - self.attn_drop.p)) / (1 - self.attn_drop.p)"
)
TRANSPOSED = Edit(
    layer="separate:StoryAttention",
    old="torch.tril(",
    new="torch.triu(",
    expect="causal-transposed",
    states=CAUSAL,
)


@pytest.mark.parametrize(
    ("mistake", "fix"),
    [
        (
            TRANSPOSED._replace(also=(("self.attn_drop(att)", "torch.dropout(att, 0.5, True)"),)),
            "att = torch.dropout(att, 0.5, self.training)",
        ),
        (
            TRANSPOSED._replace(also=(("self.attn_drop(att)", "nn.Dropout(0.5)(att)"),)),
            "att = F.dropout(att, 0.5, training=self.training)",
        ),
        (
            TRANSPOSED._replace(also=(("self.attn_drop(att)", DROPOUT_BY_HAND),)),
            None,
        ),
        (
            Edit(
                layer="fused:CausalAttention",
                old="dropout_p=p, is_causal=True",
                new="None, 0.5",
                expect="causal-missing",
                states=CAUSAL,
            ),
            "y = F.scaled_dot_product_attention(q, k, v, None, 0.5 if self.training else 0.0)",
        ),
    ],
    ids=["torch.dropout", "nn.Dropout", "by-hand", "kernel"],
)
def test_a_mistake_beside_dropout_that_always_acts_is_named(
    mistake: Edit, fix: str | None, tmp_path: Path
) -> None:
    path, _ = mistake.write(tmp_path)
    fixes = {finding.code: finding.fix for finding in examine(mistake, path).findings}
    assert {*fixes} == {mistake.expect, "dropout-in-eval"}
    assert fix in (None, fixes["dropout-in-eval"])


@pytest.mark.parametrize("mistake", edits.parameters(mistakes.LINE_WRONG_TODAY))
@pytest.mark.xfail(strict=True, reason="the line of another operation is named")
def test_the_line_is_that_of_the_mistake(mistake: Edit, tmp_path: Path) -> None:
    path, line = mistake.write(tmp_path)
    (finding,) = examine(mistake, path).findings
    assert is_at(mistake, path, line, finding.line)


@pytest.mark.real
@pytest.mark.parametrize("mistake", edits.parameters(mistakes.WITHOUT_CODE_TODAY))
@pytest.mark.xfail(strict=True, reason="the verdict is unknown, or another code is named")
def test_a_mistake_that_is_not_named_today_is_named(mistake: Edit, tmp_path: Path) -> None:
    path, _ = mistake.write(tmp_path)
    codes = {finding.code for finding in examine(mistake, path, time_limit_s=0.5).findings}
    assert codes
    assert codes <= mistake.codes


def test_every_code_that_the_program_knows_is_made(mha) -> None:
    terms = mha("explain", "--json").json["terms"]
    known = {term["name"] for term in terms if term["group"] == "mistake"}
    made = {code for mistake in mistakes.ALL for code in mistake.codes}
    assert known - made == STATED
    page = (ROOT / "docs" / "CHECK.md").read_text()
    assert [code for code in known if f"`{code}`" not in page] == []
