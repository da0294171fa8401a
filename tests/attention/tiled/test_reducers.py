"""Every statistic: by hand, against loops over the cells of a whole pattern, and what must hold of any pattern."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mhacli.attention import masks
from mhacli.attention.tiled import statistics
from mhacli.attention.tiled import tiles as rectangles
from mhacli.attention.tiled.conditions import matcher
from mhacli.attention.tiled.scores import ComputedPattern, Scores, VirtualPattern, uniform
from mhacli.attention.tiled.statistics import (
    ColumnSums,
    Distance,
    Entropy,
    Marked,
    Matched,
    Peak,
    Profile,
    RowSquareSums,
    RowSums,
    SameLabel,
    StatisticsRequest,
    summarise,
)
from mhacli.attention.tiled.tiles import PENALTY, Reducer, Tile, TileShape, n_cells, reduce_tiles, visible_keys
from mhacli.spec.conditions import DUPLICATE, INDUCTION, parse_pattern

Normal = Callable[..., Tensor]
BATCH, HEADS = 2, 3
TILES = [TileShape(8, 7, 3), TileShape(4, 8, 4)]
SIZES = [(13, 23), (23, 13), (19, 19)]
BLOCKS = (1, 2, 4, 8, 16, 64)
MASKS: dict[str, Any] = {
    "all": None,
    "causal": masks.causal(),
    "causal with a cache": masks.causal(8),
    "first queries see nothing": masks.causal(-5),
    "window": masks.window(4, 2),
    "documents": masks.documents(torch.arange(23) // 9),
    "padding": masks.both(masks.padding((7, 16)), masks.causal(3)),
    "heads differ": masks.from_tensor(
        torch.rand(BATCH, HEADS, 23, 23, generator=torch.Generator().manual_seed(5)) < 0.4
    ),
    "nothing": masks.either(),
}
"""The tensor reaches as far as the longest of the texts."""


@pytest.fixture(params=TILES, ids=lambda shape: "x".join(map(str, shape)))
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TileShape:
    monkeypatch.setattr(rectangles, "CPU_TILES", request.param)
    return request.param


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of four queries and five keys."""
    monkeypatch.setattr(rectangles, "CPU_TILES", TileShape(4, 5, 5))


def visible_of(name: str, q_len: int, k_len: int) -> np.ndarray:
    mask = MASKS[name]
    cells = torch.ones(1, 1, 1, 1, dtype=torch.bool) if mask is None else mask(torch.arange(q_len), torch.arange(k_len))
    return cells.expand(BATCH, HEADS, q_len, k_len).numpy()


def masked(normal: Normal, name: str, q_len: int, k_len: int, std: float = 2.0) -> ComputedPattern:
    """Random shares that sum to 1 where the mask leaves a key."""
    visible = visible_of(name, q_len, k_len)
    powers = np.exp(normal(BATCH, HEADS, q_len, k_len, std=std).numpy()) * visible
    sums = powers.sum(axis=-1, keepdims=True)
    shares = torch.from_numpy(powers / np.where(sums == 0, 1, sums))
    return ComputedPattern(shares, MASKS[name])


def reduced(pattern: Any, *reducers: Reducer) -> None:
    reduce_tiles(pattern, reducers)


def summed(shares: np.ndarray, worth: Callable[[int, int, float], float]) -> np.ndarray:
    """For each query the sum over keys of what a cell is worth, cell by cell."""
    found = np.zeros(shares.shape[:3])
    for b, h, i, j in np.ndindex(*shares.shape):
        found[b, h, i] += worth(i, j, float(shares[b, h, i, j]))
    return found


def near(found: Tensor, expected: Any) -> None:
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)


CASES = [("all", *size) for size in SIZES] + [("causal", *size) for size in SIZES]
CASES += [(name, *SIZES[number % 3]) for number, name in enumerate(MASKS) if name not in ("all", "causal")]


