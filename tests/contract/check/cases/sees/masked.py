"""Attention, functions and models whose masks are tables, made by plain loops of Python."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH, N_HEADS = 260, 4
PARTS = ("cell", "row", "block", "head")
"""What may be wrong."""


def parent(place: int) -> int:
    return (place - 1) // 2


def is_above(key: int, query: int) -> bool:
    while query > key:
        query = parent(query)
    return query == key


RULES = {
    "causal": lambda q, k, head: k <= q,
    "window": lambda q, k, head: 0 <= q - k < 8,
    "prefix": lambda q, k, head: k < 6 or k <= q,
    "documents": lambda q, k, head: q // 16 == k // 16 and k <= q,
    "dilated": lambda q, k, head: k <= q and (q - k) % 3 == 0,
    "sinks": lambda q, k, head: k <= q and (q - k < 8 or k < 2),
    "tree": lambda q, k, head: is_above(k, q),
    "staircase": lambda q, k, head: k // 8 <= q // 8,
    "strided": lambda q, k, head: k <= q and (q - k < 4 or k % 4 == 3),
    "block": lambda q, k, head: q // 8 == k // 8,
    "holes": lambda q, k, head: (q // 8 + k // 8) % 2 == 0,
    "own head": lambda q, k, head: k <= q and (head != 1 or q - k < 4),
}
"""Whether a query sees a key, by name."""


def is_wrong(part: str, query: int, key: int, head: int) -> bool:
    """Whether a cell is turned round."""
    return {
        "": False,
        "cell": (query, key) == (9, 4),
        "row": query == 11,
        "block": 16 <= query < 24 and 8 <= key < 16,
        "head": head == 2 and key == query // 2 and query > 0,
    }[part]


@functools.cache
def table(name: str, part: str = "", length: int = LENGTH) -> Tensor:
    """What each head sees, with a part turned round."""
    rule, places = RULES[name], range(length)
    return torch.tensor(
        [
            [[rule(q, k, h) != is_wrong(part, q, k, h) for k in places] for q in places]
            for h in range(N_HEADS)
        ]
    )


class Masked(nn.Module):
    """Attention with a table as its mask."""

    def __init__(self, seen: Tensor, d_model: int = 32) -> None:
        super().__init__()
        self.n_heads = N_HEADS
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(d_model, d_model) for _ in range(4)
        )
        self.register_buffer("seen", seen, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (
            part(x).view(n, length, self.n_heads, -1).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        hidden = ~self.seen[:, :length, :length]
        pattern = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.out_proj((pattern @ v).transpose(1, 2).reshape(n, length, width))


class Model(nn.Module):
    """A model of token ids with a mask in each layer."""

    def __init__(self, *seen: Tensor, vocab_size: int = 50, d_model: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(LENGTH, d_model)
        self.layers = nn.ModuleList(Masked(each, d_model) for each in seen)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class WithCache(nn.Module):
    """A decoder of one layer that reads texts in steps; `begin` is where it counts behind a cache:
    at the cache's length, or at 0, which is wrong.
    """

    def __init__(self, window: int = 8, begin: str = "cache") -> None:
        super().__init__()
        self.window, self.begin, width = window, begin, 32
        self.embedding, self.head = nn.Embedding(50, width), nn.Linear(width, 50)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))

    def forward(
        self, input_ids: Tensor, past_key_values: Tensor | None = None, use_cache: bool = False
    ) -> tuple[Tensor, Tensor]:
        x = self.embedding(input_ids)
        rows = x if past_key_values is None else torch.cat([past_key_values, x], dim=1)
        n_before = rows.shape[1] - x.shape[1]
        first = n_before if self.begin == "cache" else 0
        query = first + torch.arange(x.shape[1])[:, None]
        key = torch.arange(rows.shape[1])
        seen = (key <= query) & (query - key < self.window)
        z = F.scaled_dot_product_attention(
            self.q_proj(x)[:, None],
            self.k_proj(rows)[:, None],
            self.v_proj(rows)[:, None],
            attn_mask=seen,
        )
        return self.head(x + z[:, 0]), rows


def from_the_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal: the queries are the last of the keys."""
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    seen = torch.ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def from_the_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal: the first query is at the first key."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def before_each(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each query sees the keys before it. Softmax gives the first one, which has none, all keys."""
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    seen = torch.ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries - 1)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(~seen, -1e9).softmax(-1) @ v


def with_a_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Hides nothing without a mask."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class CausalBlocks(Masked):
    """Its name says what its mask, a staircase of blocks, does not do."""

    def __init__(self) -> None:
        super().__init__(table("staircase"))
