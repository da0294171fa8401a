"""The predicted memory of a run before its first tensor, and the arrays that its record has room for."""

from __future__ import annotations

import os
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
FLOAT32_BYTES, _FLOAT64_BYTES, _INT64_BYTES = 4, 8, 8


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
    if keep is None:
        return _plan_default(facts, keep_limit, also)
    for name in keep:
        if name not in SITES:
            raise UsageError(f"--keep: {name!r} is not a site", hint=f"sites: {' '.join(SITES)}")
    keep = tuple(dict.fromkeys(keep))
    total = sum(array_bytes(facts, name) for name in keep)
    if total > keep_limit:
        raise MhaError(
            f"--keep {','.join(keep)} takes {format_size(total)}, above the limit of {format_size(keep_limit)}",
            hint=f"--keep-limit {-(-total >> 20)}M raises the limit; --keep pattern takes less",
            code="too-large",
        )
    return Plan(keep, (), _peak_bytes(facts, total))


def plan_memory(
    facts: Facts, keep: Sequence[str] | None, keep_limit: int, available: int, *, also: Sequence[str] = ()
) -> Plan:
    """The plan of a run that fits into memory.

    Raises `MhaError` if the predicted peak exceeds 80 % of `available`, with both numbers and the largest lengths and
    head counts that fit; otherwise as `make_plan`.
    """
    _require_room(facts, lambda other: make_plan(other, keep, keep_limit, also=also).peak_bytes, available)
    return make_plan(facts, keep, keep_limit, also=also)


def predict_heads_memory(facts: Facts, run: Run, available: int | None = None, *, on_gpu: bool = False) -> int:
    """The predicted peak in bytes of head statistics without matrices, on a GPU or the CPU.

    Raises `MhaError` as `plan_memory` does.
    """
    room = memory.available_bytes() if available is None else available
    _require_room(facts, lambda other: _heads_bytes(other, run, on_gpu=on_gpu), room)
    return _heads_bytes(facts, run, on_gpu=on_gpu)


def _require_room(facts: Facts, needed: Callable[[Facts], int], have: int) -> None:
    """Raises `MhaError`, with alternatives that fit, if more than 80 % of the available memory is needed."""
    if not memory.fits(needed(facts), have):
        raise MhaError(
            f"out of memory; {facts.q_len} × {facts.k_len} tokens, {facts.config.n_heads} heads, batch {facts.batch}: "
            f"{format_size(needed(facts))} needed, {format_size(have)} available",
            hint=_alternatives(facts, lambda other: memory.fits(needed(other), have)),
            code="out-of-memory",
        )


def _alternatives(facts: Facts, fits: Callable[[Facts], bool]) -> str:
    """The longest text and the most heads that fit, as options."""
    longest = _longest_that_fits(
        max(facts.q_len, facts.k_len),
        lambda n: fits(replace(facts, q_len=min(n, facts.q_len), k_len=min(n, facts.k_len))),
    )
    shorter = f"--max-tokens {longest}" if facts.config.random is None else f"--random {facts.batch},{longest}"
    options = [f"{shorter} fits"] if longest else []
    for n_heads in range(facts.config.n_heads - 1, 0, -1):
        d_head, rest = divmod(facts.config.d_model, n_heads)
        fewer = replace(facts.config, n_heads=n_heads, n_kv_heads=n_heads, d_head=d_head, d_v=d_head)
        is_odd = facts.config.positions in ROPE and d_head % 2
        if not rest and not is_odd and fits(replace(facts, config=fewer)):
            return ", ".join([*options, f"so does --heads {n_heads}" if options else f"--heads {n_heads} fits"])
    return options[0] if options else "a shorter text or a smaller --d-model needs less"


def _longest_that_fits(too_long: int, fits: Callable[[int], bool]) -> int:
    """The largest length below `too_long` that fits, found by bisection; 0 if none does."""
    longest = 0
    while too_long - longest > 1:
        middle = (longest + too_long) // 2
        longest, too_long = (middle, too_long) if fits(middle) else (longest, middle)
    return longest


def array_bytes(facts: Facts, site: str) -> int:
    """The bytes of a site's array in the record, where 16-bit numbers become float32."""
    n = 1
    for size in SITES[site].shape_for(facts):
        n *= size
    return n * max(FLOAT32_BYTES, ITEM_BYTES[facts.config.dtype])


def _plan_default(facts: Facts, keep_limit: int, also: Sequence[str]) -> Plan:
    kept: list[str] = []
    total = 0
    names = (*DEFAULT_KEEP, *(["dropped"] if facts.config.train else []), *also)
    for name in names:
        if total + array_bytes(facts, name) <= keep_limit:
            kept.append(name)
            total += array_bytes(facts, name)
    return Plan(tuple(kept), tuple(name for name in names if name not in kept), _peak_bytes(facts, total))


