"""Interacting features: heads, a residual and a ReLU at the end, no output projection."""

import torch
from torch import nn


class Interacting(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.w_q, self.w_k, self.w_v = (nn.Linear(d_model, d_model, bias=False) for _ in range(3))

    def forward(self, x):
        batch, fields, width = x.shape
        q, k, v = (
            w(x).view(batch, fields, self.n_heads, -1).transpose(1, 2)
            for w in (self.w_q, self.w_k, self.w_v)
        )
        z = torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, dim=-1) @ v
        return torch.relu(z.transpose(1, 2).reshape(batch, fields, width) + x)
