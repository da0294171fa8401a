"""torch's layer in a module of one's own; the rows are [batch, length, width]."""

from torch import nn


class BatchBlock(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.attn = nn.MultiheadAttention(d_model, n_heads)

    def forward(self, x):
        """x: [batch, length, d_model]"""
        rows = self.norm(x)
        return x + self.attn(rows, rows, rows, need_weights=False)[0]
