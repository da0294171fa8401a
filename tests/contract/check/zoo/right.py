"""Attention in forms that are right, however unlike each other."""

import enum
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm


class Einsum(nn.Module):
    """Attention of x to context, or to itself."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q = nn.Linear(d_model, d_model)
        self.kv = nn.Linear(d_model, 2 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x, context=None):
        context = x if context is None else context
        q = self.q(x).unflatten(-1, (self.n_heads, -1))
        k, v = self.kv(context).unflatten(-1, (2, self.n_heads, -1)).unbind(-3)
        scores = torch.einsum("b i h d, b j h d -> b h i j", q, k) * q.shape[-1] ** -0.5
        out = torch.einsum("b h i j, b j h d -> b i h d", scores.softmax(dim=-1), v)
        return self.out(out.flatten(-2))


class OneHead(nn.Module):
    """One head of self-attention."""

    def __init__(self, n_embd, head_size, block_size, dropout):
        super().__init__()
        self.key, self.query, self.value = (
            nn.Linear(n_embd, head_size, bias=False) for _ in range(3)
        )
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        T = x.size(1)
        k = self.key(x)
        q = self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = self.dropout(F.softmax(wei, dim=-1))
        return wei @ self.value(x)


class NarrowHead(nn.Module):
    """One narrow head of a fused matrix, `head` columns wide, and a statement without a result."""

    def __init__(self, dim, head):
        super().__init__()
        self.c = nn.Linear(dim, 3 * head)
        self.o = nn.Linear(head, dim)

    def forward(self, x):
        q, k, v = self.c(x).chunk(3, dim=-1)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores - scores.amax(dim=-1, keepdim=True)
        return self.o(scores.softmax(dim=-1) @ v)


class LoopOverHeads(nn.Module):
    """Multiple heads of self-attention in parallel."""

    def __init__(self, n_embd, num_heads, block_size=32, dropout=0.2):
        super().__init__()
        head_size = n_embd // num_heads
        self.heads = nn.ModuleList(
            [OneHead(n_embd, head_size, block_size, dropout) for _ in range(num_heads)]
        )
        self.proj = nn.Linear(n_embd, n_embd)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        out = torch.cat([h(x) for h in self.heads], dim=-1)
        return self.dropout(self.proj(out))


class Wrapped(nn.Module):
    """torch's own layer, for self-attention."""

    def __init__(self, hidden, heads, dropout=0.1):
        super().__init__()
        self.layer = nn.MultiheadAttention(hidden, heads, dropout=dropout, batch_first=True)

    def forward(self, x, key_padding_mask=None):
        out, _ = self.layer(x, x, x, key_padding_mask=key_padding_mask, need_weights=False)
        return out


