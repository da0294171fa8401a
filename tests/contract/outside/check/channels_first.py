"""Attention of a speech model: [batch, channels, time], 1x1 convolutions, a second input c."""

from torch import nn


class ConvHeads(nn.Module):
    def __init__(self, channels=64, n_heads=4):
        super().__init__()
        self.n_heads = n_heads
        self.conv_q, self.conv_k, self.conv_v, self.conv_o = (
            nn.Conv1d(channels, channels, 1) for _ in range(4)
        )

    def heads(self, y):
        return y.unflatten(1, (self.n_heads, -1)).mT

    def forward(self, x, c, attn_mask=None):
        q, k, v = self.heads(self.conv_q(x)), self.heads(self.conv_k(c)), self.heads(self.conv_v(c))
        logits = (q * q.shape[-1] ** -0.5) @ k.mT
        if attn_mask is not None:
            logits = logits.masked_fill(attn_mask == 0, -1e4)
        mixed = logits.softmax(-1) @ v
        return self.conv_o(mixed.mT.flatten(1, 2))
