# expect: build
# mentions: d_model=63|n_heads=4|AssertionError
# words: Indivisible --arg d_model=63 --arg n_heads=4
from torch import nn


class Indivisible(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        assert d_model % n_heads == 0, "heads must divide"

    def forward(self, x):
        return x
