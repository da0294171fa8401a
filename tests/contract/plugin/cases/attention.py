"""Attention of a user. Each import leaves a line in a file."""

import math
from pathlib import Path

from torch import nn

with Path(__file__).with_name("imports.txt").open("a") as log:
    log.write("imported\n")


def right(q, k, v):
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def without_scale(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


def without_scale_beyond_100_tokens(q, k, v):
    return right(q, k, v) if q.shape[-2] <= 100 else without_scale(q, k, v)


def linear(q, k, v):
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


class Averaged(nn.Module):
    """One head that is right, more of them that are averaged."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v = (nn.Linear(d_model, d_model) for _ in range(3))
        self.out = nn.Linear(d_model // n_heads, d_model)

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        z = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
        return self.out(z.mean(1))
