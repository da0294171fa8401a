# expect: right
# example: lambda m, T: m(torch.randn(T, 2, 24))
# common: yes
from torch import nn


class Model(nn.Module):
    """Attention over vectors whose first axis is the length."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 3)

    def forward(self, x):
        return self.attention(x, x, x)[0]
