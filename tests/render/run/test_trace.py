import re
from dataclasses import replace
from math import exp

import pytest
from support.records import drawn, make_record, walked

from mhacli.render.base.options import Screen
from mhacli.render.run.trace import cell_view, closing, step_blocks
from mhacli.results.record.record import Step, TensorSummary, Timing, WeightShape

WIDTHS = [40, 80, 200]


def numbered(count):
    return tuple(f"t{i}" for i in range(count))


def blocks(record, width=80):
    return [drawn(block, width) for block in step_blocks(record, Screen(width, False))]


def sites_of(record, width=80):
    """The blocks of the sites: what follows the configuration and the variants."""
    found = blocks(record, width)
    return found[len(found) - len(record.trace) :]


def close(record, width=80):
    return drawn(closing(record, Screen(width, False)), width)


def said(lines):
    """The words of some lines, whatever the breaks between them."""
    return " ".join(" ".join(lines).split())


STEP = Step(
    site="q",
    axes=("batch", "head", "query", "d_head"),
    shape=(2, 3, 5, 7),
    dtype="float32",
    formula="q[h] = columns",
    meaning="the queries split into heads",
    layout="view",
    strides=(105, 7, 21, 1),
    flops=123456,
    bytes=840,
    time_s=1.5e-5,
    view_of="q_proj",
    parameters=(WeightShape("q_proj.weight", (21, 64)), WeightShape("q_proj.bias", (21,))),
)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_block_shows_everything_of_its_site(width):
    (block,) = sites_of(replace(make_record(), trace=(STEP,)), width)
    text = said(block)
    for part in (
        "1 q batch 2 · head 3 · query 5 · d_head 7",
        "q[h] = columns",
        "the queries split into heads",
        "view of q_proj: the same memory",
        "strides (105, 7, 21, 1)",
        "123 k FLOPs",
        "840 B float32",
        "15 µs",
        f"parameters: q_proj.weight [21, 64], q_proj.bias [21] = {21 * 64 + 21:,} numbers",
    ):
        assert part in text


@pytest.mark.parametrize("width", WIDTHS)
def test_there_is_one_block_for_each_site_in_order_below_the_configuration(width):
    record = make_record(dropout=0.5)
    configuration, *rest = blocks(record, width)
    assert configuration[0].startswith("mha 0.1.0")
    titles = [block[1].split()[:2] for block in rest[-len(record.trace) :]]
    assert titles == [[str(number), step.site] for number, step in enumerate(record.trace, 1)]


@pytest.mark.parametrize("width", WIDTHS)
def test_each_variant_stands_with_its_reason_and_its_source_between_the_configuration_and_the_first_site(width):
    record = make_record(("the", "cat", "sat"), ("a", "dog"), causal=True, dropout=0.5)
    _, *rest = blocks(record, width)
    variants = rest[: -len(record.trace)]
    assert [said(block).partition(":")[0] for block in variants] == [
        "no output projection",
        "sinusoidal positions",
        "causal mask",
        "padding",
        "attention dropout",
    ]
    assert said(variants[2]) == (
        "causal mask: a query sees itself and earlier tokens "
        "why: allows training on every position at once and generating from left to right "
        "source: Vaswani et al. 2017, section 3.2.3"
    )
    assert "with probability 0.5, the others × 2" in said(variants[4])


def test_a_copy_is_a_new_tensor_and_an_untimed_site_has_no_time():
    step = replace(STEP, layout="copy", view_of=None, time_s=None)
    text = said(sites_of(replace(make_record(), trace=(step,)))[0])
    assert "a new tensor" in text
    assert "float32 · –" in text


def with_values(values, shape=(2, 3), site="z"):
    step = replace(STEP, site=site, axes=("query", "d_v"), shape=shape, parameters=(), values=values)
    return replace(make_record(), trace=(step,))


def test_values_show_extremes_moments_and_what_is_not_finite():
    values = TensorSummary(-1.5, 2.0, 0.25, 0.5, (1, 0, 8), 3, 2)
    text = said(sites_of(with_values(values))[0])
    assert "-1.5 ▁ █ 2 · mean 0.25 · std 0.5 · 3 NaN · 2 Inf" in text