@pytest.mark.parametrize(("name", "q_len", "k_len"), CASES)
def test_what_is_said_of_queries_is_what_loops_over_the_cells_say(
    normal: Normal, name: str, q_len: int, k_len: int, tiles: TileShape
) -> None:
    pattern = masked(normal, name, q_len, k_len)
    mass, peak, entropy, squares, distance = (
        kind(pattern) for kind in (RowSums, Peak, Entropy, RowSquareSums, Distance)
    )
    marks = torch.arange(BATCH * k_len).reshape(BATCH, k_len) % 5 == 2
    marked = Marked(pattern, marks)
    reduced(pattern, mass, peak, entropy, squares, distance, marked)
    shares = pattern.pattern.numpy()
    near(mass.per_query, summed(shares, lambda i, j, p: p))
    near(entropy.per_query, summed(shares, lambda i, j, p: -p * math.log(p) if p else 0.0))
    near(squares.per_query, summed(shares, lambda i, j, p: p * p))
    near(distance.per_query, summed(shares, lambda i, j, p: p * abs(i - j)))
    for b in range(BATCH):
        one = summed(shares[b : b + 1], lambda i, j, p, b=b: p * ((b * k_len + j) % 5 == 2))
        near(marked.per_query[b], one[0])
    for place in np.ndindex(BATCH, HEADS, q_len):
        largest = max(float(share) for share in shares[place])
        found = peak.per_query[place].item()
        assert found == pytest.approx(math.log(largest), abs=1e-12) if largest else found < -1e29


