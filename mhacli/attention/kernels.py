"""The statistics of heads in two kernels of Triton. `on_device` calls them, for each sequence.

`rows` goes along the keys of some queries: the log-sum-exp and all that each query has of its own,
online. `diagonals` goes along a diagonal of tiles, which all have the same distances: their sum is
the profile. It makes the weights again. Each program writes where no other does, so that every sum
has one order, and two runs the same bits.

Scores are to base 2. A weight is `2^(score − reference − log)`: the log-sum-exp in two parts, since
their sum is itself rounded by half a step of its size.
"""

import os

import triton
import triton.language as tl

_ON_GPU = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
_HIDDEN = tl.constexpr(-1e30)
"""The score of a hidden cell, at most."""
_NO_KEY = tl.constexpr(-1e29)
"""The largest score of a query that has seen no key is below."""
_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _power(x):
    """2^x. A GPU has one instruction for it, where powers below 2^−126 may be 0."""
    if _ON_GPU:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        power = tl.exp2(x)
    return power


@triton.jit
def _vectors(base, index, n, d, WIDTH: tl.constexpr, PART: tl.constexpr):
    """Some columns of some queries or keys."""
    places = base + index[:, None] * WIDTH + d + tl.arange(0, PART)[None, :]
    vectors = tl.load(places, mask=index[:, None] < n, other=0.0)
    if not _ON_GPU:  # the interpreter multiplies no bfloat16
        vectors = vectors.to(tl.float32)
    return vectors


