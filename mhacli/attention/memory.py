"""The predicted memory of a run before its first tensor, and the arrays that its record has room for."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from mhacli.attention.tiled.reduction import CPU_TILE, device_bytes, tile_bytes
from mhacli.attention.weights_file import expected_shapes
from mhacli.errors import MhaError, UsageError
from mhacli.io import memory
from mhacli.io.files import format_size
from mhacli.settings import DEFAULT_KEEP_LIMIT, ITEM_BYTES, ROPE
from mhacli.sites import SITES, WAVES_AT_ONCE, Facts

if TYPE_CHECKING:
    from mhacli.run import Run

DEFAULT_KEEP = ("pattern", "out", "z", "scores", "qk")
"""The arrays that a record keeps by default, the most important first."""
BASE_BYTES = 300 << 20
"""A generous bound of the memory of Python and torch before the first tensor."""
VECTORS, _AROUND_TILES = 16, 32 << 20
"""Upper bounds for head statistics: numbers per query and key, and bytes of small buffers."""
LEAST_ROWS = 3
"""The rows of the smallest batch of removals: one removal and an untouched row on either side."""
FLOAT32_BYTES, _FLOAT64_BYTES, _INT64_BYTES = 4, 8, 8


def require_room(
    needed: Callable[[int], int], length: int, available: int, *, what: str, shorter: str = "--max-tokens {}"
) -> int:
    """The bytes that a text of `length` tokens needs. Raises `MhaError`, with the longest text that fits as an option, if they
    are more than 80 % of the available ones."""
    if memory.fits(needed(length), available):
        return needed(length)
    longest = bisect_left(range(1, length), True, key=lambda n: not memory.fits(needed(n), available))
    raise MhaError(
        f"out of memory; {what}: {format_size(needed(length))} needed, {format_size(available)} available",
        hint=f"{shorter.format(longest)} fits" if longest else "a shorter text or a smaller model needs less",
        code="out-of-memory",
    )


# ----------------------------------------------------------------------------------------------------- a layer of mha


@dataclass(frozen=True)
class Plan:
    """The arrays to keep, those left out by the size limit, and the predicted peak in bytes."""

    keep: tuple[str, ...]
    not_kept: tuple[str, ...]
    peak_bytes: int


def make_plan(
    facts: Facts, keep: Sequence[str] | None, keep_limit: int = DEFAULT_KEEP_LIMIT, *, also: Sequence[str] = ()
) -> Plan:
    """The arrays that fit into `keep_limit` bytes: all of `keep`, or as many of `DEFAULT_KEEP` and `also` as fit.

    Raises `UsageError` for an unknown site, and `MhaError` if `keep` does not fit.
    """
    names = (*DEFAULT_KEEP, *(["dropped"] if facts.config.train else []), *also) if keep is None else keep
    kept, total = dict[str, int](), 0
    for name in names:
        if name not in SITES:
            raise UsageError(f"--keep: {name!r} is not a site", hint=f"sites: {' '.join(SITES)}")
        n_bytes = prod(SITES[name].shape_for(facts)) * max(FLOAT32_BYTES, ITEM_BYTES[facts.config.dtype])
        if keep is not None or total + n_bytes <= keep_limit:
            kept[name] = n_bytes
            total = sum(kept.values())
    if total > keep_limit:
        raise MhaError(
            f"--keep {','.join(kept)} takes {format_size(total)}, above the limit of {format_size(keep_limit)}",
            hint=f"--keep-limit {-(-total >> 20)}M raises the limit; --keep pattern takes less",
            code="too-large",
        )
    return Plan(tuple(kept), tuple(name for name in names if name not in kept), _peak_bytes(facts, total))


def require_layer_room(
    facts: Facts, keep: Sequence[str] | None, keep_limit: int, available: int, *, also: Sequence[str] = ()
) -> None:
    """Raises `MhaError` as `require_room` does for the run of a layer, or as `make_plan`."""
    _predicted(facts, available, lambda other: make_plan(other, keep, keep_limit, also=also).peak_bytes)


def predict_heads_memory(facts: Facts, run: Run, available: int | None = None, *, on_gpu: bool = False) -> int:
    """The predicted peak in bytes of head statistics without matrices, on a GPU or the CPU. Raises `MhaError` as `require_room`
    does."""
    room = memory.available_bytes() if available is None else available
    return _predicted(facts, room, lambda other: _heads_bytes(other, run, on_gpu=on_gpu))


def _predicted(facts: Facts, available: int, needed: Callable[[Facts], int]) -> int:
    return require_room(
        lambda n: needed(replace(facts, q_len=min(n, facts.q_len), k_len=min(n, facts.k_len))),
        max(facts.q_len, facts.k_len),
        available,
        what=f"{facts.q_len} × {facts.k_len} tokens, {facts.config.n_heads} heads, batch {facts.batch}",
        shorter="--max-tokens {}" if facts.config.random is None else f"--random {facts.batch},{{}}",
    )


def _peak_bytes(facts: Facts, kept_bytes: int) -> int:
    """Bytes for kept arrays, the matrices of `attend`, additive terms of scores, and token vectors: the input (content, sum, mask
    of padding), projections, and joined heads."""
    config, item, wide = facts.config, ITEM_BYTES[facts.config.dtype], _wide(facts)
    matrices = facts.cells() * (item + 4 * wide) + facts.batch * facts.q_len * facts.k_len
    added = 2 * facts.cells() * wide if config.score_bias is not None else 0
    if config.positions == "alibi":  # distances, with the integers behind them
        planes = (facts.batch if facts.has_separate_positions else 1) * facts.q_len * facts.k_len
        added += planes * (config.n_heads * wide + 2 * _INT64_BYTES)
    widths = facts.size("d_model") * 4 + facts.size("head·d_head") * 4 + facts.size("head·d_v") * 6
    read = (facts.q_len + (facts.k_len if facts.cross else 0)) * facts.size("d_input") * 3
    rows = facts.batch * ((facts.q_len + facts.k_len) * widths + read) * item
    return BASE_BYTES + kept_bytes + matrices + added + rows + _float64_bytes(facts) + _weight_bytes(facts)


def _heads_bytes(facts: Facts, run: Run, *, on_gpu: bool) -> int:
    """The peak of head statistics: the largest of input, projection and reduction.

    Rotation holds a few wide copies of the queries. A score bias is kept whole, beside a copy without −∞. Kept cells
    exist as tensors, as arrays, and once more while they are assembled.
    """
    item, batch, wide = ITEM_BYTES[facts.config.dtype], facts.batch, _wide(facts)
    rows = 3 * batch * (facts.q_len + (facts.k_len if facts.cross else 0)) * facts.size("d_input") * item
    queries = batch * facts.q_len * facts.size("head·d_head")
    heads = queries * item + batch * facts.k_len * facts.size("kv_head·d_head+kv_head·d_v") * item
    rotated = 3 * queries * wide + queries * item if facts.config.positions in ROPE else 0
    chosen, kept = run.statistics.heads, run.kept
    n_heads = facts.config.n_heads if chosen is None else len(chosen)
    cells = 0 if kept.corner is None else min(kept.corner.n_queries, facts.q_len) * min(kept.corner.n_keys, facts.k_len)
    cells = batch * n_heads * (4 * cells + 8 * len(kept.queries) * min(kept.top, facts.k_len)) * wide
    vectors = batch * (n_heads + 1) * (facts.q_len + facts.k_len) * VECTORS * wide
    bias = 2 * facts.cells() * wide if facts.config.score_bias is not None else 0
    tiles = _tiles(
        batch, n_heads, (facts.q_len, facts.k_len), wide=wide, on_gpu=on_gpu,
        has_bias=facts.config.score_bias is not None or facts.config.positions == "alibi",
    )  # fmt: skip
    tiles += 3 * wide * batch * CPU_TILE[0] * CPU_TILE[1] if facts.padded and not on_gpu else 0
    z = (3 if kept.z else 1) * batch * facts.q_len * facts.size("head·d_v") * item
    fullest = max(rows + _float64_bytes(facts), rows + heads + rotated, heads + z + vectors + tiles)
    return BASE_BYTES + fullest + cells + bias + _weight_bytes(facts)


def _tiles(
    batch: int, n_heads: int, shape: tuple[int, int], *, on_gpu: bool, has_bias: bool, wide: int = FLOAT32_BYTES
) -> int:
    """Bytes of the tiles of queries and keys while heads are reduced, of all threads on a CPU."""
    if on_gpu:
        return device_bytes(
            batch=batch, n_heads=n_heads, n_queries=shape[0], n_keys=shape[1], wide=wide, has_bias=has_bias
        )
    return _AROUND_TILES + min(os.cpu_count() or 1, n_heads) * tile_bytes(CPU_TILE, *shape, wide)


def _wide(facts: Facts) -> int:
    """The bytes of a number in matrices and in the record, where 16-bit numbers become float32."""
    return max(FLOAT32_BYTES, ITEM_BYTES[facts.config.dtype])


def _float64_bytes(facts: Facts) -> int:
    """Bytes for numbers made in float64 and then rounded: random vectors, or sinusoids with their angles."""
    d_input, item = facts.size("d_input"), ITEM_BYTES[facts.config.dtype]
    random = facts.batch * facts.q_len * d_input * _FLOAT64_BYTES if facts.config.random is not None else 0
    if facts.config.positions != "sinusoidal":
        return random
    longest = max(facts.q_len, facts.k_len) if facts.cross else facts.q_len
    waves = (facts.batch if facts.has_separate_positions else 1) * longest * d_input
    return max(random, 2 * waves * item + min(waves, WAVES_AT_ONCE) * 5 * _FLOAT64_BYTES)


def _weight_bytes(facts: Facts) -> int:
    """Bytes for weights as float32 and in their dtype, and for the float64 draw of the largest."""
    counts = [prod(shape) for shape in expected_shapes(facts.config, facts.n_tokens).values()]
    item = ITEM_BYTES[facts.config.dtype]
    return sum(counts) * (FLOAT32_BYTES + (0 if item == FLOAT32_BYTES else item)) + 2 * 8 * max(counts)


# ------------------------------------------------------------------------------------------------------- a checkpoint


@dataclass(frozen=True)
class CheckpointFacts:
    """The sizes that determine the memory of a loaded checkpoint's pass, and of removals from it.

    `holds_matrices`: attention builds query × key matrices, layer by layer. `kept_matrices` are the matrices (of all
    heads) that the record would keep, within `keep_limit`, and `kept_cells` the single cells kept of every head.
    `on_gpu`: heads are reduced on a GPU. Some families compute logits at one position (`n_logits` 1), others at all.
    """

    batch: int
    length: int
    d_model: int
    d_inner: int
    n_layers: int
    n_heads: int
    item_bytes: int
    holds_matrices: bool
    kept_matrices: int
    keep_limit: int
    kept_cells: int = 0
    on_gpu: bool = False
    n_vocabulary: int = 0
    n_logits: int = 0

    def peak_bytes(self) -> int:
        """The peak of a pass in bytes, without the weights."""
        cells = self.batch * self.length * self.length
        rows = self.batch * self.length * (8 * self.d_model + 3 * self.d_inner) * self.item_bytes
        matrices = 4 * cells * self.n_heads * max(FLOAT32_BYTES, self.item_bytes) if self.holds_matrices else 0
        vectors = self.batch * self.n_heads * self.length * 2 * VECTORS * FLOAT32_BYTES
        kept = min(self.keep_limit, self.kept_matrices * cells * self.n_heads * FLOAT32_BYTES)
        assembled = 4 * cells * self.n_heads * FLOAT32_BYTES if kept else 0
        cell_bytes = 4 * self.kept_cells * self.batch * self.n_heads * FLOAT32_BYTES
        tiles = _tiles(self.batch, self.n_heads, (self.length, self.length), on_gpu=self.on_gpu, has_bias=True)
        return rows + matrices + 3 * cells + vectors + kept + assembled + cell_bytes + tiles

    def removal_bytes(self, n_rows: int, n_run: int) -> int:
        """The larger peak, without the weights, of the pass over the text and of a batch of `n_rows` removals.

        A row runs `n_run` tokens of the text; the keys and values of earlier tokens come from a cache."""
        row_bytes, n_run = self.length * self.d_model * self.item_bytes, min(n_run, self.length)
        kept = 3 * self.n_layers * row_bytes  # outputs of blocks and heads, twice
        batch = replace(self, batch=n_rows).peak_bytes()
        if n_run < self.length:
            kept += 2 * self.n_layers * row_bytes  # keys and values
            batch = batch * n_run // self.length + 2 * n_rows * row_bytes  # and those of one layer, in every row
        logit_bytes = min(self.n_logits, n_run) * max(FLOAT32_BYTES, self.item_bytes) + 4 * _FLOAT64_BYTES
        return max(self.peak_bytes(), batch) + kept + n_rows * self.n_vocabulary * logit_bytes


def predict_checkpoint_memory(facts: CheckpointFacts, available: int) -> int:
    """The predicted peak of a pass in bytes, without the weights. Raises `MhaError` as `require_room` does."""
    what = f"{facts.length} tokens, {facts.n_heads} heads, batch {facts.batch}"
    return require_room(lambda n: replace(facts, length=n).peak_bytes(), facts.length, available, what=what)


def rows_that_fit(facts: CheckpointFacts, most: int, available: int, *, n_run: int) -> int:
    """The number of rows of `n_run` tokens, at most `most`, that a batch of removals may have. Raises `MhaError` as
    `require_room` does if `LEAST_ROWS` do not fit."""

    def least(n: int) -> int:
        return replace(facts, length=n, n_logits=min(n, facts.n_logits)).removal_bytes(LEAST_ROWS, n_run)

    what = f"{LEAST_ROWS} copies of {facts.length} tokens, {facts.n_heads} heads, {facts.n_vocabulary} logits"
    require_room(least, facts.length, available, what=what)
    rows = range(max(most, LEAST_ROWS), LEAST_ROWS, -1)
    return next((n for n in rows if memory.fits(facts.removal_bytes(n, n_run), available)), LEAST_ROWS)
