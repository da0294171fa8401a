"""Every wrong layer of the zoo is named by its mistake, with a proof or a probe, and docs/CHECK.md lists how. `python
tests/compute/check/test_wrong.py` rewrites the table of docs/CHECK.md between the comments `mistakes` and `/mistakes`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.attention_zoo import CODES, WRONG, Wrong
from support.examined import examined

from mhacli.attention.mistakes import BY_CODE, MISTAKES

DOCUMENT = Path(__file__).parents[3] / "docs" / "CHECK.md"
BETWEEN = re.compile(r"(?<=<!-- mistakes -->\n).*?(?=<!-- /mistakes -->)", re.DOTALL)
NOT_TOLD = ("ForgetfulAttention",)
"""What only shows where nobody looks: in the mean of training with dropout of scores."""
TOLD = [case for case in WRONG if case.name not in NOT_TOLD]


def names(cases: Iterable[Wrong]) -> list[str]:
    return [f"{case.file}-{case.name}" for case in cases]


@pytest.mark.sampled(14)
@pytest.mark.parametrize("case", TOLD, ids=names(TOLD))
def test_a_wrong_layer_is_named_by_its_mistake(case: Wrong) -> None:
    examination = examined(case)
    assert examination.verdict == "wrong"
    first, *others = [finding.code for finding in examination.findings]
    assert first in (case.code, *case.also)
    assert set(others) <= {case.code, *case.also}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("case", TOLD, ids=names(TOLD))
def test_its_line_stands_in_the_layer(case: Wrong) -> None:
    finding = examined(case).findings[0]
    if finding.line is None:
        assert case.name in ("attend_and_drop",)
        return
    text = case.path.read_text(encoding="utf-8").splitlines()
    assert finding.file == str(case.path)
    assert finding.source in text[finding.line - 1]


@pytest.mark.full
def test_most_lines_are_those_of_the_mistake() -> None:
    near = [case for case in TOLD if abs((examined(case).findings[0].line or 0) - case.line) <= 8]
    assert len(near) >= 0.9 * len(TOLD), names(set(TOLD) - set(near))


def shape_of(expression: str) -> str:
    """An expression without its names, which are the author's own, or what stands for a name that the author lacks."""
    for written, name in (
        (r"\w+\.size\(-1\)", "d_head"),
        (r"torch\.ones\(\w+, \w+\)\.tril\(\)", "mask"),
        (r"\(\w+ @ \w+\)", "z"),
    ):
        expression = re.sub(written, name, expression)
    return re.sub(r"(self\.)?[A-Za-z_]\w*", "name", expression.partition("#")[0])


@pytest.mark.sampled(14)
@pytest.mark.parametrize("case", TOLD, ids=names(TOLD))
def test_a_proof_holds_within_rounding_and_every_finding_has_a_fix(case: Wrong) -> None:
    for finding in examined(case).findings:
        entry = next(entry for entry in MISTAKES if entry.message == finding.message)
        in_torch = entry.fix_in_torch if "scaled_dot_product_attention" in finding.source else ""
        assert shape_of(finding.fix) == shape_of(in_torch or entry.fix)
        assert finding.evidence
        if finding.proven:
            assert finding.error is not None
            assert finding.tolerance is not None
            assert finding.error <= finding.tolerance


@pytest.mark.full
def test_every_promised_code_is_found_in_a_layer() -> None:
    told = {finding.code for case in TOLD for finding in examined(case).findings}
    assert set(CODES) - told == set()
    assert len(told) >= 34


def row(code: str) -> str:
    """The findings for layers with a mistake, as a row of the table; for a mistake without a layer, the variants."""
    cases = [case for case in TOLD if case.code == code and examined(case).findings[0].code == code]
    failed = {probe.name: None for case in cases for probe in examined(case).probes if probe.ok is False}
    proofs = dict.fromkeys(
        re.split(r": largest|\n", finding.evidence)[0].removeprefix("matches exactly if ")
        for case in cases
        for finding in examined(case).findings[:1]
        if finding.proven
    )
    if not cases:
        proofs = dict.fromkeys(way.description for entry in MISTAKES if entry.code == code for way in entry.variants)
    entry = BY_CODE[code]
    cells = (f"`{code}`", entry.message, f"`{entry.looks_like}`", ", ".join(failed) or "–", "; ".join(proofs) or "–")
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def table() -> str:
    """The table of all codes."""
    head = "| code | mistake | as people write it | probes that fail | matches exactly if |\n|---|---|---|---|---|"
    return "\n".join([head, *(row(code) for code in dict.fromkeys(entry.code for entry in MISTAKES))])


@pytest.mark.full
def test_the_table_is_what_is_found() -> None:
    (shown,) = BETWEEN.findall(DOCUMENT.read_text(encoding="utf-8"))
    assert shown == f"{table()}\n"


if __name__ == "__main__":
    DOCUMENT.write_text(BETWEEN.sub(lambda _: f"{table()}\n", DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
