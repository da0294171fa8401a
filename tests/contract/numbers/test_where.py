"""`--where`: the weight on the cells of a condition, against the same sentence in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Text = Callable[[int], str | None]
"""The token at a place, None where there is none."""


def same(left: str | None, right: str | None) -> bool:
    return left is not None and right is not None and left == right


def differ(left: str | None, right: str | None) -> bool:
    return left is not None and right is not None and left != right


SENTENCES: dict[str, Callable[[int, int, Text, Text], bool]] = {
    "tok[k] == tok[q] and k != q": lambda q, k, Q, K: same(K(k), Q(q)) and k != q,
    "tok[k - 1] == tok[q] and k - 1 != q": lambda q, k, Q, K: same(K(k - 1), Q(q)) and k - 1 != q,
    "tok[k] != tok[q]": lambda q, k, Q, K: differ(K(k), Q(q)),
    "not tok[k] == tok[q]": lambda q, k, Q, K: not same(K(k), Q(q)),
    "not tok[k + 1] != tok[q - 1]": lambda q, k, Q, K: not differ(K(k + 1), Q(q - 1)),
    "tok[k] == tok[k - 1]": lambda q, k, Q, K: same(K(k), K(k - 1)),
    "tok[k - 9] == tok[k - 9]": lambda q, k, Q, K: False,
    "tok[q + 2] != tok[q]": lambda q, k, Q, K: differ(Q(q + 2), Q(q)),
    "tok[q] == tok[k] == tok[k - 1]": lambda q, k, Q, K: same(Q(q), K(k)) and same(K(k), K(k - 1)),
    "tok[q] != tok[k] == tok[k + 1] != 'a'": lambda q, k, Q, K: (
        differ(Q(q), K(k)) and same(K(k), K(k + 1)) and differ(K(k + 1), "a")
    ),
    "tok[k] == 'b'": lambda q, k, Q, K: K(k) == "b",
    "'b' != tok[q]": lambda q, k, Q, K: Q(q) != "b",
    "tok[k] == 'no such'": lambda q, k, Q, K: False,
    "tok[k] != 'no such'": lambda q, k, Q, K: True,
    "'no such' == 'no such'": lambda q, k, Q, K: False,
    "tok[k] in ('a', 'no such', 'd')": lambda q, k, Q, K: K(k) in ("a", "d"),
    "tok[k - 2] not in ('a', 'd')": lambda q, k, Q, K: K(k - 2) in ("b", "c"),
    "not tok[q] in ['c']": lambda q, k, Q, K: Q(q) != "c",
    "tok[q] in ()": lambda q, k, Q, K: False,
    "tok[q] == tok[k] in ('a', 'b')": lambda q, k, Q, K: same(Q(q), K(k)) and K(k) in ("a", "b"),
    "tok[0] == tok[q]": lambda q, k, Q, K: same(K(0), Q(q)),
    "tok[-1] == tok[0]": lambda q, k, Q, K: False,
    "tok[abs(k - 3)] == tok[2 * q]": lambda q, k, Q, K: same(K(abs(k - 3)), Q(2 * q)),
    "tok[6 // k] == 'a'": lambda q, k, Q, K: k != 0 and K(6 // k) == "a",
    "not tok[q % (q - 1)] != 'a'": lambda q, k, Q, K: not (q != 1 and differ(Q(q % (q - 1)), "a")),
    "k == q or k == 0": lambda q, k, Q, K: k in (q, 0),
    "q >= 2 and k > 1 and q + k <= 5": lambda q, k, Q, K: q >= 2 and k > 1 and q + k <= 5,
    "0 < q - k <= 2": lambda q, k, Q, K: k in (q - 1, q - 2),
    "not 0 < q - k <= 2 and q != 3": lambda q, k, Q, K: k not in (q - 1, q - 2) and q != 3,
    "abs(q - k) % 3 == 1": lambda q, k, Q, K: abs(q - k) in (1, 4, 7),
    "(q - k) // 2 == -1": lambda q, k, Q, K: q - k in (-1, -2),
    "(q - k) % -3 == -2": lambda q, k, Q, K: q - k in (-8, -5, -2, 1, 4),
    "-q < -k": lambda q, k, Q, K: q > k,
    "q // k == 1": lambda q, k, Q, K: k != 0 and q // k == 1,
    "not q % k == 0": lambda q, k, Q, K: k == 0 or q % k != 0,
    "k // (q // k) == 2": lambda q, k, Q, K: k != 0 and q // k != 0 and k // (q // k) == 2,
    "q * 999999999 * 2 + k >= 3 * 999999999 * 2": lambda q, k, Q, K: q >= 3,
    "2 < 3": lambda q, k, Q, K: True,
    "3 < 2 or not 3 < 2 and 2 < q": lambda q, k, Q, K: q > 2,
    "k == 0 or tok[k] == tok[q] and (q < 2 or not tok[k] in ('a',))": lambda q, k, Q, K: (
        k == 0 or (same(K(k), Q(q)) and (q < 2 or K(k) != "a"))
    ),
}
TEXTS, CONTEXTS = ["a b | a a c b d", "d a | d"], ["c c a b d | a a b d", "a | d d c"]


@pytest.mark.parametrize("padding", ["left", pytest.param("right", marks=pytest.mark.real)])
@pytest.mark.parametrize(
    "options",
    [["--documents", "|"], ["--causal"], ["--context", CONTEXTS[0], "--context", CONTEXTS[1]]],
)
def test_a_condition_adds_up_the_weights_where_its_sentence_holds(
    options: list[str], padding: str, mha: Any
) -> None:
    words = [
        *TEXTS,
        *options,
        "--padding",
        padding,
        *"--init uniform --scale 3 --dtype float64".split(),
    ]
    patterns = mha("run", *words, "--repeat", "1", "--keep", "pattern", "--json").json
    where = [word for sentence in SENTENCES for word in ("--where", sentence)]
    document = mha("heads", *words, *where, "--json").json
    assert document["survey"]["patterns"] == list(SENTENCES)
    pattern = np.array(patterns["pattern"])
    keys = document["context"] or document["sequences"]
    for n, (text, sentence) in enumerate(SENTENCES.items()):
        holds = np.zeros((2, *pattern.shape[2:]))
        for b, sides in enumerate(zip(document["sequences"], keys, strict=True)):
            holds[b] = cells_of(
                sentence, *(side["tokens"] for side in sides), padding, holds.shape[1:]
            )
        n_queries = sum(len(sequence["tokens"]) for sequence in document["sequences"])
        masses = (pattern * holds[:, None]).sum(axis=(0, 2, 3)) / n_queries
        assert [head["patterns"][n] for head in document["heads"]] == pytest.approx(
            masses, abs=1e-12
        ), text


def cells_of(
    sentence: Any, queries: list[str], keys: list[str], padding: str, shape: tuple[int, ...]
) -> np.ndarray:
    """Where a sentence holds, in the columns of a padded pattern. Places count from the first token
    of a text.
    """
    columns = np.zeros(shape)
    first = [
        size - len(tokens) if padding == "left" else 0
        for size, tokens in zip(shape, (queries, keys), strict=True)
    ]

    def token_of(tokens: list[str]) -> Text:
        return lambda place: tokens[place] if 0 <= place < len(tokens) else None

    for q in range(len(queries)):
        for k in range(len(keys)):
            columns[q + first[0], k + first[1]] = sentence(q, k, token_of(queries), token_of(keys))
    return columns
