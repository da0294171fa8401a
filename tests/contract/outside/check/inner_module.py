"""The core of the attention is a module that the constructor takes."""

import torch
from torch import nn


class Core(nn.Module):
    def __init__(self, drop=0.1):
        super().__init__()
        self.drop = nn.Dropout(drop)

    def forward(self, queries, keys, values, attn_mask=None):
        logits = torch.einsum("nqhw,nkhw->nhqk", queries, keys) * queries.shape[-1] ** -0.5
        if attn_mask is not None:
            logits = logits.masked_fill(attn_mask, float("-inf"))
        return torch.einsum("nhqk,nkhw->nqhw", self.drop(logits.softmax(3)), values)


class Projected(nn.Module):
    def __init__(self, attention, d_model, n_heads):
        super().__init__()
        self.core, self.n_heads = attention, n_heads
        self.to_queries, self.to_keys, self.to_values, self.back = (
            nn.Linear(d_model, d_model) for _ in range(4)
        )

    def forward(self, queries, keys, values, attn_mask=None):
        parts = zip(
            (self.to_queries, self.to_keys, self.to_values), (queries, keys, values), strict=True
        )
        q, k, v = (layer(x).unflatten(2, (self.n_heads, -1)) for layer, x in parts)
        return self.back(self.core(q, k, v, attn_mask).flatten(2))
