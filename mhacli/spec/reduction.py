"""How the kernel for statistics of heads is laid out on a GPU: the order of its sums, and the memory that it takes."""

from __future__ import annotations

from typing import NamedTuple


class Launch(NamedTuple):
    """Queries and keys of a tile (powers of two, as many keys as queries at least), and the warps of a program."""

    queries: int
    keys: int
    warps: int = 4


MAX_HEAD = 256
"""The widest head whose tiles fit a multiprocessor's memory."""
_WIDE = 128
"""Numbers of a head in 16 bits that leave registers for a large tile."""
PARTIAL_BYTES, ADDED_BYTES = 1 << 30, 1 << 28
"""At most, of the sums of all programs, and of what is added to the scores of a strip of queries."""
_ADDED_COPIES, _MAP_CELLS = 3, 1 << 20
"""Of what is added, while it is put together; cells of a head's map, before they are summed to larger ones."""
DEVICE_TILE = 2048, 8192
"""Queries and keys of a tile of torch on a device, where a call must bring enough work to fill it."""
_PROGRAMS = 1024
"""Some for each multiprocessor of the largest devices. A fixed number, because it decides the order of summation."""
ROWS, _COLUMNS, IDS = 9, 2, 6
"""Statistics of each query, and of each key; ids of a query and a key together."""


def launch_for(item_bytes: int, d_head: int) -> Launch:
    """The layout for heads of this width and bytes per number. It is fixed and not tuned on the device, because another one would
    sum in another order. Of seven layouts these spill the fewest registers on devices of capability 8.0 and 9.0."""
    return Launch(64, 64, 8) if item_bytes == 2 and d_head <= _WIDE else Launch(32, 32)


def n_programs(launch: Launch, heads: int, n_queries: int, n_keys: int) -> int:
    """How many programs share a head, where so many heads of all sequences are reduced together."""
    affordable = PARTIAL_BYTES // (heads * _partial_bytes(n_queries, n_keys))
    return max(1, min(-(-n_queries // launch.queries), -(-_PROGRAMS // heads), affordable))


def device_bytes(
    *, batch: int, n_heads: int, n_queries: int, n_keys: int, wide: int = 4, has_bias: bool = False
) -> int:
    """What the reduction of a layer's heads takes on a GPU at most, beside its result: the tiles of torch or the sums of the
    kernel, whichever are more, masks, and what is added to scores. Numbers of the sums have `wide` bytes."""
    heads = batch * n_heads
    rows, columns = min(DEVICE_TILE[0], n_queries), min(DEVICE_TILE[1], n_keys)
    padded = rows * (rows + columns + 1)  # weights, and two planes of equal cells, among zeros
    tiles = wide * (rows * columns + 3 * padded)
    masks = 2 * batch * wide * rows * columns
    added = _ADDED_COPIES * min(ADDED_BYTES, 4 * heads * n_queries * n_keys) if has_bias else 0
    return max(tiles, _kernel_bytes(heads, n_queries, n_keys)) + masks + added


def _kernel_bytes(heads: int, n_queries: int, n_keys: int) -> int:
    """Of the sums of all programs and what torch makes of them, of the map, and of ids, in the smallest layout."""
    partial = _partial_bytes(n_queries, n_keys)
    blocks = -(-n_queries // launch_for(4, 1).queries)
    programs = max(heads, min(heads * blocks, _PROGRAMS + heads, PARTIAL_BYTES // partial))
    per_row = ROWS + 4
    return (
        (programs + heads) * partial
        + 4 * heads * (_MAP_CELLS + per_row * n_queries)
        + 4 * IDS * heads * (n_queries + n_keys)
    )


def _partial_bytes(n_queries: int, n_keys: int) -> int:
    """Of the sums of one program and head: per key, and per distance."""
    return 4 * (_COLUMNS * n_keys + n_queries + n_keys - 1)
