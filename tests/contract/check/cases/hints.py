"""Attention with arguments that mha cannot guess, or that it reads from names, and models that take
texts of some lengths alone.
"""

import argparse

import torch
from torch import nn


class Heads(nn.Module):
    def __init__(self, breite, koepfe):
        super().__init__()
        self.k = koepfe
        self.to_q, self.to_k, self.to_v, self.out = (nn.Linear(breite, breite) for _ in range(4))

    def forward(self, x):
        b, t, d = x.shape
        parts = (self.to_q, self.to_k, self.to_v)
        q, k, v = (part(x).view(b, t, self.k, -1).transpose(1, 2) for part in parts)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, d))


class Turned(Heads):
    def __init__(self, koepfe, breite):
        super().__init__(breite, koepfe)


class NormMade(Heads):
    def __init__(self, size_of_embedding, count_of_heads, norm_layer):
        super().__init__(size_of_embedding, count_of_heads)
        self.norm = norm_layer(size_of_embedding)


class Tabled(Heads):
    def __init__(self, modelDimension, numberOfHeads, table: torch.Tensor):
        super().__init__(modelDimension, numberOfHeads)
        self.register_buffer("table", table)


class Activated(Heads):
    def __init__(self, dim, heads, dropoutRatio, act_fn):
        super().__init__(dim, heads)
        self.drop, self.act = nn.Dropout(dropoutRatio), act_fn

    def forward(self, x):
        return super().forward(x) + 0 * self.act(x)


class Paired(Heads):
    def __init__(self, dim, heads, zwei):
        super().__init__(dim, heads)
        self.rows, self.columns = zwei[0], zwei[1]


class Configured(Heads):
    def __init__(self, config):
        super().__init__(config.hidden_size, config.num_heads)
        self.more, self.drop = nn.Linear(9, config.glub), nn.Dropout(config.glob_drop)


class Called(Heads):
    def __init__(self):
        super().__init__(24, 3)

    def forward(self, x, *, wind, tide):
        return super().forward(x) * (1 if wind is None else wind[tide])


class OfScript(Heads):
    def __init__(self):
        super().__init__(hidden, 4)


class Full(nn.Module):
    def __init__(self, causal=True):
        super().__init__()
        self.causal = causal

    def forward(self, x):
        scores = x @ x.mT / x.shape[-1] ** 0.5
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        scores = scores.masked_fill(later, float("-inf")) if self.causal else scores
        return scores.softmax(-1) @ x


class Block(nn.Module):
    def __init__(self, size, self_attn, feed_forward):
        super().__init__()
        self.attn, self.feed, self.norm = self_attn, feed_forward, nn.LayerNorm(size)

    def forward(self, x):
        return x + self.feed(self.norm(x + self.attn(x)))


class SelfAttention(nn.Module):
    def __init__(self, h, d_model):
        super().__init__()
        self.heads = Heads(d_model, h)

    def forward(self, x):
        return self.heads(x)


class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Words(nn.Module):
    """A word table of a class of its own."""

    def __init__(self, n_words, width):
        super().__init__()
        self.table = nn.Parameter(torch.randn(n_words, width))

    def forward(self, ids):
        return self.table[ids]


class OwnWords(nn.Module):
    least, multiple = 1, 1

    def __init__(self):
        super().__init__()
        self.words, self.places = Words(90, 32), nn.Embedding(300, 32)
        self.attention, self.head = Full(), nn.Linear(32, 90)

    def forward(self, ids):
        length = ids.shape[1]
        assert length >= self.least
        assert length % self.multiple == 0
        return self.head(self.attention(self.words(ids) + self.places.weight[:length]))


class Multiples(OwnWords):
    multiple = 16


class Least(OwnWords):
    least = 40


if __name__ == "__main__":
    hidden = int(argparse.ArgumentParser().parse_args().hidden)
