# right, forward and backward: the edits of test_beyond.py are mistakes
import math

import torch

BLOCK = 32


class Blockwise(torch.autograd.Function):
    """Attention in blocks of keys, with a running maximum, and a backward pass by hand."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal):
        n_groups = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(n_groups, 1), v.repeat_interleave(n_groups, 1)
        n_q, n_k, scale = q.shape[2], k.shape[2], q.shape[3] ** -0.5
        largest = torch.full((*q.shape[:3], 1), -math.inf, dtype=q.dtype, device=q.device)
        total = torch.zeros_like(largest)
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        rows = torch.arange(n_k - n_q, n_k, device=q.device)[:, None]
        for start in range(0, n_k, BLOCK):
            end = min(start + BLOCK, n_k)
            scores = q @ keys[:, :, start:end].mT * scale
            if is_causal:
                hidden = torch.arange(start, end, device=q.device) > rows
                scores = scores.masked_fill(hidden, -math.inf)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            safe = torch.where(new == -math.inf, torch.zeros_like(new), new)
            weights = torch.exp(scores - safe)
            shrink = torch.exp(largest - safe)
            total = total * shrink + weights.sum(-1, keepdim=True)
            out = out * shrink + weights @ values[:, :, start:end]
            largest = new
        out = out / total
        ctx.save_for_backward(q, k, v, out, largest + total.log())
        ctx.is_causal = is_causal
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, log_sum = ctx.saved_tensors
        n_groups = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(n_groups, 1), v.repeat_interleave(n_groups, 1)
        n_q, n_k, scale = q.shape[2], k.shape[2], q.shape[3] ** -0.5
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(keys), torch.zeros_like(values)
        delta = (d_out * out).sum(-1, keepdim=True)
        rows = torch.arange(n_k - n_q, n_k, device=q.device)[:, None]
        for start in range(0, n_k, BLOCK):
            end = min(start + BLOCK, n_k)
            scores = q @ keys[:, :, start:end].mT * scale
            if ctx.is_causal:
                hidden = torch.arange(start, end, device=q.device) > rows
                scores = scores.masked_fill(hidden, -math.inf)
            pattern = torch.exp(scores - log_sum)
            dv[:, :, start:end] = pattern.mT @ d_out
            d_scores = pattern * (d_out @ values[:, :, start:end].mT - delta)
            dq += d_scores @ keys[:, :, start:end] * scale
            dk[:, :, start:end] = d_scores.mT @ q * scale
        dk = dk.unflatten(1, (-1, n_groups)).sum(2)
        dv = dv.unflatten(1, (-1, n_groups)).sum(2)
        return dq, dk, dv, None


def attend(q, k, v):
    return Blockwise.apply(q, k, v, False)


def attend_causally(q, k, v):
    return Blockwise.apply(q, k, v, True)
