"""Rotary attention that takes its table as cosines and sines in pairs, [length, d_head / 2, 2]."""

import torch
import torch.nn.functional as F
from torch import nn


def rotate(x, freqs_cis):
    pairs = x.unflatten(-1, (-1, 2))
    table = freqs_cis.view(1, pairs.shape[1], 1, pairs.shape[3], 2)
    cos, sin = table.unbind(-1)
    first, second = pairs.unbind(-1)
    return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(3)


class RotaryAttention(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads=2):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.d_head = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.d_head, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.d_head, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.d_head, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x, freqs_cis, mask=None):
        batch, length, dim = x.shape
        q = rotate(self.wq(x).view(batch, length, self.n_heads, self.d_head), freqs_cis)
        k = rotate(self.wk(x).view(batch, length, self.n_kv_heads, self.d_head), freqs_cis)
        v = self.wv(x).view(batch, length, self.n_kv_heads, self.d_head)
        q, k, v = (rows.transpose(1, 2) for rows in (q, k, v))
        shared = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(z.transpose(1, 2).reshape(batch, length, dim))
