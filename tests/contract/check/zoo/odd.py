"""Attention that differs from the ordinary on purpose, or behaves in ways that make it hard to
examine.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


def heads_of(t, n_heads):
    """[batch, time, width] → [batch, head, time, width of a head]"""
    return t.unflatten(-1, (n_heads, -1)).transpose(1, 2)


class LearnedTemperature(nn.Module):
    """Self-attention with a learned temperature: scores are multiplied by exp(temperature), which
    starts at 1/√d_head.
    """

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.temperature = nn.Parameter(torch.log(torch.tensor((dim // heads) ** -0.5)))
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (heads_of(t, self.heads) for t in self.to_qkv(x).chunk(3, dim=-1))
        weights = (q @ k.mT * self.temperature.exp()).softmax(dim=-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """One projection for queries, keys and values."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)


class CosineAttention(Fused):
    """Self-attention by cosine similarity over `tau`, as in Swin V2."""

    def __init__(self, dim, heads, tau=0.1):
        super().__init__(dim, heads)
        self.tau = tau

    def forward(self, x):
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        weights = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT / self.tau).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class FixedScale(Fused):
    """Causal self-attention of normed queries and keys with a scale of its own, whose values are
    multiplied by a learned number.
    """

    def __init__(self, dim, heads, tau=0.12):
        super().__init__(dim, heads)
        self.tau, self.share = tau, nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        q, k = (F.rms_norm(t, t.shape[-1:]) for t in (q, k))
        z = F.scaled_dot_product_attention(q, k, self.share * v, is_causal=True, scale=self.tau)
        return self.proj(z.transpose(1, 2).flatten(2))


