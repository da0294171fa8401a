"""Attention between the pixels of a feature map [batch, channels, height, width]."""

import torch
from torch import nn


class PixelAttention(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.query = nn.Conv2d(channels, channels, 1)
        self.key = nn.Conv2d(channels, channels, 1)
        self.value = nn.Conv2d(channels, channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        batch, channels, height, width = x.shape
        q, k, v = (conv(x).flatten(2) for conv in (self.query, self.key, self.value))
        pattern = torch.softmax(q.transpose(1, 2) @ k * channels**-0.5, dim=-1)
        z = (v @ pattern.transpose(1, 2)).reshape(batch, channels, height, width)
        return x + self.out(z)
