"""The KV cache: keys and values of the tokens that were read, so that a new token need not read them again.

Two ways of keeping them, state in and state out: `ConcatCache` copies everything at every step, `PreallocatedCache` writes
only what is new into room that was made at the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from mhacli.attention.layer import MultiHeadAttention, Past

Keys = Float[Tensor, "batch kv_head length d_head"]
Values = Float[Tensor, "batch kv_head length d_v"]


class ConcatCache(NamedTuple):
    """The past as tensors of just its length. A step makes new ones: over T tokens, T²/2 of them are copied."""

    k: Keys
    v: Values

    @staticmethod
    def empty(layer: MultiHeadAttention, batch: int, capacity: int = 0) -> ConcatCache:
        """No tokens yet, on the layer's device and in its dtype. The capacity is whatever it will be."""
        return ConcatCache(*_room(layer, batch, 0))

    @property
    def length(self) -> int:
        """How many tokens are kept."""
        return self.k.shape[2]

    def extended(self, k: Keys, v: Values) -> ConcatCache:
        """A copy with new tokens behind it."""
        return ConcatCache(torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2))


class PreallocatedCache(NamedTuple):
    """The past as the filled part of a buffer. A step writes its own tokens; nothing else moves.

    States share the buffer: extending the same state twice overwrites what the first extension wrote, and gradients do not
    flow back through several steps. For inference; train with `ConcatCache`.
    """

    k_buffer: Float[Tensor, "batch kv_head capacity d_head"]
    v_buffer: Float[Tensor, "batch kv_head capacity d_v"]
    length: int

    @staticmethod
    def empty(layer: MultiHeadAttention, batch: int, capacity: int) -> PreallocatedCache:
        """Room for `capacity` tokens, on the layer's device and in its dtype."""
        return PreallocatedCache(*_room(layer, batch, capacity), length=0)

    @property
    def k(self) -> Keys:
        """The keys so far: a view of the buffer."""
        return self.k_buffer[:, :, : self.length]

    @property
    def v(self) -> Values:
        """The values so far: a view of the buffer."""
        return self.v_buffer[:, :, : self.length]

    def extended(self, k: Keys, v: Values) -> PreallocatedCache:
        """The state with new tokens behind it. Raises `ValueError` where they do not fit."""
        end, capacity = self.length + k.shape[2], self.k_buffer.shape[2]
        if end > capacity:
            raise ValueError(f"the cache must have room for its tokens, got {end} for a capacity of {capacity}")
        self.k_buffer[:, :, self.length : end] = k
        self.v_buffer[:, :, self.length : end] = v
        return self._replace(length=end)


CACHES: Mapping[str, Callable[[MultiHeadAttention, int, int], Past]] = {
    "concat": ConcatCache.empty,
    "preallocated": PreallocatedCache.empty,
}
"""An empty cache by the name that the command line uses: `(layer, batch, capacity)`."""


def _room(layer: MultiHeadAttention, batch: int, length: int) -> tuple[Tensor, Tensor]:
    like = layer.k_proj.weight
    shapes = [(batch, layer.n_kv_heads, length, width) for width in (layer.d_head, layer.d_v)]
    k, v = (torch.zeros(shape, dtype=like.dtype, device=like.device) for shape in shapes)
    return k, v