class NormedValues(Fused):
    """Self-attention whose queries, keys and values are normed."""

    def forward(self, x):
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        q, k, v = (F.rms_norm(t, t.shape[-1:]) for t in (q, k, v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class SlidingWindow(Fused):
    """Causal self-attention with a window: a token sees itself and the `window` − 1 tokens before
    it.
    """

    def __init__(self, dim, heads, window=3):
        super().__init__(dim, heads)
        self.window = window

    def forward(self, x):
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        allowed = (
            torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device)
            .tril()
            .triu(1 - self.window)
        )
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.proj(z.transpose(1, 2).flatten(2))


class TalkingHeads(Fused):
    """Self-attention with talking heads: the scores of the heads are mixed before the softmax, the
    weights after it.
    """

    def __init__(self, dim, heads):
        super().__init__(dim, heads)
        self.before, self.after = (
            nn.Linear(heads, heads, bias=False),
            nn.Linear(heads, heads, bias=False),
        )

    def forward(self, x):
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.mT / math.sqrt(q.size(-1))
        weights = self.before(scores.movedim(1, -1)).softmax(dim=-2)
        weights = self.after(weights).movedim(-1, 1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class LinearAttention(Fused):
    """Linear attention: elu(q) + 1 and elu(k) + 1 take the place of the softmax."""

    def forward(self, x):
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        z = (q @ (k.mT @ v)) / (q @ k.sum(dim=-2).unsqueeze(-1))
        return self.proj(z.transpose(1, 2).flatten(2))


class InterpretableAttention(nn.Module):
    """The interpretable attention of the temporal fusion transformer: all heads share one value,
    and are averaged.
    """

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, self.d_head)
        self.out_proj = nn.Linear(self.d_head, d_model)

    def forward(self, x):
        q, k = heads_of(self.q_proj(x), self.n_heads), heads_of(self.k_proj(x), self.n_heads)
        weights = (q @ k.mT / math.sqrt(self.d_head)).softmax(dim=-1).mean(dim=1)
        return self.out_proj(weights @ self.v_proj(x))


class SharedHeadProjections(nn.Module):
    """Each head projects its own slice of the input, all heads with the same small matrices."""

    def __init__(self, embed_size, heads):
        super().__init__()
        self.heads, self.head_dim = heads, embed_size // heads
        self.values, self.keys, self.queries = (
            nn.Linear(self.head_dim, self.head_dim, bias=False) for _ in range(3)
        )
        self.fc_out = nn.Linear(heads * self.head_dim, embed_size)

    def forward(self, values, keys, query, mask=None):
        N = query.shape[0]
        values = self.values(values.reshape(N, -1, self.heads, self.head_dim))
        keys = self.keys(keys.reshape(N, -1, self.heads, self.head_dim))
        queries = self.queries(query.reshape(N, -1, self.heads, self.head_dim))
        energy = torch.einsum("nqhd,nkhd->nhqk", [queries, keys])
        if mask is not None:
            energy = energy.masked_fill(mask == 0, float("-1e20"))
        attention = torch.softmax(energy / self.head_dim**0.5, dim=3)
        out = torch.einsum("nhql,nlhd->nqhd", [attention, values]).flatten(2)
        return self.fc_out(out)


class UnplacedQueries(nn.Module):
    """Attention of a query to keys and values, causal."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(d_model, d_model) for _ in range(4)
        )

    def forward(self, query, key, value):
        q, k, v = (
            heads_of(p(t), self.n_heads)
            for p, t in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(z.transpose(1, 2).flatten(2))


class UnseenKeyBias(UnplacedQueries):
    """Self-attention between cities."""

    def forward(self, x):
        q, v = heads_of(self.q_proj(x), self.n_heads), heads_of(self.v_proj(x), self.n_heads)
        k = heads_of(F.linear(x, self.k_proj.weight), self.n_heads)
        weights = (q @ k.mT / math.sqrt(q.size(-1))).softmax(dim=-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


class GatedAttention(Fused):
    """Self-attention whose heads pass a gate, a sigmoid of the input, before the output
    projection.
    """

    def __init__(self, dim, heads):
        super().__init__(dim, heads)
        self.gate = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        z = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.proj(z * self.gate(x).sigmoid())


class Plain(nn.Module):
    def __init__(self, d_model=24, n_heads=3):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / math.sqrt(q.size(-1))).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Counts(Plain):
    """Counts its calls, and nothing else depends on it."""

    def __init__(self, d_model=24, n_heads=3):
        super().__init__(d_model, n_heads)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen += x.size(1)
        return super().forward(x)


class Drifts(Plain):
    """Adds what it has seen before to what it sees."""

    def __init__(self, d_model=24, n_heads=3):
        super().__init__(d_model, n_heads)
        self.mean = 0.0

    def forward(self, x):
        out = super().forward(x + self.mean)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return out


class RefusesInputs(Plain):
    """Takes only inputs whose sum is small, in any call."""

    def forward(self, x):
        if x.sum() > 0:
            raise ValueError("the sum is too large")
        return super().forward(x)


class ChangesItsInput(Plain):
    """Changes what it is given."""

    def forward(self, x):
        x.mul_(2.0).sub_(x.mean(dim=-1, keepdim=True))
        return super().forward(x)


class Random(Plain):
    """Gives another answer each time."""

    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


class FloatOnly(Plain):
    """Casts whatever comes to float32."""

    def forward(self, x):
        qkv = F.linear(x.float(), self.qkv.weight.float(), self.qkv.bias.float())
        q, k, v = qkv.unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return F.linear(z, self.out.weight.float(), self.out.bias.float())


class Normalizes(Plain):
    """Normalizes before it attends and adds its input to the result: a block, not a layer."""

    def __init__(self, d_model=24, n_heads=3):
        super().__init__(d_model, n_heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x):
        return x + super().forward(self.norm(x))


class PixelBlock(nn.Module):
    """Between the pixels of a map of channels, whose groups are normalised; the scores have a cap
    of 30.
    """

    def __init__(self, channels=24, heads=3):
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(4, channels)
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = (
            t.reshape(b * self.heads, c // self.heads, h * w)
            for t in self.qkv(self.norm(x)).chunk(3, dim=1)
        )
        scores = torch.einsum("bcn,bcm->bnm", q, k) / (c // self.heads) ** 0.5
        pattern = (30 * torch.tanh(scores / 30)).softmax(dim=-1)
        return x + self.out(torch.einsum("bnm,bcm->bcn", pattern, v).reshape(b, c, h, w))


class NoAttention(nn.Module):
    """Something else altogether."""

    def __init__(self, d_model=24):
        super().__init__()
        self.mix = nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.mix(x).relu()
