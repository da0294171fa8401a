"""The weights are divided after the softmax instead of the scores before it."""

import torch
from torch import nn


class LateScale(nn.Module):
    def __init__(self, d_model=64, n_heads=4):
        super().__init__()
        self.n_heads, self.d_model = n_heads, d_model
        self.queries = nn.Linear(d_model, d_model)
        self.keys = nn.Linear(d_model, d_model)
        self.values = nn.Linear(d_model, d_model)
        self.projection = nn.Linear(d_model, d_model)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.n_heads, -1).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        weights = torch.softmax(q @ k.transpose(-2, -1), dim=-1) / self.d_model**0.5
        return self.projection((weights @ v).transpose(1, 2).reshape(batch, length, width))
