import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.records import drawn, make_record

from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.heads.head_map import HeadPattern, largest_weight
from mhacli.render.heads.matrix import matrix
from mhacli.results.record.record import Record

HOSTILE = ("\x1b[31mred", "\u202eevil", "漢字漢字漢字", "a\u0301\u0301", " ", "\n", "x" * 300, "[bold]", "…", "0")


def with_pattern(record, pattern, site="pattern"):
    """The record with these shares, repeated for every sequence and head."""
    shape = record.arrays["pattern"].shape
    return replace(record, arrays={**record.arrays, site: np.broadcast_to(np.float32(pattern), shape)})


def lines_of(record, width=80, *, sequence=0, head=0, site="pattern", **options):
    view = ViewOptions(**options)
    drawing = matrix(
        HeadPattern(record, sequence, head, site), largest_weight(record, site), view, Screen(width, False)
    )
    return drawn(drawing, width)


def numbered(count):
    return tuple(f"t{i}" for i in range(count))


def test_a_small_pattern_is_drawn_whole():
    record = with_pattern(make_record(causal=True), [[1, 0, 0], [0.25, 0.75, 0], [0.2, 0.304, 0.496]])
    record = replace(record, arrays={**record.arrays, "entropy": np.array([[[0, 0.5623, 1.04]] * 2])})
    rows = [line.split() for line in lines_of(record)]
    assert rows == [
        ["query", "the", "cat", "sat", "H"],
        ["the", "1.00*", "0", "0", "0.00"],
        ["cat", ".25", ".75*", "0", "0.56"],
        ["sat", ".20", ".30", ".50*", "1.04"],
    ]
    assert [line.split()[4:] for line in lines_of(record, verbose=True)] == [
        ["Σ", "H", "strongest"],
        ["1.00", "0.00", "0", "the"],
        ["1.00", "0.56", "1", "cat"],
        ["1.00", "1.04", "2", "sat"],
    ]


def test_numbers_stand_below_each_other_whether_marked_or_not():
    record = with_pattern(make_record(), [[0.5, 0.3, 0.2], [0.2, 0.7, 0.1], [0.1, 0.2, 0.7]])
    lines = lines_of(record)[1:]
    assert len({tuple(place for place, sign in enumerate(line) if sign == ".") for line in lines}) == 1


def test_where_room_is_short_the_entropy_goes_and_ones_have_a_decimal_less():
    record = with_pattern(make_record(causal=True), [[1, 0, 0], [0.25, 0.75, 0], [0.2, 0.304, 0.496]])
    widths = {
        width: [line.split()[1:] for line in lines_of(record, width)][:2] for width in (29, 28, 26, 25, 23, 22, 20)
    }
    assert widths[29] == [["the", "cat", "sat", "H"], ["1.00*", "0", "0", widths[29][1][3]]]
    assert widths[28][1][:3] == widths[26][1][:3] == ["1.0*", "0", "0"]
    assert widths[25] == widths[23] == [["the", "cat", "sat"], ["1.00*", "0", "0"]]
    assert widths[22] == widths[20] == [["the", "cat", "sat"], ["1.0*", "0", "0"]]


def test_a_small_weight_does_not_look_like_a_forbidden_one():
    record = with_pattern(make_record(causal=True), [[1, 0, 0], [0.001, 0.999, 0], [0, 0, 1]])
    rows = [line.split() for line in lines_of(record)]
    assert rows[2][1:4] == [".00", "1.00*", "0"]
    assert rows[3][1:4] == [".00", ".00", "1.00*"]


def test_a_row_that_does_not_sum_to_one_says_so():
    record = with_pattern(make_record(), [[0.5, 0.25, 0], [0.3, 0.3, 0.4], [1, 0, 0]])
    assert [line.split()[4] for line in lines_of(record)[1:]] == [".75", "1.00", "1.00"]


