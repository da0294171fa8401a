"""Masks made of masks, and of places: each against a sentence in Python, whole and tile by tile."""

from __future__ import annotations

import pytest
import torch

from mhacli.attention import masks

BATCH, HEADS, Q_LEN, K_LEN = 2, 3, 5, 7
PLACES = [[0, 0, 0, 1, 2, 0, 1], [0, 1, 2, 3, 0, 1, 2]]
"""Of keys in their own texts: the first row is padded by two and holds two texts, the second holds two."""
ROW = [0, 1, 0, 1, 2, 3, 4]
TENSOR, ROW_TENSOR = torch.tensor(PLACES), torch.tensor(ROW)
LENGTHS = (4, 6)

PREDICATES = {
    "leading": (masks.leading(2), lambda b, i, j: j < 2),
    "leading, none": (masks.leading(0), lambda b, i, j: False),
    "leading, more than there are": (masks.leading(99), lambda b, i, j: True),
    "leading by places": (masks.leading(2, TENSOR), lambda b, i, j: PLACES[b][j] < 2),
    "leading by the places of one row": (masks.leading(1, ROW_TENSOR), lambda b, i, j: ROW[j] == 0),
    "prefix by places": (masks.prefix(1, places=TENSOR), lambda b, i, j: PLACES[b][j] == 0 or j <= i),
    "prefix by places with a cache": (
        masks.prefix(2, 2, places=TENSOR),
        lambda b, i, j: PLACES[b][j] < 2 or j <= i + 2,
    ),
    "either of a window and sinks": (
        masks.either(masks.window(1, 0), masks.leading(1)),
        lambda b, i, j: j == 0 or j in (i - 1, i),
    ),
    "either of three": (
        masks.either(masks.window(0, 0), masks.causal(-2), masks.leading(1, TENSOR)),
        lambda b, i, j: j == i or j <= i - 2 or PLACES[b][j] == 0,
    ),
    "either of one": (masks.either(masks.causal(1)), lambda b, i, j: j <= i + 1),
    "either of nothing": (masks.either(), lambda b, i, j: False),
    "both of either": (
        masks.both(masks.either(masks.window(1, 1), masks.leading(2)), masks.padding(torch.tensor(LENGTHS))),
        lambda b, i, j: (abs(i - j) <= 1 or j < 2) and j < LENGTHS[b],
    ),
    "either of both": (
        masks.either(masks.both(masks.causal(), masks.window(2, 9)), masks.leading(1, TENSOR)),
        lambda b, i, j: i - 2 <= j <= i or PLACES[b][j] == 0,
    ),
    "shifted causal": (masks.shifted(masks.causal(), 2), lambda b, i, j: j <= i + 2),
    "shifted window": (masks.shifted(masks.window(1, 1), 2), lambda b, i, j: i + 1 <= j <= i + 3),
    "shifted by nothing": (masks.shifted(masks.causal(1), 0), lambda b, i, j: j <= i + 1),
    "shifted twice": (masks.shifted(masks.shifted(masks.causal(), 1), 1), lambda b, i, j: j <= i + 2),
    "shifted leading": (masks.shifted(masks.leading(2, TENSOR), 2), lambda b, i, j: PLACES[b][j] < 2),
    "shifted padding of queries": (
        masks.shifted(masks.padding(torch.tensor(LENGTHS), of="query"), 2),
        lambda b, i, j: i + 2 < LENGTHS[b],
    ),
    "shifted padding of queries on the left": (
        masks.shifted(masks.padding(torch.tensor(LENGTHS), "left", padded_len=K_LEN, of="query"), 2),
        lambda b, i, j: i + 2 >= K_LEN - LENGTHS[b],
    ),
    "shifted documents": (
        masks.shifted(masks.documents(torch.tensor(PLACES)), 2),
        lambda b, i, j: PLACES[b][i + 2] == PLACES[b][j],
    ),
    "shifted composition": (
        masks.shifted(
            masks.both(
                masks.either(masks.both(masks.causal(), masks.window(1, 0)), masks.leading(1, TENSOR)),
                masks.padding(torch.tensor(LENGTHS)),
            ),
            2,
        ),
        lambda b, i, j: (j in (i + 1, i + 2) or PLACES[b][j] == 0) and j < LENGTHS[b],
    ),
}


def evaluated(allowed, q_idx, k_idx):
    return allowed(q_idx, k_idx).expand(BATCH, HEADS, len(q_idx), len(k_idx))


def whole(allowed):
    return evaluated(allowed, torch.arange(Q_LEN), torch.arange(K_LEN))


@pytest.mark.parametrize("name", PREDICATES)
def test_a_composed_mask_allows_what_its_sentence_says(name):
    allowed, sentence = PREDICATES[name]
    expected = [
        [[[sentence(b, i, j) for j in range(K_LEN)] for i in range(Q_LEN)] for _ in range(HEADS)] for b in range(BATCH)
    ]
    assert whole(allowed).tolist() == expected


@pytest.mark.parametrize("name", PREDICATES)
@pytest.mark.parametrize(("height", "width"), [(2, 3), (1, 1), (5, 2)])
def test_a_composed_mask_tile_by_tile_equals_the_whole(name, height, width):
    allowed, _ = PREDICATES[name]
    rows = [
        torch.cat([evaluated(allowed, q_idx, k_idx) for k_idx in torch.arange(K_LEN).split(width)], dim=3)
        for q_idx in torch.arange(Q_LEN).split(height)
    ]
    assert torch.equal(torch.cat(rows, dim=2), whole(allowed))


@pytest.mark.parametrize("name", PREDICATES)
def test_a_composed_mask_answers_with_booleans_on_four_axes(name):
    found = PREDICATES[name][0](torch.arange(Q_LEN), torch.arange(K_LEN))
    assert (found.dtype, found.ndim) == (torch.bool, 4)


def test_both_and_either_turn_into_each_other_when_everything_is_turned_round():
    rules = [masks.causal(), masks.window(1, 1), masks.leading(1, TENSOR)]

    def turned(rule):
        return lambda q_idx, k_idx: ~rule(q_idx, k_idx)

    assert torch.equal(whole(masks.either(*rules)), ~whole(masks.both(*map(turned, rules))))
    assert torch.equal(whole(masks.either(*reversed(rules))), whole(masks.either(*rules)))


def test_a_prefix_of_one_row_is_the_same_with_and_without_its_places():
    for n in range(K_LEN + 1):
        assert torch.equal(whole(masks.prefix(n, 1)), whole(masks.prefix(n, 1, places=torch.arange(K_LEN))))


def test_the_rows_of_a_shifted_mask_are_rows_of_the_mask():
    for name, (allowed, _) in PREDICATES.items():
        if not name.startswith("shifted"):
            for start in range(Q_LEN - 1):
                rows = evaluated(masks.shifted(allowed, start), torch.arange(Q_LEN - start), torch.arange(K_LEN))
                assert torch.equal(rows, whole(allowed)[:, :, start:]), name
