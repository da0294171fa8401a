"""What formulas, counts and shapes of a run depend on, known before its first tensor; what a step of decoding costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from mhacli.spec.config import ITEM_BYTES, Config
from mhacli.spec.tokens import TokenSequence


@dataclass(frozen=True)
class Facts:
    """A resolved config, the lengths, and what the text brings: keys from another text (`cross`), sequences shorter than
    others (`padded`), several documents in a row (`packed`), and the size of the vocabulary."""

    config: Config
    batch: int
    q_len: int
    k_len: int
    cross: bool = False
    padded: bool = False
    packed: bool = False
    n_tokens: int = 0

    @staticmethod
    def of(
        config: Config, sequences: Sequence[TokenSequence], context: Sequence[TokenSequence] | None, *, n_tokens: int
    ) -> Facts:
        """The facts of these tokens under a resolved config."""
        families = (sequences, sequences if context is None else context)
        q_len, k_len = (max(len(s.tokens) for s in family) for family in families)
        return Facts(
            config,
            len(sequences),
            q_len,
            k_len,
            cross=context is not None,
            padded=any(len(s.tokens) < n for f, n in zip(families, (q_len, k_len), strict=True) for s in f),
            packed=any(len(set(s.documents)) > 1 for family in families for s in family),
            n_tokens=n_tokens,
        )

    @property
    def sizes(self) -> Mapping[str, int]:
        """The size of every axis word of the house."""
        config = self.config
        return {
            "batch": self.batch,
            "query": self.q_len,
            "key": self.k_len,
            "head": config.n_heads,
            "kv_head": config.n_kv_heads or config.n_heads,
            "d_head": config.d_head or 0,
            "d_v": config.d_v or 0,
            "d_model": config.d_model,
            "d_input": config.d_input or config.d_model,
        }

    @property
    def input_axis(self) -> str:
        """The word for the width of what the projections read: `d_input` only where it differs from `d_model`."""
        return "d_model" if self.sizes["d_input"] == self.config.d_model else "d_input"

    @property
    def own_places(self) -> bool:
        """Whether sequences count their positions apart: padded on the left, or packed, they do not begin together."""
        return self.packed or (self.padded and self.config.padding == "left")

    def size(self, axis: str) -> int:
        """The size of an axis, where `·` joins words that share it (product) and `+` what lies side by side (sum).

        >>> Facts(Config(d_model=12, n_heads=3, d_head=4), batch=2, q_len=5, k_len=5).size("head·d_head")
        12
        """
        return sum(prod(self.sizes[word] for word in part.split("·")) for part in axis.split("+"))

    def cells(self) -> int:
        """How many (batch, head, query, key) cells there are."""
        return self.batch * self.config.n_heads * self.q_len * self.k_len


# ----------------------------------------------------------------------------------------- costs of a step of decoding


CacheKind = Literal["none", "concat", "preallocated"]


def projection_parameters(config: Config) -> int:
    """Numbers in the projections of a resolved config, biases included."""
    return sum(width * n_in + (width if config.bias else 0) for n_in, width in _projections(config))


def weight_bytes(config: Config) -> int:
    """Bytes of the projections: every step reads them once, whatever the length."""
    return projection_parameters(config) * ITEM_BYTES[config.dtype]


def token_bytes(config: Config, n_kv_heads: int | None = None) -> int:
    """Bytes of one token's keys and values: `n_kv_heads · (d_head + d_v)` numbers."""
    heads = n_kv_heads or config.n_kv_heads or config.n_heads
    return heads * ((config.d_head or 0) + (config.d_v or 0)) * ITEM_BYTES[config.dtype]


def crossing_len(config: Config, batch: int) -> float:
    """The length at which a step reads as many bytes of keys and values as of weights: below it weights weigh more."""
    return weight_bytes(config) / (batch * token_bytes(config))


def step_flops(config: Config, *, batch: int, n_new: int, length: int, cache: CacheKind) -> int:
    """Operations of one step's matrix products, and of their biases: 2 per weight and row that is projected and 1 per bias, and
    `2·(d_head + d_v)` per head, query and key. Scale, softmax and positions are left out: they are few.

    Without a cache all rows are projected and all meet all, masked cells too, as the explicit computation does.
    """
    rows = length if cache == "none" else n_new
    per_cell = 2 * config.n_heads * ((config.d_head or 0) + (config.d_v or 0))
    return batch * rows * (row_flops(config) + per_cell * length)


def row_flops(config: Config) -> int:
    """Operations of projecting one row, and its result: 2 per weight, 1 per bias."""
    return sum(2 * width * n_in + (width if config.bias else 0) for n_in, width in _projections(config))


def moved_bytes(config: Config, *, batch: int, n_new: int, length: int, cache: CacheKind) -> int:
    """Bytes of keys and values that one step reads and writes.

    `none` writes all of them anew and reads them once; `concat` reads what is old, writes old and new, and reads all;
    `preallocated` writes what is new, and reads all.
    """
    tokens = {"none": 2 * length, "concat": 3 * length - n_new, "preallocated": length + n_new}
    return batch * tokens[cache] * token_bytes(config)


def total_moved_bytes(config: Config, *, batch: int, length: int, cache: CacheKind) -> int:
    """The sum of `moved_bytes` over steps of one token, from 1 to `length`."""
    pairs = length * (length + 1) // 2
    tokens = {"none": 2 * pairs, "concat": 3 * pairs - length, "preallocated": pairs + length}
    return batch * tokens[cache] * token_bytes(config)


def _projections(config: Config) -> list[tuple[int, int]]:
    """(inputs, outputs) of each projection."""
    d_input, d_head, d_v = config.d_input or config.d_model, config.d_head or 0, config.d_v or 0
    n_kv_heads = config.n_kv_heads or config.n_heads
    widths = [(d_input, config.n_heads * d_head), (d_input, n_kv_heads * d_head), (d_input, n_kv_heads * d_v)]
    return widths + ([(config.n_heads * d_v, config.d_model)] if config.out_proj else [])
