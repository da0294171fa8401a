"""What a command computes: the settings, the sizes of the texts, what is kept of the result, and
the memory of all that. Known before torch is loaded.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from mhacli.errors import MhaError, UsageError, out_of_range
from mhacli.io import memory
from mhacli.numbers import shown
from mhacli.record.heads import Kept
from mhacli.record.sites import SITES, WAVES_AT_ONCE, Dims
from mhacli.record.weights_file import expected_shapes
from mhacli.settings import DEFAULT_KEEP_LIMIT, ITEM_BYTES, Config, ModelSettings, Statistics

if TYPE_CHECKING:
    from mhacli.io.safetensors import TensorFile
    from mhacli.models.folder import Checkpoint
    from mhacli.text.spans import Message

KEPT = ("pattern", "z", "scores", "qk")
"""The matrices of a layer of a checkpoint that can be kept, the most important first."""
DEFAULT_KEEP = ("pattern", "out", "z", "scores", "qk")
"""The arrays that a record keeps by default, the most important first."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The settings and what to compute, of a layer of mha or of a checkpoint (`model.path`).

    A layer reads texts of these sizes (`dims`) under a resolved config, with weights of a file or
    of the config's seed; the ids are those of the `vocabulary`. A checkpoint reads `texts`, or a
    `chat` in place of one; `pair` are the second texts of pairs, `context` is the input of an
    encoder, `spans` are named parts of the text as typed, and `n_generated` tokens are generated
    greedily. `max_tokens` truncates texts; without it, longer texts are refused. Its folder is the
    `checkpoint`, if it is read already.

    `keep` are the arrays to keep, within `keep_limit` bytes; None keeps as many as fit. `also` are
    arrays to keep besides, and `kept` cells of long texts. `repeat` is the number of timed runs.
    `notes` are for the user.
    """

    dims: Dims = Dims(Config(), batch=0, q_len=0, k_len=0)
    vocabulary: tuple[str, ...] = ()
    weights: TensorFile | None = None
    model: ModelSettings = ModelSettings()
    checkpoint: Checkpoint | None = None
    texts: tuple[str, ...] = ()
    pair: tuple[str, ...] = ()
    context: tuple[str, ...] = ()
    chat: tuple[Message, ...] = ()
    spans: tuple[str, ...] = ()
    n_generated: int = 0
    max_tokens: int | None = None
    statistics: Statistics = Statistics()
    keep: tuple[str, ...] | None = None
    keep_limit: int = DEFAULT_KEEP_LIMIT
    also: tuple[str, ...] = ()
    kept: Kept = Kept()
    repeat: int | None = None
    allow_nonfinite: bool = False
    notes: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The path or id of the checkpoint."""
        assert self.model.path is not None, "a layer of mha has no checkpoint"
        return self.model.path

    @property
    def config(self) -> Config:
        """The resolved config of a layer."""
        return self.dims.config

    def arrays_to_keep(self, dims: Dims) -> tuple[dict[str, int], tuple[str, ...]]:
        """The arrays of a layer that fit into the limit with their bytes, and the names of the
        others: all of `keep`, or as many of `DEFAULT_KEEP` and `also` as fit.

        Raises `UsageError` for an unknown site, and `MhaError` if `keep` does not fit.
        """
        names = self.keep
        if names is None:
            names = (*DEFAULT_KEEP, *(["dropped"] if dims.config.train else []), *self.also)
        kept = dict[str, int]()
        for name in names:
            if name not in SITES:
                raise UsageError(
                    f"--keep: {name!r} is not a site", hint=f"sites: {' '.join(SITES)}"
                )
            n_bytes = prod(SITES[name].shape_for(dims)) * dims.item_bytes
            if self.keep is not None or sum(kept.values()) + n_bytes <= self.keep_limit:
                kept[name] = n_bytes
        total = sum(kept.values())
        if total > self.keep_limit:
            limit = shown(self.keep_limit, "bytes")
            raise MhaError(
                (
                    f"--keep {','.join(kept)} takes {shown(total, 'bytes')}, above the limit of"
                    f" {limit}"
                ),
                hint=f"--keep-limit {-(-total >> 20)}M raises the limit; --keep pattern takes less",
                code="too-large",
            )
        return kept, tuple(name for name in names if name not in kept)


