"""Where a pattern holds, against plain loops over queries and keys with the same sentence written in Python by hand."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from mhacli.attention.tiled.conditions import matcher
from mhacli.spec.conditions import DUPLICATE, INDUCTION, parse_pattern

VOCABULARY = {"a": 0, "b": 1, "c": 2, "d": 3}
PADDING = -1
Text = Callable[[int], int | None]
"""The token at a place, `None` where there is none."""


def same(left: int | None, right: int | None) -> bool:
    return left is not None and right is not None and left == right


def differ(left: int | None, right: int | None) -> bool:
    return left is not None and right is not None and left != right


SENTENCES: dict[str, Callable[[int, int, Text, Text], bool]] = {
    DUPLICATE: lambda q, k, Q, K: same(K(k), Q(q)) and k != q,
    INDUCTION: lambda q, k, Q, K: same(K(k - 1), Q(q)) and k - 1 != q,
    "tok[q] == tok[k]": lambda q, k, Q, K: same(Q(q), K(k)),
    "tok[k] != tok[q]": lambda q, k, Q, K: differ(K(k), Q(q)),
    "not tok[k] == tok[q]": lambda q, k, Q, K: not same(K(k), Q(q)),
    "not tok[k + 1] != tok[q - 1]": lambda q, k, Q, K: not differ(K(k + 1), Q(q - 1)),
    "tok[k] == tok[k - 1]": lambda q, k, Q, K: same(K(k), K(k - 1)),
    "tok[k - 9] == tok[k - 9]": lambda q, k, Q, K: False,
    "tok[k - 9] != tok[k - 8]": lambda q, k, Q, K: False,
    "tok[q + 2] != tok[q]": lambda q, k, Q, K: differ(Q(q + 2), Q(q)),
    "tok[q] == tok[k] == tok[k - 1]": lambda q, k, Q, K: same(Q(q), K(k)) and same(K(k), K(k - 1)),
    "tok[q] != tok[k] == tok[k + 1] != 'a'": lambda q, k, Q, K: (
        differ(Q(q), K(k)) and same(K(k), K(k + 1)) and differ(K(k + 1), 0)
    ),
    "tok[k] == 'b'": lambda q, k, Q, K: K(k) == 1,
    "'b' != tok[q]": lambda q, k, Q, K: Q(q) in (0, 2, 3),
    "tok[k] == 'no such'": lambda q, k, Q, K: False,
    "'no such' == tok[k]": lambda q, k, Q, K: False,
    "tok[k] != 'no such'": lambda q, k, Q, K: K(k) is not None,
    "'no such' == 'no such'": lambda q, k, Q, K: False,
    "'a' == 'a' != 'b'": lambda q, k, Q, K: True,
    "tok[k] in ('a', 'no such', 'd')": lambda q, k, Q, K: K(k) in (0, 3),
    "tok[k - 2] not in ('a', 'd')": lambda q, k, Q, K: K(k - 2) in (1, 2),
    "not tok[q] in ['c']": lambda q, k, Q, K: Q(q) != 2,
    "'no such' in ('no such',)": lambda q, k, Q, K: False,
    "'no such' not in ('no such',) and 'a' in ('a',)": lambda q, k, Q, K: True,
    "tok[q] in ()": lambda q, k, Q, K: False,
    "tok[q] not in ('no such',)": lambda q, k, Q, K: Q(q) is not None,
    "tok[q] == tok[k] in ('a', 'b')": lambda q, k, Q, K: same(Q(q), K(k)) and K(k) in (0, 1),
    "tok[0] == tok[q]": lambda q, k, Q, K: same(K(0), Q(q)),
    "tok[0] != 'a'": lambda q, k, Q, K: K(0) in (1, 2, 3),
    "tok[-1] == tok[0]": lambda q, k, Q, K: False,
    "tok[abs(k - 3)] == tok[2 * q]": lambda q, k, Q, K: same(K(abs(k - 3)), Q(2 * q)),
    "tok[k * 999999999 * 2] == tok[0]": lambda q, k, Q, K: k == 0 and K(0) is not None,
    "tok[6 // k] == 'a'": lambda q, k, Q, K: k != 0 and K(6 // k) == 0,
    "not tok[q % (q - 1)] != 'a'": lambda q, k, Q, K: not (q != 1 and differ(Q(q % (q - 1)), 0)),
    "k < q": lambda q, k, Q, K: k < q,
    "k == q or k == 0": lambda q, k, Q, K: k in (q, 0),
    "q >= 2 and k > 3 and q + k <= 8": lambda q, k, Q, K: q >= 2 and k > 3 and q + k <= 8,
    "0 < q - k <= 2": lambda q, k, Q, K: k in (q - 1, q - 2),
    "not 0 < q - k <= 2 and q != 3": lambda q, k, Q, K: k not in (q - 1, q - 2) and q != 3,
    "abs(q - k) % 3 == 1": lambda q, k, Q, K: abs(q - k) in (1, 4, 7),
    "(q - k) // 2 == -1": lambda q, k, Q, K: q - k in (-1, -2),
    "(q - k) % 3 == 2": lambda q, k, Q, K: q - k in (-7, -4, -1, 2, 5),
    "(q - k) % -3 == -2": lambda q, k, Q, K: q - k in (-5, -2, 1, 4),
    "-q < -k": lambda q, k, Q, K: q > k,
    "q // k == 1": lambda q, k, Q, K: k != 0 and q // k == 1,
    "not q % k == 0": lambda q, k, Q, K: k == 0 or q % k != 0,
    "q % (k - q) < 99": lambda q, k, Q, K: k != q,
    "0 <= abs(1 + k // q) < 99 > q": lambda q, k, Q, K: q != 0,
    "k // (q // k) == 2": lambda q, k, Q, K: k != 0 and q // k != 0 and k // (q // k) == 2,
    "k < q != q // (k - 2)": lambda q, k, Q, K: k < q and k != 2 and q != q // (k - 2),
    "q * 999999999 * 2 + k >= 3 * 999999999 * 2": lambda q, k, Q, K: q >= 3,
    "k + 999999999 * 9 == 2 + 999999999 * 9": lambda q, k, Q, K: k == 2,
    "k < 999999999 * 9 and -999999999 * 999999999 * 9 + k < 4 - 999999999 * 999999999 * 9": lambda q, k, Q, K: k < 4,
    "2 < 3": lambda q, k, Q, K: True,
    "3 < 2 or not 3 < 2 and 2 < q": lambda q, k, Q, K: q > 2,
    "k == 0 or tok[k] == tok[q] and (q < 2 or not tok[k] in ('a',))": lambda q, k, Q, K: (
        k == 0 or (same(K(k), Q(q)) and (q < 2 or K(k) != 0))
    ),
}


def id_of(word: str) -> int:
    return VOCABULARY.get(word, -1)


def plain(tokens: list[int]) -> Text:
    return lambda place: tokens[place] if 0 <= place < len(tokens) and tokens[place] != PADDING else None


def drawn(seed: int) -> tuple[list[int], list[int]]:
    """Texts of few different tokens, of two or of one and the same; padded on either side now and then."""
    dice = random.Random(seed)

    def text(length: int) -> list[int]:
        left, right = dice.choice([(0, 0), (2, 0), (0, 2)])
        return [PADDING] * left + [dice.randrange(4) for _ in range(length - left - right)] + [PADDING] * right

    q_text = text(5)
    return (q_text, text(7)) if seed % 2 else (q_text, q_text)


def asked(text: str, q_text: list[int], k_text: list[int], **index: torch.Tensor) -> torch.Tensor:
    matches = matcher(parse_pattern(text), torch.tensor(q_text).long(), torch.tensor(k_text).long(), id_of)
    return matches(index.get("q", torch.arange(len(q_text))), index.get("k", torch.arange(len(k_text))))


def test_a_pattern_holds_where_its_sentence_does():
    for text in SENTENCES:
        for seed in range(8):
            q_text, k_text = drawn(seed)
            Q, K = plain(q_text), plain(k_text)
            expected = [[SENTENCES[text](q, k, Q, K) for k in range(len(k_text))] for q in range(len(q_text))]
            assert asked(text, q_text, k_text).tolist() == expected, (q_text, k_text)


@pytest.mark.full
def test_a_pattern_asked_tile_by_tile_is_the_whole():
    for text in SENTENCES:
        q_text, k_text = drawn(1)
        whole = asked(text, q_text, k_text)
        for height, width in ((2, 3), (1, 4), (5, 2)):
            rows = [
                torch.cat([asked(text, q_text, k_text, q=q, k=k) for k in torch.arange(7).split(width)], dim=1)
                for q in torch.arange(5).split(height)
            ]
            assert torch.equal(torch.cat(rows), whole)


def test_places_may_come_in_any_order_and_in_any_whole_numbers():
    for text in SENTENCES:
        q_text, k_text = drawn(3)
        q_idx, k_idx = torch.tensor([4, 0, 2]), torch.tensor([6, 1, 1, 5])
        expected = asked(text, q_text, k_text)[q_idx][:, k_idx]
        for dtype in (torch.int64, torch.int32, torch.int16, torch.int8):
            assert torch.equal(asked(text, q_text, k_text, q=q_idx.to(dtype), k=k_idx.to(dtype)), expected)


def test_the_answer_is_a_plane_of_booleans_of_exactly_the_places_asked():
    for text in SENTENCES:
        for n_q, n_k in ((3, 2), (1, 1), (0, 4), (2, 0), (0, 0)):
            found = asked(text, *drawn(1), q=torch.arange(n_q), k=torch.arange(n_k))
            assert (found.dtype, tuple(found.shape)) == (torch.bool, (n_q, n_k))


def test_a_text_without_tokens_is_all_outside():
    for text in SENTENCES:
        if "//" in text or "%" in text or "tok" not in text:
            continue
        q, k = torch.arange(2), torch.arange(3)
        expected = [[SENTENCES[text](q, k, plain([]), plain([])) for k in range(3)] for q in range(2)]
        assert asked(text, [], [], q=q, k=k).tolist() == expected


def test_by_hand_the_duplicates_and_the_inductions_of_a_small_text():
    a_b_c_a_b = [0, 1, 2, 0, 1]
    assert asked(DUPLICATE, a_b_c_a_b, a_b_c_a_b).int().tolist() == [
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
    ]
    assert asked(INDUCTION, a_b_c_a_b, a_b_c_a_b).int().tolist() == [
        [0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
    ]


def test_padding_is_no_token_even_beside_padding():
    for text in ("tok[k] == tok[q]", "tok[k] != tok[q]", "tok[k] == tok[k]", "tok[k] not in ('a',)"):
        assert not asked(text, [PADDING, 1], [PADDING, 0])[0, 0]
    assert not asked("tok[q] == tok[k]", [-1, -2, -3], [-1, -2, -3]).any()


def test_products_of_far_places_do_not_wrap_round():
    tokens = torch.zeros(2**16, dtype=torch.int64)
    matches = matcher(parse_pattern("q * k > 999999999 * 4"), tokens, tokens, id_of)
    assert matches(torch.tensor([65535]), torch.tensor([65535, 61000])).tolist() == [[True, False]]


def test_a_word_is_turned_into_an_id_once():
    words = []
    pattern = parse_pattern("tok[k] == 'b' or tok[q] in ('b', 'c') or 'b' != tok[k]")
    matches = matcher(pattern, torch.tensor([0]), torch.tensor([1]), lambda word: words.append(word) or 0)
    assert sorted(words) == ["b", "c"]
    matches(torch.arange(1), torch.arange(1))
    matches(torch.arange(1), torch.arange(1))
    assert len(words) == 2


def test_what_names_one_place_is_calculated_for_one_place():
    """The typical pattern costs one comparison of a whole tile."""
    tokens, made_whole = torch.arange(64) % 5, []
    matches = matcher(parse_pattern("tok[k - 1] == tok[q] and k > 3 and q % 2 == 1"), tokens, tokens, id_of)

    class Watched(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            if made.numel() == 64 * 32:
                made_whole.append(function.overloadpacket.__name__)
            return made

    with Watched():
        matches(torch.arange(64), torch.arange(32))
    assert [name for name in made_whole if name not in ("view", "expand", "detach")] == [
        "eq",
        "bitwise_and",
        "bitwise_and",
    ]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_tokens_may_be_any_whole_numbers(dtype):
    q_text, k_text = drawn(5)
    for text in SENTENCES:
        matches = matcher(
            parse_pattern(text),
            torch.tensor(q_text, dtype=dtype),
            torch.tensor(k_text, dtype=torch.int64),
            id_of,
        )
        assert torch.equal(matches(torch.arange(5), torch.arange(len(k_text))), asked(text, q_text, k_text))
