"""The sizes of a run, known before its first tensor, and the cost of a decoding step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from mhacli.settings import ITEM_BYTES, Config
from mhacli.text.tokens import TokenSequence


@dataclass(frozen=True)
class Facts:
    """A resolved config, the lengths, and properties of the text.

    `cross`: keys come from another text. `padded`: sequences differ in length. `packed`: a row holds several documents.
    `n_tokens` is the size of the vocabulary.
    """

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
        """The facts of these sequences under a resolved config."""
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
        """The size of every axis by name."""
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
        """The axis name for the width of the layer's input: `d_input` only if it differs from `d_model`."""
        return "d_model" if self.sizes["d_input"] == self.config.d_model else "d_input"

    @property
    def has_separate_positions(self) -> bool:
        """Whether sequences count positions separately: left padding or packing shifts their beginnings."""
        return self.packed or (self.padded and self.config.padding == "left")

    def size(self, axis: str) -> int:
        """The size of an axis: `·` joins axes that are merged (product), `+` joins axes side by side (sum).

        >>> Facts(Config(d_model=12, n_heads=3, d_head=4), batch=2, q_len=5, k_len=5).size("head·d_head")
        12
        """
        return sum(prod(self.sizes[word] for word in part.split("·")) for part in axis.split("+"))

    def cells(self) -> int:
        """The number of (batch, head, query, key) cells."""
        return self.batch * self.config.n_heads * self.q_len * self.k_len


# --------------------------------------------------------------------------------------------- cost of a decoding step


CacheKind = Literal["none", "concat", "preallocated"]


def projection_parameters(config: Config) -> int:
    """The number of parameters in the projections of a resolved config, biases included."""
    return sum(width * n_in + (width if config.bias else 0) for n_in, width in _projections(config))


def weight_bytes(config: Config) -> int:
    """The bytes of the projections. Every step reads them once, whatever the length."""
    return projection_parameters(config) * ITEM_BYTES[config.dtype]


def token_bytes(config: Config, n_kv_heads: int | None = None) -> int:
    """The bytes of one token's keys and values: `n_kv_heads · (d_head + d_v)` numbers."""
    heads = n_kv_heads or config.n_kv_heads or config.n_heads
    return heads * ((config.d_head or 0) + (config.d_v or 0)) * ITEM_BYTES[config.dtype]


def crossing_len(config: Config, batch: int) -> float:
    """The length at which a step reads as many bytes of keys and values as of weights."""
    return weight_bytes(config) / (batch * token_bytes(config))


def step_flops(config: Config, *, batch: int, n_new: int, length: int, cache: CacheKind) -> int:
    """The operations of one step's matrix products and their biases.

    2 per weight and projected vector, 1 per bias, and `2·(d_head + d_v)` per head, query and key. Scale, softmax and
    positions are few and left out. Without a cache all tokens are projected and all cells computed, masked ones
    included, as in the explicit computation.
    """
    rows = length if cache == "none" else n_new
    per_cell = 2 * config.n_heads * ((config.d_head or 0) + (config.d_v or 0))
    return batch * rows * (row_flops(config) + per_cell * length)


def row_flops(config: Config) -> int:
    """The operations of projecting one token vector and its result: 2 per weight, 1 per bias."""
    return sum(2 * width * n_in + (width if config.bias else 0) for n_in, width in _projections(config))


def moved_bytes(config: Config, *, batch: int, n_new: int, length: int, cache: CacheKind) -> int:
    """The bytes of keys and values that one step reads and writes.

    `none` writes all of them again and reads them once. `concat` reads the old ones, writes old and new, and reads all.
    `preallocated` writes the new ones and reads all.
    """
    tokens = {"none": 2 * length, "concat": 3 * length - n_new, "preallocated": length + n_new}
    return batch * tokens[cache] * token_bytes(config)


def total_moved_bytes(config: Config, *, batch: int, length: int, cache: CacheKind) -> int:
    """The sum of `moved_bytes` over steps of one token, from 1 to `length`."""
    pairs = length * (length + 1) // 2
    tokens = {"none": 2 * pairs, "concat": 3 * pairs - length, "preallocated": pairs + length}
    return batch * tokens[cache] * token_bytes(config)


def _projections(config: Config) -> list[tuple[int, int]]:
    d_input, d_head, d_v = config.d_input or config.d_model, config.d_head or 0, config.d_v or 0
    n_kv_heads = config.n_kv_heads or config.n_heads
    widths = [(d_input, config.n_heads * d_head), (d_input, n_kv_heads * d_head), (d_input, n_kv_heads * d_v)]
    return widths + ([(config.n_heads * d_v, config.d_model)] if config.out_proj else [])