CellIndex = tuple[int, int, int, int]
"""A cell of the pattern by sequence, head, query and key."""


def require_inside(
    place: CellIndex, n_heads: int, queries: Sequence[Sequence[int]], keys: Sequence[Sequence[int]]
) -> None:
    """Raises `UsageError` for a cell outside of the patterns of texts with these ids."""
    sequence, *cell = place
    if sequence >= len(queries):
        raise UsageError(out_of_range("--sequence", sequence, len(queries)))
    counts = {"head": n_heads, "query": len(queries[sequence]), "key": len(keys[sequence])}
    for index, (name, count) in zip(cell, counts.items(), strict=True):
        if index >= count:
            raise UsageError(
                out_of_range(f"--cell {','.join(map(str, cell))}: {name}", index, count)
            )


# ------------------------------------------------------------------ memory, before the first tensor

BASE_BYTES = 300 << 20
"""A generous bound of the memory of Python and torch before the first tensor."""
VECTORS = 16
"""A bound for head statistics: the numbers per head, query and key."""
SMALL_BUFFERS = 32 << 20
"""A bound of the bytes of their small buffers."""
_BLOCK_CELLS = {"c": 1 << 22, "cpu": 1 << 20}
"""Cells of a block of queries with all their keys: in the compiled block, which keeps nothing else,
and in torch's."""
_DEVICE_CELLS = 1 << 25
"""Cells of all heads of a block elsewhere."""
_MAX_ROWS = 256
"""The largest number of queries of a block on a CPU."""
_MIN_ROWS = 16
_PER_CELL = 14
"""A bound of the numbers per cell of a block: scores and weights, both in float64, planes of 0 and
1, a bias."""
_PER_CELL_OF_C = 4
_MASK_PER_CELL = 4
"""A bound of the bytes of masks per cell and sequence."""
FLOAT32_BYTES = 4
MAX_ALIVE = 512 << 20
"""The bytes of queries, keys, values and z that may be kept until a device is waited for."""


def require_room(
    needed: Callable[[int], int],
    length: int,
    available: int,
    *,
    what: str,
    shorter: str = "--max-tokens {}",
) -> int:
    """The bytes that a text of `length` tokens needs. Raises `MhaError`, with the longest text that
    fits as an option, if they are more than 80 % of the available ones.
    """
    if memory.fits(needed(length), available):
        return needed(length)
    longest = bisect_left(
        range(1, length), True, key=lambda n: not memory.fits(needed(n), available)
    )
    message = (
        f"out of memory; {what}: {shown(needed(length), 'bytes')} needed,"
        f" {shown(available, 'bytes')} available"
    )
    hint = "a shorter text or a smaller model needs less"
    if longest:
        hint = f"{shorter.format(longest)} fits"
    raise MhaError(message, hint=hint, code="out-of-memory")


def statistics_bytes(
    batch: int, n_heads: int, shape: tuple[int, int], *, wide: int, on_gpu: bool
) -> int:
    """Bytes for the statistics of heads over `shape` queries and keys: those of each query and key,
    and the blocks of all threads.
    """
    n_queries, n_keys = shape
    vectors = batch * (n_heads + 1) * (n_queries + n_keys) * VECTORS * wide
    per_cell_of = {"cpu": _PER_CELL, "c": _PER_CELL_OF_C}
    if on_gpu:
        per_cell_of = {"cuda": _PER_CELL}
    of_blocks = 0
    for kind, per_cell in per_cell_of.items():
        cells = n_keys * min(n_queries, rows_of_block(n_keys, kind))
        at_once = heads_at_once(cells, is_cpu=False) if on_gpu else os.cpu_count() or 1
        n_blocks = min(n_heads, at_once)
        per_block = cells * (per_cell * wide + _MASK_PER_CELL * batch)
        of_blocks = max(of_blocks, n_blocks * per_block)
    return SMALL_BUFFERS + vectors + of_blocks


