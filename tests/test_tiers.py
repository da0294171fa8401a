"""Of a product of parametrisations few rows are taken, and none that they hold goes missing."""

import itertools

from support.tiers import covering, drawn

ROWS = list(itertools.product("abcde", "xyz", "12", "!?"))


def held(rows, strength):
    return {part for row in rows for part in itertools.combinations(enumerate(row), strength)}


def test_few_rows_hold_every_value_and_more_every_pair():
    values, pairs = ([ROWS[place] for place in covering(ROWS, strength)] for strength in (1, 2))
    assert held(values, 1) == held(ROWS, 1)
    assert held(pairs, 2) == held(ROWS, 2)
    assert len(values) == 5
    assert 15 <= len(pairs) <= 18
    assert pairs == [row for row in ROWS if row in pairs]


def test_rows_of_one_parametrisation_all_count():
    assert covering([("a",), ("b",), ("c",)], 1) == [0, 1, 2]
    assert covering(list(itertools.product("ab", "xy")), 2) == [0, 1, 2, 3]


def test_the_same_rows_are_drawn_among_others():
    few, many = ([(f"case {n}",) for n in range(size)] for size in (40, 50))
    assert len(drawn(few, 8)) == 8
    assert drawn(few, 8) == sorted(drawn(few, 8))
    assert set(drawn(many, 8)) & set(range(40)) <= set(drawn(few, 8))
    assert drawn(few[:3], 8) == [0, 1, 2]


def test_rows_drawn_of_a_product_hold_all_values_of_its_short_side():
    rows = list(itertools.product((f"layout {n}" for n in range(40)), ("biases", "none"), "abcd"))
    taken = [rows[place] for place in drawn(rows, 4)]
    assert len({layout for layout, _, _ in taken}) == 4
    assert {biases for _, biases, _ in taken} == {"biases", "none"}
    assert {letter for _, _, letter in taken} == set("abcd")
