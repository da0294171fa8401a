import re

import pytest
from support.records import CAT, drawn, make_sequence

from mhacli.render.base.options import Screen
from mhacli.render.run.mask import mask_view
from mhacli.results.mask import MaskSummary, SequenceMask
from mhacli.spec.config import Config

WIDTHS = [40, 80, 200]
widths = pytest.mark.parametrize("width", WIDTHS)


def lines_of(survey, width=80):
    return drawn(mask_view(survey, Screen(width, False)), width)


def said(lines):
    """The words of some lines, whatever the breaks between them."""
    return " ".join(" ".join(lines).replace("·", " ").split())


def cells_of(picture):
    """A mask of every cell from its picture: `#` may attend, `.` may not."""
    rows = [[cell == "#" for cell in line] for line in picture.split()]
    return SequenceMask(tuple(map(sum, rows)), len(rows) * len(rows[0]), 1, tuple(tuple(map(int, row)) for row in rows))


def survey_of(*texts, masks, rules=(), context=None, **choices):
    vocabulary = sorted({token for text in (*texts, *(context or ())) for token in text})
    sequences = tuple(make_sequence(text, vocabulary) for text in texts)
    keys = None if context is None else tuple(make_sequence(text, vocabulary) for text in context)
    return MaskSummary(Config(**choices).resolved(), sequences, keys, rules, tuple(masks))


def drawing(lines):
    """The rows of the first picture: from the numbers of its keys to the line that explains the marks, without it."""
    begin = next(i for i, line in enumerate(lines) if "queries × " in line) + 1
    return lines[begin : next(i for i, line in enumerate(lines) if line.startswith("■ "))]


def numbered(count):
    return tuple(f"t{i}" for i in range(count))


# ---------------------------------------------------------------------------------------------------------- every cell


@widths
def test_every_cell_of_a_small_mask_stands_where_its_query_and_key_meet(width):
    rules = ("no token sees a later one", "except that all see the first token")
    survey = survey_of(CAT, masks=[cells_of("#.. ##. #.#")], rules=rules)
    lines = lines_of(survey, width)
    assert said(lines[: lines.index("")]) == "mask no token sees a later one except that all see the first token"
    assert lines[lines.index("") + 1].startswith("sequence 0: 3 queries × 3 keys ─")
    assert drawing(lines) == [
        "             0 1 2   sees",
        "the          ■ · ·   1",
        "cat          ■ ■ ·   2",
        "sat          ■ · ■   2",
    ]
    assert "■ visible, · masked" in lines
    assert said(lines).endswith("density 55.6 %: 5 of 9 cells are visible a query sees 1 to 2 keys, mean 1.67")


def test_rules_are_broken_between_each_other_only():
    survey = survey_of(
        CAT, masks=[cells_of("### ### ###")], rules=("no token sees a later one", "padding is never seen")
    )
    assert lines_of(survey, 40)[:2] == ["mask · no token sees a later one", "padding is never seen"]
    assert lines_of(survey, 80)[0] == "mask · no token sees a later one · padding is never seen"


@widths
def test_without_a_rule_every_key_is_allowed(width):
    lines = lines_of(survey_of(CAT, masks=[cells_of("### ### ###")]), width)
    assert lines[0] == "mask · every key is visible"
    assert said(lines).endswith("density 100 %: 9 of 9 cells are visible a query sees 3 to 3 keys, mean 3")


@widths
def test_padding_on_the_left_stands_before_the_tokens_and_on_the_right_behind_them(width):
    left = survey_of(CAT, ("a",), masks=[cells_of("### ### ###"), cells_of("... ... ..#")], padding="left")
    lines = lines_of(left, width)
    assert drawing(lines[lines.index("", 2) :]) == [
        "             – – 0   sees",
        "‹pad›        · · ·   0",
        "‹pad›        · · ·   0",
        "a            · · ■   1",
    ]
    right = survey_of(CAT, ("a",), masks=[cells_of("### ### ###"), cells_of("#.. ... ...")])
    lines = lines_of(right, width)
    assert drawing(lines[lines.index("", 2) :]) == [
        "             0 – –   sees",
        "a            ■ · ·   1",
        "‹pad›        · · ·   0",
        "‹pad›        · · ·   0",
    ]
    assert said(lines).endswith(
        "density 11.1 %: 1 of 9 cells are visible, padding counted a query sees 0 to 1 keys, mean 0.333"
    )


