"""Every mask, and masks made of masks, against a plain sentence in Python about which key a query may see."""

from __future__ import annotations

from itertools import combinations, product
from random import Random
from typing import get_args

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
def test_a_mask_evaluated_tile_by_tile_equals_the_whole(name):
    for height, width in [(2, 3), (1, 1), (5, 2)]:
        allowed, _ = PREDICATES[name]
        rows = [
            torch.cat([evaluated(allowed, q_idx, k_idx) for k_idx in torch.arange(K_LEN).split(width)], dim=3)
            for q_idx in torch.arange(Q_LEN).split(height)
        ]
        assert torch.equal(torch.cat(rows, dim=2), whole(allowed))


def test_a_mask_answers_with_booleans_on_four_axes():
    for name in PREDICATES:
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


def answered(cells):
    """What brute force says of a rectangle, in the words of an extent."""
    return "all" if bool(cells.all()) else "some" if bool(cells.any()) else "none"


def is_sound(extent, cells):
    return extent in get_args(masks.Extent) and extent in ("some", answered(cells))


def spans(length):
    """Every range of positions with at least one element."""
    return [range(start, stop) for start, stop in combinations(range(length + 1), 2)]


def rectangles(q_len, k_len):
    return product(spans(q_len), spans(k_len))


def rectangle_of(cells, queries, keys):
    return cells[..., queries.start : queries.stop, keys.start : keys.stop]


def unsharp(mask, q_len, k_len):
    """The rectangles whose extent differs from what brute force says."""
    cells = mask(torch.arange(q_len), torch.arange(k_len))
    cells = cells.expand(*cells.shape[:2], q_len, k_len)
    extents = [(queries, keys, mask.extent(queries, keys)) for queries, keys in rectangles(q_len, k_len)]
    return [told for told in extents if told[2] != answered(rectangle_of(cells, *told[:2]))]


@pytest.mark.parametrize("name", PREDICATES)
def test_every_mask_knows_its_extent_and_never_says_more_than_its_cells(name):
    mask, cells = PREDICATES[name][0], whole(PREDICATES[name][0])
    assert isinstance(mask, masks.Mask)
    for queries, keys in rectangles(Q_LEN, K_LEN):
        assert is_sound(mask.extent(queries, keys), rectangle_of(cells, queries, keys)), (queries, keys)


LONG = 12
MORE = LONG + 2 * 3
"""Tensors reach past the last query that two shifts by up to three can ask for."""


def ids_of(rng, *, high):
    """Few different numbers, often in order: random ones seldom fill a rectangle."""
    shape = rng.choice([(BATCH, MORE), (1, MORE), (MORE,)])
    ids = torch.randint(high, shape, generator=torch.Generator().manual_seed(rng.randrange(999)))
    return ids.sort(dim=-1).values if rng.random() < 0.7 else ids


def table_of(rng):
    shape = rng.choice([(BATCH, HEADS, MORE, LONG), (BATCH, 1, 1, LONG), (MORE, LONG), (MORE, 1)])
    share = rng.choice([0.05, 0.5, 0.95])
    return torch.rand(shape, generator=torch.Generator().manual_seed(rng.randrange(999))) < share


def window_of(rng):
    return masks.window(*(rng.choice([10**9, *range(-3, LONG)]) for _ in "lr"), rng.randint(-LONG, LONG))


def padding_of(rng):
    side, of = rng.choice(["left", "right"]), rng.choice(["key", "query"])
    counts = [rng.randint(0, LONG) for _ in range(BATCH)]
    lengths = torch.tensor(counts) if rng.random() < 0.5 else counts
    return masks.padding(lengths, side, padded_len=rng.choice([None, LONG, MORE]), of=of)


SIMPLE = {
    "causal": lambda rng: masks.causal(rng.randint(-LONG, LONG)),
    "window": window_of,
    "prefix": lambda rng: masks.prefix(rng.randint(-1, LONG), rng.randint(-LONG, LONG)),
    "leading": lambda rng: masks.leading(rng.randint(-1, LONG)),
    "leading by places": lambda rng: masks.leading(rng.randint(-1, 4), ids_of(rng, high=4)),
    "padding": padding_of,
    "documents": lambda rng: masks.documents(ids_of(rng, high=rng.randint(1, 4))),
    "documents of two texts": lambda rng: masks.documents(ids_of(rng, high=2), ids_of(rng, high=3)),
    "a tensor": lambda rng: masks.from_tensor(table_of(rng)),
}


def plain(q_idx, k_idx):
    return (q_idx[:, None] % 3 != k_idx[None, :] % 3)[None, None]


def composed(rng, depth):
    """A mask made of up to three others, themselves composed to less depth."""
    if not depth:
        return rng.choice([*SIMPLE.values(), lambda rng: plain])(rng)
    parts = [composed(rng, rng.randrange(depth)) for _ in range(rng.randint(1, 3))]
    return rng.choice([masks.both, masks.either, lambda *of: masks.shifted(of[0], rng.randint(-3, 3))])(*parts)


