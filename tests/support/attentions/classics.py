"""Five layers as walkthroughs of attention present them."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class MultiHeadAttention(nn.Module):
    """Multi-head attention, step by step."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        assert d_model % num_heads == 0, "d_model must be divisible by num_heads"
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def scaled_dot_product_attention(self, Q, K, V, mask=None):
        scores = torch.matmul(Q, K.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        probs = torch.softmax(scores, dim=-1)
        return torch.matmul(probs, V)

    def split_heads(self, x):
        batch_size, seq_length, _ = x.size()
        return x.view(batch_size, seq_length, self.num_heads, self.d_k).transpose(1, 2)

    def combine_heads(self, x):
        batch_size, _, seq_length, _ = x.size()
        return x.transpose(1, 2).contiguous().view(batch_size, seq_length, self.d_model)

    def forward(self, Q, K, V, mask=None):
        Q = self.split_heads(self.W_q(Q))
        K = self.split_heads(self.W_k(K))
        V = self.split_heads(self.W_v(V))
        output = self.scaled_dot_product_attention(Q, K, V, mask)
        return self.W_o(self.combine_heads(output))


def scaled_dot_product(q, k, v, mask=None):
    d_k = q.size()[-1]
    logits = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        logits = logits.masked_fill(mask == 0, -9e15)
    attention = F.softmax(logits, dim=-1)
    return torch.matmul(attention, v), attention


class MultiheadAttention(nn.Module):
    """Multi-head attention with one projection."""

    def __init__(self, input_dim, embed_dim, num_heads):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.qkv_proj = nn.Linear(input_dim, 3 * embed_dim)
        self.o_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, mask=None, return_attention=False):
        batch_size, seq_length, _ = x.size()
        qkv = self.qkv_proj(x)
        qkv = qkv.reshape(batch_size, seq_length, self.num_heads, 3 * self.head_dim)
        qkv = qkv.permute(0, 2, 1, 3)  # [batch, head, seq, dims]
        q, k, v = qkv.chunk(3, dim=-1)
        values, attention = scaled_dot_product(q, k, v, mask=mask)
        values = values.reshape(batch_size, seq_length, self.embed_dim)
        o = self.o_proj(values)
        if return_attention:
            return o, attention
        return o


class SelfAttention(nn.Module):
    """Self-attention with several heads."""

    def __init__(self, embed_size, heads):
        super().__init__()
        self.embed_size = embed_size
        self.heads = heads
        self.head_dim = embed_size // heads
        self.values = nn.Linear(embed_size, embed_size)
        self.keys = nn.Linear(embed_size, embed_size)
        self.queries = nn.Linear(embed_size, embed_size)
        self.fc_out = nn.Linear(embed_size, embed_size)

    def forward(self, values, keys, query, mask=None):
        N = query.shape[0]
        value_len, key_len, query_len = values.shape[1], keys.shape[1], query.shape[1]
        values = self.values(values).reshape(N, value_len, self.heads, self.head_dim)
        keys = self.keys(keys).reshape(N, key_len, self.heads, self.head_dim)
        queries = self.queries(query).reshape(N, query_len, self.heads, self.head_dim)
        energy = torch.einsum("nqhd,nkhd->nhqk", [queries, keys])
        if mask is not None:
            energy = energy.masked_fill(mask == 0, float("-1e20"))
        attention = torch.softmax(energy / (self.head_dim ** (1 / 2)), dim=2)
        out = torch.einsum("nhql,nlhd->nqhd", [attention, values]).reshape(N, query_len, self.heads * self.head_dim)
        return self.fc_out(out)


class DecoderAttention(nn.Module):
    """Masked multi-head self-attention: no word sees a later one."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.d_k = d_model // n_heads
        self.d_head = self.d_k // n_heads
        self.W_Q = nn.Linear(d_model, self.d_k)
        self.W_K = nn.Linear(d_model, self.d_k)
        self.W_V = nn.Linear(d_model, self.d_k)
        self.W_O = nn.Linear(self.d_k, d_model)

    def forward(self, x):
        batch, length, _ = x.shape
        q = self.W_Q(x).view(batch, length, self.n_heads, self.d_head).transpose(1, 2)
        k = self.W_K(x).view(batch, length, self.n_heads, self.d_head).transpose(1, 2)
        v = self.W_V(x).view(batch, length, self.n_heads, self.d_head).transpose(1, 2)
        mask = torch.triu(torch.ones(length, length, dtype=x.dtype), diagonal=1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        scores = scores + -torch.inf * mask
        out = torch.softmax(scores, dim=-1) @ v
        return self.W_O(out.transpose(1, 2).reshape(batch, length, self.d_k))


class CarefulAttention(nn.Module):
    """Multi-head attention without biases, with dropout of the weights and of the output."""

    def __init__(self, emb_dim, num_heads, p=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = emb_dim // num_heads
        self.to_q = nn.Linear(emb_dim, emb_dim, bias=False)
        self.to_k = nn.Linear(emb_dim, emb_dim, bias=False)
        self.to_v = nn.Linear(emb_dim, emb_dim, bias=False)
        self.to_out = nn.Linear(emb_dim, emb_dim, bias=False)
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        b, n, e = x.shape
        q, k, v = (f(x).view(b, n, self.num_heads, self.head_dim) for f in (self.to_q, self.to_k, self.to_v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / self.head_dim**0.5
        weights = self.dropout(F.softmax(scores, dim=-1))
        out = torch.einsum("bhij,bjhd->bihd", weights, v).reshape(b, n, e)
        return self.dropout(self.to_out(out))
