import inspect
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhacli.cli.commands.trace import UserModuleOptions, WalkOptions, _require_checkpoint_options
from mhacli.cli.options import command
from mhacli.cli.values import counts, index_list, integer, reach, real, shape, size, triple, whole, words_of
from mhacli.errors import UsageError


def fault_of(parser, word):
    with pytest.raises(UsageError) as caught:
        parser(word)
    return caught.value.message


@pytest.mark.parametrize(("word", "number"), [("7", 7), ("+7", 7), ("007", 7), ("0", 0), (9, 9)])
def test_whole_numbers_are_read(word, number):
    assert whole("n", 0, 10)(word) == number
    assert integer("n", 0, 9)(word) == number


def test_the_range_of_a_whole_number_is_told():
    assert fault_of(whole("top", 1, 10), "11") == "--top 11 is not a whole number from 1 to 10"
    assert fault_of(whole("top", 1, 10), "-1") == "--top -1 is not a whole number from 1 to 10"


@pytest.mark.parametrize("word", ["1_0", "1e3", "1.0", "", " 7", "7\n", "--7", "0x7", "٧", "seven"])
def test_what_is_no_whole_number_is_refused(word):
    assert fault_of(integer("n", 0, 9), word) == f"--n {word!r} is not a whole number from 0 to 9"
    assert fault_of(whole("n_heads", 0, 10), word) == f"--heads {word!r} is not a whole number from 0 to 10"


@pytest.mark.parametrize("parser", [integer("n", 0, 9), whole("n", 0, 10), real("n")])
def test_thousands_of_digits_are_refused_in_a_short_message(parser):
    message = fault_of(parser, "9" * 5000)
    assert len(message) < 120


@given(st.integers(-(10**29), 10**29))
def test_every_whole_number_in_decimal_is_read_back(number):
    assert integer("n", 0, 9)(str(number)) == number


@pytest.mark.parametrize(
    ("word", "number"), [("0.125", 0.125), (".5", 0.5), ("5.", 5.0), ("-1e-3", -0.001), ("+2E2", 200.0), ("7", 7.0)]
)
def test_decimal_numbers_are_read(word, number):
    assert real("x")(word) == number


@pytest.mark.parametrize("word", ["nan", "inf", "-Infinity", "1e999", "1_0", "0x1p3", "", ".", "e3", "1 ", "٣.٥"])
def test_what_is_no_finite_number_is_refused(word):
    assert fault_of(real("x"), word) == f"--x {word!r} is not a finite number such as 0.125"


def test_sizes_are_read_once():
    assert size("limit")("1.5K") == 1536
    assert size("limit")(1536) == 1536
    assert "big" in fault_of(size("limit"), "big")


@pytest.mark.parametrize(
    ("word", "indices"),
    [(None, None), ("0", (0,)), ("0,2", (0, 2)), ("0,4-6", (0, 4, 5, 6)), ("3-3", (3,)), (" 2 , 0 ", (2, 0))],
)
def test_lists_of_positions_are_read(word, indices):
    assert index_list(word, "head") == indices


@pytest.mark.parametrize(
    "word", ["", ",", "0,", "-1", "4-2", "1-", "a", "1_0", "0-999999999", "1.5", "0--1", "9" * 5000]
)
def test_what_is_no_list_of_positions_is_refused_with_the_form(word):
    message = f"--head {word[:80]!r} is not a list such as 0,2 or 0,4-6"
    assert fault_of(lambda it: index_list(it, "head"), word) == message


def test_many_ranges_do_not_add_up_to_a_flood():
    message = fault_of(lambda it: index_list(it, "head"), ",".join(["0-99999"] * 1000))
    assert message.endswith("is not a list such as 0,2 or 0,4-6")


@pytest.mark.parametrize(
    ("word", "keys"),
    [(None, None), ("4", (4, 0)), ("2,3", (2, 3)), ("0", (0, 0)), ("0,0", (0, 0)), (" 1 , 2 ", (1, 2))],
)
def test_the_reach_of_a_window_is_read_with_nothing_to_the_right_unless_it_is_named(word, keys):
    assert reach(word, "window") == keys


@pytest.mark.parametrize("word", ["", "-1", "1,2,3", "4,", ",4", "4,-1", "1.5", "٣", "9" * 10, "all"])
def test_what_is_no_reach_is_refused_with_the_form(word):
    message = f"--window {word!r} is not LEFT or LEFT,RIGHT, numbers of keys such as 4 or 2,2"
    assert fault_of(lambda it: reach(it, "window"), word) == message


