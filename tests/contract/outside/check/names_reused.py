"""The arguments are overwritten by their projections; the values get the wrong one."""

import torch
from torch import nn


class Reusing(nn.Module):
    def __init__(self, h, d_model):
        super().__init__()
        self.h, self.d_k = h, d_model // h
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(d_model, d_model) for _ in range(4)
        )

    def forward(self, query, key, value):
        n = query.size(0)
        query = self.q_proj(query).view(n, -1, self.h, self.d_k).transpose(1, 2)
        key = self.k_proj(key).view(n, -1, self.h, self.d_k).transpose(1, 2)
        value = self.k_proj(value).view(n, -1, self.h, self.d_k).transpose(1, 2)
        weights = torch.softmax(query @ key.transpose(-2, -1) / self.d_k**0.5, dim=-1)
        return self.out_proj((weights @ value).transpose(1, 2).reshape(n, -1, self.h * self.d_k))
