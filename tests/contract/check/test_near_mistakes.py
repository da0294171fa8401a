"""Mistakes that are easily taken for others get their own names, and the part of a leak is named
wherever its time stands.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import user_code

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]

FILE = user_code.load(Path(__file__).parent / "cases" / "near_mistakes.py")

NAMED = {
    "Averaged": "heads-averaged",
    "Summed": "heads-summed",
    "FirstColumns": "value-not-split",
    "OnePattern": "pattern-of-one-head",
    "Multiplied": "mask-multiplied",
    "Noisy": "not-repeatable",
    "DroppedByHand": "dropout-in-eval",
    "HalfStill": "",
    "HalfStillByHead": "rope-axis",
}


@pytest.mark.parametrize("name", NAMED)
def test_each_mistake_has_its_own_name(name: str) -> None:
    examination = user_code.check(getattr(FILE, name))
    assert [finding.code for finding in examination.findings] == NAMED[name].split()
    assert examination.verdict == ("wrong" if NAMED[name] else "right")


@pytest.mark.parametrize(
    ("model", "part"),
    [("Convolutions", "blocks.1.norm (InstanceNorm1d)"), ("Patches", "mixers.1 (Mixed)")],
)
def test_the_part_that_sees_the_future_is_named(model: str, part: str) -> None:
    example = {"Patches": lambda m, t: m(torch.randn(2, t, 6))}.get(model)
    module = getattr(FILE, model)(leaky=1)
    examination = user_code.check(module, causal=True, length=64, example=example)
    (finding,) = examination.findings
    assert finding.message.endswith(f"first in {part}")


def test_a_causal_model_without_attention_is_consistent() -> None:
    report = user_code.check(FILE.Convolutions(), causal=True, length=48)
    assert report.verdict == "consistent"
    assert "48 tokens" in report.sentence
