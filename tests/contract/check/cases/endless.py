# expect: too-slow
from torch import nn


class Endless(nn.Module):
    def forward(self, x):
        while True:
            pass