@pytest.mark.parametrize(("word", "counts"), [(None, None), ("2,5", (2, 5)), ("1,1", (1, 1)), (" 3 , 4 ", (3, 4))])
def test_the_shape_of_random_rows_is_read(word, counts):
    assert shape(word, "random") == counts


@pytest.mark.parametrize("word", ["", "2", "0,5", "2,0", "2,5,1", "-2,5", "2x5", "9" * 10 + ",1"])
def test_what_is_no_shape_is_refused_with_the_form(word):
    message = f"--random {word!r} is not BATCH,LENGTH, two numbers from 1 up such as 2,5"
    assert fault_of(lambda it: shape(it, "random"), word) == message


@pytest.mark.parametrize(
    ("word", "found"), [(None, ()), ("64", (64,)), ("64,256,1k", (64, 256, 1024)), (" 2k , 1 ", (2048, 1)), ("3..13", (3, 6, 12)),
     ("512..4k", (512, 1024, 2048, 4096)), ("5..5", (5,)), ("1,1..4,2", (1, 2, 4))]
)  # fmt: skip
def test_lengths_are_read_and_a_k_is_1024(word, found):
    assert counts(word, "lengths") == found


@pytest.mark.parametrize(
    "word", ["", "0", "64,", "1K", "1.5k", "-1", "1m", "64 256", "0k", "..4", "1..", "0..4", "1...4"]
)
def test_what_is_no_list_of_lengths_is_refused_with_the_form(word):
    message = f"--lengths {word!r} is not a list such as 64,256,1k, or a doubling range such as 1..8"
    assert fault_of(lambda it: counts(it, "lengths"), word) == message


def test_a_range_of_lengths_that_runs_backwards_is_turned_around():
    message = "--lengths '1k..100': the range runs backwards, it must be 100..1k"
    assert fault_of(lambda it: counts(it, "lengths"), "64,1k..100") == message


@pytest.mark.parametrize(("word", "found"), [(None, ()), ("b", ("b",)), (" b , a ", ("b", "a")), ("a,a", ("a",))])
def test_words_of_a_list_are_read(word, found):
    assert words_of(word, "letters", ("a", "b")) == found


@pytest.mark.parametrize(("word", "part"), [("", ""), ("a,", ""), ("A", "A"), ("a b", "a b"), ("a,c,b", "c")])
def test_a_word_that_is_no_choice_is_named_beside_the_choices(word, part):
    message = f"--letters {part!r} is not among a, b"
    assert fault_of(lambda it: words_of(it, "letters", ("a", "b")), word) == message


@pytest.mark.parametrize(("word", "place"), [(None, None), ("0,5,1", (0, 5, 1)), (" 1 , 2 , 3 ", (1, 2, 3))])
def test_a_cell_is_read_as_head_query_and_key(word, place):
    assert triple(word, "cell") == place


@pytest.mark.parametrize("word", ["", "0,5", "0,5,1,2", "a,b,c", "0,-5,1", "0,5,"])
def test_what_is_no_cell_is_refused_with_the_form(word):
    assert fault_of(lambda it: triple(it, "cell"), word) == f"--cell {word!r} is not HEAD,QUERY,KEY such as 0,5,1"


@dataclass(frozen=True)
class Size:
    """How large."""

    width: int = 3
    height: int | None = None


@dataclass(frozen=True)
class Look:
    """How it looks."""

    colour: str = "red"


def test_a_command_takes_the_fields_of_its_groups_as_parameters_of_their_own():
    taken = []

    @command
    def draw(size: Size, look: Look) -> None:
        """Draws."""
        taken.append((size, look))

    parameters = inspect.signature(draw).parameters
    assert {name: (p.default, p.annotation, p.kind) for name, p in parameters.items()} == {
        "width": (3, int, inspect.Parameter.KEYWORD_ONLY),
        "height": (None, int | None, inspect.Parameter.KEYWORD_ONLY),
        "colour": ("red", str, inspect.Parameter.KEYWORD_ONLY),
    }
    assert (draw.__name__, draw.__doc__) == ("draw", "Draws.")
    draw(width=5, height=None, colour="blue")
    assert taken == [(Size(5, None), Look("blue"))]


def test_groups_of_the_same_options_are_the_same():
    assert UserModuleOptions() == UserModuleOptions()
    assert UserModuleOptions(time_limit=1.0) != UserModuleOptions()


def test_options_of_an_attention_of_ones_own_are_none_of_a_checkpoint():
    _require_checkpoint_options(WalkOptions(), UserModuleOptions())
    with pytest.raises(UsageError, match=r"^--arg, --call-arg and --time-limit are for code of your own "):
        _require_checkpoint_options(WalkOptions(), UserModuleOptions(time_limit=1.0))
