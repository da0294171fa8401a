"""A circuit of two heads that is written by hand: `mha effect` finds both, and says when estimates
miss one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.induction import (
    COPYING,
    INDUCTION,
    N_HEADS,
    N_LAYERS,
    WORDS,
    induction_checkpoint,
    logits_by_hand,
)

TEXT, ANSWER = "c a d b e f a", "d"
"""After the first `a` comes `d`."""


@pytest.fixture
def effect(mha: Any, tmp_path: Path) -> Any:
    """The document of `mha effect` for a circuit of some sharpness."""

    def run(sharpness: float, *options: str) -> Any:
        folder = induction_checkpoint(tmp_path / "model", sharpness)
        return mha("effect", TEXT, "--model", folder, "--json", *options).json

    return run


@pytest.mark.parametrize("sharpness", [2.0, 20.0])
def test_two_heads_carry_everything_and_the_others_nothing_at_all(
    effect: Any, sharpness: float
) -> None:
    document = effect(sharpness)
    changes = {(each["layer"], each["head"]): each["d_logit"] for each in document["effects"]}
    assert document["effect"]["target"] == ANSWER
    assert len(changes) == N_LAYERS * N_HEADS
    word = WORDS.index(ANSWER)
    for head in (COPYING, INDUCTION):
        expected = (
            logits_by_hand(TEXT, sharpness, without=head)[word]
            - logits_by_hand(TEXT, sharpness)[word]
        )
        assert changes.pop(head) == pytest.approx(expected, abs=1e-4)
    assert set(changes.values()) == {0}


def test_the_induction_head_reads_the_token_behind_the_first_copy(effect: Any) -> None:
    document = effect(20.0, "--edges", "--head", "1.1")
    strongest = max(document["effects"], key=lambda each: abs(each["d_logit"]))
    assert strongest["key"] == TEXT.split().index("a") + 1
    assert strongest["d_logit"] == pytest.approx(
        -logits_by_hand(TEXT, 20.0)[WORDS.index(ANSWER)], abs=1e-3
    )


@pytest.mark.parametrize(
    ("sharpness", "correlation"), [(1.0, 1.0), (20.0, 14 / (14 * 24.5) ** 0.5)]
)
def test_the_screening_says_where_the_slope_misses_a_head_that_decides(
    effect: Any, sharpness: float, correlation: float
) -> None:
    document = effect(sharpness, "--screen", "4", "--target", ANSWER)
    estimates, changes = (
        {(each["layer"], each["head"]): each[field] for each in document["effects"]}
        for field in ("first_order", "d_logit")
    )
    assert len(estimates) == 8
    assert document["effect"]["screening"]["correlation"] == pytest.approx(correlation, abs=0.05)
    if sharpness == 20.0:
        assert abs(estimates[COPYING]) < 1e-3 < 1 < abs(changes[COPYING])
