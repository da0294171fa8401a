import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhacli.errors import UsageError
from mhacli.spec.config import Config


def fault_of(**choices):
    with pytest.raises(UsageError) as caught:
        Config(**choices).resolved()
    assert caught.value.exit_code == 2
    return caught.value.message, caught.value.hint


def test_what_is_left_open_follows_from_the_width_and_the_heads():
    full = Config(d_model=66, n_heads=11).resolved()
    assert (full.d_head, full.d_v, full.n_kv_heads, full.d_input) == (6, 6, 11, 66)
    assert full.scale == pytest.approx(6**-0.5, rel=1e-15)


def test_what_is_given_stays():
    full = Config(d_model=7, n_heads=6, n_kv_heads=3, d_head=5, d_v=11, scale=2, window=(3, 0), threads=2).resolved()
    assert (full.d_head, full.d_v, full.n_kv_heads, full.scale, full.window) == (5, 11, 3, 2.0, (3, 0))


def test_the_width_of_the_input_may_differ_from_that_of_the_output():
    full = Config(d_model=12, n_heads=3, d_input=7).resolved()
    assert (full.d_input, full.d_model, full.d_head) == (7, 12, 4)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "alibi", "none"])
def test_an_odd_width_of_heads_is_no_fault_where_nothing_is_turned(positions):
    assert Config(positions=positions, d_head=5).resolved().d_head == 5


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ({}, None),
        ({"positions": "none"}, None),
        ({"positions": "learned"}, None),
        ({"causal": True}, "causal"),
        ({"window": (0, 0)}, "window"),
        ({"prefix": 2}, "prefix"),
        ({"causal": True, "positions": "rope"}, "causal"),
        ({"positions": "rope"}, "positions rope"),
        ({"positions": "rope-interleaved"}, "positions rope-interleaved"),
        ({"positions": "alibi"}, "positions alibi"),
    ],
)
def test_what_compares_a_query_with_a_key_by_their_places_is_named(choices, named):
    assert Config(**choices).needs_order == named


def test_the_width_of_values_follows_that_of_queries():
    assert Config(d_model=7, n_heads=2, d_head=5).resolved().d_v == 5


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([None, 1, 7]))
def test_resolving_twice_changes_nothing(d_model, n_heads, d_head):
    try:
        full = Config(d_model=d_model, n_heads=n_heads, d_head=d_head).resolved()
    except UsageError:
        assert d_head is None
        assert d_model % n_heads
    else:
        assert full.resolved() == full


WHOLE = "must be a whole number from"


