"""A right attention, and the same without its scale; each call takes longer than --max-time."""

import time

from torch import nn


class Slow(nn.Module):
    def __init__(self, d_model=24, n_heads=3):
        super().__init__()
        self.n_heads = n_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(d_model, d_model) for _ in range(4)
        )

    def heads(self, rows):
        return rows.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def scores(self, q, k):
        return q @ k.mT * q.shape[-1] ** -0.5

    def forward(self, x):
        time.sleep(0.05)
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        z = self.scores(q, k).softmax(dim=-1) @ v
        return self.out_proj(z.transpose(1, 2).flatten(2))


class Unscaled(Slow):
    def scores(self, q, k):
        return q @ k.mT


class SlowWithLargeScores(Slow):
    """Its mistake is shown before scores are large, which takes the time."""

    def forward(self, x):
        if x.abs().max() > 100:
            time.sleep(41)
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        z = (q @ k.mT).softmax(dim=-1) @ v
        return self.out_proj(z.transpose(1, 2).flatten(2))


class SlowModel(nn.Module):
    def __init__(self, vocab_size=50, d_model=24):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        self.attention = Slow(d_model)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, ids):
        return self.head(self.attention(self.embed(ids)))
