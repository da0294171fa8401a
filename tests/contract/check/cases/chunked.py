# expect: parts 1 2 3 of the fused projection
import torch.nn.functional as F
from torch import nn


class Fused(nn.Module):
    def __init__(self, d_model=64, n_heads=8, axis=-1, mixed=False):
        super().__init__()
        self.h, self.axis, self.mixed = n_heads, axis, mixed
        self.qkv, self.proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x):
        print("\x1b[31mloud\x1b[0m")
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.h, C // self.h).transpose(1, 2) for part in self.parts(x))
        weights = F.softmax(q @ k.mT * (C // self.h) ** -0.5, dim=self.axis)
        z = weights @ v
        return self.proj(z.reshape(B, T, C) if self.mixed else z.transpose(1, 2).reshape(B, T, C))

    def parts(self, x):
        first, second, third = self.qkv(x).chunk(3, dim=-1)
        return first, second, third
