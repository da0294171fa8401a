"""A block whose feed-forward is a closure; its last layer begins at zero, and its convolution reads
one token ahead.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, d, h, ahead):
        super().__init__()
        self.h, self.n1, self.n2 = h, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.conv, self.down = nn.Conv1d(d, d, 3), nn.Linear(d, d)
        nn.init.zeros_(self.down.weight)
        conv, down, pad = self.conv, self.down, (2 - ahead, ahead)
        self.feed = lambda x: down(F.gelu(conv(F.pad(x.mT, pad)).mT))

    def forward(self, x):
        q, k, v = (
            u.unflatten(-1, (self.h, -1)).transpose(1, 2) for u in self.qkv(self.n1(x)).chunk(3, -1)
        )
        x = x + self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.feed(self.n2(x))


class FreshGPT(nn.Module):
    def __init__(self, vocab=70, d=48, h=4, ahead=1):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(256, d)
        self.blocks, self.head = (
            nn.ModuleList(Block(d, h, ahead) for _ in range(2)),
            nn.Linear(d, vocab),
        )

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)
