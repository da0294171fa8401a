"""Attention with biases, sinks and rotations: right code passes whatever its names, and mistakes are named."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from support.attention_zoo import Case
from support.examined import examination_of, examined, written
from support.positioned import BIASED, FILE, NORMED, RIGHT, TURNED, Slip

from mhacli.requests.user_code import CheckRequest, TargetRequest
from mhacli.results.check import Examination

ALL = (*BIASED, *TURNED, *NORMED)


def case_of(layer: str) -> Case:
    return Case("positioned", layer, arguments="")


@functools.cache
def right(layer: str) -> Examination:
    return examined(case_of(layer), f"{FILE}:{layer}")


def wrong(slip: Slip, folder: Path) -> Examination:
    return examined(case_of(slip.layer), written(folder, case_of(slip.layer), slip.text()))


@pytest.mark.parametrize("layer", RIGHT)
def test_a_right_layer_that_knows_places_is_called_right(layer: str) -> None:
    examination = right(layer)
    assert (examination.verdict, examination.findings) == ("right", ())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "slip",
    # what has no code is unknown, after thousands of layers
    [
        pytest.param(slip, id=f"{slip.layer}-{slip.code}-{n}", marks=[pytest.mark.full] * (slip.code is None))
        for n, slip in enumerate(ALL)
    ],
)
def test_a_mistake_beside_what_is_read_from_the_run_is_named(slip: Slip, tmp_path: Path) -> None:
    examination = wrong(slip, tmp_path)
    assert examination.verdict != "right"
    if slip.code is not None:
        assert [finding.code for finding in examination.findings] == [slip.code]


@pytest.mark.parametrize(("layer", "own"), [("T5", 1.0), pytest.param("SwinCosine", None, marks=pytest.mark.full)])
def test_a_stated_scale_is_the_only_candidate(layer: str, own: float | None) -> None:
    def verdict(scale: float) -> str:
        return examination_of(CheckRequest(TargetRequest(f"{FILE}:{layer}"), scale=scale)).verdict

    assert verdict(0.3) != "right"
    assert own is None or verdict(own) == "right"


def test_a_bias_is_listed_as_a_choice_with_its_line() -> None:
    (bias,) = (choice for choice in right("T5").choices if choice.name == "score-bias")
    number = next(n for n, line in enumerate(FILE.read_text().splitlines(), 1) if "scores += self.compute_bias" in line)
    assert bias.message == f"score bias [head, query, key], read from the run at positioned.py:{number}"


def test_partial_rotation_is_listed_with_its_columns_pairs_and_base() -> None:
    told = {choice.name: choice.message for choice in right("PartialNeoX").choices}
    assert told["rope"] == "rotary positions rotate the first 8 of 16 columns, column j with column j + d/2, base 10000"
