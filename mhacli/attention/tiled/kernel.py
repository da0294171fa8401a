"""The Triton kernel that makes all statistics of a pattern: a tile is reduced while it is in registers, and never written.

A program takes blocks of queries of one head, and goes over their keys. What belongs to a query stays in registers; what
belongs to a key, a distance or a cell of the map is added to sums of the program's own, which torch adds up afterwards.
Nothing is added atomically: the same input gives the same bytes. Triton's interpreter runs the same code on the CPU.

Source of the pass over a known log-sum-exp: Dao 2023, "FlashAttention-2", section 3.1.2 (the backward pass).
"""

from __future__ import annotations

import triton
import triton.language as tl

from mhacli.attention.tiled.scores import LOG2_E
from mhacli.attention.tiled.tiles import PENALTY

NO_QUERY, NO_KEY = tl.constexpr(-(2**31)), tl.constexpr(-(2**31) + 1)
"""The ids of hidden queries and keys: those of a mask's documents are others, and these two differ."""
NO_TOKEN, NOR_THIS = tl.constexpr(-1), tl.constexpr(-2)
"""No token, of a query and of a key: they differ."""
FIRST, LEADING, ALWAYS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
_FORBIDDEN = tl.constexpr(PENALTY)
_LOG2_E = tl.constexpr(LOG2_E)


_NUMBERS = (
    "q_b", "q_h", "q_t", "k_b", "k_h", "k_t", "added_b", "added_h", "added_t", "added_k",
    "n_programs", "n_batch_heads", "n_heads", "group", "n_queries", "n_keys", "q_start", "q_stop", "low", "high",
    "near_low", "near_high", "block", "n_cell_rows", "n_cell_columns", "n_chosen",
)  # fmt: skip
"""What the kernel is not compiled anew for: steps of tensors, and lengths."""


