"""The type of a head where a text repeats itself: the mean over the queries at which a copy, or a
token after one, can be attended to decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import StringIO
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import mhacli

N = 25
START = 1
Choice = Callable[[Sequence[int], int], int]
"""The key to which a query of some ids attends."""


def tokens(seed: int, n: int = N) -> list[int]:
    """Different random tokens."""
    return [*(np.random.default_rng(seed).permutation(150)[:n] + 5).tolist()]


BLOCK = tokens(0)
TWICE = [START, *BLOCK, *BLOCK]
THRICE = [START, *BLOCK, *BLOCK, *BLOCK]
APART = [START, *tokens(0, 130), *tokens(0, 130)[:10]]
"""Ten tokens and their copy, far apart."""
SOME_NEAR = [*tokens(4, 140), *BLOCK[:6], 160, *BLOCK[:6], *tokens(5, 140)]
"""A short copy in a long text without others."""


def copies(ids: Sequence[int], query: int) -> list[int]:
    """The earlier places of the token of a query."""
    return [key for key in range(query) if ids[key] == ids[query]]


def after_copy(number: int, rest: Callable[[int], int]) -> Choice:
    """The key after a copy, by the number of the copy; without one, another key."""

    def choose(ids: Sequence[int], query: int) -> int:
        found = copies(ids, query)
        return found[number] + 1 if found else rest(query)

    return choose


def copy(ids: Sequence[int], query: int) -> int:
    """The last copy, else the first token."""
    return max(copies(ids, query), default=0)


def behind(distance: int) -> Choice:
    """The key so many tokens before a query, or the first token."""
    return lambda _, query: max(query - distance, 0)


class ChosenAttention(nn.Module):
    """An attention whose heads attend to the keys that they choose."""

    def __init__(self, choices: Sequence[Choice], masked: str = "causal") -> None:
        super().__init__()
        self.embed = nn.Embedding(400, 8)
        self.choices = choices
        self.masked = masked

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The values that the heads read."""
        batch, n = ids.shape
        q = torch.zeros(batch, len(self.choices), n, n)
        for text, row in enumerate(ids.tolist()):
            for head, choice in enumerate(self.choices):
                q[text, head, range(n), [choice(row, query) for query in range(n)]] = 40 * n**0.5
        k = torch.eye(n).expand(q.shape)
        v = torch.ones(*q.shape[:3], 4)
        mask = torch.ones(n, n, dtype=torch.bool).tril().expand(batch, 1, n, n)
        if self.masked == "by hand":
            scores = (q @ k.mT / n**0.5).masked_fill(~mask, -torch.inf)
            return scores.softmax(dim=-1) @ v
        if self.masked == "mask":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.masked == "causal")


def record_of(choices: Sequence[Choice], texts: Sequence[Sequence[int]], masked: str) -> Any:
    model = ChosenAttention(choices, masked)
    with mhacli.inspecting(model, keep=["pattern"]) as seen, torch.no_grad():
        model(torch.tensor(texts))
    return seen.record


def of_first(query: int) -> int:
    return 0 * query


def of_last(query: int) -> int:
    return max(query - 1, 0)


ROWS = {
    "rests on the first token": (TWICE, after_copy(-1, of_first), "induction", -N + 1),
    "rests on the token before": (TWICE, after_copy(-1, of_last), "induction", -N + 1),
    "rests on itself": (TWICE, after_copy(-1, lambda query: query), "induction", -N + 1),
    "of the last of several copies": (THRICE, after_copy(-1, of_first), "induction", -N + 1),
    "of the first of several copies": (THRICE, after_copy(0, of_first), "induction", None),
    "a copy far away": (APART, after_copy(-1, of_last), "induction", -129),
    "duplicates": (TWICE, copy, "duplicate-token", -N),
    "a distance elsewhere": (APART, behind(24), "positional", None),
    "a distance that repeats seldom have": (SOME_NEAR, behind(6), "positional", None),
    "the token before, among copies": ([START] + [7, 8] * 12, behind(1), "previous-token", None),
    "itself": (TWICE, behind(0), "diagonal", None),
    "the first token": (TWICE, behind(1000), "sink", None),
}


@pytest.mark.parametrize("masked", ["causal", "mask", "by hand"])
@pytest.mark.parametrize("row", ROWS)
def test_a_head_has_the_type_of_what_it_does_where_it_can(row: str, masked: str) -> None:
    ids, choice, kind, also = ROWS[row]
    head = record_of([choice], [ids], masked).heads[0]
    assert (head.kind, head.also_at) == (kind, also)


@pytest.mark.parametrize("name", ["induction", "duplicate"])
@pytest.mark.parametrize("masked", ["causal", "mask", "by hand", "none"])
def test_the_mean_is_over_the_queries_that_have_such_a_token(masked: str, name: str) -> None:
    texts = [TWICE, [*tokens(7, 40), *tokens(8, len(TWICE) - 40)]]
    record = record_of([after_copy(-1, of_last), copy, behind(3)], texts, masked)
    own = 1 if name == "induction" else 0
    weights, possible = np.zeros(3), 0
    for text, ids in enumerate(texts):
        n = len(ids)
        copies = [key - own for key in range(n)]
        cells = np.array(
            [
                [copy >= 0 and copy != query and ids[copy] == ids[query] for copy in copies]
                for query in range(n)
            ]
        )
        cells &= True if masked == "none" else np.tri(n, dtype=bool)
        pattern = np.asarray(record.pattern(layer=0, batch=text))
        weights += (pattern.reshape(3, n, n) * cells).sum(axis=(1, 2))
        possible += int(cells.any(axis=1).sum())
    for head, total in zip(record.heads, weights, strict=True):
        assert getattr(head, f"n_{name}_queries") == possible
        assert getattr(head, f"{name}_where_possible") == pytest.approx(total / possible, abs=1e-5)
        assert getattr(head, name) == pytest.approx(total / (2 * len(TWICE)), abs=1e-5)


def test_a_word_that_comes_twice_does_not_make_an_induction_head() -> None:
    ids = [*tokens(2, 12), tokens(2, 12)[0], 160]
    head = record_of([after_copy(-1, lambda query: query // 2)], [ids], "causal").heads[0]
    assert (head.n_induction_queries, head.induction_where_possible) == (1, pytest.approx(1.0))
    assert head.kind != "induction"


def test_means_over_several_calls_count_the_queries_of_all() -> None:
    model = ChosenAttention([after_copy(-1, of_first)])
    with mhacli.inspecting(model) as seen, torch.no_grad():
        for ids in (TWICE, THRICE):
            model(torch.tensor([ids]))
    heads = seen.statistics()
    assert heads[0].n_induction_queries == 3 * N
    assert heads[0].induction_where_possible == pytest.approx(1.0, abs=1e-4)
    assert heads[0].kind == "induction"


def test_the_one_distance_stands_beside_the_type() -> None:
    record = record_of([after_copy(-1, of_first)], [TWICE], "causal")
    console = Console(width=160, file=StringIO())
    console.print(record)
    assert f"induction (also: one distance, −{N - 1})" in console.file.getvalue()
