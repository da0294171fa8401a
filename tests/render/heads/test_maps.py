"""Maps of heads against loops over plain numbers: cells and blocks, hidden sinks, and the three scales."""

import base64
import zlib
from dataclasses import replace

import numpy as np
import pytest
from support.heads_made import surveyed
from support.records import make_record, with_sinks

from mhacli.errors import UsageError
from mhacli.render.base.cells import FORBIDDEN, levels
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.heads.drawable import DrawableHead, drawable_heads, scale_of
from mhacli.render.heads.head_map import HeadPattern, head_map, largest_of_maps, sink_places
from mhacli.results.record.head_statistics import HeadStatistics, Sink

LONG = ("the", "cat", "sat", "on", "a", "red", "mat")
SHORT = ("the", "dog", "ran")


def only(record, head=0, **options):
    return drawable_heads(record, ViewOptions(heads=(head,), **options))[0]


def with_pattern(record, pattern, allowed):
    arrays = {**record.arrays, "pattern": np.asarray(pattern, np.float32), "allowed": np.asarray(allowed)}
    return replace(record, arrays=arrays)


def two_heads():
    """A causal record of seven tokens and two heads whose shares are random and sum to 1."""
    record = with_sinks(make_record(LONG, causal=True), 0)
    scores = np.random.default_rng(3).normal(size=(1, 2, 7, 7)).astype(np.float64)
    allowed = np.tri(7, dtype=bool)[None, None]
    weights = np.exp(scores) * allowed
    return with_pattern(record, weights / weights.sum(-1, keepdims=True), allowed)


def test_the_cells_of_a_record_are_its_pattern_without_padding():
    record = make_record(LONG, SHORT)
    drawn = head_map(only(record, 1), 1)
    assert drawn.weights.shape == (3, 3)
    assert np.array_equal(drawn.weights, record.arrays["pattern"][1, 1, :3, :3].astype(np.float64))
    assert [drawn.query_name(row) for row in range(3)] == list(SHORT) == [drawn.key_name(c) for c in range(3)]


