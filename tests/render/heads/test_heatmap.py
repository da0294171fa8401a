import itertools
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.color import ColorTriplet
from rich.console import Console
from support.records import drawn, make_record

from mhacli.render.base.colours import RAMP, glyph, half_block, level_of, ramp_colour, shade
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.heads.head_map import HeadPattern
from mhacli.render.heads.heatmap import HeatScale, fitted_map, heat_scale, heatmap, scale_caption

PLAIN, COLOUR = Screen(80, False), Screen(80, True)
GLYPHS = "·░▒▓█"


def numbered(count):
    return tuple(f"t{i}" for i in range(count))


def head_of(record):
    return HeadPattern(record, 0, 0, "pattern")


def with_pattern(record, pattern):
    shape = record.arrays["pattern"].shape
    return replace(record, arrays={**record.arrays, "pattern": np.broadcast_to(np.float32(pattern), shape)})


def lines_of(record, width=80, largest=1.0, *, colour=False, scale="linear", **options):
    picture = heatmap(head_of(record), HeatScale(scale, largest), ViewOptions(**options), Screen(width, colour))
    return drawn(picture, width)


def random_pattern(count, seed=7):
    """A causal pattern whose rows sum to 1."""
    weights = np.random.default_rng(seed).random((count, count)) * np.tri(count)
    return np.float32(weights / weights.sum(axis=1, keepdims=True))


def block_means(pattern, block):
    """Of each block of a causal pattern the mean over its queries of what its keys get together; NaN where none is allowed."""
    count = len(pattern)
    starts = range(0, count, block)
    means = np.full((len(starts), len(starts)), np.nan)
    for row, top in enumerate(starts):
        for column, left in enumerate(starts):
            part = pattern[top : top + block, left : left + block].astype(np.float64)
            if left <= min(top + block, count) - 1:
                means[row, column] = np.mean(part) * part.shape[1]
    return means


# ------------------------------------------------------------------------------------------------------------ colours


def test_levels_are_linear_and_stay_on_the_scale():
    assert [level_of(weight, 0.5) for weight in (0, 0.25, 0.5, 0.7)] == [0, 128, 255, 255]
    assert level_of(float("inf"), 1.0) == 255


def test_glyphs_grow_with_the_level():
    assert [glyph(level) for level in (0, 51, 52, 102, 103, 153, 154, 204, 205, 255)] == list("··░░▒▒▓▓██")


def test_the_ramp_passes_its_points_and_gets_brighter_all_the_way():
    assert (ramp_colour(0), ramp_colour(255)) == (RAMP[0], RAMP[-1])
    luminance = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(ramp_colour, range(256))]
    assert all(b > a - 0.5 for a, b in itertools.pairwise(luminance))
    assert luminance[255] > luminance[128] > luminance[0]


def test_text_on_a_shade_is_dark_on_bright_and_bright_on_dark():
    assert shade(0).color.triplet == ColorTriplet(255, 255, 255)
    assert shade(255).color.triplet == ColorTriplet(0, 0, 0)
    assert shade(255).bgcolor.triplet == ColorTriplet(*RAMP[-1])


def test_a_half_block_shows_two_cells_and_leaves_forbidden_ones_blank():
    assert half_block(None, None)[0] == " "
    sign, style = half_block(0, None)
    assert (sign, style.color.triplet, style.bgcolor) == ("▀", ColorTriplet(*RAMP[0]), None)
    sign, style = half_block(None, 255)
    assert (sign, style.color.triplet, style.bgcolor) == ("▄", ColorTriplet(*RAMP[-1]), None)
    sign, style = half_block(255, 0)
    assert (sign, style.color.triplet, style.bgcolor.triplet) == ("▀", ColorTriplet(*RAMP[-1]), ColorTriplet(*RAMP[0]))


# ------------------------------------------------------------------------------------------------------------ picture


def test_a_small_pattern_has_a_named_cell_for_every_share():
    record = with_pattern(make_record(causal=True), [[1, 0, 0], [0.25, 0.75, 0], [0.01, 0.45, 0.54]])
    assert [line.split() for line in lines_of(record)] == [
        ["query", "the", "cat", "sat"],
        ["the", "███████"],
        ["cat", "░░░░░░░", "▓▓▓▓▓▓▓"],
        ["sat", "·······", "▒▒▒▒▒▒▒", "▒▒▒▒▒▒▒"],
    ]


