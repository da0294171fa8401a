"""The kernel's dropout never rests; the dropout layer after the projection does."""

import torch.nn.functional as F
from torch import nn


class NoisyKernel(nn.Module):
    def __init__(self, n_embd, n_head, dropout=0.1):
        super().__init__()
        self.n_head, self.rate = n_head, dropout
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.after = nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = (
            p.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1)
        )
        z = F.scaled_dot_product_attention(q, k, v, dropout_p=self.rate)
        y = z.transpose(1, 2).flatten(2)
        return self.after(self.proj(y))
