"""Statistics of patterns: by hand, and against a plain loop."""

from __future__ import annotations

import math

import jaxtyping
import pytest
import torch

from mhacli.attention import attend, masks
from mhacli.attention.tiled import statistics as stats
from mhacli.attention.tiled import tiles as rectangles
from mhacli.attention.tiled.scores import ComputedPattern, Scores, VirtualPattern
from mhacli.attention.tiled.statistics import Entropy
from mhacli.attention.tiled.tiles import CPU_TILES, TileShape, reduce_tiles


def shares(*rows):
    return torch.tensor(rows, dtype=torch.float64)[None, None]


def row_entropy(pattern):
    computed = ComputedPattern(pattern)
    entropy = Entropy(computed)
    reduce_tiles(computed, [entropy])
    return entropy.per_query


def test_by_hand_entropy_in_nats():
    pattern = shares([1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25], [0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 0.0, 0.0])
    found = row_entropy(pattern)[0, 0].tolist()
    assert found == pytest.approx([0.0, math.log(4), 1.5 * math.log(2), 0.0], abs=1e-15)


def test_entropy_agrees_with_a_loop_over_the_cells(normal):
    pattern = normal(2, 9, 5, 7).softmax(dim=-1)
    found = row_entropy(pattern)
    assert found.shape == (2, 9, 5)
    for b in range(2):
        for h in range(9):
            for i in range(5):
                expected = -sum(p * math.log(p) for p in pattern[b, h, i].tolist())
                assert found[b, h, i].item() == pytest.approx(expected, abs=1e-14)


def test_entropy_is_computed_in_float64_whatever_comes_in(normal):
    pattern = normal(1, 2, 3, 5).softmax(dim=-1).half()
    assert row_entropy(pattern).dtype == torch.float64
    assert torch.equal(row_entropy(pattern), row_entropy(pattern.double()))


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


