"""Every mask, and masks made of masks, against a plain sentence in Python about which key a query may see."""

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
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 3, 4, 4, 4]])
TABLE = torch.rand(BATCH, HEADS, Q_LEN, K_LEN, generator=torch.Generator().manual_seed(0)) < 0.5
QUERY_DOCUMENTS = torch.tensor([[0, 1, 2, 2, 1], [4, 3, 4, 3, 3]])

PREDICATES = {
    "causal": (masks.causal(), lambda b, h, i, j: j <= i),
    "causal with a cache": (masks.causal(K_LEN - Q_LEN), lambda b, h, i, j: j <= i + 2),
    "causal that begins later": (masks.causal(-3), lambda b, h, i, j: j <= i - 3),
    "window": (masks.window(2, 1), lambda b, h, i, j: j in (i - 2, i - 1, i, i + 1)),
    "window with a cache": (masks.window(1, 0, offset=2), lambda b, h, i, j: j in (i + 1, i + 2)),
    "window of the query alone": (masks.window(0, 0), lambda b, h, i, j: j == i),
    "prefix": (masks.prefix(3), lambda b, h, i, j: j < 3 or j <= i),
    "prefix with a cache": (masks.prefix(4, offset=2), lambda b, h, i, j: j < 4 or j <= i + 2),
    "right padding": (masks.padding(torch.tensor([4, 7])), lambda b, h, i, j: j < (4, 7)[b]),
    "right padding of everything": (masks.padding(torch.tensor([0, 1])), lambda b, h, i, j: j < b),
    "left padding": (masks.padding(torch.tensor([4, 7]), "left"), lambda b, h, i, j: j >= (3, 0)[b]),
    "left padding, all shorter than the row": (
        masks.padding(torch.tensor([2, 5]), "left", padded_len=K_LEN),
        lambda b, h, i, j: j >= (5, 2)[b],
    ),
    "padded queries": (masks.padding(torch.tensor([2, 5]), of="query"), lambda b, h, i, j: i < (2, 5)[b]),
    "queries padded on the left": (
        masks.padding(torch.tensor([2, 5]), "left", of="query"),
        lambda b, h, i, j: i >= (3, 0)[b],
    ),
    "documents": (
        masks.documents(QUERY_DOCUMENTS, DOCUMENTS),
        lambda b, h, i, j: int(QUERY_DOCUMENTS[b, i]) == int(DOCUMENTS[b, j]),
    ),
    "documents of one text": (
        masks.documents(DOCUMENTS),
        lambda b, h, i, j: int(DOCUMENTS[b, i]) == int(DOCUMENTS[b, j]),
    ),
    "a tensor of all axes": (masks.from_tensor(TABLE), lambda b, h, i, j: bool(TABLE[b, h, i, j])),
    "a tensor of query and key": (masks.from_tensor(TABLE[1, 2]), lambda b, h, i, j: bool(TABLE[1, 2, i, j])),
    "a tensor of keys": (masks.from_tensor(TABLE[:, :1, :1]), lambda b, h, i, j: bool(TABLE[b, 0, 0, j])),
    "a tensor of queries": (masks.from_tensor(TABLE[:, :, :, :1]), lambda b, h, i, j: bool(TABLE[b, h, i, 0])),
    "all of several": (
        masks.both(masks.causal(2), masks.window(3, 3, offset=1), masks.padding(torch.tensor([4, 6]))),
        lambda b, h, i, j: j <= i + 2 and abs(j - i - 1) <= 3 and j < (4, 6)[b],
    ),
    "both of nothing": (masks.both(), lambda b, h, i, j: True),
    "leading": (masks.leading(2), lambda b, h, i, j: j < 2),
    "leading, none": (masks.leading(0), lambda b, h, i, j: False),
    "leading, more than there are": (masks.leading(99), lambda b, h, i, j: True),
    "leading by places": (masks.leading(2, TENSOR), lambda b, h, i, j: PLACES[b][j] < 2),
    "leading by the places of one row": (masks.leading(1, ROW_TENSOR), lambda b, h, i, j: ROW[j] == 0),
    "prefix by places": (
        masks.either(masks.leading(1, TENSOR), masks.causal()),
        lambda b, h, i, j: PLACES[b][j] == 0 or j <= i,
    ),
    "prefix by places with a cache": (
        masks.either(masks.leading(2, TENSOR), masks.causal(2)),
        lambda b, h, i, j: PLACES[b][j] < 2 or j <= i + 2,
    ),
    "either of a window and sinks": (
        masks.either(masks.window(1, 0), masks.leading(1)),
        lambda b, h, i, j: j == 0 or j in (i - 1, i),
    ),
    "either of three": (
        masks.either(masks.window(0, 0), masks.causal(-2), masks.leading(1, TENSOR)),
        lambda b, h, i, j: j == i or j <= i - 2 or PLACES[b][j] == 0,
    ),
    "either of one": (masks.either(masks.causal(1)), lambda b, h, i, j: j <= i + 1),
    "either of nothing": (masks.either(), lambda b, h, i, j: False),
    "both of either": (
        masks.both(masks.either(masks.window(1, 1), masks.leading(2)), masks.padding(torch.tensor(LENGTHS))),
        lambda b, h, i, j: (abs(i - j) <= 1 or j < 2) and j < LENGTHS[b],
    ),
    "either of both": (
        masks.either(masks.both(masks.causal(), masks.window(2, 9)), masks.leading(1, TENSOR)),
        lambda b, h, i, j: i - 2 <= j <= i or PLACES[b][j] == 0,
    ),
    "shifted causal": (masks.shifted(masks.causal(), 2), lambda b, h, i, j: j <= i + 2),
    "shifted window": (masks.shifted(masks.window(1, 1), 2), lambda b, h, i, j: i + 1 <= j <= i + 3),
    "shifted by nothing": (masks.shifted(masks.causal(1), 0), lambda b, h, i, j: j <= i + 1),
    "shifted twice": (masks.shifted(masks.shifted(masks.causal(), 1), 1), lambda b, h, i, j: j <= i + 2),
    "shifted leading": (masks.shifted(masks.leading(2, TENSOR), 2), lambda b, h, i, j: PLACES[b][j] < 2),
    "shifted padding of queries": (
        masks.shifted(masks.padding(torch.tensor(LENGTHS), of="query"), 2),
        lambda b, h, i, j: i + 2 < LENGTHS[b],
    ),
    "shifted padding of queries on the left": (
        masks.shifted(masks.padding(torch.tensor(LENGTHS), "left", padded_len=K_LEN, of="query"), 2),
        lambda b, h, i, j: i + 2 >= K_LEN - LENGTHS[b],
    ),
    "shifted documents": (
        masks.shifted(masks.documents(torch.tensor(PLACES)), 2),
        lambda b, h, i, j: PLACES[b][i + 2] == PLACES[b][j],
    ),
    "shifted composition": (
        masks.shifted(
            masks.both(
                masks.either(masks.both(masks.causal(), masks.window(1, 0)), masks.leading(1, TENSOR)),
                masks.padding(torch.tensor(LENGTHS)),
            ),
            2,
        ),
        lambda b, h, i, j: (j in (i + 1, i + 2) or PLACES[b][j] == 0) and j < LENGTHS[b],
    ),
}


