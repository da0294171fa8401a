"""A small GPT of blocks that hold their attention and their feed-forward part."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, n_embd, n_head, by_width):
        super().__init__()
        self.n_head, self.by_width = n_head, by_width
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.fc, self.fc_back = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)
        self.ln_1, self.ln_2, self.drop = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd), nn.Dropout()

    def attend(self, x):
        q, k, v = (
            rows.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for rows in self.c_attn(x).chunk(3, dim=-1)
        )
        scores = q @ k.mT * (x if self.by_width else q).shape[-1] ** -0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = self.drop(scores.masked_fill(later, float("-inf")).softmax(-1))
        return self.drop(self.c_proj((weights @ v).transpose(1, 2).flatten(2)))

    def forward(self, x):
        x = self.ln_1(x + self.attend(x))
        return self.ln_2(x + self.fc_back(F.relu(self.fc(x))))


class SmallGPT(nn.Module):
    def __init__(self, vocab_size=50, by_width=False):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, 48), nn.Embedding(64, 48)
        self.blocks = nn.Sequential(*(Block(48, 4, by_width) for _ in range(2)))
        self.head = nn.Linear(48, vocab_size)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.blocks(x))
