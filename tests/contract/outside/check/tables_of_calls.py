"""Tables of rotations as arguments of a call: complex ones, which a function of this file makes,
and a pair without a function that makes it.
"""

import torch
from torch import nn
from torch.nn import functional as F


def precompute_freqs(d_head, end, base=3e5):
    rates = base ** (-torch.arange(0, d_head, 2).float() / d_head)
    angles = torch.outer(torch.arange(end), rates)
    return torch.polar(torch.ones_like(angles), angles)


class Projections(nn.Module):
    def __init__(self, dim=64, n_heads=4, by_head=False):
        super().__init__()
        self.n_heads, self.by_head = n_heads, by_head
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def attend(self, x, turn, table):
        q, k, v = (w(x).unflatten(2, (self.n_heads, -1)) for w in (self.wq, self.wk, self.wv))
        heads = (rows.transpose(1, 2) for rows in (turn(q, table), turn(k, table), v))
        return self.wo(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Complex(Projections):
    def turned(self, x, freqs_cis):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * freqs_cis[:, None]).flatten(3).to(x.dtype)

    def forward(self, x, freqs_cis):
        return self.attend(x, self.turned, freqs_cis)


class Turned(Projections):
    def turned(self, x, tables):
        cos, sin = tables
        if self.by_head:
            cos, sin = cos[: self.n_heads], sin[: self.n_heads]
        else:
            cos, sin = cos[:, None], sin[:, None]
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    def forward(self, x, position_embeddings):
        return self.attend(x, self.turned, position_embeddings)