def test_minus_infinity_in_scores_is_a_mask_and_no_accident():
    numbers = (1.0, None, 0.5, 0.25, 1e-7, 123456.0)
    values = TensorSummary(0.0, 1.0, 0.5, 0.5, (1,), 0, 1, numbers)
    text = said(sites_of(with_values(values, site="scores"))[0])
    assert "1 × −∞, masked" in text
    assert "1 −∞ 0.5000 0.2500 0.0000 123456" in text
    assert "1 not fin. 0.5000" in said(sites_of(with_values(values))[0])


@pytest.mark.parametrize("width", WIDTHS)
def test_the_numbers_that_a_row_leaves_out_are_counted(width):
    numbers = tuple(float(i) for i in range(80))
    (block,) = sites_of(with_values(TensorSummary(0, 79, 39.5, 23, (1,), 0, 0, numbers), (2, 40)), width)
    rows = [line.split() for line in block if re.fullmatch(r" +(\d+ +)+(… \d+ more|\d+)", line)]
    assert len(rows) == 2
    for number, row in enumerate(rows):
        place = row.index("…")
        assert row[:place] == [str(40 * number + i) for i in range(place)]
        assert int(row[place + 1]) == 40 - place


@pytest.mark.parametrize("width", WIDTHS)
def test_a_small_tensor_is_shown_whole_where_it_fits(width):
    (block,) = sites_of(
        with_values(TensorSummary(0, 5, 2.5, 1, (1,), 0, 0, (0.0, 1.0, 2.0, 3.0, 4.5, -5.25)), (2, 3)), width
    )
    assert [line.split() for line in block[-2:]] == [["0", "1", "2"], ["3", "4.5000", "-5.2500"]]


def test_totals_count_each_copy_and_each_parameter_once():
    record = replace(
        make_record(),
        trace=(
            STEP,
            replace(STEP, layout="copy"),
            replace(STEP, layout="copy", flops=4, parameters=(WeightShape("o", (3,)),)),
        ),
        timings={"total": Timing(1, (0.1, 0.2, 0.3), 0.2, 0.1)},
    )
    assert said(close(record)).startswith(
        "total 247 k FLOPs · 1.6 KiB in new tensors · 1,368 parameters · 200 ms (median of 3, rough"
    )
    assert "median" not in said(close(replace(record, timings={})))


# -------------------------------------------------------------------------------------------------------------- cell


def test_a_cell_is_followed_number_by_number():
    record = walked(make_record())
    lines = close(record)
    text = said(lines)
    score = record.cell.score
    weight = record.cell.share
    assert "cell: head 0, query 1 “cat”, key 0 “the”" in text
    assert "q[1] 1 -2 0.5000" in text
    assert "k[0] 3 1 4" in text
    assert f"q · k = 3 + (-2) + 2 = 3 score = 3 × scale 0.5774 = {score:.4g}, not masked" in text
    assert f"0 “the” adds {weight:.4g} × v[0]: added " in text
    assert "added " + " ".join(f"{weight * x:.4f}" for x in (0.5, 0.25, -1.0)) in text
    assert "z[1] " + " ".join(f"{x:.4f}" for x in record.cell.z) in text


@pytest.mark.parametrize("width", WIDTHS)
def test_a_cell_alone_is_the_same_story_without_the_steps(width):
    record = walked(make_record())
    alone, whole = drawn(cell_view(record, record.cell, Screen(width, False)), width), close(record, width)
    first, last = (next(i for i, line in enumerate(whole) if line.startswith(name)) for name in ("cell: ", "z["))
    begin = alone.index(whole[first])
    assert alone[begin : begin + last + 1 - first] == whole[first : last + 1]
    assert alone[-1] == whole[-1]
    assert not [line for line in alone if re.match(rf" *\d+ +({'|'.join(step.site for step in record.trace)})", line)]