def test_precision_gives_more_decimals():
    record = with_pattern(make_record(), [[0.123456, 0.376544, 0.5]] * 3)
    assert lines_of(record, precision=5)[1].split()[1:5] == [
        ".12346",
        ".37654",
        ".50000*",
        lines_of(record)[1].split()[4],
    ]


def test_padding_is_named_and_forbidden():
    record = make_record(("the", "cat", "sat"), ("a", "dog"))
    header, *rows = [line.split() for line in lines_of(record, sequence=1)]
    assert header[:4] == ["query", "a", "dog", "‹pad›"]
    assert [row[0] for row in rows] == ["a", "dog"]
    assert {row[3] for row in rows} == {"0"}


def test_dropped_weights_are_distinguished_from_forbidden_and_small_ones():
    record = make_record(causal=True, dropout=0.5)
    record = with_pattern(record, [[2, 0, 0], [0.5, 0, 0], [0.001, 0, 1.5]], "dropped")
    rows = [line.split() for line in lines_of(record, site="dropped")][1:]
    assert [row[1:5] for row in rows] == [
        ["2.00*", "0", "0", "2.00"],
        [".50*", "drop", "0", ".50"],
        [".00", "drop", "1.50*", "1.50"],
    ]


def test_a_query_without_keys_says_so():
    record = make_record()
    allowed = record.arrays["allowed"].copy()
    allowed[0, 0, 1] = False
    pattern = record.arrays["pattern"].copy()
    pattern[0, :, 1] = 0
    record = replace(record, arrays={**record.arrays, "allowed": allowed, "pattern": pattern})
    assert lines_of(record)[2].split()[:5] == ["cat", "0", "0", "0", ".00"]
    assert lines_of(record, verbose=True)[2].split()[-2:] == ["none", "visible"]


# --------------------------------------------------------------------------------------------- what does not fit a screen


def parsed(lines, tokens):
    """Of a table with hidden keys: the keys shown before and after the gap, the hidden count, and the rows by query."""
    header = lines[0]
    gap = re.search(r"(?:… (\d+) …|\+(\d+))", header)
    before, after = (
        [tokens.index(word) for word in part.split() if word in tokens]
        for part in (header[: gap.start()], header[gap.end() :])
    )
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:] if not line.startswith("⋮")}
    return before, after, int(gap[1] or gap[2]), rows


def value(cell):
    return float(cell.rstrip("*"))


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("count", [60, 300])
@pytest.mark.parametrize("causal", [True, False])
def test_the_hidden_keys_are_counted_and_their_weights_summed(width, count, causal):
    tokens = numbered(count)
    record = make_record(tokens, causal=causal)
    before, after, hidden, rows = parsed(lines_of(record, width), tokens)
    unseen = [key for key in range(count) if key not in before + after]
    assert before == list(range(len(before)))
    assert after == list(range(count - len(after), count))
    assert len(before) - len(after) in (0, 1)
    assert hidden == len(unseen) > 0
    pattern = record.arrays["pattern"][0, 0].astype(float)
    for name, cells in rows.items():
        weights = pattern[tokens.index(name)]
        place = len(before)
        assert value(cells[place]) == pytest.approx(weights[unseen].sum(), abs=0.0051)
        shown = [value(cell) for cell in cells[:place] + cells[place + 1 : place + 1 + len(after)]]
        assert shown == pytest.approx(weights[before + after], abs=0.0051)
        is_any_allowed = record.arrays["allowed"][0, 0, tokens.index(name)][unseen].any()
        assert (cells[place] == "0") == (not is_any_allowed)
        assert not any(cell.startswith("-") for cell in cells)


