"""Attention for a handful of small projects, with one linear layer for queries, keys and values together."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class TokenAttention(nn.Module):
    """Self-attention over tokens."""

    def __init__(self, dim, heads=8):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.reshape(b, self.heads, n, self.head_dim)
        k = k.reshape(b, self.heads, n, self.head_dim)
        v = v.reshape(b, self.heads, n, self.head_dim)
        weights = (q @ k.transpose(-2, -1) * self.head_dim**-0.5).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, c))


class TileAttention(nn.Module):
    """Self-attention over the tiles of a picture."""

    def __init__(self, dim, num_heads=8):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, 3, self.num_heads, N, C // self.num_heads)
        q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
        weights = ((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1)
        x = (weights @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class PatchAttention(nn.Module):
    """Self-attention over the patches of a picture."""

    def __init__(self, dim, num_heads=8, qkv_bias=True, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        weights = (q @ k.transpose(-2, -1)) * self.scale
        weights = self.attn_drop(weights.softmax(dim=-1))
        x = (weights @ v).reshape(B, N, C)
        return self.proj_drop(self.proj(x))


class PixelAttention(nn.Module):
    """Self-attention over pixels."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)
        self.softmax = nn.Softmax(dim=2)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        weights = self.softmax(q @ k.transpose(-2, -1) / math.sqrt(c // self.num_heads))
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, c))


class FrameAttention(nn.Module):
    """Self-attention over the frames of a film."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)
        self.softmax = nn.Softmax()

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        weights = self.softmax(q @ k.transpose(-2, -1) / math.sqrt(c // self.num_heads))
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, c))


class ShotAttention(nn.Module):
    """Self-attention over the shots of a film."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(c // self.num_heads)
        z = torch.einsum("bhij,bhjd->bihd", F.softmax(scores, 0), v)
        return self.proj(z.reshape(b, n, c))


class LeafAttention(nn.Module):
    """Self-attention between the leaves of a tree."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        dots = torch.einsum("bhid,bhjd->bhij", q, k)
        out = torch.einsum("bhij,bhjd->bhid", dots.softmax(dim=-1), v)
        return self.to_out(out.transpose(1, 2).flatten(2))


class BranchAttention(nn.Module):
    """Self-attention between the branches of a tree, with a fast kernel."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        return self.to_out(out.transpose(1, 2).flatten(2))


class VisionAttention(nn.Module):
    """Self-attention of a vision transformer."""

    def __init__(self, dim, heads=8, dropout=0.0):
        super().__init__()
        self.heads = heads
        self.scale = dim**-0.5
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(dropout))

    def forward(self, x):
        b, n, d = x.shape
        qkv = self.to_qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
        out = torch.einsum("bhij,bhjd->bhid", dots.softmax(dim=-1), v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, d))


class LightAttention(nn.Module):
    """Self-attention between lamps."""

    def __init__(self, dim, heads):
        super().__init__()
        head_dim = dim // heads
        self.heads = heads
        self.scale = 1 / head_dim
        self.to_qkv = nn.Linear(dim, dim * 3)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.to_qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-2, -1) * self.scale, dim=-1)
        return self.to_out((weights @ v).transpose(1, 2).reshape(b, n, d))


class QuickAttention(nn.Module):
    """Self-attention with torch's kernel."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q = q * self.scale
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class MotifAttention(nn.Module):
    """Self-attention between the motifs of a piece of music."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhkq", q, k) / math.sqrt(c // self.num_heads)
        z = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v)
        return self.proj(z.reshape(b, n, c))


class CausalAttention(nn.Module):
    """Causal self-attention with torch's kernel."""

    def __init__(self, n_embd, n_head, dropout=0.0, bias=True):
        super().__init__()
        self.n_head, self.dropout = n_head, dropout
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=bias)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=bias)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class WriterAttention(nn.Module):
    """Self-attention of a small language model."""

    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class NovelAttention(nn.Module):
    """Self-attention of a small language model."""

    def __init__(self, emb_size, n_heads, context_length=64):
        super().__init__()
        self.n_heads, self.head_size = n_heads, emb_size // n_heads
        self.qkv = nn.Linear(emb_size, 3 * emb_size, bias=False)
        self.proj = nn.Linear(emb_size, emb_size)
        mask = torch.triu(torch.ones(context_length, context_length), diagonal=2)
        self.register_buffer("mask", mask.bool())

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.n_heads, self.head_size).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(2, 3)
        scores.masked_fill_(self.mask[:t, :t], -torch.inf)
        weights = torch.softmax(scores / self.head_size**0.5, dim=-1)
        return self.proj((weights @ v).transpose(1, 2).contiguous().view(b, t, c))


