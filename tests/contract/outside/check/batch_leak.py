"""Batch and heads on one axis; taken apart again in the other order, then moved as if they were
not.
"""

import torch
from torch import nn


class Folded(nn.Module):
    def __init__(self, emb_dim, num_heads):
        super().__init__()
        self.num_heads, self.width = num_heads, emb_dim // num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(emb_dim, emb_dim) for _ in range(4))

    def forward(self, x):
        batch, length, dim = x.shape

        def fold(rows):
            rows = rows.view(batch, length, self.num_heads, self.width).transpose(1, 2)
            return rows.reshape(batch * self.num_heads, length, self.width)

        q, k, v = fold(self.q(x)), fold(self.k(x)), fold(self.v(x))
        z = torch.softmax(q @ k.transpose(1, 2) / self.width**0.5, dim=-1) @ v
        z = z.view(self.num_heads, batch, length, self.width).permute(0, 2, 1, 3)
        return self.o(z.contiguous().view(batch, length, dim))
