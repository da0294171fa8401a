"""Padding that a model marks itself, the meaning of `attention_mask`, what stands in the places of
padding, and the memory of a decoder. Plain passes in these files show which ones are right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import some, user_code

pytestmark = pytest.mark.filterwarnings("ignore")

MODELS = user_code.load(Path(__file__).with_name("cases") / "padding.py")

RIGHT_PADDING: dict[str, bool | None] = {
    "Encoder": True,
    "AlongQueries": False,
    "UpsideDown": False,
    "NotHandedOn": False,
    "AboveZero": True,
    "AboveZeroNotHandedOn": False,
    "EqualToZeroNotHandedOn": False,
    "Pooled": True,
    "PooledWithPadding": False,
    "MeanOverAll": None,
    "EndOfText": None,
    "PooledAtTheEnd": None,
    "BoolNotHandedOn": False,
    "MaskAdded": False,
    "InvertedWhole": False,
    "ByMask": True,
    "ByMaskTurned": False,
    "Translator": True,
    "SourceSeesPadding": False,
    "DecoderSeesPadding": False,
}


def examined(name: str, **how: Any) -> Any:
    return user_code.check(getattr(MODELS, name)(), length=64, **how)


def answers(report: Any) -> dict[str, bool | None]:
    return {behaviour.name: behaviour.ok for behaviour in report.behaviour}


@pytest.mark.parametrize(
    "name",
    some(
        RIGHT_PADDING,
        default=(
            "Encoder",
            "AlongQueries",
            "EqualToZeroNotHandedOn",
            "MaskAdded",
            "PooledAtTheEnd",
            "ByMaskTurned",
        ),
    ),
)
def test_a_text_gives_the_same_padded_as_alone(name: str) -> None:
    report = examined(name)
    expected = RIGHT_PADDING[name]
    assert answers(report)["right-padding"] is expected
    assert [each.code for each in report.findings] == ["padding-leak"] * (expected is False)


ADDED = """FILE
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x, attention_mask: TYPE = None):
        scores = self.q(x) @ self.k(x).mT * x.shape[-1] ** -0.5
        if attention_mask is not None:
            # COMMENT
            scores = scores + attention_mask[:, None]
        return scores.softmax(-1) @ self.v(x)
"""
GIVEN = "lambda m, T: m(torch.randn(2, T, 32), attention_mask={}(2, T))"


@pytest.mark.parametrize(
    ("stated", "example", "is_right"),
    [
        ({}, None, True),
        ({"COMMENT": "0 = keep, -inf = masked"}, None, True),
        ({"COMMENT": "axis 1 is tokens"}, None, True),
        ({"COMMENT": "attention_mask: 0.0 for keys, -10000.0 for masked keys"}, None, True),
        ({"COMMENT": "the mask of step 1: mask scores; token 0 is padding"}, None, True),
        ({"COMMENT": "added to the scores; causal: True for masked attention"}, None, True),
        ({"COMMENT": "attention_mask: float and not boolean"}, None, True),
        ({"FILE": '"""Additive masks; other code has 1 = real, an additive mask."""'}, None, True),
        ({}, GIVEN.format("torch.zeros"), True),
        ({"FILE": '"""A mask of padding (1 = real, 0 = pad)."""'}, None, False),
        ({"COMMENT": "attention_mask is 0 for padding"}, None, False),
        ({"FILE": '"""The mask:\n\n- 1 for real tokens."""'}, None, False),
        ({"TYPE": "torch.BoolTensor | None"}, None, False),
        ({"TYPE": "torch.LongTensor | None"}, None, False),
        ({}, GIVEN.format("torch.ones"), False),
        ({}, GIVEN.replace("{}(2, T)", "torch.ones(2, T).bool()"), False),
    ],
)
def test_a_mask_is_what_the_code_or_the_example_states(
    tmp_path: Path, stated: dict[str, str], example: str | None, is_right: bool
) -> None:
    path = tmp_path / "added.py"
    text = ADDED
    for word, what in {"FILE": "", "TYPE": "object", "COMMENT": "", **stated}.items():
        text = text.replace(word, what)
    path.write_text(text)
    report = user_code.check(f"{path}:Layer", example=example, length=32)
    codes = [finding.code for finding in report.findings]
    assert codes == ([] if is_right else ["mask-added-as-01"])
    assert report.ok is is_right
    if is_right:
        assert report.compared is not None
        assert [each for each in report.compared.arguments if "−∞" in each]


@pytest.mark.parametrize("length", [2, 3])
def test_a_text_of_few_tokens_shows_no_leak_of_positions(length: int) -> None:
    report = user_code.check(MODELS.WithPlaces(), length=length, causal=True)
    assert (report.findings, answers(report)["left-padding"]) == ((), None)


def test_a_meaning_that_is_stated_counts() -> None:
    assert examined("ByMaskTurned", mask_means="hide").verdict != "wrong"
    assert answers(examined("ByMask", mask_means="hide"))["right-padding"] is False


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LayerByMask", True),
        ("LayerWithoutMask", False),
        pytest.param("CausalByMask", True, marks=pytest.mark.real),
        ("CausalFromTheLeft", False),
    ],
)
def test_what_stands_in_the_places_of_padding_changes_nothing(name: str, expected: bool) -> None:
    report = examined(name)
    assert ("padding-leak" in {each.code for each in report.findings}) is not expected
    if expected:
        assert answers(report)["padding-content"] is True


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("WithoutPositions", True),
        ("OneTooMany", False),
        ("OneTooManyById", False),
        ("WithPlaces", None),
        pytest.param("WithPlacesInScores", None, marks=pytest.mark.real),
    ],
)
def test_only_a_model_with_positions_may_change_behind_padding(
    name: str, expected: bool | None
) -> None:
    report = examined(name, causal=True)
    assert answers(report)["left-padding"] is expected
    assert [each.code for each in report.findings] == ["padding-leak"] * (expected is False)


MEMORY: dict[str, bool] = {
    "Translator": True,
    "TranslatorOfColumns": True,
    "NeverRead": False,
    "OfAnother": False,
    "DecoderLayer": True,
    "ValuesOfTarget": False,
    "RowsOfMemory": False,
    "MemoryNeverRead": False,
    "MemoryOfAnother": False,
    "SameLengthOnly": True,
}


@pytest.mark.parametrize(
    "name",
    some(
        MEMORY,
        default=(
            "Translator",
            "TranslatorOfColumns",
            "OfAnother",
            "ValuesOfTarget",
            "SameLengthOnly",
        ),
    ),
)
def test_each_text_reads_its_own_memory(name: str) -> None:
    report = examined(name)
    codes = {each.code for each in report.findings}
    if MEMORY[name]:
        assert answers(report)["memory"] is True
        assert not codes
    else:
        assert codes & {"memory-misread", "batch-leak"}


def test_models_without_a_mask_and_a_memory_pay_no_pass() -> None:
    report = examined("EndOfText")
    asked = {each.name: each for each in report.behaviour}
    for name in ("right-padding", "padding-content", "memory", "packing"):
        assert asked[name].was_omitted
    assert 0 < report.n_passes < examined("Encoder").n_passes
