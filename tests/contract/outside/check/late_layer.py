"""The output projection is made anew in every call: its weights are random, never trained and
never saved.
"""

from torch import nn


class FreshOutput(nn.Module):
    def __init__(self, d_model=64, n_heads=4):
        super().__init__()
        self.n_heads = n_heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(d_model, d_model) for _ in range(3))

    def split(self, x):
        return x.unflatten(2, (self.n_heads, -1)).transpose(1, 2)

    def forward(self, query, key, value):
        q, k, v = (
            self.split(self.to_q(query)),
            self.split(self.to_k(key)),
            self.split(self.to_v(value)),
        )
        weights = (q @ k.mT / k.shape[-1] ** 0.5).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        out = nn.Linear(mixed.shape[-1], mixed.shape[-1])(mixed)
        return out + query, weights
