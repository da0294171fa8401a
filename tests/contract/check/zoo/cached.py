"""Attention that decodes step by step with a cache, passed on in the ways that people use."""

import math
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn


def precompute_freqs_cis(dim, end, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: dim // 2].float() / dim))
    freqs = torch.outer(torch.arange(end).float(), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def reshape_for_broadcast(freqs_cis, x):
    assert freqs_cis.shape == (x.shape[1], x.shape[-1])
    return freqs_cis.view(1, x.shape[1], 1, x.shape[-1])


def apply_rotary_emb(xq, xk, freqs_cis):
    q = torch.view_as_complex(xq.reshape(*xq.shape[:-1], -1, 2))
    k = torch.view_as_complex(xk.reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = reshape_for_broadcast(freqs_cis, q)
    return torch.view_as_real(q * freqs_cis).flatten(3), torch.view_as_real(k * freqs_cis).flatten(
        3
    )


@dataclass
class ModelArgs:
    """What the model is made of."""

    dim: int = 24
    n_heads: int = 3
    max_batch_size: int = 6
    max_seq_len: int = 32


class LlamaAttention(nn.Module):
    """Rotary attention with buffers for all keys and values; the caller gives the rotations of its
    positions and the mask.
    """

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.n_heads = args.n_heads
        self.head_dim = args.dim // args.n_heads
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(args.dim, args.dim, bias=False) for _ in range(4)
        )
        self.cache_k = torch.zeros(
            (args.max_batch_size, args.max_seq_len, args.n_heads, self.head_dim)
        )
        self.cache_v = torch.zeros(
            (args.max_batch_size, args.max_seq_len, args.n_heads, self.head_dim)
        )

    def forward(self, x, start_pos: int, freqs_cis: torch.Tensor, mask: torch.Tensor | None):
        bsz, seqlen, _ = x.shape
        xq = self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim)
        xk = self.wk(x).view(bsz, seqlen, self.n_heads, self.head_dim)
        xv = self.wv(x).view(bsz, seqlen, self.n_heads, self.head_dim)
        xq, xk = apply_rotary_emb(xq, xk, freqs_cis)
        self.cache_k = self.cache_k.to(xq)
        self.cache_v = self.cache_v.to(xq)
        self.cache_k[:bsz, start_pos : start_pos + seqlen] = xk
        self.cache_v[:bsz, start_pos : start_pos + seqlen] = xv
        keys = self.cache_k[:bsz, : start_pos + seqlen].transpose(1, 2)
        values = self.cache_v[:bsz, : start_pos + seqlen].transpose(1, 2)
        scores = torch.matmul(xq.transpose(1, 2), keys.transpose(2, 3)) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores + mask
        scores = F.softmax(scores.float(), dim=-1).type_as(xq)
        output = torch.matmul(scores, values).transpose(1, 2).contiguous().view(bsz, seqlen, -1)
        return self.wo(output)


class OwnRotations(nn.Module):
    """Causal rotary attention with a table of rotations and a cache of its own."""

    def __init__(self, d_model=24, n_heads=3, max_batch=6, max_len=32):
        super().__init__()
        self.n_heads, self.head_dim = n_heads, d_model // n_heads
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(d_model, d_model, bias=False) for _ in range(4)
        )
        angles = torch.outer(
            torch.arange(max_len).float(),
            10000.0 ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim),
        )
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)
        self.register_buffer(
            "cache_k", torch.zeros(max_batch, max_len, n_heads, self.head_dim), persistent=False
        )
        self.register_buffer(
            "cache_v", torch.zeros(max_batch, max_len, n_heads, self.head_dim), persistent=False
        )

    def rotate(self, x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat([-b, a], dim=-1) * sin[:, None]

    def forward(self, x, start_pos: int = 0):
        b, t, _ = x.shape
        q, k, v = (
            w(x).view(b, t, self.n_heads, self.head_dim) for w in (self.wq, self.wk, self.wv)
        )
        cos, sin = self.cos[start_pos : start_pos + t], self.sin[start_pos : start_pos + t]
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        self.cache_k[:b, start_pos : start_pos + t] = k
        self.cache_v[:b, start_pos : start_pos + t] = v
        keys, values = self.cache_k[:b, : start_pos + t], self.cache_v[:b, : start_pos + t]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) / math.sqrt(self.head_dim)
        future = torch.ones(t, start_pos + t, dtype=torch.bool, device=x.device).triu(start_pos + 1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        return self.wo(torch.einsum("bhqk,bkhd->bqhd", weights, values).reshape(b, t, -1))


class PastAttention(nn.Module):
    """Causal self-attention; with use_cache it returns its keys and values, for the next call's
    past_kv.
    """

    def __init__(self, n_embd=24, n_head=3, block_size=32):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.register_buffer(
            "bias",
            torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size),
        )

    def forward(self, x, past_kv=None, use_cache=False):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if past_kv is not None:
            past_k, past_v = past_kv
            k = torch.cat([past_k, k], dim=2)
            v = torch.cat([past_v, v], dim=2)
        S = k.size(2)
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = att.masked_fill(self.bias[:, :, S - T : S, :S] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        y = self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))
        if use_cache:
            return y, (k, v)
        return y