def rows_of(lines):
    start = next(i for i, line in enumerate(lines) if line.split()[:2] == ["key", "score"])
    end = next(i for i, line in enumerate(lines) if line.split()[:1] == ["sum"])
    return [line.split() for line in lines[start + 1 : end + 1]]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_row_of_a_cell_shows_how_the_softmax_came_about(width):
    record = walked(make_record(causal=True))
    scores = record.arrays["scores"][0, 0, 1].tolist()
    pattern = record.arrays["pattern"][0, 0, 1].tolist()
    exponentials = [exp(score - max(scores)) for score in scores]
    rows = rows_of(close(record, width))
    assert rows[0] == ["→", "0", "“the”", *(f"{x:.4g}" for x in (scores[0], exponentials[0], pattern[0]))]
    assert rows[1] == ["1", "“cat”", *(f"{x:.4g}" for x in (scores[1], exponentials[1], pattern[1]))]
    assert rows[2] == ["2", "“sat”", "−∞", "0", "0"]
    assert rows[3] == ["sum", f"{sum(exponentials):.4g}", "1"]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_keys_that_a_long_row_leaves_out_are_counted_and_summed(width):
    record = walked(make_record(numbered(40)))
    pattern = record.arrays["pattern"][0, 0, 1].astype(float)
    scores = record.arrays["scores"][0, 0, 1].astype(float)
    *rows, gap, total = rows_of(close(record, width))
    listed = [int(row[-5]) for row in rows]
    unseen = [key for key in range(40) if key not in listed]
    assert 0 in listed
    assert set(listed) - {0} <= set(sorted(range(40), key=lambda key: -pattern[key])[:11])
    assert gap[:3] == ["⋮", str(len(unseen)), "more"]
    exponentials = [exp(score - max(scores)) for score in scores]
    assert [float(x) for x in gap[3:]] == pytest.approx(
        [sum(exponentials[key] for key in unseen), pattern[unseen].sum()], rel=1e-3
    )
    assert [float(x) for x in total[1:]] == pytest.approx([sum(exponentials), 1], rel=1e-3)


@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_stay_whole_beside_any_token(width):
    tokens = ("the", "x" * 300, "漢字" * 30, "\x1b[2J\u202e", "[bold]", "\n", *numbered(20))
    lines = close(walked(make_record(tokens)), width)
    for row in rows_of(lines):
        assert all(re.fullmatch(r"\d+(\.\d+)?(e[-+]\d+)?|-\d.*", word) for word in row[-2:])
        assert not any(word.endswith("…") for word in row[-3:])
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", "\n".join(lines))


def test_a_forbidden_cell_says_so():
    record = walked(make_record())
    cell = replace(
        record.cell, allowed=False, score=None, scores_row=(None, 1.0, 2.0), pattern_row=(0.0, 0.25, 0.75), share=0.0
    )
    text = said(close(replace(record, cell=cell)))
    assert "this cell is masked; its score is −∞, its attention weight exactly 0" in text


def test_a_cell_after_dropout_shows_both_weights():
    record = walked(make_record(dropout=0.5))
    before = record.arrays["pattern"][0, 0, 1, 0]
    assert f"{2 * before:.4g} (after dropout; before it {before:.4g}) × v[0]:" in said(close(record))


def test_a_bounded_score_shows_its_bound():
    record = walked(make_record())
    text = said(close(replace(record, cell=replace(record.cell, softcap=30.0, score=1.7))))
    assert "score = 3 × scale 0.5774, then 30 · tanh(score / 30) = 1.7, not masked" in text


def test_numbers_of_a_cell_that_are_not_finite_are_reported():
    record = walked(make_record())
    cell = replace(
        record.cell, q=(None, 1.0, 2.0), qk=None, score=None, share=None, z=(None,) * 3, pattern_row=(None,) * 3
    )
    text = said(close(replace(record, cell=cell)))
    assert "q[1] not fin. 1 2" in text
    assert "= nan" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_the_numbers_that_a_vector_leaves_out_are_counted(width):
    record = walked(make_record())
    cell = replace(record.cell, q=tuple(map(float, range(64))), k=(1.0,) * 64)
    lines = close(replace(record, cell=cell), width)
    words = next(line for line in lines if line.startswith("q[1]")).split()
    place = words.index("…")
    assert words[1:place] == [str(i) for i in range(place - 1)]
    assert words[place + 1 :] == [str(64 - (place - 1)), "more"]
    assert "q · k = 0 + 1 + 2 + 3 + … 60 more = 3" in said(lines)


# ------------------------------------------------------------------------------------------------------------ routes


@pytest.mark.parametrize("width", WIDTHS)
def test_routes_show_their_own_steps_and_how_far_apart_they_are(width):
    text = said(close(walked(make_record()), width))
    assert re.search(r"separate q_proj 0 fused qkv 2\.50e-07", text)
    assert "routes agree (tolerance 4.00e-06)" in text
    assert "self-check ok" in text


def test_routes_that_disagree_say_so():
    record = walked(make_record())
    routes = (record.routes[0], replace(record.routes[1], ok=False, max_abs_difference=0.5))
    assert "the routes do NOT agree (tolerance 4.00e-06)" in said(close(replace(record, routes=routes)))