@triton.jit
def _part(
    pointer, places, is_there, step, step_d,
    PART: tl.constexpr, D_HEAD: tl.constexpr, WIDTH: tl.constexpr, N_PARTS: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Queries or keys by their heads' numbers, one of so many parts of them."""
    N: tl.constexpr = (D_HEAD + N_PARTS - 1) // N_PARTS
    column = tl.arange(0, WIDTH)
    at = pointer + places.to(tl.int64)[:, None] * step + (PART * N + column)[None, :] * step_d
    if N == WIDTH and PART * N + N <= D_HEAD:
        numbers = tl.load(at, mask=is_there[:, None], other=0.0)
    else:
        inside = (column < N) & (PART * N + column < D_HEAD)
        numbers = tl.load(at, mask=is_there[:, None] & inside[None, :], other=0.0)
    return numbers.to(tl.float32) if WIDENS else numbers


@triton.jit
def _in_band(i, j, low, high):
    """Which cells have a distance from `low` to `high`."""
    distance = j[None, :] - i[:, None]
    return (distance >= low) & (distance <= high)


@triton.jit
def _visible(i, j, q_id, k_id, marks, low, high, near_low, near_high, HAS_NEAR: tl.constexpr):
    """What a mask of bands, ids and keys that are always seen allows."""
    keep = _in_band(i, j, low, high) & (q_id[:, None] == k_id[None, :])
    if HAS_NEAR:
        keep = keep & (_in_band(i, j, near_low, near_high) | ((marks & ALWAYS) > 0)[None, :])
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
    turned = tl.gather(p, (row + column) & (K - 1), axis=1)
    is_right = row + column < K
    at = first + tl.arange(0, K)
    _add(profile + at, tl.sum(tl.where(is_right, turned, 0.0), 0), (at >= 0) & (at < last))
    below = at - K
    _add(profile + below, tl.sum(tl.where(is_right, 0.0, turned), 0), (below >= 0) & (below < last))


@triton.jit
def _add_cells(
    cells, p, q_start, k_start, block, n_rows, n_columns, Q: tl.constexpr, K: tl.constexpr, GRAIN: tl.constexpr
):
    """Adds a tile to the map, whose cells are `GRAIN` queries times `block` keys, or parts of them of `GRAIN` keys."""
    if GRAIN >= K and GRAIN >= Q:
        at = (q_start // Q).to(tl.int64) * n_columns + k_start // block
        tl.store(cells + at, tl.load(cells + at) + tl.sum(tl.sum(p, 1), 0))
    else:
        sums = tl.sum(tl.sum(tl.reshape(p, (Q // GRAIN, GRAIN, K // GRAIN, GRAIN)), 3), 1)
        row = q_start // GRAIN + tl.arange(0, Q // GRAIN)
        column = k_start // GRAIN + tl.arange(0, K // GRAIN)
        is_there = (row < n_rows)[:, None] & (column < n_columns)[None, :]
        _add(cells + row.to(tl.int64)[:, None] * n_columns + column[None, :], sums, is_there)


@triton.jit
def _add_chosen(
    chosen, p, places, q_numbers, k_numbers, i, j, is_query, is_key, n_chosen, rows_n, q_n, k_n,
    Q: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Adds to each query the mass on the cells of each condition, which its comparisons and their truth table say."""
    for n in range(n_chosen):
        first, last, table = tl.load(places + 3 * n), tl.load(places + 3 * n + 1), tl.load(places + 3 * n + 2)
        answers = tl.zeros((Q, K), tl.int32)
        for m in range(first, last):
            low = tl.load(q_numbers + 2 * m * q_n + i, mask=is_query, other=1)
            high = tl.load(q_numbers + (2 * m + 1) * q_n + i, mask=is_query, other=0)
            number = tl.load(k_numbers + m * k_n + j, mask=is_key, other=0)
            is_between = (number[None, :] >= low[:, None]) & (number[None, :] <= high[:, None])
            answers += is_between.to(tl.int32) << (m - first)
        holds = ((table >> answers) & 1) > 0
        _add(chosen + n * rows_n + i, tl.sum(tl.where(holds, p, 0.0), 1), is_query)


@triton.jit
def _distances(p, in_rows, i, j, start, nearest, farthest, K: tl.constexpr):
    """The sum of each query's distances to the keys of a tile; on one side of the diagonal those from a corner of the tile."""
    if (nearest < 0) & (farthest > 0):
        far = tl.sum(p * tl.abs(j[None, :] - i[:, None]).to(tl.float32), 1)
    else:
        column = tl.arange(0, K)
        step = tl.where(nearest >= 0, column, K - column).to(tl.float32)
        corner = tl.where(nearest >= 0, start - i, i - start - K).to(tl.float32)
        far = tl.sum(p * step[None, :], 1) + corner * in_rows
    return far


@triton.jit
def _on_token(p, i, j, token, k_token, shift, is_near, IS_SELF: tl.constexpr):
    """The mass of each query on keys with its token, save the key `shift` after it where queries and keys are one text."""
    matches = token[:, None] == k_token[None, :]
    if IS_SELF and is_near:
        on = tl.sum(tl.where(matches & (j[None, :] - i[:, None] != shift), p, 0.0), 1)
    else:
        on = tl.sum(tl.where(matches, p, 0.0), 1)
    return on


@triton.jit
def _add_rows(
    mass, bits, squares, peak, far, first, leading, same, after, p, log2, i, j, start, nearest, farthest,
    marks, token, k_tokens, k_ids_n, is_key, K: tl.constexpr, IS_SELF: tl.constexpr,
):  # fmt: skip
    """The sums of each query with those of a tile, whose distances lie between `nearest` and `farthest`."""
    in_rows = tl.sum(p, 1)
    mass += in_rows
    bits -= tl.sum(p * log2, 1)
    squares += tl.sum(p * p, 1)
    peak = tl.maximum(peak, tl.max(log2, 1))
    far += _distances(p, in_rows, i, j, start, nearest, farthest, K)
    if tl.max(marks & (FIRST | LEADING), 0) > 0:
        first += tl.sum(tl.where(((marks & FIRST) > 0)[None, :], p, 0.0), 1)
        leading += tl.sum(tl.where(((marks & LEADING) > 0)[None, :], p, 0.0), 1)
    is_near = (nearest <= 1) & (farthest >= 0)
    k_token = tl.load(k_tokens, mask=is_key, other=NOR_THIS)
    before = tl.load(k_tokens + k_ids_n, mask=is_key, other=NOR_THIS)
    same += _on_token(p, i, j, token, k_token, 0, is_near, IS_SELF)
    after += _on_token(p, i, j, token, before, 1, is_near, IS_SELF)
    return mass, bits, squares, peak, far, first, leading, same, after


@triton.jit
def _log2(
    q, k, begin, lse, added, i, j, is_query, is_key, q_t, q_d, k_t, k_d, added_t, added_k, scale, softcap,
    Q: tl.constexpr, K: tl.constexpr, D_HEAD: tl.constexpr, WIDTH: tl.constexpr, N_PARTS: tl.constexpr, WIDENS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ADDED: tl.constexpr,
):  # fmt: skip
    """log2 p of a tile, not yet masked. `scale` is one to base 2, and for `softcap · tanh(x)`, which is `2 σ(2x) − 1`, twice the
    scale of x."""
    product = tl.zeros((Q, K), tl.float32)
    for part in tl.static_range(N_PARTS):
        of_q = begin
        if part > 0:
            of_q = _part(q, i, is_query, q_t, q_d, part, D_HEAD, WIDTH, N_PARTS, WIDENS)
        of_k = _part(k, j, is_key, k_t, k_d, part, D_HEAD, WIDTH, N_PARTS, WIDENS)
        product = tl.dot(of_q, tl.trans(of_k), product, input_precision="ieee")
    log2 = product * scale
    if HAS_SOFTCAP:
        log2 = softcap * (2.0 * tl.sigmoid(log2) - 1.0)
    if HAS_ADDED:
        at = added + i.to(tl.int64)[:, None] * added_t + j[None, :] * added_k
        log2 += tl.load(at, mask=is_query[:, None] & is_key[None, :], other=0.0) * _LOG2_E
    return log2 - lse[:, None]


@triton.jit
def _reduce_block(
    q, k, q_lse, rows_n, q_ids, q_ids_n, k_ids, k_ids_n, places, q_numbers, k_numbers, added,
    rows, chosen, received, profile, cells,
    q_t, q_d, k_t, k_d, added_t, added_k, n_queries, n_keys, q_start, q_stop, low, high, near_low, near_high,
    scale, softcap, block, n_cell_rows, n_cell_columns, n_chosen,
    Q: tl.constexpr, K: tl.constexpr, D_HEAD: tl.constexpr, WIDTH: tl.constexpr, N_PARTS: tl.constexpr, WIDENS: tl.constexpr,
    GRAIN: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ADDED: tl.constexpr, HAS_NEAR: tl.constexpr, HAS_CHOSEN: tl.constexpr,
    IS_BAND: tl.constexpr, IS_SELF: tl.constexpr,
):  # fmt: skip
    """The statistics of one block of queries."""
    i = q_start + tl.arange(0, Q)
    is_query = i < q_stop
    lse = tl.load(q_lse + i, mask=is_query, other=0.0)
    q_id = tl.load(q_ids + i, mask=is_query, other=NO_QUERY)
    token = tl.load(q_ids + q_ids_n + i, mask=is_query, other=NO_TOKEN)
    begin = _part(q, i, is_query, q_t, q_d, 0, D_HEAD, WIDTH, N_PARTS, WIDENS)
    zero = tl.zeros((Q,), tl.float32)
    mass, bits, squares, peak, far, first, leading, same, after = (
        zero, zero, zero, zero + _FORBIDDEN, zero, zero, zero, zero, zero,
    )  # fmt: skip
    lowest, highest = tl.maximum(q_start + low, 0) // K, tl.cdiv(tl.minimum(q_start + Q + high, n_keys), K)
    for tile in range(lowest, highest):
        start = tile * K
        nearest, farthest = start - (q_start + Q - 1), start + K - 1 - q_start
        j = start + tl.arange(0, K)
        is_key = j < n_keys
        marks = tl.load(k_ids + 3 * k_ids_n + j, mask=is_key, other=0)
        n_visible = 1
        if not IS_BAND:
            k_id = tl.load(k_ids + j, mask=is_key, other=NO_KEY)
            keep = _visible(i, j, q_id, k_id, marks, low, high, near_low, near_high, HAS_NEAR)
            n_visible = tl.max(tl.max(keep.to(tl.int32), 1), 0)
        if n_visible > 0:
            log2 = _log2(
                q, k, begin, lse, added, i, j, is_query, is_key, q_t, q_d, k_t, k_d, added_t, added_k,
                scale, softcap, Q, K, D_HEAD, WIDTH, N_PARTS, WIDENS, HAS_SOFTCAP, HAS_ADDED,
            )  # fmt: skip
            if not IS_BAND:
                log2 = tl.where(keep, log2, _FORBIDDEN)
            elif (nearest < low) | (farthest > high) | (start + K > n_keys) | (q_start + Q > q_stop):
                log2 = tl.where(_in_band(i, j, low, high) & is_query[:, None] & is_key[None, :], log2, _FORBIDDEN)
            p = tl.exp2(log2)
            mass, bits, squares, peak, far, first, leading, same, after = _add_rows(
                mass, bits, squares, peak, far, first, leading, same, after, p, log2, i, j, start, nearest, farthest,
                marks, token, k_ids + k_ids_n + j, k_ids_n, is_key, K, IS_SELF,
            )  # fmt: skip
            _add(received + j, tl.sum(p, 0), is_key)
            _add_diagonals(profile, p, n_queries - 1 + start - q_start, n_queries + n_keys - 1, Q, K)
            _add_cells(cells, p, q_start, start, block, n_cell_rows, n_cell_columns, Q, K, GRAIN)
            if HAS_CHOSEN:
                _add_chosen(
                    chosen, p, places, q_numbers, k_numbers, i, j, is_query, is_key,
                    n_chosen, rows_n, q_ids_n, k_ids_n, Q, K,
                )  # fmt: skip
            tl.debug_barrier()
    _store_rows(rows, rows_n, i, is_query, mass, bits, squares, peak, far, first, leading, same, after)


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


@triton.jit(do_not_specialize=_NUMBERS)
def reduce_pattern(
    q, k, q_lse, q_ids, k_ids, places, q_numbers, k_numbers, added, rows, chosen, received, profile, cells,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, added_b, added_h, added_t, added_k,
    n_programs, n_batch_heads, n_heads, group, n_queries, n_keys, q_start, q_stop, low, high, near_low, near_high, scale, softcap,
    block, n_cell_rows, n_cell_columns, n_chosen,
    Q: tl.constexpr, K: tl.constexpr, D_HEAD: tl.constexpr, WIDTH: tl.constexpr, N_PARTS: tl.constexpr, WIDENS: tl.constexpr,
    UNIT: tl.constexpr, GRAIN: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ADDED: tl.constexpr, HAS_NEAR: tl.constexpr,
    HAS_CHOSEN: tl.constexpr, IS_BAND: tl.constexpr, IS_SELF: tl.constexpr,
):  # fmt: skip
    """The statistics of one sequence and head in every n-th block of `Q` queries, by n programs, from the last block on: under a
    causal mask it takes longest.

    `q_lse` is the log-sum-exp to base 2; `q_ids` the id of a query in the mask, and its token; `k_ids` the id of a key in the
    mask, its token, the token before it, and its marks. `places` are the first comparison of each condition, the one behind its
    last, and its truth table. Steps of q and k are counted in `UNIT` numbers.
    """
    batch_head = (tl.program_id(0) // n_programs).to(tl.int64)
    program = tl.program_id(0) % n_programs
    batch, head = batch_head // n_heads, batch_head % n_heads
    own = program * n_batch_heads + batch_head
    rows_n = n_queries * n_batch_heads.to(tl.int64)
    q_ids_n, k_ids_n = rows_n // n_heads, n_keys * (n_batch_heads // n_heads).to(tl.int64)
    n_blocks = tl.cdiv(q_stop - q_start, Q)
    for number in range(program, n_blocks, n_programs):
        _reduce_block(
            q + (batch * q_b + head * q_h) * UNIT, k + (batch * k_b + (head // group) * k_h) * UNIT,
            q_lse + batch_head * n_queries, rows_n,
            q_ids + batch * n_queries, q_ids_n, k_ids + batch * n_keys, k_ids_n, places,
            q_numbers + batch * n_queries, k_numbers + batch * n_keys,
            added + batch * added_b + head * added_h - q_start.to(tl.int64) * added_t, rows + batch_head * n_queries,
            chosen + batch_head * n_queries, received + own * n_keys, profile + own * (n_queries + n_keys - 1),
            cells + batch_head * n_cell_rows * n_cell_columns,
            q_t * UNIT, q_d, k_t * UNIT, k_d, added_t, added_k, n_queries, n_keys, q_start + (n_blocks - 1 - number) * Q, q_stop,
            low, high, near_low, near_high, scale, softcap, block, n_cell_rows, n_cell_columns, n_chosen,
            Q, K, D_HEAD, WIDTH, N_PARTS, WIDENS, GRAIN, HAS_SOFTCAP, HAS_ADDED, HAS_NEAR, HAS_CHOSEN, IS_BAND, IS_SELF,
        )  # fmt: skip
