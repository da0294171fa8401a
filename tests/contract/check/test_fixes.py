"""What a finding gives as code, put into the file, makes it right; what was not tried, or does not
hold, is said in words.
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
from support.mistakes import examine

import mhacli

pytestmark = pytest.mark.filterwarnings("ignore")

OUTSIDE = ROOT / "tests" / "contract" / "outside" / "check"
BY_DEFAULT = (
    "scale-missing",
    "causal-missing",
    "gqa-tiled",
    "cache-order",
    "cache-mask",
    "rope-of-queries-only",
    "fully-masked-row",
    "bias-reversed",
)
"""The mistakes whose fixes are tried by default: each is written in another way."""


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


@pytest.mark.parametrize("mistake", edits.parameters(mistakes.ALL, by_default=BY_DEFAULT))
def test_what_is_printed_as_code_makes_a_layer_right(mistake: Edit, tmp_path: Path) -> None:
    path, _ = mistake.write(tmp_path)
    findings = examine(mistake, path).findings
    for finding in findings:
        assert finding.fix == "" or is_code(finding.fix) == (finding.fix_tried is True)
        assert not finding.fix.endswith("(not tried)") or finding.fix_tried is None
    coded = [finding for finding in findings if finding.fix_tried]
    if coded and len(coded) == len(findings):
        assert becomes_right(path, lambda file: examine(mistake, file).verdict == "right", coded)


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