def _peak_bytes(facts: Facts, kept_bytes: int) -> int:
    """Bytes for kept arrays, the matrices of `attend`, and the token vectors around them."""
    item = ITEM_BYTES[facts.config.dtype]
    matrices = facts.cells() * (item + 4 * max(FLOAT32_BYTES, item)) + facts.batch * facts.q_len * facts.k_len
    around = _added_bytes(facts) + _row_bytes(facts) + _float64_bytes(facts) + _weight_bytes(facts)
    return BASE_BYTES + kept_bytes + matrices + around


def _row_bytes(facts: Facts) -> int:
    """Bytes for token vectors in the layer: input (content, sum, mask of padding), projections, and joined heads."""
    widths = facts.size("d_model") * 4 + facts.size("head·d_head") * 4 + facts.size("head·d_v") * 6
    read = (facts.q_len + (facts.k_len if facts.cross else 0)) * facts.size("d_input") * 3
    return facts.batch * ((facts.q_len + facts.k_len) * widths + read) * ITEM_BYTES[facts.config.dtype]


def _heads_bytes(facts: Facts, run: Run, *, on_gpu: bool) -> int:
    """The peak of head statistics: the largest of input, projection and reduction.

    Rotation holds a few wide copies of the queries. A score bias is kept whole, beside a copy without −∞. Kept cells
    exist as tensors, as arrays, and once more while they are assembled.
    """
    item, batch = ITEM_BYTES[facts.config.dtype], facts.batch
    wide = max(FLOAT32_BYTES, item)
    rows = batch * (facts.q_len + (facts.k_len if facts.cross else 0)) * facts.size("d_input") * item
    queries = batch * facts.q_len * facts.size("head·d_head")
    z = batch * facts.q_len * facts.size("head·d_v") * item
    heads = queries * item + batch * facts.k_len * facts.size("kv_head·d_head+kv_head·d_v") * item
    rotated = 3 * queries * wide + queries * item if facts.config.positions in ROPE else 0
    chosen, kept = run.statistics.heads, run.kept
    n_heads = facts.config.n_heads if chosen is None else len(chosen)
    cells = 0 if kept.corner is None else min(kept.corner.n_queries, facts.q_len) * min(kept.corner.n_keys, facts.k_len)
    cells = batch * n_heads * (4 * cells + 8 * len(kept.queries) * min(kept.top, facts.k_len)) * wide
    vectors = batch * (n_heads + 1) * (facts.q_len + facts.k_len) * VECTORS * wide
    bias = 2 * facts.cells() * wide if facts.config.score_bias is not None else 0
    masks = 3 * wide * batch * CPU_TILE[0] * CPU_TILE[1] if facts.padded else 0
    has_bias = facts.config.score_bias is not None or facts.config.positions == "alibi"
    tiles = (
        masks + cpu_tile_bytes(n_heads, facts.q_len, facts.k_len, wide)
        if not on_gpu
        else device_bytes(
            batch=batch, n_heads=n_heads, n_queries=facts.q_len, n_keys=facts.k_len, wide=wide, has_bias=has_bias
        )
    )
    z *= 3 if kept.z else 1
    fullest = max(3 * rows + _float64_bytes(facts), 3 * rows + heads + rotated, heads + z + vectors + tiles)
    return BASE_BYTES + fullest + cells + bias + _weight_bytes(facts)


def cpu_tile_bytes(n_heads: int, n_queries: int, n_keys: int, wide: int = FLOAT32_BYTES) -> int:
    """Bytes of the tiles of all threads while they reduce heads on a CPU."""
    n_threads = min(os.cpu_count() or 1, n_heads)
    return _AROUND_TILES + n_threads * tile_bytes(CPU_TILE, n_queries, n_keys, wide)


