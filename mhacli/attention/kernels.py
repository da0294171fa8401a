"""The statistics of heads in two kernels of Triton. `on_device` calls them.

`rows` goes along the keys of some queries: the log-sum-exp and all that each query has of its own,
online, and z. `diagonals` goes along a diagonal of tiles, which all have the same distances: their
sum is the profile. It makes the weights again, and each program writes where no other does, so that
every sum has one order, and two runs the same bits.

Scores are to base 2. A weight is `2^(score − reference − log)`: the log-sum-exp in two parts, since
their sum is itself rounded by half a step of its size.
"""

import os

import triton
import triton.language as tl

_ON_GPU = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
_HIDDEN = tl.constexpr(-1e30)
"""The score of a hidden cell."""
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
def _vectors(base, index, n, D: tl.constexpr, WIDTH: tl.constexpr):
    """Some rows of queries, keys or values, with zeros up to `WIDTH`."""
    d = tl.arange(0, WIDTH)
    inside = (index[:, None] < n) & (d[None, :] < D)
    vectors = tl.load(base + index[:, None] * D + d[None, :], mask=inside, other=0.0)
    if not _ON_GPU:  # the interpreter multiplies no bfloat16
        vectors = vectors.to(tl.float32)
    return vectors


@triton.jit
def _cell(plane, b, h, i, j):
    """Where cells of a plane are: a pointer, and its strides by sequence, head, query and key."""
    return plane[0] + b * plane[1] + h * plane[2] + i.to(tl.int64) * plane[3] + j * plane[4]


