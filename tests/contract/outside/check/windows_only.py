"""Attention inside windows that do not overlap: the length must be a multiple of the window."""

import torch
from torch import nn


class Windowed(nn.Module):
    def __init__(self, window_size):
        super().__init__()
        self.window_size = window_size

    def forward(self, q, k, v):
        """q, k, v: [batch, head, length, d_head]"""
        length = q.shape[-2]
        assert length % self.window_size == 0, "the length must be a multiple of the window"
        q, k, v = (rows.unflatten(-2, (-1, self.window_size)) for rows in (q, k, v))
        z = torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1) @ v
        return z.flatten(-3, -2)
