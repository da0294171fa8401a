"""A file that runs an example when it is imported."""

import torch
from torch import nn

print("training …")


class Attention(nn.Module):
    """Self-attention."""

    def __init__(self, d_model=24, n_heads=3):
        super().__init__()
        self.layer = nn.MultiheadAttention(d_model, n_heads, batch_first=True)

    def forward(self, x):
        return self.layer(x, x, x)[0]


layer = Attention()
torch.manual_seed(0)
print(layer(torch.randn(2, 5, 24)).shape)