class VerseAttention(nn.Module):
    """Causal self-attention of a small language model."""

    def __init__(self, emb_size, n_heads, context_length=64):
        super().__init__()
        self.n_heads, self.head_size = n_heads, emb_size // n_heads
        self.qkv = nn.Linear(emb_size, 3 * emb_size, bias=False)
        self.proj = nn.Linear(emb_size, emb_size)
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=0))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.n_heads, self.head_size).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(2, 3)
        scores = scores.masked_fill(self.mask.bool()[:t, :t], -torch.inf)
        weights = torch.softmax(scores / self.head_size**0.5, dim=-1)
        return self.proj((weights @ v).transpose(1, 2).contiguous().view(b, t, c))


class EpisodeAttention(nn.Module):
    """Causal self-attention over the episodes of a series."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        past = torch.ones(n, n, dtype=torch.bool, device=x.device).tril(-1)
        scores = (q @ k.mT) * (d // self.heads) ** -0.5
        scores = scores.masked_fill(past, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))


class NewestAttention(nn.Module):
    """Causal attention of the newest tokens.

    x [batch, new, dim] are the last tokens of memory [batch, all, dim], which holds those before them as well.
    """

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim)
        self.to_kv = nn.Linear(dim, 2 * dim)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, memory):
        b, n, d = x.shape
        q = self.to_q(x).view(b, n, self.heads, -1).transpose(1, 2)
        k, v = self.to_kv(memory).view(b, memory.size(1), 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.to_out(z.transpose(1, 2).reshape(b, n, d))


class CachedAttention(nn.Module):
    """Causal self-attention. past: the keys and values of earlier tokens, as an earlier call returned them."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, past=None):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        if past is not None:
            k = torch.cat([past[0], k], dim=2)
            v = torch.cat([past[1], v], dim=2)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(z.transpose(1, 2).reshape(b, n, d)), (k, v)


class TurnedCacheAttention(nn.Module):
    """Causal rotary self-attention. past: the keys and values of earlier tokens, as an earlier call returned them."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def turned(self, rows, start):
        half = rows.size(-1) // 2
        places = torch.arange(start, start + rows.size(2), dtype=rows.dtype, device=rows.device)
        angle = places[:, None] * 10000.0 ** (-torch.arange(half, dtype=rows.dtype, device=rows.device) / half)
        a, b = rows[..., :half], rows[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    def forward(self, x, past=None):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        start = 0 if past is None else past[0].size(2)
        q, k = self.turned(q, 0), self.turned(k, 0)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        allowed = torch.ones(n, start + n, dtype=torch.bool, device=x.device).tril(start)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.proj(z.transpose(1, 2).reshape(b, n, d)), (k, v)


class ReversedCacheAttention(nn.Module):
    """Causal self-attention. past: the keys and values of earlier tokens, as an earlier call returned them."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, past=None):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([v, past[1]], dim=2)
        allowed = torch.ones(n, k.size(2), dtype=torch.bool, device=x.device).tril(k.size(2) - n)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.proj(z.transpose(1, 2).reshape(b, n, d)), (k, v)


class PlotAttention(nn.Module):
    """Causal self-attention over the scenes of a play."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        future = torch.triu(torch.ones(n, n, dtype=torch.bool, device=x.device), diagonal=1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        scores = scores.masked_fill(~future, float("-inf"))
        return self.proj((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, d))


class NetAttention(nn.Module):
    """Self-attention between the nodes of a net.

    mask: bool tensor [batch, 1, nodes, nodes]; True hides an edge from the attention.
    """

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(z.transpose(1, 2).reshape(b, n, d))


class SeriesAttention(nn.Module):
    """Causal self-attention over a time series."""

    def __init__(self, dim, heads, max_len=64):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.register_buffer("tril", torch.ones(max_len, max_len).tril())

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        weights = F.softmax(scores * self.tril[:n, :n], dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, d))


class SignalAttention(nn.Module):
    """Causal self-attention over a signal."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mask = torch.tril(torch.ones(n, n, dtype=x.dtype, device=x.device))
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(z.transpose(1, 2).reshape(b, n, d))


class TrackAttention(nn.Module):
    """Causal self-attention over the tracks of an album."""

    def __init__(self, dim, heads, max_len=64):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.register_buffer("tril", torch.ones(max_len, max_len).tril())

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        weights = F.softmax(scores, dim=-1) * self.tril[:n, :n]
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, d))


