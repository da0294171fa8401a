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


MESSAGES = [
    ({"d_model": 0}, "--d-model 0 is too small: at least 1", None),
    ({"d_model": 65537}, "--d-model 65537 is too large: at most 65536", None),
    ({"d_model": True}, "--d-model is not a whole number", None),
    ({"d_model": 64.0}, "--d-model 64.0 is not a whole number", None),
    ({"n_heads": 0}, "--heads 0 is too small: at least 1", "try --heads 1"),
    ({"n_heads": -3}, "--heads -3 is too small: at least 1", "try --heads 1"),
    ({"n_heads": 2000, "d_model": 4096}, "--heads 2000 is too large: at most 1024", "try --heads 1024"),
    (
        {"d_model": 64, "n_heads": 5},
        "--heads 5 does not divide d_model 64",
        "try --heads 4 or --d-model 65, or set --d-head",
    ),
    (
        {"d_model": 3, "n_heads": 8},
        "--heads 8 does not divide d_model 3",
        "try --heads 3 or --d-model 8, or set --d-head",
    ),
    ({"d_head": 0}, "--d-head 0 is too small: at least 1", None),
    ({"d_head": 70000}, "--d-head 70000 is too large: at most 65536", None),
    ({"d_v": -1}, "--d-v -1 is too small: at least 1", None),
    ({"n_kv_heads": 0}, "--kv-heads 0 is too small: at least 1", "try --kv-heads 1"),
    ({"n_kv_heads": 8}, "--kv-heads 8 is more than the 4 query heads", "try --kv-heads 4"),
    ({"n_kv_heads": 3}, "--kv-heads 3 does not divide the 4 query heads", "try --kv-heads 4"),
    (
        {"n_heads": 12, "d_model": 12, "n_kv_heads": 9},
        "--kv-heads 9 does not divide the 12 query heads",
        "try --kv-heads 12",
    ),
    ({"seed": -1}, "--seed -1 is too small: at least 0", None),
    ({"seed": 18446744073709551616}, "--seed 18446744073709551616 is too large: at most 18446744073709551615", None),
    ({"threads": 0}, "--threads 0 is too small: at least 1", None),
    ({"scale": float("nan")}, "--scale nan is not a finite number", None),
    ({"softcap": float("inf")}, "--softcap inf is not a finite number", None),
    ({"softcap": 0.0}, "--softcap 0.0 is not above 0", None),
    ({"dropout": 1.0}, "--dropout 1.0 is out of range: from 0 to below 1", None),
    ({"dropout": -0.1}, "--dropout -0.1 is out of range: from 0 to below 1", None),
    ({"dropout": float("nan")}, "--dropout nan is out of range: from 0 to below 1", None),
    ({"train": True}, "--train changes nothing without dropout", "try --train --dropout 0.1"),
    (
        {"positions": "rotary"},
        "--positions rotary is not one of sinusoidal, learned, rope, rope-interleaved, alibi, none",
        None,
    ),
    ({"padding": "both"}, "--padding both is not one of right, left", None),
    ({"distribution": "gamma"}, "--distribution gamma is not one of normal, uniform", None),
    (
        {"positions": "rope", "d_head": 5},
        "--positions rope rotates pairs of columns, but d_head 5 is odd",
        "try --d-head 6",
    ),
    (
        {"positions": "rope-interleaved", "d_head": 1},
        "--positions rope-interleaved rotates pairs of columns, but d_head 1 is odd",
        "try --d-head 2",
    ),
    ({"rope_theta": 0.0}, "--rope-theta 0.0 is not a finite number above 0", "try --rope-theta 10000"),
    ({"rope_theta": float("inf")}, "--rope-theta inf is not a finite number above 0", "try --rope-theta 10000"),
    ({"max_positions": 0}, "--max-positions 0 is too small: at least 1", None),
    ({"d_input": 0}, "--d-input 0 is too small: at least 1", None),
    ({"prefix": 0}, "--prefix 0 is too small: at least 1", None),
    ({"window": (2, 0), "sink": -1}, "--sink-window -1 is too small: at least 1", None),
    ({"sink": 3}, "--sink-window 3 exempts tokens from a window, and there is none", "try --window 8 --sink-window 3"),
    ({"documents": ""}, "--documents '' is empty", "try --documents '|'"),
    (
        {"documents": "|", "random": (2, 5)},
        "--documents '|' separates texts, but --random takes random vectors in place of text",
        "leave out --documents or --random",
    ),
    (
        {"random": (0, 5)},
        "--random 0,5: batch 0 is too small: at least 1",
        "try --random 2,5, a batch of 2 with 5 tokens each",
    ),
    (
        {"random": (2, 0)},
        "--random 2,0: length 0 is too small: at least 1",
        "try --random 2,5, a batch of 2 with 5 tokens each",
    ),
    ({"init": "zeros"}, "--init zeros is not one of xavier, normal, uniform", None),
    ({"dtype": "int8"}, "--dtype int8 is not one of float32, float64, bfloat16, float16", None),
    ({"punctuation": "eat"}, "--punctuation eat is not one of drop, keep", None),
    ({"window": (-1, 0)}, "--window -1,0 is not two counts of keys, left and right, such as 4,0", None),
    ({"window": (1,)}, "--window 1 is not two counts of keys, left and right, such as 4,0", None),
]


@pytest.mark.parametrize(("choices", "message", "hint"), MESSAGES)
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
