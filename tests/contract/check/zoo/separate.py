"""Attention with a linear layer each for queries, keys and values."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class PaperAttention(nn.Module):
    """The layer of "Attention is all you need"."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.d_model, self.n_heads, self.d_head = d_model, n_heads, d_model // n_heads
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model)
        self.w_o = nn.Linear(d_model, d_model)

    def split_heads(self, x):
        return x.view(x.size(0), x.size(1), self.n_heads, self.d_head).transpose(1, 2)

    def merge_heads(self, z):
        batch, _, length, _ = z.size()
        return z.transpose(1, 2).contiguous().view(batch, length, self.d_model)

    def forward(self, query, key, value, mask=None):
        q = self.split_heads(self.w_q(query))
        k = self.split_heads(self.w_k(key))
        v = self.split_heads(self.w_v(value))
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        pattern = F.softmax(scores, dim=-1)
        z = torch.matmul(pattern, v)
        return self.w_o(self.merge_heads(z))


class SelfAttention(nn.Module):
    """Self-attention, each step in a line."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.query = nn.Linear(embed_dim, embed_dim)
        self.key = nn.Linear(embed_dim, embed_dim)
        self.value = nn.Linear(embed_dim, embed_dim)
        self.dense = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        b, t, d = x.shape
        q = self.query(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.key(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.value(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        energy = q @ k.mT * self.head_dim**-0.5
        weights = energy.softmax(dim=-1)
        context = weights @ v
        out = context.transpose(1, 2).reshape(b, t, d)
        return self.dense(out)


class StoryAttention(nn.Module):
    """Causal self-attention with a triangle in a buffer, and dropout."""

    def __init__(self, n_embd, n_head, block_size=64, dropout=0.5):
        super().__init__()
        self.n_head = n_head
        self.key = nn.Linear(n_embd, n_embd)
        self.query = nn.Linear(n_embd, n_embd)
        self.value = nn.Linear(n_embd, n_embd)
        self.proj = nn.Linear(n_embd, n_embd)
        self.attn_drop = nn.Dropout(dropout)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        B, T, C = x.size()
        k = self.key(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = self.query(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = self.value(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_drop(att)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.proj(y)


class NewestAttention(nn.Module):
    """Causal attention of the newest tokens, `query`, to all of them, `key` and `value`."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(d_model, d_model) for _ in range(4)
        )

    def forward(self, query, key, value):
        b, q_len, k_len = query.size(0), query.size(1), key.size(1)
        q = self.q_proj(query).view(b, q_len, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(key).view(b, k_len, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(value).view(b, k_len, self.n_heads, self.d_head).transpose(1, 2)
        allowed = torch.ones(q_len, k_len, dtype=torch.bool, device=query.device)
        allowed = allowed.tril(k_len - q_len)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        scores = scores.masked_fill(~allowed, float("-inf"))
        z = scores.softmax(dim=-1) @ v
        return self.o_proj(z.transpose(1, 2).reshape(b, q_len, -1))


class PaddedAttention(nn.Module):
    """Self-attention over padded sequences; True is padding."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(embed_dim, embed_dim) for _ in range(4)
        )

    def forward(self, x, key_padding_mask=None):
        def split(t):
            return t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

        q, k, v = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None, :], float("-inf"))
        z = scores.softmax(dim=-1) @ v
        return self.out_proj(z.transpose(1, 2).flatten(2))


class ChatAttention(nn.Module):
    """Causal self-attention over padded conversations; True is padding, on the left as well."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.wq, self.wk, self.wv, self.out_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x, key_padding_mask=None):
        q, k, v = (
            layer(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        hide = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu(1)[
            None, None
        ]
        if key_padding_mask is not None:
            hide = hide | key_padding_mask[:, None, None, :]
        scores = (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).masked_fill(hide, -1e9)
        return self.out_proj((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class GroupedAttention(nn.Module):
    """Causal self-attention in which several heads of queries share one of keys and values."""

    def __init__(self, d_model, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.d_head = n_heads, n_kv_heads, d_model // n_heads
        self.n_rep = n_heads // n_kv_heads
        self.q_proj = nn.Linear(d_model, n_heads * self.d_head, bias=False)
        self.k_proj = nn.Linear(d_model, n_kv_heads * self.d_head, bias=False)
        self.v_proj = nn.Linear(d_model, n_kv_heads * self.d_head, bias=False)
        self.o_proj = nn.Linear(n_heads * self.d_head, d_model, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_kv_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_kv_heads, self.d_head).transpose(1, 2)
        k = k.repeat_interleave(self.n_rep, dim=1)
        v = v.repeat_interleave(self.n_rep, dim=1)
        scores = q @ k.mT / math.sqrt(self.d_head)
        scores = scores + torch.full((t, t), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        return self.o_proj((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, t, -1))
