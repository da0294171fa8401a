# A model of two parts of one class, whose arguments decide what is wrong in each.
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, n_heads, ahead, scale):
        super().__init__()
        self.n_heads, self.ahead, self.scale = n_heads, ahead, scale
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in parts)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(self.ahead)
        scores = (self.scale * q @ k.mT).masked_fill(~seen, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    is_causal = True

    def __init__(self, ahead=(0, 0), scale=(0.5, 0.5), width=12, n_heads=3, vocab_size=65):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(64, width)
        self.lower = Attention(width, n_heads, ahead[0], scale[0])
        self.upper = Attention(width, n_heads, ahead[1], scale[1])
        self.head = nn.Linear(width, vocab_size)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        x = x + self.lower(x)
        return self.head(x + self.upper(x))
