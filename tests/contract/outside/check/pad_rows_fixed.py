"""An encoder of ids that makes its own mask of padding."""

import torch
from torch import nn


class Heads(nn.Module):
    def __init__(self, width, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, mask):
        q, k, v = (
            w(x).unflatten(2, (self.n_heads, -1)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        logits = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -1e4)
        return self.wo((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


class SourceEncoder(nn.Module):
    def __init__(self, vocab_size=120, width=64, pad_idx=1, longest=300):
        super().__init__()
        self.pad_idx = pad_idx
        self.words = nn.Embedding(vocab_size, width, padding_idx=pad_idx)
        self.places = nn.Embedding(longest, width)
        self.heads = nn.ModuleList(Heads(width, 4) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, src):
        real = (src != self.pad_idx)[:, None, None, :]
        x = self.words(src) + self.places(torch.arange(src.shape[1]))
        for heads, norm in zip(self.heads, self.norms, strict=True):
            x = norm(x + heads(x, real))
        return x