class MultiQuery(nn.Module):
    """Multi-query attention: one head of keys and values for all."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * self.head_dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q = self.q(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        k, v = self.kv(x).unsqueeze(1).chunk(2, dim=-1)
        weights = torch.softmax(q @ k.mT / self.head_dim**0.5, dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, t, d))


class Unscaled(nn.Module):
    """Attention to a context, or to itself, with scores as they are."""

    def __init__(self, d_model, d_kv, num_heads):
        super().__init__()
        self.d_kv, self.n_heads = d_kv, num_heads
        inner_dim = num_heads * d_kv
        self.q, self.k, self.v = (nn.Linear(d_model, inner_dim, bias=False) for _ in range(3))
        self.o = nn.Linear(inner_dim, d_model, bias=False)

    def forward(self, x, key_value_states=None):
        rows = x if key_value_states is None else key_value_states
        b = x.size(0)
        q = self.q(x).view(b, -1, self.n_heads, self.d_kv).transpose(1, 2)
        k = self.k(rows).view(b, -1, self.n_heads, self.d_kv).transpose(1, 2)
        v = self.v(rows).view(b, -1, self.n_heads, self.d_kv).transpose(1, 2)
        weights = F.softmax(torch.matmul(q, k.transpose(3, 2)), dim=-1)
        return self.o(
            torch.matmul(weights, v).transpose(1, 2).reshape(b, -1, self.n_heads * self.d_kv)
        )


class RawParameters(nn.Module):
    """Self-attention with plain matrices: rows @ W."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.W_q = nn.Parameter(torch.randn(d_model, d_model) / d_model**0.5)
        self.W_k = nn.Parameter(torch.randn(d_model, d_model) / d_model**0.5)
        self.W_v = nn.Parameter(torch.randn(d_model, d_model) / d_model**0.5)
        self.W_o = nn.Parameter(torch.randn(d_model, d_model) / d_model**0.5)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (
            (x @ w).view(b, t, self.n_heads, -1).transpose(1, 2)
            for w in (self.W_q, self.W_k, self.W_v)
        )
        weights = (q @ k.transpose(-2, -1) / math.sqrt(d // self.n_heads)).softmax(dim=-1)
        return (weights @ v).transpose(1, 2).reshape(b, t, d) @ self.W_o


class Kernels(nn.Module):
    """Self-attention with a kernel [head, d_model, d_head] each, as in the interpretability
    literature.
    """

    def __init__(self, d_model, n_heads, d_head):
        super().__init__()
        self.d_head = d_head
        self.W_Q = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_K = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_V = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_O = nn.Parameter(torch.randn(n_heads, d_head, d_model) * 0.2)
        self.b_Q = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_K = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_V = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_O = nn.Parameter(torch.zeros(d_model))

    def forward(self, x):
        q = torch.einsum("bqm,nmh->bqnh", x, self.W_Q) + self.b_Q
        k = torch.einsum("bkm,nmh->bknh", x, self.W_K) + self.b_K
        v = torch.einsum("bkm,nmh->bknh", x, self.W_V) + self.b_V
        scores = torch.einsum("bqnh,bknh->bnqk", q, k) / self.d_head**0.5
        future = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu(1)
        pattern = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        z = torch.einsum("bnqk,bknh->bqnh", pattern, v)
        return torch.einsum("bqnh,nhm->bqm", z, self.W_O) + self.b_O


class OtherValueWidth(nn.Module):
    """Attention with values of a width of their own."""

    def __init__(self, d_model, n_heads, d_k, d_v):
        super().__init__()
        self.n_heads, self.d_k, self.d_v = n_heads, d_k, d_v
        self.w_qs = nn.Linear(d_model, n_heads * d_k, bias=False)
        self.w_ks = nn.Linear(d_model, n_heads * d_k, bias=False)
        self.w_vs = nn.Linear(d_model, n_heads * d_v, bias=False)
        self.fc = nn.Linear(n_heads * d_v, d_model, bias=False)

    def forward(self, q, k, v, mask=None):
        b, len_q, len_k = q.size(0), q.size(1), k.size(1)
        q = self.w_qs(q).view(b, len_q, self.n_heads, self.d_k).transpose(1, 2)
        k = self.w_ks(k).view(b, len_k, self.n_heads, self.d_k).transpose(1, 2)
        v = self.w_vs(v).view(b, len_k, self.n_heads, self.d_v).transpose(1, 2)
        scores = torch.matmul(q / self.d_k**0.5, k.transpose(2, 3))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        z = torch.matmul(F.softmax(scores, dim=-1), v)
        return self.fc(z.transpose(1, 2).contiguous().view(b, len_q, -1))


class OwnScale(nn.Module):
    """Self-attention whose scores are multiplied by `scale`, 1/√d_head if none is given."""

    def __init__(self, d_model, n_heads, scale=None):
        super().__init__()
        self.n_heads = n_heads
        self.scale = (d_model // n_heads) ** -0.5 if scale is None else scale
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT * self.scale).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class SingleSoftmax(nn.Module):
    """Self-attention whose softmax is done in float32, whatever the rest is."""

    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(hidden_size, hidden_size) for _ in range(4)
        )

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.size(-1))
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return self.o_proj(torch.matmul(weights, v).transpose(1, 2).flatten(2))


