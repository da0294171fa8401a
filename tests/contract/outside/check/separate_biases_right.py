"""A fused projection without bias; queries and values have biases of their own, keys have none."""

import torch
import torch.nn.functional as F
from torch import nn


class TwoBiases(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
        self.register_buffer("k_bias", torch.zeros(dim), persistent=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, attn_mask=None):
        """attn_mask: [batch, key], true for tokens that are there"""
        batch, length, dim = x.shape
        rows = F.linear(x, self.qkv.weight, torch.cat([self.q_bias, self.k_bias, self.v_bias]))
        q, k, v = rows.view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask.bool()[:, None, None, :], float("-inf"))
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, dim))
