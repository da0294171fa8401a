"""What the user states, two mistakes at once, the corrected expression, and the comparison with
another implementation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support import edits, rows, some, user_code
from support.edits import Edit
from torch import Tensor, nn

import mhacli

pytestmark = pytest.mark.filterwarnings("ignore")

# A template: each step of the layer is a placeholder, which tests fill with a wrong expression and
# then with the fix that the finding gives.
MINE = """
import math
import torch
from torch import nn


class Mine(nn.Module):
    def __init__(self, d_model=40, n_heads=5):
        super().__init__()
        self.h, self.hd = n_heads, d_model // n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, rows):
        n, steps, width = rows.shape
        a = self.wq(rows).view(n, steps, self.h, self.hd).transpose(1, 2)
        b = self.wk(rows).view(n, steps, self.h, self.hd).transpose(1, 2)
        c = self.wv(rows).view(n, steps, self.h, self.hd).transpose(1, 2)
        s = {product} / {divisor}
        s = {masked}
        p = {pattern}
        z = {weighed}
        return self.wo({merged})
"""
RIGHT = {
    "product": "a @ b.transpose(-2, -1)",
    "divisor": "math.sqrt(self.hd)",
    "masked": "s",
    "pattern": "s.softmax(-1)",
    "weighed": "p @ c",
    "merged": "z.transpose(1, 2).reshape(n, steps, width)",
}
TRIANGLE = 's.masked_fill(torch.ones(steps, steps).triu(1).bool(), float("-inf"))'


def check(folder: Path, parts: Mapping[str, str], **states: object) -> object:
    path = folder / "mine.py"
    path.write_text(MINE.format(**{**RIGHT, **parts}))
    return user_code.check(user_code.load(path).Mine, **states)


def codes(examination: object) -> list[str]:
    return [finding.code for finding in examination.findings]


# ------------------------------------------------------------------------------------------ the fix


REAL = pytest.mark.real


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        ("pattern", "s.softmax(-2)"),
        ("merged", "z.reshape(n, steps, width)"),
        pytest.param("product", "b @ a.transpose(-2, -1)", marks=REAL),
        pytest.param("masked", "s * torch.ones(steps, steps).tril()", marks=REAL),
        pytest.param("pattern", "s.softmax(-1) * torch.ones(steps, steps).tril()", marks=REAL),
        pytest.param("weighed", "p.transpose(-2, -1) @ c", marks=REAL),
    ],
)
def test_the_fix_in_place_of_the_wrong_expression_makes_the_code_right(
    tmp_path, place: str, wrong: str
) -> None:
    examination = check(tmp_path, {place: wrong})
    assert examination.verdict == "wrong"
    assert check(tmp_path, {place: examination.findings[0].fix}).verdict == "right"


@pytest.mark.parametrize("divisor", some(("1.0", "self.hd", "math.sqrt(width)"), default=["1.0"]))
def test_the_fix_of_a_scale_holds_product_and_divisor(tmp_path, divisor: str) -> None:
    (finding,) = check(tmp_path, {"divisor": divisor}).findings
    assert check(tmp_path, {"product": finding.fix, "divisor": "1.0"}).verdict == "right"


@pytest.mark.parametrize(
    "divisor", some(("1.0", "self.hd", "math.sqrt(width)"), default=["self.hd"])
)
def test_a_scale_that_is_meant_is_stated_as_the_finding_says(tmp_path, divisor: str) -> None:
    (finding,) = check(tmp_path, {"divisor": divisor}).findings
    (scale,) = re.findall(r"scale[ =](\d[\d.e-]*)", finding.effect)
    assert check(tmp_path, {"divisor": divisor}, scale=float(scale)).verdict == "right"


def test_a_difference_behind_the_inputs_is_located(tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def linear(q, k, v):\n    return q.softmax(-1) @ (k.softmax(-2).mT @ v)\n")
    examination = user_code.check(f"{path}:linear")
    assert (examination.verdict, examination.departure.line) == ("unknown", 2)


def test_attention_that_overwrites_its_input_is_right(tmp_path) -> None:
    doubling = "z.transpose(1, 2).reshape(n, steps, rows.mul_(2).shape[-1])"
    assert check(tmp_path, {"merged": doubling}).verdict == "right"


def test_where_unknown_attention_departs_is_named_though_its_queries_are_scaled_first(
    tmp_path,
) -> None:
    product = {"product": "(a / math.sqrt(self.hd)) @ b.transpose(-2, -1)", "divisor": "1.0"}
    examination = check(tmp_path, {**product, "pattern": "s.sin()"})
    assert (examination.verdict, examination.departure.site) == ("unknown", "pattern")


def test_the_probe_distinguishes_a_token_that_does_not_see_itself(tmp_path) -> None:
    masked = "s.masked_fill(torch.ones(steps, steps).tril(-1) == 0, float('-inf'))"
    examination = check(tmp_path, {"masked": masked, "pattern": "s.softmax(-1).nan_to_num(0.0)"})
    seen = next(probe.message for probe in examination.probes if probe.name == "visible keys")
    assert seen == "every token sees those before it, but not itself"


def test_the_evidence_of_a_finding_has_its_numbers(tmp_path) -> None:
    (finding,) = check(tmp_path, {"pattern": "s.softmax(-2)"}).findings
    assert finding.proven
    assert 0 <= finding.error <= finding.tolerance < 1e-3
    assert all((finding.message, finding.evidence, finding.effect, finding.fix, finding.source))


# -------------------------------------------------------------------------------- mistakes together


@pytest.mark.real
@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (
            {"pattern": "s.softmax(-2)", "divisor": "1.0"},
            {"softmax-axis", "scale-missing"},
        ),
        (
            {"merged": "z.reshape(n, steps, width)", "divisor": "1.0"},
            {"merge-without-transpose", "scale-missing"},
        ),
        (
            {"masked": TRIANGLE.replace("triu(1)", "triu(2)"), "pattern": "s.softmax(-2)"},
            {"causal-off-by-one", "softmax-axis"},
        ),
    ],
)
def test_two_mistakes_are_both_named(tmp_path, parts: dict[str, str], expected: set[str]) -> None:
    examination = check(tmp_path, parts, causal="masked" in parts)
    assert set(codes(examination)) == expected
    assert all(finding.proven for finding in examination.findings)


@pytest.mark.real
def test_three_mistakes_are_unknown_and_something_to_try_is_named(tmp_path) -> None:
    parts = {
        "masked": TRIANGLE.replace("triu(1)", "triu(2)"),
        "pattern": "s.softmax(-2)",
        "divisor": "0.3",
    }
    examination = check(tmp_path, parts, scale=0.5, time_limit_s=0.5)
    assert examination.verdict == "unknown"
    assert any("against=" in step for step in examination.next_steps)


# --------------------------------------------------------------------------------------- statements


class Statement(NamedTuple):
    """What the user states about a layer with these steps, and the codes of the findings."""

    parts: Mapping[str, str]
    states: Mapping[str, object]
    expect: str = ""
    common: bool = False

    @property
    def name(self) -> str:
        return f"{'-'.join((*self.parts, *self.states))}: {self.expect or 'right'}"


STATEMENTS = (
    Statement({}, {"n_heads": 5, "scale": 8**-0.5}, common=True),
    Statement({}, {"n_heads": 2}, "heads-not-as-stated"),
    Statement({}, {"scale": 0.25}, "scale-not-as-stated"),
    Statement({}, {"n_heads": 2, "scale": 0.25}, "heads-not-as-stated scale-not-as-stated"),
    Statement({"pattern": "s.softmax(-2)"}, {"scale": 0.25}, "scale-not-as-stated softmax-axis"),
    Statement({"divisor": "4.0"}, {"scale": 0.25}, common=True),
    Statement({"masked": TRIANGLE}, {"causal": True}, common=True),
    Statement({}, {"causal": True}, "causal-missing", common=True),
    Statement({}, {"causal": True, "scale": 0.25}, "scale-not-as-stated causal-missing"),
)


@pytest.mark.parametrize("statement", rows(STATEMENTS, lambda one: one.name))
def test_a_statement_that_the_code_contradicts_is_a_mistake(tmp_path, statement: Statement) -> None:
    examination = check(tmp_path, statement.parts, **statement.states)
    expected = statement.expect.split()
    assert codes(examination) == expected
    assert examination.verdict == ("wrong" if expected else "right")
    messages = {finding.code: finding.message for finding in examination.findings}
    if "scale-not-as-stated" in expected:
        assert "0.25" in messages["scale-not-as-stated"]
    if "heads-not-as-stated" in expected:
        assert "5" in messages["heads-not-as-stated"]
        assert "2" in messages["heads-not-as-stated"]


@pytest.mark.real
@pytest.mark.parametrize(
    ("layer", "layout"), [("RotaryAttention", "half"), ("ComplexLlama", "interleaved")]
)
def test_a_stated_layout_of_rotary_positions_is_that_of_the_code(layer: str, layout: str) -> None:
    thing = getattr(user_code.load(user_code.ZOO / "positions.py"), layer)
    other = {"half": "interleaved", "interleaved": "half"}[layout]
    is_causal = layer == "ComplexLlama"
    assert user_code.check(thing, rope=layout, causal=is_causal).verdict == "right"
    assert codes(user_code.check(thing, rope=other, causal=is_causal)) == ["rope-pairing"]


@pytest.mark.real
def test_the_options_of_the_command_are_those_statements(mha, tmp_path) -> None:
    (tmp_path / "mine.py").write_text(MINE.format(**RIGHT))
    document = mha("check", "mine.py:Mine", "--heads", "5", "--causal", "--json", code=3).json
    assert [finding["code"] for finding in document["findings"]] == ["causal-missing"]


# --------------------------------------------------------------------------- another implementation

SIZES = {
    "fused:VisionAttention": {"dim": 24, "num_heads": 3},
    "separate:SelfAttention": {"embed_dim": 24, "num_heads": 3},
    "odd:NoAttention": {"embed_dim": 24, "num_heads": 3},
    "torch": {"embed_dim": 24, "num_heads": 3, "batch_first": True},
}
"""The arguments of layers; functions have none."""


def load(layer: str, path: Path | None = None) -> object:
    """A layer of the zoo, or of a changed file, or that of torch."""
    if layer == "torch":
        from torch import nn

        return nn.MultiheadAttention
    file, _, name = layer.partition(":")
    return getattr(user_code.load(path or user_code.ZOO / f"{file}.py"), name)


def compare(one: str, other: str, path: Path | None = None) -> object:
    """The comparison of two layers, of which the second may stand in a changed file."""
    return user_code.check(
        load(one),
        arguments=SIZES.get(one, {}),
        against=load(other, path),
        against_arguments=SIZES.get(other, {}),
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("fused:VisionAttention", "separate:SelfAttention"),
        pytest.param("separate:SelfAttention", "fused:VisionAttention", marks=pytest.mark.real),
        ("separate:SelfAttention", "torch"),
        pytest.param("torch", "fused:VisionAttention", marks=pytest.mark.real),
        ("separate:SelfAttention", "separate:SelfAttention"),
        ("functions:attend", "functions:attend_by_einsum"),
    ],
)
def test_the_same_attention_written_otherwise_gives_the_same_output(one: str, other: str) -> None:
    examination = compare(one, other)
    assert (examination.verdict, examination.findings) == ("right", ())
    assert examination.comparison.max_abs_difference <= examination.comparison.tolerance
    assert examination.against


def test_two_that_give_no_number_are_not_the_same() -> None:
    class Undefined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            return self.query(x) * torch.nan

    assert user_code.check(Undefined(), against=Undefined()).verdict == "unknown"


DIFFERENCES = (
    Edit(
        layer="separate:SelfAttention",
        old="energy.softmax(dim=-1)",
        new="energy.softmax(dim=-2)",
        expect="pattern",
        common=True,
    ),
    Edit(
        layer="separate:SelfAttention",
        old="self.head_dim**-0.5",
        new="self.head_dim**-1.0",
        expect="scores",
        common=True,
    ),
    Edit(
        layer="separate:SelfAttention",
        old="weights @ v",
        new="weights.mT @ v",
        expect="z",
        common=True,
    ),
    Edit(
        layer="separate:SelfAttention",
        old="context.transpose(1, 2)",
        new="context",
        expect="concat",
        common=True,
    ),
    Edit(
        layer="functions:attend",
        old=" / math.sqrt(q.size(-1))",
        new="",
        expect="scores",
        common=True,
    ),
)
"""What is expected is the site of the first difference."""
SAME_AS = {
    "separate:SelfAttention": "fused:VisionAttention",
    "functions:attend": "functions:attend_by_einsum",
}
"""The same attention, written otherwise."""


@pytest.mark.parametrize("edit", edits.parameters(DIFFERENCES))
def test_the_first_difference_of_two_implementations_is_located(tmp_path, edit: Edit) -> None:
    path, _ = edit.write(tmp_path)
    one = SAME_AS[edit.layer]
    examination = compare(one, edit.layer, path)
    assert (examination.verdict, codes(examination)) == ("wrong", ["differs"])
    assert examination.comparison.max_abs_difference > 1000 * examination.comparison.tolerance
    listed = re.findall(r"largest difference (\S+)", examination.findings[0].evidence)
    assert f"{examination.comparison.max_abs_difference:.2e}" == max(listed, key=float)
    difference = examination.departure
    assert difference.site == edit.expect
    lines = path.read_text().splitlines()
    assert edit.new in lines[difference.other_line - 1]
    assert difference.file.endswith(f"{one.partition(':')[0]}.py")
    assert difference.line


@pytest.mark.parametrize(
    ("one", "other"),
    [("separate:SelfAttention", "functions:attend"), ("separate:SelfAttention", "odd:NoAttention")],
)
def test_two_that_cannot_have_the_same_weights_are_not_compared(one: str, other: str) -> None:
    with pytest.raises(mhacli.MhaError) as raised:
        compare(one, other)
    assert raised.value.exit_code == 1


@pytest.mark.real
def test_the_command_compares_with_another_implementation(mha, tmp_path) -> None:
    (tmp_path / "mine.py").write_text(MINE.format(**RIGHT | {"pattern": "s.softmax(-2)"}))
    words = "check mine.py:Mine --arg d_model=24 --arg n_heads=3 --json --against"
    against = ("torch.nn:MultiheadAttention", "--against-arg", "batch_first=true")
    document = mha(*words.split(), *against, code=3).json
    assert document["against"] == "torch.nn:MultiheadAttention"
    assert document["departure"]["site"] == "pattern"
    assert "s.softmax(-2)" in document["departure"]["source"]
