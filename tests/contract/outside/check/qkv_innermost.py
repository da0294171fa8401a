"""One fused projection whose columns alternate: query, key, value, query, key, value."""

import torch.nn.functional as F
from torch import nn


class Alternating(nn.Module):
    def __init__(self, d_model=64, n_heads=4):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.projection = nn.Linear(d_model, d_model)

    def forward(self, x):
        batch, length, width = x.shape
        rows = self.qkv(x).view(batch, length, self.n_heads, width // self.n_heads, 3)
        q, k, v = rows.permute(4, 0, 2, 1, 3)
        z = F.scaled_dot_product_attention(q, k, v)
        return self.projection(z.transpose(1, 2).reshape(batch, length, width))
