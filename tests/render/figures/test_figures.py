"""Pictures parsed as XML: the colours of cells against viridis in numpy, names, scales, captions, layout, and bytes."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from support.hostile import HOSTILE, WEB, escaped
from support.layers_made import layered, spoiled, text_of
from support.processes import obeyed_or_hidden
from support.records import decoded, make_record, walked, with_sinks
from support.svg_read import FIVE, SVG, THREE, Shape, cells, images, of_tokens, shapes, texts

from mhacli.errors import MhaError, UsageError
from mhacli.render.base.options import ViewOptions
from mhacli.render.figures.document import figure
from mhacli.render.figures.svg import paragraph, wrapped
from mhacli.render.figures.trace import SITE_POSITIONS, sources_of
from mhacli.results.record.corpus import CorpusSummary
from mhacli.results.record.head_statistics import HEAD_TYPES, HeadStatistics, Sink
from mhacli.results.record.record import NonAttentionLayer, Step
from mhacli.spec.sites import SITES

VIRIDIS = ("#440154", "#46327f", "#365c8d", "#277f8e", "#1fa187", "#4ac26d", "#9fda3a", "#fde725")
"""Source: matplotlib's viridis at eighths of its range, the first and the last included."""
BLANK, UNKNOWN = (228, 228, 228), (214, 39, 40)


def said(svg: str) -> str:
    """Every line of text, joined as a reader would."""
    return " ".join(texts(svg))


def viridis(level: float) -> tuple[int, ...]:
    """The colour at `level` of 0 … 1, in 256 steps."""
    points = np.array([[*bytes.fromhex(point[1:])] for point in VIRIDIS], float)
    place = np.rint(255 * np.clip(level, 0, 1)) / 255
    return tuple(round(float(np.interp(place, np.linspace(0, 1, 8), points[:, part]))) for part in range(3))


