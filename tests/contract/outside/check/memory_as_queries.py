"""A decoder block whose cross-attention reads the decoder's own states."""

from torch import nn


class Heads(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query, key, value, mask=None):
        b, t, d = query.shape
        q, k, v = (
            p(x).view(b, x.shape[1], self.n_heads, -1).transpose(1, 2)
            for p, x in ((self.q, query), (self.k, key), (self.v, value))
        )
        s = q @ k.transpose(-2, -1) / (d // self.n_heads) ** 0.5
        if mask is not None:
            s = s.masked_fill(mask == 0, float("-inf"))
        return self.o((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))


class DecoderLayer(nn.Module):
    def __init__(self, d_model=64, n_heads=4):
        super().__init__()
        self.self_attn, self.cross_attn = Heads(d_model, n_heads), Heads(d_model, n_heads)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))
        self.ff = nn.Sequential(nn.Linear(d_model, 128), nn.ReLU(), nn.Linear(128, d_model))

    def forward(self, x, memory, tgt_mask=None):
        x = self.norm1(x + self.self_attn(x, x, x, tgt_mask))
        x = self.norm2(x + self.cross_attn(memory, x, x))
        return self.norm3(x + self.ff(x))
