"""Attention with positions: biases of the scores, rotations, norms of queries and keys, sinks, caps
on the scores.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class T5Attention(nn.Module):
    """Self-attention of T5's encoder: scores are not scaled, and get a learned bias by buckets of
    distance.
    """

    def __init__(self, d_model=32, num_heads=4, num_buckets=32, max_distance=128):
        super().__init__()
        self.n_heads, self.d_kv = num_heads, d_model // num_heads
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)

    def bucket(self, distance):
        half = self.num_buckets // 2
        bucket = (distance > 0).long() * half
        far = distance.abs()
        exact = half // 2
        large = (
            torch.log(far.float().clamp(min=1) / exact)
            / math.log(self.max_distance / exact)
            * (half - exact)
        )
        large = (exact + large.long()).clamp(max=half - 1)
        return bucket + torch.where(far < exact, far, large)

    def compute_bias(self, q_len, k_len):
        distance = torch.arange(k_len)[None, :] - torch.arange(q_len)[:, None]
        return self.relative_attention_bias(self.bucket(distance)).permute(2, 0, 1).unsqueeze(0)

    def forward(self, x):
        b, t, d = x.shape
        q = self.q(x).view(b, t, self.n_heads, self.d_kv).transpose(1, 2)
        k = self.k(x).view(b, t, self.n_heads, self.d_kv).transpose(1, 2)
        v = self.v(x).view(b, t, self.n_heads, self.d_kv).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += self.compute_bias(t, t)
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        z = torch.matmul(weights, v)
        return self.o(z.transpose(1, 2).contiguous().view(b, t, d))


class AlibiAttention(nn.Module):
    """Causal attention whose scores fall with the distance, the mask and the penalty in one
    tensor.
    """

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.register_buffer(
            "slopes", torch.tensor([2 ** (-8 * (h + 1) / heads) for h in range(heads)])
        )

    def penalty(self, t):
        far = torch.arange(t)[None, :] - torch.arange(t)[:, None]
        bias = self.slopes[:, None, None] * far
        return bias.masked_fill(far > 0, float("-inf"))

    def forward(self, x):
        b, t, d = x.shape
        q = self.wq(x).view(b, t, self.heads, d // self.heads).transpose(1, 2)
        k = self.wk(x).view(b, t, self.heads, d // self.heads).transpose(1, 2)
        v = self.wv(x).view(b, t, self.heads, d // self.heads).transpose(1, 2)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=self.penalty(t).to(q.dtype))
        return self.wo(z.transpose(1, 2).reshape(b, t, d))


class BloomAttention(nn.Module):
    """BLOOM's causal attention: the bias goes into the product of queries and keys, batch and heads
    one axis.
    """

    def __init__(self, hidden_size, n_head):
        super().__init__()
        self.n_head, self.d_head = n_head, hidden_size // n_head
        self.inv_norm_factor = 1.0 / math.sqrt(self.d_head)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def build_alibi(self, batch, t, dtype):
        slopes = torch.tensor(
            [2 ** (-8 * (h + 1) / self.n_head) for h in range(self.n_head)], dtype=dtype
        )
        alibi = slopes[None, :, None] * torch.arange(t, dtype=dtype)[None, None, :].expand(
            batch, 1, t
        )
        return alibi.reshape(batch * self.n_head, 1, t)

    def forward(self, hidden_states):
        b, t, d = hidden_states.shape
        fused = self.query_key_value(hidden_states).view(b, t, self.n_head, 3, self.d_head)
        q, k, v = fused[..., 0, :], fused[..., 1, :], fused[..., 2, :]
        q = q.transpose(1, 2).reshape(b * self.n_head, t, self.d_head)
        k = k.permute(0, 2, 3, 1).reshape(b * self.n_head, self.d_head, t)
        v = v.transpose(1, 2).reshape(b * self.n_head, t, self.d_head)
        alibi = self.build_alibi(b, t, q.dtype)
        scores = alibi.baddbmm(batch1=q, batch2=k, beta=1.0, alpha=self.inv_norm_factor)
        scores = scores.view(b, self.n_head, t, t)
        causal = torch.ones(t, t, dtype=torch.bool).tril()
        scores = scores.masked_fill(~causal, torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, dim=-1).view(b * self.n_head, t, t)
        z = torch.bmm(weights, v).view(b, self.n_head, t, self.d_head)
        return self.dense(z.transpose(1, 2).reshape(b, t, d))


class SwinWindow(nn.Module):
    """Attention inside a window of 2 × 3 patches with a learned bias for each offset. x: [windows,
    6, dim].
    """

    def __init__(self, dim=24, num_heads=3, window=(2, 3)):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        high, wide = window
        self.relative_position_bias_table = nn.Parameter(
            torch.randn((2 * high - 1) * (2 * wide - 1), num_heads)
        )
        places = torch.stack(
            torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij")
        ).flatten(1)
        offsets = (places[:, :, None] - places[:, None, :]).permute(1, 2, 0)
        index = (offsets[..., 0] + high - 1) * (2 * wide - 1) + offsets[..., 1] + wide - 1
        self.register_buffer("relative_position_index", index)
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = (
            self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        )
        q, k, v = qkv.unbind(0)
        q = q * self.scale
        attn = q @ k.transpose(-2, -1)
        offsets = self.relative_position_index.view(-1)
        bias = self.relative_position_bias_table[offsets].view(N, N, -1)
        bias = bias.permute(2, 0, 1).contiguous()
        attn = attn + bias.unsqueeze(0)
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class ShiftedWindow(SwinWindow):
    """The same with masks of shifted windows. x: [images * windows, 6, dim]; mask: 0 and −∞,
    [windows, 6, 6].
    """

    def forward(self, x, mask=None):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        offsets = self.relative_position_index.view(-1)
        bias = self.relative_position_bias_table[offsets].view(N, N, -1)
        attn = q @ k.transpose(-2, -1) * self.scale + bias.permute(2, 0, 1)
        if mask is not None:
            n_windows = len(mask)
            attn = attn.view(B // n_windows, n_windows, self.num_heads, N, N) + mask[None, :, None]
            attn = attn.view(B, self.num_heads, N, N)
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C))


class SwinCosine(nn.Module):
    """Cosine attention with a learned temperature for each head, and a learned bias, as in Swin
    v2.
    """

    def __init__(self, dim=24, num_heads=3, max_len=16):
        super().__init__()
        self.num_heads, self.max_len = num_heads, max_len
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones((num_heads, 1, 1))))
        self.offsets = nn.Parameter(torch.randn(num_heads, 2 * max_len - 1))
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = (
            self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        )
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        logit_scale = torch.clamp(self.logit_scale, max=math.log(1.0 / 0.01)).exp()
        attn = attn * logit_scale
        offset = torch.arange(N)[:, None] - torch.arange(N)[None, :] + self.max_len - 1
        attn = attn + 16 * torch.sigmoid(self.offsets[:, offset]).unsqueeze(0)
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class WithSinks(nn.Module):
    """Causal grouped attention with a learned sink for each head, as in gpt-oss."""

    def __init__(self, hidden_size=48, num_attention_heads=6, num_key_value_heads=2):
        super().__init__()
        self.n_heads, self.n_kv, self.d = (
            num_attention_heads,
            num_key_value_heads,
            hidden_size // num_attention_heads,
        )
        self.q_proj = nn.Linear(hidden_size, self.n_heads * self.d)
        self.k_proj = nn.Linear(hidden_size, self.n_kv * self.d)
        self.v_proj = nn.Linear(hidden_size, self.n_kv * self.d)
        self.o_proj = nn.Linear(self.n_heads * self.d, hidden_size)
        self.sinks = nn.Parameter(torch.randn(num_attention_heads))

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.d).transpose(1, 2)
        k = (
            self.k_proj(x)
            .view(b, t, self.n_kv, self.d)
            .transpose(1, 2)
            .repeat_interleave(self.n_heads // self.n_kv, 1)
        )
        v = (
            self.v_proj(x)
            .view(b, t, self.n_kv, self.d)
            .transpose(1, 2)
            .repeat_interleave(self.n_heads // self.n_kv, 1)
        )
        scores = q @ k.transpose(2, 3) * self.d**-0.5
        scores = scores + torch.full((t, t), float("-inf")).triu(1)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(b, -1, t, -1)
        combined = torch.cat([scores, sinks], dim=-1)
        combined = combined - combined.max(dim=-1, keepdim=True).values
        probs = F.softmax(combined, dim=-1)
        z = probs[..., :-1] @ v
        return self.o_proj(z.transpose(1, 2).reshape(b, t, -1))


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class PartialNeoX(nn.Module):
    """GPT-NeoX: some columns of each head are rotated."""

    def __init__(self, hidden_size=64, num_heads=4, pct=0.5, base=10000):
        super().__init__()
        self.h, self.d = num_heads, hidden_size // num_heads
        self.n = int(self.d * pct)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        freq = 1.0 / (base ** (torch.arange(0, self.n, 2).float() / self.n))
        table = torch.outer(torch.arange(64).float(), freq)
        table = torch.cat((table, table), dim=-1)
        self.register_buffer("c", table.cos())
        self.register_buffer("s", table.sin())

    def rotate(self, x, t):
        part, rest = x[..., : self.n], x[..., self.n :]
        part = part * self.c[:t] + rotate_half(part) * self.s[:t]
        return torch.cat((part, rest), dim=-1)

    def forward(self, x):
        b, t, w = x.shape
        qkv = self.query_key_value(x).view(b, t, self.h, 3 * self.d).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)
        q = self.rotate(q, t)
        k = self.rotate(k, t)
        scores = q @ k.transpose(-1, -2) / self.d**0.5
        mask = torch.ones(t, t, dtype=torch.bool).tril()
        scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
        z = scores.softmax(-1) @ v
        return self.dense(z.transpose(1, 2).reshape(b, t, w))


def rot(x, phases):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * phases[None, :, None, :]).flatten(3).type_as(x)


class ComplexLlama(nn.Module):
    """LLaMA's attention with phases as complex numbers."""

    def __init__(self, dim=48, n_heads=6, n_kv_heads=2, theta=10000.0):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        freqs = 1.0 / (theta ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim))
        angles = torch.outer(torch.arange(128).float(), freqs)
        self.phases = torch.polar(torch.ones_like(angles), angles)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.n_heads, self.head_dim)
        k = self.wk(x).view(b, t, self.n_kv_heads, self.head_dim)
        v = self.wv(x).view(b, t, self.n_kv_heads, self.head_dim)
        q = rot(q, self.phases[:t])
        k = rot(k, self.phases[:t])
        k = k.repeat_interleave(self.n_heads // self.n_kv_heads, dim=2)
        v = v.repeat_interleave(self.n_heads // self.n_kv_heads, dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(z.transpose(1, 2).reshape(b, t, -1))


class Rotation(nn.Module):
    def __init__(self, d, base=10000.0):
        super().__init__()
        self.register_buffer("rate", base ** (-torch.arange(0, d, 2).float() / d))

    def forward(self, x):
        angle = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), self.rate.to(x.dtype))
        c, s = angle.cos()[None, :, None], angle.sin()[None, :, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * c + b * s, -a * s + b * c], dim=-1)


