"""Rectangles: what a mask leaves to look at, cell by cell against a plain sentence about who may see whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from mhacli.attention import masks
from mhacli.attention.tiled import tiles as rectangles
from mhacli.attention.tiled.tiles import (
    CPU_TILES,
    DEVICE_TILES,
    PENALTY,
    MaskedColumns,
    TileRegion,
    TileShape,
    hide,
    indices,
    n_cells_of,
    tile_shape,
)

BATCH, HEADS, Q_LEN, K_LEN = 2, 3, 23, 31
LIKE = torch.empty(0, dtype=torch.float32)
FORBIDDEN = float(np.float32(PENALTY))
DRAWN = torch.rand(BATCH, HEADS, Q_LEN, K_LEN, generator=torch.Generator().manual_seed(3))
TABLE, FEW = DRAWN < 0.5, DRAWN < 0.01
LENGTHS = (13, 29)
Q_TEXTS, K_TEXTS = torch.arange(Q_LEN) // 7, torch.arange(K_LEN) // 11
MIXED_TEXTS = torch.stack([torch.arange(K_LEN) * 7 % 5, torch.arange(K_LEN) // 8])
PLACES = torch.stack([torch.arange(K_LEN) % 9, torch.arange(K_LEN)])

MASKS = {
    "none": (None, lambda b, h, i, j: True),
    "causal": (masks.causal(), lambda b, h, i, j: j <= i),
    "causal with a cache": (masks.causal(8), lambda b, h, i, j: j <= i + 8),
    "causal that begins later": (masks.causal(-5), lambda b, h, i, j: j <= i - 5),
    "window": (masks.window(3, 2), lambda b, h, i, j: i - 3 <= j <= i + 2),
    "window of one key": (masks.window(0, 0), lambda b, h, i, j: i == j),
    "window with a cache": (masks.window(4, 0, offset=8), lambda b, h, i, j: i + 4 <= j <= i + 8),
    "window that ends before the query": (masks.window(9, -6), lambda b, h, i, j: i - 9 <= j <= i - 6),
    "prefix": (masks.prefix(5), lambda b, h, i, j: j < 5 or j <= i),
    "sinks": (masks.either(masks.window(2, 0), masks.leading(1)), lambda b, h, i, j: j == 0 or i - 2 <= j <= i),
    "leading by places": (masks.leading(2, PLACES), lambda b, h, i, j: (j % 9 if b == 0 else j) < 2),
    "right padding": (masks.padding(LENGTHS), lambda b, h, i, j: j < LENGTHS[b]),
    "left padding": (masks.padding(LENGTHS, "left", padded_len=K_LEN), lambda b, h, i, j: j >= K_LEN - LENGTHS[b]),
    "padded queries": (masks.padding((0, 17), of="query"), lambda b, h, i, j: i < (0, 17)[b]),
    "documents": (masks.documents(Q_TEXTS, K_TEXTS), lambda b, h, i, j: i // 7 == j // 11),
    "documents in any order": (
        masks.documents(MIXED_TEXTS),
        lambda b, h, i, j: i * 7 % 5 == j * 7 % 5 if b == 0 else i // 8 == j // 8,
    ),
    "both": (
        masks.both(masks.causal(3), masks.padding(LENGTHS), masks.window(11, 9)),
        lambda b, h, i, j: j <= i + 3 and j < LENGTHS[b] and i - 11 <= j <= i + 9,
    ),
    "shifted": (masks.shifted(masks.window(5, 0), 8), lambda b, h, i, j: i + 3 <= j <= i + 8),
    "a tensor": (masks.from_tensor(TABLE), lambda b, h, i, j: bool(TABLE[b, h, i, j])),
    "a tensor with few cells": (masks.from_tensor(FEW), lambda b, h, i, j: bool(FEW[b, h, i, j])),
    "a tensor of heads": (masks.from_tensor(TABLE[:1, :, :1]), lambda b, h, i, j: bool(TABLE[0, h, 0, j])),
    "a tensor of queries": (masks.from_tensor(TABLE[0, 0, :, :1]), lambda b, h, i, j: bool(TABLE[0, 0, i, 0])),
    "one head of a tensor": (
        masks.of_heads(masks.from_tensor(TABLE), range(1, 2)),
        lambda b, h, i, j: bool(TABLE[b, 1, i, j]),
    ),
    "a lambda of query and key": (lambda q, k: (q[:, None] + k) % 3 != 0, lambda b, h, i, j: (i + j) % 3 != 0),
    "a lambda of head, query and key": (
        lambda q, k: (q[:, None] + k) % 3 != torch.arange(HEADS)[:, None, None],
        lambda b, h, i, j: (i + j) % 3 != h,
    ),
    "a lambda of sequences": (
        lambda q, k: (k + torch.arange(BATCH)[:, None] > 15)[:, None, None],
        lambda b, h, i, j: j + b > 15,
    ),
    "nothing": (masks.either(), lambda b, h, i, j: False),
    "a lambda that allows nothing": (lambda q, k: torch.zeros(1, 1, dtype=torch.bool), lambda b, h, i, j: False),
}  # fmt: skip
SHAPES = [TileShape(4, 7, 3), TileShape(8, 8, 4), TileShape(16, 5, 5), TileShape(2, 3, 1), CPU_TILES]
Rule = Callable[[int, int, int, int], bool]


def written_out(rule: Rule) -> np.ndarray:
    cells = [
        [[[rule(b, h, i, j) for j in range(K_LEN)] for i in range(Q_LEN)] for h in range(HEADS)] for b in range(BATCH)
    ]
    return np.array(cells, dtype=bool)


VISIBLE = {name: written_out(rule) for name, (_, rule) in MASKS.items()}


@cache
def all_of(name: str, shape: TileShape, queries: range = range(Q_LEN), keys: range = range(K_LEN)) -> list[TileRegion]:
    return list(rectangles.rectangles(queries, keys, MASKS[name][0], shape, LIKE))


def everywhere(name: str) -> Iterator[tuple[TileShape, TileRegion]]:
    """The rectangles of every shape of tiles."""
    return ((shape, rectangle) for shape in SHAPES for rectangle in all_of(name, shape))


def corner(rectangle: TileRegion) -> tuple[slice, slice]:
    queries, keys, _ = rectangle
    return slice(queries.start, queries.stop), slice(keys.start, keys.stop)


def strips(rectangle: TileRegion, grain: int) -> Iterator[tuple[slice, slice]]:
    """The parts of a rectangle that the mask is asked about at once."""
    rows, columns = corner(rectangle)
    for start in range(columns.start, columns.stop, grain):
        yield rows, slice(start, min(start + grain, columns.stop))


def test_every_visible_cell_lies_in_exactly_one_rectangle() -> None:
    for name in MASKS:
        for shape in SHAPES:
            counts = np.zeros((Q_LEN, K_LEN), dtype=int)
            for rectangle in all_of(name, shape):
                assert rectangle.queries
                assert rectangle.keys
                counts[corner(rectangle)] += 1
            assert counts.max(initial=0) <= 1
            assert counts[VISIBLE[name].any(axis=(0, 1))].all()


def test_the_penalties_are_the_forbidden_cells_of_every_sequence_and_head() -> None:
    for name in MASKS:
        for _, rectangle in everywhere(name):
            own = VISIBLE[name][:, :, *corner(rectangle)]
            found = np.zeros(own.shape)
            for columns, penalty in rectangle.hidden:
                assert penalty.dtype == LIKE.dtype
                assert 0 <= columns.start < columns.stop <= len(rectangle.keys)
                found[..., columns] += penalty.numpy()
            assert np.array_equal(found, np.where(own, 0.0, FORBIDDEN))


EXACT = ["causal", "causal with a cache", "causal that begins later", "window", "window of one key",
         "window with a cache", "window that ends before the query", "documents", "right padding", "left padding",
         "a tensor with few cells", "a tensor", "nothing"]  # fmt: skip
"""Masks that know of every rectangle whether there is a cell in it."""


@pytest.mark.parametrize("name", EXACT)
def test_nothing_that_is_forbidden_as_a_whole_is_looked_at(name: str) -> None:
    seen = VISIBLE[name].any(axis=(0, 1))
    for shape, rectangle in everywhere(name):
        for rows, columns in strips(rectangle, shape.grain):
            assert seen[rows, columns].any(), (rectangle.queries, columns)


@pytest.mark.parametrize("name", EXACT)
def test_what_is_allowed_as_a_whole_is_not_asked_cell_by_cell(name: str) -> None:
    for shape, rectangle in everywhere(name):
        asked = np.zeros(len(rectangle.keys), dtype=bool)
        for columns, _ in rectangle.hidden:
            assert not asked[columns].any()
            asked[columns] = True
        for rows, columns in strips(rectangle, shape.grain):
            own = asked[columns.start - rectangle.keys.start : columns.stop - rectangle.keys.start]
            assert own.all() == own.any() == (not VISIBLE[name][:, :, rows, columns].all())


def test_blocks_of_queries_come_in_order_and_the_keys_of_each_too() -> None:
    for name in MASKS:
        for shape in SHAPES:
            found = all_of(name, shape)
            blocks = [range(start, min(start + shape.queries, Q_LEN)) for start in range(0, Q_LEN, shape.queries)]
            assert all(rectangle.queries in blocks and len(rectangle.keys) <= shape.keys for rectangle in found)
            for one, other in pairwise(found):
                assert one.queries.start <= other.queries.start
                assert one.queries != other.queries or one.keys.stop <= other.keys.start
            assert all(rectangle.keys.start % shape.grain == 0 for rectangle in found)


def test_the_count_of_cells_is_that_of_the_rectangles() -> None:
    for name in MASKS:
        for shape in SHAPES:
            expected = sum(len(queries) * len(keys) for queries, keys, _ in all_of(name, shape))
            assert n_cells_of(Q_LEN, K_LEN, MASKS[name][0], shape) == expected


@pytest.mark.parametrize(
    ("queries", "keys"), [(range(5, 18), range(7, 29)), (range(22, 23), range(31)), (range(0), range(31))]
)
@pytest.mark.parametrize("name", MASKS)
def test_a_part_of_queries_and_keys_has_the_cells_of_that_part_alone(name: str, queries: range, keys: range) -> None:
    counts = np.zeros((Q_LEN, K_LEN), dtype=int)
    for rectangle in all_of(name, TileShape(4, 7, 3), queries, keys):
        counts[corner(rectangle)] += 1
        own = VISIBLE[name][:, :, *corner(rectangle)]
        found = np.zeros(own.shape)
        for columns, penalty in rectangle.hidden:
            found[..., columns] += penalty.numpy()
        assert np.array_equal(found == 0, own)
    inside = np.zeros_like(counts, dtype=bool)
    inside[queries.start : queries.stop, keys.start : keys.stop] = True
    assert not counts[~inside].any()
    assert (counts[inside & VISIBLE[name].any(axis=(0, 1))] == 1).all()


def test_by_hand_six_tokens_that_see_no_later_one() -> None:
    found = list(rectangles.rectangles(range(6), range(6), masks.causal(), TileShape(4, 4, 2), LIKE))
    assert [(queries, keys) for queries, keys, _ in found] == [
        (range(4), range(4)),
        (range(4, 6), range(4)),
        (range(4, 6), range(4, 6)),
    ]
    p = FORBIDDEN
    (first,), none, (last,) = (hidden for _, _, hidden in found)
    assert none == ()
    assert first.columns == slice(0, 4)
    assert first.penalty[0, 0].tolist() == [[0, p, p, p], [0, 0, p, p], [0, 0, 0, p], [0, 0, 0, 0]]
    assert last.columns == slice(0, 2)
    assert last.penalty[0, 0].tolist() == [[0, p], [0, 0]]
    assert n_cells_of(6, 6, masks.causal(), TileShape(4, 4, 2)) == 16 + 8 + 4


def test_strips_that_are_mixed_are_asked_in_one_question_where_they_touch_and_else_apart() -> None:
    cells = torch.ones(2, 12, dtype=torch.bool)
    cells[1, [1, 3, 9]] = False
    ((queries, keys, hidden),) = rectangles.rectangles(
        range(2), range(12), masks.from_tensor(cells), TileShape(2, 12, 2), LIKE
    )
    assert (queries, keys) == (range(2), range(12))
    assert [columns for columns, _ in hidden] == [slice(0, 4), slice(8, 10)]


def test_what_was_mixed_before_a_gap_is_not_asked_again_after_it() -> None:
    found = list(rectangles.rectangles(range(2), range(12), masks.window(0, 0), TileShape(2, 12, 1), LIKE))
    assert [(keys, [columns for columns, _ in hidden]) for _, keys, hidden in found] == [(range(2), [slice(0, 2)])]
    sees = torch.ones(2, 9, dtype=torch.bool)
    sees[0, 1] = False
    sees[:, 3:6] = False
    found = list(rectangles.rectangles(range(2), range(9), masks.from_tensor(sees), TileShape(2, 9, 3), LIKE))
    assert [(keys, [columns for columns, _ in hidden]) for _, keys, hidden in found] == [
        (range(3), [slice(0, 3)]),
        (range(6, 9), []),
    ]


def test_a_mask_is_asked_for_few_cells_at_once_and_for_none_that_are_clear() -> None:
    asked = []
    rule = masks.causal()

    def cells(q_idx: torch.Tensor, k_idx: torch.Tensor) -> torch.Tensor:
        asked.append((len(q_idx), len(k_idx)))
        return rule(q_idx, k_idx)

    list(rectangles.rectangles(range(64), range(64), masks.Mask(cells, rule.extent), TileShape(8, 64, 4), LIKE))
    assert asked == [(8, 8)] * 8


def test_penalties_have_the_dtype_of_the_tiles_and_one_plane_where_all_heads_see_the_same() -> None:
    for dtype in (torch.float32, torch.float64):
        like = torch.empty(0, dtype=dtype)
        ((_, _, (hidden,)),) = rectangles.rectangles(range(3), range(5), masks.causal(), TileShape(4, 8, 8), like)
        assert hidden.penalty.dtype == dtype
        assert hidden.penalty.shape == (1, 1, 3, 5)
        assert hidden.penalty[0, 0, 0].tolist() == [0, *[pytest.approx(PENALTY, rel=1e-7)] * 4]


def test_a_tile_is_hidden_by_the_plane_of_its_own_sequence_and_head() -> None:
    penalty = -torch.arange(2 * 3 * 2 * 2, dtype=torch.float64).reshape(2, 3, 2, 2)
    for b in range(2):
        for h in range(3):
            for own, expected in (
                (penalty, penalty[b, h]),
                (penalty[:1], penalty[0, h]),
                (penalty[:, :1], penalty[b, 0]),
                (penalty[:1, :1], penalty[0, 0]),
            ):
                tile = torch.ones(2, 5, dtype=torch.float64)
                hide(tile, [MaskedColumns(slice(1, 3), own)], (b, h))
                assert torch.equal(tile[:, 1:3], 1 + expected)
                assert (tile[:, [0, 3, 4]] == 1).all()


def test_several_penalties_hide_each_its_own_columns() -> None:
    tile = torch.zeros(1, 5)
    hide(
        tile,
        [
            MaskedColumns(slice(0, 1), torch.full((1, 1, 1, 1), -2.0)),
            MaskedColumns(slice(3, 5), torch.full((1, 1, 1, 2), -3.0)),
        ],
        (1, 1),
    )
    assert tile.tolist() == [[-2.0, 0.0, 0.0, -3.0, -3.0]]


def test_the_numbers_of_a_range_are_short_integers() -> None:
    found = indices(range(3, 6), LIKE)
    assert found.tolist() == [3, 4, 5]
    assert found.dtype == torch.int32


@pytest.mark.parametrize("shape", [CPU_TILES, DEVICE_TILES])
def test_the_edges_of_tiles_and_of_blocks_that_are_powers_of_two_meet(shape: TileShape) -> None:
    assert shape.queries.bit_count() == 1
    assert shape.grain <= shape.keys
    assert shape.keys % shape.grain == 0


def test_the_tiles_are_larger_where_a_call_costs_more() -> None:
    assert tile_shape(torch.device("cpu"), 100) == CPU_TILES
    assert tile_shape(torch.device("cuda", 0), 100) == DEVICE_TILES
    assert tile_shape(torch.device("mps"), 100) == DEVICE_TILES


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_keys_of_a_block_of_queries_fit_into_the_memory_of_a_few_tiles(device: str) -> None:
    whole = tile_shape(torch.device(device), 1)
    for n_keys in (1 << power for power in range(10, 18)):
        queries, keys, grain = tile_shape(torch.device(device), n_keys)
        assert queries * keys == whole.queries * whole.keys
        assert queries * grain == whole.queries * whole.grain
        assert queries * n_keys <= 2 * whole.queries * whole.keys


def test_a_penalty_makes_a_share_exactly_zero_and_no_nan() -> None:
    for dtype in (torch.float32, torch.float64):
        log2 = torch.tensor([PENALTY, PENALTY + 1e4, 4 * PENALTY], dtype=dtype)
        assert log2.isfinite().all()
        assert (log2.exp2() == 0).all()
        assert (log2.exp2() * log2 == 0).all()