@pytest.mark.parametrize("padding", ["left", "right"])
def test_a_map_of_a_padded_text_has_no_rows_and_columns_of_padding(padding):
    record = surveyed(" ".join(LONG), " ".join(SHORT), n_heads=2, d_model=6, padding=padding)
    drawn = head_map(only(record, 1), 1)
    assert drawn.weights.shape == (3, 3)
    assert [drawn.query_name(row) for row in range(3)] == list(SHORT) == [drawn.key_name(c) for c in range(3)]
    assert np.allclose(drawn.weights.sum(axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_a_map_of_blocks_keeps_those_that_hold_a_token(padding):
    long, short = " ".join(LONG * 130), " ".join(SHORT * 50)  # 910 and 150 tokens
    record = surveyed(long, short, n_heads=1, d_model=2, padding=padding)
    assert record.survey is not None
    block = record.survey.block
    assert block > 1
    drawn = head_map(only(record), 1)
    begin = 760 if padding == "left" else 0
    kept = range(begin // block, -(-(begin + 150) // block))
    assert drawn.weights.shape == (len(kept), len(kept))
    assert drawn.query_places(0)[0] == 0
    assert drawn.key_places(len(kept) - 1)[1] == 149
    assert np.array_equal(drawn.weights, record.arrays["map"][1, 0, kept.start : kept.stop, kept.start : kept.stop])


def test_keys_of_a_context_are_other_tokens():
    drawn = head_map(only(make_record(SHORT, context=[LONG])), 0)
    assert drawn.weights.shape == (3, 7)
    assert drawn.key_name(6) == "mat"
    assert drawn.query_name(2) == "ran"


@pytest.mark.parametrize("factor", [2, 3, 7, 9])
def test_by_hand_a_block_is_the_mean_over_its_queries_of_what_its_keys_get(factor):
    whole = head_map(only(two_heads()), 0)
    found = whole.pooled(factor)
    starts = range(0, 7, factor)
    for row, top in enumerate(starts):
        for column, left in enumerate(starts):
            cells = [
                [float(whole.weights[i, j]) for j in range(left, min(7, left + factor)) if j <= i]
                for i in range(top, min(7, top + factor))
            ]
            if not any(cells):
                assert found.weights[row, column] == FORBIDDEN
            else:
                expected = sum(map(sum, cells)) / len(cells)
                assert found.weights[row, column] == pytest.approx(expected, abs=1e-12)
    assert found.block == factor
    sums = np.where(found.is_open, found.weights, 0).sum(axis=1)
    assert sums == pytest.approx(np.ones(len(sums)), abs=1e-6)


def test_a_row_of_blocks_is_named_by_its_places():
    drawn = head_map(only(two_heads()), 0).pooled(3)
    assert [drawn.query_name(row) for row in range(3)] == ["0–2", "3–5", "6–6"]


def test_by_hand_the_rest_beside_the_sink_is_renormalised():
    whole = head_map(only(two_heads()), 0)
    rest = whole.without_sinks()
    assert whole.sinks == (0,)
    for i in range(7):
        left = 1 - float(whole.weights[i, 0])
        for j in range(7):
            if j > i:
                assert rest.weights[i, j] == FORBIDDEN
            elif i == 0 or j == 0:
                assert rest.weights[i, j] == pytest.approx(0, abs=1e-6)
            else:
                assert rest.weights[i, j] == pytest.approx(float(whole.weights[i, j]) / left, abs=1e-6)
    assert rest.taken == pytest.approx(whole.weights[:, 0])
    assert rest.sink_mass == pytest.approx(float(whole.weights[:, 0].mean())) == pytest.approx(whole.sink_mass)


def test_taking_sinks_out_of_blocks_is_taking_them_out_of_their_sums():
    whole = head_map(only(two_heads()), 0)
    found = whole.pooled(2).without_sinks()
    cells = np.where(whole.is_open, whole.weights, 0)
    for row in range(4):
        mine = cells[2 * row : 2 * row + 2]
        sink = mine[:, 0].mean()
        for column in range(row + 1):
            mass = mine[:, max(1, 2 * column) : 2 * column + 2].sum() / len(mine)
            assert found.weights[row, column] == pytest.approx(
                mass / (1 - sink), abs=1e-6
            )  # float32 rows sum to 1 ± 6e-8
        assert found.taken[row] == pytest.approx(sink)


def test_a_learned_sink_takes_what_a_row_lacks_to_one():
    record = two_heads()
    pattern = record.arrays["pattern"] * np.linspace(0.3, 0.9, 7)[None, None, :, None]
    record = with_pattern(record, pattern, record.arrays["allowed"])
    record = replace(record, heads=tuple(replace(head, learned_sink=0.4) for head in record.heads))
    whole = head_map(only(record), 0)
    assert whole.learned == pytest.approx(1 - np.linspace(0.3, 0.9, 7), abs=1e-6)
    assert whole.learned_mass == pytest.approx(0.4, abs=1e-6)
    rest = whole.without_sinks()
    sums = np.where(rest.is_open, rest.weights, 0).sum(axis=1)
    assert sums[1:] == pytest.approx(np.ones(6), abs=1e-6)
    assert head_map(only(two_heads()), 0).learned is None


def test_only_keys_that_the_head_says_are_sinks_are_some_and_no_first_token_for_being_first():
    said = HeadStatistics(
        sinks=(Sink(0, 5, 0.5, 0.1), Sink(0, 3, 0.5, 0.3), Sink(1, 2, 0.9, 0.1), Sink(1, 0, 0.5, 0.1)),
    )
    keys = make_record(LONG).sequences[0]
    assert sink_places(said, 0, keys) == (5,)
    assert sink_places(said, 1, keys) == (0, 2)
    assert sink_places(None, 0, keys) == ()


def test_nan_stays_nan_and_is_no_level():
    record = two_heads()
    pattern = record.arrays["pattern"].copy()
    pattern[0, 0, 4, 2] = np.nan
    drawn = head_map(only(with_pattern(record, pattern, record.arrays["allowed"])), 0)
    assert np.isnan(drawn.weights[4, 2])
    assert np.isfinite(drawn.largest)
    found = levels(drawn.weights, "linear", drawn.largest)
    assert found[4, 2] == -2
    assert (found[drawn.weights == FORBIDDEN] == -1).all()
    assert np.isnan(drawn.pooled(2).weights[2, 1])


def test_a_row_that_is_no_number_does_not_count_in_the_mean_of_sinks():
    record = two_heads()
    pattern = record.arrays["pattern"].copy()
    pattern[0, 0, 3] = np.nan
    drawn = head_map(only(with_pattern(record, pattern, record.arrays["allowed"])), 0)
    others = [0, 1, 2, 4, 5, 6]
    assert drawn.sink_mass == pytest.approx(float(pattern[0, 0, others, 0].mean()), abs=1e-7)


def test_the_top_of_a_scale_leaves_out_rows_without_a_choice():
    drawn = head_map(only(two_heads()), 0)
    assert drawn.weights[0, 0] == 1
    assert drawn.largest == drawn.weights[1:].max() < 1
    assert largest_of_maps([drawn, drawn.without_sinks()]) == max(drawn.largest, drawn.without_sinks().largest)
    assert largest_of_maps([]) == 1


def test_a_row_with_one_key_beside_the_sink_does_not_set_the_top_either():
    rest = head_map(only(two_heads()), 0).without_sinks()
    assert rest.weights[1, 1] == pytest.approx(1)
    assert rest.largest == rest.weights[2:].max() < 0.999


def test_a_map_of_head_statistics_has_the_cells_of_the_pattern():
    text = "a b c d e f g h i j k l m n o p q"
    record = with_sinks(surveyed(text, causal=True, n_heads=3, d_model=12), 0, 4)
    drawn = head_map(only(record, 2), 0)
    assert record.survey.block == 1
    assert drawn.weights.shape == (17, 17)
    assert np.where(drawn.is_open, drawn.weights, 0).sum(axis=1) == pytest.approx(np.ones(17), abs=1e-5)
    assert drawn.of_sinks[:, 0] == pytest.approx(drawn.weights[:, 0], abs=1e-5)
    assert drawn.of_sinks[:, 1:] == pytest.approx(0)
    assert drawn.sinks == (0,)
    assert not head_map(only(with_sinks(record, 4), 2), 0).of_sinks.any()


def test_heads_are_chosen_and_wrong_ones_refused():
    record = make_record(LONG, n_heads=3)
    assert [drawn.head for drawn in drawable_heads(record, ViewOptions())] == [0, 1, 2]
    assert [drawn.label for drawn in drawable_heads(record, ViewOptions(heads=(2, 0)))] == ["head 2", "head 0"]
    with pytest.raises(UsageError) as fault:
        drawable_heads(record, ViewOptions(heads=(3,)))
    assert fault.value.message.startswith("--head 3 ")


def test_without_pattern_or_map_there_is_nothing_to_draw():
    record = make_record(LONG)
    arrays = {name: array for name, array in record.arrays.items() if name != "pattern"}
    assert drawable_heads(replace(record, arrays=arrays), ViewOptions()) == ()


def test_short_texts_are_linear_long_ones_and_blocks_logarithmic_unless_requested():
    exact = [only(make_record(LONG))]
    assert scale_of(ViewOptions(), exact) == "linear"
    assert scale_of(ViewOptions(map_scale="rank"), exact) == "rank"
    for n, scale in ((64, "linear"), (65, "log")):
        assert scale_of(ViewOptions(), [only(make_record(tuple(f"t{i}" for i in range(n))))]) == scale
    coarse = surveyed(" ".join("abcdefghij"[i % 10] for i in range(300)), causal=True, n_heads=1, d_model=4)
    assert coarse.survey.block > 1
    assert scale_of(ViewOptions(), [DrawableHead(coarse, 0, 0, coarse.heads[0])]) == "log"


def test_where_sinks_leave_next_to_nothing_the_rest_still_sums_to_one():
    record = two_heads()
    pattern = record.arrays["pattern"].copy()
    pattern[0, 0, 6] = [0.99999, 2e-6, 2e-6, 2e-6, 2e-6, 1e-6, 2e-6]  # 1.000001 in all: rounding of float32
    rest = head_map(only(with_pattern(record, pattern, record.arrays["allowed"])), 0).without_sinks()
    assert rest.weights[6].sum() == pytest.approx(1, abs=1e-12)
    assert rest.weights[6, 1] == pytest.approx(2 / 11, abs=1e-6)


def test_a_long_head_has_the_same_pooled_weights_in_every_view():
    """Heatmap, map of `mha heads`, page, picture and viewer, against means of blocks of the pattern."""
    pytest.importorskip("textual")
    from mhacli.render.figures.head_picture import head_picture
    from mhacli.render.heads.heatmap import fitted_map, renormalised
    from mhacli.render.page.maps import CellEncoding, SinkWeights, encoded
    from mhacli.viewer.picture import Picture

    n, factor = 120, 4
    looked = surveyed(" ".join(f"w{i}" for i in range(n)), causal=True, n_heads=1, d_model=6)
    looked = replace(looked, heads=tuple(replace(head, sinks=()) for head in looked.heads))
    assert looked.survey.block == 1
    pattern, allowed = looked.arrays["map"][:, :, :n, :n], np.tri(n, dtype=bool)[None, None]
    record = with_pattern(make_record(looked.sequences[0].tokens, causal=True, n_heads=1), pattern, allowed)
    cells = np.where(allowed, pattern, 0)[0, 0].astype(np.float64)
    means = np.array(
        [
            [cells[i : i + factor, j : j + factor].mean() * factor for j in range(0, n, factor)]
            for i in range(0, n, factor)
        ]
    )
    size = n // factor
    whole = head_map(only(record), 0)
    page, _ = encoded(whole.pooled(factor), 0, CellEncoding("f32", factor), SinkWeights((), 0.0))
    views = {
        "heatmap": fitted_map(HeadPattern(record, 0, 0), ViewOptions(), Screen(13 + size, False)).weights,
        "map": renormalised(looked, 0, 0, rows=size, columns=size).weights,
        "figure": head_picture(only(record), 0, ViewOptions(), most=size).whole.weights,
        "viewer": Picture(None, only(record), 0, "linear", False).at(factor).map.weights,
        "page": np.frombuffer(zlib.decompress(base64.b64decode(page.cells)), "<f4").reshape(size, size),
    }
    is_open = np.tri(size, dtype=bool)
    for name, weights in views.items():
        assert weights.shape == (size, size), name
        assert weights[is_open] == pytest.approx(means[is_open], abs=1e-5), name