class RotaryPast(nn.Module):
    """Causal rotary attention that returns its keys and values; positions follow from how many were
    given.
    """

    def __init__(self, d_model=24, n_heads=3):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def rope(self, x, start):
        place = torch.arange(start, start + x.size(2), dtype=x.dtype, device=x.device)
        freq = 10000.0 ** (
            -torch.arange(0, self.d_head, 2, dtype=x.dtype, device=x.device) / self.d_head
        )
        angle = place[:, None] * freq
        a, b = x[..., 0::2], x[..., 1::2]
        turned = torch.stack(
            [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1
        )
        return turned.flatten(-2)

    def forward(self, x, layer_past=None):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.n_heads, self.d_head).permute(2, 0, 3, 1, 4)
        start = 0 if layer_past is None else layer_past[0].size(-2)
        q, k = self.rope(q, start), self.rope(k, start)
        if layer_past is not None:
            k, v = torch.cat((layer_past[0], k), dim=-2), torch.cat((layer_past[1], v), dim=-2)
        allowed = torch.ones(t, start + t, dtype=torch.bool, device=x.device).tril(diagonal=start)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.proj(z.transpose(1, 2).reshape(b, t, d)), torch.stack((k, v))


class OneTokenAtATime(nn.Module):
    """Causal self-attention: the whole text first, then one token after the other."""

    def __init__(self, d_model=24, n_heads=3):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x, kv_cache=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        if kv_cache is not None:
            k, v = torch.cat([kv_cache[0], k], dim=2), torch.cat([kv_cache[1], v], dim=2)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=kv_cache is None)
        return self.proj(z.transpose(1, 2).flatten(2)), (k, v)


class HubAttention(nn.Module):
    """Attention with grouped queries and a cache object that has update(key, value, layer)."""

    def __init__(self, hidden_size=24, num_heads=6, num_key_value_heads=2, layer_idx=0):
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.layer_idx = (
            num_heads,
            num_key_value_heads,
            layer_idx,
        )
        self.head_dim = hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim)
        self.k_proj = nn.Linear(hidden_size, num_key_value_heads * self.head_dim)
        self.v_proj = nn.Linear(hidden_size, num_key_value_heads * self.head_dim)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size)

    def forward(
        self,
        hidden_states,
        position_embeddings,
        attention_mask=None,
        past_key_value=None,
        cache_position=None,
    ):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = position_embeddings
        q, k = self.turned(q, cos, sin), self.turned(k, cos, sin)
        if past_key_value is not None:
            more = {"sin": sin, "cos": cos, "cache_position": cache_position}
            k, v = past_key_value.update(k, v, self.layer_idx, more)
        groups = self.num_heads // self.num_key_value_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        weights = torch.matmul(q, k.transpose(2, 3)) * self.head_dim**-0.5
        if attention_mask is not None:
            weights = weights + attention_mask[:, :, :, : k.shape[-2]]
        weights = F.softmax(weights, dim=-1)
        out = torch.matmul(weights, v).transpose(1, 2).flatten(2)
        return self.o_proj(out), weights

    def turned(self, x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(1) + torch.cat((-b, a), dim=-1) * sin.unsqueeze(1)


class GrowingKeys:
    """Keys and values that grow with every step."""

    def __init__(self):
        self.keys = None
        self.values = None

    @property
    def length(self):
        return 0 if self.keys is None else self.keys.size(1)

    def append(self, keys, values):
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], dim=1)
        self.values = values if self.values is None else torch.cat([self.values, values], dim=1)
        return self.keys, self.values


