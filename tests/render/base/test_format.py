import itertools
import unicodedata
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.records import make_record

from mhacli.errors import UsageError
from mhacli.render.base.format import (
    bytes_text,
    configuration,
    count_of,
    count_text,
    filled,
    fitted,
    number_text,
    rough_note,
    seconds_text,
    sparkline,
    token_text,
    weight_text,
)
from mhacli.render.base.options import Selection, ViewOptions, balanced, chosen, require_choices
from mhacli.results.record.record import Timing
from mhacli.spec.config import Config


@pytest.mark.parametrize(
    ("share", "precision", "text"),
    [(0.171, 2, ".17"), (1.0, 2, "1.00"), (0.0, 2, ".00"), (0.999, 2, "1.00"), (0.5, 1, ".5"), (12.5, 2, "12.50")],
)
def test_a_weight_has_no_leading_zero(share, precision, text):
    assert weight_text(share, precision) == text


def test_a_weight_that_is_not_a_number_says_so():
    assert weight_text(float("nan"), 2) == "nan"


@given(st.floats(0, 1), st.integers(1, 9))
def test_a_weight_is_within_half_of_its_last_digit(share, precision):
    assert float(weight_text(share, precision)) == pytest.approx(share, abs=0.5000001 * 10**-precision)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "nan"),
        (float("nan"), "nan"),
        (0.0, "0"),
        (-0.0, "0"),
        (1.0, "1"),
        (-2.34567, "-2.346"),
        (12345.6, "1.235e+04"),
        (99.5, "99.5"),
        (1e-5, "1.00e-05"),
        (-123456.0, "-1.23e+05"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_have_four_digits(number, text):
    assert number_text(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.0, "0 ns"),
        (8.5e-7, "850 ns"),
        (1.23e-5, "12.3 µs"),
        (9.999e-7, "1 µs"),
        (4.56e-3, "4.56 ms"),
        (0.9996, "1 s"),
        (7.89, "7.89 s"),
        (999.6, "1,000 s"),
        (36000.0, "36,000 s"),
    ],
)
def test_durations_are_reported_in_the_unit_that_fits(seconds, text):
    assert seconds_text(seconds) == text


def timing(median_s, iqr_s=0.0, n=5):
    return Timing(median_s, (median_s,) * n, median_s, iqr_s)


@pytest.mark.parametrize(
    ("timings", "note"),
    [
        ([timing(0.002, 0.0004)], ""),
        ([timing(0.002, 0.0005)], "rough: the runs vary by 25 %, as on a busy machine"),
        ([timing(0.002, 0.0001), timing(0.01, 0.01)], "rough: the runs vary by 100 %, as on a busy machine"),
        ([timing(0.000999)], "rough: less than 1 ms"),
        ([timing(2.0), timing(0.0001, 0.0001)], "rough: less than 1 ms"),
        ([timing(0.002, 0.002, n=1)], ""),
        ([timing(0.0)], ""),
        ([], ""),
    ],
)
def test_times_that_are_small_or_vary_much_are_called_rough(timings, note):
    assert rough_note(timings) == note


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (4608, "4608"),
        (9999, "9999"),
        (49536, "49.5 k"),
        (10**6, "1 M"),
        (2_100_000_000, "2.1 G"),
        (5 * 10**12, "5 T"),
    ],
)
def test_counts_are_reported_in_the_unit_that_fits(count, text):
    assert count_text(count) == text


@given(st.integers(10_000, 999_999_999))
def test_a_count_has_three_digits_at_most_and_no_exponent(count):
    number, _, unit = count_text(count).partition(" ")
    assert "e" not in number
    assert float(number) * {"k": 1e3, "M": 1e6, "G": 1e9}[unit] == pytest.approx(count, rel=0.006)


def test_sizes_are_powers_of_1024():
    assert bytes_text(1536) == "1.5 KiB"


@pytest.mark.parametrize(
    ("counts", "line"), [((0, 1, 8), " ▁█"), ((), ""), ((0, 0), "  "), ((7,), "█"), ((1, 1000), "▁█"), ((4, 8), "▄█")]
)
def test_a_sparkline_has_a_bar_for_every_count_that_is_not_zero(counts, line):
    assert sparkline(counts) == line


def cells(text):
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


