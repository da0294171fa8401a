"""Statistics of patterns: by hand, and against a plain loop."""

from __future__ import annotations

import math

import jaxtyping
import pytest
import torch

from mhacli.attention import stats


def shares(*rows):
    return torch.tensor(rows, dtype=torch.float64)[None, None]


def test_by_hand_entropy_in_nats():
    pattern = shares([1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25], [0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 0.0, 0.0])
    found = stats.row_entropy(pattern)[0, 0].tolist()
    assert found == pytest.approx([0.0, math.log(4), 1.5 * math.log(2), 0.0], abs=1e-15)


def test_entropy_agrees_with_a_loop_over_the_cells(normal):
    pattern = normal(2, 9, 5, 7).softmax(dim=-1)
    found = stats.row_entropy(pattern)
    assert found.shape == (2, 9, 5)
    for b in range(2):
        for h in range(9):
            for i in range(5):
                expected = -sum(p * math.log(p) for p in pattern[b, h, i].tolist())
                assert found[b, h, i].item() == pytest.approx(expected, abs=1e-14)


def test_entropy_in_blocks_of_rows_equals_entropy_at_once(normal, monkeypatch):
    pattern = normal(2, 3, 11, 7).softmax(dim=-1)
    whole = stats.row_entropy(pattern)
    monkeypatch.setattr(stats, "_BLOCK_CELLS", 2 * 3 * 7 * 4)
    assert torch.equal(stats.row_entropy(pattern), whole)
    monkeypatch.setattr(stats, "_BLOCK_CELLS", 1)
    assert torch.equal(stats.row_entropy(pattern), whole)


def test_entropy_is_computed_in_float64_whatever_comes_in(normal):
    pattern = normal(1, 2, 3, 5).softmax(dim=-1).half()
    assert stats.row_entropy(pattern).dtype == torch.float64
    assert torch.equal(stats.row_entropy(pattern), stats.row_entropy(pattern.double()))


def test_the_strongest_key_is_the_first_of_equals_and_minus_one_where_there_is_none():
    pattern = shares([0.2, 0.5, 0.3], [0.4, 0.2, 0.4], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0])
    assert stats.strongest_key(pattern)[0, 0].tolist() == [1, 0, -1, 2]


def test_the_share_of_entropy_is_one_for_uniform_rows_and_zero_without_a_choice():
    entropy = torch.tensor([[[math.log(2), math.log(4) / 2, 0.0, 0.0]]], dtype=torch.float64)
    visible = torch.tensor([[[2, 4, 1, 0]]])
    assert stats.entropy_share(entropy, visible)[0, 0].tolist() == pytest.approx([1.0, 0.5, 0.0, 0.0], abs=1e-15)


def test_the_share_of_entropy_takes_the_visible_keys_of_each_sequence(normal):
    entropy = normal(2, 3, 5).abs()
    visible = torch.tensor([[[2, 3, 4, 5, 6]], [[7, 2, 1, 0, 9]]])
    found = stats.entropy_share(entropy, visible)
    for b in range(2):
        for h in range(3):
            for i, n in enumerate(visible[b, 0].tolist()):
                expected = entropy[b, h, i].item() / math.log(n) if n > 1 else 0.0
                assert found[b, h, i].item() == pytest.approx(expected, rel=1e-14)


def test_the_mean_is_over_the_marked_queries_of_all_sequences():
    per_query = torch.tensor([[[1.0, 2.0, 30.0], [4.0, 5.0, 60.0]], [[7.0, 80.0, 90.0], [1.0, 20.0, 30.0]]])
    marked = torch.tensor([[[True, True, False]], [[True, False, False]]])
    found = stats.mean_over(per_query.double(), marked).tolist()
    assert found == pytest.approx([(1 + 2 + 7) / 3, (4 + 5 + 1) / 3], abs=1e-15)


def test_queries_may_be_marked_for_each_head_apart():
    per_query = torch.tensor([[[1.0, 2.0, 30.0], [4.0, 5.0, 60.0]], [[7.0, 80.0, 90.0], [1.0, 20.0, 30.0]]])
    marked = torch.tensor([[[True, False, False], [False, True, True]], [[False, False, True], [False, False, False]]])
    found = stats.mean_over(per_query.double(), marked).tolist()
    assert found == pytest.approx([(1 + 90) / 2, (5 + 60) / 2], abs=1e-15)


@pytest.mark.parametrize("heads", [1, 3])
def test_the_mean_over_no_query_is_no_number(heads):
    marked = torch.zeros(2, heads, 5, dtype=torch.bool)
    assert stats.mean_over(torch.ones(2, 3, 5), marked).isnan().tolist() == [True] * 3


def test_the_mean_over_no_query_of_one_head_leaves_the_other_heads_alone():
    marked = torch.tensor([[[True, True], [False, False], [False, True]]])
    found = stats.mean_over(torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]]).double(), marked).tolist()
    assert (found[0], math.isnan(found[1]), found[2]) == (1.5, True, 6.0)


def test_visible_keys_may_differ_from_head_to_head(normal):
    entropy, visible = normal(1, 2, 2).abs(), torch.tensor([[[2, 5], [1, 0]]])
    found = stats.entropy_share(entropy, visible)[0].tolist()
    one, other = entropy[0, 0].tolist()
    assert found == [pytest.approx([one / math.log(2), other / math.log(5)], rel=1e-14), [0.0, 0.0]]


def test_visible_keys_must_have_one_entry_for_all_heads_or_one_for_each():
    with pytest.raises(jaxtyping.TypeCheckError, match="typechecking parameter 'visible'"):
        stats.entropy_share(torch.zeros(2, 3, 5), torch.zeros(2, 2, 5, dtype=torch.int64))
