# expect: right
import math

from torch import nn


class Attention(nn.Module):
    def __init__(self, d_model=24, n_heads=3):
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / math.sqrt(q.size(-1))).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


WIDTH = 24
