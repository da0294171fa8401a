"""The statistics over many passes are those of one pass over all the texts."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from support.model_families import ids_of, tiny

import mhacli

LENGTHS = (3, 11, 7)
MEANS = (
    "entropy", "entropy_share", "effective_keys", "participation", "distance", "sink", "leading", "diagonal", "previous",
    "duplicate", "induction", "near",
)  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_passes_one_by_one_have_the_means_of_a_batch_of_all(name: str) -> None:
    model, ids = tiny(name), ids_of(len(LENGTHS), max(LENGTHS))
    mask = torch.tensor([[int(i < n) for i in range(max(LENGTHS))] for n in LENGTHS])
    with mhacli.inspecting(model, heads=[1, 2], keep_passes=False) as seen:
        for row, n in zip(ids, LENGTHS, strict=True):
            model(row[None, :n])
    with mhacli.inspecting(model, heads=[1, 2]) as batch:
        model(ids, attention_mask=mask)
    found, expected = seen.statistics(), batch.record.heads
    assert [len(record.sequences[0].ids) for record in seen.passes] == [LENGTHS[-1]]
    assert [(head.layer, head.attention, head.head) for head in found] == [
        (head.layer, head.attention, head.head) for head in expected
    ]
    for own, other in zip(found, expected, strict=True):
        for field in MEANS:
            assert getattr(own, field) == pytest.approx(getattr(other, field), rel=2e-5, abs=2e-6), field
            assert getattr(own.uniform, field) == pytest.approx(getattr(other.uniform, field), rel=2e-5, abs=2e-6), (
                field
            )
        assert own.max_score == pytest.approx(other.max_score, rel=2e-5)


def test_a_context_without_a_pass_has_no_statistics() -> None:
    with mhacli.inspecting(tiny("llama")) as seen:
        pass
    assert list(seen.statistics()) == []
