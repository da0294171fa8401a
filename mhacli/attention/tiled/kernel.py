"""All statistics of a pattern by one Triton kernel: what a tile holds is reduced while it is in registers, and never written.

A program takes blocks of queries of one head, and goes over their keys. What belongs to a query stays in registers; what
belongs to a key, a distance or a cell of the map is added to sums of the program's own, which torch adds up afterwards.
Nothing is added atomically: the same input gives the same bytes. Triton's interpreter runs the same code on the CPU.

A mask is arithmetic on places and ids (`masks.Arithmetic`), or else numbers that are added to the scores of a strip of queries.
Source of the pass over a known log-sum-exp: Dao 2023, "FlashAttention-2", section 3.1.2 (the backward pass).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple, TypeGuard

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mhacli.attention.core import visible_cells
from mhacli.attention.masks import Arithmetic, Chosen, arithmetic_of
from mhacli.attention.tiled.scores import LOG2_E, Scores, VirtualPattern
from mhacli.attention.tiled.statistics import ChosenCells, Statistics, StatisticsRequest
from mhacli.attention.tiled.tiles import PENALTY, PatternTiles, indices, n_cells, reduce_tiles

# ------------------------------------------------------------------------------------------------------- the kernel


_NO_QUERY, _NO_KEY = tl.constexpr(-(2**31)), tl.constexpr(-(2**31) + 1)
"""The ids of hidden queries and keys: those of a mask's documents are others, and these two differ."""
_FIRST, _LEADING, _ALWAYS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
_FORBIDDEN = tl.constexpr(PENALTY)
_LOG2_E = tl.constexpr(LOG2_E)


_LENGTHS = (
    "n_heads", "group", "n_queries", "n_keys", "q_start", "q_stop", "low", "high", "near_low", "near_high", "block",
    "n_cell_rows", "n_cell_columns",
)  # fmt: skip
"""What the kernel is not compiled anew for."""