@pytest.mark.parametrize("width", [48, 80, 120, 200])
@pytest.mark.parametrize("count", [60, 300])
def test_the_largest_key_of_a_row_is_named_with_its_weight_though_its_column_is_hidden(width, count):
    record = make_record(numbered(count))
    pattern = np.full((count, count), 0.3 / (count - 1), np.float32)
    for query in range(count):
        pattern[query, (count // 2 + query // 4) % count] = 0.55 + 0.001 * query
    tokens, lines = numbered(count), lines_of(with_pattern(record, pattern), width)
    before, after, _, rows = parsed(lines, tokens)
    assert len(rows) >= 20
    for name, cells in rows.items():
        query = tokens.index(name)
        key = (count // 2 + query // 4) % count
        behind = cells[len(before) + len(after) + 3 :]
        assert behind[0] == str(key)
        assert value(behind[-1]) == pytest.approx(0.55 + 0.001 * query, abs=0.0051)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_hidden_rows_are_counted(width):
    tokens = numbered(60)
    lines = lines_of(make_record(tokens), width)
    rows = [line.split()[0] for line in lines[1:] if not line.startswith("⋮")]
    (gap,) = [line for line in lines if line.startswith("⋮")]
    assert re.match(r"⋮ (\d+)", gap)[1] == str(60 - len(rows))
    assert rows == [f"t{i}" for i in (*range(12), *range(48, 60))]


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize(
    "texts", [(HOSTILE,), (numbered(60),), (numbered(1000),), (("a",),), (("the", "cat"), HOSTILE)]
)
def test_every_number_of_a_row_is_whole(width, texts):
    record = make_record(*texts)
    for sequence in range(len(texts)):
        for line in lines_of(record, width, sequence=sequence)[1:]:
            assert re.fullmatch(r"\S+( +(1?\.\d\d\*?|1\.0\*|0))+( +\d+\.\d\d( +\d+( .*)?)?)?|⋮ \d+( rows)?", line)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_hostile_tokens_are_harmless_and_markup_is_text(width):
    text = "\n".join(lines_of(make_record(HOSTILE), width, everything=True))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "[bold" in text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_everything_shows_every_key_of_every_query(width):
    tokens = numbered(60)
    record = make_record(tokens)
    seen = {}
    keys = []
    for line in lines_of(record, width, everything=True):
        words = line.split()
        if words[0] == "query":
            keys = [word for word in words[1:] if word in tokens]
            continue
        for key, cell in zip(keys, words[1:], strict=False):
            seen[words[0], key] = value(cell)
    expected = {
        (q, k): record.arrays["pattern"][0, 0, i, j] for i, q in enumerate(tokens) for j, k in enumerate(tokens)
    }
    assert seen == pytest.approx(expected, abs=0.0051)


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("count", [3, 60])
def test_a_pattern_with_nan_is_drawn(width, count):
    record = make_record(numbered(count))
    pattern = record.arrays["pattern"].copy()
    pattern[0, 0, 1] = np.nan
    row = lines_of(replace(record, arrays={**record.arrays, "pattern": pattern}), width)[2].split()
    assert row[0] == "t1"
    assert row.count("nan") >= 3


# --------------------------------------------------------------------------------------------------------------- scale


def test_the_scale_ends_at_the_largest_weight_of_a_query_with_a_choice():
    record = with_pattern(make_record(causal=True), [[1, 0, 0], [0.25, 0.75, 0], [0.2, 0.3, 0.5]])
    assert largest_weight(record, "pattern") == 0.75


def test_the_scale_of_queries_without_any_choice_ends_at_one():
    assert largest_weight(make_record(("a",)), "pattern") == 1.0


def test_the_scale_ignores_what_is_not_a_number():
    record = with_pattern(make_record(), [[np.nan] * 3, [0.2, 0.2, 0.6], [0.3, 0.3, 0.4]])
    assert largest_weight(record, "pattern") == np.float32(0.6)


@settings(max_examples=60)
@given(
    tokens=st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=30),
    width=st.integers(40, 200),
    precision=st.integers(1, 5),
    everything=st.booleans(),
)
def test_no_text_makes_a_table_wider_than_the_screen(tokens, width, precision, everything):
    record: Record = make_record(tokens)
    lines = lines_of(record, width, precision=precision, everything=everything)
    assert len(lines) >= min(len(tokens), 24) + 1
