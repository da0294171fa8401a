"""How long `mha check` takes to find out how to call attention that is written in six public ways,
and to compare it: the processor time of one thread, without the imports, and the verdict.

    python benchmarks/check.py [NAME ...]

Each class is a small reproduction of a style; none is a copy.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LIMIT = 10.0
"""The most seconds of processor time that a verdict may take."""
NAMES = (
    "LlamaAttention",
    "StillRotaryAttention",
    "LatentAttention",
    "PairTablesAttention",
    "RelativeAttention",
    "SetAttention",
)


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Vectors [batch, token, head, d_head] with neighbouring pairs turned by complex numbers."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[None, :, None]).flatten(3).type_as(x)


@dataclass
class LlamaSizes:
    dim: int = 4096
    n_heads: int = 32
    n_kv_heads: int | None = None
    max_batch_size: int = 32
    max_seq_len: int = 2048


class LlamaAttention(nn.Module):
    """As in the reference code of Llama 3: a cache of plain tensors, and turns as an argument."""

    def __init__(self, args: LlamaSizes) -> None:
        super().__init__()
        self.n_kv_heads = args.n_kv_heads or args.n_heads
        self.n_rep = args.n_heads // self.n_kv_heads
        self.head_dim = args.dim // args.n_heads
        self.wq = nn.Linear(args.dim, args.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, self.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, self.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * self.head_dim, args.dim, bias=False)
        kept = (args.max_batch_size, args.max_seq_len, self.n_kv_heads, self.head_dim)
        self.cache_k, self.cache_v = torch.zeros(kept), torch.zeros(kept)

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        bsz, seqlen, _ = x.shape
        xq = self.wq(x).view(bsz, seqlen, -1, self.head_dim)
        xk = self.wk(x).view(bsz, seqlen, -1, self.head_dim)
        xv = self.wv(x).view(bsz, seqlen, -1, self.head_dim)
        xq, xk = turned(xq, freqs_cis), turned(xk, freqs_cis)
        end = start_pos + seqlen
        self.cache_k[:bsz, start_pos:end] = xk
        self.cache_v[:bsz, start_pos:end] = xv
        keys = self.cache_k[:bsz, :end].repeat_interleave(self.n_rep, 2).transpose(1, 2)
        values = self.cache_v[:bsz, :end].repeat_interleave(self.n_rep, 2).transpose(1, 2)
        scores = xq.transpose(1, 2) @ keys.transpose(2, 3) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores + mask
        weights = F.softmax(scores.float(), dim=-1).type_as(xq)
        out: Tensor = self.wo((weights @ values).transpose(1, 2).reshape(bsz, seqlen, -1))
        return out


class StillRotary(nn.Module):
    """Rotary positions whose second half of frequencies is 0."""

    def __init__(self, dim: int, max_seq_len: int) -> None:
        super().__init__()
        rates = (1 / 1024) ** torch.linspace(0, 1, dim // 4)
        rates = torch.cat([rates, rates.new_zeros(dim // 4)])
        angles = torch.outer(torch.arange(max_seq_len).float(), rates)
        self.cos = nn.Buffer(angles.cos(), persistent=False)
        self.sin = nn.Buffer(angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = (each[None, : x.size(-3), None, :] for each in (self.cos, self.sin))
        first, second = x.float().chunk(2, dim=-1)
        halves = (first * cos + second * sin, second * cos - first * sin)
        return torch.cat(halves, 3).type_as(x)


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


class StillRotaryAttention(nn.Module):
    """As in modded-nanogpt: one weight for q, k and v, normalized q and k, a fixed scale."""

    def __init__(self, dim: int, num_heads: int, max_seq_len: int, head_dim: int = 128) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        width = num_heads * head_dim
        bound = 3**0.5 * 0.5 * dim**-0.5
        self.qkv_w = nn.Parameter(torch.empty(3, width, dim).uniform_(-bound, bound))
        self.lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))
        self.rotary = StillRotary(head_dim, max_seq_len)
        self.c_proj = nn.Linear(width, dim, bias=False)
        self.attn_scale = 0.12

    def forward(self, x: Tensor, ve: Tensor | None = None) -> Tensor:
        b, t = x.size(0), x.size(1)
        qkv = F.linear(x, self.qkv_w.flatten(end_dim=1).type_as(x))
        q, k, v = qkv.view(b, t, 3 * self.num_heads, self.head_dim).chunk(3, dim=-2)
        q, k = self.rotary(norm(q)), self.rotary(norm(k))
        v = self.lambdas[0] * v
        if ve is not None:
            v = v + self.lambdas[1] * ve.view_as(v)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, scale=self.attn_scale, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).reshape(b, t, -1))
        return out


@dataclass
class LatentSizes:
    dim: int = 2048
    n_heads: int = 16
    q_lora_rank: int = 0
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    max_batch_size: int = 8
    max_seq_len: int = 4096


class LatentAttention(nn.Module):
    """As in DeepSeek's reference code: keys and values from a small latent vector, a cache of it,
    and a part of each head that carries positions.
    """

    kv_cache: Tensor
    pe_cache: Tensor

    def __init__(self, args: LatentSizes) -> None:
        super().__init__()
        self.n_heads = args.n_heads
        self.kv_lora_rank = args.kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim = args.qk_nope_head_dim, args.qk_rope_head_dim
        self.v_head_dim = args.v_head_dim
        self.wq = nn.Linear(
            args.dim, args.n_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim), bias=False
        )
        self.wkv_a = nn.Linear(args.dim, args.kv_lora_rank + self.qk_rope_head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(args.kv_lora_rank)
        width = args.n_heads * (self.qk_nope_head_dim + args.v_head_dim)
        self.wkv_b = nn.Linear(args.kv_lora_rank, width, bias=False)
        self.wo = nn.Linear(args.n_heads * args.v_head_dim, args.dim, bias=False)
        self.softmax_scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        rows = (args.max_batch_size, args.max_seq_len)
        self.register_buffer("kv_cache", torch.zeros(*rows, args.kv_lora_rank), persistent=False)
        self.register_buffer(
            "pe_cache", torch.zeros(*rows, self.qk_rope_head_dim), persistent=False
        )

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        bsz, seqlen, _ = x.size()
        end = start_pos + seqlen
        q = self.wq(x).view(
            bsz, seqlen, self.n_heads, self.qk_nope_head_dim + self.qk_rope_head_dim
        )
        q_nope, q_pe = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_pe = turned(q_pe, freqs_cis)
        kv, k_pe = self.wkv_a(x).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        k_pe = turned(k_pe.unsqueeze(2), freqs_cis)
        wkv_b = self.wkv_b.weight.view(self.n_heads, -1, self.kv_lora_rank)
        q_nope = torch.einsum("bshd,hdc->bshc", q_nope, wkv_b[:, : self.qk_nope_head_dim])
        self.kv_cache[:bsz, start_pos:end] = self.kv_norm(kv)
        self.pe_cache[:bsz, start_pos:end] = k_pe.squeeze(2)
        scores = torch.einsum("bshc,btc->bsht", q_nope, self.kv_cache[:bsz, :end])
        scores = scores + torch.einsum("bshr,btr->bsht", q_pe, self.pe_cache[:bsz, :end])
        scores = scores * self.softmax_scale
        if mask is not None:
            scores = scores + mask.unsqueeze(1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).type_as(x)
        out = torch.einsum("bsht,btc->bshc", weights, self.kv_cache[:bsz, :end])
        out = torch.einsum("bshc,hdc->bshd", out, wkv_b[:, -self.v_head_dim :])
        projected: Tensor = self.wo(out.flatten(2))
        return projected


class PairTablesAttention(nn.Module):
    """As in minimind: a pair of tables [token, d_head] as an argument, heads on axis 2."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        past_key_value: tuple[Tensor, Tensor] | None = None,
        use_cache: bool = False,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(b, t, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).view(b, t, self.num_kv_heads, self.head_dim)
        cos, sin = (each[:t, None] for each in position_embeddings)

        def rotated(y: Tensor) -> Tensor:
            first, second = y.chunk(2, -1)
            return y * cos + torch.cat([-second, first], -1) * sin

        q, k = rotated(q), rotated(k)
        if past_key_value is not None:
            k = torch.cat([past_key_value[0], k], dim=1)
            v = torch.cat([past_key_value[1], v], dim=1)
        past = (k, v) if use_cache else None
        n = self.num_heads // self.num_kv_heads
        q = q.transpose(1, 2)
        k, v = (each.repeat_interleave(n, dim=2).transpose(1, 2) for each in (k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        later = torch.full((t, t), float("-inf")).triu(1)
        scores[..., -t:] += later
        if attention_mask is not None:
            scores = scores + (1.0 - attention_mask[:, None, None]) * -1e9
        y = F.softmax(scores.float(), dim=-1).type_as(q) @ v
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1)), past


