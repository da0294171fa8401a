"""Conditions on cells (`--where`): what they select, and what is refused. Python evaluates each
condition as the oracle.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.mha import run

TEXT = "the cat the sat the cat a cat mat b the"
LAYER = ("--heads", "2", "--d-model", "6", "--seed", "3")


class Tokens:
    """Tokens by position. One outside of the text has no value: no comparison with it holds."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words

    def __getitem__(self, place: float) -> Any:
        is_inside = place == place and 0 <= place < len(self.words)
        return Value(self.words[int(place)]) if is_inside else Value(None)


class Value:
    """A token, or none."""

    def __init__(self, word: str | None) -> None:
        self.word = word

    def __eq__(self, other: object) -> bool:
        word = other.word if isinstance(other, Value) else other
        return self.word is not None and word is not None and self.word == word

    def __ne__(self, other: object) -> bool:
        word = other.word if isinstance(other, Value) else other
        return self.word is not None and word is not None and self.word != word

    __hash__ = None  # type: ignore[assignment]


def cells(condition: str, words: Sequence[str]) -> np.ndarray:
    """Where a condition holds, `[query, key]`, by Python's own evaluation."""
    n = len(words)
    names = {"tok": Tokens(words), "abs": abs}
    code = compile(condition.strip(), "condition", "eval")
    return np.array(
        [[bool(eval(code, names | {"q": q, "k": k})) for k in range(n)] for q in range(n)]
    )


CONDITIONS = (
    "k < q",
    "(k) <= (q)",
    "  q != k ",
    "0 < q - k <= 3",
    "q > k >= 1_0",
    "q + k * 2 == 0x10",
    "q // 3 == k % 4",
    "-k < -5",
    "abs(q - k) < 3",
    "k < abs(3 - 7) * 2 + 9 // 2 - 9 % 4 - 5",
    "(k - 6) // 4 == -1",
    "(k - 6) % 4 == 1",
    "tok[k] == tok[q]",
    "tok[k] == tok[q] and k != q",
    "tok[k - 1] == tok[q] and k - 1 != q",
    "tok[q - 1] != tok[0]",
    "tok[k + 2] == 'the'",
    "tok[abs(k - 2)] == 'the'",
    'tok[k] in ("a", "cat")',
    'tok[k] not in ["the"]',
    'not tok[k] == "a" or tok[q] == "b"',
    '"mat" == tok[k]',
    "k < q and not k < 3 or q == 0",
    "k < q and (k < 3 or q == 0)",
    "tok[0] == 'the'",
    "tok[3] == 'the'",
    "tok[k] == 'absent'",
    "not not k == 4",
)


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    record = run(
        tmp_path_factory.mktemp("pattern"), "run", TEXT, *LAYER, "--json", "--keep", "pattern"
    ).json
    return np.array(record["pattern"])[0]


def selected(folder: Path, conditions: Sequence[str]) -> tuple[list[list[float]], list[float]]:
    """The attention weight that each head gives to the cells of each condition, and the fraction of
    all cells.
    """
    words = [word for condition in conditions for word in ("--where", condition)]
    heads = run(folder, "heads", TEXT, *LAYER, *words, "--json").json["heads"]
    return [head["patterns"] for head in heads], heads[0]["uniform"]["patterns"]


@pytest.mark.parametrize("start", range(0, len(CONDITIONS), 4))
def test_a_condition_selects_the_cells_that_python_selects(
    tmp_path: Path, pattern: np.ndarray, start: int
) -> None:
    conditions = CONDITIONS[start : start + 4]
    by_head, fractions = selected(tmp_path, conditions)
    for number, condition in enumerate(conditions):
        holds = cells(condition, TEXT.split())
        assert fractions[number] == pytest.approx(holds.mean(), abs=1e-6), condition
        for head, weights in enumerate(by_head):
            assert weights[number] == pytest.approx(
                (pattern[head] * holds).sum(axis=1).mean(), abs=1e-6
            ), condition


def _number(dice: random.Random, names: str, depth: int = 2) -> str:
    if depth == 0 or dice.random() < 0.4:
        return dice.choice([*names, str(dice.randrange(12))])
    left, right = _number(dice, names, depth - 1), _number(dice, names, depth - 1)
    return dice.choice(
        [
            f"({left} + {right})",
            f"({left} - {right})",
            f"({left} * {right})",
            f"({left} // 3)",
            f"({left} % 5)",
            f"abs({left})",
            f"-{left}",
        ]
    )


