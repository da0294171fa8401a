# expect: right
"""Attention that goes on whatever its call of torch raises."""

import math

from torch import nn


class Swallowing(nn.Module):
    def __init__(self, d_model=24, n_heads=3):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        try:
            z = scores.softmax(dim=-1) @ v
        except Exception:
            z = v
        return self.out(z.transpose(1, 2).flatten(2))
