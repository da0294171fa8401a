# expect: qk = batch head query key
# expect: pattern = batch head query key
# expect: z = batch head query d_head
# expect: out = batch query d_model
# target: Separate
# lines: pattern = torch.softmax(scores
# lines: z = z = torch.matmul(weights
# lines: out = self.W_o(z
# common: yes
import math

import torch
from torch import nn


class Separate(nn.Module):
    def __init__(self, d_model=42, n_heads=3):
        super().__init__()
        self.h, self.d = n_heads, d_model // n_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def split(self, x):
        return x.view(x.size(0), -1, self.h, self.d).transpose(1, 2)

    def forward(self, query, key, value, mask=None):
        q, k = self.split(self.W_q(query)), self.split(self.W_k(key))
        v = self.split(self.W_v(value))
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        weights = torch.softmax(scores, dim=-1)
        z = torch.matmul(weights, v)
        return self.W_o(z.transpose(1, 2).reshape(query.size(0), -1, self.h * self.d))
