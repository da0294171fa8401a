"""A second input that no name explains, and that is no context: one number for each number of x."""

import torch
from torch import nn
from torch.nn import functional as F


class Gated(nn.Module):
    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim) for _ in range(4))

    def attend(self, x):
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.to_q, self.to_k, self.to_v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.to_out(y.transpose(1, 2).flatten(2))

    def forward(self, x, g):
        return self.attend(x) * torch.sigmoid(g)


class Ignored(Gated):
    def forward(self, x, g):
        return self.attend(x)


class Conditioned(Gated):
    def forward(self, x, c, g):
        q, k, v = (
            part(rows).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part, rows in ((self.to_q, x), (self.to_k, c), (self.to_v, c))
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.to_out(y) + g.mean(1, keepdim=True)