def _condition(dice: random.Random, depth: int = 2) -> str:
    if depth == 0 or dice.random() < 0.3:
        if dice.random() < 0.5:
            return (
                f"{_number(dice, 'qk')} {dice.choice(['==', '!=', '<', '<=', '>', '>='])}"
                f" {_number(dice, 'qk')}"
            )
        left = f"tok[{_number(dice, dice.choice('qk'))}]"
        return (
            f"{left} {dice.choice(['==', '!='])} {dice.choice(['tok[k]', 'tok[q]', repr('cat')])}"
        )
    left, right = _condition(dice, depth - 1), _condition(dice, depth - 1)
    return dice.choice([f"({left} and {right})", f"({left} or {right})", f"not ({left})"])


@pytest.mark.real
def test_random_conditions_select_the_cells_that_python_selects(tmp_path: Path) -> None:
    dice = random.Random(5)
    conditions = [condition for _ in range(60) if len(condition := _condition(dice)) < 300][:32]
    for start in range(0, len(conditions), 8):
        some = conditions[start : start + 8]
        fractions = selected(tmp_path, some)[1]
        expected = [cells(condition, TEXT.split()).mean() for condition in some]
        assert fractions == pytest.approx(expected, abs=1e-6), some


@pytest.mark.parametrize(
    ("condition", "part"),
    [
        ("", "''"),
        ("k <", "k <"),
        ("k = q", "k = q"),
        ("k < q; q < k", "k < q; q < k"),
        ("tok[k] == '\\d'", "tok"),
        ("(" * 300, "((("),
        ("k", "'k'"),
        ("True", "True"),
        ("k < q and q - 1", "q - 1"),
        ("(k < q) & (q < 3)", "&"),
        ("tok[k] == 3", "tok[k] == 3"),
        ("tok[k] < tok[q]", "tok[k] < tok[q]"),
        ("q is k", "q is k"),
        ("(q < k) == (k < q)", "q < k"),
        ("tok[k] in ('a')", "'a'"),
        ("tok[k] in ('a', tok[q])", "tok[q]"),
        ("k in ('a', 'b')", "'k'"),
        ("tok[q - k] == 'a'", "tok[q - k]"),
        ("tok[k:] == 'a'", "k:"),
        ("tok[tok[k]] == 'a'", "tok[k]"),
        ("word[k] == 'a'", "word[k]"),
        ("tok == 'a'", "tok"),
        ("x < q", "x"),
        ("k < 1.5", "1.5"),
        ("k < True", "True"),
        ("k < 1000000000", "1000000000"),
        ("q / 2 < k", "q / 2"),
        ("q ** 2 < k", "q ** 2"),
        ("q // 0 < k", "q // 0"),
        ("q % (2 - 2) < k", "q % (2 - 2)"),
        ("1 < k * k * k", "k * k * k"),
        ("min(q, k) < 3", "min(q, k)"),
        ("abs(q, k) < 3", "abs(q, k)"),
        ("k < q" + " " * 496, "501"),
        ("not " * 49 + "k < q", "51"),
        ("().__class__ == 'a'", "__class__"),
        ("[q for q in (1, 2)] == 'a'", "for"),
        ("(n := q) < k", "n := q"),
        ("tok[k] == f'{q}'", "f'{q}'"),
        ("(lambda: k < q)()", "lambda"),
    ],
)
def test_what_is_no_condition_is_refused_with_the_part(mha: Any, condition: str, part: str) -> None:
    ended = mha("heads", TEXT, *LAYER, "--where", condition, "--json", code=2)
    assert ended.error["code"] == "usage"
    assert "--where" in ended.error["message"]
    assert part in ended.error["message"].replace('"', "'").replace("\\\\", "\\")


def test_a_condition_of_500_characters_and_48_levels_is_read(mha: Any) -> None:
    deep = "not " * 48 + "k < q"
    heads = mha(
        "heads", TEXT, *LAYER, "--where", "k < q" + " " * 495, "--where", deep, "--json"
    ).json["heads"]
    first, second = heads[0]["uniform"]["patterns"]
    assert first == second == pytest.approx(cells("k < q", TEXT.split()).mean(), abs=1e-6)
    assert math.isclose(sum(heads[0]["patterns"]), 2 * heads[0]["patterns"][0])


@pytest.mark.parametrize(
    "code",
    [
        "__import__('os').system('touch executed') == 0",
        "abs(open('executed', 'w')) < 1",
        "open('executed', 'w') == 'a'",
    ],
)
def test_a_condition_is_never_executed(mha: Any, tmp_path: Path, code: str) -> None:
    mha("heads", TEXT, *LAYER, "--where", code, code=2)
    assert list(tmp_path.iterdir()) == []