def rows_of_block(n_keys: int, kind: str) -> int:
    """How many queries are reduced together with all their keys, by `c` or on a device: fewer where
    a text is long.

    >>> [rows_of_block(n_keys, "cpu") for n_keys in (100, 4096, 8192, 1 << 20)]
    [256, 256, 128, 16]
    """
    n_fitting = _BLOCK_CELLS.get(kind, _DEVICE_CELLS) // max(1, n_keys)
    most = _MAX_ROWS if kind in _BLOCK_CELLS else 2 * _MAX_ROWS
    return max(_MIN_ROWS, min(most, 1 << max(0, n_fitting.bit_length() - 1)))


def heads_at_once(n_cells: int, *, is_cpu: bool) -> int:
    """How many heads are reduced together in a block of so many cells: one by each thread of a
    CPU.
    """
    return 1 if is_cpu else max(1, _DEVICE_CELLS // max(1, n_cells))


def cells_at_once(kind: str) -> int:
    """How many cells are computed again together, by torch on a kind of device: as many as the
    caches of a CPU hold with their keys and values.
    """
    return 1 << 17 if kind == "cpu" else 1 << 22


# ----------------------------------------------------------------------------------- a layer of mha


def require_memory(
    run: Run, available: int | None = None, *, has_matrices: bool = True, on_gpu: bool = False
) -> int:
    """The predicted peak of a layer's run in bytes, with matrices or as head statistics without.
    Raises `MhaError` as `require_room` and `Run.arrays_to_keep` do. `available` is by default that
    of this machine, for a run on its CPU.
    """
    dims, config, kept = run.dims, run.config, run.kept
    if available is None and config.device not in ("auto", "cpu"):
        return 0
    item, wide = ITEM_BYTES[config.dtype], dims.item_bytes
    bias_bytes = 0 if config.score_bias is None else 2 * wide
    n_heads = config.n_heads if run.statistics.heads is None else len(run.statistics.heads)
    counts = [prod(shape) for shape in expected_shapes(config, dims.n_tokens).values()]
    # weights as float32 and in their dtype, and the float64 draw of the largest
    per_weight = FLOAT32_BYTES if item == FLOAT32_BYTES else FLOAT32_BYTES + item
    weights = sum(counts) * per_weight + 16 * max(counts)
    widths = 4 * dims.size("d_model") + 4 * dims.size("head·d_head") + 6 * dims.size("head·d_v")

    def needed(n: int) -> int:
        shorter = replace(dims, q_len=min(n, dims.q_len), k_len=min(n, dims.k_len))
        batch = shorter.batch
        q_len, k_len = shorter.q_len, shorter.k_len
        # token vectors (content, sum, mask of padding), projections, rotations and joined heads
        read = batch * (q_len + (k_len if dims.cross else 0)) * dims.size("d_input")
        total = BASE_BYTES + weights + (batch * (q_len + k_len) * widths + 3 * read) * item
        # made in float64 and then rounded
        if config.random is not None or config.positions == "sinusoidal":
            total += 2 * read * wide + 40 * min(read, WAVES_AT_ONCE)
        # the kept arrays, those of `attend`, a bias or distances with the integers behind them, and
        # the mask
        if has_matrices:
            of_cell = item + 4 * wide + bias_bytes
            if config.positions == "alibi":
                of_cell += wide + 16
            arrays, _ = run.arrays_to_keep(shorter)
            return total + sum(arrays.values()) + shorter.cells() * of_cell + batch * q_len * k_len
        # a bias and its copy without −∞; kept cells exist as tensors, as arrays, and once more
        # while they are assembled
        corner = kept.corner
        cells = 0 if corner is None else min(corner.n_queries, q_len) * min(corner.n_keys, k_len)
        total += batch * n_heads * (4 * cells + 8 * len(kept.queries) * min(kept.top, k_len)) * wide
        total += shorter.cells() * bias_bytes
        return total + statistics_bytes(batch, n_heads, (q_len, k_len), wide=wide, on_gpu=on_gpu)

    return require_room(
        needed,
        max(dims.q_len, dims.k_len),
        memory.available_bytes() if available is None else available,
        what=f"{dims.q_len} × {dims.k_len} tokens, {config.n_heads} heads, batch {dims.batch}",
        shorter="--max-tokens {}" if config.random is None else f"--random {dims.batch},{{}}",
    )