SHAPES = [TileShape(4, 7, 3), TileShape(8, 8, 8), CPU_TILES]
SEEN = torch.rand(2, 6, 23, 31, generator=torch.Generator().manual_seed(4)) < 0.4
CORNER_MASKS = {
    "all": None,
    "causal": masks.causal(),
    "window": masks.window(5, 3),
    "documents": masks.documents(torch.arange(31) // 7),
    "padding": masks.both(masks.padding((9, 30)), masks.causal(8)),
    "heads and sequences differ": masks.from_tensor(SEEN),
    "nothing": masks.either(),
}
CORNERS = [
    (range(23), range(31)),
    (range(5, 6), range(31)),
    (range(22, 23), range(30, 31)),
    (range(3, 17), range(9, 26)),
    (range(15, 22), range(2, 5)),
    (range(1, 4), range(20, 31)),
    (range(0), range(7)),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CORNER_MASKS)
def test_any_corner_of_a_pattern_is_that_part_of_the_whole(normal, monkeypatch, name, shape):
    monkeypatch.setattr(rectangles, "CPU_TILES", shape)
    q, k, allowed = normal(2, 6, 23, 5), normal(2, 3, 31, 5), CORNER_MASKS[name]
    seen = {}
    attend(q, k, k, allowed=allowed, softcap=3.0, tap=lambda site, tensor, **_: seen.update({site: tensor}))
    lse = seen["scores"].logsumexp(dim=-1)
    scores = Scores(q, k, scale=5**-0.5, softcap=3.0, allowed=allowed)
    pattern = VirtualPattern(scores, torch.where(lse.isneginf(), 0.0, lse))
    for queries, keys in [*CORNERS, *reversed(CORNERS)]:
        for place in ((0, 0), (1, 5), (0, 3)):
            found = stats.weights_of(pattern, place, queries, keys)
            expected = seen["pattern"][place][queries.start : queries.stop, keys.start : keys.stop]
            assert found.shape == expected.shape
            assert (found - expected).abs().sum() <= 1e-12
            assert (found[expected == 0] == 0).all()


def test_any_corner_of_a_computed_pattern_is_that_part_of_it(normal):
    whole = normal(2, 3, 11, 13).softmax(dim=-1)
    for queries, keys in ((range(2, 9), range(4, 13)), (range(10, 11), range(1)), (range(11), range(13))):
        found = stats.weights_of(ComputedPattern(whole), (1, 2), queries, keys)
        assert torch.equal(found, whole[1, 2, queries.start : queries.stop, keys.start : keys.stop])


def rows(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_by_hand_distances_fold_at_the_query_itself():
    profile = rows([1.0, 2.0, 3.0, 40.0, 50.0], [0.0, 0.5, 0.25, 0.0, 0.25])  # of distances −2 to 2
    assert stats.distances_folded(profile, 2).tolist() == [[3, 42, 51], [0.25, 0.5, 0.25]]
    assert stats.distances_folded(profile, 4).tolist() == [[50, 40, 3, 2, 1], [0.25, 0, 0.25, 0.5, 0]]
    assert stats.distances_folded(profile, 0).tolist() == [[1, 2, 3, 40, 50], [0, 0.5, 0.25, 0, 0.25]]
    assert stats.distances_folded(profile, 1).tolist() == [[2, 4, 40, 50], [0.5, 0.25, 0, 0.25]]
    assert profile[0].tolist() == [1, 2, 3, 40, 50]


def test_by_hand_one_query_of_one_key_has_one_distance():
    assert stats.distances_folded(rows([7.0]), 0).tolist() == [[7]]


def test_by_hand_the_window_is_the_least_distance_that_holds_the_share():
    folded = rows([5.0, 3.0, 1.0, 1.0], [0.0, 0.0, 0.0, 2.0], [4.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0])
    assert stats.window_of(folded, 0.5).tolist() == [0, 3, 0, 0]
    assert stats.window_of(folded, 0.51).tolist() == [1, 3, 0, 0]
    assert stats.window_of(folded, 0.8).tolist() == [1, 3, 0, 0]
    assert stats.window_of(folded, 0.9).tolist() == [2, 3, 0, 0]
    assert stats.window_of(folded, 0.99).tolist() == [3, 3, 0, 0]
    assert stats.window_of(folded, 1.0).tolist() == [3, 3, 0, 0]


def test_rounding_does_not_widen_a_window():
    folded = torch.full((1, 10), 0.1, dtype=torch.float32)
    assert stats.window_of(folded, 0.7).tolist() == [6]
    assert stats.window_of(rows([0.5 - 4e-7, 0.5 + 4e-7]), 0.5).tolist() == [0]
    assert stats.window_of(rows([0.5 - 4e-6, 0.5 + 4e-6]), 0.5).tolist() == [1]


def test_by_hand_the_bins_double():
    assert [stats.doubling_steps(longest) for longest in range(6)] == [
        (0,),
        (0, 1),
        (0, 1, 2),
        (0, 1, 2, 3),
        (0, 1, 2, 4),
        (0, 1, 2, 4, 5),
    ]
    assert stats.doubling_steps(1024)[-2:] == (512, 1024)
    assert stats.doubling_steps(1025)[-2:] == (1024, 1025)


def test_by_hand_the_mass_of_each_bin():
    folded = rows([1.0, 2.0, 4.0, 8.0, 16.0, 32.0], [0.0, 1.0, 0.0, 0.0, 0.0, 3.0])
    assert stats.in_steps(folded, (0, 1, 2, 4, 8)).tolist() == [[1, 2, 4, 24, 32], [0, 1, 0, 0, 3]]
    assert stats.in_steps(folded, (2, 3)).tolist() == [[7, 8], [1, 0]]
    assert stats.in_steps(folded, (0,)).tolist() == [[1], [0]]
    assert stats.in_steps(rows([5.0]), stats.doubling_steps(0)).tolist() == [[5]]


def test_the_bins_hold_all_mass_whatever_the_length(normal):
    for longest in range(20):
        folded = normal(3, longest + 1).exp()
        found = stats.in_steps(folded, stats.doubling_steps(longest))
        assert (found.sum(dim=1) - folded.sum(dim=1)).abs().max() <= 1e-12
        assert (found >= 0).all()
