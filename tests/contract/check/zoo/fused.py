"""Attention with one linear layer for queries, keys and values, or one for keys and values."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class VisionAttention(nn.Module):
    """Self-attention over the patches of a picture."""

    def __init__(self, dim, num_heads, qkv_bias=True):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = (
            self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        )
        q, k, v = qkv.unbind(0)
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class ChunkedAttention(nn.Module):
    """Self-attention with einsum; True in the mask hides a key."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        dots = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.size(-1))
        if mask is not None:
            dots = dots.masked_fill(mask, float("-inf"))
        attn = F.softmax(dots, dim=-1)
        out = torch.einsum("bhij,bhjd->bhid", attn, v)
        return self.to_out(out.transpose(1, 2).flatten(2))


class KernelAttention(nn.Module):
    """Self-attention with torch's kernel; True in the mask shows a key."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(z.transpose(1, 2).flatten(2))


class CausalAttention(nn.Module):
    """GPT's attention with torch's kernel."""

    def __init__(self, n_embd, n_head, dropout=0.5):
        super().__init__()
        self.n_head, self.n_embd, self.dropout = n_head, n_embd, dropout
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class TriangleAttention(nn.Module):
    """Causal self-attention with a triangle that each call makes, and dropout."""

    def __init__(self, emb_size, n_heads, drop_rate=0.5):
        super().__init__()
        self.n_heads, self.drop_rate = n_heads, drop_rate
        self.qkv = nn.Linear(emb_size, 3 * emb_size)
        self.out = nn.Linear(emb_size, emb_size)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        future = torch.triu(torch.ones(n, n, device=x.device), diagonal=1).bool()
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.n_heads)
        scores = scores.masked_fill(future, float("-inf"))
        weights = scores.softmax(dim=-1)
        weights = F.dropout(weights, self.drop_rate, self.training)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, d))


class LengthsAttention(nn.Module):
    """Self-attention; `lengths` says how many tokens of each sequence are real."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, lengths=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(q.size(-1))
        if lengths is not None:
            real = torch.arange(x.size(1), device=x.device) < lengths[:, None]
            scores = scores.masked_fill(~real[:, None, None, :], float("-inf"))
        return self.proj((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class FlatAttention(nn.Module):
    """Self-attention whose batch and heads are one axis; True in the mask [batch, query, key] hides
    a key.
    """

    def __init__(self, units, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.in_proj = nn.Linear(units, 3 * units)
        self.out_proj = nn.Linear(units, units)

    def planes(self, t):
        b, n, _ = t.shape
        return t.view(b, n, self.num_heads, -1).transpose(1, 2).reshape(b * self.num_heads, n, -1)

    def forward(self, x, mask=None):
        b, n, d = x.shape
        q, k, v = (self.planes(t) for t in self.in_proj(x).chunk(3, dim=-1))
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask.repeat_interleave(self.num_heads, dim=0), -1e9)
        z = torch.bmm(scores.softmax(dim=-1), v)
        z = z.view(b, self.num_heads, n, -1).transpose(1, 2)
        return self.out_proj(z.reshape(b, n, d))


class PerHeadAttention(nn.Module):
    """The fused layer lies head by head."""

    def __init__(self, input_dim, embed_dim, num_heads):
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.qkv_proj = nn.Linear(input_dim, 3 * embed_dim)
        self.o_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, mask=None):
        batch_size, seq_length, _ = x.size()
        qkv = (
            self.qkv_proj(x)
            .reshape(batch_size, seq_length, self.num_heads, 3 * self.head_dim)
            .permute(0, 2, 1, 3)
        )
        q, k, v = qkv.chunk(3, dim=-1)
        logits = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.head_dim)
        if mask is not None:
            logits = logits.masked_fill(mask == 0, -9e15)
        values = torch.matmul(F.softmax(logits, dim=-1), v)
        values = values.permute(0, 2, 1, 3).reshape(batch_size, seq_length, self.embed_dim)
        return self.o_proj(values)


class ContextAttention(nn.Module):
    """Attention to a context, with heads of any width."""

    def __init__(self, query_dim, context_dim, heads, dim_head):
        super().__init__()
        self.scale, self.heads = dim_head**-0.5, heads
        self.to_q = nn.Linear(query_dim, dim_head * heads, bias=False)
        self.to_kv = nn.Linear(context_dim, 2 * dim_head * heads, bias=False)
        self.to_out = nn.Linear(dim_head * heads, query_dim)

    def forward(self, x, context):
        h, (b, n, _), m = self.heads, x.shape, context.shape[1]
        k, v = self.to_kv(context).chunk(2, dim=-1)
        q = self.to_q(x).reshape(b, n, h, -1).permute(0, 2, 1, 3).reshape(b * h, n, -1)
        k = k.reshape(b, m, h, -1).permute(0, 2, 1, 3).reshape(b * h, m, -1)
        v = v.reshape(b, m, h, -1).permute(0, 2, 1, 3).reshape(b * h, m, -1)
        attn = (torch.einsum("bid,bjd->bij", q, k) * self.scale).softmax(dim=-1)
        out = torch.einsum("bij,bjd->bid", attn, v)
        return self.to_out(out.reshape(b, h, n, -1).permute(0, 2, 1, 3).reshape(b, n, -1))


class FusedGroups(nn.Module):
    """Grouped queries in one fused layer."""

    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.d_head = n_heads, n_kv_heads, dim // n_heads
        self.wqkv = nn.Linear(dim, (n_heads + 2 * n_kv_heads) * self.d_head)
        self.wo = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        widths = (
            self.n_heads * self.d_head,
            self.n_kv_heads * self.d_head,
            self.n_kv_heads * self.d_head,
        )
        q, k, v = (
            y.view(b, t, -1, self.d_head).transpose(1, 2)
            for y in self.wqkv(x).split(widths, dim=-1)
        )
        groups = self.n_heads // self.n_kv_heads
        k, v = (y[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for y in (k, v))
        z = F.scaled_dot_product_attention(q, k, v)
        return self.wo(z.transpose(1, 2).reshape(b, t, d))