@widths
def test_documents_in_one_row_are_squares_of_their_own(width):
    survey = survey_of(("a", "b", "c", "d"), masks=[cells_of("##.. ##.. ..#. ..##")], documents="|")
    assert drawing(lines_of(survey, width)) == [
        "             0 1 2 3   sees",
        "a            ■ ■ · ·   2",
        "b            ■ ■ · ·   2",
        "c            · · ■ ·   1",
        "d            · · ■ ■   2",
    ]


@widths
def test_keys_of_another_text_have_an_axis_of_their_own(width):
    survey = survey_of(("a", "b"), masks=[cells_of("###.# ###..")], context=(numbered(5),))
    lines = lines_of(survey, width)
    assert lines[2].startswith("sequence 0: 2 queries × 5 keys ─")
    assert drawing(lines) == [
        "             0 1 2 3 4   sees",
        "a            ■ ■ ■ · ■   4",
        "b            ■ ■ ■ · ·   3",
    ]
    assert said(lines).endswith("density 70 %: 7 of 10 cells are visible a query sees 3 to 4 keys, mean 3.5")


def test_cells_move_together_where_there_is_no_room_between_them():
    survey = survey_of(numbered(12), masks=[cells_of(" ".join("#" * (i + 1) + "." * (11 - i) for i in range(12)))])
    wide, narrow = drawing(lines_of(survey, 80)), drawing(lines_of(survey, 40))
    assert wide[:2] == ["                                 1", "             0 1 2 3 4 5 6 7 8 9 0 1   sees"]
    assert narrow[:2] == ["                       1", "             012345678901  sees"]
    assert wide[4] == "t2           ■ ■ ■ · · · · · · · · ·   3"
    assert narrow[4] == "t2           ■■■·········  3"
    assert narrow[13] == "t11          ■■■■■■■■■■■■  12"


@widths
def test_names_and_rules_from_outside_are_escaped_and_cut_to_their_column(width):
    tokens = ("\x1b[31m", "\u202e", "[b]x[/b]", "x" * 30, "漢" * 10)
    survey = survey_of(tokens, masks=[cells_of(" ".join(["#####"] * 5))], rules=("split at \x1b[2J",))
    lines = lines_of(survey, width)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", "\n".join(lines))
    assert lines[0] == r"mask · split at \x1b[2J"
    seen = "■ ■ ■ ■ ■   5"
    assert drawing(lines)[1:] == [
        rf"\x1b[31m     {seen}",
        rf"\u202e       {seen}",
        f"[b]x[/b]     {seen}",
        f"{'x' * 11}… {seen}",
        f"{'漢' * 5}…  {seen}",
    ]


# -------------------------------------------------------------------------------------------------------------- blocks


