"""Scores and shares asked for tile by tile: against `attend`, and against loops over the formula that share no code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support import oracle
from torch import Tensor

from mhacli.attention import attend, masks
from mhacli.attention.positions import alibi
from mhacli.attention.tiled import tiles as rectangles
from mhacli.attention.tiled.scores import (
    LOG2_E,
    ComputedPattern,
    Scores,
    VirtualPattern,
    distance_bias,
    sum_of_biases,
    tensor_bias,
    uniform,
)
from mhacli.attention.tiled.tiles import PENALTY, Grid, PatternTiles, TileRegion, TileShape, visible_keys

Normal = Callable[..., Tensor]
TILES = [TileShape(4, 7, 3), TileShape(8, 4, 2)]
BATCH, HEADS, KV_HEADS, Q_LEN, K_LEN, D_HEAD, D_V = 2, 6, 3, 11, 13, 5, 7
DRAWN = torch.rand(BATCH, HEADS, Q_LEN, K_LEN, generator=torch.Generator().manual_seed(1)) < 0.6
LENGTHS = (5, 12)
Q_PLACES = torch.stack([torch.arange(Q_LEN), torch.arange(Q_LEN) % 4])
K_PLACES = torch.stack([torch.arange(K_LEN) - 2, torch.arange(K_LEN) % 4])

MASKS: dict[str, Any] = {
    "all": (None, lambda b, h, i, j: True),
    "causal": (masks.causal(), lambda b, h, i, j: j <= i),
    "first queries see nothing": (masks.causal(-3), lambda b, h, i, j: j <= i - 3),
    "window": (masks.window(2, 1), lambda b, h, i, j: i - 2 <= j <= i + 1),
    "padding": (masks.padding(LENGTHS), lambda b, h, i, j: j < LENGTHS[b]),
    "heads and sequences differ": (masks.from_tensor(DRAWN), lambda b, h, i, j: bool(DRAWN[b, h, i, j])),
    "a lambda": (lambda q, k: ((q[:, None] * k) % 3 != 1)[None, None], lambda b, h, i, j: i * j % 3 != 1),
    "one sequence of padding only": (
        masks.both(masks.causal(), masks.padding((0, 9))),
        lambda b, h, i, j: j <= i and j < (0, 9)[b],
    ),
}  # fmt: skip


@pytest.fixture(params=TILES, ids=lambda shape: "x".join(map(str, shape)))
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TileShape:
    monkeypatch.setattr(rectangles, "CPU_TILES", request.param)
    return request.param


def cells_of(name: str, batch: int = BATCH, heads: int = HEADS, q_len: int = Q_LEN, k_len: int = K_LEN) -> np.ndarray:
    rule = MASKS[name][1]
    cells = np.zeros((batch, heads, q_len, k_len), dtype=bool)
    for b, h, i, j in np.ndindex(*cells.shape):
        cells[b, h, i, j] = rule(b, h, i, j)
    return cells


def all_rectangles(pattern: Grid) -> list[TileRegion]:
    _, _, n_queries, n_keys = pattern.shape
    shape = rectangles.tile_shape(pattern.like.device, n_keys)
    return list(rectangles.rectangles(range(n_queries), range(n_keys), pattern.allowed, shape, pattern.like))


class Whole(NamedTuple):
    log2: np.ndarray
    weights: np.ndarray


def gathered(pattern: PatternTiles) -> Whole:
    """Every tile put in its place. What no rectangle holds stays 0, and log2 of it −∞. Tiles come in used memory."""
    log2, shares = np.full(pattern.shape, -np.inf), np.zeros(pattern.shape)
    for rectangle in all_rectangles(pattern):
        rows, columns = (slice(span.start, span.stop) for span in rectangle[:2])
        for b, h in np.ndindex(*pattern.shape[:2]):
            tile = pattern.like.new_full((len(rectangle.queries), len(rectangle.keys)), torch.nan)
            own = tile.clone()
            pattern.tile_into(tile, own, (b, h), rectangle)
            log2[b, h, rows, columns], shares[b, h, rows, columns] = tile, own
    return Whole(log2, shares)


def log2_of(scores: Scores, lse: Tensor | None = None) -> np.ndarray:
    found = np.full(scores.shape, -np.inf)
    for rectangle in all_rectangles(scores):
        rows, columns = (slice(span.start, span.stop) for span in rectangle[:2])
        for b, h in np.ndindex(*scores.shape[:2]):
            tile = scores.like.new_full((len(rectangle.queries), len(rectangle.keys)), torch.nan)
            scores.log2_into(tile, (b, h), rectangle, lse)
            found[b, h, rows, columns] = tile
    return found


def lse_of(scores: np.ndarray) -> Tensor:
    """The natural log-sum-exp of each row of scores, 0 for a row of −∞."""
    lse = np.zeros(scores.shape[:3])
    for place in np.ndindex(*scores.shape[:3]):
        finite = [float(score) for score in scores[place] if score != -math.inf]
        lse[place] = math.log(sum(math.exp(score) for score in finite)) if finite else 0.0
    return torch.from_numpy(lse)


def heads(normal: Normal, n_kv_heads: int = KV_HEADS, std: float = 1.5) -> tuple[Tensor, Tensor, Tensor]:
    q, k = normal(BATCH, HEADS, Q_LEN, D_HEAD, std=std), normal(BATCH, n_kv_heads, K_LEN, D_HEAD, std=std)
    return q, k, normal(BATCH, n_kv_heads, K_LEN, D_V)


@pytest.mark.parametrize("n_kv_heads", [6, 3, 1])
@pytest.mark.parametrize("name", MASKS)
def test_tiles_hold_the_shares_of_the_formula_written_as_loops(
    normal: Normal, name: str, n_kv_heads: int, tiles: TileShape
) -> None:
    q, k, v = heads(normal, n_kv_heads)
    expected = oracle.attention(q.numpy(), k.numpy(), v.numpy(), scale=0.7, allowed=cells_of(name))
    pattern = VirtualPattern(Scores(q, k, scale=0.7, allowed=MASKS[name][0]), lse_of(expected.scores))
    found = gathered(pattern)
    np.testing.assert_allclose(found.weights, expected.pattern, rtol=0, atol=1e-13)
    assert (found.weights[~cells_of(name)] == 0).all()
    visible = cells_of(name)
    np.testing.assert_allclose(found.log2[visible], np.log2(expected.pattern[visible]), rtol=0, atol=1e-12)
    assert (found.log2[~visible] <= PENALTY * (1 - 1e-6)).all()


@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", ["all", "heads and sequences differ", "first queries see nothing"])
def test_tiles_hold_the_pattern_of_attend(
    normal: Normal, name: str, softcap: float | None, with_bias: bool, tiles: TileShape
) -> None:
    q, k, v = heads(normal)
    bias = normal(BATCH, HEADS, Q_LEN, K_LEN) if with_bias else None
    seen: dict[str, Tensor] = {}
    allowed = MASKS[name][0]
    attend(
        q, k, v, allowed=allowed, bias=bias, scale=1.3, softcap=softcap, tap=lambda site, t, **_: seen.update({site: t})
    )
    own_bias = None if bias is None else tensor_bias(bias)
    scores = Scores(q, k, scale=1.3, softcap=softcap, bias=own_bias, allowed=allowed)
    found = gathered(VirtualPattern(scores, lse_of(seen["scores"].numpy())))
    np.testing.assert_allclose(found.weights, seen["pattern"].numpy(), rtol=0, atol=1e-13)
    without_lse = log2_of(scores)
    visible = cells_of(name)
    np.testing.assert_allclose(
        without_lse[visible], seen["scores"].numpy()[visible] * math.log2(math.e), rtol=0, atol=1e-12
    )
    assert (without_lse[~visible] <= PENALTY * (1 - 1e-6)).all()


@pytest.mark.parametrize("n_kv_heads", [6, 3])
@pytest.mark.parametrize("name", MASKS)
def test_some_queries_in_any_order_have_the_rows_that_they_have_among_all(
    normal: Normal, name: str, n_kv_heads: int, tiles: TileShape
) -> None:
    q, k, v = heads(normal, n_kv_heads)
    bias, queries, allowed = normal(BATCH, HEADS, Q_LEN, K_LEN), torch.tensor([9, 0, 4, 10, 4]), MASKS[name][0]
    expected = oracle.attention(q.numpy(), k.numpy(), v.numpy(), scale=0.7, bias=bias.numpy(), allowed=cells_of(name))
    virtual = VirtualPattern(Scores(q, k, scale=0.7, bias=tensor_bias(bias), allowed=allowed), lse_of(expected.scores))
    computed = ComputedPattern(torch.from_numpy(expected.pattern), allowed)
    for pattern in (virtual, computed):
        rows = gathered(pattern.of_queries(queries)).weights
        np.testing.assert_allclose(rows, expected.pattern[:, :, queries], rtol=0, atol=1e-13)
        assert (rows[~cells_of(name)[:, :, queries]] == 0).all()


@pytest.mark.parametrize("name", ["all", "causal", "padding"])
def test_softcap_comes_before_the_bias_and_both_after_the_scale(normal: Normal, name: str, tiles: TileShape) -> None:
    q, k, v = heads(normal, std=2.0)
    bias = normal(BATCH, HEADS, Q_LEN, K_LEN, std=3.0)
    expected = oracle.attention(
        q.numpy(), k.numpy(), v.numpy(), scale=0.9, softcap=1.5, bias=bias.numpy(), allowed=cells_of(name)
    )
    scores = Scores(q, k, scale=0.9, softcap=1.5, bias=tensor_bias(bias), allowed=MASKS[name][0])
    found = gathered(VirtualPattern(scores, lse_of(expected.scores)))
    np.testing.assert_allclose(found.weights, expected.pattern, rtol=0, atol=1e-13)


def test_by_hand_two_keys_whose_scores_differ_by_one() -> None:
    q = torch.tensor([[[[2.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[0.0], [1.0]]]], dtype=torch.float64)
    scores = Scores(q, k, scale=0.5)
    assert scores.shape == (1, 1, 1, 2)
    assert log2_of(scores)[0, 0, 0].tolist() == [0.0, math.log2(math.e)]
    lse = torch.tensor([[[math.log(1 + math.e)]]], dtype=torch.float64)
    found = gathered(VirtualPattern(scores, lse))
    assert found.weights[0, 0, 0].tolist() == pytest.approx([1 / (1 + math.e), math.e / (1 + math.e)], rel=1e-15)
    assert found.log2[0, 0, 0].tolist() == pytest.approx(np.log2([1 / (1 + math.e), math.e / (1 + math.e)]), rel=1e-14)
    assert math.exp2(LOG2_E) == pytest.approx(math.e, rel=1e-15)


def test_by_hand_three_query_heads_read_the_first_kv_head_and_three_the_second() -> None:
    k = torch.tensor([10.0, 20.0], dtype=torch.float64).reshape(1, 2, 1, 1)
    q = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(1, 6, 1, 1)
    found = log2_of(Scores(q, k, scale=1.0))[0, :, 0, 0] / LOG2_E
    assert found.tolist() == pytest.approx([10, 20, 30, 80, 100, 120], rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_16_bit_numbers_are_widened_and_nothing_is_rounded_again(
    normal: Normal, dtype: torch.dtype, softcap: float | None, tiles: TileShape
) -> None:
    q, k, v = (t.to(dtype) for t in heads(normal))
    wide = [t.double().numpy() for t in (q, k, v)]
    expected = oracle.attention(*wide, scale=0.8, softcap=softcap, allowed=cells_of("causal"))
    scores = Scores(q, k, scale=0.8, softcap=softcap, allowed=masks.causal())
    assert scores.like.dtype == torch.float32
    assert scores.like.numel() == 0
    pattern = VirtualPattern(scores, lse_of(expected.scores).float())
    assert (pattern.like.dtype, pattern.shape) == (torch.float32, (BATCH, HEADS, Q_LEN, K_LEN))
    np.testing.assert_allclose(gathered(pattern).weights, expected.pattern, rtol=0, atol=2e-6)


def test_the_maths_have_the_dtype_of_the_queries_and_32_bits_at_least() -> None:
    for given, of_maths in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        heads = torch.zeros(1, 1, 1, 1, dtype=given)
        assert Scores(heads, heads, scale=1.0).like.dtype == of_maths


HEAD_RANGES = [range(0, 6), range(0, 2), range(2, 6), range(1, 2), range(5, 6), range(4, 5)]


@pytest.mark.parametrize("chosen", [*HEAD_RANGES, range(2, 4)])
@pytest.mark.parametrize("name", ["heads and sequences differ", "causal", "padding", "a lambda", "all"])
def test_some_heads_have_the_scores_of_those_heads(normal: Normal, chosen: range, name: str, tiles: TileShape) -> None:
    q, k, _ = heads(normal)
    bias = tensor_bias(normal(BATCH, HEADS, Q_LEN, K_LEN))
    scores = Scores(q, k, scale=0.6, softcap=4.0, bias=bias, allowed=MASKS[name][0])
    part, whole = scores.of_heads(chosen), log2_of(scores)
    assert part.shape == (BATCH, len(chosen), Q_LEN, K_LEN)
    found, expected = log2_of(part), whole[:, chosen.start : chosen.stop]
    visible = cells_of(name)[:, chosen.start : chosen.stop]
    assert np.array_equal(found[visible], expected[visible])
    assert (found[~visible] <= PENALTY * (1 - 1e-6)).all()


@pytest.mark.parametrize("chosen", [range(0, 1), range(2, 3), range(1, 3), range(3, 6), range(6, 8), range(3, 9)])
def test_a_part_of_the_heads_that_share_keys_reads_their_keys(normal: Normal, chosen: range) -> None:
    q, k = normal(2, 9, 5, 3), normal(2, 3, 7, 3)
    expected = log2_of(Scores(q, k, scale=1.0))[:, chosen.start : chosen.stop]
    found = log2_of(Scores(q, k, scale=1.0).of_heads(chosen))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("chosen", HEAD_RANGES)
def test_the_scores_of_some_heads_copy_nothing(normal: Normal, chosen: range) -> None:
    q, k, _ = heads(normal)
    part = Scores(q, k, scale=0.6).of_heads(chosen)
    assert part.q.data_ptr() == q[:, chosen.start].data_ptr()
    assert part.k.data_ptr() == k[:, chosen.start // 2].data_ptr()
    assert (part.scale, part.softcap, part.bias, part.allowed) == (0.6, None, None, None)


def test_heads_of_some_heads_are_counted_from_the_first_of_them(normal: Normal) -> None:
    q, k, _ = heads(normal, 6)
    bias = tensor_bias(normal(BATCH, HEADS, Q_LEN, K_LEN))
    scores = Scores(q, k, scale=1.0, bias=bias, allowed=masks.from_tensor(DRAWN))
    twice = log2_of(scores.of_heads(range(1, 6)).of_heads(range(2, 4)))
    assert np.array_equal(twice[DRAWN[:, 3:5]], log2_of(scores)[:, 3:5][DRAWN[:, 3:5]])


def test_a_mask_of_three_axes_has_heads_and_they_are_chosen_too(normal: Normal) -> None:
    q, k, _ = heads(normal, 6)
    scores = Scores(q, k, scale=1.0, allowed=lambda q_idx, k_idx: DRAWN[0][:, q_idx][:, :, k_idx])
    found = log2_of(scores.of_heads(range(4, 6)))
    assert np.array_equal(found > -1e20, DRAWN[:1, 4:6].expand(BATCH, -1, -1, -1).numpy())


def test_a_mask_of_two_axes_is_the_same_for_some_heads(normal: Normal) -> None:
    q, k, _ = heads(normal, 6)
    scores = Scores(q, k, scale=1.0, allowed=lambda q_idx, k_idx: DRAWN[0, 0][q_idx][:, k_idx])
    found = log2_of(scores.of_heads(range(4, 6)))
    assert np.array_equal(found > -1e20, DRAWN[:1, :1].expand(BATCH, 2, -1, -1).numpy())


def test_a_plain_score_is_a_scaled_product_and_nothing_else(normal: Normal) -> None:
    q, k, _ = heads(normal)
    assert Scores(q, k, scale=1.0).is_plain
    assert Scores(q, k, scale=1.0, allowed=masks.window(1, 1)).is_plain
    assert not Scores(q, k, scale=1.0, softcap=1.0).is_plain
    assert not Scores(q, k, scale=1.0, bias=tensor_bias(torch.zeros(1))).is_plain


@pytest.mark.parametrize("name", MASKS)
def test_a_pattern_that_was_computed_whole_gives_the_same_tiles_in_float64(
    normal: Normal, name: str, tiles: TileShape
) -> None:
    q, k, v = heads(normal)
    expected = oracle.attention(q.numpy(), k.numpy(), v.numpy(), allowed=cells_of(name)).pattern
    for dtype in (torch.float64, torch.float32):
        pattern = ComputedPattern(torch.from_numpy(expected).to(dtype), MASKS[name][0])
        assert (pattern.shape, pattern.like.dtype, pattern.like.numel()) == (expected.shape, torch.float64, 0)
        found, rounded = gathered(pattern), pattern.pattern.double().numpy()
        assert np.array_equal(found.weights, rounded)
        visible = cells_of(name)
        np.testing.assert_allclose(found.log2[visible], np.log2(rounded[visible]), rtol=1e-15)
        assert (found.log2[~visible] <= PENALTY).all()


def test_a_share_of_zero_in_a_computed_pattern_has_a_logarithm_that_is_a_number() -> None:
    found = gathered(ComputedPattern(torch.tensor([[[[1.0, 0.0]]]])))
    assert found.log2[0, 0, 0].tolist() == [0.0, PENALTY]


@pytest.mark.parametrize("name", MASKS)
def test_uniform_attention_gives_every_visible_key_the_same(name: str, tiles: TileShape) -> None:
    visible = cells_of(name)
    counts = torch.from_numpy(visible.sum(axis=-1)).double()
    pattern = uniform(counts, K_LEN, MASKS[name][0])
    assert pattern.shape == (BATCH, HEADS, Q_LEN, K_LEN)
    expected = np.where(visible, 1 / np.maximum(visible.sum(axis=-1, keepdims=True), 1), 0.0)
    np.testing.assert_allclose(gathered(pattern).weights, expected, rtol=1e-14)


@pytest.mark.parametrize("name", MASKS)
def test_the_visible_keys_of_each_query_are_counted(normal: Normal, name: str, tiles: TileShape) -> None:
    q, k, _ = heads(normal)
    scores = Scores(q, k, scale=1.0, allowed=MASKS[name][0])
    found = visible_keys(scores)
    assert found.dtype == torch.float64
    assert np.array_equal(found.expand(BATCH, HEADS, -1).numpy(), cells_of(name).sum(axis=-1))
    differs = name in ("padding", "heads and sequences differ", "one sequence of padding only")
    assert found.shape == (BATCH if differs else 1, HEADS if name == "heads and sequences differ" else 1, Q_LEN)


def test_uniform_attention_is_one_head_where_the_mask_is_the_same_for_all(tiles: TileShape) -> None:
    q = torch.zeros(BATCH, HEADS, Q_LEN, D_HEAD, dtype=torch.float64)
    scores = Scores(
        q, torch.zeros(BATCH, KV_HEADS, K_LEN, D_HEAD, dtype=torch.float64), scale=1.0, allowed=masks.causal()
    )
    pattern = uniform(visible_keys(scores), K_LEN, masks.causal())
    assert pattern.shape == (1, 1, Q_LEN, K_LEN)
    found = gathered(pattern).weights[0, 0]
    for i in range(Q_LEN):
        assert found[i].tolist() == pytest.approx([1 / (i + 1)] * (i + 1) + [0.0] * (K_LEN - i - 1), rel=1e-14)


def asked(bias: Callable[..., Tensor], n_heads: int, dtype: torch.dtype = torch.int32) -> np.ndarray:
    """A bias asked in four quarters and put together."""
    found = np.full((BATCH, n_heads, Q_LEN, K_LEN), np.nan)
    for rows in (range(4), range(4, Q_LEN)):
        for columns in (range(6), range(6, K_LEN)):
            for b, h in np.ndindex(BATCH, n_heads):
                own = bias(b, h, torch.tensor(rows, dtype=dtype), torch.tensor(columns, dtype=dtype))
                found[b, h, rows.start : rows.stop, columns.start : columns.stop] = own
    return found


PLACES = {
    "every sequence its own": (Q_PLACES, K_PLACES),
    "the same for all": (Q_PLACES[0], K_PLACES[0]),
    "one row for all": (Q_PLACES[1:], K_PLACES[1:]),
    "queries the same for all": (Q_PLACES[0], K_PLACES),
    "keys the same for all": (Q_PLACES, K_PLACES[:1]),
}


@pytest.mark.parametrize("n_heads", [1, 4, 9])
@pytest.mark.parametrize("name", PLACES)
def test_distance_costs_what_alibi_says(name: str, n_heads: int) -> None:
    q_places, k_places = PLACES[name]
    found = asked(distance_bias(n_heads, q_places, k_places, dtype=torch.float64), n_heads)
    rows = [places.expand(BATCH, -1) for places in (q_places, k_places)]
    np.testing.assert_allclose(found, alibi(n_heads, *rows, dtype=torch.float64).numpy(), rtol=1e-6)
    np.testing.assert_allclose(found, oracle.distances(n_heads, *(row.tolist() for row in rows)), rtol=1e-6)


def test_by_hand_distance_costs_each_head_its_own_rate_per_step() -> None:
    bias = distance_bias(2, torch.tensor([4, 5]), torch.tensor([4, 5, 6]), dtype=torch.float32)
    q_idx, k_idx = torch.arange(2), torch.arange(3)
    assert bias(0, 0, q_idx, k_idx).tolist() == [[0, -1 / 16, -2 / 16], [-1 / 16, 0, -1 / 16]]
    assert bias(1, 1, q_idx, k_idx).tolist() == [[0, -1 / 256, -2 / 256], [-1 / 256, 0, -1 / 256]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_shares_under_alibi_are_those_of_attend_in_the_dtype_of_the_maths(
    normal: Normal, dtype: torch.dtype, tiles: TileShape
) -> None:
    sizes = ((9, Q_LEN, D_HEAD), (3, K_LEN, D_HEAD), (3, K_LEN, D_V))  # of nine slopes one is no power of two
    q, k, v = (normal(BATCH, *size).to(dtype).double() for size in sizes)
    whole = oracle.distances(9, Q_PLACES.tolist(), K_PLACES.tolist())
    expected = oracle.attention(q.numpy(), k.numpy(), v.numpy(), bias=whole, scale=0.5)
    scores = Scores(q.to(dtype), k.to(dtype), scale=0.5, bias=distance_bias(9, Q_PLACES, K_PLACES, dtype=torch.float64))
    found = gathered(VirtualPattern(scores, lse_of(expected.scores).to(dtype)))
    ceiling = 1e-13 if dtype == torch.float64 else 1e-6
    np.testing.assert_allclose(found.weights, expected.pattern, rtol=0, atol=ceiling)


SIZES = [(), (K_LEN,), (1,), (Q_LEN, K_LEN), (Q_LEN, 1), (1, K_LEN), (HEADS, Q_LEN, K_LEN), (HEADS, 1, 1), (HEADS, 1, K_LEN),
         (HEADS, Q_LEN, 1), (1, Q_LEN, K_LEN), (BATCH, 1, Q_LEN, K_LEN), (BATCH, HEADS, Q_LEN, K_LEN), (BATCH, HEADS, 1, 1),
         (BATCH, 1, 1, K_LEN), (BATCH, 1, Q_LEN, 1), (1, HEADS, Q_LEN, K_LEN), (1, 1, 1, 1)]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_of_any_shape_that_broadcasts_is_a_bias(normal: Normal, size: tuple[int, ...]) -> None:
    numbers = normal(*size)
    expected = np.broadcast_to(numbers.numpy(), (BATCH, HEADS, Q_LEN, K_LEN))
    assert np.array_equal(asked(tensor_bias(numbers), HEADS), expected)
    assert np.array_equal(asked(tensor_bias(numbers), HEADS, dtype=torch.int64), expected)


@pytest.mark.parametrize("size", SIZES)
def test_shares_with_a_bias_of_any_shape_are_those_of_attend(normal: Normal, size: tuple[int, ...]) -> None:
    q, k, v = heads(normal)
    numbers, seen = normal(*size), {}
    attend(q, k, v, bias=numbers, tap=lambda site, t, **_: seen.update({site: t}))
    scores = Scores(q, k, scale=D_HEAD**-0.5, bias=tensor_bias(numbers))
    found = gathered(VirtualPattern(scores, seen["scores"].logsumexp(dim=-1)))
    np.testing.assert_allclose(found.weights, seen["pattern"].numpy(), rtol=0, atol=1e-14)


def test_several_biases_add_up(normal: Normal) -> None:
    parts = [normal(HEADS, 1, K_LEN), normal(Q_LEN, K_LEN), normal(BATCH, 1, 1, 1)]
    found = asked(sum_of_biases(*map(tensor_bias, parts)), HEADS)
    np.testing.assert_allclose(found, sum(part.numpy() for part in parts) + np.zeros(found.shape), rtol=1e-14)
    both = asked(
        sum_of_biases(tensor_bias(parts[0]), distance_bias(HEADS, Q_PLACES, K_PLACES, dtype=torch.float64)), HEADS
    )
    costs = oracle.distances(HEADS, Q_PLACES.tolist(), K_PLACES.tolist())
    np.testing.assert_allclose(both, parts[0].numpy() + costs, rtol=1e-6)
    assert np.array_equal(asked(sum_of_biases(tensor_bias(parts[1])), HEADS), asked(tensor_bias(parts[1]), HEADS))


def test_what_is_asked_again_is_the_same_and_no_number_of_the_input_changes(normal: Normal, tiles: TileShape) -> None:
    q, k, _ = heads(normal)
    before = (q.clone(), k.clone())
    numbers = normal(Q_LEN, K_LEN)
    kept = numbers.clone()
    scores = Scores(q, k, scale=0.6, softcap=2.0, bias=tensor_bias(numbers), allowed=masks.causal(2))
    assert np.array_equal(log2_of(scores), log2_of(scores))
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    assert torch.equal(numbers, kept)
    pattern = ComputedPattern(kept[None, None].softmax(dim=-1))
    unchanged = pattern.pattern.clone()
    gathered(pattern)
    assert torch.equal(pattern.pattern, unchanged)


def test_both_ways_of_having_shares_answer_to_the_same_questions(normal: Normal) -> None:
    q, k, _ = heads(normal)
    scores = Scores(q, k, scale=1.0)
    assert isinstance(scores, Grid)
    assert isinstance(VirtualPattern(scores, torch.zeros(BATCH, HEADS, Q_LEN, dtype=torch.float64)), PatternTiles)
    assert isinstance(ComputedPattern(torch.zeros(1, 1, 1, 1)), PatternTiles)
