"""A small language model that learns, with one mistake: what is it?"""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in parts)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(diagonal=1)
        z = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(z.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self, vocab_size=65, width=64, n_heads=4, n_layers=2, length=256):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(length, width)
        self.attentions = nn.ModuleList(Attention(width, n_heads) for _ in range(n_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(n_layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False))

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            x = x + attention(norm(x))
        return self.head(x)
