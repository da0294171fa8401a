"""Attention that differs from the ordinary one on purpose, or in a way that nobody can judge from outside."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def heads_of(t, n_heads):
    """[batch, time, width] → [batch, head, time, width of a head]"""
    return t.unflatten(-1, (n_heads, -1)).transpose(1, 2)


class LearnedTemperature(nn.Module):
    """Self-attention with a learned temperature: scores are multiplied by exp(temperature), which starts at 1/√d_head."""

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


class NormalizedQueriesAndKeys(nn.Module):
    """Self-attention with QK-norm: queries and keys of each head are normalized before their product."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_norm, self.k_norm = nn.LayerNorm(dim // num_heads), nn.LayerNorm(dim // num_heads)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (heads_of(t, self.num_heads) for t in self.qkv(x).chunk(3, dim=-1))
        z = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.proj(z.transpose(1, 2).flatten(2))


class CosineAttention(nn.Module):
    """Self-attention by cosine similarity over `tau`, as in Swin V2."""

    def __init__(self, dim, heads, tau=0.1):
        super().__init__()
        self.heads, self.tau = heads, tau
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        weights = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT / self.tau).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class DistancePenalty(nn.Module):
    """Causal self-attention with ALiBi: the farther a key, the lower its score."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.register_buffer("slopes", 2.0 ** (-8 * torch.arange(1, heads + 1) / heads))

    def forward(self, x):
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        places = torch.arange(x.size(1), device=x.device)
        distance = places[:, None] - places
        scores = q @ k.mT / math.sqrt(q.size(-1)) - self.slopes[:, None, None] * distance
        weights = scores.masked_fill(distance < 0, float("-inf")).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class RelativeBias(nn.Module):
    """Self-attention with a learned bias for each head and distance, up to max_distance."""

    def __init__(self, dim, heads, max_distance=16):
        super().__init__()
        self.heads, self.max_distance = heads, max_distance
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.bias = nn.Parameter(torch.randn(heads, 2 * max_distance + 1))

    def forward(self, x):
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        places = torch.arange(x.size(1), device=x.device)
        distance = (places[:, None] - places).clamp(-self.max_distance, self.max_distance) + self.max_distance
        weights = (q @ k.mT / math.sqrt(q.size(-1)) + self.bias[:, distance]).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class SlidingWindow(nn.Module):
    """Causal self-attention with a window: a token sees itself and the `window` − 1 tokens before it."""

    def __init__(self, dim, heads, window=3):
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        allowed = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).tril().triu(1 - self.window)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.proj(z.transpose(1, 2).flatten(2))


class AttentionSink(nn.Module):
    """Self-attention with one more key, whose score is learned and whose value is 0: the weights may sum to less than 1."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.sinks = nn.Parameter(torch.zeros(heads))

    def forward(self, x):
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.mT / math.sqrt(q.size(-1))
        sinks = self.sinks[:, None, None].expand(x.size(0), -1, x.size(1), 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class TalkingHeads(nn.Module):
    """Self-attention with talking heads: the scores of the heads are mixed before the softmax, the weights after it."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.before, self.after = nn.Linear(heads, heads, bias=False), nn.Linear(heads, heads, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.mT / math.sqrt(q.size(-1))
        weights = self.before(scores.movedim(1, -1)).softmax(dim=-2)
        weights = self.after(weights).movedim(-1, 1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class LinearAttention(nn.Module):
    """Linear attention: elu(q) + 1 and elu(k) + 1 take the place of the softmax."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        z = (q @ (k.mT @ v)) / (q @ k.sum(dim=-2).unsqueeze(-1))
        return self.proj(z.transpose(1, 2).flatten(2))


class InterpretableAttention(nn.Module):
    """The interpretable attention of the temporal fusion transformer: all heads share one value, and are averaged."""

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
        self.values = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.keys = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.queries = nn.Linear(self.head_dim, self.head_dim, bias=False)
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


class SharedHeadsWideScale(SharedHeadProjections):
    """Each head projects its own slice of the input."""

    def forward(self, values, keys, query, mask=None):
        N = query.shape[0]
        values = self.values(values.reshape(N, -1, self.heads, self.head_dim))
        keys = self.keys(keys.reshape(N, -1, self.heads, self.head_dim))
        queries = self.queries(query.reshape(N, -1, self.heads, self.head_dim))
        energy = torch.einsum("nqhd,nkhd->nhqk", [queries, keys])
        if mask is not None:
            energy = energy.masked_fill(mask == 0, float("-1e20"))
        attention = torch.softmax(energy / (self.heads * self.head_dim) ** 0.5, dim=3)
        out = torch.einsum("nhql,nlhd->nqhd", [attention, values]).flatten(2)
        return self.fc_out(out)


class SilentlyBatchSecond(nn.Module):
    """Self-attention."""

    def __init__(self, width, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.n_heads, -1)) for t in self.qkv(x).chunk(3, dim=-1))
        weights = torch.softmax(torch.einsum("qbhd,kbhd->bhqk", q, k) / math.sqrt(q.size(-1)), dim=-1)
        return self.out(torch.einsum("bhqk,kbhd->qbhd", weights, v).flatten(2))


class UnplacedQueries(nn.Module):
    """Attention of a query to keys and values, causal."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, query, key, value):
        q, k, v = (
            heads_of(p(t), self.n_heads) for p, t in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(z.transpose(1, 2).flatten(2))


class UnseenKeyBias(nn.Module):
    """Self-attention between cities."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, v = heads_of(self.q_proj(x), self.n_heads), heads_of(self.v_proj(x), self.n_heads)
        k = heads_of(F.linear(x, self.k_proj.weight), self.n_heads)
        weights = (q @ k.mT / math.sqrt(q.size(-1))).softmax(dim=-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


class TwoMasksAtOnce(nn.Module):
    """Causal self-attention; mask [batch, 1, time, time] is True where attention is allowed, the triangle aside."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        allowed = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).tril()
        if mask is not None:
            allowed = allowed & mask
        scores = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(~allowed, torch.finfo(x.dtype).min)
        return self.proj((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class MeanRescaled(nn.Module):
    """Self-attention with DropKey: in training some keys are hidden before the softmax, so that nothing is to be rescaled."""

    def __init__(self, dim, heads, mask_ratio=0.3):
        super().__init__()
        self.heads, self.mask_ratio = heads, mask_ratio
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.mT / math.sqrt(q.size(-1))
        if self.training:
            scores = scores - 1e12 * torch.bernoulli(torch.full_like(scores, self.mask_ratio))
        return self.proj((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class GatedAttention(nn.Module):
    """Self-attention whose heads pass a gate, a sigmoid of the input, before the output projection."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.gate = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        z = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.proj(z * self.gate(x).sigmoid())


class OneTokenMore(nn.Module):
    """Self-attention of an encoder with a class token: it is put in front of x, and returned with the rest."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        x = torch.cat([self.token.expand(x.size(0), -1, -1), x], dim=1)
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        z = F.scaled_dot_product_attention(q, k, v)
        return self.proj(z.transpose(1, 2).flatten(2))
