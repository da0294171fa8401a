"""Every mask against a plain sentence in Python about which key a query may see."""

from __future__ import annotations

import pytest
import torch

from mhacli.attention import masks

BATCH, Q_LEN, K_LEN = 2, 5, 7
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 3, 4, 4, 4]])
TABLE = torch.rand(BATCH, 3, Q_LEN, K_LEN, generator=torch.Generator().manual_seed(0)) < 0.5
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
}


def evaluated(allowed, q_idx, k_idx):
    return allowed(q_idx, k_idx).expand(BATCH, 3, len(q_idx), len(k_idx))


@pytest.mark.parametrize("name", PREDICATES)
def test_a_mask_allows_what_its_sentence_says(name):
    allowed, sentence = PREDICATES[name]
    found = evaluated(allowed, torch.arange(Q_LEN), torch.arange(K_LEN)).tolist()
    expected = [
        [[[sentence(b, h, i, j) for j in range(K_LEN)] for i in range(Q_LEN)] for h in range(3)] for b in range(BATCH)
    ]
    assert found == expected


@pytest.mark.parametrize("name", PREDICATES)
def test_a_mask_evaluated_tile_by_tile_equals_the_whole(name):
    allowed, _ = PREDICATES[name]
    queries, keys = torch.arange(Q_LEN), torch.arange(K_LEN)
    tiles = [
        torch.cat([evaluated(allowed, some_q, some_k) for some_k in keys.split(3)], dim=3)
        for some_q in queries.split(2)
    ]
    assert torch.equal(torch.cat(tiles, dim=2), evaluated(allowed, queries, keys))


@pytest.mark.parametrize("name", PREDICATES)
def test_a_mask_answers_with_booleans_on_four_axes(name):
    found = PREDICATES[name][0](torch.arange(Q_LEN), torch.arange(K_LEN))
    assert (found.dtype, found.ndim) == (torch.bool, 4)


def test_the_offset_aligns_the_last_query_with_the_last_key():
    found = masks.causal(offset=3)(torch.arange(2), torch.arange(5))[0, 0].int().tolist()
    assert found == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_composition_is_a_conjunction_in_any_order():
    rules = [masks.causal(1), masks.padding(torch.tensor([3, 5])), masks.documents(QUERY_DOCUMENTS, DOCUMENTS)]
    queries, keys = torch.arange(Q_LEN), torch.arange(K_LEN)
    together = evaluated(masks.both(*rules), queries, keys)
    one_by_one = torch.stack([evaluated(rule, queries, keys) for rule in rules]).all(dim=0)
    assert torch.equal(together, one_by_one)
    assert torch.equal(evaluated(masks.both(*reversed(rules)), queries, keys), together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8])
def test_a_mask_of_numbers_is_refused(dtype):
    with pytest.raises(TypeError) as caught:
        masks.from_tensor(torch.ones(5, 7, dtype=dtype))
    assert str(caught.value) == f"mask must be a bool tensor with True = may attend, got {dtype}"
