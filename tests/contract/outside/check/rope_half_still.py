"""Half of the columns of each head do not turn: their rates are 0; heads stand on axis 2."""

import torch
import torch.nn.functional as F
from torch import nn


class StillHalf(nn.Module):
    def __init__(self, d_model=96, n_heads=3, max_len=128):
        super().__init__()
        self.n_heads, width = n_heads, d_model // n_heads
        self.to_q, self.to_k, self.to_v, self.back = (
            nn.Linear(d_model, d_model, bias=False) for _ in range(4)
        )
        rates = torch.cat([1e4 ** -torch.linspace(0, 1, steps=width // 4), torch.zeros(width // 4)])
        self.register_buffer("angle", torch.arange(max_len)[:, None] * rates)

    def turned(self, x):
        angle = self.angle[: x.shape[1], None]
        a, b = x.tensor_split(2, dim=-1)
        return torch.cat(
            (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=-1
        )

    def forward(self, x):
        q, k, v = (p(x).unflatten(2, (self.n_heads, -1)) for p in (self.to_q, self.to_k, self.to_v))
        q, k = self.turned(q), self.turned(k)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.back(y.transpose(1, 2).flatten(2))