def test_the_scale_is_relative_to_the_largest_weight():
    record = with_pattern(make_record(), [[0.25, 0.5, 0.25]] * 3)
    assert lines_of(record, largest=0.5)[1].split() == ["the", "▒▒▒▒▒▒▒", "███████", "▒▒▒▒▒▒▒"]


def test_padding_is_named_and_left_blank():
    lines = drawn(
        heatmap(HeadPattern(make_record(("a",), ("b", "c")), 0, 0), HeatScale("linear", 1.0), ViewOptions(), PLAIN), 80
    )
    assert [line.split() for line in lines] == [["query", "a", "‹pad›"], ["a", "███████"]]


@pytest.mark.parametrize("count", [25, 61, 300, 1000])
@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize("colour", [True, False])
def test_a_long_pattern_shows_the_mean_weight_of_blocks(count, width, everything, colour):
    pattern, options, screen = random_pattern(count), ViewOptions(everything=everything), Screen(width, colour)
    head = head_of(with_pattern(make_record(numbered(count), causal=True), pattern))
    found = fitted_map(head, options, screen)
    lines = count if everything else 40
    assert found.block == max(-(-count // (width - 13)), -(-count // (2 * lines if colour else lines)))
    expected = block_means(pattern, found.block)
    assert np.array_equal(~found.is_open, np.isnan(expected))
    assert found.weights[found.is_open] == pytest.approx(expected[found.is_open], abs=1e-6)
    assert found.is_open.sum(axis=1).tolist() == list(range(1, len(expected) + 1))


@pytest.mark.parametrize("scale", ["linear", "log", "rank"])
def test_marks_follow_the_means_on_every_scale(scale):
    pattern = random_pattern(300)
    record = with_pattern(make_record(numbered(300), causal=True), pattern)
    expected = block_means(pattern, 8)
    top = np.nanmax(expected[1:])  # the first row has no choice
    known = expected[~np.isnan(expected)]
    parts = {
        "linear": expected / top,
        "log": 1 + np.log10(expected / top) / 3,
        "rank": np.searchsorted(np.sort(known), expected) / (len(known) - 1),
    }
    levels = np.where(np.isnan(expected), np.nan, np.rint(255 * np.clip(parts[scale], 0, 1)))
    signs = [["" if np.isnan(level) else GLYPHS[int(level) * 5 // 256] for level in row] for row in levels]
    _, note, axis, *picture = lines_of(record, 140, top, scale=scale)
    assert note == "each mark the mean weight that 8 queries give to 8 keys together"
    assert [line[13:].rstrip() for line in picture] == ["".join(row) for row in signs]
    assert [int(line[:13].split()[-1]) for line in picture] == list(range(0, 300, 8))
    assert axis[13:].split() == ["0", "80", "160", "240"]


def test_rows_that_were_requested_are_never_pooled():
    pattern = random_pattern(300)
    record = with_pattern(make_record(numbered(300), causal=True), pattern)
    head = HeadPattern(record, 0, 0, rows=(299, 7, 100))
    found = fitted_map(head, ViewOptions(), PLAIN)
    assert (found.block, found.weights.shape) == (5, (3, 60))
    for row, query in enumerate((299, 7, 100)):
        sums = np.add.reduceat(pattern[query].astype(np.float64), np.arange(0, 300, 5))
        assert np.where(found.is_open, found.weights, 0)[row] == pytest.approx(sums, abs=1e-6)
    _, note, _, *picture = drawn(heatmap(head, HeatScale("linear", 1.0), ViewOptions(), Screen(120, False)), 120)
    assert note == "each mark the weight that a query gives to 3 keys together"
    assert [line[:13].split() for line in picture] == [["t299", "299"], ["t7", "7"], ["t100", "100"]]


def test_the_scale_of_a_heatmap_is_linear_for_short_texts_log_for_long_ones_and_ends_at_the_largest_mean():
    short, long = (with_pattern(make_record(numbered(n), causal=True), random_pattern(n)) for n in (40, 300))
    n_cells = 40 * 41 // 2
    assert heat_scale([head_of(short)], 0.75, ViewOptions(), PLAIN) == HeatScale("linear", 0.75, n_cells, True)
    assert heat_scale([head_of(short)], 1.0, ViewOptions(), PLAIN) == HeatScale("linear", 1.0, n_cells)
    found = heat_scale([head_of(long)], 0.75, ViewOptions(), PLAIN)
    means = block_means(random_pattern(300), 8)
    assert (found.kind, found.n_cells) == ("log", 38 * 39 // 2)
    assert found.largest == pytest.approx(np.nanmax(means[1:]), abs=1e-6)
    assert heat_scale([head_of(long)], 0.75, ViewOptions(map_scale="rank"), PLAIN).range == (
        "rank, the smallest … the largest of 741 cells"
    )
    both = heat_scale([head_of(short), head_of(long)], 0.75, ViewOptions(map_scale="rank"), PLAIN)
    assert both.range == "rank, the smallest … the largest of each head's own cells"


@pytest.mark.parametrize("count", [60, 61])
def test_half_blocks_draw_two_queries_on_a_line(count):
    lines = lines_of(make_record(numbered(count), causal=True), colour=True)
    picture = lines[2:]
    assert len(picture) == -(-count // 2)
    assert picture[0][13:] == "▀▄"
    assert picture[1][13:] == "▀▀▀▄"


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("tokens", [("漢字漢字", "\x1b[31m", "x" * 50, "a\u0301"), ("漢字漢字", "\n") * 20])
@pytest.mark.parametrize("colour", [True, False])
def test_hostile_tokens_are_harmless(width, tokens, colour):
    lines = lines_of(make_record(tokens), width, colour=colour)
    assert not any(character in "\x1b\r\u0301" for line in lines for character in line.replace("a\u0301", ""))


@pytest.mark.parametrize("count", [3, 40])
@pytest.mark.parametrize("colour", [True, False])
def test_what_is_not_a_number_is_neither_small_nor_forbidden(count, colour):
    record = make_record(numbered(count), causal=True)
    pattern = record.arrays["pattern"].copy()
    pattern[0, 0, 1] = np.nan
    record = replace(record, arrays={**record.arrays, "pattern": pattern})
    assert "?" in "".join(lines_of(record, colour=colour))
    caption = scale_caption([head_of(record)], HeatScale("linear", 0.5), Screen(200, colour), 2).plain
    assert caption.endswith(" from small to large, a blank is masked, ? is not a number")


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (HeatScale("linear", 0.75), "linear, 0 … .75 for all heads"),
        (HeatScale("log", 0.75), "log, 0.00075 or less … 0.75 for all heads"),
        (HeatScale("rank", 0.75, 12), "rank, the smallest … the largest of 12 cells"),
    ],
)
def test_the_caption_shows_range_kind_and_signs(scale, said):
    assert scale_caption(
        [head_of(make_record()), HeadPattern(make_record(), 0, 1, "pattern")], scale, PLAIN, 2
    ).plain == (f"scale {said}: {GLYPHS} from small to large, a blank is masked")


def test_of_one_head_the_caption_compares_it_with_no_other():
    assert "all heads" not in scale_caption([head_of(make_record())], HeatScale("linear", 0.75), PLAIN, 2).plain


def test_the_caption_shows_the_colours_from_end_to_end():
    caption = scale_caption([head_of(make_record())], HeatScale("linear", 1.0), COLOUR, 3)
    shades = [span.style.bgcolor.triplet for span in caption.spans]
    assert (shades[0], shades[-1], len(shades)) == (ColorTriplet(*RAMP[0]), ColorTriplet(*RAMP[-1]), 16)
    assert "0 … 1.000:" in caption.plain


def test_colours_reach_the_screen():
    paper = StringIO()
    console = Console(file=paper, width=80, force_terminal=True, color_system="truecolor", legacy_windows=False)
    record = with_pattern(make_record(), [[1, 0, 0]] * 3)
    console.print(heatmap(head_of(record), HeatScale("linear", 1.0), ViewOptions(), COLOUR))
    assert f"48;2;{';'.join(map(str, RAMP[-1]))}m" in paper.getvalue()
    assert f"48;2;{';'.join(map(str, RAMP[0]))}m" in paper.getvalue()