class RelativeAttention(nn.Module):
    """As in Transformer-XL: time first, relative positions with two learned biases, memories."""

    def __init__(self, n_head: int, d_model: int, d_head: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.n_head, self.d_head = n_head, d_head
        self.qkv_net = nn.Linear(d_model, 3 * n_head * d_head, bias=False)
        self.r_net = nn.Linear(d_model, n_head * d_head, bias=False)
        self.o_net = nn.Linear(n_head * d_head, d_model, bias=False)
        self.drop, self.layer_norm = nn.Dropout(dropout), nn.LayerNorm(d_model)
        self.scale = d_head**-0.5

    def forward(
        self,
        w: Tensor,
        r: Tensor,
        r_w_bias: Tensor,
        r_r_bias: Tensor,
        attn_mask: Tensor | None = None,
        mems: Tensor | None = None,
    ) -> Tensor:
        qlen, rlen, bsz = w.size(0), r.size(0), w.size(1)
        seen = w if mems is None else torch.cat([mems, w], 0)
        q, k, v = self.qkv_net(seen).chunk(3, dim=-1)
        q = q[-qlen:].view(qlen, bsz, self.n_head, self.d_head)
        k, v = (each.view(-1, bsz, self.n_head, self.d_head) for each in (k, v))
        rk = self.r_net(r).view(rlen, self.n_head, self.d_head)
        content = torch.einsum("ibnd,jbnd->ijbn", q + r_w_bias, k)
        place = torch.einsum("ibnd,jnd->ijbn", q + r_r_bias, rk)
        padded = torch.cat([place.new_zeros(qlen, 1, *place.shape[2:]), place], 1)
        place = padded.view(place.size(1) + 1, qlen, *place.shape[2:])[1:].view_as(place)
        scores = (content + place) * self.scale
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask[..., None], float("-inf"))
        weights = self.drop(scores.softmax(dim=1))
        out = torch.einsum("ijbn,jbnd->ibnd", weights, v).flatten(2)
        normed: Tensor = self.layer_norm(w + self.drop(self.o_net(out)))
        return normed


