# expect: right
# options: causal=True
# common: yes
import torch
from torch import nn


class Model(nn.Module):
    """A mask of float32, also where the model computes in float64."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 3)

    def forward(self, x):
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