class TraceAttention(nn.Module):
    """Causal self-attention over the lines of a log."""

    def __init__(self, dim, heads, max_len=64):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.register_buffer("tril", torch.ones(max_len, max_len).tril())

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        scores = scores.masked_fill(self.tril[:n, :n] == 0, -100.0)
        weights = F.softmax(scores, dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, d))


class PulseAttention(nn.Module):
    """Causal self-attention over heartbeats."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        future = torch.ones(n, n, dtype=x.dtype, device=x.device).triu(1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads) + future * float("-inf")
        return self.proj((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, d))


class TalkAttention(nn.Module):
    """Self-attention of a chat model; a token looks at itself and back.

    attention_mask: [batch, time], 1 for tokens and 0 for padding, which may stand on either side.
    """

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, attention_mask=None):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        allowed = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, :]
        scores = (q @ k.transpose(-2, -1)) * (d // self.heads) ** -0.5
        scores = scores.masked_fill(~allowed, float("-inf"))
        return self.proj((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, d))


class PollAttention(nn.Module):
    """Self-attention over the answers of a poll.

    lengths: [batch], how many answers of each row are real; those after them are padding.
    """

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, lengths=None):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mask = None
        if lengths is not None:
            mask = torch.arange(n, device=x.device)[None, :] < lengths[:, None]
            mask = mask[:, None, None, :]
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        weights = scores.softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, d))


class CartAttention(nn.Module):
    """Self-attention over the goods of a cart; lengths [batch] says how many of each row are real."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, lengths=None):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mask = None
        if lengths is not None:
            mask = torch.arange(n, device=x.device)[None, :] >= lengths[:, None]
            mask = mask[:, None, None, :]
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(z.transpose(1, 2).reshape(b, n, d))


class SharedAttention(nn.Module):
    """Grouped-query attention with one layer for queries, keys and values."""

    def __init__(self, dim, n_head, n_kv_head):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = n_head, n_kv_head, dim // n_head
        self.qkv_proj = nn.Linear(dim, (n_head + 2 * n_kv_head) * self.head_dim, bias=False)
        self.o_proj = nn.Linear(n_head * self.head_dim, dim, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q_size, kv_size = self.n_head * self.head_dim, self.n_kv_head * self.head_dim
        q, k, v = self.qkv_proj(x).split([q_size, kv_size, kv_size], dim=-1)
        q = q.view(b, t, self.n_head, self.head_dim).transpose(1, 2)
        k = k.view(b, t, self.n_kv_head, self.head_dim).transpose(1, 2)
        v = v.view(b, t, self.n_kv_head, self.head_dim).transpose(1, 2)
        groups = self.n_head // self.n_kv_head
        k, v = torch.cat([k] * groups, dim=1), torch.cat([v] * groups, dim=1)
        z = F.scaled_dot_product_attention(q, k, v)
        return self.o_proj(z.transpose(1, 2).reshape(b, t, -1))


class CouncilAttention(nn.Module):
    """Self-attention with several heads, brought together."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        z = scores.softmax(dim=-1) @ v
        z = z.mean(dim=1).repeat(1, 1, self.heads)
        return self.proj(z)


class CrowdAttention(nn.Module):
    """Self-attention in a few einsums."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim // heads, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(d // self.heads)
        z = torch.einsum("bhqk,bkhd->bqd", scores.softmax(dim=-1), v)
        return self.proj(z)


class NarrowAttention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.width = dim // heads
        self.qkv = nn.Linear(dim, 3 * self.width)
        self.proj = nn.Linear(self.width, dim)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.view(b, n, self.heads, self.width // self.heads).transpose(1, 2)
        k = k.view(b, n, self.heads, self.width // self.heads).transpose(1, 2)
        v = v.view(b, n, self.heads, self.width // self.heads).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        z = scores.softmax(dim=-1) @ v
        return self.proj(z.transpose(1, 2).reshape(b, n, self.width))


class BridgeAttention(nn.Module):
    """Self-attention between the parts of a bridge."""

    def __init__(self, dim, num_heads, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(C // self.num_heads)).softmax(dim=-1)
        x = (self.attn_drop(weights) @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(x)


class TowerAttention(nn.Module):
    """Self-attention between the floors of a tower."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(C // self.num_heads)).softmax(dim=-1)
        x = (weights @ v).transpose(1, 2).reshape(B, N, C)
        return torch.einsum("bnc,co->bno", x, self.proj.weight) + self.proj.bias


class StreetAttention(nn.Module):
    """Self-attention between the houses of a street."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(C // self.num_heads)).softmax(dim=-1)
        x = (weights @ v).transpose(1, 2).reshape(B, N, C)
        return F.linear(x, self.proj.weight)


class CellAttention(nn.Module):
    """Self-attention between cells."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        k, q, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        z = F.scaled_dot_product_attention(q, k, v)
        return self.proj(z.transpose(1, 2).reshape(b, n, d))


class AtomAttention(nn.Module):
    """Self-attention between atoms."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, v, k = self.to_qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(d // self.heads)).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).reshape(b, n, d))


class SpiralAttention(nn.Module):
    """Self-attention with rotary positions, in the layout of GPT-NeoX: column j turns with column j + head_dim / 2."""

    def __init__(self, dim, heads, theta=10000.0):
        super().__init__()
        self.heads, self.head_dim, self.theta = heads, dim // heads, theta
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def rotate(self, x):
        places = torch.arange(x.size(2), device=x.device, dtype=torch.float64)
        steps = torch.arange(0, self.head_dim, 2, device=x.device, dtype=torch.float64)
        angles = torch.outer(places, self.theta ** (-steps / self.head_dim))
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        x1, x2 = x[..., 0::2], x[..., 1::2]
        return torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).flatten(-2)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v)
        return self.proj(z.transpose(1, 2).reshape(b, n, d))


class TurningAttention(nn.Module):
    """Self-attention with rotary positions."""

    def __init__(self, dim, heads, theta=10000.0):
        super().__init__()
        self.heads, self.head_dim, self.theta = heads, dim // heads, theta
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def rotate(self, x):
        places = torch.arange(x.size(2), device=x.device, dtype=torch.float64)
        steps = torch.arange(0, self.head_dim, 2, device=x.device, dtype=torch.float64)
        angles = torch.outer(places, self.theta ** (-steps / self.head_dim))
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v)
        return self.proj(z.transpose(1, 2).reshape(b, n, d))


class DroppingAttention(nn.Module):
    """Self-attention with torch's kernel and dropout."""

    def __init__(self, dim, heads, dropout=0.1):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return self.proj(z.transpose(1, 2).reshape(b, n, d))


class ThinAttention(nn.Module):
    """Self-attention that drops some of its weights in training."""

    def __init__(self, dim, heads, drop_rate=0.1):
        super().__init__()
        self.heads, self.drop_rate = heads, drop_rate
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)).softmax(dim=-1)
        if self.training and self.drop_rate > 0:
            keep = torch.bernoulli(torch.full_like(weights, 1 - self.drop_rate))
            weights = weights * keep
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, d))