@triton.jit
def _part(
    pointer, places, is_there, stride, stride_d,
    PART: tl.constexpr, D_HEAD: tl.constexpr, WIDTH: tl.constexpr, N_PARTS: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Queries or keys by their heads' numbers, one of so many parts of them."""
    N: tl.constexpr = (D_HEAD + N_PARTS - 1) // N_PARTS
    column = tl.arange(0, WIDTH)
    at = pointer + places.to(tl.int64)[:, None] * stride + (PART * N + column)[None, :] * stride_d
    if N == WIDTH and PART * N + N <= D_HEAD:
        numbers = tl.load(at, mask=is_there[:, None], other=0.0)
    else:
        inside = (column < N) & (PART * N + column < D_HEAD)
        numbers = tl.load(at, mask=is_there[:, None] & inside[None, :], other=0.0)
    return numbers.to(tl.float32) if WIDENS else numbers


@triton.jit
def _score(product, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """`softcap · tanh(scale · product / softcap)`; tanh(x) = 2 σ(2x) − 1."""
    score = product * scale
    if HAS_SOFTCAP:
        score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
    return score


@triton.jit
def _visible(distance, q_id, k_id, marks, low, high, near_low, near_high, HAS_NEAR: tl.constexpr):
    """What a mask of bands, ids and keys that are always seen allows."""
    keep = (distance >= low) & (distance <= high) & (q_id[:, None] == k_id[None, :])
    if HAS_NEAR:
        is_near = (distance >= near_low) & (distance <= near_high)
        keep = keep & (is_near | ((marks & _ALWAYS) > 0)[None, :])
    return keep


@triton.jit
def _add(pointer, sums, is_there):
    """Adds to sums of this program, which no other touches."""
    tl.store(pointer, tl.load(pointer, mask=is_there, other=0.0) + sums, mask=is_there)


@triton.jit
def _add_diagonals(profile, p, first, last, Q: tl.constexpr, K: tl.constexpr):
    """Adds the sums of a tile's diagonals, of which `first` is the distance of its corner, to places up to `last`.

    Each row is turned so that a column holds one diagonal, and above it the one that is `K` lower. `Q` is `K` at most.
    """
    row, column = tl.arange(0, Q)[:, None], tl.arange(0, K)[None, :]
    turned = tl.gather(p, (row + column) % K, axis=1)
    is_right = row + column < K
    at = first + tl.arange(0, K)
    _add(profile + at, tl.sum(tl.where(is_right, turned, 0.0), 0), (at >= 0) & (at < last))
    tl.debug_barrier()
    below = at - K
    _add(profile + below, tl.sum(tl.where(is_right, 0.0, turned), 0), (below >= 0) & (below < last))


@triton.jit
def _add_cells(
    cells, p, q_start, k_start, block, n_rows, n_columns,
    Q: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds a tile to the map, whose cells are `ROWS` queries of one block of queries times `block` keys."""
    sums = tl.sum(tl.sum(tl.reshape(p, (Q // ROWS, ROWS, K // COLUMNS, COLUMNS)), 3), 1)
    row = q_start // ROWS + tl.arange(0, Q // ROWS)
    column = k_start // block + tl.arange(0, K // COLUMNS)
    is_there = (row < n_rows)[:, None] & (column < n_columns)[None, :]
    _add(cells + row[:, None] * n_columns + column[None, :], sums, is_there)


@triton.jit
def _add_rows(mass, bits, squares, peak, far, first, leading, p, log2, distance, marks):
    """The sums of each query with those of a tile."""
    mass += tl.sum(p, 1)
    bits -= tl.sum(p * log2, 1)
    squares += tl.sum(p * p, 1)
    peak = tl.maximum(peak, tl.max(log2, 1))
    far += tl.sum(p * tl.abs(distance).to(tl.float32), 1)
    first += tl.sum(tl.where(((marks & _FIRST) > 0)[None, :], p, 0.0), 1)
    leading += tl.sum(tl.where(((marks & _LEADING) > 0)[None, :], p, 0.0), 1)
    return mass, bits, squares, peak, far, first, leading


@triton.jit
def _on_token(p, distance, token, k_token, shift, IS_SELF: tl.constexpr):
    """The mass of each query on keys with its token, save the key `shift` after it where queries and keys are one text."""
    matches = (token[:, None] == k_token[None, :]) & (token >= 0)[:, None]
    if IS_SELF:
        matches = matches & (distance != shift)
    return tl.sum(tl.where(matches, p, 0.0), 1)


@triton.jit
def _reduce_block(
    q, k, of_queries, of_queries_n, q_ids, q_ids_n, k_ids, k_ids_n, added, rows, columns, profile, cells,
    q_t, q_d, k_t, k_d, added_t, added_k, n_queries, n_keys, q_start, q_stop, low, high, near_low, near_high,
    scale, softcap, block, n_cell_rows, n_cell_columns,
    Q: tl.constexpr, K: tl.constexpr, D_HEAD: tl.constexpr, WIDTH: tl.constexpr, N_PARTS: tl.constexpr, WIDENS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ADDED: tl.constexpr,
    HAS_NEAR: tl.constexpr, MAY_SKIP: tl.constexpr, IS_SELF: tl.constexpr,
):  # fmt: skip
    """The statistics of one block of queries."""
    i = q_start + tl.arange(0, Q)
    is_query = i < q_stop
    lse = tl.load(of_queries + i, mask=is_query, other=0.0)
    floor = tl.load(of_queries + of_queries_n + i, mask=is_query, other=float("inf"))
    q_id = tl.load(q_ids + i, mask=is_query, other=_NO_QUERY)
    token = tl.load(q_ids + q_ids_n + i, mask=is_query, other=-1)
    begin = _part(q, i, is_query, q_t, q_d, 0, D_HEAD, WIDTH, N_PARTS, WIDENS)
    zero = tl.zeros((Q,), tl.float32)
    mass, bits, squares, peak, far, first, leading, same, after = (
        zero, zero, zero, zero + _FORBIDDEN, zero, zero, zero, zero, zero,
    )  # fmt: skip
    lowest, highest = tl.maximum(q_start + low, 0) // K, tl.cdiv(tl.minimum(q_start + Q + high, n_keys), K)
    for tile in range(lowest, highest):
        j = tile * K + tl.arange(0, K)
        k_id = tl.load(k_ids + j, mask=j < n_keys, other=_NO_KEY)
        marks = tl.load(k_ids + 3 * k_ids_n + j, mask=j < n_keys, other=0)
        distance = j[None, :] - i[:, None]
        keep = _visible(distance, q_id, k_id, marks, low, high, near_low, near_high, HAS_NEAR)
        n_visible = 1
        if MAY_SKIP:
            n_visible = tl.max(tl.max(keep.to(tl.int32), 1), 0)
        if n_visible > 0:
            log2 = _log2(
                q, k, begin, lse, added, i, j, is_query, j < n_keys, keep, q_t, q_d, k_t, k_d, added_t, added_k,
                scale, softcap, Q, K, D_HEAD, WIDTH, N_PARTS, WIDENS, HAS_SOFTCAP, HAS_ADDED,
            )  # fmt: skip
            p = tl.exp2(log2)
            mass, bits, squares, peak, far, first, leading = _add_rows(
                mass, bits, squares, peak, far, first, leading, p, log2, distance, marks
            )
            k_token = tl.load(k_ids + k_ids_n + j, mask=j < n_keys, other=-1)
            before = tl.load(k_ids + 2 * k_ids_n + j, mask=j < n_keys, other=-1)
            same += _on_token(p, distance, token, k_token, 0, IS_SELF)
            after += _on_token(p, distance, token, before, 1, IS_SELF)
            _add(columns + j, tl.sum(p, 0), j < n_keys)
            _add(columns + n_keys + j, tl.sum((p >= floor[:, None]).to(tl.float32), 0), j < n_keys)
            corner = n_queries - 1 + tile * K - q_start
            _add_diagonals(profile, p, corner, n_queries + n_keys - 1, Q, K)
            _add_cells(cells, p, q_start, tile * K, block, n_cell_rows, n_cell_columns, Q, K, ROWS, COLUMNS)
            tl.debug_barrier()
    _store_rows(rows, of_queries_n, i, is_query, mass, bits, squares, peak, far, first, leading, same, after)


@triton.jit
def _log2(
    q, k, begin, lse, added, i, j, is_query, is_key, keep, q_t, q_d, k_t, k_d, added_t, added_k, scale, softcap,
    Q: tl.constexpr, K: tl.constexpr, D_HEAD: tl.constexpr, WIDTH: tl.constexpr, N_PARTS: tl.constexpr, WIDENS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ADDED: tl.constexpr,
):  # fmt: skip
    """log2 p of a tile, `PENALTY` where it is forbidden. `lse` is one to base 2."""
    product = tl.zeros((Q, K), tl.float32)
    for part in tl.static_range(N_PARTS):
        of_q = begin
        if part > 0:
            of_q = _part(q, i, is_query, q_t, q_d, part, D_HEAD, WIDTH, N_PARTS, WIDENS)
        of_k = _part(k, j, is_key, k_t, k_d, part, D_HEAD, WIDTH, N_PARTS, WIDENS)
        product += tl.dot(of_q, tl.trans(of_k), input_precision="ieee")
    score = _score(product, scale, softcap, HAS_SOFTCAP)
    if HAS_ADDED:
        at = added + i.to(tl.int64)[:, None] * added_t + j[None, :] * added_k
        more = tl.load(at, mask=is_query[:, None] & is_key[None, :], other=0.0)
        score += more
        keep = keep & (more > _FORBIDDEN / 2)
    return tl.where(keep, score * _LOG2_E - lse[:, None], _FORBIDDEN)


@triton.jit
def _store_rows(rows, n, i, is_query, mass, bits, squares, peak, far, first, leading, same, after):
    """Writes what was found of each query, one statistic after the other."""
    tl.store(rows + i, mass, mask=is_query)
    tl.store(rows + n + i, bits, mask=is_query)
    tl.store(rows + 2 * n + i, squares, mask=is_query)
    tl.store(rows + 3 * n + i, peak, mask=is_query)
    tl.store(rows + 4 * n + i, far, mask=is_query)
    tl.store(rows + 5 * n + i, first, mask=is_query)
    tl.store(rows + 6 * n + i, leading, mask=is_query)
    tl.store(rows + 7 * n + i, same, mask=is_query)
    tl.store(rows + 8 * n + i, after, mask=is_query)


@triton.jit(do_not_specialize=_LENGTHS)
def reduce_pattern(
    q, k, of_queries, q_ids, k_ids, added, rows, columns, profile, cells,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, added_b, added_h, added_t, added_k,
    n_heads, group, n_queries, n_keys, q_start, q_stop, low, high, near_low, near_high, scale, softcap,
    block, n_cell_rows, n_cell_columns,
    Q: tl.constexpr, K: tl.constexpr, D_HEAD: tl.constexpr, WIDTH: tl.constexpr, N_PARTS: tl.constexpr, WIDENS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ADDED: tl.constexpr,
    HAS_NEAR: tl.constexpr, MAY_SKIP: tl.constexpr, IS_SELF: tl.constexpr,
):  # fmt: skip
    """The statistics of one sequence and head in every n-th block of `Q` queries, by n programs.

    `of_queries` holds the log-sum-exp to base 2 and the floor of what is lifted; `q_ids` the id of a query in the mask, and
    its token; `k_ids` the id of a key in the mask, its token, the token before it, and its marks.
    """
    batch_head = tl.program_id(1).to(tl.int64)
    n_batch_heads = tl.num_programs(1)
    batch, head = batch_head // n_heads, batch_head % n_heads
    own = tl.program_id(0) * n_batch_heads + batch_head
    for number in range(tl.program_id(0), tl.cdiv(q_stop - q_start, Q), tl.num_programs(0)):
        _reduce_block(
            q + batch * q_b + head * q_h, k + batch * k_b + (head // group) * k_h,
            of_queries + batch_head * n_queries, n_batch_heads * n_queries,
            q_ids + batch * n_queries, n_batch_heads // n_heads * n_queries,
            k_ids + batch * n_keys, n_batch_heads // n_heads * n_keys,
            added + batch * added_b + head * added_h - q_start.to(tl.int64) * added_t, rows + batch_head * n_queries,
            columns + own * 2 * n_keys, profile + own * (n_queries + n_keys - 1),
            cells + batch_head * n_cell_rows * n_cell_columns,
            q_t, q_d, k_t, k_d, added_t, added_k, n_queries, n_keys, q_start + number * Q, q_stop,
            low, high, near_low, near_high, scale, softcap, block, n_cell_rows, n_cell_columns,
            Q, K, D_HEAD, WIDTH, N_PARTS, WIDENS, ROWS, COLUMNS, HAS_SOFTCAP, HAS_ADDED, HAS_NEAR, MAY_SKIP, IS_SELF,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- the host


class Launch(NamedTuple):
    """How the kernel is laid out: queries and keys of a tile (powers of two, as many keys as queries at least), the warps of a
    program, and how many tiles of keys are loaded at once."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2


IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernel, on the CPU. It multiplies bfloat16 as if they were integers."""
MAX_HEAD = 256
"""The widest head whose tiles fit a multiprocessor's memory."""
_WIDE, _WIDE_FLOAT32 = 128, 64
"""Numbers of a head in 16 bits that leave registers for a large tile; numbers of one in float32 that are multiplied at once."""
_PARTIAL_BYTES, _ADDED_BYTES = 256 << 20, 256 << 20
"""Of the sums of all programs, and of what is added to the scores of a strip of queries."""
_PROGRAMS = 1024
"""Some for each multiprocessor of the largest devices. A fixed number, because it decides the order of summation."""


def launch_for(dtype: torch.dtype, d_head: int) -> Launch:
    """The layout for heads of this width: fixed, because another one would sum in another order."""
    return Launch(64, 64) if dtype.itemsize == 2 and d_head <= _WIDE else Launch(32, 32)


def takes(pattern: PatternTiles) -> TypeGuard[VirtualPattern]:
    """Whether the kernel can reduce the pattern: one of scores, with float32 sums, of heads that are not too wide."""
    if not isinstance(pattern, VirtualPattern) or pattern.like.dtype != torch.float32:
        return False
    return pattern.scores.q.shape[3] <= MAX_HEAD and all(pattern.shape)


def kernel_statistics(
    pattern: VirtualPattern,
    asked: StatisticsRequest,
    tell: Callable[[int], None] = lambda cells: None,
    *,
    visible: Float[Tensor, "batch _head query"] | None = None,
    lift: float = 0.0,
    launch: Launch | None = None,
) -> Statistics:
    """What `summarise` returns, by the kernel, of a pattern that it `takes`."""
    launch = launch_for(pattern.scores.q.dtype, pattern.scores.q.shape[3]) if launch is None else launch
    n_queries, like, mask = pattern.shape[2], pattern.like, arithmetic_of(pattern.allowed)
    floor = (
        like.new_full((1, 1, 1), math.inf) if visible is None else torch.where(visible > 0, lift / visible, math.inf)
    )
    inputs = _Inputs(
        pattern.scores,
        torch.stack([pattern.lse.to(like) * LOG2_E, floor.to(like).expand(pattern.lse.shape)]),
        *_ids(pattern, asked, Arithmetic() if mask is None else mask),
        Arithmetic() if mask is None else mask,
        asked,
    )
    sums = _Sums.made(pattern, asked.block, launch)
    is_added, total = mask is None or pattern.scores.bias is not None, n_cells(pattern)
    step = _queries_at_once(pattern, launch) if is_added else n_queries
    for start in range(0, n_queries, step):
        queries = range(start, min(start + step, n_queries))
        _start(inputs, sums, queries, _added(pattern, queries, mask) if is_added else None, launch)
        tell(total * len(queries) // n_queries)
    chosen = ChosenCells(pattern, asked)
    if chosen.reducers:
        reduce_tiles(pattern, chosen.reducers)
    return sums.statistics(asked.block, chosen)


class _Inputs(NamedTuple):
    """What the kernel reads, beside what is added to scores."""

    scores: Scores
    of_queries: Float[Tensor, "2 batch head query"]
    q_ids: Int[Tensor, "2 batch query"]
    k_ids: Int[Tensor, "4 batch key"]
    mask: Arithmetic
    asked: StatisticsRequest


class _Sums(NamedTuple):
    """What the kernel adds to: per query whole, per key and distance a part of each program, and the map by rows of a few
    queries."""

    rows: Float[Tensor, "9 batch head query"]
    columns: Float[Tensor, "program batch head 2 key"]
    profile: Float[Tensor, "program batch head distance"]
    cells: Float[Tensor, "batch head row column"]

    @classmethod
    def made(cls, pattern: VirtualPattern, block: int, launch: Launch) -> _Sums:
        """All 0."""
        (batch, n_heads, n_queries, n_keys), zeros = pattern.shape, pattern.like.new_zeros
        heads = batch * n_heads
        affordable = _PARTIAL_BYTES // (4 * heads * (n_queries + 3 * n_keys))
        n_programs = max(1, min(-(-n_queries // launch.queries), -(-_PROGRAMS // heads), affordable))
        return cls(
            zeros(9, batch, n_heads, n_queries),
            zeros(n_programs, batch, n_heads, 2, n_keys),
            zeros(n_programs, batch, n_heads, n_queries + n_keys - 1),
            zeros(batch, n_heads, -(-n_queries // min(block, launch.queries)), -(-n_keys // block)),
        )

    def statistics(self, block: int, chosen: ChosenCells) -> Statistics:
        """The sums of all programs, in their order, in nats."""
        mass, bits, squares, peak, distance, first, leading, duplicate, induction = self.rows
        received, lifted = self.columns.sum(dim=0).unbind(dim=-2)
        per_row = -(-mass.shape[-1] // self.cells.shape[-2])
        return Statistics(
            mass=mass,
            entropy=(bits * math.log(2)).clamp(min=0),
            squares=squares,
            peak=peak * math.log(2),
            distance=distance,
            first=first,
            leading=leading,
            received=received,
            lifted=lifted,
            map=_rows_of_blocks(self.cells, block // per_row),
            profile=self.profile.sum(dim=0),
            duplicate=duplicate.double().sum(dim=-1),
            induction=induction.double().sum(dim=-1),
            matched=chosen.matched,
            between=chosen.between,
        )


def _rows_of_blocks(cells: Float[Tensor, "batch head row column"], n: int) -> Float[Tensor, "batch head block column"]:
    """Sums of `n` rows each; the last may have fewer."""
    padded = torch.nn.functional.pad(cells, (0, 0, 0, -cells.shape[2] % n))
    blocks: Tensor = padded.unflatten(2, (-1, n)).sum(dim=3)
    return blocks


def _ids(
    pattern: VirtualPattern, asked: StatisticsRequest, mask: Arithmetic
) -> tuple[Int[Tensor, "2 batch query"], Int[Tensor, "4 batch key"]]:
    """What the kernel knows of each query and key: its id in the mask and its tokens, and the marks of keys."""
    (batch, _, n_queries, n_keys), like = pattern.shape, pattern.like
    q_idx, k_idx = indices(range(n_queries), like), indices(range(n_keys), like)
    q_seen, k_seen = _all_of(mask.queries, q_idx), _all_of(mask.keys, k_idx)
    q_text, k_text = (
        (q_idx[:1, None], q_idx[:1, None])
        if mask.ids is None
        else (ids.to(like.device)[:, idx] for ids, idx in zip(mask.ids, (q_idx, k_idx), strict=True))
    )
    q_id = torch.where(q_seen, q_text, _NO_QUERY.value)
    k_id = torch.where(k_seen, k_text, _NO_KEY.value)
    marks = asked.first * _FIRST.value + asked.leading * _LEADING.value
    if mask.always is not None:
        marks = marks + mask.always(k_idx) * _ALWAYS.value
    return _side_by_side(batch, q_id, asked.q_tokens), _side_by_side(batch, k_id, asked.k_tokens, asked.before_k, marks)


def _all_of(rules: Sequence[Chosen], idx: Int[Tensor, " idx"]) -> Bool[Tensor, "_batch idx"]:
    return reduce(torch.bitwise_and, (rule(idx) for rule in rules), torch.ones_like(idx, dtype=torch.bool)[None])


def _side_by_side(batch: int, *numbers: Int[Tensor, "_batch idx"]) -> Int[Tensor, "n batch idx"]:
    return torch.stack([row.to(torch.int32).expand(batch, -1) for row in numbers])


def _queries_at_once(pattern: VirtualPattern, launch: Launch) -> int:
    """How many queries what is added to scores is made for: whole blocks."""
    batch, n_heads, n_queries, n_keys = pattern.shape
    n = _ADDED_BYTES // (4 * batch * n_heads * n_keys) // launch.queries * launch.queries
    return min(n_queries, max(launch.queries, n))


def _added(pattern: VirtualPattern, queries: range, mask: Arithmetic | None) -> Float[Tensor, "_batch _head query key"]:
    """What is added to the scores of some queries: their bias, and the penalty of a mask that is no arithmetic."""
    (batch, n_heads, _, n_keys), like = pattern.shape, pattern.like
    q_idx, k_idx = indices(queries, like), indices(range(n_keys), like)
    added = like.new_zeros(1, 1, len(queries), n_keys)
    bias = pattern.scores.bias
    if bias is not None:
        planes = [
            torch.stack([bias(b, h, q_idx, k_idx).expand(added.shape[2:]) for h in range(n_heads)])
            for b in range(batch)
        ]
        added = torch.stack(planes).to(like)
    keep = visible_cells(pattern.allowed, q_idx, k_idx) if mask is None else None
    return added if keep is None else torch.where(keep, added, PENALTY)


def _start(inputs: _Inputs, sums: _Sums, queries: range, added: Tensor | None, launch: Launch) -> None:
    """Starts the kernel for some queries of all heads."""
    scores, asked, mask, of_queries = inputs.scores, inputs.asked, inputs.mask, inputs.of_queries
    (batch, n_heads, n_queries, n_keys), d_head = scores.shape, scores.q.shape[3]
    n_parts = max(scores.n_parts, -(-d_head // _WIDE_FLOAT32) if scores.q.dtype == torch.float32 else 1)
    wide = of_queries.new_zeros(1, 1, 1, 1) if added is None else added
    steps = [0 if size == 1 else step for size, step in zip(wide.shape, wide.stride(), strict=True)]
    with torch.cuda.device_of(scores.q):
        reduce_pattern[(sums.columns.shape[0], batch * n_heads)](
            scores.q, scores.k, of_queries, inputs.q_ids, inputs.k_ids, wide, *sums,
            *scores.q.stride(), *scores.k.stride(), *steps,
            n_heads, n_heads // scores.k.shape[1], n_queries, n_keys, queries.start, queries.stop,
            *mask.band, *mask.near, scores.scale, scores.softcap or 1.0, asked.block, *sums.cells.shape[2:],
            Q=launch.queries, K=launch.keys, D_HEAD=d_head,
            WIDTH=max(16, triton.next_power_of_2(-(-d_head // n_parts))), N_PARTS=n_parts,
            WIDENS=IS_INTERPRETED and scores.q.dtype == torch.bfloat16,
            ROWS=min(asked.block, launch.queries), COLUMNS=min(asked.block, launch.keys),
            HAS_SOFTCAP=scores.softcap is not None, HAS_ADDED=added is not None, HAS_NEAR=mask.always is not None,
            MAY_SKIP=any((mask.always, mask.ids, mask.queries, mask.keys)), IS_SELF=asked.is_self,
            num_warps=launch.warps, num_stages=launch.stages, enable_fp_fusion=True,
        )  # fmt: skip
