"""Attention pooling: learned queries read the text; as many outputs as queries."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class AttentionPool(nn.Module):
    def __init__(self, dim=48, num_heads=4, latent_len=1):
        super().__init__()
        self.num_heads = num_heads
        self.latent = nn.Parameter(torch.randn(1, latent_len, dim) * 0.1)
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q = (
            self.q(self.latent.expand(b, -1, -1))
            .reshape(b, -1, self.num_heads, c // self.num_heads)
            .transpose(1, 2)
        )
        k, v = (
            self.kv(x)
            .reshape(b, n, 2, self.num_heads, c // self.num_heads)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(b, -1, c))