def _added_bytes(facts: Facts) -> int:
    """Bytes for additive terms of scores: a bias, or distances with the integers behind them."""
    wide, has_bias = max(FLOAT32_BYTES, ITEM_BYTES[facts.config.dtype]), facts.config.score_bias is not None
    added = 2 * facts.cells() * wide if has_bias else 0
    if facts.config.positions == "alibi":
        planes = (facts.batch if facts.has_separate_positions else 1) * facts.q_len * facts.k_len
        added += planes * (facts.config.n_heads * wide + 2 * _INT64_BYTES)
    return added


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
    """The sizes that determine the memory of a pass of a loaded checkpoint.

    `holds_matrices`: attention builds query × key matrices, layer by layer. `kept_matrices` are the matrices (of all
    heads) that the record would keep, within `keep_limit`, and `kept_cells` the single cells kept of every head.
    `on_gpu`: heads are reduced on a GPU.
    """

    batch: int
    length: int
    d_model: int
    d_inner: int
    n_heads: int
    item_bytes: int
    holds_matrices: bool
    kept_matrices: int
    keep_limit: int
    kept_cells: int = 0
    on_gpu: bool = False

    def peak_bytes(self) -> int:
        """The peak of a pass in bytes, without the weights."""
        cells = self.batch * self.length * self.length
        rows = self.batch * self.length * (8 * self.d_model + 3 * self.d_inner) * self.item_bytes
        matrices = 4 * cells * self.n_heads * max(FLOAT32_BYTES, self.item_bytes) if self.holds_matrices else 0
        vectors = self.batch * self.n_heads * self.length * 2 * VECTORS * FLOAT32_BYTES
        kept = min(self.keep_limit, self.kept_matrices * cells * self.n_heads * FLOAT32_BYTES)
        assembled = 4 * cells * self.n_heads * FLOAT32_BYTES if kept else 0
        cell_bytes = 4 * self.kept_cells * self.batch * self.n_heads * FLOAT32_BYTES
        n = self.length
        tiles = (
            device_bytes(batch=self.batch, n_heads=self.n_heads, n_queries=n, n_keys=n, has_bias=True)
            if self.on_gpu
            else cpu_tile_bytes(self.n_heads, n, n)
        )
        return rows + matrices + 3 * cells + vectors + kept + assembled + cell_bytes + tiles


@dataclass(frozen=True)
class EffectFacts:
    """The sizes that determine the memory of removals.

    `one_pass` is a pass over the text, of whose `n_layers` layers outputs are kept. Some families compute logits at one
    position (`n_logits` 1), others at all. A row runs `n_run` tokens of the text, None for all; the keys and values of
    earlier tokens come from a cache.
    """

    one_pass: CheckpointFacts
    n_layers: int
    n_vocabulary: int
    n_logits: int
    n_run: int | None = None

    def peak_bytes(self, n_rows: int) -> int:
        """The larger peak, without the weights, of the pass over the text and of a batch of `n_rows` rows."""
        single = self.one_pass
        row_bytes = single.length * single.d_model * single.item_bytes
        kept = 3 * self.n_layers * row_bytes  # outputs of blocks and heads, twice
        batch, n_run = replace(single, batch=n_rows).peak_bytes(), min(self.n_run or single.length, single.length)
        if n_run < single.length:
            kept += 2 * self.n_layers * row_bytes  # keys and values
            batch = (
                batch * n_run // single.length + 2 * n_rows * row_bytes
            )  # keys and values of one layer, in every row
        logit_bytes = min(self.n_logits, n_run) * max(FLOAT32_BYTES, single.item_bytes) + 4 * _FLOAT64_BYTES
        return max(single.peak_bytes(), batch) + kept + n_rows * self.n_vocabulary * logit_bytes


def rows_that_fit(facts: EffectFacts, most: int, available: int) -> int:
    """The number of rows, at most `most`, that a batch of removals may have. Raises `MhaError` if `LEAST_ROWS` do not
    fit."""
    for n_rows in range(max(most, LEAST_ROWS), LEAST_ROWS - 1, -1):
        if memory.fits(facts.peak_bytes(n_rows), available):
            return n_rows
    single, needed = facts.one_pass, facts.peak_bytes(LEAST_ROWS)

    def fit(n: int) -> bool:
        shorter = replace(facts, one_pass=replace(single, length=n), n_logits=min(n, facts.n_logits))
        return memory.fits(shorter.peak_bytes(LEAST_ROWS), available)

    longest = _longest_that_fits(single.length, fit)
    raise MhaError(
        f"out of memory; {LEAST_ROWS} copies of {single.length} tokens, {single.n_heads} heads, {facts.n_vocabulary} logits: "
        f"{format_size(needed)} needed, {format_size(available)} available",
        hint=f"--max-tokens {longest} fits" if longest else "a smaller model or a shorter text needs less",
        code="out-of-memory",
    )


LEAST_ROWS = 3
"""One removal and an untouched row on either side."""


def predict_checkpoint_memory(facts: CheckpointFacts, available: int) -> int:
    """The predicted peak of a pass in bytes, without the weights. Raises `MhaError`, with the longest text that fits,
    if it exceeds 80 % of `available`."""
    needed = facts.peak_bytes()
    if memory.fits(needed, available):
        return needed
    longest = _longest_that_fits(facts.length, lambda n: memory.fits(replace(facts, length=n).peak_bytes(), available))
    raise MhaError(
        f"out of memory; {facts.length} tokens, {facts.n_heads} heads, batch {facts.batch}: {format_size(needed)} needed, "
        f"{format_size(available)} available",
        hint=f"--max-tokens {longest} fits" if longest else "a smaller model or a shorter text needs less",
        code="out-of-memory",
    )