@triton.jit
def _products(left, i, n_left, right, j, n_right, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """The products of a tile, 128 bytes of each row at a time where heads are wide: registers do
    not hold all of them.
    """
    FEW: tl.constexpr = 1024 // left.dtype.element_ty.primitive_bitwidth
    PART: tl.constexpr = WIDTH if WIDTH <= 64 else FEW
    x = tl.zeros([i.shape[0], j.shape[0]], tl.float32)
    for d in range(0, WIDTH, PART):
        some = _vectors(left, i, n_left, d, WIDTH, PART)
        others = _vectors(right, j, n_right, d, WIDTH, PART)
        x = tl.dot(some, tl.trans(others), x, input_precision=PRECISION)
    return x


@triton.jit
def _scores(x, h, i_0, j_0, i, j, N: tl.constexpr, n_q, n_k, rule):
    """The scores of a tile of N queries from i_0 on and N keys from j_0 on, from its products. The
    `rule` is their scale, the band of the mask, a softcap and what is added to scores, of which
    there may be none, with the rows from a head to the next.
    """
    scale, low, high, softcap, added, n_rows = rule
    x *= scale
    inside = (i < n_q) & (j < n_k)
    if softcap is not None:  # tanh y = 1 − 2 / (e^2y + 1)
        x = softcap - 2.0 * softcap / (_power(x * (2.0 * _LOG2_E / softcap)) + 1.0)
    if added is not None:
        numbers = tl.load(added + h * n_rows * n_k + (i * n_k + j), mask=inside, other=0.0)
        x += numbers.to(tl.float32) * _LOG2_E
    # most tiles are within the band and the matrix
    is_cut = (j_0 - i_0 < low + N - 1) | (j_0 - i_0 > high - N + 1)
    if is_cut | (i_0 + N > n_q) | (j_0 + N > n_k):
        x = tl.where(inside & (j - i >= low) & (j - i <= high), x, _HIDDEN)
    return x


@triton.jit
def rows(
    q,
    k,
    sinks,
    marks,
    sums,
    lse,
    first,
    group,
    n_q,
    n_k,
    rule,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What each of N queries of a head has of its own: `on_device.OF_QUERIES` names the rows of
    `sums`, behind which are the reference and the log by which weights are made; `lse` is in nats.
    `marks` are 1 at keys that begin a text, and 2 at the leading ones. The first head is the one
    with the number `first` of a `group` that shares its keys.
    """
    h, i_0 = tl.program_id(0).to(tl.int64), (tl.num_programs(1) - 1 - tl.program_id(1)) * N
    i = i_0 + tl.arange(0, N)
    queries, keys = q + h * n_q * WIDTH, k + (first + h) // group * n_k * WIDTH
    zero = tl.zeros([N], tl.float32)
    # all sums are relative to the largest score so far
    peak, top, of_all = zero + _HIDDEN, zero + _HIDDEN, zero
    total, bits, squares, distance, at_first, at_leading = zero, zero, zero, zero, zero, zero
    if sinks is not None:  # which take part in the softmax, and are no keys
        top, of_all = tl.load(sinks + h * n_q + i, mask=i < n_q, other=0.0), zero + 1.0
    # from the first key that one of the queries sees to the last
    start = tl.maximum(i_0 + rule[1], 0) // N * N
    for j_0 in range(start, tl.minimum(tl.minimum(i_0 + N, n_q) + rule[2], n_k), N):
        j = j_0 + tl.arange(0, N)
        x = _products(queries, i, n_q, keys, j, n_k, WIDTH, PRECISION)
        x = _scores(x, h, i_0, j_0, i[:, None], j[None, :], N, n_q, n_k, rule)
        peak = tl.maximum(peak, tl.max(x, 1))
        shift = top - tl.maximum(top, peak)
        top = tl.maximum(top, peak)
        factor = _power(shift)
        y = x - tl.where(top > _NO_KEY, top, 0.0)[:, None]
        p = _power(y)
        of_tile = tl.sum(p, 1)
        bits = factor * (bits + shift * total) + tl.sum(p * y, 1)
        total = factor * total + of_tile
        of_all = factor * of_all + of_tile
        squares = factor * factor * squares + tl.sum(p * p, 1)
        steps = tl.abs(j.to(tl.float32)[None, :] - i.to(tl.float32)[:, None])
        distance = factor * distance + tl.sum(p * steps, 1)
        at_first *= factor
        at_leading *= factor
        mark = tl.load(marks + j, mask=j < n_k, other=0).to(tl.int32)
        if tl.max(mark, 0) > 0:  # few tiles have keys that begin a text
            at_first += tl.sum(p * (mark & 1).to(tl.float32)[None, :], 1)
            at_leading += tl.sum(p * (mark >> 1).to(tl.float32)[None, :], 1)
    has_keys = peak > _NO_KEY
    log, size = tl.log2(tl.where(has_keys, of_all, 1.0)), 1.0 / tl.where(has_keys, of_all, 1.0)
    at, n_all, inside = sums + h * n_q + i, tl.num_programs(0) * n_q, i < n_q
    tl.store(at, total * size, mask=inside)
    entropy = tl.maximum((log * total - bits) * size * _LN_2, 0.0)
    tl.store(at + n_all, entropy, mask=inside)
    tl.store(at + 2 * n_all, squares * size * size, mask=inside)
    of_peak = tl.where(has_keys, (peak - top - log) * _LN_2, float("-inf"))
    tl.store(at + 3 * n_all, of_peak, mask=inside)
    tl.store(at + 4 * n_all, distance * size, mask=inside)
    tl.store(at + 5 * n_all, at_first * size, mask=inside)
    tl.store(at + 6 * n_all, at_leading * size, mask=inside)
    tl.store(at + 7 * n_all, tl.where(has_keys, top, 0.0), mask=inside)
    tl.store(at + 8 * n_all, log, mask=inside)
    of_keys = top.to(tl.float64) + tl.log2(tl.where(has_keys & (total > 0), total, 1.0))
    of_keys = tl.where(has_keys, of_keys * _LN_2, 0.0)
    # powers beyond float32 leave a query to torch
    is_sound = (total < float("inf")) & ((total > 0) | (peak <= _NO_KEY))
    tl.store(lse + h * n_q + i, tl.where(is_sound, of_keys, float("nan")), mask=inside)


@triton.jit
def diagonals(
    q,
    k,
    references,
    logs,
    tokens,
    of_rows,
    profile,
    copies,
    n_groups,
    n_columns,
    first,
    group,
    n_q,
    n_k,
    rule,
    IS_SELF: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The sums over queries on a diagonal of tiles of N queries and N keys, of a head.

    `of_rows` `[head, group, key]` are the weights from each `GROUP` queries. `profile` `[head, 2,
    diagonal + 1, N]` are the weights by distance: before the diagonal's multiple of N, and from it
    on. `copies` `[2, head, diagonal]` are those on equal tokens, and after them.
    """
    h, n_diagonals = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    number, here = n_diagonals - 1 - tl.program_id(1), tl.arange(0, N)
    queries, keys = q + h * n_q * WIDTH, k + (first + h) // group * n_k * WIDTH
    diagonal = number + 1 - tl.cdiv(n_q, N)
    is_near = ((diagonal == 0) | (diagonal == 1)) & IS_SELF
    tiles = tl.zeros([N, N], tl.float32)  # [key, query]: a thread has the sums over queries
    same, after = tl.zeros([N], tl.float32), tl.zeros([N], tl.float32)
    is_seen = (diagonal * N + N > rule[1]) & (diagonal * N - N < rule[2])
    last = tl.where(is_seen, tl.minimum(tl.cdiv(n_q, N), tl.cdiv(n_k, N) - diagonal), 0)
    for row in range(tl.maximum(0, -diagonal), last):
        i_0, j_0 = row * N, (row + diagonal) * N
        i, j = i_0 + here, j_0 + here
        reference = tl.load(references + h * n_q + i, mask=i < n_q, other=0.0)
        log = tl.load(logs + h * n_q + i, mask=i < n_q, other=0.0)
        x = _products(keys, j, n_k, queries, i, n_q, WIDTH, PRECISION)
        x = _scores(x, h, i_0, j_0, i[None, :], j[:, None], N, n_q, n_k, rule)
        p = _power(x - reference[None, :] - log[None, :])
        tiles += p
        g = row * (N // GROUP) + tl.arange(0, N // GROUP)
        at = of_rows + (h * n_groups + g[None, :]) * n_columns + j[:, None]
        of_group = tl.sum(tl.reshape(p, [N, N // GROUP, GROUP]), 2)
        tl.store(at, of_group, mask=(g[None, :] < n_groups) & (j[:, None] < n_k))
        token = tl.load(tokens[0] + i, mask=i < n_q, other=-2)
        label = tl.load(tokens[1] + j, mask=j < n_k, other=-3)
        equal = tl.where(label[:, None] == token[None, :], p, 0.0)
        label = tl.load(tokens[2] + j, mask=j < n_k, other=-3)
        following = tl.where(label[:, None] == token[None, :], p, 0.0)
        of_same, of_after = tl.sum(equal, 1), tl.sum(following, 1)
        if is_near:  # a token is no copy of itself
            steps = j[:, None] - i[None, :]
            of_same -= tl.sum(tl.where(steps == 0, equal, 0.0), 1)
            of_after -= tl.sum(tl.where(steps == 1, following, 0.0), 1)
        same += of_same
        after += of_after
    skewed = tl.gather(tiles, (here[:, None] - here[None, :] + N) % N, 1)  # [key, distance]
    before = tl.where(here[None, :] > here[:, None], skewed, 0.0)
    at = profile + (h * 2 * (n_diagonals + 1) + number) * N + here
    tl.store(at, tl.sum(before, 0))
    tl.store(at + (n_diagonals + 2) * N, tl.sum(skewed - before, 0))
    at = copies + h * n_diagonals + number
    tl.store(at, tl.sum(same, 0))
    tl.store(at + tl.num_programs(0) * n_diagonals, tl.sum(after, 0))
