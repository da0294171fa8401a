"""What a step of decoding costs, by formula: operations of its products and biases, bytes of what is kept.

Bytes are those of a kernel that reads each kv head once; the explicit computation here copies more on the way. T is the
length with the new tokens.
"""

from __future__ import annotations

from typing import Literal

from mhacli.spec.config import ITEM_BYTES, Config

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