def causal_blocks(length, block):
    """The causal mask of a text, counted cell by cell into blocks."""
    side = -(-length // block)
    counts = [[0] * side for _ in range(side)]
    for i in range(length):
        for j in range(i + 1):
            counts[i // block][j // block] += 1
    return SequenceMask(tuple(range(1, length + 1)), length * length, block, tuple(map(tuple, counts)))


@widths
def test_a_long_mask_is_drawn_in_blocks_that_are_full_empty_or_partly_so(width):
    mask = SequenceMask(
        visible_per_query=(10,) * 4 + (7,) * 4 + (5,) * 2,
        n_cells=100,
        block=4,
        block_counts=(
            (16, 16, 8),
            (5, 15, 8),
            (1, 4, 4),
        ),  # a third of a block is 16 / 3 cells; the last ones are smaller
    )
    lines = lines_of(survey_of(numbered(10), masks=[mask]), width)
    begin = next(i for i, line in enumerate(lines) if "keys from left" in line)
    rows = next(i for i, line in enumerate(lines) if line.startswith("           0 "))
    assert said(lines[begin:rows]) == "keys from left to right, each mark 4 × 4 cells"
    assert lines[rows : rows + 3] == [
        "           0 ■■■",
        "           4 ░▓■",
        "           8 ░▒■",
    ]
    assert said(lines[rows + 3 :]) == (
        "■ all of a block is visible, ░▒▓ part of it, nothing "
        "density 78 %: 78 of 100 cells are visible a query sees 5 to 10 keys, mean 7.8"
    )


@widths
def test_a_causal_text_is_a_triangle_of_blocks(width):
    lines = lines_of(survey_of(numbered(60), masks=[causal_blocks(60, 8)]), width)
    rows = next(i for i, line in enumerate(lines) if line.startswith("           0 "))
    assert lines[rows : rows + 8] == [
        "           0 ▒·······",
        "           8 ■▒······",
        "          16 ■■▒·····",
        "          24 ■■■▒····",
        "          32 ■■■■▒···",
        "          40 ■■■■■▒··",
        "          48 ■■■■■■▒·",
        "          56 ■■■■■■■▒",
    ]
    assert said(lines).endswith("density 50.8 %: 1,830 of 3,600 cells are visible a query sees 1 to 60 keys, mean 30.5")


def test_blocks_are_merged_until_they_fit_and_marked_by_the_cells_of_all():
    for width, side in ((200, 1), (80, 1), (40, 2)):  # 33 queries are one too many for names
        lines = lines_of(survey_of(numbered(33), masks=[causal_blocks(33, 1)]), width)
        rows = next(i for i, line in enumerate(lines) if line.startswith("           0 "))
        assert f"each mark {side} × {side} cells" in said(lines)
        n_rows = -(-33 // side)
        for number, line in enumerate(lines[rows : rows + n_rows]):
            on_diagonal = "▓" if side == 2 and number < n_rows - 1 else "■"  # 3 of 4 cells; the last one is alone
            assert line == f"{number * side:>12} {'■' * number}{on_diagonal}{'·' * (n_rows - number - 1)}"


def test_a_tall_mask_has_at_most_64_lines_of_blocks():
    mask = SequenceMask((1,) * 130, 130 * 2, 1, ((1, 0),) * 130)
    lines = lines_of(survey_of(numbered(130), masks=[mask], context=(("a", "b"),)), 80)
    assert "each mark 3 × 3 cells" in said(lines)
    begin = next(i for i, line in enumerate(lines) if line.startswith("           0 "))
    end = next(i for i, line in enumerate(lines) if line.startswith("■ all"))
    assert lines[begin:end] == [f"{3 * number:>12} ▒" for number in range(44)]  # half of the cells in 2 columns


# ----------------------------------------------------------------------------------------------------- many sequences


@widths
def test_sequences_in_the_middle_are_counted_where_they_are_not_drawn(width):
    for count, hidden, shown in ((6, "⋮ 2 sequences not drawn", "0145"), (5, "⋮ 1 sequence not drawn", "0134")):
        picture = [cells_of("#")] * count
        lines = lines_of(survey_of(*[("a",)] * count, masks=picture), width)
        titles = [line for line in lines if line.startswith(("sequence", "⋮"))]
        assert [title[0] if title[0] == "⋮" else title[9] for title in titles] == [*shown[:2], "⋮", *shown[2:]]
        assert titles[2] == hidden
    four = lines_of(survey_of(*[("a",)] * 4, masks=[cells_of("#")] * 4), width)
    assert not any("not drawn" in line for line in four)
    assert sum(line.startswith("sequence") for line in four) == 4
