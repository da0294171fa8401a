"""An encoder of ids with attention_mask (1 = real token) that reaches the kernel upside down."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, mask):
        b, t, d = x.shape
        y = self.norm1(x)
        q, k, v = (
            p(y).view(b, t, self.n_heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.ff(self.norm2(x))


class SentenceEncoder(nn.Module):
    def __init__(self, vocab_size=300, dim=64, n_heads=4, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.place = nn.Embedding(512, dim)
        self.blocks = nn.ModuleList(Block(dim, n_heads) for _ in range(layers))

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids) + self.place(torch.arange(input_ids.shape[1]))
        mask = None if attention_mask is None else attention_mask.eq(0)[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        return x
