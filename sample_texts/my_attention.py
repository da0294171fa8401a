"""Multi-head attention of a learner: it runs, it trains, and `mha check` names its mistake."""

import math

from torch import nn


class MultiHeadAttention(nn.Module):
    """Self-attention over `[batch, length, d_model]`."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        batch, length, d_model = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.n_heads, self.d_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        z = scores.softmax(dim=-1) @ v
        return self.out(z.reshape(batch, length, d_model))
