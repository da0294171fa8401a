"""Every known mistake, made in right attention of several styles, is named with its code, its line
and a proof. What its finding gives as code, put into the file, makes it right; what was not tried,
or does not hold, is said in words.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path

import pytest
from support import edits, mistakes, user_code
from support.documents import ROOT
from support.edits import Edit
from support.mistakes import CAUSAL, examine

import mhacli

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
OUTSIDE = ROOT / "tests" / "contract" / "outside" / "check"
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


def likeness(node: ast.AST, code: str) -> float:
    return SequenceMatcher(None, ast.unparse(node), code).ratio()


def mended(text: str, finding: object) -> Iterator[str]:
    """The file with the fix of a finding in place of its statement, or of each expression in it,
    those that read most like it first.
    """
    lines = text.splitlines(keepends=True)
    starts = [sum(map(len, lines[:n])) for n in range(len(lines))]
    around = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and node.lineno <= finding.line <= node.end_lineno
    ]
    statement = max(around, key=lambda node: (node.lineno, node.col_offset))
    places = [node for node in ast.walk(statement) if isinstance(node, ast.expr)]
    places.sort(key=lambda node: likeness(node, finding.fix), reverse=True)
    if not isinstance(ast.parse(finding.fix).body[0], ast.Expr):
        places = [statement]
    for node in places:
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        fix = finding.fix if node is statement else f"({finding.fix})"
        yield text[:start] + fix + text[end:]


def is_code(fix: str) -> bool:
    try:
        return bool(ast.parse(fix).body)
    except SyntaxError:
        return False


def becomes_right(path: Path, check: object, findings: object) -> bool:
    """Whether the file becomes right by the fixes of all findings."""
    first, *others = findings
    for text in mended(path.read_text(), first):
        written = path.with_name(f"mended_{path.name}")
        written.write_text(text)
        try:
            is_right = becomes_right(written, check, others) if others else check(written)
        except (SyntaxError, mhacli.MhaError):
            is_right = False
        if is_right:
            return True
    return False


def test_each_mistake_can_be_made_in_its_layer(tmp_path: Path) -> None:
    for mistake in (*mistakes.ALL, *mistakes.LINE_WRONG_TODAY, *mistakes.WITHOUT_CODE_TODAY):
        path, line = mistake.write(tmp_path)
        first = mistake.new.split("\n")[0]
        assert first in path.read_text().splitlines()[line - 1]


@pytest.mark.parametrize("mistake", edits.parameters(mistakes.ALL))
def test_a_mistake_is_named_with_its_line_a_proof_and_a_fix(mistake: Edit, tmp_path: Path) -> None:
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
        assert finding.fix == "" or is_code(finding.fix) == (finding.fix_tried is True)
        assert not finding.fix.endswith("(not tried)") or finding.fix_tried is None
    coded = [finding for finding in examination.findings if finding.fix_tried]
    if len(coded) == len(examination.findings):
        assert becomes_right(path, lambda file: examine(mistake, file).verdict == "right", coded)


def test_a_length_may_be_stated_beside_a_context_of_another_width() -> None:
    layer = user_code.load(user_code.ZOO / "fused.py").ContextAttention
    arguments = {"query_dim": 24, "context_dim": 20, "heads": 3, "dim_head": 7}
    assert user_code.check(layer, arguments=arguments, length=32).verdict == "right"


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


@pytest.mark.parametrize(
    ("path", "name", "arguments"),
    [
        (ROOT / "sample_texts" / "my_gpt.py", "GPT", {}),
        (ROOT / "sample_texts" / "my_attention.py", "MultiHeadAttention", {"n_heads": 8}),
        *(
            pytest.param(OUTSIDE / f"{file}.py", name, {}, marks=pytest.mark.real)
            for file, name in (
                ("causal_flag_missing", "CausalSelfAttention"),
                ("mask_negative_product", "NodeHead"),
                ("mask_of_other_text", "HeadsOutside"),
                ("names_reused", "Reusing"),
                ("eval_dropout_two_layers", "NoisyKernel"),
            )
        ),
    ],
)
def test_what_is_printed_as_code_makes_an_example_right(
    path: Path, name: str, arguments: dict[str, int], tmp_path: Path
) -> None:
    copy = tmp_path / path.name
    copy.write_text(path.read_text())

    def check(file: Path) -> object:
        return user_code.check(getattr(user_code.load(file), name), arguments=arguments)

    coded = [finding for finding in check(copy).findings if finding.fix_tried]
    assert coded
    assert becomes_right(copy, lambda file: check(file).verdict == "right", coded)


WORDS = {
    "gqa_tiled_tokens_first.py:Grouped": False,
    "late_layer.py:FreshOutput": None,
}


@pytest.mark.real
@pytest.mark.parametrize("target", WORDS)
def test_what_no_code_in_one_place_mends_is_said_in_words(target: str) -> None:
    file, _, name = target.partition(":")
    (finding,) = user_code.check(getattr(user_code.load(OUTSIDE / file), name)).findings
    assert finding.fix_tried is WORDS[target]
    assert re.fullmatch(r"[a-zA-Z ,()0-9−√-]+", finding.fix)
