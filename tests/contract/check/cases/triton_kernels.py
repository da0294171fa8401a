# right, forward and backward, as Triton kernels: the edits of test_kernels.py are mistakes
import torch
import triton
import triton.language as tl

BLOCK = 32


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    out,
    log_sum,
    n_q,
    n_k,
    d,
    n_groups,
    scale,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
):
    head, columns = tl.program_id(1), tl.arange(0, D)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at_rows = head * n_q * d + rows[:, None] * d + columns[None, :]
    is_row = (rows[:, None] < n_q) & (columns[None, :] < d)
    q_rows = tl.load(q + at_rows, mask=is_row, other=0.0)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    result = tl.zeros((BLOCK, D), tl.float32)
    for start in range(0, n_k, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        at_keys = head // n_groups * n_k * d + keys[:, None] * d + columns[None, :]
        is_key = (keys[:, None] < n_k) & (columns[None, :] < d)
        k_rows = tl.load(k + at_keys, mask=is_key, other=0.0)
        v_rows = tl.load(v + at_keys, mask=is_key, other=0.0)
        scores = tl.dot(q_rows, tl.trans(k_rows)) * scale
        scores = tl.where(keys[None, :] < n_k, scores, float("-inf"))
        if CAUSAL:
            is_seen = keys[None, :] <= rows[:, None] + n_k - n_q
            scores = tl.where(is_seen, scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new[:, None])
        shrink = tl.exp(largest - new)
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None] + tl.dot(weights.to(v_rows.dtype), v_rows)
        largest = new
    tl.store(out + at_rows, result / total[:, None], mask=is_row)
    tl.store(log_sum + head * n_q + rows, largest + tl.log(total), mask=rows < n_q)


@triton.jit
def backward_kernel(
    q,
    k,
    v,
    d_out,
    delta,
    log_sum,
    dq,
    dk,
    dv,
    n_q,
    n_k,
    d,
    n_groups,
    scale,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
):
    head, columns = tl.program_id(1), tl.arange(0, D)
    keys = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_keys = keys[:, None] * d + columns[None, :]
    is_key = (keys[:, None] < n_k) & (columns[None, :] < d)
    k_rows = tl.load(k + head // n_groups * n_k * d + in_keys, mask=is_key, other=0.0)
    v_rows = tl.load(v + head // n_groups * n_k * d + in_keys, mask=is_key, other=0.0)
    dk_rows = tl.zeros((BLOCK, D), tl.float32)
    dv_rows = tl.zeros((BLOCK, D), tl.float32)
    for start in range(0, n_q, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        at_rows = head * n_q * d + rows[:, None] * d + columns[None, :]
        is_row = (rows[:, None] < n_q) & (columns[None, :] < d)
        q_rows = tl.load(q + at_rows, mask=is_row, other=0.0)
        do_rows = tl.load(d_out + at_rows, mask=is_row, other=0.0)
        sums = tl.load(log_sum + head * n_q + rows, mask=rows < n_q, other=float("inf"))
        deltas = tl.load(delta + head * n_q + rows, mask=rows < n_q, other=0.0)
        scores = tl.dot(q_rows, tl.trans(k_rows)) * scale
        weights = tl.exp(scores - sums[:, None])
        if CAUSAL:
            weights = tl.where(keys[None, :] <= rows[:, None] + n_k - n_q, weights, 0.0)
        dv_rows += tl.dot(tl.trans(weights).to(do_rows.dtype), do_rows)
        d_scores = weights * (tl.dot(do_rows, tl.trans(v_rows)) - deltas[:, None])
        d_scores = d_scores.to(q_rows.dtype)
        dk_rows += tl.dot(tl.trans(d_scores), q_rows)
        tl.atomic_add(dq + at_rows, tl.dot(d_scores, k_rows) * scale, mask=is_row)
    tl.store(dk + head * n_k * d + in_keys, dk_rows * scale, mask=is_key)
    tl.store(dv + head * n_k * d + in_keys, dv_rows, mask=is_key)


class Flash(torch.autograd.Function):
    """Attention in blocks, forward and backward."""

    @staticmethod
    def forward(ctx, q, k, v, causal):
        assert k.shape == v.shape
        assert q.shape[3] == k.shape[3]
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        batch, n_heads, n_q, d = q.shape
        out, log_sum = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.sizes = n_q, k.shape[2], d, n_heads // k.shape[1], d**-0.5, causal
        ctx.columns = max(16, triton.next_power_of_2(d))
        grid = (triton.cdiv(n_q, BLOCK), batch * n_heads)
        forward_kernel[grid](q, k, v, out, log_sum, *ctx.sizes, BLOCK, ctx.columns)
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, log_sum = ctx.saved_tensors
        _, n_k, d, n_groups, *_ = ctx.sizes
        d_out, delta = d_out.contiguous(), (d_out * out).float().sum(-1)
        dq = torch.zeros_like(q, dtype=torch.float32)
        dk = k.new_empty(*q.shape[:2], n_k, d)
        dv = torch.empty_like(dk)
        grid = (triton.cdiv(n_k, BLOCK), q.shape[0] * q.shape[1])
        gradients = dq, dk, dv
        backward_kernel[grid](
            q, k, v, d_out, delta, log_sum, *gradients, *ctx.sizes, BLOCK, ctx.columns
        )
        dk, dv = (each.unflatten(1, (-1, n_groups)).sum(2) for each in (dk, dv))
        return dq.to(q.dtype), dk, dv, None


def attend(q, k, v):
    return Flash.apply(q, k, v, False)


def attend_causally(q, k, v):
    return Flash.apply(q, k, v, True)


flash = Flash.apply
