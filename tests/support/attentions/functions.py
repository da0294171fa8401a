"""Attention as plain functions."""

import math

import torch
import torch.nn.functional as F


def attend(q, k, v):
    """Scaled dot-product attention."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    return torch.softmax(scores, dim=-1) @ v


def attention(query, key, value, mask=None, dropout=None):
    """Compute 'Scaled Dot Product Attention'."""
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn


def attend_with_torch(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def attend_by_einsum(queries, keys, values):
    """queries, keys, values: [batch, heads, length, width]"""
    logits = torch.einsum("bhqd,bhkd->bhqk", queries, keys) * queries.shape[-1] ** -0.5
    return torch.einsum("bhqk,bhkd->bhqd", logits.softmax(dim=-1), values)


def attend_causally(q, k, v):
    """Causal attention: a query does not see later keys."""
    q_len, k_len = q.size(-2), k.size(-2)
    hidden = torch.ones(q_len, k_len, dtype=torch.bool, device=q.device).triu(k_len - q_len + 1)
    scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(hidden, float("-inf"))
    return scores.softmax(dim=-1) @ v


def attend_in_loops(q, k, v):
    """Slow and plain."""
    rows = []
    for query in q.unbind(-2):
        scores = (k * query.unsqueeze(-2)).sum(-1) / math.sqrt(q.size(-1))
        shares = (scores - scores.amax(-1, keepdim=True)).exp()
        shares = shares / shares.sum(-1, keepdim=True)
        rows.append((shares.unsqueeze(-1) * v).sum(-2))
    return torch.stack(rows, dim=-2)


def functional_attention(x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, n_heads=3):
    """Multi-head self-attention of x [batch, time, d_model]; weights are [d_out, d_in], as those of nn.Linear."""
    batch, time, _ = x.shape
    q = F.linear(x, w_q, b_q).view(batch, time, n_heads, -1).transpose(1, 2)
    k = F.linear(x, w_k, b_k).view(batch, time, n_heads, -1).transpose(1, 2)
    v = F.linear(x, w_v, b_v).view(batch, time, n_heads, -1).transpose(1, 2)
    shares = torch.softmax(q @ k.mT / q.size(-1) ** 0.5, dim=-1)
    return F.linear((shares @ v).transpose(1, 2).flatten(2), w_o, b_o)


def attend_unscaled(q, k, v):
    scores = q @ k.transpose(-2, -1)
    return torch.softmax(scores, dim=-1) @ v


def attend_by_column(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    return F.softmax(scores, dim=-2) @ v


def attend_by_width(q, k, v):
    """Dot-product attention of q, k, v [batch, heads, length, width]."""
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1]
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


def attend_hidden(q, k, v, mask=None):
    """mask: bool, True = the query may see the key."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def attend_causally_from_the_start(q, k, v):
    """Causal attention; the queries are those of the last tokens."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attend_and_drop(q, k, v, dropout_p=0.1):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