@pytest.mark.parametrize(
    ("choices", "message", "hint"),
    [
        ({"d_model": 0}, f"d_model {WHOLE} 1 to 65536, got 0", None),
        ({"d_model": 65537}, f"d_model {WHOLE} 1 to 65536, got 65537", None),
        ({"d_model": True}, f"d_model {WHOLE} 1 to 65536, got True", None),
        ({"d_model": 64.0}, f"d_model {WHOLE} 1 to 65536, got 64.0", None),
        ({"n_heads": 0}, f"n_heads {WHOLE} 1 to 1024, got 0", "try --heads 1"),
        ({"n_heads": -3}, f"n_heads {WHOLE} 1 to 1024, got -3", "try --heads 1"),
        ({"n_heads": 2000, "d_model": 4096}, f"n_heads {WHOLE} 1 to 1024, got 2000", "try --heads 1024"),
        (
            {"d_model": 64, "n_heads": 5},
            "d_model (64) must be a multiple of n_heads (5)",
            "try --heads 4 or --d-model 65, or set --d-head",
        ),
        (
            {"d_model": 3, "n_heads": 8},
            "d_model (3) must be a multiple of n_heads (8)",
            "try --heads 3 or --d-model 8, or set --d-head",
        ),
        ({"d_head": 0}, f"d_head {WHOLE} 1 to 65536, got 0", None),
        ({"d_head": 70_000}, f"d_head {WHOLE} 1 to 65536, got 70000", None),
        ({"d_v": -1}, f"d_v {WHOLE} 1 to 65536, got -1", None),
        ({"n_kv_heads": 0}, f"n_kv_heads {WHOLE} 1 to 4, got 0", "--kv-heads 1 works"),
        ({"n_kv_heads": 8}, f"n_kv_heads {WHOLE} 1 to 4, got 8", "--kv-heads 4 works"),
        ({"n_kv_heads": 3}, "n_heads (4) must be a multiple of n_kv_heads (3)", "--kv-heads 4 works"),
        (
            {"n_heads": 12, "d_model": 12, "n_kv_heads": 9},
            "n_heads (12) must be a multiple of n_kv_heads (9)",
            "--kv-heads 12 works",
        ),
        ({"seed": -1}, f"seed {WHOLE} 0 to 18446744073709551615, got -1", None),
        ({"seed": 2**64}, f"seed {WHOLE} 0 to 18446744073709551615, got 18446744073709551616", None),
        ({"threads": 0}, f"threads {WHOLE} 1 to 1024, got 0", None),
        ({"scale": float("nan")}, "scale must be a finite number, got nan", None),
        ({"softcap": float("inf")}, "softcap must be a finite number, got inf", None),
        ({"softcap": 0.0}, "softcap must be above 0, got 0.0", None),
        ({"dropout": 1.0}, "dropout must be a probability from 0 to below 1, got 1.0", None),
        ({"dropout": -0.1}, "dropout must be a probability from 0 to below 1, got -0.1", None),
        ({"dropout": float("nan")}, "dropout must be a probability from 0 to below 1, got nan", None),
        ({"train": True}, "train must come with a dropout above 0, got dropout 0", "try --train --dropout 0.1"),
        (
            {"positions": "rotary"},
            "positions must be one of sinusoidal, learned, rope, rope-interleaved, alibi, none, got 'rotary'",
            None,
        ),
        ({"padding": "both"}, "padding must be one of right, left, got 'both'", None),
        ({"distribution": "gamma"}, "distribution must be one of normal, uniform, got 'gamma'", None),
        (
            {"positions": "rope", "d_head": 5},
            "d_head (5) must be even with positions rope, which turns pairs of columns",
            "--d-head 6 works",
        ),
        (
            {"positions": "rope-interleaved", "d_head": 1},
            "d_head (1) must be even with positions rope-interleaved, which turns pairs of columns",
            "--d-head 2 works",
        ),
        ({"rope_theta": 0.0}, "rope_theta must be a finite number above 0, got 0.0", "try 10000"),
        ({"rope_theta": float("inf")}, "rope_theta must be a finite number above 0, got inf", "try 10000"),
        ({"max_positions": 0}, f"max_positions {WHOLE} 1 to 1048576, got 0", None),
        ({"d_input": 0}, f"d_input {WHOLE} 1 to 65536, got 0", None),
        ({"prefix": 0}, f"prefix {WHOLE} 1 to 1000000000, got 0", None),
        ({"window": (2, 0), "sink": -1}, f"sink {WHOLE} 1 to 1000000000, got -1", None),
        (
            {"sink": 3},
            "sink must come with a window, to which it is the exception, got no window",
            "try --window 8 --sink 3",
        ),
        ({"documents": ""}, "documents must be the separator of a text, got an empty one", "try --documents '|'"),
        (
            {"documents": "|", "random": (2, 5)},
            "documents must be the separator of a text, got random rows",
            "leave --documents or --random out",
        ),
        ({"random": (0, 5)}, f"random's batch {WHOLE} 1 to 1048576, got 0", "--random BATCH,LENGTH, such as 2,5"),
        ({"random": (2, 0)}, f"random's length {WHOLE} 1 to 1048576, got 0", "--random BATCH,LENGTH, such as 2,5"),
        ({"init": "zeros"}, "init must be one of xavier, normal, uniform, got 'zeros'", None),
        ({"dtype": "int8"}, "dtype must be one of float32, float64, bfloat16, float16, got 'int8'", None),
        ({"punctuation": "eat"}, "punctuation must be one of drop, keep, got 'eat'", None),
        (
            {"window": (-1, 0)},
            "window must be two counts of keys, left and right, from 0 up, got (-1, 0)",
            None,
        ),
        ({"window": (1,)}, "window must be two counts of keys, left and right, from 0 up, got (1,)", None),
    ],
)
def test_each_rule_says_what_is_wrong_and_what_works(choices, message, hint):
    assert fault_of(**choices) == (message, hint)


@given(st.integers(1, 3000), st.integers(1, 1024))
def test_the_heads_and_the_width_that_a_hint_names_are_the_nearest_that_work(d_model, n_heads):
    if d_model % n_heads == 0:
        return
    _, hint = fault_of(d_model=d_model, n_heads=n_heads)
    words = hint.replace(",", "").split()
    heads, width = int(words[2]), int(words[5])
    divisors = [n for n in range(1, 1025) if d_model % n == 0]
    assert heads in divisors
    assert abs(heads - n_heads) == min(abs(n - n_heads) for n in divisors)
    multiples = range(n_heads, d_model + 2 * n_heads, n_heads)
    assert width in multiples
    assert abs(width - d_model) == min(abs(n - d_model) for n in multiples)
    Config(d_model=d_model, n_heads=heads).resolved()
    Config(d_model=width, n_heads=n_heads).resolved()


def test_of_two_equally_near_the_hint_names_the_larger():
    assert fault_of(d_model=8, n_heads=3)[1] == "try --heads 4 or --d-model 9, or set --d-head"
    assert fault_of(d_model=6, n_heads=4)[1] == "try --heads 3 or --d-model 8, or set --d-head"


def test_a_width_that_a_hint_names_is_not_beyond_the_largest():
    assert fault_of(d_model=65_536, n_heads=1000)[1] == "try --heads 1024 or --d-model 65000, or set --d-head"