def told(mask, height, width):
    """The extents of a mask's tiles, each of which may say no more than its cells. Tiles need not divide the length."""
    found = []
    for start, left in product(range(0, LONG, height), range(0, LONG, width)):
        queries, keys = range(start, min(start + height, LONG)), range(left, min(left + width, LONG))
        found.append(mask.extent(queries, keys))
        assert is_sound(found[-1], mask(torch.tensor(queries), torch.tensor(keys))), (queries, keys)
    return found


@pytest.mark.parametrize("name", SIMPLE)
def test_the_extent_of_a_tile_never_says_more_than_its_cells(name):
    rng = Random(name)
    found = [extent for _ in range(40) for extent in told(SIMPLE[name](rng), rng.randint(1, 6), rng.randint(1, 6))]
    assert set(found) == set(get_args(masks.Extent))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("depth", [1, 2])
def test_the_extent_of_a_tile_of_composed_masks_never_says_more_than_its_cells(depth):
    rng = Random(depth)
    found = [e for _ in range(50) for e in told(composed(rng, depth), rng.randint(1, 6), rng.randint(1, 6))]
    assert all(found.count(extent) > 100 for extent in get_args(masks.Extent))


def test_the_extent_of_a_causal_mask_is_exact():
    assert [unsharp(masks.causal(offset), 5, 4) for offset in range(-7, 8)] == [[]] * 15


def test_the_extent_of_a_window_is_exact_however_large_it_is_and_also_where_it_is_empty():
    for left, right, offset in product((-2, 0, 1, 10**9), (-1, 0, 2, 10**9), (-3, 0, 2)):
        assert unsharp(masks.window(left, right, offset), 4, 4) == [], (left, right, offset)
        if left >= 0:  # else no cell is both in the window and causal, and neither of the two can know
            assert unsharp(masks.both(masks.window(left, right, offset), masks.causal(offset)), 4, 4) == []


def test_the_extents_of_a_prefix_and_of_leading_keys_are_exact_with_places_and_without():
    for n in range(-1, 7):
        assert unsharp(masks.leading(n), 2, 5) == []
        assert unsharp(masks.leading(n, TENSOR), 2, K_LEN) == []
        assert unsharp(masks.leading(n, ROW_TENSOR), 2, K_LEN) == []
        assert all(unsharp(masks.prefix(n, offset), 4, 5) == [] for offset in (-2, 0, 3))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("of", ["key", "query"])
def test_the_extent_of_padding_is_exact_over_the_batch(side, of):
    for first, second, padded_len in product(range(6), range(6), (None, 5, 6)):
        mask = masks.padding([first, second], side, padded_len=padded_len, of=of)
        assert unsharp(mask, *((2, 6) if of == "key" else (6, 2))) == [], (first, second, padded_len)


def test_the_extent_of_documents_in_order_is_exact_in_each_text_and_over_the_batch():
    for seed in range(12):
        ids = torch.randint(4, (BATCH, 6), generator=torch.Generator().manual_seed(seed)).sort(dim=1).values
        for rows in (ids, ids[:1], ids[1], ids[:, 1:4] * 2):
            assert unsharp(masks.documents(rows), rows.shape[-1], rows.shape[-1]) == [], rows


def test_the_extent_of_a_tensor_is_exact_and_a_shifted_mask_asks_it_for_other_queries():
    for table in (TABLE, TABLE[1, 2], TABLE[1, 2, :1], TABLE[1, 2, :, :1], TABLE[1:, :1, :, :1]):
        mask = masks.from_tensor(table)
        assert unsharp(mask, Q_LEN, K_LEN) == [], table
        assert unsharp(masks.shifted(mask, 2), Q_LEN - 2, K_LEN) == [], table


def test_of_a_plain_predicate_only_its_cells_are_known_and_without_a_mask_everything_is_allowed():
    for predicate in (plain, masks.causal().cells, masks.shifted(plain, 3), masks.both(plain), masks.either(plain)):
        assert masks.extent_of(predicate, range(5), range(7, 9)) == "some"
    assert masks.extent_of(None, range(5), range(7, 9)) == "all"
    assert masks.extent_of(masks.causal(), range(5), range(7, 9)) == "none"


def test_extents_compose_like_the_cells_whatever_stands_beside_them():
    full, empty, mixed = masks.leading(99), masks.leading(0), masks.causal()

    def extents(combine, *rules):
        return [combine(*order).extent(range(5), range(5)) for order in (rules, rules[::-1])]

    assert extents(masks.both, full, full) == ["all"] * 2
    assert extents(masks.both, full, mixed) == ["some"] * 2
    assert extents(masks.both, mixed, full, empty) == ["none"] * 2
    assert extents(masks.either, empty, empty) == ["none"] * 2
    assert extents(masks.either, empty, mixed) == ["some"] * 2
    assert extents(masks.either, mixed, empty, full) == ["all"] * 2


