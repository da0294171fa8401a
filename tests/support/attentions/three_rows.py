"""Attention over queries, keys and values that are given apart: functions of heads, and layers that project each."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def softmax_over_the_second(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return torch.softmax(scores, dim=1) @ v


def softmax_over_the_second_with_mask(q, k, v, mask=None):
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    pattern = F.softmax(scores, dim=1)
    return torch.matmul(pattern, v), pattern


def softmax_over_the_second_of_three(q, k, v):
    scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.size(-1))
    return torch.bmm(F.softmax(scores, dim=1), v)


def of_three_axes(q, k, v):
    scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.size(-1))
    return torch.bmm(F.softmax(scores, dim=2), v)


def of_two_axes(q, k, v):
    return F.softmax(q @ k.T / math.sqrt(k.shape[1]), dim=1) @ v


def stated_to_be_of_two_axes(q, k, v):
    """q, k, v: [seq_len, d]"""
    return F.softmax(q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1]), dim=1) @ v


def of_any_axes(q, k, v):
    return F.softmax(q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1]), dim=-1) @ v


class Attention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def rows(self, query, key, value):
        return query, key, value

    def forward(self, query, key, value, mask=None):
        q, k, v = (
            layer(rows).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for layer, rows in zip((self.w_q, self.w_k, self.w_v), self.rows(query, key, value), strict=True)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return self.w_o((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class ValuesOfKeys(Attention):
    def rows(self, query, key, value):
        return query, key, key


class ValuesOfQueries(Attention):
    def rows(self, query, key, value):
        return query, key, query


class KeysOfValues(Attention):
    def rows(self, query, key, value):
        return query, value, value


class KeysOfQueries(Attention):
    def rows(self, query, key, value):
        return query, query, value


class ValuesOfKeysOfOneLength(ValuesOfKeys):
    def forward(self, query, key, value):
        assert query.shape == key.shape == value.shape
        return super().forward(query, key, value)
