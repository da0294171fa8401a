"""A circuit of two heads that is written by hand: what `mha effect` says of it, from the command line to the proof."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.induction import DOING, N_HEADS, N_LAYERS, WORDS, induction_checkpoint, logits_by_hand

from mhacli.cli.app import main

TEXT, ANSWER = "c a d b e f a", "d"
"""After the first `a` comes `d`."""


@pytest.fixture
def effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The document of `mha effect` for a circuit of some sharpness."""

    def run(sharpness: float, *options: str) -> Any:
        folder = induction_checkpoint(tmp_path / f"{sharpness}", sharpness)
        monkeypatch.setattr(sys, "argv", ["mha", "effect", TEXT, "--model", folder, "--json", *options])
        assert main() == 0
        return json.loads(capsys.readouterr().out)

    return run


def changes_by_hand(sharpness: float) -> dict[tuple[int, int], float]:
    """How much the removal of each of the two heads changes the logit of the answer."""
    word = WORDS.index(ANSWER)
    plain = logits_by_hand(TEXT, sharpness)[word]
    return {head: logits_by_hand(TEXT, sharpness, without=head)[word] - plain for head in DOING}


@pytest.mark.parametrize("sharpness", [2.0, 20.0])
def test_two_heads_carry_everything_and_the_others_nothing_at_all(effect: Any, sharpness: float) -> None:
    document = effect(sharpness)
    found = {(each["layer"], each["head"]): each["d_logit"] for each in document["effects"]}
    assert document["effect"]["target"] == ANSWER
    assert len(found) == N_LAYERS * N_HEADS
    for head, change in changes_by_hand(sharpness).items():
        assert found.pop(head) == pytest.approx(change, abs=1e-4)
    assert set(found.values()) == {0}


def test_the_edge_that_the_induction_head_reads_is_the_one_behind_the_first_copy(effect: Any) -> None:
    document = effect(20.0, "--edges", "--head", "1.1")
    strongest = max(document["effects"], key=lambda each: abs(each["d_logit"]))
    assert strongest["key"] == TEXT.split().index("a") + 1
    assert strongest["d_logit"] == pytest.approx(-logits_by_hand(TEXT, 20.0)[WORDS.index(ANSWER)], abs=1e-3)


def test_first_order_calls_the_head_dead_that_decides_and_the_screening_says_so(effect: Any) -> None:
    mild, sharp = (effect(sharpness, "--screen", "4", "--target", ANSWER) for sharpness in (1.0, 20.0))
    estimates, changes = (
        {(each["layer"], each["head"]): each[field] for each in sharp["effects"]}
        for field in ("first_order", "d_logit")
    )
    assert len(estimates) == 8
    assert abs(estimates[DOING[0]]) < 1e-3 < 1 < abs(changes[DOING[0]])
    assert sharp["effect"]["screening"]["correlation"] == pytest.approx(14 / (14 * 24.5) ** 0.5)
    assert mild["effect"]["screening"]["correlation"] > 0.95


def test_a_screening_removes_the_largest_estimates_and_as_many_others(effect: Any) -> None:
    document = effect(2.0, "--screen", "2")
    heads = [(each["layer"], each["head"]) for each in document["effects"]]
    assert len(heads) == 4
    assert set(DOING) < set(heads)
    assert document["effect"]["screening"] | {"correlation": 0} == {
        "n_heads": 8, "n_largest": 2, "n_others": 2, "correlation": 0,
    }  # fmt: skip
