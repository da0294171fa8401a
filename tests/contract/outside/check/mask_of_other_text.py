"""Heads before the batch in the logits, behind it in the mask: texts get other texts' masks."""

import torch
from torch import nn


class HeadsOutside(nn.Module):
    def __init__(self, d_model=64, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v = (nn.Linear(d_model, d_model) for _ in range(3))

    def fold(self, x):
        return x.unflatten(2, (self.num_heads, -1)).permute(2, 0, 1, 3).flatten(0, 1)

    def forward(self, query, key, value, mask=None):
        q, k, v = self.fold(self.q(query)), self.fold(self.k(key)), self.fold(self.v(value))
        logits = torch.bmm(q, k.mT) / q.shape[-1] ** 0.5
        if mask is not None:
            logits = logits.masked_fill(
                mask.repeat_interleave(self.num_heads, dim=0), float("-inf")
            )
        mixed = torch.bmm(logits.softmax(-1), v)
        return mixed.unflatten(0, (self.num_heads, -1)).permute(1, 2, 0, 3).flatten(2)