@given(st.text(st.sampled_from("abcé漢字 …"), max_size=12), st.integers(1, 10))
def test_text_that_does_not_fit_ends_in_an_ellipsis(text, width):
    shown = fitted(text, width)
    assert cells(shown) <= width
    if cells(text) <= width:
        assert shown == text
    else:
        assert shown.endswith("…")
        assert text.startswith(shown[:-1])


def test_a_token_is_reported_with_visible_spaces_and_padding_by_its_sign():
    sequence = make_record((" a\n", "b")).sequences[0]
    assert [token_text(sequence, i) for i in range(4)] == ["␣a\\n", "b", "‹pad›", "‹pad›"]


@pytest.mark.parametrize(("n", "text"), [(0, "0 heads"), (1, "1 head"), (2, "2 heads")])
def test_a_count_of_one_has_no_plural(n, text):
    assert count_of(n, "head") == text


@given(st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=9), st.integers(9, 40))
def test_filled_lines_hold_every_part_whole_and_in_order(parts, width):
    lines = filled(parts, width)
    assert " · ".join(lines).split(" · ") == parts
    assert max(map(len, lines)) <= width
    for line, following in itertools.pairwise(lines):
        assert len(line) + 3 + len(following.split(" · ")[0]) > width


def parts_of(record):
    return configuration(record, 10_000).plain.split(" · ")


def test_the_configuration_shows_what_was_computed_and_where():
    assert parts_of(make_record()) == [
        "mha 0.1.0",
        "d_model 6",
        "2 heads × d_head 3",
        "no output projection",
        "seed 0",
        "float32",
        "cpu (auto)",
        "2 threads",
        "torch 2.6.0",
    ]


@pytest.mark.parametrize(
    ("choices", "part"),
    [
        ({"n_kv_heads": 1}, "1 kv head"),
        ({"d_v": 5}, "d_v 5"),
        ({"positions": "none"}, "positions none"),
        ({"causal": True}, "causal"),
        ({"bias": False}, "no bias"),
        ({"dropout": 0.25, "train": True}, "dropout 0.25, training"),
        ({"scale": 0.5}, "scale 0.5"),
        ({"init": "normal"}, "init normal"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"seed": 7}, "seed 7"),
        ({"window": (2, 0)}, "window 2 left, 0 right"),
        ({"softcap": 30.0}, "softcap 30"),
    ],
)
def test_what_is_not_as_usual_is_reported(choices, part):
    record = make_record()
    config = Config(**{"d_model": 6, "n_heads": 2, **choices}).resolved()
    assert part not in parts_of(record)
    assert part in parts_of(replace(record, config=config))


def test_a_context_and_a_weights_file_are_reported_and_escaped():
    record = replace(make_record(("a",), context=[("b",)]), weights="w\x1b.safetensors")
    assert "cross-attention" in parts_of(record)
    assert "weights w\\x1b.safetensors" in parts_of(record)
    assert "seed 0" not in parts_of(record)


# --------------------------------------------------------------------------------------------------------- selections


@given(st.integers(0, 50), st.integers(1, 50))
def test_a_balanced_choice_keeps_both_ends_and_counts_the_rest(count, room):
    selection = balanced(count, room)
    assert len(selection.shown) == min(count, room)
    assert selection.hidden == count - len(selection.shown)
    before, after = selection.shown[: selection.before], selection.shown[selection.before :]
    assert before == tuple(range(len(before)))
    assert after == tuple(range(count - len(after), count))
    assert len(before) - len(after) in (0, 1) or not selection.hidden


def test_what_was_requested_is_drawn_once_in_the_order_asked():
    assert chosen((3, 0, 3), 4, 1, False, "head") == Selection((3, 0), 0)
    assert chosen(None, 9, 4, False, "head") == Selection((0, 1, 7, 8), 5)
    assert chosen(None, 9, 4, True, "head") == Selection(tuple(range(9)), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ViewOptions(heads=(0, 4)), "--head 4 is out of range: 0 to 3"),
        (ViewOptions(heads=(-1,)), "--head -1 is out of range: 0 to 3"),
        (ViewOptions(sequences=(2,)), "--sequence 2 is out of range: 0 to 1"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_with_the_range(options, message):
    with pytest.raises(UsageError) as caught:
        require_choices(4, 2, options)
    assert caught.value.message == message
