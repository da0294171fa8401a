# expect: z = batch head query d_head
# expect: kᵀ = batch head d_head key
# target: Fused
# lines: pattern = weights = F.softmax
# lines: out = self.proj(z
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
        q, k, v = self.qkv(x).view(B, T, 3, self.h, C // self.h).permute(2, 0, 3, 1, 4)
        weights = F.softmax(q @ k.mT * (C // self.h) ** -0.5, dim=self.axis)
        z = weights @ v
        return self.proj(z.reshape(B, T, C) if self.mixed else z.transpose(1, 2).reshape(B, T, C))