def evaluated(allowed, q_idx, k_idx):
    return allowed(q_idx, k_idx).expand(BATCH, HEADS, len(q_idx), len(k_idx))


def whole(allowed):
    return evaluated(allowed, torch.arange(Q_LEN), torch.arange(K_LEN))


@pytest.mark.parametrize("name", PREDICATES)
def test_a_mask_allows_what_its_sentence_says(name):
    allowed, sentence = PREDICATES[name]
    expected = [
        [[[sentence(b, h, i, j) for j in range(K_LEN)] for i in range(Q_LEN)] for h in range(HEADS)]
        for b in range(BATCH)
    ]
    assert whole(allowed).tolist() == expected


@pytest.mark.parametrize("name", PREDICATES)
@pytest.mark.parametrize(("height", "width"), [(2, 3), (1, 1), (5, 2)])
def test_a_mask_evaluated_tile_by_tile_equals_the_whole(name, height, width):
    allowed, _ = PREDICATES[name]
    rows = [
        torch.cat([evaluated(allowed, q_idx, k_idx) for k_idx in torch.arange(K_LEN).split(width)], dim=3)
        for q_idx in torch.arange(Q_LEN).split(height)
    ]
    assert torch.equal(torch.cat(rows, dim=2), whole(allowed))


@pytest.mark.parametrize("name", PREDICATES)
def test_a_mask_answers_with_booleans_on_four_axes(name):
    found = PREDICATES[name][0](torch.arange(Q_LEN), torch.arange(K_LEN))
    assert (found.dtype, found.ndim) == (torch.bool, 4)


def test_the_offset_aligns_the_last_query_with_the_last_key():
    found = masks.causal(offset=3)(torch.arange(2), torch.arange(5))[0, 0].int().tolist()
    assert found == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_composition_is_a_conjunction_in_any_order():
    rules = [masks.causal(1), masks.padding(torch.tensor([3, 5])), masks.documents(QUERY_DOCUMENTS, DOCUMENTS)]
    together = whole(masks.both(*rules))
    assert torch.equal(together, torch.stack([whole(rule) for rule in rules]).all(dim=0))
    assert torch.equal(whole(masks.both(*reversed(rules))), together)


def test_both_and_either_turn_into_each_other_when_everything_is_turned_round():
    rules = [masks.causal(), masks.window(1, 1), masks.leading(1, TENSOR)]

    def turned(rule):
        return lambda q_idx, k_idx: ~rule(q_idx, k_idx)

    assert torch.equal(whole(masks.either(*rules)), ~whole(masks.both(*map(turned, rules))))
    assert torch.equal(whole(masks.either(*reversed(rules))), whole(masks.either(*rules)))


def test_a_prefix_is_the_keys_at_the_leading_places_and_the_causal_ones():
    for n in range(K_LEN + 1):
        by_places = masks.either(masks.leading(n, torch.arange(K_LEN)), masks.causal(1))
        assert torch.equal(whole(masks.prefix(n, 1)), whole(by_places))


def test_the_rows_of_a_shifted_mask_are_rows_of_the_mask():
    for name, (allowed, _) in PREDICATES.items():
        if not name.startswith("shifted"):
            for start in range(Q_LEN - 1):
                rows = evaluated(masks.shifted(allowed, start), torch.arange(Q_LEN - start), torch.arange(K_LEN))
                assert torch.equal(rows, whole(allowed)[:, :, start:]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8])
def test_a_mask_of_numbers_is_refused(dtype):
    with pytest.raises(TypeError) as caught:
        masks.from_tensor(torch.ones(5, 7, dtype=dtype))
    assert str(caught.value) == f"mask must be a bool tensor with True = may attend, got {dtype}"
