# expect: wrong sees-the-future
# common: yes
import torch
from torch import nn


class Model(nn.Module):
    """Each chunk of 16 tokens sees itself as a whole, and those before it: only long texts show
    it.
    """

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 3)

    def forward(self, x):
        chunk = torch.arange(len(x)) // 16
        return self.attention(x, x, x, attn_mask=chunk[:, None] < chunk)[0]
