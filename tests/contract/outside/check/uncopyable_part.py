"""A rotary part that keeps its function as a staticmethod, as a much used package of rotary
positions does: deepcopy raises. Its output projections begin at zero, as is usual.
"""

import torch
import torch.nn.functional as F
from torch import nn


def turned(x, angles):
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Rotary(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.apply_rotary_emb = staticmethod(turned)
        self.register_buffer("rates", 10000.0 ** (-torch.arange(d // 2) * 2 / d), persistent=False)

    def forward(self, x):
        return self.apply_rotary_emb(
            x, torch.arange(x.shape[-2], device=x.device)[:, None] * self.rates
        )


class Layer(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.rotary = h, Rotary(d // h)
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        nn.init.zeros_(self.out.weight)

    def forward(self, x):
        q, k, v = (
            u.unflatten(-1, (self.h, -1)).transpose(1, 2)
            for u in self.qkv(self.norm(x)).chunk(3, -1)
        )
        z = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        return x + self.out(z.transpose(1, 2).flatten(2))


class RotaryGPT(nn.Module):
    def __init__(self, vocab=70, d=48, h=4):
        super().__init__()
        self.embed, self.layers, self.head = (
            nn.Embedding(vocab, d),
            nn.ModuleList(Layer(d, h) for _ in range(2)),
            nn.Linear(d, vocab),
        )

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
