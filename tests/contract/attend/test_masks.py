"""The masks, each against a sentence in Python about which key a query may see."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mhacli.attention import masks

BATCH, HEADS, Q_LEN, K_LEN = 2, 3, 5, 7
PLACES = [[0, 0, 0, 1, 2, 0, 1], [0, 1, 2, 3, 0, 1, 2]]
"""Of keys in their texts: the first row is padded by two and holds two texts, the second holds
two."""
ROW = [0, 1, 0, 1, 2, 3, 4]
TENSOR, ROW_TENSOR, LENGTHS = torch.tensor(PLACES), torch.tensor(ROW), (4, 6)
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 3, 4, 4, 4]])
Q_DOCUMENTS = torch.tensor([[0, 1, 2, 2, 1], [4, 3, 4, 3, 3]])
TABLE = torch.rand(BATCH, HEADS, Q_LEN, K_LEN, generator=torch.Generator().manual_seed(0)) < 0.5


def long(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


PREDICATES: dict[str, Any] = {
    "causal": (masks.causal(), lambda b, h, i, j: j <= i),
    "causal with a cache": (masks.causal(K_LEN - Q_LEN), lambda b, h, i, j: j <= i + 2),
    "causal that begins later": (masks.causal(-3), lambda b, h, i, j: j <= i - 3),
    "window": (masks.window(2, 1), lambda b, h, i, j: j in (i - 2, i - 1, i, i + 1)),
    "window with a cache": (masks.window(1, 0, offset=2), lambda b, h, i, j: j in (i + 1, i + 2)),
    "window of the query alone": (masks.window(0, 0), lambda b, h, i, j: j == i),
    "prefix": (masks.prefix(3), lambda b, h, i, j: j < 3 or j <= i),
    "prefix with a cache": (masks.prefix(4, offset=2), lambda b, h, i, j: j < 4 or j <= i + 2),
    "right padding": (masks.padding(long(4, 7)), lambda b, h, i, j: j < (4, 7)[b]),
    "right padding of everything": (masks.padding(long(0, 1)), lambda b, h, i, j: j < b),
    "lengths in a list": (masks.padding([4, 7]), lambda b, h, i, j: j < (4, 7)[b]),
    "left padding": (masks.padding(long(4, 7), "left"), lambda b, h, i, j: j >= (3, 0)[b]),
    "left padding of shorter texts": (
        masks.padding(long(2, 5), "left", padded_len=K_LEN),
        lambda b, h, i, j: j >= (5, 2)[b],
    ),
    "padded queries": (masks.padding(long(2, 5), of="query"), lambda b, h, i, j: i < (2, 5)[b]),
    "queries padded on the left": (
        masks.padding(long(2, 5), "left", of="query"),
        lambda b, h, i, j: i >= (3, 0)[b],
    ),
    "documents": (
        masks.documents(Q_DOCUMENTS, DOCUMENTS),
        lambda b, h, i, j: int(Q_DOCUMENTS[b, i]) == int(DOCUMENTS[b, j]),
    ),
    "documents of one text": (
        masks.documents(DOCUMENTS),
        lambda b, h, i, j: int(DOCUMENTS[b, i]) == int(DOCUMENTS[b, j]),
    ),
    "a tensor of all axes": (masks.from_tensor(TABLE), lambda b, h, i, j: bool(TABLE[b, h, i, j])),
    "a tensor of query and key": (
        masks.from_tensor(TABLE[1, 2]),
        lambda b, h, i, j: bool(TABLE[1, 2, i, j]),
    ),
    "a tensor of keys": (
        masks.from_tensor(TABLE[:, :1, :1]),
        lambda b, h, i, j: bool(TABLE[b, 0, 0, j]),
    ),
    "a tensor of queries": (
        masks.from_tensor(TABLE[:, :, :, :1]),
        lambda b, h, i, j: bool(TABLE[b, h, i, 0]),
    ),
    "leading": (masks.leading(2), lambda b, h, i, j: j < 2),
    "leading, none": (masks.leading(0), lambda b, h, i, j: False),
    "leading, more than there are": (masks.leading(99), lambda b, h, i, j: True),
    "leading by places": (masks.leading(2, TENSOR), lambda b, h, i, j: PLACES[b][j] < 2),
    "leading by the places of one row": (
        masks.leading(1, ROW_TENSOR),
        lambda b, h, i, j: ROW[j] == 0,
    ),
    "all of several": (
        masks.both(masks.causal(2), masks.window(3, 3, offset=1), masks.padding(long(*LENGTHS))),
        lambda b, h, i, j: j <= i + 2 and abs(j - i - 1) <= 3 and j < LENGTHS[b],
    ),
    "both of nothing": (masks.both(), lambda b, h, i, j: True),
    "prefix by places": (
        masks.either(masks.leading(2, TENSOR), masks.causal(2)),
        lambda b, h, i, j: PLACES[b][j] < 2 or j <= i + 2,
    ),
    "a window and sinks": (
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
        masks.both(
            masks.either(masks.window(1, 1), masks.leading(2)), masks.padding(long(*LENGTHS))
        ),
        lambda b, h, i, j: (abs(i - j) <= 1 or j < 2) and j < LENGTHS[b],
    ),
    "either of both": (
        masks.either(masks.both(masks.causal(), masks.window(2, 9)), masks.leading(1, TENSOR)),
        lambda b, h, i, j: i - 2 <= j <= i or PLACES[b][j] == 0,
    ),
    "both with a plain function": (
        masks.both(
            masks.causal(1), lambda q_idx, k_idx: ((q_idx[:, None] + k_idx) % 2 == 0)[None, None]
        ),
        lambda b, h, i, j: j <= i + 1 and (i + j) % 2 == 0,
    ),
}


def cells_of(mask: Any, queries: range, keys: range) -> torch.Tensor:
    computed = mask(torch.tensor(queries), torch.tensor(keys))
    assert (computed.dtype, computed.ndim) == (torch.bool, 4)
    return computed.expand(BATCH, HEADS, len(queries), len(keys))


@pytest.mark.parametrize("name", PREDICATES)
def test_a_mask_allows_what_its_sentence_says(name: str) -> None:
    mask, sentence = PREDICATES[name]
    right = torch.tensor(
        [
            [
                [[sentence(b, h, i, j) for j in range(K_LEN)] for i in range(Q_LEN)]
                for h in range(HEADS)
            ]
            for b in range(BATCH)
        ]
    )
    assert torch.equal(cells_of(mask, range(Q_LEN), range(K_LEN)), right)
    for queries, keys in (
        (range(2, 5), range(1, 4)),
        (range(3, 4), range(7)),
        (range(4, 5), range(6, 7)),
    ):
        part = right[:, :, queries.start : queries.stop, keys.start : keys.stop]
        assert torch.equal(cells_of(mask, queries, keys), part), "only some queries and keys"


def test_composition_is_a_conjunction_in_any_order() -> None:
    rules = [masks.causal(1), masks.padding(long(3, 5)), masks.documents(Q_DOCUMENTS, DOCUMENTS)]
    whole = (range(Q_LEN), range(K_LEN))
    together = cells_of(masks.both(*rules), *whole)
    assert torch.equal(together, torch.stack([cells_of(rule, *whole) for rule in rules]).all(dim=0))
    assert torch.equal(cells_of(masks.both(*reversed(rules)), *whole), together)
    either = cells_of(masks.either(*rules), *whole)
    assert torch.equal(either, torch.stack([cells_of(rule, *whole) for rule in rules]).any(dim=0))


def test_a_band_of_the_widest_int32_hides_nothing() -> None:
    assert bool(masks.window(2**31 - 1, 2**31 - 1)(*[torch.arange(3, dtype=torch.int32)] * 2).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_a_mask_of_numbers_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=str(dtype)):
        masks.from_tensor(torch.ones(5, 7, dtype=dtype))