class GrowingCacheAttention(nn.Module):
    """Causal self-attention with a cache object of its own kind, which the caller keeps."""

    def __init__(self, d_model=24, n_heads=3):
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x, cache: Optional["GrowingKeys"] = None):
        start = 0 if cache is None else cache.length
        q, k, v = self.q(x), self.k(x), self.v(x)
        if cache is not None:
            k, v = cache.append(k, v)
        q, k, v = (t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in (q, k, v))
        rows = torch.arange(start, start + x.size(1), device=x.device)
        allowed = torch.arange(k.size(2), device=x.device)[None, :] <= rows[:, None]
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.o(z.transpose(1, 2).flatten(2))


class SeparateCaches(nn.Module):
    """Causal self-attention that takes and returns cached keys and values one by one."""

    def __init__(self, d_model=24, n_heads=3):
        super().__init__()
        self.n_heads = n_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(d_model, d_model) for _ in range(4)
        )

    def forward(self, x, past_k=None, past_v=None):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_heads, -1).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_heads, -1).transpose(1, 2)
        if past_k is not None:
            k = torch.cat([past_k, k], dim=2)
        if past_v is not None:
            v = torch.cat([past_v, v], dim=2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.n_heads)
        if t > 1:
            future = torch.full((t, k.size(2)), -torch.inf, dtype=x.dtype, device=x.device)
            scores = scores + future.triu(k.size(2) - t + 1)
        out = (scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, t, d)
        return self.out_proj(out), k, v


class PositionIds(nn.Module):
    """Causal rotary attention that is told its positions, and keeps unturned keys."""

    def __init__(self, hidden_size=24, num_heads=3):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(hidden_size, hidden_size) for _ in range(4)
        )

    def rotary(self, x, position_ids):
        freq = 10000.0 ** (
            -torch.arange(0, self.head_dim, 2, dtype=x.dtype, device=x.device) / self.head_dim
        )
        angle = (position_ids[..., None].to(x.dtype) * freq).unsqueeze(1)
        a, b = x.chunk(2, dim=-1)
        return torch.cat(
            [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1
        )

    def forward(self, hidden_states, position_ids=None, past_key_values=None, use_cache=False):
        b, t, _ = hidden_states.shape
        q, k, v = (
            p(hidden_states).view(b, t, self.num_heads, -1).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if past_key_values is not None:
            k, v = (
                torch.cat([past_key_values[0], k], dim=2),
                torch.cat([past_key_values[1], v], dim=2),
            )
        kept = (k, v) if use_cache else None
        if position_ids is None:
            position_ids = torch.arange(t, device=q.device)[None]
        total = k.size(2)
        q, k = (
            self.rotary(q, position_ids),
            self.rotary(k, torch.arange(total, device=q.device)[None]),
        )
        bias = torch.zeros(t, total, dtype=q.dtype, device=q.device)
        bias = bias.masked_fill(
            torch.arange(total, device=q.device) > position_ids[0][:, None], -torch.inf
        )
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.o_proj(z.transpose(1, 2).reshape(b, t, -1)), None, kept


class OwnGrowingCache(nn.Module):
    """Causal self-attention that keeps its keys and values itself while use_cache is set;
    reset_cache forgets them.
    """

    def __init__(self, d_model=24, n_heads=3):
        super().__init__()
        self.n_heads = n_heads
        self.query, self.key, self.value, self.out = (nn.Linear(d_model, d_model) for _ in range(4))
        self.k_cache = self.v_cache = None

    def reset_cache(self):
        self.k_cache = self.v_cache = None

    def forward(self, x, use_cache=False):
        q, k, v = (
            f(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        start = 0
        if use_cache:
            if self.k_cache is not None:
                start = self.k_cache.size(2)
                k = torch.cat([self.k_cache, k], dim=2)
                v = torch.cat([self.v_cache, v], dim=2)
            self.k_cache, self.v_cache = k, v
        hidden = torch.ones(x.size(1), k.size(2), dtype=torch.bool, device=x.device).triu(start + 1)
        scores = (q @ k.transpose(-1, -2) / q.size(-1) ** 0.5).masked_fill(hidden, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