def test_extents_of_tiles_worked_out_by_hand():
    tile = range(4, 8)
    assert [masks.causal().extent(tile, keys) for keys in (range(5), range(6), range(8, 9))] == ["all", "some", "none"]
    assert masks.causal(4).extent(range(0, 4), range(5)) == "all"
    assert masks.window(3, 0).extent(tile, range(4, 5)) == "all"
    assert masks.window(3, 0).extent(tile, range(0, 1)) == "none"
    assert masks.padding([5, 7]).extent(tile, range(4, 6)) == "some"
    assert masks.padding([5, 7], "left").extent(tile, range(2, 9)) == "all"
    of_texts = masks.documents(torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2]))
    assert [of_texts.extent(tile, keys) for keys in (range(4), tile, range(3, 5))] == ["none", "all", "some"]


def test_positions_that_a_tensor_does_not_hold_have_to_be_asked():
    ids = torch.tensor([0, 0, 1])
    for mask in (masks.documents(ids), masks.leading(0, ids), masks.from_tensor(torch.ones(3, 3, dtype=torch.bool))):
        assert mask.extent(range(2), range(2)) != "some"
        assert {mask.extent(range(2), keys) for keys in (range(4), range(3, 4), range(-1, 1))} == {"some"}
    assert masks.shifted(masks.documents(ids), -1).extent(range(2), range(2)) == "some"


def test_an_extent_costs_the_same_however_many_cells_there_are():
    far = range(10**12)
    window = masks.both(masks.causal(), masks.window(9, 0), masks.padding([5, 7]))
    assert (window.extent(far, far), masks.causal(10**12).extent(far, far)) == ("some", "all")


def by_arithmetic(mask, q_len, k_len):
    """The cells `[batch, query, key]` of a mask's arithmetic, worked out one by one."""
    rule = mask.arithmetic
    q_idx, k_idx = torch.arange(q_len), torch.arange(k_len)

    def is_in(chosen, idx, b, at):
        rows = chosen(idx)
        return bool(rows[min(b, rows.shape[0] - 1), at])

    def sees(b, i, j):
        is_near = rule.near.low <= j - i <= rule.near.high
        if rule.ids is not None:
            q_ids, k_ids = (ids[min(b, ids.shape[0] - 1)] for ids in rule.ids)
            if q_ids[i] != k_ids[j]:
                return False
        return (
            rule.band.low <= j - i <= rule.band.high
            and (is_near or (rule.always is not None and is_in(rule.always, k_idx, b, j)))
            and all(is_in(chosen, q_idx, b, i) for chosen in rule.queries)
            and all(is_in(chosen, k_idx, b, j) for chosen in rule.keys)
        )

    return [[[sees(b, i, j) for j in range(k_len)] for i in range(q_len)] for b in range(BATCH)]


@pytest.mark.parametrize("name", [name for name, (mask, _) in PREDICATES.items() if getattr(mask, "arithmetic", None)])
def test_the_arithmetic_of_a_mask_is_the_mask(name):
    mask, sentence = PREDICATES[name]
    wanted = [[[sentence(b, 0, i, j) for j in range(K_LEN)] for i in range(Q_LEN)] for b in range(BATCH)]
    assert by_arithmetic(mask, Q_LEN, K_LEN) == wanted


def test_masks_of_bands_padding_leading_keys_and_documents_are_arithmetic_and_others_are_not():
    padding, documents, window = masks.padding([4, 6]), masks.documents(DOCUMENTS), masks.window(2, 1)
    sinks = masks.either(window, masks.leading(2, TENSOR))
    known = (masks.prefix(3), masks.both(masks.causal(), sinks, padding, documents), masks.both())
    assert all(mask.arithmetic is not None for mask in known)
    unknown = (
        masks.from_tensor(TABLE), masks.shifted(masks.causal(), 2), masks.either(window, padding, documents),
        masks.either(masks.leading(2), masks.both(masks.causal(), sinks)), masks.both(documents, documents),
        masks.both(sinks, sinks), masks.both(masks.causal(), lambda q_idx, k_idx: q_idx[:, None] == k_idx),
    )  # fmt: skip
    assert all(mask.arithmetic is None for mask in unknown)


def test_only_a_causal_mask_has_its_offset():
    assert [masks.causal(n).causal_offset for n in (-3, 0, 2)] == [-3, 0, 2]
    others = (masks.window(2, 0), masks.both(masks.causal(), masks.padding([4])), masks.both(), masks.prefix(2))
    assert [mask.causal_offset for mask in others] == [None] * 4