@pytest.mark.parametrize(("name", "q_len", "k_len"), CASES)
def test_what_keys_receive_and_the_maps_are_what_loops_over_the_cells_say(
    normal: Normal, name: str, q_len: int, k_len: int, tiles: TileShape
) -> None:
    pattern = masked(normal, name, q_len, k_len)
    found = {block: ColumnSums(pattern, block) for block in BLOCKS}
    reduced(pattern, *found.values())
    shares = pattern.pattern.numpy()
    for block, received in found.items():
        near(received.per_key, shares.sum(axis=2))
        blocks = np.zeros((BATCH, HEADS, math.ceil(q_len / block), math.ceil(k_len / block)))
        for i, j in np.ndindex(q_len, k_len):
            blocks[:, :, i // block, j // block] += shares[:, :, i, j]
        near(received.map, blocks)


@pytest.mark.parametrize(("name", "q_len", "k_len"), CASES)
def test_the_profile_is_what_loops_over_the_cells_say(
    normal: Normal, name: str, q_len: int, k_len: int, tiles: TileShape
) -> None:
    pattern = masked(normal, name, q_len, k_len)
    profile = Profile(pattern)
    reduced(pattern, profile)
    expected = np.zeros((BATCH, HEADS, q_len + k_len - 1))
    for i, j in np.ndindex(q_len, k_len):
        expected[:, :, j - i + q_len - 1] += pattern.pattern.numpy()[:, :, i, j]
    near(profile.mass, expected)
    assert profile.zero == q_len - 1


def labels_of(length: int, high: int, seed: int) -> Tensor:
    """Labels from −2 on: some are below 0 and mean nothing. Of one label alone there is nothing else."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2 if high > 1 else 0, high, (BATCH, length), generator=generator)


@pytest.mark.parametrize("dense", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("high", [1, 4, 40])
@pytest.mark.parametrize(("name", "q_len", "k_len"), CASES)
def test_the_mass_on_equal_labels_is_what_loops_over_the_cells_say(
    normal: Normal, monkeypatch: pytest.MonkeyPatch, name: str, q_len: int, k_len: int, high: int, dense: float,
    tiles: TileShape,
) -> None:  # fmt: skip
    monkeypatch.setattr(statistics, "_DENSE", dense)
    pattern = masked(normal, name, q_len, k_len)
    of_queries, of_keys = labels_of(q_len, high, 1), labels_of(k_len, high, 2)
    found = {shift: SameLabel(pattern, of_queries, of_keys, shift=shift) for shift in (None, 0, 1)}
    reduced(pattern, *found.values())
    q_rows, k_rows, shares = of_queries.tolist(), of_keys.tolist(), pattern.pattern.numpy()
    for shift, same in found.items():
        expected = np.zeros((BATCH, HEADS))
        for b, i, j in np.ndindex(BATCH, q_len, k_len):
            if 0 <= q_rows[b][i] == k_rows[b][j] and (shift is None or j != i + shift):
                expected[b] += shares[b, :, i, j]
        near(same.mass, expected)
        assert same.mass.dtype == torch.float64


def matches_of(text: str, q_tokens: Tensor, k_tokens: Tensor) -> list[Any]:
    pattern = parse_pattern(text)
    return [matcher(pattern, q, k, lambda word: -1) for q, k in zip(q_tokens, k_tokens, strict=True)]


@pytest.mark.parametrize("name", ["all", "causal", "window", "padding", "heads differ"])
@pytest.mark.parametrize("high", [1, 3, 30])
def test_two_ways_of_finding_duplicates_and_inductions_agree(
    normal: Normal, name: str, high: int, tiles: TileShape
) -> None:
    pattern = masked(normal, name, 19, 19)
    tokens = labels_of(19, high, 7)
    before = torch.cat([torch.full((BATCH, 1), -1), tokens[:, :-1]], dim=1)
    duplicate = SameLabel(pattern, tokens, tokens, shift=0)
    induction = SameLabel(pattern, tokens, before, shift=1)
    found = [Matched(pattern, matches_of(text, tokens, tokens)) for text in (DUPLICATE, INDUCTION)]
    reduced(pattern, duplicate, induction, *found)
    near(found[0].mass, duplicate.mass)
    near(found[1].mass, induction.mass)
    assert name == "window" or high == 30 or (duplicate.mass > 0).all()


@pytest.mark.parametrize("name", ["all", "padding", "heads differ"])
def test_the_mass_on_matching_cells_is_what_loops_over_the_cells_say(
    normal: Normal, name: str, tiles: TileShape
) -> None:
    pattern = masked(normal, name, 13, 23)
    rules = (lambda q, k: (q[:, None] * k) % 3 == 1, lambda q, k: (q[:, None] - 2 * k) % 5 < 2)
    matched = Matched(pattern, rules)
    reduced(pattern, matched)
    expected = np.zeros((BATCH, HEADS))
    for i, j in np.ndindex(13, 23):
        expected[0] += pattern.pattern.numpy()[0, :, i, j] * (i * j % 3 == 1)
        expected[1] += pattern.pattern.numpy()[1, :, i, j] * ((i - 2 * j) % 5 < 2)
    near(matched.mass, expected)
    assert matched.mass.dtype == torch.float64


def pattern_of(*rows: Sequence[float]) -> ComputedPattern:
    return ComputedPattern(torch.tensor(rows, dtype=torch.float64)[None, None])


BY_HAND = ([1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.5, 0.25, 0.25])


def test_by_hand_three_queries() -> None:
    pattern = pattern_of(*BY_HAND)
    mass, peak, entropy, squares, distance = (
        kind(pattern) for kind in (RowSums, Peak, Entropy, RowSquareSums, Distance)
    )
    marked = Marked(pattern, torch.tensor([[True, False, True]]))
    received, profile = ColumnSums(pattern, 2), Profile(pattern)
    reduced(pattern, mass, peak, entropy, squares, distance, marked, received, profile)
    ln2, ln3 = math.log(2), math.log(3)
    assert mass.per_query.flatten().tolist() == [1, 1, 1]
    assert entropy.per_query.flatten().tolist() == pytest.approx([0, 2 * ln2 - 0.75 * ln3, 1.5 * ln2], abs=1e-15)
    assert squares.per_query.flatten().tolist() == pytest.approx([1, 10 / 16, 6 / 16], abs=1e-15)
    assert peak.per_query.flatten().tolist() == pytest.approx([0, math.log(0.75), -ln2], abs=1e-15)
    assert distance.per_query.flatten().tolist() == pytest.approx([0, 0.25, 1.25], abs=1e-15)
    assert marked.per_query.flatten().tolist() == [1, 0.25, 0.75]
    assert received.per_key.flatten().tolist() == [1.75, 1.0, 0.25]
    assert received.map[0, 0].tolist() == [[2.0, 0.0], [0.75, 0.25]]
    assert profile.mass[0, 0].tolist() == [0.5, 0.5, 2.0, 0.0, 0.0]  # key − query from −2 to 2
    assert profile.zero == 2


def test_by_hand_the_mass_on_the_same_token_and_on_what_followed_it() -> None:
    pattern = pattern_of([1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25, 0.25, 0.5, 0], [0.125, 0.125, 0.25, 0.5])
    tokens, before = torch.tensor([[7, 4, 7, 4]]), torch.tensor([[-1, 7, 4, 7]])
    duplicate = SameLabel(pattern, tokens, tokens, shift=0)
    induction = SameLabel(pattern, tokens, before, shift=1)
    itself = SameLabel(pattern, tokens, tokens, shift=None)
    reduced(pattern, duplicate, induction, itself)
    assert duplicate.mass.tolist() == [[0.25 + 0.125]]  # 7 sees the first 7, 4 the first 4
    assert induction.mass.tolist() == [[0.25 + 0.25]]  # what followed the first 7, and the first 4
    assert itself.mass.tolist() == [[0.375 + 1 + 0.5 + 0.5 + 0.5]]


def test_by_hand_a_label_below_zero_equals_nothing() -> None:
    pattern = pattern_of([0.5, 0.25, 0.25], [0.5, 0.25, 0.25])
    same = SameLabel(pattern, torch.tensor([[-1, -2]]), torch.tensor([[-1, -2, -1]]), shift=None)
    zero = SameLabel(pattern, torch.tensor([[0, -1]]), torch.tensor([[-1, 0, 0]]), shift=None)
    reduced(pattern, same, zero)
    assert same.mass.item() == 0
    assert zero.mass.item() == 0.5


def test_labels_may_be_short_integers_and_large() -> None:
    pattern = pattern_of([0.5, 0.25, 0.25], [0.5, 0.25, 0.25])
    for dtype in (torch.int32, torch.int64):
        of_queries, of_keys = (
            torch.tensor([[2**31 - 2, 5]], dtype=dtype),
            torch.tensor([[5, 2**31 - 2, 5]], dtype=dtype),
        )
        same = SameLabel(pattern, of_queries, of_keys, shift=None)
        reduced(pattern, same)
        assert same.mass.item() == 0.25 + 0.75


@pytest.mark.parametrize("name", MASKS)
def test_what_queries_give_keys_receive_and_maps_and_profiles_hold_the_same(
    normal: Normal, name: str, tiles: TileShape
) -> None:
    pattern = masked(normal, name, 19, 19)
    received, profile, mass = ColumnSums(pattern, 4), Profile(pattern), RowSums(pattern)
    reduced(pattern, received, profile, mass)
    n_queries = visible_of(name, 19, 19).any(axis=-1).sum(axis=-1)
    near(mass.per_query, visible_of(name, 19, 19).any(axis=-1))
    near(received.per_key.sum(dim=-1), n_queries)
    near(received.map.sum(dim=(-1, -2)), n_queries)
    near(profile.mass.sum(dim=-1), n_queries)
    assert profile.mass.min() >= 0
    steps = torch.arange(-18, 19).double()
    distance = Distance(pattern)
    reduced(pattern, distance)
    near((profile.mass * steps.abs()).sum(dim=-1), distance.per_query.sum(dim=-1))


@pytest.mark.parametrize("name", MASKS)
def test_uniform_attention_has_the_entropy_and_the_squares_of_its_keys(name: str, tiles: TileShape) -> None:
    counts = torch.from_numpy(visible_of(name, 19, 23).sum(axis=-1)).double()
    pattern = uniform(counts, 23, MASKS[name])
    entropy, squares, peak, mass = (kind(pattern) for kind in (Entropy, RowSquareSums, Peak, RowSums))
    reduced(pattern, peak, entropy, squares, mass)
    near(mass.per_query, counts > 0)
    near(entropy.per_query, counts.clamp(min=1).log())
    near(squares.per_query, torch.where(counts > 0, 1 / counts.clamp(min=1), 0.0))
    near(peak.per_query[counts > 0], -counts[counts > 0].log())
    assert (peak.per_query[counts == 0] < -1e29).all()


def test_a_query_of_one_key_has_no_entropy_and_its_peak_is_0(normal: Normal, tiny: None) -> None:
    q, k = (normal(1, 2, 13, 3, std=30, dtype=torch.float32) for _ in "qk")
    scores = Scores(q, k, scale=1.0, allowed=masks.window(0, 0))
    pattern = VirtualPattern(scores, (q * k).sum(dim=-1))
    entropy, distance, peak, squares = (kind(pattern) for kind in (Entropy, Distance, Peak, RowSquareSums))
    reduced(pattern, peak, entropy, distance, squares)
    assert entropy.per_query.min() >= 0
    rounding = 2.0**-23 * scores_of(q, k).abs().max()  # of a float32 as large as the scores
    assert entropy.per_query.max() <= rounding
    assert distance.per_query.abs().max() == 0
    assert peak.per_query.abs().max() <= rounding
    assert (squares.per_query - 1).abs().max() <= 2 * rounding


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return (q * k).sum(dim=-1)


def test_entropy_is_never_less_than_zero_by_rounding() -> None:
    scores = Scores(torch.ones(1, 1, 3, 1), torch.ones(1, 1, 1, 1), scale=1.0)
    pattern = VirtualPattern(scores, torch.full((1, 1, 3), 1 - 1e-6))  # a share a little above 1
    entropy = Entropy(pattern)
    reduced(pattern, entropy)
    assert entropy.per_query.flatten().tolist() == [0.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_have_the_dtype_of_the_maths_and_sums_over_all_queries_float64(dtype: torch.dtype) -> None:
    q, k = torch.zeros(1, 2, 3, 5, dtype=dtype), torch.zeros(1, 2, 7, 5, dtype=dtype)
    pattern = VirtualPattern(Scores(q, k, scale=1.0), torch.full((1, 2, 3), math.log(7), dtype=dtype))
    marks, labels = torch.ones(1, 7, dtype=torch.bool), torch.zeros(1, 7, dtype=torch.int64)
    per_query = [kind(pattern) for kind in (RowSums, Peak, Entropy, RowSquareSums, Distance)] + [Marked(pattern, marks)]
    received, profile = ColumnSums(pattern, 2), Profile(pattern)
    of_heads = [
        SameLabel(pattern, labels[:, :3], labels, shift=None),
        Matched(pattern, [lambda q, k: k[None] >= 0 * q[:, None]]),
    ]
    reduced(pattern, *per_query, received, profile, *of_heads)
    assert [(tuple(r.per_query.shape), r.per_query.dtype) for r in per_query] == [((1, 2, 3), dtype)] * 6
    assert [(tuple(t.shape), t.dtype) for t in (received.per_key, received.map, profile.mass)] == [
        ((1, 2, 7), dtype),
        ((1, 2, 2, 4), dtype),
        ((1, 2, 9), dtype),
    ]
    assert [(tuple(r.mass.shape), r.mass.dtype) for r in of_heads] == [((1, 2), torch.float64)] * 2
    assert all(reducer.mass.flatten().tolist() == pytest.approx([3, 3], rel=1e-6) for reducer in of_heads)


class Seen:
    """A reducer that looks at what every tile says of itself."""

    def __init__(self, pattern: Any) -> None:
        self.tiles = 0
        self.weights = np.zeros(pattern.shape)

    def add(self, tile: Tile) -> None:
        self.tiles += 1
        n, m = len(tile.queries), len(tile.keys)
        assert (tile.rows, tile.columns) == (
            slice(tile.queries.start, tile.queries.stop),
            slice(tile.keys.start, tile.keys.stop),
        )
        assert tile.weights.shape == tile.log2.shape == tile.scratch.shape == (n, m)
        assert tile.diagonals.shape == (n, n + m)
        expected = torch.zeros(n, n + m, dtype=tile.weights.dtype)
        for row in range(n):
            expected[row, n - row : n - row + m] = tile.weights[row]  # column c holds key − query = c − n of the corner
        assert torch.equal(tile.diagonals, expected)
        near(tile.mass, tile.weights.sum(dim=1))
        near(tile.weights, tile.log2.exp2())
        assert torch.equal(
            tile.flat.as_strided(tile.weights.shape, tile.weights.stride(), tile.weights.storage_offset()), tile.weights
        )
        assert tile.flat.count_nonzero() == tile.weights.count_nonzero()
        tile.scratch.fill_(torch.nan)
        self.weights[*tile.batch_head, tile.rows, tile.columns] = tile.weights


@pytest.mark.parametrize("name", MASKS)
def test_a_tile_shows_its_shares_straight_sheared_and_flat(normal: Normal, name: str, tiles: TileShape) -> None:
    q, k = normal(BATCH, HEADS, 13, 5), normal(BATCH, 1, 23, 5)
    scores = Scores(q, k, scale=1.0, allowed=MASKS[name])
    whole = (q @ k.mT).masked_fill(~torch.from_numpy(visible_of(name, 13, 23)), -torch.inf)
    lse = whole.logsumexp(dim=-1)
    pattern = VirtualPattern(scores, torch.where(lse.isinf(), 0.0, lse))
    seen = Seen(pattern)
    told: list[int] = []
    reduce_tiles(pattern, [seen], told.append)
    np.testing.assert_allclose(seen.weights, (whole - pattern.lse[..., None]).exp().numpy(), rtol=0, atol=1e-13)
    assert len(told) == seen.tiles / (BATCH * HEADS)
    assert sum(told) == n_cells(pattern)


def test_told_cells_are_those_of_all_sequences_and_heads() -> None:
    pattern = ComputedPattern(torch.zeros(2, 3, 5, 7))
    told: list[int] = []
    reduce_tiles(pattern, [], told.append)
    assert told == [2 * 3 * 5 * 7]
    assert n_cells(pattern) == 210


def test_a_pass_over_a_causal_mask_looks_at_little_more_than_half(tiny: None) -> None:
    pattern = ComputedPattern(torch.zeros(1, 1, 40, 40), masks.causal())
    assert 820 < n_cells(pattern) <= 820 + 40 * 5


@pytest.mark.parametrize("name", MASKS)
def test_visible_keys_are_counted_for_each_query(name: str, tiles: TileShape) -> None:
    pattern = ComputedPattern(torch.zeros(BATCH, HEADS, 19, 23), MASKS[name])
    found = visible_keys(pattern).expand(BATCH, HEADS, -1)
    assert np.array_equal(found.numpy(), visible_of(name, 19, 23).sum(axis=-1))


def test_summarise_puts_every_statistic_under_its_name(normal: Normal, tiny: None) -> None:
    pattern = masked(normal, "padding", 19, 19)
    tokens, before = labels_of(19, 3, 1), labels_of(19, 3, 2)
    first, leading = torch.zeros(BATCH, 19, dtype=torch.bool), torch.zeros(BATCH, 19, dtype=torch.bool)
    first[0, 1] = first[1, 0] = True
    leading[:, 2:6] = True
    rules = tuple(tuple(matches_of(text, tokens, tokens)) for text in ("k < q", "tok[k] == tok[q]"))
    asked = StatisticsRequest(
        block=4, q_tokens=tokens, k_tokens=tokens, before_k=before, first=first, leading=leading, matches=rules
    )
    told: list[int] = []
    found = summarise(pattern, asked, told.append)
    assert sum(told) == n_cells(pattern)
    own = {
        "mass": RowSums(pattern), "peak": Peak(pattern), "entropy": Entropy(pattern), "squares": RowSquareSums(pattern),
        "distance": Distance(pattern), "first": Marked(pattern, first), "leading": Marked(pattern, leading),
    }  # fmt: skip
    received, profile = ColumnSums(pattern, 4), Profile(pattern)
    duplicate = SameLabel(pattern, tokens, tokens, shift=0)
    induction = SameLabel(pattern, tokens, before, shift=1)
    further = [Matched(pattern, rule) for rule in rules]
    reduced(pattern, *own.values(), received, profile, duplicate, induction, *further)
    for name, reducer in own.items():
        assert torch.equal(getattr(found, name), reducer.per_query), name
    assert torch.equal(found.received, received.per_key)
    assert torch.equal(found.map, received.map)
    assert torch.equal(found.profile, profile.mass)
    assert torch.equal(found.duplicate, duplicate.mass)
    assert torch.equal(found.induction, induction.mass)
    assert torch.equal(found.matched, torch.stack([r.mass for r in further], dim=-1))
    two = found.of_heads(slice(1, 3))
    assert all(torch.equal(getattr(two, name), getattr(found, name)[:, 1:3]) for name in vars(found))


def test_keys_of_another_text_may_stand_at_the_place_of_the_query(normal: Normal, tiny: None) -> None:
    pattern = masked(normal, "all", 13, 23)
    q_tokens, k_tokens, before = labels_of(13, 3, 1), labels_of(23, 3, 2), labels_of(23, 3, 4)
    marks = torch.zeros(BATCH, 23, dtype=torch.bool)
    asked = StatisticsRequest(4, q_tokens, k_tokens, before, first=marks, leading=marks, is_self=False)
    found = summarise(pattern, asked)
    duplicate = SameLabel(pattern, q_tokens, k_tokens, shift=None)
    induction = SameLabel(pattern, q_tokens, before, shift=None)
    reduced(pattern, duplicate, induction)
    assert torch.equal(found.duplicate, duplicate.mass)
    assert torch.equal(found.induction, induction.mass)
    assert found.matched.shape == (BATCH, HEADS, 0)


def test_what_is_asked_moves_whole_and_has_a_beginning() -> None:
    tokens, marks = torch.arange(2 * 5).reshape(2, 5), torch.ones(2, 5, dtype=torch.bool)
    asked = StatisticsRequest(
        4, tokens, tokens + 1, tokens + 2, marks, ~marks, is_self=False, matches=((lambda q, k: marks,),)
    )
    there = asked.on("meta")
    names = ("q_tokens", "k_tokens", "before_k", "first", "leading")
    assert {getattr(there, name).device.type for name in names} == {"meta"}
    assert (there.block, there.is_self, there.matches) == (4, False, asked.matches)
    begun = asked.beginning(3)
    assert all(torch.equal(getattr(begun, name), getattr(asked, name)[:1, :3]) for name in names)
    assert (begun.block, begun.is_self, begun.matches) == (4, False, ())


def test_the_peak_of_a_query_without_keys_is_far_below_any_share() -> None:
    for pattern in (
        ComputedPattern(torch.zeros(1, 1, 2, 3), masks.either()),
        ComputedPattern(torch.zeros(1, 1, 2, 3), lambda q, k: torch.zeros(1, 1, dtype=torch.bool)),
        uniform(torch.zeros(1, 1, 2), 3, lambda q, k: torch.zeros(1, 1, dtype=torch.bool)),
    ):
        peak = Peak(pattern)
        reduced(pattern, peak)
        assert peak.per_query.isfinite().all()
        assert (peak.per_query < PENALTY / 2).all()
        assert (peak.per_query.exp() == 0).all()