class StridedHeads(nn.Module):
    """Self-attention in which head h has every n-th column, beginning with column h."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (-1, self.n_heads)).permute(0, 3, 1, 2)
            for t in self.qkv(x).chunk(3, dim=-1)
        )
        weights = (q @ k.mT / math.sqrt(q.size(-1))).softmax(dim=-1)
        return self.out((weights @ v).permute(0, 2, 3, 1).flatten(2))


def self_attention(x, weights, n_heads):
    """Multi-head self-attention of x [batch, time, width] with the weights of a dictionary."""
    q, k, v = (F.linear(x, weights[f"{p}_weight"], weights[f"{p}_bias"]) for p in ("q", "k", "v"))
    q, k, v = (t.unflatten(-1, (n_heads, -1)).transpose(1, 2) for t in (q, k, v))
    pattern = torch.softmax(q @ k.mT / q.size(-1) ** 0.5, dim=-1)
    return F.linear(
        (pattern @ v).transpose(1, 2).flatten(2), weights["out_weight"], weights["out_bias"]
    )


class Functional(nn.Module):
    """Self-attention as a function of x and of weights; this only holds the weights."""

    def __init__(self, width, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.weights = nn.ParameterDict()
        for p in ("q", "k", "v", "out"):
            self.weights[f"{p}_weight"] = nn.Parameter(torch.randn(width, width) / width**0.5)
            self.weights[f"{p}_bias"] = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return self_attention(x, self.weights, self.n_heads)


class AttentionWithoutModule:
    """Self-attention as a class of its own, which is called."""

    def __init__(self, d_model, n_heads):
        self.n_heads = n_heads
        self.q, self.k, self.v, self.o = (
            torch.randn(d_model, d_model) / d_model**0.5 for _ in range(4)
        )

    def __call__(self, x):
        q, k, v = (
            (x @ w.to(x)).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for w in (self.q, self.k, self.v)
        )
        z = (q @ k.mT / math.sqrt(q.size(-1))).softmax(dim=-1) @ v
        return z.transpose(1, 2).flatten(2) @ self.o.to(x)


class ContextAttention(nn.Module):
    """As in x-transformers: `mask` for its rows, which alone are normed, `context_mask` for those
    of the context.
    """

    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(dim)
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.to_out = nn.Linear(dim, dim)

    def masks(self, context, mask, context_mask):
        return mask if context is None else context_mask

    def forward(self, x, context=None, mask=None, context_mask=None):
        x = self.norm(x)
        rows = x if context is None else context
        q, k, v = (
            layer(part).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, part in ((self.to_q, x), (self.to_k, rows), (self.to_v, rows))
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        keep = self.masks(context, mask, context_mask)
        if keep is not None:
            scores = scores.masked_fill(~keep[:, None, None, :], -torch.finfo(scores.dtype).max)
        return self.to_out((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class CausalOverOwnRows(ContextAttention):
    """Causal over its rows, open over a context."""

    def forward(self, x, context=None, mask=None, context_mask=None):
        if context is not None:
            return super().forward(x, context, mask, context_mask)
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.to_q, self.to_k, self.to_v)
        )
        keep = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        if mask is not None:
            keep = keep & mask[:, None, None, :]
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return self.to_out(z.transpose(1, 2).flatten(2))


class UnlessMasked(nn.Module):
    """Causal by itself; a mask that a caller gives is the whole mask."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        q, k, v = (
            part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(z.transpose(1, 2).flatten(2))


class TenThousand(nn.Module):
    """Masked scores become a number that no ordinary score falls below."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x, mask):
        q, k, v = (
            part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(mask[:, None, None] == 0, -10000.0)
        return self.out((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class Latent(nn.Module):
    """Keys and values of a narrow latent, with weights that torch computes from others."""

    def __init__(self, d_model, n_heads, rank=7):
        super().__init__()
        self.n_heads = n_heads
        self.q_proj, self.kv_down = (
            weight_norm(nn.Linear(d_model, d_model)),
            nn.Linear(d_model, rank),
        )
        self.k_up, self.v_up = nn.Linear(rank, d_model), nn.Linear(rank, d_model, bias=False)
        self.out_proj = weight_norm(nn.Linear(d_model, d_model))

    def forward(self, x):
        latent = self.kv_down(x)
        rows = self.q_proj(x), self.k_up(latent), self.v_up(latent)
        q, k, v = (each.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for each in rows)
        return self.out_proj(
            (torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v).transpose(1, 2).flatten(2)
        )


class GatedMap(nn.Module):
    """A fused convolution over a normalised map, heads outside, scaled on both sides; a gate that
    is closed at first.
    """

    def __init__(self, channels, heads=4):
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(32, channels)
        self.qkv, self.proj_out = (
            nn.Conv1d(channels, 3 * channels, 1),
            nn.Conv1d(channels, channels, 1),
        )
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = (
            self.qkv(self.norm(x.flatten(2))).reshape(b * self.heads, -1, h * w).chunk(3, dim=1)
        )
        root = (c // self.heads) ** -0.25
        weights = torch.softmax(torch.einsum("bct,bcs->bts", q * root, k * root), dim=-1)
        z = torch.einsum("bts,bcs->bct", weights, v).reshape(b, c, h * w)
        return x + self.gamma * self.proj_out(z).reshape(b, c, h, w)


class Kind(enum.Enum):
    """How attention is computed."""

    WRITTEN, FUSED = "written", "fused"


class Wide(nn.Module):
    """Large by default, of a kind that no word can be; an empty mask stands for none."""

    def __init__(self, kind: Kind, hidden_size=4096, num_heads=32):
        super().__init__()
        self.kind, self.num_heads = Kind(kind), num_heads
        self.qkv, self.out = (
            nn.Linear(hidden_size, 3 * hidden_size),
            nn.Linear(hidden_size, hidden_size),
        )

    def forward(self, x, mask=torch.ones((0, 0, 0), dtype=torch.bool)):  # noqa: B008
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        keep = mask.unsqueeze(1) if mask.size(2) > 0 else None
        scores = torch.empty(*q.shape[:2], q.shape[2], k.shape[2], dtype=q.dtype).flatten(0, 1)
        scores = torch.baddbmm(
            scores, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=q.shape[-1] ** -0.5
        )
        scores = scores.unflatten(0, q.shape[:2])
        scores = scores if keep is None else scores.masked_fill(~keep, -torch.inf)
        return self.out((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))
