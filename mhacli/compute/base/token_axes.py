"""What stands on the axes of attention: whose tokens are the queries and the keys, and where each text begins on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mhacli.spec.config import Side
from mhacli.spec.tokens import TokenSequence


@dataclass(frozen=True)
class Axes:
    """The texts on the query axis, of length `q_len`, and on the key axis, with padding on a `side` of the shorter ones.

    `is_self` where both are the same tokens; `id_of` gives the id of a word, or a number below 0; `dtype` is that of the
    computation, which says how far two ways of doing it may be apart.
    """

    queries: tuple[TokenSequence, ...]
    keys: tuple[TokenSequence, ...]
    q_len: int
    k_len: int
    side: Side
    is_self: bool
    id_of: Callable[[str], int]
    dtype: str
    device: torch.device

    def first_query(self, sequence: int) -> int:
        """The column in which a sequence's queries begin."""
        return self._first(len(self.queries[sequence].ids), self.q_len)

    def first_key(self, sequence: int) -> int:
        """The column in which its keys begin."""
        return self._first(len(self.keys[sequence].ids), self.k_len)

    def on_queries(self, rows: Sequence[Sequence[int]], fill: int) -> Int[Tensor, "batch query"]:
        """A number for every query of every text, and `fill` for padding."""
        return self._filled(rows, fill, self.q_len)

    def on_keys(self, rows: Sequence[Sequence[int]], fill: int) -> Int[Tensor, "batch key"]:
        """The same for the keys."""
        return self._filled(rows, fill, self.k_len)

    def real_queries(self) -> Bool[Tensor, "batch query"]:
        """Which columns of the query axis hold a token."""
        return self.on_queries([[1] * len(text.ids) for text in self.queries], 0) > 0

    def _first(self, n_tokens: int, length: int) -> int:
        return length - n_tokens if self.side == "left" else 0

    def _filled(self, rows: Sequence[Sequence[int]], fill: int, length: int) -> Int[Tensor, "batch length"]:
        full = []
        for row in rows:
            first = self._first(len(row), length)
            full.append([fill] * first + list(row) + [fill] * (length - len(row) - first))
        return torch.tensor(full, dtype=torch.int64, device=self.device)
