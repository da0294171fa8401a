"""What attention costs by formula: visible pairs, operations, bytes. Counted arithmetically, never with a mask tensor.

Operations are those of the two products, over visible pairs only; scale, softcap and softmax are left out, as the field
does. Bytes are the least that any implementation must move: every input read once, every result written once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mhacli.spec.config import ITEM_BYTES, Dtype

Direction = Literal["forward", "backward", "both"]

_TIMES_FORWARD_FLOPS = {"forward": 2, "backward": 5, "both": 7}
"""Halves of the forward pass: backward has five products of that size for two, the scores computed again among them.

Source: Dao 2023, "FlashAttention-2", section 4.1.
"""
_TIMES_FORWARD_BYTES = {"forward": 1, "backward": 2, "both": 3}
"""Backward reads what forward read and wrote, and the result's gradient, and writes three gradients."""


@dataclass(frozen=True)
class Workload:
    """One size of attention to measure, values as wide as keys. With `causal`, queries are the last of the tokens."""

    batch: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    q_len: int
    k_len: int
    dtype: Dtype
    causal: bool
    direction: Direction

    @property
    def name(self) -> str:
        """The size in words."""
        heads = f"{self.n_heads}" + ("" if self.n_heads == self.n_kv_heads else f"/{self.n_kv_heads}")
        mask = "causal" if self.causal else "full"
        return (
            f"batch {self.batch}, {self.q_len} × {self.k_len} tokens, {heads} heads × {self.d_head}, {self.dtype}, {mask}, "
            f"{self.direction}"
        )

    @property
    def offset(self) -> int:
        """The key that is the first query's own token."""
        return self.k_len - self.q_len

    @property
    def pairs(self) -> int:
        """Cells of one head that the mask allows."""
        return visible_pairs(self.q_len, self.k_len, causal=self.causal, offset=self.offset)

    @property
    def is_masked(self) -> bool:
        """Whether the mask forbids any cell: it does not where the only query is the newest token."""
        return self.pairs < self.q_len * self.k_len

    @property
    def attention_flops(self) -> int:
        """Operations of the products: forward `4 · batch · n_heads · pairs · d_head`, backward 2.5 times that."""
        return 2 * self.batch * self.n_heads * self.pairs * self.d_head * _TIMES_FORWARD_FLOPS[self.direction]

    @property
    def attention_bytes(self) -> int:
        """Bytes that must be moved: q and z for every head, k and v for every kv head; backward twice that."""
        of_queries = self.n_heads * self.q_len
        of_keys = self.n_kv_heads * self.k_len
        forward = 2 * self.batch * (of_queries + of_keys) * self.d_head * ITEM_BYTES[self.dtype]
        return forward * _TIMES_FORWARD_BYTES[self.direction]

    @property
    def input_bytes(self) -> int:
        """Bytes of q, k and v."""
        numbers = self.n_heads * self.q_len + 2 * self.n_kv_heads * self.k_len
        return self.batch * numbers * self.d_head * ITEM_BYTES[self.dtype]


def visible_pairs(
    q_len: int, k_len: int, *, causal: bool = False, window: tuple[int, int] | None = None, offset: int = 0
) -> int:
    """How many cells of `q_len` × `k_len` the mask allows. `offset` is the key position of the first query.

    `window` counts keys to the left and right of the query, which `causal` cuts off at the query itself.

    >>> visible_pairs(3, 3, causal=True)
    6
    """
    everything = q_len + k_len + abs(offset)
    left, right = (everything, everything) if window is None else window
    right = min(right, 0) if causal else right
    return _keys_up_to(q_len, k_len, offset + right) - _keys_up_to(q_len, k_len, offset - left - 1)


def _keys_up_to(q_len: int, k_len: int, shift: int) -> int:
    """The sum over queries i of how many of the keys 0 … k_len − 1 are at most i + shift."""
    return _clamped_sum(shift + 1 + q_len, k_len) - _clamped_sum(shift + 1, k_len)


def _clamped_sum(end: int, top: int) -> int:
    """The sum of min(n, top) over n from 0 up to, and without, `end`."""
    ramp = max(0, min(end, top + 1))
    return ramp * (ramp - 1) // 2 + max(0, end - top - 1) * top
