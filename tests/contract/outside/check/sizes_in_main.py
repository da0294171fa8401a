"""A script whose sizes are names that only `if __name__ == "__main__":` sets."""

import numpy as np
import torch
from torch import nn


class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq = nn.Linear(width, head_width * heads)
        self.wk = nn.Linear(width, head_width * heads)
        self.wv = nn.Linear(width, head_width * heads)
        self.out = nn.Linear(heads * head_width, width)

    def forward(self, x):
        b = x.size(0)
        q, k, v = (
            w(x).view(b, -1, heads, head_width).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        weights = torch.softmax(q @ k.transpose(-1, -2) / np.sqrt(head_width), dim=-1)
        return self.out((weights @ v).transpose(1, 2).contiguous().view(b, -1, heads * head_width))


if __name__ == "__main__":
    width = 64  # columns of a token
    head_width = 16
    heads = 4
    model = MultiHead()
    print(model(torch.randn(1, 5, width)).shape)
