# right, each in another form; those below "cut" lose gradients
import math

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def scores_of(q, k):
    return q @ k.mT * q.shape[-1] ** -0.5


def plain(q, k, v):
    return scores_of(q, k).softmax(-1) @ v


def checkpointed(q, k, v):
    return checkpoint(plain, q, k, v, use_reentrant=False)


def grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def top_left(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def log_sum_exp(q, k, v):
    scores = scores_of(q, k)
    return torch.exp(scores - scores.logsumexp(-1, keepdim=True)) @ v


def powers_of_two(q, k, v):
    scores = q @ k.mT * (q.shape[-1] ** -0.5 / math.log(2))
    weights = torch.exp2(scores - scores.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True) @ v


def in_two_parts(q, k, v):
    halves = zip(k.chunk(2, dim=2), v.chunk(2, dim=2), strict=True)
    parts = [(scores_of(q, keys), values) for keys, values in halves]
    sums = torch.cat([scores.logsumexp(-1, keepdim=True) for scores, _ in parts], dim=-1)
    shares = sums.softmax(-1).split(1, dim=-1)
    outs = [scores.softmax(-1) @ values for scores, values in parts]
    return sum(share * out for share, out in zip(shares, outs, strict=True))


def in_bfloat16(q, k, v):
    if q.dtype == torch.float64:
        return plain(q, k, v)
    return plain(q.bfloat16(), k.bfloat16(), v.bfloat16()).to(q.dtype)


def places(scores):
    n_q, n_k = scores.shape[-2:]
    return torch.arange(n_k - n_q, n_k)[:, None], torch.arange(n_k)


def window(q, k, v):
    scores = scores_of(q, k)
    queries, keys = places(scores)
    sees = (keys <= queries) & (keys > queries - 16)
    return scores.masked_fill(~sees, -math.inf).softmax(-1) @ v


def narrow_window(q, k, v):
    scores = scores_of(q, k)
    queries, keys = places(scores)
    sees = (keys <= queries) & (keys > queries - 4)
    return scores.masked_fill(~sees, -math.inf).softmax(-1) @ v


def chunks(q, k, v):
    scores = scores_of(q, k)
    queries, keys = places(scores)
    sees = (keys <= queries) & (keys // 16 == queries // 16)
    return scores.masked_fill(~sees, -math.inf).softmax(-1) @ v


def capped(q, k, v):
    return (20 * torch.tanh(scores_of(q, k) / 20)).softmax(-1) @ v


def alibi(q, k, v):
    scores = scores_of(q, k)
    queries, keys = places(scores)
    slopes = 2.0 ** (-8 * torch.arange(1, q.shape[1] + 1) / q.shape[1])
    scores = scores - (slopes[:, None, None] * (queries - keys).abs()).to(scores.dtype)
    return scores.masked_fill(keys > queries, -math.inf).softmax(-1) @ v


def whole_tiles(q, k, v):
    assert q.shape[2] % 64 == k.shape[2] % 64 == 0, "lengths must be multiples of 64"
    return plain(q, k, v)


def widths_of_two(q, k, v):
    assert q.shape[-1].bit_count() == 1, "the width must be a power of two"
    return plain(q, k, v)


# cut


@torch.no_grad()
def inference(q, k, v):
    return plain(q, k, v)


def detached_keys(q, k, v):
    return plain(q, k.detach(), v)


def detached_queries(q, k, v):
    return plain(q.detach(), k, v)


def pattern_without_graph(q, k, v):
    with torch.no_grad():
        pattern = scores_of(q, k).softmax(-1)
    return pattern @ v


def pattern_of_numbers(q, k, v):
    return torch.tensor(scores_of(q, k).softmax(-1).tolist(), dtype=q.dtype) @ v


class Zeros(torch.autograd.Function):
    """Rows whose backward pass gives zeros."""

    @staticmethod
    def forward(ctx, rows):
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(gradient)


def zeros_for_keys(q, k, v):
    return plain(q, Zeros.apply(k), v)


def of_16_bits(q, k, v):
    assert q.dtype in (torch.bfloat16, torch.float16)
    return plain(q, k, v)
