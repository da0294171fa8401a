"""The layout of the GPU kernel for head statistics: the order of its sums, and its memory."""

from __future__ import annotations

from typing import NamedTuple


class Launch(NamedTuple):
    """Queries and keys per tile (powers of two, no fewer keys than queries), and warps per program."""

    queries: int
    keys: int
    warps: int = 4


MAX_HEAD = 256
"""The widest head whose tiles fit into a multiprocessor's memory."""
_WIDE = 128
"""The widest head in 16 bits that leaves registers for a large tile."""
PARTIAL_BYTES, ADDED_BYTES = 1 << 30, 1 << 28
"""Upper bounds: the sums of all programs, and the additive bias for a strip of queries."""
_ADDED_COPIES, _MAP_CELLS = 3, 1 << 20
"""Copies of the additive bias while it is built; cells of a head's map before pooling."""
CPU_TILE, DEVICE_TILE = (256, 4096), (512, 8192)
"""Queries and keys of a torch tile: the best of several on a CPU, and large enough to keep a GPU busy. Longer texts have wider
tiles of fewer queries."""
TILES_AT_ONCE, _FEWEST = 2, 16
"""Tiles in memory at once, which hold all keys of some queries; and the fewest queries of a tile."""
_COPIES = 4
"""Logarithms, weights, and two planes of equal tokens, each as large as a tile."""
_PROGRAMS = 1024
"""Several programs per multiprocessor of the largest GPUs. Fixed, because the number decides the order of summation."""
ROWS, IDS = 9, 6
"""Statistics per query, and ids per query and key."""


def queries_at_once(tile: tuple[int, int], n_keys: int) -> int:
    """The number of queries of a tile for a text of `n_keys` keys.

    >>> [queries_at_once((256, 4096), n_keys) for n_keys in (100, 8192, 16384, 1 << 20)]
    [256, 256, 128, 16]
    """
    queries, keys = tile
    n = queries
    while n * n_keys > TILES_AT_ONCE * queries * keys and n > _FEWEST:
        n //= 2
    return n


def tile_bytes(tile: tuple[int, int], n_queries: int, n_keys: int, wide: int = 4) -> int:
    """Bytes of the tiles that one thread holds, with the zeros beside them."""
    n = min(n_queries, queries_at_once(tile, n_keys))
    return _COPIES * wide * n * (n_keys + TILES_AT_ONCE * (n + 1))


def launch_for(item_bytes: int, d_head: int) -> Launch:
    """The layout for heads of this width and bytes per number.

    It is fixed rather than tuned on the device, because another layout would sum in another order. Of seven layouts,
    these spill the fewest registers on devices of capability 8.0 and 9.0.
    """
    return Launch(64, 64, 8) if item_bytes == 2 and d_head <= _WIDE else Launch(32, 32)


def n_programs(launch: Launch, heads: int, n_queries: int, n_keys: int) -> int:
    """The number of programs per head, when `heads` heads of all sequences are reduced together."""
    affordable = PARTIAL_BYTES // (heads * _partial_bytes(n_queries, n_keys))
    return max(1, min(-(-n_queries // launch.queries), -(-_PROGRAMS // heads), affordable))


def device_bytes(
    *, batch: int, n_heads: int, n_queries: int, n_keys: int, wide: int = 4, has_bias: bool = False
) -> int:
    """An upper bound of the GPU memory for reducing a layer's heads, without the result.

    It counts the larger of torch's tiles and the kernel's sums, plus masks and the additive bias. Sums take `wide`
    bytes each.
    """
    heads = batch * n_heads
    tiles = tile_bytes(DEVICE_TILE, n_queries, n_keys, wide)
    masks = 2 * batch * wide * min(n_queries, queries_at_once(DEVICE_TILE, n_keys)) * n_keys
    added = _ADDED_COPIES * min(ADDED_BYTES, 4 * heads * n_queries * n_keys) if has_bias else 0
    return max(tiles, _kernel_bytes(heads, n_queries, n_keys)) + masks + added


def _kernel_bytes(heads: int, n_queries: int, n_keys: int) -> int:
    """Bytes for the sums of all programs, their reduction, the map and the ids, in the smallest layout."""
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
    """Bytes for the sums of one program and head, per key and per distance."""
    return 4 * (n_keys + n_queries + n_keys - 1)