@triton.jit
def _keys_of(place, heads, n_k):
    """The sequence and the head of a program, and the row in which its keys begin. The first of the
    heads is the one with the number `first` among those of its kv head.
    """
    n_heads, n_kv_heads, first, group = heads
    b, h = place // n_heads, place % n_heads
    return b, h, (b * n_kv_heads + (first + h) // group) * n_k


@triton.jit
def _is_cut(i, j, M: tl.constexpr, N: tl.constexpr, n_q, n_k, rule):
    """Whether the tile of M queries from i on and N keys from j on has cells beyond the edges of
    the band, or of the matrix.
    """
    low, high = rule[1], rule[2]
    return (j - i < low + M - 1) | (j - i > high - N + 1) | (i + M > n_q) | (j + N > n_k)


@triton.jit
def _scores(x, b, h, i, j, is_cut, n_q, n_k, rule):
    """The scores of a tile from its products. The `rule` is their scale, the band of the mask, and
    each of which there may be none: a softcap, a plane of a bias and one of cells.
    """
    scale, low, high, softcap, bias, cells = rule
    x *= scale
    inside = (i < n_q) & (j < n_k)
    if softcap is not None:  # tanh y = 1 − 2 / (e^2y + 1)
        x = softcap - 2.0 * softcap / (_power(x * (2.0 * _LOG2_E / softcap)) + 1.0)
    if bias is not None:
        x += tl.load(_cell(bias, b, h, i, j), mask=inside, other=0.0).to(tl.float32) * _LOG2_E
    if cells is not None:
        x = tl.where(tl.load(_cell(cells, b, h, i, j), mask=inside, other=0) != 0, x, _HIDDEN)
    if is_cut:
        x = tl.where(inside & (j - i >= low) & (j - i <= high), x, _HIDDEN)
    return x


@triton.jit
def rows(
    q,
    k,
    v,
    sinks,
    marks,
    sums,
    z,
    heads,
    n_q,
    n_k,
    rule,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    D_V: tl.constexpr,
    WIDTH_V: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What each of M queries has of its own, of a sequence and head: `on_device.OF_QUERIES` names
    the rows of `sums`. `marks` are 1 at keys that begin a text, and 2 at the leading ones.
    """
    place, i_0 = tl.program_id(0).to(tl.int64), (tl.num_programs(1) - 1 - tl.program_id(1)) * M
    b, h, of_keys = _keys_of(place, heads, n_k)
    i = i_0 + tl.arange(0, M)
    queries = _vectors(q + place * n_q * D, i, n_q, D, WIDTH)
    zero = tl.zeros([M], tl.float32)
    # all sums are relative to the largest score so far
    top, total, bits, squares, distance = zero + _HIDDEN, zero, zero, zero, zero
    at_first, at_leading = zero, zero
    mean = tl.zeros([M, WIDTH_V], tl.float32)
    # from the first key that any of the queries sees to the last
    start = tl.maximum(i_0 + rule[1], 0) // N * N
    stop = tl.minimum(tl.minimum(i_0 + M, n_q) + rule[2], n_k)
    for j_0 in range(start, stop, N):
        j = j_0 + tl.arange(0, N)
        keys = _vectors(k + of_keys * D, j, n_k, D, WIDTH)
        x = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        is_cut = _is_cut(i_0, j_0, M, N, n_q, n_k, rule)
        x = _scores(x, b, h, i[:, None], j[None, :], is_cut, n_q, n_k, rule)
        new = tl.maximum(top, tl.max(x, 1))
        shift = top - new
        factor = _power(shift)
        y = x - tl.where(new > _NO_KEY, new, 0.0)[:, None]
        p = _power(y)
        of_tile = tl.sum(p, 1)
        bits = factor * (bits + shift * total) + tl.sum(p * y, 1)
        total = factor * total + of_tile
        squares = factor * factor * squares + tl.sum(p * p, 1)
        if j_0 + N <= i_0:  # where all keys are before, no cell needs a distance of its own
            behind = tl.sum(p * tl.arange(0, N).to(tl.float32)[None, :], 1)
            steps = (i - j_0).to(tl.float32) * of_tile - behind
        else:
            steps = tl.sum(p * tl.abs(j[None, :] - i[:, None]).to(tl.float32), 1)
        distance = factor * distance + steps
        at_first *= factor
        at_leading *= factor
        mark = tl.load(marks + b * n_k + j, mask=j < n_k, other=0).to(tl.int32)
        if tl.max(mark, 0) > 0:  # few tiles have keys that begin a text
            at_first += tl.sum(p * (mark & 1).to(tl.float32)[None, :], 1)
            at_leading += tl.sum(p * (mark >> 1).to(tl.float32)[None, :], 1)
        if v is not None:
            values = _vectors(v + of_keys * D_V, j, n_k, D_V, WIDTH_V)
            mean *= factor[:, None]
            rounded = p.to(values.dtype)
            mean += tl.dot(rounded, values, input_precision=PRECISION)
            if values.dtype != tl.float32:  # what 16 bits leave of the weights
                rest = (p - rounded.to(tl.float32)).to(values.dtype)
                mean += tl.dot(rest, values, input_precision=PRECISION)
        top = new
    has_keys = top > _NO_KEY
    reference, of_all = top, total
    if sinks is not None:  # a sink takes part in the softmax, and is no key
        sink = tl.load(_cell(sinks, b, h, i, 0), mask=i < n_q, other=0.0).to(tl.float32) * _LOG2_E
        reference = tl.maximum(top, sink)
        shift = top - reference
        factor = tl.where(has_keys, tl.exp2(shift), 0.0)
        bits = factor * (bits + shift * total)
        squares *= factor * factor
        distance *= factor
        at_first *= factor
        at_leading *= factor
        mean *= factor[:, None]
        of_keys_now = factor * total
        of_all = of_keys_now + tl.exp2(sink - reference)
    else:
        of_keys_now = total
    of_all = tl.where(has_keys, of_all, 1.0)
    size, log = 1.0 / of_all, tl.log2(of_all)
    # NaN where scores are not finite
    reference = tl.where(total < float("inf"), tl.where(has_keys, reference, 0.0), float("nan"))
    at, step, inside = sums + place * n_q + i, tl.num_programs(0).to(tl.int64) * n_q, i < n_q
    tl.store(at, of_keys_now * size, mask=inside)
    tl.store(at + step, tl.maximum((log * of_keys_now - bits) * size * _LN_2, 0.0), mask=inside)
    tl.store(at + 2 * step, squares * size * size, mask=inside)
    peak = tl.where(has_keys, (top - reference - log) * _LN_2, float("-inf"))
    tl.store(at + 3 * step, peak, mask=inside)
    tl.store(at + 4 * step, distance * size, mask=inside)
    tl.store(at + 5 * step, at_first * size, mask=inside)
    tl.store(at + 6 * step, at_leading * size, mask=inside)
    tl.store(at + 7 * step, tl.where(has_keys, top, 0.0), mask=inside)
    of_keys_alone = tl.where(has_keys, tl.log2(tl.where(has_keys, total, 1.0)), float("-inf"))
    tl.store(at + 8 * step, of_keys_alone, mask=inside)
    tl.store(at + 9 * step, reference, mask=inside)
    tl.store(at + 10 * step, log, mask=inside)
    if v is not None:
        d = tl.arange(0, WIDTH_V)
        at_z = z + (place * n_q + i[:, None]) * D_V + d[None, :]
        of_z = inside[:, None] & (d[None, :] < D_V)
        tl.store(at_z, (mean * size[:, None]).to(z.dtype.element_ty), mask=of_z)


@triton.jit
def diagonals(
    q,
    k,
    sums,
    tokens,
    of_rows,
    profile,
    copies,
    heads,
    n_q,
    n_k,
    rule,
    first_diagonal,
    n_groups,
    n_columns,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    IS_SELF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The sums over queries on a diagonal of tiles of N queries and N keys, of a sequence and head.

    `of_rows` `[place, group, key]` are the weights from each `GROUP` queries. `profile` `[place, 2,
    diagonal + 1, N]` are the weights by distance: from the diagonal's multiple of N on, and before
    it. `copies` `[place, diagonal, 2]` are those on equal tokens and after them.
    """
    place, number = tl.program_id(0).to(tl.int64), tl.num_programs(1) - 1 - tl.program_id(1)
    b, h, of_keys = _keys_of(place, heads, n_k)
    diagonal, here = number + first_diagonal, tl.arange(0, N)
    step = tl.num_programs(0).to(tl.int64) * n_q
    q_tokens, k_tokens, before_k = tokens
    is_near = ((diagonal == 0) | (diagonal == 1)) & IS_SELF
    tiles = tl.zeros([N, N], tl.float32)  # [key, query]: a thread has the sums over queries
    same, after = tl.zeros([N], tl.float32), tl.zeros([N], tl.float32)
    last = tl.minimum(tl.cdiv(n_q, N), tl.cdiv(n_k, N) - diagonal)
    for row in range(tl.maximum(0, -diagonal), last):
        i_0, j_0 = row * N, (row + diagonal) * N
        i, j = i_0 + here, j_0 + here
        queries = _vectors(q + place * n_q * D, i, n_q, D, WIDTH)
        keys = _vectors(k + of_keys * D, j, n_k, D, WIDTH)
        reference = tl.load(sums + 9 * step + place * n_q + i, mask=i < n_q, other=0.0)
        log = tl.load(sums + 10 * step + place * n_q + i, mask=i < n_q, other=0.0)
        token = tl.load(q_tokens + b * n_q + i, mask=i < n_q, other=-2)
        x = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
        is_cut = _is_cut(i_0, j_0, N, N, n_q, n_k, rule)
        x = _scores(x, b, h, i[None, :], j[:, None], is_cut, n_q, n_k, rule)
        p = _power(x - reference[None, :] - log[None, :])
        tiles += p
        g = row * (N // GROUP) + tl.arange(0, N // GROUP)
        of_group = tl.sum(tl.reshape(p, [N, N // GROUP, GROUP]), 2)
        at = of_rows + (place * n_groups + g[None, :]) * n_columns + j[:, None]
        tl.store(at, of_group, mask=(g[None, :] < n_groups) & (j[:, None] < n_k))
        label = tl.load(k_tokens + b * n_k + j, mask=j < n_k, other=-3)
        equal = tl.where(label[:, None] == token[None, :], p, 0.0)
        label = tl.load(before_k + b * n_k + j, mask=j < n_k, other=-3)
        following = tl.where(label[:, None] == token[None, :], p, 0.0)
        of_same, of_after = tl.sum(equal, 1), tl.sum(following, 1)
        if is_near:  # a token is no copy of itself
            steps = j[:, None] - i[None, :]
            of_same -= tl.sum(tl.where(steps == 0, equal, 0.0), 1)
            of_after -= tl.sum(tl.where(steps == 1, following, 0.0), 1)
        same += of_same
        after += of_after
    skewed = tl.gather(tiles, (here[:, None] - here[None, :] + N) % N, 1)  # [key, distance]
    is_behind = here[None, :] > here[:, None]
    at = profile + (place * 2 * (tl.num_programs(1) + 1) + number) * N + here
    tl.store(at, tl.sum(tl.where(is_behind, skewed, 0.0), 0))
    at += (tl.num_programs(1) + 2) * N
    tl.store(at, tl.sum(tl.where(is_behind, 0.0, skewed), 0))
    at = copies + (place * tl.num_programs(1) + number) * 2
    tl.store(at, tl.sum(same, 0))
    tl.store(at + 1, tl.sum(after, 0))