def unit(x):
    return F.rms_norm(x, (x.size(-1),))


class NanoChat(nn.Module):
    """Causal attention whose queries and keys are rotated, then normed by a function."""

    def __init__(self, n_embd=32, n_head=4):
        super().__init__()
        self.n_head, self.head_dim = n_head, n_embd // n_head
        self.c_q, self.c_k, self.c_v, self.c_proj = (
            nn.Linear(n_embd, n_embd, bias=False) for _ in range(4)
        )
        self.rotate = Rotation(self.head_dim)

    def forward(self, x):
        B, T, _ = x.size()
        q = self.c_q(x).view(B, T, self.n_head, self.head_dim)
        k = self.c_k(x).view(B, T, self.n_head, self.head_dim)
        v = self.c_v(x).view(B, T, self.n_head, self.head_dim)
        q, k = self.rotate(q), self.rotate(k)
        q, k = unit(q), unit(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, -1))


class NormedGpt(NanoChat):
    """As in nGPT: queries and keys of length 1, whose scores are multiplied by √d_head."""

    def forward(self, x):
        split = [
            layer(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for layer in (self.c_q, self.c_k, self.c_v)
        ]
        q, k = (F.normalize(rows, dim=-1) for rows in split[:2])
        y = F.scaled_dot_product_attention(q, k, split[2], is_causal=True, scale=self.head_dim**0.5)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Rms(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Qwen3(nn.Module):
    """Qwen3: queries and keys are normed by head, then rotated."""

    def __init__(self, hidden_size=48, num_heads=6, num_kv_heads=3, theta=1000000.0):
        super().__init__()
        self.h, self.kv, self.d = num_heads, num_kv_heads, hidden_size // num_heads
        self.theta = theta
        self.q_proj = nn.Linear(hidden_size, self.h * self.d, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.kv * self.d, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.kv * self.d, bias=False)
        self.o_proj = nn.Linear(self.h * self.d, hidden_size, bias=False)
        self.q_norm, self.k_norm = Rms(self.d), Rms(self.d)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, t, self.h, self.d)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, self.kv, self.d)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv, self.d).transpose(1, 2)
        angle = torch.outer(
            torch.arange(t).to(x), self.theta ** (-torch.arange(0, self.d, 2).to(x) / self.d)
        )
        c, s = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        q = q * c + rotate_half(q) * s
        k = k * c + rotate_half(k) * s
        k, v = (u.repeat_interleave(self.h // self.kv, dim=1) for u in (k, v))
        scores = q @ k.mT * self.d**-0.5
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        z = scores.softmax(-1) @ v
        return self.o_proj(z.transpose(1, 2).reshape(b, t, -1))


class ViT22B(nn.Module):
    """Queries and keys of each head are normed by a function before their product."""

    def __init__(self, dim=32, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.q_gain = nn.Parameter(torch.ones(dim // num_heads))
        self.k_gain = nn.Parameter(torch.ones(dim // num_heads))

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q = F.layer_norm(q, q.shape[-1:], self.q_gain) / math.sqrt(q.shape[-1])
        k = F.layer_norm(k, k.shape[-1:], self.k_gain)
        attn = q @ k.transpose(-2, -1)
        z = attn.softmax(dim=-1) @ v
        return self.proj(z.transpose(1, 2).reshape(B, N, C))


class HandNormed(nn.Module):
    """Queries and keys over their root mean square, with a learned gain; neighbouring columns are
    rotated.
    """

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)
        self.q_gain = nn.Parameter(torch.ones(heads, 1, dim // heads))
        self.k_gain = nn.Parameter(torch.ones(heads, 1, dim // heads))

    def rotated(self, x):
        d = x.shape[-1]
        angle = torch.arange(x.shape[-2])[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack(
            [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1
        ).flatten(-2)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = (
            t.view(B, N, self.heads, -1).transpose(1, 2) for t in self.to_qkv(x).chunk(3, -1)
        )
        q = q / q.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt() * self.q_gain
        k = k / k.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt() * self.k_gain
        q, k = self.rotated(q), self.rotated(k)
        attn = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(dim=-1)
        return self.to_out((attn @ v).transpose(1, 2).reshape(B, N, C))


class CappedAttention(nn.Module):
    """Causal self-attention whose scores are capped at `softcap`: softcap · tanh(scores /
    softcap).
    """

    def __init__(self, d_model, n_heads, softcap=5.0, query_pre_attn_scalar=None):
        super().__init__()
        self.n_heads, self.softcap = n_heads, softcap
        self.width = query_pre_attn_scalar or d_model // n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(self.width)
        future = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu(1)
        scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(future, float("-inf"))
        return self.out((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class RotaryAttention(nn.Module):
    """Self-attention with rotary positions, columns j and j + d/2."""

    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads, self.head_dim = n_heads, dim // n_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )

    def forward(self, x):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_heads, self.head_dim).transpose(1, 2)
        inverse = 10000.0 ** (-torch.arange(0, self.head_dim, 2, dtype=x.dtype) / self.head_dim)
        angles = torch.arange(q.shape[2]).to(x)[:, None] * inverse
        angles = torch.cat((angles, angles), -1)
        q = q * angles.cos() + rotate_half(q) * angles.sin()
        k = k * angles.cos() + rotate_half(k) * angles.sin()
        weights = (q @ k.mT / math.sqrt(self.head_dim)).softmax(dim=-1)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(b, t, d))