def drawn_shares(record, head: int = 0, sequence: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The pattern and what is allowed of a text without padding, which stands on the right."""
    n, m = len(record.sequences[sequence].tokens), len(record.keys[sequence].tokens)
    part = (sequence, slice(None), slice(n), slice(m))
    return record.arrays["pattern"][part][head].astype(float), record.arrays["allowed"][part][0]


def with_arrays(record, **arrays):
    return replace(record, arrays={**record.arrays, **arrays})


HEAD = ViewOptions(heads=(0,))


# ------------------------------------------------------------------------------------------------------------ one head


@pytest.mark.parametrize("scale", ["linear", "log", "rank"])
def test_the_colour_of_a_cell_is_that_of_its_weight_on_the_scale(scale):
    record = make_record(FIVE, causal=True)
    weights, allowed = drawn_shares(record)
    top = max(weights[row, : row + 1].max() for row in range(1, 5))  # the first row has no choice
    ranked = sorted(weights[allowed])

    def level(share: float) -> float:
        if scale == "log":
            return 1 + np.log10(max(share, top / 1000) / top) / 3
        return share / top if scale == "linear" else ranked.index(share) / (len(ranked) - 1)

    found = cells(figure(record, replace(HEAD, map_scale=scale)))
    expected = [viridis(level(s)) if a else BLANK for s, a in zip(weights.ravel(), allowed.ravel(), strict=True)]
    assert [one.rgb for one in found] == expected
    assert len(set(expected)) > 5


def test_a_cell_shows_its_tokens_and_the_number_of_the_record():
    record = make_record(FIVE, causal=True)
    weights, allowed = drawn_shares(record)
    found = cells(figure(record, HEAD))
    for place, one in enumerate(found):
        query, key = divmod(place, 5)
        names, told = one.said.split(": ")
        assert names == f"{FIVE[query]} → {FIVE[key]}"
        assert told == "masked" if not allowed[query, key] else abs(float(told) - weights[query, key]) < 1e-6


def test_the_names_of_queries_stand_at_the_middle_of_their_rows():
    svg = figure(make_record(THREE), HEAD)
    names = [one for one in shapes(svg) if one.text in THREE and one.attributes.get("text-anchor") == "end"][:3]
    assert [name.text for name in names] == list(THREE)
    for name, cell in zip(names, cells(svg)[::3], strict=True):
        middle = cell.y + cell.number("height") / 2
        assert name.y - 0.35 * name.number("font-size") == pytest.approx(middle, abs=1.5)  # digits are 0.7 em high


def test_numbers_stand_in_their_cells_with_the_digits_that_were_requested():
    record = make_record(THREE)
    weights, _ = drawn_shares(record)
    svg = figure(record, replace(HEAD, precision=3))
    found = {one.text: one for one in shapes(svg) if one.tag == "text"}
    for cell, weight in zip(cells(svg), weights.ravel(), strict=True):
        number = found[f"{weight:.3f}"[1:]]
        assert cell.x < number.x < cell.x + cell.number("width")
        assert cell.y < number.y < cell.y + cell.number("height")


def test_what_may_not_be_attended_has_another_sign_than_what_is_small():
    pattern = np.array([[[[0.999, 0.001, 0], [0.5, 0.5, 0], [0.2, 0.4, 0.4]]]] * 1, np.float32)
    allowed = pattern > 0
    record = with_arrays(make_record(THREE, n_heads=1), pattern=pattern, allowed=allowed)
    written = [text for text in texts(figure(record, HEAD)) if re.fullmatch(r"0|[01]?\.\d\d", text)]
    assert written.count("0") == 3  # two cells, and the sign in the legend
    assert written.count(".00") == 1


def test_tokens_stand_at_their_rows_and_columns():
    record = make_record(THREE, context=[FIVE])
    svg = figure(record, HEAD)
    found, first = shapes(svg), cells(svg)[0]
    for row, token in enumerate(THREE):
        (name,) = [one for one in found if one.tag == "text" and one.text == token]
        assert name.x < first.x
        assert 0 < name.y - (first.y + row * first.number("height")) < first.number("height")
    for column, token in enumerate(FIVE):
        (name,) = [one for one in found if one.tag == "text" and one.text == token]
        turned = re.match(r"rotate\(-\d+ ([\d.]+)", name.attributes.get("transform", ""))
        x = name.x if turned is None else name.x - name.number("x") + float(turned[1])
        assert name.y < first.y
        assert 0 < x - (first.x + column * first.number("width")) < first.number("width")


def test_padding_is_left_out_and_noted():
    record = make_record(FIVE, THREE)
    svg = figure(record, replace(HEAD, sequences=(1,)))
    assert len(cells(svg)) == 9
    assert "padding is not drawn" in said(svg)
    assert "head 0 · sequence 1" in texts(svg)
    weights, _ = drawn_shares(record, sequence=1)
    told = [float(one.said.split(": ")[1]) for one in cells(svg)]
    assert np.allclose(told, weights.ravel(), atol=1e-6)


def test_the_document_of_a_corpus_whose_patterns_are_drawn_is_named():
    record = replace(layered(), corpus=CorpusSummary(1234, 98765, 0, 512, "<c>.jsonl", 17, ("cpu",), ()))
    for options in (ViewOptions(), replace(HEAD, layers=((None, 0),))):
        assert "patterns of one document, <c>.jsonl:17; " in said(figure(record, options))


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_of_a_map_without_matrices_is_left_out_too(padding):
    record = layered(text_of(FIVE, parts=()), text_of(("a", "dog"), parts=()), n_layers=1, n_heads=1, padding=padding)
    bare = replace(record, arrays={k: a for k, a in record.arrays.items() if not k.endswith(("pattern", "allowed"))})
    options = ViewOptions(heads=(0,), sequences=(1,), map_scale="linear")
    assert cells(figure(bare, options)) == cells(figure(record, options))
    tokens = ("[CLS]", "a", "dog", "[SEP]")
    told = [one.said.split(": ")[0] for one in cells(figure(bare, options))]
    assert told == [f"{query} → {key}" for query in tokens for key in tokens]


def test_numbers_that_are_none_are_red_and_marked():
    record = make_record(THREE)
    pattern = record.arrays["pattern"].copy()
    pattern[0, 0, 1] = np.nan
    svg = figure(with_arrays(record, pattern=pattern), HEAD)
    assert [one.rgb == UNKNOWN for one in cells(svg)] == [False] * 3 + [True] * 3 + [False] * 3
    assert texts(svg).count("?") == 5  # three cells, the row's sum, the legend
    assert "not a number" in texts(svg)


def test_a_nan_in_a_sink_that_is_hidden_stays_red():
    record = with_sinks(make_record(THREE), 0)
    pattern = record.arrays["pattern"].copy()
    pattern[0, 0, 1] = np.nan
    found = cells(figure(with_arrays(record, pattern=pattern), replace(HEAD, hide_sinks=True)))
    assert [one.rgb == UNKNOWN for one in found] == [False] * 3 + [True] * 3 + [False] * 3


def test_the_mass_of_sinks_is_that_of_the_numbers_that_are_some():
    record = with_sinks(make_record(THREE), 0)
    pattern = record.arrays["pattern"].copy()
    pattern[0, 0] = np.nan
    record = with_arrays(record, pattern=pattern)
    mass = f"{pattern[0, 1, :, 0].mean():.2f}"[1:]
    assert f"sinks are hidden: {mass} of all attention of these heads" in said(
        figure(record, ViewOptions(hide_sinks=True))
    )
    assert "key 0 “a” with an unknown part of all attention taken out" in said(
        figure(record, replace(HEAD, hide_sinks=True))
    )


@pytest.mark.parametrize(
    ("scale", "told"),
    [
        ("linear", "linear, 0 … {top}"),
        ("log", "log, {low} or less … {top}"),
        ("rank", "rank, the smallest … the largest of 15 cells"),
    ],
)
def test_the_scale_bar_shows_its_kind_and_range(scale, told):
    record = make_record(FIVE, causal=True)
    weights, _ = drawn_shares(record)
    top = weights[1:].max()
    expected = told.format(top=f"{top:.4g}", low=f"{top / 1000:.4g}")
    svg = figure(record, replace(HEAD, map_scale=scale))
    assert f"attention weight: {expected}" + (" or more" if scale != "rank" else "") in texts(svg)
    assert "masked" in texts(svg)


def test_a_weight_that_reads_like_the_top_of_the_scale_does_not_exceed_it():
    pattern = np.array([[[[1, 0, 0], [0.99999, 0.00001, 0], [0.2, 0.4, 0.4]]]], np.float32)
    record = with_arrays(make_record(THREE, n_heads=1), pattern=pattern, allowed=pattern > 0)
    assert "attention weight: linear, 0 … 1" in texts(figure(record, HEAD))


def test_the_bar_runs_through_the_points_of_viridis():
    (bar,) = [e for e in ElementTree.fromstring(figure(make_record(THREE), HEAD)).iter(f"{SVG}linearGradient")]
    stops = [(stop.get("offset"), stop.get("stop-color")) for stop in bar]
    assert [colour for _, colour in stops] == [*VIRIDIS]
    assert np.allclose([float(offset[:-1]) for offset, _ in stops], np.linspace(0, 100, 8), atol=1e-3)


def test_sinks_that_are_hidden_are_renormalised_coloured_and_told():
    record = make_record(FIVE)
    named = (Sink(0, 0, 0.5, 0.1), Sink(0, 2, 0.625, 0.2), Sink(0, 4, 0.5, 0.2))
    heads = (HeadStatistics(head=0, sinks=named), HeadStatistics(head=1))
    record = replace(record, heads=heads)
    weights, _ = drawn_shares(record)
    sinks, others = [0, 2], [1, 3, 4]
    rest = weights / (1 - weights[:, sinks].sum(1, keepdims=True))
    top = rest[:, others].max()
    svg = figure(record, replace(HEAD, hide_sinks=True))
    for place, one in enumerate(cells(svg)):
        row, column = divmod(place, 5)
        told = float(re.findall(r": ([\d.e-]+)", one.said)[0])
        if column in sinks:
            level = round(255 * weights[row, column])
            assert one.rgb == tuple(round(part * level / 255) for part in (255, 64, 200))
            assert one.said.endswith(", a sink, taken out")
            assert abs(told - weights[row, column]) < 1e-6
        else:
            assert one.rgb == viridis(rest[row, column] / top)
            assert abs(told - rest[row, column]) < 1e-6
    mass = f"{weights[:, sinks].sum() / 5:.2f}"[1:]
    assert f"sinks are hidden: keys 0 “the”, 2 “sat” with {mass} of all attention taken out" in said(svg)
    assert "sinks" in texts(svg)


def test_a_learned_sink_has_a_strip_and_rows_that_sum_to_less():
    record = make_record(THREE)
    left = np.array([0.5, 0.75, 1.0])[:, None]
    record = with_arrays(record, pattern=(record.arrays["pattern"] * left).astype(np.float32))
    record = replace(record, heads=(HeadStatistics(head=0, learned_sink=0.25), *record.heads[1:]))
    svg = figure(record, HEAD)
    assert "a sink logit takes .25 of all attention" in said(svg)
    strip = [one for one in shapes(svg) if one.tag == "rect" and one.said and " → " not in one.said]
    assert [one.said for one in strip] == ["a: 0.5", "dog: 0.25", "ran: 0"]
    assert [one.rgb for one in strip] == [(128, 32, 100), (64, 16, 50), (0, 0, 0)]
    assert {".50", ".75", "1.00"} <= {*texts(svg)}


# ---------------------------------------------------------------------------------------------------------- large maps


def test_a_map_of_many_cells_is_an_image_of_a_pixel_for_each():
    record = of_tokens((f"t{i}" for i in range(60)), causal=True, n_heads=1)
    weights, allowed = drawn_shares(record)
    (image,) = images(figure(record, HEAD))
    top = max(weights[row, : row + 1].max() for row in range(1, 60))
    assert image.shape == (60, 60, 3)
    for row, column in [(0, 0), (1, 1), (7, 3), (40, 40), (59, 0), (59, 58), (5, 6)]:
        expected = viridis(weights[row, column] / top) if allowed[row, column] else BLANK
        assert tuple(image[row, column]) == expected


def test_an_image_is_as_wide_as_there_are_keys_and_as_high_as_there_are_queries():
    record = make_record(tuple(f"q{i}" for i in range(53)), context=[tuple(f"k{i}" for i in range(71))], n_heads=1)
    weights, _ = drawn_shares(record)
    svg = figure(record, replace(HEAD, map_scale="linear"))
    (image,) = images(svg)
    assert image.shape == (53, 71, 3)
    assert tuple(image[52, 3]) == viridis(weights[52, 3] / weights.max())
    (drawn,) = [one for one in shapes(svg) if one.tag == "image"]
    assert drawn.number("width") / 71 == drawn.number("height") / 53


def test_cells_are_put_together_so_that_an_image_has_no_more_than_512_a_side():
    record = of_tokens((f"t{i}" for i in range(515)), causal=True, n_heads=1)
    weights, _ = drawn_shares(record)
    svg = figure(record, replace(HEAD, map_scale="log"))
    (image,) = images(svg)
    assert image.shape == (258, 258, 3)

    def block(row: int, column: int) -> float:
        part = weights[2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        return part.sum() / len(part)

    top = max(block(row, column) for row in range(1, 258) for column in range(row + 1))
    for row, column in [(1, 0), (3, 2), (100, 17), (257, 257), (257, 100)]:
        level = 1 + np.log10(max(block(row, column), top / 1000) / top) / 3
        assert tuple(image[row, column]) == viridis(level)
    assert "the attention weight that 2 queries (rows) give on average to 2 keys (a column) together" in said(svg)
    assert {"0", "100", "500"} <= {*texts(svg)}


def test_a_picture_of_a_long_text_stays_small():
    record = of_tokens((f"t{i}" for i in range(600)), causal=True, n_heads=2)
    assert len(figure(record, HEAD)) < 400_000
    assert len(figure(record, ViewOptions())) < 100_000


# ---------------------------------------------------------------------------------------------------------------- grid


def test_a_grid_shows_every_head_on_the_same_scale():
    record = make_record(FIVE, causal=True, n_heads=3)
    svg = figure(record, ViewOptions())
    weights = [drawn_shares(record, head)[0] for head in range(3)]
    top = max(one[1:].max() for one in weights)
    groups = {tuple(sorted((one.said, one.rgb) for one in part)) for part in _thumbs(cells(svg), 3)}
    expected = set()
    for one in weights:
        told = []
        for i, j in np.ndindex(5, 5):
            weight = f"{one[i, j]:.6g}" if j <= i else "masked"
            told.append((f"{FIVE[i]} → {FIVE[j]}: {weight}", viridis(one[i, j] / top) if j <= i else BLANK))
        expected.add(tuple(sorted(told)))
    assert groups == expected
    assert f"attention weight, all heads: linear, 0 … {top:.4g} or more" in texts(svg)
    assert [text for text in texts(svg) if text.startswith("head ")] == [f"head {h}  ○ mixed" for h in range(3)]


def _thumbs(found: list[Shape], n: int) -> list[list[Shape]]:
    """The cells of each of the heads that stand beside each other."""
    columns = sorted({one.x for one in found})
    per_head = len(columns) // n
    return [[one for one in found if columns.index(one.x) // per_head == head] for head in range(n)]


def test_ranks_in_a_grid_are_among_each_heads_own_cells():
    record = make_record(THREE, n_heads=2)
    svg = figure(record, ViewOptions(map_scale="rank"))
    for part, head in zip(_thumbs(cells(svg), 2), range(2), strict=True):
        weights = drawn_shares(record, head)[0].ravel()
        assert [one.rgb for one in part] == [viridis(sorted(weights).index(weight) / 8) for weight in weights]
    assert "attention weight: rank, the smallest … the largest of each head's own cells" in texts(svg)


def test_what_was_taken_out_of_a_head_stands_above_its_map():
    record = with_sinks(make_record(FIVE, n_heads=3), 0)
    masses = [drawn_shares(record, head)[0][:, 0].mean() for head in range(3)]
    svg = figure(record, ViewOptions(hide_sinks=True))
    names = [text for text in texts(svg) if text.startswith("head ")]
    assert names == [f"head {head}  ○ mixed · sinks {mass:.2f}".replace("0.", ".") for head, mass in enumerate(masses)]
    assert f"{np.mean(masses):.2f}"[1:] + " of all attention of these heads taken out" in said(svg)


@pytest.mark.parametrize(("n_heads", "form"), [(17, "{} ○ sinks {}"), (161, "{} ○ {}")])
def test_what_was_taken_out_of_one_of_many_heads_stands_above_its_map_too(n_heads, form):
    record = with_sinks(make_record(THREE, n_heads=n_heads), 0)
    told = texts(figure(record, ViewOptions(hide_sinks=True)))
    for head in range(n_heads):
        assert form.format(head, f"{drawn_shares(record, head)[0][:, 0].mean():.2f}"[1:]) in told


def test_the_mass_of_sinks_is_over_all_queries_of_heads_that_are_numbers():
    record = with_sinks(make_record(FIVE), 0)
    pattern = record.arrays["pattern"].copy()
    pattern[0, 0, 1:] = np.nan  # one query is left of head 0, five of head 1
    mass = (pattern[0, 0, 0, 0] + pattern[0, 1, :, 0].sum()) / 6
    svg = figure(with_arrays(record, pattern=pattern), ViewOptions(hide_sinks=True, precision=4))
    assert f"sinks are hidden: {mass:.4f}".replace(" 0", " ") in said(svg)


def test_learned_sinks_take_of_the_heads_that_have_one():
    record = make_record(THREE)
    pattern = record.arrays["pattern"].copy()
    pattern[0, 0] *= 0.75
    heads = (HeadStatistics(head=0, learned_sink=0.25), *record.heads[1:])
    svg = figure(replace(with_arrays(record, pattern=pattern), heads=heads), ViewOptions())
    assert "sink logits take .25 of the attention of their heads" in said(svg)


@pytest.mark.parametrize("options", [HEAD, ViewOptions()])
def test_a_picture_names_its_text_its_tokens_and_its_axes(options):
    told = texts(figure(make_record(FIVE), options))
    assert "5 tokens: “the cat sat on mats”" in told
    assert [text.strip() for text in told if "→" in text or "↓" in text] in (
        ["key →", "query ↓"],
        ["query ↓", "key →"],
    )


def test_a_grid_without_room_for_names_shows_its_axes_and_how_many_tokens():
    svg = figure(of_tokens((f"t{i}" for i in range(47)), n_heads=2), ViewOptions())
    assert any(text.startswith("47 tokens: “t0 t1 t2") and text.endswith("…”") for text in texts(svg))
    (key,) = [one for one in shapes(svg) if one.text == "key →"]
    (query,) = [one for one in shapes(svg) if one.text == "query ↓"]
    image = next(
        one for one in shapes(svg) if one.tag in ("image", "rect") and one.number("width") > 100 and one.y > 60
    )
    assert key.x == image.x
    assert query.x < image.x
    assert image.y - 20 < key.y < image.y
    assert image.y - 20 < query.y < image.y


def test_texts_that_layers_do_not_have_in_common_are_reported_each():
    record = layered(text_of(THREE, parts=()), context=[text_of(FIVE, parts=())], n_layers=1, n_heads=2)
    told = texts(figure(record, ViewOptions()))
    assert any(text.startswith("encoder 0: 7 tokens") for text in told)
    assert any(text.startswith("decoder 0: 5 tokens") for text in told)
    assert any(text.startswith("cross 0: queries, 5 tokens") for text in told)
    assert any(text.startswith("cross 0: keys, 7 tokens") for text in told)


def test_words_are_counted_where_they_are_drawn():
    record = layered(text_of(("the", "fox", "es", "ran"), parts=(2,)), n_layers=2, n_heads=1)
    told = texts(figure(record, ViewOptions(words=True)))
    assert sum(text.startswith("5 words") for text in told) == 1
    assert told.count("foxes") == 2 * 2  # of each layer beside the rows, and above the columns


def test_layers_that_were_not_kept_are_named():
    record = layered(n_layers=3, n_heads=1)
    lost = ("layers.1.pattern", "layers.1.map")
    record = replace(record, arrays={name: array for name, array in record.arrays.items() if name not in lost})
    svg = figure(record, ViewOptions())
    assert "not drawn, because the record has neither pattern nor map: layer 1" in said(svg)
    assert "not drawn" not in said(figure(layered(n_layers=3, n_heads=1), ViewOptions()))


def test_a_checkpoint_has_a_row_for_each_layer_and_a_legend_of_kinds():
    record = layered(n_layers=3, n_heads=4, without=(NonAttentionLayer(1, "mamba"),))
    svg = figure(record, ViewOptions())
    found = shapes(svg)
    rows = {one.text: one.y for one in found if one.tag == "text" and re.fullmatch(r"layer \d", one.text)}
    assert [*rows] == ["layer 0", "layer 2", "layer 3"]
    assert [*rows.values()] == sorted(rows.values())
    heads = [one.text for one in found if one.tag == "text" and one.text.startswith("head ")]
    assert [name[:6] for name in heads] == [f"head {h}" for h in range(4)] * 3
    assert "layers 0, 2, 3 · 12 heads" in texts(svg)
    assert "without an attention matrix: layer 1, mamba" in said(svg)
    counted = re.findall(r"[◀┃╲≡↻▪⇠░○] ([a-z ]+) (\d+)", said(svg))
    assert {name: int(n) for name, n in counted} == Counter(HEAD_TYPES[head.kind].name for head in record.heads)


def test_a_layer_that_is_not_verified_is_marked():
    record = spoiled(layered(n_layers=2), 1, "a strange keyword")
    grid = figure(record, ViewOptions())
    assert "layer 1 !" in texts(grid)
    assert "layer 0" in texts(grid)
    assert "! layer 1: NOT verified: the check" in said(grid)
    head = figure(record, ViewOptions(heads=(1,), layers=((None, 1),)))
    assert "NOT verified" in said(head)
    assert "a strange keyword" in said(head)
    assert "NOT verified" not in said(figure(record, ViewOptions(heads=(1,), layers=((None, 0),))))


def test_layers_of_a_pair_are_drawn_with_their_own_texts():
    record = layered(text_of(THREE, parts=()), context=[text_of(FIVE, parts=())], n_layers=1, n_heads=2)
    svg = figure(record, ViewOptions(layers=(("cross", 0),), heads=(1,)))
    told = {one.said.split(":")[0] for one in cells(svg)}
    names = [["[CLS]", *tokens, "[SEP]"] for tokens in (THREE, FIVE)]
    assert told == {f"{query} → {key}" for query in names[0] for key in names[1]}
    assert "cross layer 0 · head 1" in texts(svg)


def test_chosen_rows_alone_are_drawn_under_their_places():
    record = layered(n_layers=1, n_heads=1)
    svg = figure(record, ViewOptions(heads=(0,), rows=(4, 2)))
    tokens = record.sequences[0].tokens
    weights = record.arrays["layers.0.pattern"][0, 0]
    found = cells(svg)
    assert [one.said.split(" → ")[0] for one in found[:: len(tokens)]] == [f"4 {tokens[4]}", f"2 {tokens[2]}"]
    told = np.array([float(one.said.split(": ")[-1]) for one in found]).reshape(2, -1)
    assert np.allclose(told, weights[[4, 2]], atol=1e-6)
    assert f"2 of {len(tokens)} queries are drawn" in said(svg)


def test_words_take_the_place_of_their_tokens():
    record = layered(text_of(("the", "fox", "es", "ran"), parts=(2,)), n_layers=1, n_heads=1)
    svg = figure(record, ViewOptions(heads=(0,), words=True))
    weights = record.arrays["layers.0.pattern"][0, 0].astype(float)
    merged = np.delete(weights, 3, axis=1)
    merged[:, 2] += weights[:, 3]
    merged[2] = (merged[2] + merged[3]) / 2
    told = [float(one.said.split(": ")[-1]) for one in cells(svg)]
    assert np.allclose(told, np.delete(merged, 3, axis=0).ravel(), atol=1e-6)
    assert "foxes" in texts(svg)
    assert "words: attention weights are summed" in said(svg)


def test_a_part_of_a_word_that_is_a_sink_makes_the_word_one():
    record = layered(text_of(("the", "fox", "es", "ran"), parts=(2,)), n_layers=1, n_heads=1)
    said_of = replace(record.heads[0], sinks=(Sink(0, 3, 0.5, 0.1),))  # "es"
    svg = figure(replace(record, heads=(said_of,)), ViewOptions(heads=(0,), words=True, hide_sinks=True))
    hidden = {one.said.split(" → ")[1].split(":")[0] for one in cells(svg) if one.said.endswith("taken out")}
    assert hidden == {"foxes"}


# ---------------------------------------------------------------------------------------------------------------- walk


def boxes(svg: str) -> list[Shape]:
    return [one for one in shapes(svg) if one.tag == "rect" and one.attributes.get("rx") == "5"]


def lines_in(svg: str, box: Shape) -> list[str]:
    inside = [one for one in shapes(svg) if one.tag == "text" and box.x < one.x < box.x + box.number("width")]
    return [one.text for one in inside if box.y < one.y < box.y + box.number("height")]


def test_a_walk_has_a_box_for_each_site_with_its_axes_formula_and_weights():
    record = walked(make_record(THREE))
    svg = figure(record, ViewOptions(figure="walk"))
    found = boxes(svg)
    assert len(found) == len(record.trace)
    for number, (box, step) in enumerate(zip(found, record.trace, strict=True), 1):
        lines = lines_in(svg, box)
        assert lines[0] == f"{number} {step.site}"
        assert " · ".join(f"{axis} {size}" for axis, size in zip(step.axes, step.shape, strict=True)) in lines
        assert step.formula in lines
    last = lines_in(svg, found[-1])
    assert "weights o_proj.weight [6, 7]: 42 numbers" in last
    assert any("2 NaN" in line for line in last)
    assert "self-check" in texts(svg)


def full_trace(record, names) -> tuple[Step, ...]:
    """Steps of our sites with what the table says of them."""
    facts = record.facts
    return tuple(
        Step(
            name, SITES[name].axes_for(facts), SITES[name].shape_for(facts), "float32", SITES[name].formula_for(facts), "",
            "view" if name in ("q", "k", "v") else "copy", (1,), 5, 20, view_of="q_proj" if name == "q" else None,
        )
        for name in names
    )  # fmt: skip


SEPARATE = (
    "ids",
    "embed",
    "positions",
    "x",
    "q_proj",
    "q",
    "k_proj",
    "k",
    "v_proj",
    "v",
    "qk",
    "scores",
    "pattern",
    "z",
    "concat",
    "out",
)
ROTATED = (
    "ids",
    "embed",
    "x",
    "q_proj",
    "q",
    "k_proj",
    "k",
    "v_proj",
    "v",
    "q_rot",
    "k_rot",
    "qk",
    "scores",
    "pattern",
    "z",
    "concat",
    "out",
)
FUSED = ("ids", "embed", "positions", "x", "qkv", "q", "k", "v", "qk", "scores", "pattern", "z", "concat", "out")
PER_HEAD = (
    "ids",
    "embed",
    "x",
    "q_per_head",
    "q",
    "k_per_head",
    "k",
    "v_per_head",
    "v",
    "alibi",
    "qk",
    "scores",
    "pattern",
    "z",
    "head_out",
    "out_sum",
)
CROSS = (
    "ids",
    "embed",
    "positions",
    "x",
    "context",
    "q_proj",
    "q",
    "kv",
    "k",
    "v",
    "qk",
    "scores",
    "pattern",
    "dropped",
    "z",
    "concat",
    "out",
)
READING = (*SEPARATE[:4], "context", *SEPARATE[4:])
FLOWS = [
    (READING, {}),
    (SEPARATE, {}), (ROTATED, {"positions": "rope", "d_head": 4}), (FUSED, {}), (PER_HEAD, {"positions": "alibi"}),
    (CROSS, {"dropout": 0.25, "train": True}), (("random", *SEPARATE[3:]), {"positions": "none", "random": (1, 3)}),
]  # fmt: skip


def flowing(names, choices):
    context = [FIVE] if "context" in names else None
    record = make_record(THREE, context=context)
    config = replace(record.config, out_proj=True, **choices).resolved()
    record = replace(record, config=config, arrays={})
    return replace(record, trace=full_trace(record, names))


@pytest.mark.parametrize(("names", "choices"), FLOWS, ids=lambda value: value[-2] if isinstance(value, tuple) else "")
def test_arrows_come_from_the_sites_that_a_formula_names(names, choices):
    record = flowing(names, choices)
    for place, step in enumerate(record.trace):
        right = step.formula.split(" = ", 1)[-1].replace("c W", "context W").split(";")[0].split(", m")[0]
        named = {word for word in re.findall(r"[a-z_]+", right) if word in names[:place]}
        if named and step.site not in ("x", "positions", "alibi", "context"):
            assert set(sources_of(step.site, names[:place])) == named, step.formula
    assert set(sources_of("x", names[: names.index("x")])) == {*names[: names.index("x")]} & {
        "embed",
        "positions",
        "random",
    }


@pytest.mark.parametrize(("names", "choices"), FLOWS, ids=lambda value: value[-2] if isinstance(value, tuple) else "")
def test_boxes_do_not_overlap_and_arrows_run_between_their_edges(names, choices):
    svg = figure(flowing(names, choices), ViewOptions(figure="walk"))
    found = boxes(svg)
    spans = [(b.x, b.y, b.x + b.number("width"), b.y + b.number("height")) for b in found]
    for place, one in enumerate(spans):
        for other in spans[place + 1 :]:
            assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    arrows = [one for one in shapes(svg) if one.tag == "path" and "marker-end" in one.attributes]
    assert len(arrows) == sum(len(sources_of(name, names[:place])) for place, name in enumerate(names))
    for arrow in arrows:
        for line in segments(arrow):
            crossed = [span for span in spans if crosses(line, span)]
            assert not crossed, arrow.attributes["d"]


def segments(arrow: Shape) -> list[tuple[float, float, float, float]]:
    """The straight lines of a path of M, V and H."""
    (x, y), *rest = [tuple(map(float, part.split())) for part in re.findall(r"[MVH]([-\d. ]+)", arrow.attributes["d"])]
    kinds, found = re.findall("[VH]", arrow.attributes["d"]), []
    for kind, (end,) in zip(kinds, rest, strict=True):
        new = (x, end) if kind == "V" else (end, y)
        found.append((x, y, *new))
        x, y = new
    return [(a + arrow.x, b + arrow.y, c + arrow.x, d + arrow.y) for a, b, c, d in found]


def crosses(line, span) -> bool:
    low_x, high_x = sorted((line[0], line[2]))
    low_y, high_y = sorted((line[1], line[3]))
    return high_x > span[0] + 0.1 and low_x < span[2] - 0.1 and high_y > span[1] + 0.1 and low_y < span[3] - 0.1


def test_the_diagram_knows_every_site():
    assert set(SITE_POSITIONS) == set(SITES)


@pytest.mark.parametrize(("site", "told"), [("scores", "6 × −∞, masked"), ("qk", "6 Inf")])
def test_masked_scores_are_reported_as_not_allowed_and_nothing_else(site, told):
    record = walked(make_record(THREE))
    values = replace(record.trace[-1].values, n_nan=0, n_inf=6)
    trace = tuple(replace(step, values=values) if step.site == site else step for step in record.trace)
    assert told in said(figure(replace(record, trace=trace), ViewOptions(figure="walk")))


def test_steps_of_another_code_are_listed_with_their_line_and_what_is_odd():
    step = Step("their <b>.view", ("batch", "query"), (2, 3), "float64", "a & b", "", "view", (3, 1), 0, 48, view_of="qkv",
                file="/secret/their.py", line=17, source="q = f(x) <!--", remark="this is odd")  # fmt: skip
    record = replace(make_record(THREE), trace=(step, replace(step, site="x", remark="", layout="copy", view_of=None)))
    svg = figure(record, ViewOptions(figure="walk"))
    first = lines_in(svg, boxes(svg)[0])
    assert first[0] == "1 their <b>.view"
    assert "their.py:17  q = f(x) <!--" in first
    assert "! this is odd" in first
    assert "/secret" not in svg
    assert not [one for one in shapes(svg) if "marker-end" in one.attributes]
    assert "from top to bottom in the order of execution" in texts(svg)


def test_steps_of_decoding_are_a_table_with_a_bar_for_what_is_read():
    record = decoded(make_record(FIVE), prompt_len=2)
    svg = figure(record, ViewOptions(figure="walk"))
    rows = {one.y for one in shapes(svg) if one.tag == "text" and one.text in ("prefill", "decode")}
    assert len(rows) == len(record.trace) == 4
    bars = [one.number("width") for one in shapes(svg) if one.tag == "rect" and one.attributes["fill"] == "#44607c"]
    read = [step.cache.read_bytes for step in record.trace]
    assert np.allclose(np.array(bars) / bars[-1], np.array(read) / read[-1], atol=1e-3)
    assert "the cat" in texts(svg)
    assert "4.00e-07" in texts(svg)


def test_of_very_many_steps_the_middle_is_left_out_and_counted():
    record = decoded(of_tokens(f"t{i}" for i in range(60)))
    svg = figure(record, ViewOptions(figure="walk"))
    assert texts(svg).count("decode") == 48
    assert "⋮ 12 steps not drawn" in texts(svg)


# ------------------------------------------------------------------------------------------------------------ document


ALL = [HEAD, ViewOptions(), ViewOptions(figure="walk"), replace(HEAD, hide_sinks=True, map_scale="log")]


@pytest.mark.parametrize("options", ALL)
def test_a_picture_says_what_made_it_to_readers_and_programs(options):
    record = replace(make_record(FIVE, causal=True), command=("mha", "run", "the cat", "\x1b[2J"))
    svg = figure(record, options)
    told = said(svg)
    for line in (
        "mha run 'the cat' '\\x1b[2J'",
        "mha 0.1.0 · torch 2.6.0 · numpy 2.1.0 · python 3.11.7",
        "0 · init xavier",
    ):
        assert line in told
    root = ElementTree.fromstring(svg)
    content = json.loads(root.findtext(f"{SVG}metadata") or "")
    assert content["command"] == [*record.command]
    assert content["seed"] == "0 · init xavier"
    assert root.get("role") == "img"
    names = (root.get("aria-labelledby") or "").split()
    assert [element.get("id") for element in root[:2]] == names
    assert all(element.text for element in root[:2])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (HEAD, "figure head · head 0 · sequence 0 of 0–1 · scale linear · sinks shown"),
        (ViewOptions(sequences=(1,)), "figure grid · heads 0–2 · sequence 1 of 0–1 · scale linear · sinks shown"),
        (
            ViewOptions(heads=(0, 2), hide_sinks=True, map_scale="log", rows=(2, 1)),
            "figure grid · heads 0, 2 · sequence 0 of 0–1 · scale log · sinks hidden · queries 1, 2",
        ),
        (ViewOptions(figure="walk"), "figure walk"),
    ],
)
def test_what_was_chosen_for_the_picture_is_reported_beside_the_command_of_the_record(options, told):
    svg = figure(make_record(FIVE, THREE, n_heads=3), options)
    assert told in texts(svg)
    assert texts(svg)[texts(svg).index("drawn as") + 2] == "record by"
    assert json.loads(ElementTree.fromstring(svg).findtext(f"{SVG}metadata"))["drawn as"] == told


def test_layers_are_among_the_choices():
    svg = figure(layered(n_layers=3), ViewOptions(heads=(1,), layers=((None, 0), (None, 2))))
    assert "figure grid · layers 0, 2 · head 1 · scale linear · sinks shown" in texts(svg)


@pytest.mark.parametrize(
    ("options", "title"), [(HEAD, "head 0"), (ViewOptions(figure="walk"), "attention, site by site")]
)
def test_the_title_for_programs_is_that_of_the_picture(options, title):
    svg = figure(make_record(THREE), options)
    assert ElementTree.fromstring(svg).findtext(f"{SVG}title") == title == texts(svg)[0]


@pytest.mark.parametrize("options", ALL)
def test_the_same_record_gives_the_same_bytes(options):
    assert figure(make_record(FIVE, causal=True), options) == figure(make_record(FIVE, causal=True), options)


@pytest.mark.parametrize("options", ALL)
def test_hostile_tokens_are_text_and_nothing_is_fetched(options):
    tokens = tuple([*HOSTILE, *WEB][: 40 if options.figure is None else None])
    record = replace(of_tokens(tokens), command=("mha", *WEB))
    svg = figure(record, options)
    root = ElementTree.fromstring(svg)
    drawing = {"svg", "g", "rect", "text", "line", "path", "image", "defs", "marker", "linearGradient", "stop"}
    allowed = {*drawing, "title", "desc", "metadata"}
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= allowed
    for element in root.iter():
        for name, value in element.attrib.items():
            assert not name.lower().startswith("on")
            if "href" in name:
                assert value.startswith("data:image/png;base64,")
            assert all(place.startswith("#") for place in re.findall(r"url\((.*?)\)", value))
    assert not [c for c in svg if obeyed_or_hidden(c) and c != "\n"]
    if options.heads:
        told = " ".join(one.said for one in shapes(svg))
        assert all(escaped(token).lstrip("\u0301").replace(" ", "␣") in told for token in tokens)


@pytest.mark.parametrize("options", ALL)
@pytest.mark.parametrize(
    "tokens", [THREE, FIVE, tuple(f"token-number-{i}" for i in range(30)), tuple(f"{i}" for i in range(90))]
)
def test_nothing_reaches_over_the_edge_of_the_page(options, tokens):
    svg = figure(replace(of_tokens(tokens, causal=True), command=("mha", "x" * 700, "日本" * 90)), options)
    width, height = map(float, ElementTree.fromstring(svg).get("viewBox").split()[2:])
    for one in shapes(svg):
        assert 0 <= one.x <= width
        assert 0 <= one.y <= height
        if one.tag == "text" and "transform" not in one.attributes:
            cells_wide = sum(2 if ord(c) > 0x2E80 else 1 for c in one.text)
            length = cells_wide * 0.602 * one.number("font-size")
            anchor = {"end": 1.0, "middle": 0.5}.get(one.attributes.get("text-anchor", ""), 0.0)
            assert one.x - anchor * length >= -0.5
            assert one.x + (1 - anchor) * length <= width + 0.5, one.text
        if one.tag in ("rect", "image"):
            assert one.x + one.number("width") <= width + 0.01
            assert one.y + one.number("height") <= height + 0.01


def test_a_long_command_makes_the_page_no_wider():
    short = make_record(THREE)
    long = replace(short, command=("mha", "run", "word " * 900, "日本" * 300))
    pages = [ElementTree.fromstring(figure(record, HEAD)) for record in (short, long)]
    assert pages[0].get("width") == pages[1].get("width")
    assert float(pages[0].get("width", "")) < 620


def test_a_long_command_is_cut_in_the_caption_and_whole_for_programs():
    record = replace(make_record(THREE), command=("mha", "run", "word " * 900))
    svg = figure(record, HEAD)
    assert any(text.endswith(" …") for text in texts(svg))
    assert json.loads(ElementTree.fromstring(svg).findtext(f"{SVG}metadata"))["command"][2] == "word " * 900


@pytest.mark.parametrize(
    ("record", "options", "title"),
    [
        (make_record(THREE, n_heads=1), ViewOptions(), "head 0"),
        (make_record(THREE, n_heads=2), ViewOptions(), "2 heads"),
        (make_record(THREE, n_heads=2), ViewOptions(heads=(1,)), "head 1"),
        (replace(make_record(THREE), arrays={}, heads=()), ViewOptions(), "attention, site by site"),
        (make_record(THREE, n_heads=1), ViewOptions(figure="grid"), "1 head"),
    ],
)
def test_without_a_choice_the_picture_is_the_head_the_grid_or_the_walk(record, options, title):
    assert texts(figure(record, options))[0] == title


def test_the_pattern_before_dropout_is_drawn_and_noted():
    record = make_record(THREE, dropout=0.25)
    svg = figure(record, HEAD)
    told = [float(one.said.split(": ")[1]) for one in cells(svg)]
    assert np.allclose(told, record.arrays["pattern"][0, 0].ravel(), atol=1e-6)
    assert "in training: the pattern before dropout 0.25" in said(svg)


@pytest.mark.parametrize(
    ("record", "options", "message"),
    [
        (make_record(THREE), ViewOptions(figure="head"), "--figure head draws one head, and 2 are chosen"),
        (
            make_record(THREE, FIVE),
            ViewOptions(sequences=(0, 1)),
            "a picture shows one sequence, and --sequence names 0, 1",
        ),
        (make_record(THREE), ViewOptions(sequences=(3,)), "--sequence 3 is out of range: only 0 exists"),
        (
            layered(n_layers=1, n_heads=1, keep=False),
            ViewOptions(rows=(99,)),
            "--from names no query of layer 0 · head 0",
        ),
    ],
)
def test_what_a_picture_cannot_show_is_a_usage_error(record, options, message):
    with pytest.raises(UsageError) as caught:
        figure(record, options)
    assert caught.value.message == message


def test_a_record_that_holds_nothing_to_draw_says_how_to_keep_it():
    record = make_record(THREE)
    arrays = {name: array for name, array in record.arrays.items() if name != "pattern"}
    with pytest.raises(MhaError) as caught:
        figure(replace(record, arrays=arrays), ViewOptions())
    assert caught.value.message == "the heads cannot be drawn: the record does not have their patterns"
    assert caught.value.hint == "--keep pattern keeps them, --keep-limit makes room"
    with pytest.raises(MhaError) as caught:
        figure(layered(n_layers=1, keep=False), ViewOptions(words=True))
    assert "words" in caught.value.message
    with pytest.raises(MhaError) as caught:
        figure(layered(n_layers=1), ViewOptions(figure="walk"))
    assert caught.value.message == "the record has no steps to draw"


def test_lines_of_a_paragraph_begin_at_its_left_edge_one_below_the_other():
    piece = paragraph(["one", "two", "three"], 10)
    lines = shapes(f'<svg xmlns="http://www.w3.org/2000/svg">{piece.content}</svg>')[1:]
    assert [line.text for line in lines] == ["one", "two", "three"]
    assert [line.x for line in lines] == [0, 0, 0]
    first, second, third = (line.y for line in lines)
    assert 0 < first < second < third < piece.height
    assert third - second == pytest.approx(second - first)


@pytest.mark.parametrize("text", ["a bb ccc", "", "x" * 95, "日本語" * 30, "one " + "y" * 45 + " two  three", " lead"])
@pytest.mark.parametrize("width", [7, 20])
def test_wrapped_lines_are_the_text_and_fit(text, width):
    lines = wrapped(text, width)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert all(sum(2 if ord(c) > 0x2E80 else 1 for c in line) <= width for line in lines)