class SetAttention(nn.Module):
    """As in Set Transformer: queries and keys of two widths, heads on the batch axis, queries added
    to the heads, a feed-forward part.
    """

    def __init__(self, dim_Q: int, dim_K: int, dim_V: int, num_heads: int) -> None:
        super().__init__()
        self.dim_V, self.num_heads = dim_V, num_heads
        self.fc_q, self.fc_k = nn.Linear(dim_Q, dim_V), nn.Linear(dim_K, dim_V)
        self.fc_v, self.fc_o = nn.Linear(dim_K, dim_V), nn.Linear(dim_V, dim_V)

    def forward(self, Q: Tensor, K: Tensor) -> Tensor:
        q, k, v = self.fc_q(Q), self.fc_k(K), self.fc_v(K)
        d_head = self.dim_V // self.num_heads
        q, k, v = (torch.cat(each.split(d_head, 2), 0) for each in (q, k, v))
        weights = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(d_head), 2)
        out = torch.cat((q + weights @ v).split(Q.size(0), 0), 2)
        return out + F.relu(self.fc_o(out))


_EXAMPLES = {
    "RelativeAttention": "lambda m, T: m(torch.randn(T, 2, m.o_net.out_features), "
    "torch.randn(T, m.o_net.out_features), *torch.randn(2, m.n_head, m.d_head))"
}
_TIMED = """
import sys, time, torch
import torch.fx.experimental.symbolic_shapes  # what gradients import
import mhacli.commands.check.examine as examine
from mhacli.commands.check.result import CheckRequest
torch.set_num_threads(1)
begun = time.process_time()
try:
    request = CheckRequest(target=sys.argv[1], example=sys.argv[2] or None)
    found = examine.examination_of(request, lambda *a, **k: None)
    verdict = found.verdict
except Exception as error:
    verdict = f"refused: {error}"[:150]
print(f"{time.process_time() - begun:.2f} {verdict}")
"""


def main(names: list[str]) -> None:
    print(f"{'attention':<24}{'seconds':>8}  verdict (limit {LIMIT:.0f} s)")
    for name in names or NAMES:
        command = [sys.executable, "-c", _TIMED, f"{__file__}:{name}", _EXAMPLES.get(name, "")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        seconds, verdict = run.stdout.strip().splitlines()[-1].split(" ", 1)
        print(f"{name:<24}{float(seconds):>8.2f}  {verdict}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
