"""Conditions as comparisons of a number of the query with one of the key, beside the conditions asked cell by cell."""

from __future__ import annotations

import pytest
import torch

from mhacli.attention.tiled.comparisons import MAX_COMPARISONS, comparisons_of
from mhacli.attention.tiled.conditions import matcher
from mhacli.spec.conditions import parse_pattern

Q_TOKENS, K_TOKENS = torch.tensor([-1, 0, 1, 1, 2]), torch.tensor([1, 0, 2, 1, 3, 1, -1])
VOCABULARY = {"a": 0, "b": 1, "c": 2, "d": 3}
SEPARABLE = {
    "tok[k] == tok[q] and k != q": 3,
    "tok[k - 1] == tok[q]": 1,
    "tok[k] != tok[q]": 3,
    "not tok[k] != tok[q]": 3,
    "tok[k] == 'b' and q - k < 2": 2,
    "tok[k] in ('a', 'no such', 'd') and k > 1 and tok[k - 1] != 'a' and tok[q] == 'b'": 2,
    "k < q": 1,
    "0 < q - k <= 2": 2,
    "q == k": 1,
    "not k >= q": 1,
    "2 * q - 3 * k + 1 > -(k + q)": 1,
    "abs(q - k) <= 2": 2,
    "abs(q - k) == 2": 4,
    "abs(q - k) != 2": 4,
    "3 < abs(k - q)": 2,
    "abs(k - 3) < abs(q - 1)": 1,
    "abs(q - k) < abs(q + k)": 4,
    "(q - k) % 3 == 2": 2,
    "(q - k) % -3 == -2": 2,
    "(q + k) % 3 != 1": 2,
    "1 == (q + k) % 3": 2,
    "(q + k) % 3 == 5": 2,
    "6 // k == q": 1,
    "not 6 // k != q": 2,
    "6 // (k - 1) < 6 // (q - 1)": 1,
    "tok[6 // k] == tok[q]": 1,
    "k == q or k == 0": 2,
    "2 < 3": 1,
    "tok[q] == 'b'": 1,
    "k == 0 or tok[k] == tok[q] and (q < 2 or not tok[k] in ('a',))": 4,
    "q * 999999999 * 2 + k >= 3 * 999999999 * 2": 1,
}  # fmt: skip
INSEPARABLE = (
    "q * k > 3", "q // k == 1", "(q - k) // 2 == -1", "(q - k) % 3 > 1", "(q - k) % 3 == q", "abs(q - k) % 3 == 1",
    "abs(q - k) + k > 3", "k < q and k != q and k > q + 1 and k != q + 2", "k + 999999999 * 999999999 * 9 == q",
)  # fmt: skip


def condition(text, first=(0, 0)):
    return matcher(parse_pattern(text), Q_TOKENS, K_TOKENS, lambda word: VOCABULARY.get(word, -1), first=first)


def cells_of(comparisons):
    """Where the comparisons, by their definition, say that a condition holds."""
    cells = []
    for i in range(comparisons.low.shape[1]):
        row = []
        for j in range(comparisons.key.shape[1]):
            bounds = zip(comparisons.low[:, i], comparisons.key[:, j], comparisons.high[:, i], strict=True)
            answers = sum(1 << n for n, (low, key, high) in enumerate(bounds) if low <= key <= high)
            row.append(bool(comparisons.table >> answers & 1))
        cells.append(row)
    return torch.tensor(cells)


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (5, 1), (1, 1)])
@pytest.mark.parametrize("text", SEPARABLE)
def test_the_comparisons_hold_where_the_condition_does(text, shape):
    asked = condition(text)
    found = comparisons_of(asked, *shape)
    assert found is not None
    assert torch.equal(cells_of(found), asked(*map(torch.arange, shape)))


@pytest.mark.parametrize(
    "text", ["k < q", "tok[k - 1] == tok[q]", "tok[k] == 'b' and q - k < 2", "not tok[k] != tok[q]"]
)
def test_texts_that_begin_behind_padding_are_counted_from_their_own_beginning(text):
    asked = condition(text, first=(2, 3))
    found = comparisons_of(asked, 9, 11)
    assert found is not None
    assert torch.equal(cells_of(found), asked(torch.arange(9), torch.arange(11)))


@pytest.mark.parametrize("text", SEPARABLE)
def test_the_number_of_comparisons_is_kept_small(text):
    found = comparisons_of(condition(text), 5, 7)
    assert found is not None
    assert len(found.key) == SEPARABLE[text] <= MAX_COMPARISONS


@pytest.mark.parametrize("text", INSEPARABLE)
def test_other_conditions_are_left_to_the_tiles(text):
    assert comparisons_of(condition(text), 5, 7) is None


def test_a_predicate_of_unknown_making_is_left_to_the_tiles():
    assert comparisons_of(lambda q_idx, k_idx: q_idx[:, None] > k_idx, 5, 7) is None
