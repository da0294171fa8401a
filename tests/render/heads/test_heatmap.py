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
from mhacli.render.heads.heatmap import FORBIDDEN, NOT_A_NUMBER, heatmap, pooled, scale_caption

PLAIN, COLOUR = Screen(80, False), Screen(80, True)
GLYPHS = "·░▒▓█"


def numbered(count):
    return tuple(f"t{i}" for i in range(count))


def head_of(record):
    return HeadPattern(record, 0, 0, "pattern")


def with_pattern(record, pattern):
    shape = record.arrays["pattern"].shape
    return replace(record, arrays={**record.arrays, "pattern": np.broadcast_to(np.float32(pattern), shape)})


def lines_of(record, width=80, largest=1.0, *, colour=False, **options):
    return drawn(heatmap(head_of(record), largest, ViewOptions(**options), Screen(width, colour)), width)


# ------------------------------------------------------------------------------------------------------------ colours


def test_levels_are_linear_and_stay_on_the_scale():
    assert [level_of(share, 0.5) for share in (0, 0.25, 0.5, 0.7)] == [0, 128, 255, 255]
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
        ["the", "cat", "sat"],
        ["the", "███████"],
        ["cat", "░░░░░░░", "▓▓▓▓▓▓▓"],
        ["sat", "·······", "▒▒▒▒▒▒▒", "▒▒▒▒▒▒▒"],
    ]


def test_the_scale_is_relative_to_the_largest_share():
    record = with_pattern(make_record(), [[0.25, 0.5, 0.25]] * 3)
    assert lines_of(record, largest=0.5)[1].split() == ["the", "▒▒▒▒▒▒▒", "███████", "▒▒▒▒▒▒▒"]


def test_padding_is_named_and_left_blank():
    lines = drawn(heatmap(HeadPattern(make_record(("a",), ("b", "c")), 0, 0, "pattern"), 1.0, ViewOptions(), PLAIN), 80)
    assert [line.split() for line in lines] == [["a", "‹pad›"], ["a", "███████"]]


def test_blocks_show_their_largest_share():
    shares = np.zeros((4, 4))
    shares[0, 1], shares[2, 2], shares[3, 3] = 0.5, 0.25, 1.0
    grid = pooled(head_of(with_pattern(make_record(numbered(4)), shares)), 1.0, 2, 2)
    assert (grid.block, grid.levels.tolist()) == (2, [[128, 0], [0, 255]])


def test_a_block_is_forbidden_only_where_every_cell_is():
    head = head_of(make_record(numbered(5), causal=True))
    levels = pooled(head, 1.0, 3, 3).levels
    assert (levels == FORBIDDEN).tolist() == [[False, True, True], [False, False, True], [False, False, False]]


@pytest.mark.parametrize("count", [25, 61, 300, 1000])
@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("everything", [True, False])
def test_every_cell_of_a_long_pattern_is_in_some_block(count, width, everything):
    record = make_record(numbered(count), causal=True)
    rng = np.random.default_rng(count)
    query = int(rng.integers(count))
    key = int(rng.integers(query + 1))
    shares = np.zeros((count, count), np.float32)
    shares[query, key] = 1
    note, axis, *picture = lines_of(with_pattern(record, shares), width, everything=everything)
    while not picture[0].rstrip().endswith(("·", "█")):
        note, axis, picture = f"{note} {axis}", picture[0], picture[1:]
    block = max(-(-count // (width - 13)), 1 if everything else -(-count // 40))
    assert ("one cell" if block == 1 else f"the largest of {block} × {block} cells") in " ".join(note.split())
    assert len(picture) == -(-count // block)
    (strong,) = [(row, line.index("█") - 13) for row, line in enumerate(picture) if "█" in line]
    assert strong == (query // block, key // block)
    assert [int(line[:13].split()[-1]) for line in picture] == [row * block for row in range(len(picture))]
    assert axis[13:].split()[:2] == ["0", str(10 * block)]


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
    assert (pooled(head_of(record), 1.0, count, count).levels[1] == NOT_A_NUMBER).tolist() == [True, True] + [False] * (
        count - 2
    )
    assert "?" in "".join(lines_of(record, colour=colour))
    caption = scale_caption(record, 0.5, Screen(200, colour), 2).plain
    assert caption.endswith(" from small to large, a blank is not allowed, ? is not a number")


def test_the_caption_tells_range_kind_and_signs():
    assert scale_caption(make_record(), 0.75, PLAIN, 2).plain == (
        f"scale linear, 0 … .75, the same for all heads: {GLYPHS} from small to large, a blank is not allowed"
    )


def test_the_caption_shows_the_colours_from_end_to_end():
    caption = scale_caption(make_record(), 1.0, COLOUR, 3)
    shades = [span.style.bgcolor.triplet for span in caption.spans]
    assert (shades[0], shades[-1], len(shades)) == (ColorTriplet(*RAMP[0]), ColorTriplet(*RAMP[-1]), 16)
    assert "0 … 1.000," in caption.plain


def test_colours_reach_the_screen():
    paper = StringIO()
    console = Console(file=paper, width=80, force_terminal=True, color_system="truecolor", legacy_windows=False)
    record = with_pattern(make_record(), [[1, 0, 0]] * 3)
    console.print(heatmap(head_of(record), 1.0, ViewOptions(), COLOUR))
    assert f"48;2;{';'.join(map(str, RAMP[-1]))}m" in paper.getvalue()
    assert f"48;2;{';'.join(map(str, RAMP[0]))}m" in paper.getvalue()
