"""Attentions for `mha check` and `mha trace`: a right one, three wrong ones, and what is no
attention.
"""

import math

import torch
from torch import nn


class Right(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, d_model=24, n_heads=3):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        """The output of the layer."""
        q, k, v = (
            part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        return self.out(self.z(q, k, v).transpose(1, 2).flatten(2))

    def z(self, q, k, v):
        """The outputs of the heads."""
        return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1) @ v


class WithoutScale(Right):
    """The scores are not scaled."""

    def z(self, q, k, v):
        """The outputs of the heads."""
        return torch.softmax(q @ k.mT, dim=-1) @ v


class OverQueries(Right):
    """The softmax is over the wrong axis."""

    def z(self, q, k, v):
        """The outputs of the heads."""
        return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-2) @ v


class Causal(Right):
    """Causal."""

    def z(self, q, k, v):
        """The outputs of the heads."""
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1) @ v


class Squares(Right):
    """A score that is no product of a query and a key."""

    def z(self, q, k, v):
        """The outputs of the heads."""
        return (
            torch.softmax(-(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1), dim=-1) @ v
        )


class Feedforward(nn.Module):
    """No attention."""

    def __init__(self, d_model=24):
        super().__init__()
        self.up = nn.Linear(d_model, 2 * d_model)
        self.down = nn.Linear(2 * d_model, d_model)

    def forward(self, x):
        """Each token by itself."""
        return self.down(self.up(x).relu())
