"""A pair of rotary tables [T, d] as an argument; heads stand on axis 2 while it turns them."""

import torch
import torch.nn.functional as F
from torch import nn


def make_tables(width, n=512, base=5e5):
    angle = torch.outer(
        torch.arange(n).float(), base ** (-torch.arange(0, width, 2).float() / width)
    ).repeat(1, 2)
    return angle.cos(), angle.sin()


def turned(x, tables):
    cos, sin = (table[:, None] for table in tables)
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class PairHeads(nn.Module):
    def __init__(self, hidden_size=64, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4)
        )

    def forward(self, x, position_embeddings):
        q, k, v = (w(x).unflatten(2, (self.num_heads, -1)) for w in (self.wq, self.wk, self.wv))
        q, k = turned(q, position_embeddings), turned(k, position_embeddings)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.wo(y.transpose(1, 2).flatten(2))
