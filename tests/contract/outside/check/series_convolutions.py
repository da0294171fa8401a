"""A temporal convolutional network over series: causal convolutions, but norms over all of time."""

import torch.nn.functional as F
from torch import nn


class Chomped(nn.Module):
    def __init__(self, channels, dilation, mended):
        super().__init__()
        self.left = 2 * dilation
        self.conv = nn.Conv1d(channels, channels, 3, dilation=dilation)
        self.norm = nn.LayerNorm(channels) if mended else nn.GroupNorm(4, channels)

    def forward(self, x):
        y = self.conv(F.pad(x, (self.left, 0)))
        y = self.norm(y.mT).mT if isinstance(self.norm, nn.LayerNorm) else self.norm(y)
        return x + F.relu(y)


class CausalTCN(nn.Module):
    def __init__(self, features=5, channels=32, layers=4, mended=False):
        super().__init__()
        self.inp, self.out = nn.Linear(features, channels), nn.Linear(channels, features)
        self.layers = nn.ModuleList(Chomped(channels, 2**i, mended) for i in range(layers))

    def forward(self, series):
        x = self.inp(series).mT
        for layer in self.layers:
            x = layer(x)
        return self.out(x.mT)


def wrong():
    return CausalTCN()


def mended():
    return CausalTCN(mended=True)