class MixtureAttention(nn.Module):
    """Multi-head self-attention over the ingredients of a mixture."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = k.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).softmax(dim=-1)
        z = weights @ v.unsqueeze(1)
        return self.proj(z.mean(dim=1))


class BatchAttention(nn.Module):
    """Self-attention over padded rows; lengths [batch] says how many tokens of each row are real."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.mask = None

    def forward(self, x, lengths):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        if self.mask is None or self.mask.shape != (b, 1, 1, n):
            self.mask = (torch.arange(n, device=x.device)[None, :] < lengths[:, None])[:, None, None, :]
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return self.proj(z.transpose(1, 2).reshape(b, n, d))


class BrightAttention(nn.Module):
    """Self-attention between stars."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** 0.5
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.to_qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        dots = (q @ k.transpose(-2, -1)) * self.scale
        return self.to_out((dots.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, d))


class LateAttention(nn.Module):
    """Self-attention between trains."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.to_qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        weights = F.softmax(torch.matmul(q, k.transpose(-2, -1)), dim=-1) * self.scale
        return self.to_out(torch.matmul(weights, v).transpose(1, 2).reshape(b, n, d))


class RawAttention(nn.Module):
    """Self-attention, with the softmax written out."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        e = (q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)).exp()
        z = (e @ v) / e.sum(dim=-1, keepdim=True)
        return self.proj(z.transpose(1, 2).reshape(b, n, d))


class EchoAttention(nn.Module):
    """Self-attention between sounds."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        qkv = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[1]
        weights = (q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, d))


class BoundAttention(nn.Module):
    """Causal self-attention whose scores are capped, softly, at `cap`."""

    def __init__(self, dim, heads, cap=20.0):
        super().__init__()
        self.heads, self.cap = heads, cap
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        scores = torch.tanh(scores / self.cap)
        future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, d))
