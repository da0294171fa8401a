# expect: cannot-examine
"""Attention whose call mha cannot guess."""

from torch import nn


class Demanding(nn.Module):
    def __init__(self, d_model=24):
        super().__init__()
        self.qkv = nn.Linear(d_model, 3 * d_model)

    def forward(self, x, table, n_rounds):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return (q @ k.mT * table[n_rounds]).softmax(dim=-1) @ v
