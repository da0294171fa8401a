"""Attention as plain functions of queries, keys and values."""

import math

import torch
import torch.nn.functional as F


def attend(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    return torch.softmax(scores, dim=-1) @ v


def attend_causally(q, k, v):
    q_len, k_len = q.size(-2), k.size(-2)
    hidden = torch.ones(q_len, k_len, dtype=torch.bool, device=q.device).triu(k_len - q_len + 1)
    scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(hidden, float("-inf"))
    return scores.softmax(dim=-1) @ v


def attend_by_einsum(queries, keys, values):
    logits = torch.einsum("bhqd,bhkd->bhqk", queries, keys) * queries.shape[-1] ** -0.5
    return torch.einsum("bhqk,bhkd->bhqd", logits.softmax(dim=-1), values)


def attend_in_loops(q, k, v):
    rows = []
    for query in q.unbind(-2):
        scores = (k * query.unsqueeze(-2)).sum(-1) / math.sqrt(q.size(-1))
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        rows.append((weights.unsqueeze(-1) * v).sum(-2))
    return torch.stack(rows, dim=-2)


def attend_with_three_axes(q, k, v):
    scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.size(-1))
    return torch.bmm(F.softmax(scores, dim=2), v)


def attend_with_weights(x, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, n_heads=3):
    batch, time, _ = x.shape
    q = F.linear(x, w_q, b_q).view(batch, time, n_heads, -1).transpose(1, 2)
    k = F.linear(x, w_k, b_k).view(batch, time, n_heads, -1).transpose(1, 2)
    v = F.linear(x, w_v, b_v).view(batch, time, n_heads, -1).transpose(1, 2)
    weights = torch.softmax(q @ k.mT / q.size(-1) ** 0.5, dim=-1)
    return F.linear((weights @ v).transpose(1, 2).flatten(2), w_o, b_o)


def attend_with_weights_that_are_masked(q, k, v, mask=None):
    weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1)
    weights = weights if mask is None else weights * mask
    return (weights / weights.sum(dim=-1, keepdim=True)) @ v
