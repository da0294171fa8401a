# expect: a trace that agrees with itself and differs with another scale or width
from torch import nn


class Attention(nn.Module):
    def __init__(self, d_model=12, n_heads=3, scale=0.5):
        super().__init__()
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.n_heads, self.scale = n_heads, scale

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3 * self.n_heads, -1)).transpose(1, 2).chunk(3, dim=1)
        weights = (q @ k.transpose(-1, -2) * self.scale).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))
