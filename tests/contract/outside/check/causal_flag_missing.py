"""Said to be causal; nothing makes it so, with a mask or without one."""

import torch.nn.functional as F
from torch import nn


class CausalSelfAttention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = (
            p.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1)
        )
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
