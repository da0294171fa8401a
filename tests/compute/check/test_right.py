"""No right code is reported as wrong: layers in many styles, and wrong layers with the mistake corrected."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.attention_zoo import RIGHT, UNUSUAL, Case, Right
from support.examined import examined

from mhacli.errors import MhaError

NAMES = {
    "no-bias": "no-bias", "some-biases": "no-bias", "no-output-projection": "no-out-proj", "value-width": "d-v",
    "grouped-queries": "gqa", "fused-per-head": "fused-per-head", "strided-heads": "interleaved-heads", "softcap": "softcap",
    "other-scale": "scale", "rope-half": "rope", "rope-interleaved": "rope", "empty-row-nan": "fully-masked-row",
    "mask-keeps": "mask-form", "mask-hides": "mask-form", "mask-added": "mask-form",
}  # fmt: skip
"""What the report calls some of the choices of the zoo; of the others it says nothing."""
SLOW = ("MultiHeadedAttention", "TalkingHeads")
"""Thousands of layers are tried before an answer."""


def rows(cases: Sequence[Case]) -> list[Any]:
    return [
        pytest.param(case, id=f"{case.file}-{case.name}", marks=[pytest.mark.full] * (case.name in SLOW))
        for case in cases
    ]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("case", rows(RIGHT))
def test_a_right_layer_is_called_right(case: Right) -> None:
    examination = examined(case)
    assert examination.findings == ()
    assert examination.verdict == "right"
    assert examination.comparison is not None
    assert examination.comparison.max_abs_difference is not None
    assert examination.comparison.max_abs_difference <= examination.comparison.tolerance


@pytest.mark.parametrize("case", rows(UNUSUAL))
def test_an_unusual_layer_is_not_accused(case: Case) -> None:
    try:
        verdict = examined(case).verdict
    except MhaError:
        verdict = "unknown"
    assert verdict in case.verdict  # type: ignore[attr-defined]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("case", rows(RIGHT))
def test_design_choices_are_listed(case: Right) -> None:
    told = {choice.name for choice in examined(case).choices}
    assert {NAMES[name] for name in case.choices if name in NAMES} - told == set()


def test_the_zoo_is_read_from_its_folder() -> None:
    assert all(Path(case.path).is_file() for case in RIGHT if case.file)
