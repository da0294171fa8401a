"""Finding out how to call a user's attention. The oracle calls the module by hand."""

from __future__ import annotations

import copy
import math
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhacli.adapters.usercode.call.find_call import find_user_attention
from mhacli.adapters.usercode.call.signature import documented_meaning, signature_of, stated_axes
from mhacli.adapters.usercode.call.user_attention import UserAttention
from mhacli.adapters.usercode.types import Built, Guess, Inputs, MaskForm
from mhacli.errors import MhaError
from mhacli.requests.user_code import TargetRequest

D, H = 32, 4


def built(thing: Any, arguments: dict[str, Any] | None = None, documentation: str | None = None) -> Built:
    """A target made by hand, with the same random weights in each test."""
    torch.manual_seed(7)
    arguments = {} if arguments is None else arguments
    call = thing(**arguments) if isinstance(thing, type) else thing
    if isinstance(call, nn.Module):
        call.eval()
        for parameter in call.parameters():
            if not nn.parameter.is_lazy(parameter):
                nn.init.normal_(parameter, std=0.3)
    return Built(
        name=getattr(thing, "__name__", "it"),
        thing=thing,
        call=call,
        module=call if isinstance(call, nn.Module) else None,
        arguments=arguments,
        given=frozenset(arguments),
        guesses=(),
        rebuild=lambda changes: built(thing, {**arguments, **changes}, documentation),
        documentation=(thing.__doc__ or "") if documentation is None else documentation,
        file=__file__,
    )


def found(
    thing: Any, arguments: dict[str, Any] | None = None, *, documentation: str | None = None, **request: Any
) -> UserAttention:
    return find_user_attention(built(thing, arguments, documentation), TargetRequest("a.py:A", **request))


SIZED = {"d_model": D, "n_heads": H}


def attended(
    q: Tensor, k: Tensor, v: Tensor, change: Callable[[Tensor], Tensor] = lambda scores: scores
) -> tuple[Tensor, Tensor]:
    pattern = change(q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).softmax(-1)
    return pattern @ v, pattern


class Projections(nn.Module):
    """What most of the modules below have."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q_proj, self.k_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.v_proj, self.out_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def cut(self, rows):
        return rows.view(rows.size(0), rows.size(1), self.n_heads, -1).transpose(1, 2)

    def run(self, q, k, v, change=lambda scores: scores):
        z, pattern = attended(self.cut(self.q_proj(q)), self.cut(self.k_proj(k)), self.cut(self.v_proj(v)), change)
        return self.out_proj(z.transpose(1, 2).reshape(q.size(0), q.size(1), -1)), pattern


# One input


class Fused(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.qkv, self.proj = n_heads, nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        return self.proj(attended(q, k, v)[0].transpose(1, 2).reshape(b, t, c))


class GptConfig:
    def __init__(self):
        self.n_embd, self.n_head, self.block_size, self.dropout = D, H, 6, 0.1


class GptStyle(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(config.n_embd, 3 * config.n_embd), nn.Linear(config.n_embd, config.n_embd)
        self.n_head, self.drop = config.n_head, nn.Dropout(config.dropout)
        self.register_buffer("bias", torch.tril(torch.ones(config.block_size, config.block_size))[None, None])

    def forward(self, x):
        B, T, C = x.size()
        assert self.bias.shape[-1] >= T, "the sequence is too long"
        q, k, v = (y.view(B, T, self.n_head, -1).transpose(1, 2) for y in self.c_attn(x).split(C, dim=2))
        z, _ = attended(q, k, v, lambda scores: self.drop(scores).masked_fill(self.bias[:, :, :T, :T] == 0, -math.inf))
        return self.c_proj(z.transpose(1, 2).contiguous().view(B, T, C))


class BertStyle(Projections):
    def forward(self, hidden_states, attention_mask=None, head_mask=None, output_attentions=False):
        out, pattern = self.run(
            hidden_states, hidden_states, hidden_states,
            lambda scores: scores if attention_mask is None else scores + attention_mask,
        )  # fmt: skip
        return (out, pattern) if output_attentions else (out,)


class Einsum(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.w_qkv = nn.Parameter(torch.randn(3, n_heads, d_model, d_model // n_heads))
        self.w_o = nn.Parameter(torch.randn(n_heads, d_model // n_heads, d_model))

    def forward(self, embeddings):
        q, k, v = torch.einsum("btd,chde->cbhte", embeddings, self.w_qkv)
        return torch.einsum("bhte,hed->btd", attended(q, k, v)[0], self.w_o)


class OneHead(nn.Module):
    def __init__(self, d_model, d_head):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(d_model, d_head, bias=False) for _ in range(3))

    def forward(self, x):
        return attended(self.query(x), self.key(x), self.value(x))[0]


class HeadList(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.heads = nn.ModuleList(OneHead(d_model, d_model // n_heads) for _ in range(n_heads))
        self.mix = nn.Linear(d_model, d_model)

    def forward(self, inputs):
        return self.mix(torch.cat([head(inputs) for head in self.heads], -1))


class BatchSecond(nn.Module):
    """Undocumented: only experiment tells."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.inner = nn.MultiheadAttention(d_model, n_heads)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class BatchSecondUnpacked(Projections):
    def forward(self, query, key, value):
        tgt_len, bsz, _ = query.shape
        assert key.size(0) == value.size(0)
        assert bsz == key.size(1) or tgt_len < 0
        out, _ = self.run(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
        return out.transpose(0, 1)


class Unbatched(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.W_query, self.W_key, self.W_value = (nn.Parameter(torch.randn(d_in, d_out)) for _ in range(3))

    def forward(self, x):
        queries, keys, values = x @ self.W_query, x @ self.W_key, x @ self.W_value
        weights = torch.softmax(queries @ keys.T / keys.shape[-1] ** 0.5, dim=1)
        return weights @ values


class FourAxes(Projections):
    def forward(self, x):
        b, one, t, d = x.shape
        return self.run(x[:, 0], x[:, 0], x[:, 0])[0].view(b, one, t, d)


class ChannelsFirst(nn.Module):
    def __init__(self, channels, n_heads):
        super().__init__()
        self.n_heads, self.qkv, self.out = (
            n_heads,
            nn.Conv1d(channels, 3 * channels, 1),
            nn.Conv1d(channels, channels, 1),
        )

    def forward(self, x):
        q, k, v = self.qkv(x).view(x.size(0), 3, self.n_heads, -1, x.size(2)).transpose(-2, -1).unbind(1)
        return self.out(attended(q, k, v)[0].transpose(-2, -1).reshape(x.shape))


class Wide(nn.Module):
    """Of another width at the end than at the start, with a limit of its length."""

    def __init__(self, d_in, d_out, context_length, num_heads):
        super().__init__()
        self.num_heads, self.d_out = num_heads, d_out
        self.W_query, self.W_key, self.W_value = (nn.Linear(d_in, d_out) for _ in range(3))
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1))

    def forward(self, x):
        b, num_tokens, _ = x.shape
        q, k, v = (
            w(x).view(b, num_tokens, self.num_heads, -1).transpose(1, 2)
            for w in (self.W_query, self.W_key, self.W_value)
        )
        hidden = self.mask.bool()[:num_tokens, :num_tokens]
        return (
            attended(q, k, v, lambda s: s.masked_fill(hidden, -math.inf))[0]
            .transpose(1, 2)
            .reshape(b, num_tokens, self.d_out)
        )


class FixedLength(Projections):
    def __init__(self, d_model, n_heads, seq_len):
        super().__init__(d_model, n_heads)
        self.position_bias = nn.Parameter(torch.randn(seq_len, seq_len))

    def forward(self, x):
        return self.run(x, x, x, lambda scores: scores + self.position_bias)[0]


class EvenLengths(Projections):
    def forward(self, x):
        if x.shape[1] % 2:
            raise ValueError("the number of tokens must be even")
        return self.run(x, x, x)[0]


class Lazy(nn.Module):
    def __init__(self, n_heads):
        super().__init__()
        self.n_heads, self.qkv = n_heads, nn.LazyLinear(96)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return attended(q, k, v)[0].transpose(1, 2).flatten(2)


class Untyped(Projections):
    def forward(self, *args, **kwargs):
        (x,) = args
        return self.run(x, x, x)[0]


class OddName(Projections):
    def forward(self, melody):
        return self.run(melody, melody, melody)[0]


class NoModule:
    """Attention in plain Python: tensors that are registered nowhere."""

    def __init__(self, d_model, n_heads):
        self.inner = Projections(d_model, n_heads)

    def __call__(self, x):
        return self.inner.run(x, x, x)[0]


# Two inputs, three inputs


class Cross(nn.Module):
    def __init__(self, query_dim, context_dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_kv = nn.Linear(query_dim, 32, bias=False), nn.Linear(context_dim, 64, bias=False)
        self.to_out = nn.Linear(32, query_dim)

    def forward(self, x, context):
        q, (k, v) = self.to_q(x), self.to_kv(context).chunk(2, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        return self.to_out(attended(q, k, v)[0].transpose(1, 2).flatten(2))


class OptionalMemory(Projections):
    def forward(self, hidden_states, encoder_hidden_states=None):
        memory = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        return self.run(hidden_states, memory, memory)[0]


class IgnoresMemory(Projections):
    def forward(self, x, memory=None):
        return self.run(x, x, x)[0]


class SourceAndTarget(Projections):
    def forward(self, src, tgt):
        return self.run(tgt, src, src)[0]


class KeysFirst(Projections):
    """Names that say nothing, the second of which has the queries."""

    def forward(self, a, b):
        return self.run(b, a, a)[0]


class QueryAndKv(Projections):
    def forward(self, q, kv):
        return self.run(q, kv, kv)[0]


class Annotated(nn.Module):
    def __init__(self, h, d_model):
        super().__init__()
        self.h, self.d_k, self.attn = h, d_model // h, None
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        n = query.size(0)
        q, k, v = (
            lin(x).view(n, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value), strict=False)
        )
        x, self.attn = attended(q, k, v, lambda s: s if mask is None else s.masked_fill(mask == 0, -1e9))
        return self.linears[-1](x.transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k))


class ValuesKeysQuery(Projections):
    def forward(self, values, keys, query, mask):
        change = (lambda s: s) if mask is None else (lambda s: s.masked_fill(mask == 0, float("-1e20")))
        return self.run(query, keys, values, change)[0]


class CapitalLetters(Projections):
    def forward(self, V, K, Q):
        return self.run(Q, K, V)[0]


class OptionalKeys(Projections):
    def forward(self, query, key=None, value=None):
        key = query if key is None else key
        return self.run(query, key, key if value is None else value)[0]


class KeywordOnly(Projections):
    def forward(self, *, value, query, key):
        return self.run(query, key, value)[0]


class SameLength(Projections):
    """Bears no keys of another number than queries."""

    def forward(self, q, k, v):
        b, t, d = q.shape
        k, v = k.view(b, t, d), v.view(b, t, d)
        return self.run(q, k, v)[0]


class KeywordMask(Projections):
    def forward(self, x, **kwargs):
        mask = kwargs.get("attn_mask")
        return self.run(x, x, x, lambda s: s if mask is None else s.masked_fill(~mask, -math.inf))[0]


# Masks


class MaskRequired(Projections):
    def forward(self, x, mask):
        return self.run(x, x, x, lambda scores: scores.masked_fill(mask == 0, -1e9))[0]


class FourAxesMaskRequired(Projections):
    def forward(self, x, attention_mask):
        assert attention_mask.dim() == 4
        return self.run(x, x, x, lambda scores: scores + attention_mask.to(scores.dtype))[0]


class BoolMaskHides(Projections):
    def forward(self, x, mask=None):
        return self.run(x, x, x, lambda s: s if mask is None else s.masked_fill(mask, -math.inf))[0]


class SaysKeepButHides(BoolMaskHides):
    """mask: bool [batch, 1, query, key], True = attend."""


class TwoMasks(Projections):
    """`key_padding_mask`: [batch, key], True for padding. `attn_mask`: additive."""

    def forward(self, query, key, value, key_padding_mask=None, attn_mask=None):
        def change(scores):
            if attn_mask is not None:
                scores = scores + attn_mask
            return (
                scores if key_padding_mask is None else scores.masked_fill(key_padding_mask[:, None, None], -math.inf)
            )

        return self.run(query, key, value, change)[0]


class TokenMask(Projections):
    """attention_mask: [batch, seq], 1 for tokens, 0 for padding."""

    def forward(self, x, attention_mask=None):
        hide = None if attention_mask is None else attention_mask[:, None, None, :].to(x.dtype)
        return self.run(x, x, x, lambda s: s if hide is None else s + (1.0 - hide) * -1e9)[0]


class Lengths(Projections):
    def forward(self, queries, keys, values, valid_lens):
        def change(scores):
            if valid_lens is None:
                return scores
            return scores.masked_fill(torch.arange(keys.size(1)) >= valid_lens[:, None, None, None], -1e6)

        return self.run(queries, keys, values, change)[0]


class LengthsRequired(Projections):
    def forward(self, x, lengths):
        return self.run(
            x, x, x, lambda s: s.masked_fill(torch.arange(x.size(1)) >= lengths[:, None, None, None], -1e6)
        )[0]


class Multiplies(Projections):
    """Wrong: hides nothing as it should, but takes 0 and 1 without raising."""

    def forward(self, x, mask=None):
        return self.run(x, x, x, lambda s: s if mask is None else s * mask)[0]


class PaddingForEachQuery(Projections):
    """Does not bear a mask of keys alone."""

    def forward(self, x, mask=None):
        if mask is not None:
            mask = mask.reshape(x.size(0), 1, x.size(1), x.size(1))
        return self.run(x, x, x, lambda s: s if mask is None else s.masked_fill(mask == 0, -1e9))[0]


# Results


class Named(NamedTuple):
    attention_weights: Tensor
    context: Tensor


@dataclass
class Output:
    last_hidden_state: Tensor
    attentions: Tensor | None = None


class ReturnsNamed(Projections):
    def forward(self, x):
        out, pattern = self.run(x, x, x)
        return Named(pattern, out)


class ReturnsDict(Projections):
    def forward(self, x):
        out, pattern = self.run(x, x, x)
        return {"weights": pattern.mean(1), "output": out}


class ReturnsDataclass(Projections):
    def forward(self, x, output_attentions=False):
        out, pattern = self.run(x, x, x)
        return Output(out, pattern if output_attentions else None)


class ReturnsList(Projections):
    def forward(self, x):
        out, pattern = self.run(x, x, x)
        return [out, pattern.flatten(0, 1)]


class ReturnsScoresToo(Projections):
    def forward(self, x):
        out, pattern = self.run(x, x, x)
        return out, pattern.log(), pattern


class UnbatchedWithPattern(Unbatched):
    def forward(self, x):
        weights = torch.softmax(x @ self.W_query @ (x @ self.W_key).T, dim=-1)
        return weights @ x @ self.W_value, weights


# Other arguments


class LlamaStyle(Projections):
    def forward(self, x, start_pos, freqs_cis, mask):
        assert start_pos == 0

        def turned(y):
            pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * freqs_cis[: y.size(2)]).flatten(-2).type_as(y)

        q, k, v = (self.cut(w(x)) for w in (self.q_proj, self.k_proj, self.v_proj))
        z, _ = attended(turned(q), turned(k), v, lambda s: s if mask is None else s + mask)
        return self.out_proj(z.transpose(1, 2).flatten(2))


class HalfRotation(Projections):
    def forward(self, hidden_states, position_embeddings, past_key_values=None, use_cache=False):
        cos, sin = position_embeddings

        def turned(y):
            one, two = y.chunk(2, -1)
            return y * cos[:, None] + torch.cat([-two, one], -1) * sin[:, None]

        q, k, v = (self.cut(w(hidden_states)) for w in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(attended(turned(q), turned(k), v)[0].transpose(1, 2).flatten(2)), None


class Switches(Projections):
    def forward(self, x, is_causal=False, need_weights=False, training=False):
        t = x.size(1)
        ahead = torch.ones(t, t, dtype=torch.bool).triu(1)
        out, pattern = self.run(x, x, x, lambda s: s.masked_fill(ahead, -math.inf) if is_causal else s)
        return (out + 1.0 if training else out), (pattern if need_weights else None)


class WantsNumber(Projections):
    def forward(self, x, fudge):
        return self.run(x, x, x)[0] * fudge


class KeepsState(Projections):
    def __init__(self, d_model, n_heads):
        super().__init__(d_model, n_heads)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.run(x, x, x)[0] * self.calls


class ChangesItsInput(Projections):
    def forward(self, x):
        x *= 2.0
        return self.run(x, x, x)[0]


class Float32Inside(Projections):
    def forward(self, x):
        q, k, v = (self.cut(w(x)) for w in (self.q_proj, self.k_proj, self.v_proj))
        pattern = F.softmax((q @ k.mT / q.size(-1) ** 0.5).float(), dim=-1).type_as(q)
        return self.out_proj((pattern @ v).transpose(1, 2).flatten(2))


class Float32Only(Projections):
    def forward(self, x):
        return self.run(x, x, x)[0].float()


class LearnedScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, q, k, v):
        return attended(q * self.temperature, k, v)[0]


class HeldTensor(nn.Module):
    """Its matrix is no parameter."""

    def __init__(self, d_model):
        super().__init__()
        self.w = torch.randn(d_model, d_model)

    def forward(self, x):
        return attended(x @ self.w, x, x)[0]


class HeldMatrices(HeldTensor):
    def forward(self, q, k, v):
        return attended(q @ self.w, k, v)[0]


class SplitsWithoutTranspose(Projections):
    """Wrong, but it must be called with the batch first all the same."""

    def cut(self, rows):
        return rows.reshape(rows.size(0), self.n_heads, rows.size(1), -1)

    def forward(self, x):
        return self.run(x, x, x)[0]


class MixesTheBatch(Projections):
    """Wrong: its softmax runs over sequences."""

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.out_proj((q @ k.mT).softmax(0) @ v)


# Functions


def attend(q, k, v):
    return attended(q, k, v)[0]


def attend_with_mask(query, key, value, mask=None, dropout=None):
    """mask: True/1 = may attend"""
    return attended(query, key, value, lambda s: s if mask is None else s.masked_fill(mask == 0, -1e9))


def attend_heads_third(q, k, v):
    z = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return z.transpose(1, 2)


def attend_three_axes(values, keys, queries):
    weights = torch.softmax(torch.bmm(queries, keys.transpose(1, 2)) / queries.size(-1) ** 0.5, dim=2)
    return torch.bmm(weights, values), weights


def attend_two_axes(Q, K, V):
    return F.softmax(Q @ K.t() / K.shape[1] ** 0.5, dim=1) @ V


def attend_third_axis(q, k, v):
    """Right for three axes only: nothing but its softmax tells."""
    return torch.softmax(q @ k.transpose(-2, -1) / q.size(-1) ** 0.5, dim=2) @ v


def attend_documented(q, k, v):
    """q, k, v: [batch, heads, seq, d_k]; wrong: the softmax runs over queries."""
    return torch.softmax(q @ k.transpose(-2, -1), dim=-2) @ v


def attend_returning_heads_third(query, key, value, scaling=None, attention_mask=None):
    z, pattern = attended(query, key, value, lambda s: s if attention_mask is None else s + attention_mask)
    return z.transpose(1, 2).contiguous(), pattern


def attend_merging(q, k, v):
    z, _ = attended(q, k, v)
    return z.transpose(1, 2).flatten(2)


def attend_needs_mask(q, k, v, mask):
    return attended(q, k, v, lambda s: s.masked_fill(~mask, -math.inf))[0]


def functional(x, w_q, w_k, w_v, w_o, n_heads):
    q, k, v = ((x @ w).unflatten(-1, (n_heads, -1)).transpose(1, 2) for w in (w_q, w_k, w_v))
    return attended(q, k, v)[0].transpose(1, 2).flatten(2) @ w_o


def functional_fused(x, in_proj_weight, in_proj_bias, out_proj_weight, num_heads=2):
    q, k, v = (
        y.unflatten(-1, (num_heads, -1)).transpose(1, 2) for y in F.linear(x, in_proj_weight, in_proj_bias).chunk(3, -1)
    )
    return F.linear(attended(q, k, v)[0].transpose(1, 2).flatten(2), out_proj_weight)


class ScaledDotProduct(nn.Module):
    def __init__(self, d_k):
        super().__init__()
        self.d_k = d_k

    def forward(self, Q, K, V, attn_mask=None):
        scores = Q @ K.transpose(-1, -2) / self.d_k**0.5
        pattern = (scores if attn_mask is None else scores.masked_fill(attn_mask, -1e9)).softmax(-1)
        return pattern @ V, pattern


class CutsItself(nn.Module):
    """No weights, but it cuts into heads by itself."""

    def __init__(self, num_heads):
        super().__init__()
        self.num_heads = num_heads

    def forward(self, q, k, v):
        q, k, v = (
            y.reshape(y.size(0), -1, self.num_heads, y.size(-1) // self.num_heads).transpose(1, 2) for y in (q, k, v)
        )
        return attended(q, k, v)[0].transpose(1, 2).flatten(2)


# Conventions and outputs

ROWS, TURNED, SINGLE = ("batch", "row", "width"), ("row", "batch", "width"), ("row", "width")
HEADS, HEADS_THIRD = ("batch", "head", "row", "width"), ("batch", "row", "head", "width")
TORCH = {"embed_dim": D, "num_heads": H}


def with_ones(call: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return call(q, torch.ones(q.shape[1], q.shape[1]))


def with_zero(call: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return call(q, torch.zeros(1, 1, 1, 1))


def with_whole_length(call: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return call(q, torch.full((len(q),), q.shape[1]))


def own(call: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return call(q)


def three(call: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return call(q, k, v)


def each(call: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    results = [call(rows) for rows in q]
    if isinstance(results[0], tuple):
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return torch.stack(results)


class Case(NamedTuple):
    """A convention: the start of its description, the axes of its inputs, whether it takes a context, and a call by hand."""

    thing: Any
    arguments: dict[str, Any]
    described: str
    axes: tuple[str, ...] = ROWS
    takes_context: bool = False
    by_hand: Callable[..., Any] = own
    is_function: bool = False
    pattern: Callable[[Any], Tensor] | None = None


def second(result: Any) -> Tensor:
    return result[1]


CASES = [
    Case(Fused, SIZED, "forward(x)"),
    Case(GptStyle, {"config": GptConfig()}, "forward(x)"),
    Case(BertStyle, SIZED, "forward(hidden_states, output_attentions=True, attention_mask=…)[0]",
         by_hand=lambda call, q, k, v: call(q, output_attentions=True), pattern=second),
    Case(Einsum, SIZED, "forward(embeddings)"),
    Case(OneHead, {"d_model": D, "d_head": 6}, "forward(x)"),
    Case(HeadList, SIZED, "forward(inputs)"),
    Case(BatchSecond, SIZED, "forward(x)  # rows [seq, batch, d]", TURNED,
         by_hand=lambda call, q, k, v: call(q.transpose(0, 1)).transpose(0, 1)),
    Case(BatchSecondUnpacked, SIZED, "forward(query, key, value)  # rows [seq, batch, d]", TURNED, True,
         lambda call, *rows: call(*(y.transpose(0, 1) for y in rows)).transpose(0, 1)),
    Case(Unbatched, {"d_in": D, "d_out": 20}, "forward(x)  # rows [seq, d]", SINGLE, by_hand=each),
    Case(UnbatchedWithPattern, {"d_in": D, "d_out": 20}, "forward(x)[0]  # rows [seq, d]", SINGLE, by_hand=each,
         pattern=lambda result: result[1][:, None]),
    Case(FourAxes, SIZED, "forward(x)  # rows [batch, 1, seq, d]", HEADS, by_hand=lambda call, q, k, v: call(q[:, None])[:, 0]),
    Case(ChannelsFirst, {"channels": D, "n_heads": H}, "forward(x)  # rows [batch, d, seq]", ("batch", "width", "row"),
         by_hand=lambda call, q, k, v: call(q.mT).mT),
    Case(Wide, {"d_in": 24, "d_out": D, "context_length": 6, "num_heads": H}, "forward(x)"),
    Case(FixedLength, {**SIZED, "seq_len": 13}, "forward(x)"),
    Case(EvenLengths, SIZED, "forward(x)"),
    Case(Lazy, {"n_heads": H}, "forward(x)"),
    Case(Untyped, SIZED, "forward(queries)"),
    Case(OddName, SIZED, "forward(melody)"),
    Case(NoModule, SIZED, "__call__(x)"),
    Case(Cross, {"query_dim": 20, "context_dim": 28, "heads": H}, "forward(x, context)", ROWS, True,
         lambda call, q, k, v: call(q, k)),
    Case(OptionalMemory, SIZED, "forward(hidden_states, encoder_hidden_states)", ROWS, True, lambda call, q, k, v: call(q, k)),
    Case(IgnoresMemory, SIZED, "forward(x)"),
    Case(SourceAndTarget, SIZED, "forward(src, tgt)", ROWS, True, lambda call, q, k, v: call(k, q)),
    Case(KeysFirst, SIZED, "forward(a, b)", ROWS, True, lambda call, q, k, v: call(k, q)),
    Case(QueryAndKv, SIZED, "forward(q, kv)", ROWS, True, lambda call, q, k, v: call(q, k)),
    Case(Annotated, {"h": H, "d_model": D}, "forward(query, key, value, mask=…)", ROWS, True, three),
    Case(ValuesKeysQuery, SIZED, "forward(values, keys, query, mask=…)", ROWS, True,
         lambda call, q, k, v: call(v, k, q, None)),
    Case(CapitalLetters, SIZED, "forward(V, K, Q)", ROWS, True, lambda call, q, k, v: call(v, k, q)),
    Case(OptionalKeys, SIZED, "forward(query, key, value)", ROWS, True, three),
    Case(KeywordOnly, SIZED, "forward(value, query, key)", ROWS, True, lambda call, q, k, v: call(query=q, key=k, value=v)),
    Case(SameLength, SIZED, "forward(q, k, v)", ROWS, False, three),
    Case(KeywordMask, SIZED, "forward(x, attn_mask=…)"),
    Case(MaskRequired, SIZED, "forward(x, mask=…)", by_hand=with_ones),
    Case(FourAxesMaskRequired, SIZED, "forward(x, attention_mask=…)", by_hand=with_zero),
    Case(TwoMasks, SIZED, "forward(query, key, value, attn_mask=…, key_padding_mask=…)", ROWS, True, three),
    Case(Lengths, SIZED, "forward(queries, keys, values, valid_lens=…)", ROWS, True, lambda call, *rows: call(*rows, None)),
    Case(LengthsRequired, SIZED, "forward(x, lengths=…)", by_hand=with_whole_length),
    Case(ReturnsNamed, SIZED, "forward(x).context", by_hand=lambda call, q, k, v: call(q)[::-1], pattern=second),
    Case(ReturnsDict, SIZED, 'forward(x)["output"]', by_hand=lambda call, q, k, v: list(call(q).values())[::-1],
         pattern=lambda result: result[1][:, None]),
    Case(ReturnsDataclass, SIZED, "forward(x, output_attentions=True).last_hidden_state",
         by_hand=lambda call, q, k, v: list(vars(call(q, True)).values()), pattern=second),
    Case(ReturnsList, SIZED, "forward(x)[0]", pattern=lambda result: result[1].unflatten(0, (-1, H))),
    Case(ReturnsScoresToo, SIZED, "forward(x)[0]", pattern=lambda result: result[2]),
    Case(HalfRotation, SIZED,
         "forward(hidden_states, position_embeddings=…)[0]  # position_embeddings: (cos, sin) [1, 7, 8], base 10000",
         by_hand=lambda call, q, k, v: call(q, (rotation(q).cos()[None], rotation(q).sin()[None]))),
    Case(LlamaStyle, SIZED, "forward(x, start_pos=…, freqs_cis=…, mask=…)  # freqs_cis: complex [7, 4], base 10000",
         by_hand=lambda call, q, k, v: call(q, 0, torch.exp(1j * rotation(q)[:, :4]), None)),
    Case(Switches, SIZED, "forward(x, training=…, need_weights=True)[0]",
         by_hand=lambda call, q, k, v: call(q, need_weights=True), pattern=second),
    Case(SplitsWithoutTranspose, SIZED, "forward(x)"),
    Case(MixesTheBatch, SIZED, "forward(x)"),
    Case(ChangesItsInput, SIZED, "forward(x)", by_hand=lambda call, q, k, v: call(q.clone())),
    Case(nn.MultiheadAttention, {**TORCH, "batch_first": True},
         "forward(query, key, value, need_weights=True, average_attn_weights=False, attn_mask=…, key_padding_mask=…)[0]", ROWS,
         True, lambda call, *rows: call(*rows, average_attn_weights=False), pattern=second),
    Case(nn.MultiheadAttention, TORCH, "forward(query, key, value, need_weights=True, average_attn_weights=False,", TURNED, True,
         lambda call, *rows: turned_result(call, rows), pattern=second),
    Case(attend, {}, "attend(q, k, v)", HEADS, True, three, True),
    Case(attend_with_mask, {}, "attend_with_mask(query, key, value, mask=…)[0]", HEADS, True, three, True, second),
    Case(F.scaled_dot_product_attention, {}, "scaled_dot_product_attention(query, key, value, attn_mask=…)", HEADS,
         True, three, True),
    Case(attend_heads_third, {}, "attend_heads_third(q, k, v)  # rows [batch, seq, head, d]", HEADS_THIRD, True,
         lambda call, *rows: call(*(y.transpose(1, 2) for y in rows)).transpose(1, 2), True),
    Case(attend_three_axes, {}, "attend_three_axes(values, keys, queries)[0]  # rows [batch, seq, d]", ROWS, True,
         lambda call, q, k, v: tuple(y[:, None] for y in call(v[:, 0], k[:, 0], q[:, 0])), True, second),
    Case(attend_third_axis, {},
         "attend_third_axis(q, k, v)  # rows [batch, seq, d]; with [batch, head, seq, d] it is no attention", ROWS, True,
         lambda call, *rows: call(*(y[:, 0] for y in rows))[:, None], True),
    Case(attend_two_axes, {}, "attend_two_axes(Q, K, V)  # rows [seq, d]", SINGLE, True,
         lambda call, *rows: torch.stack([call(q[0], k[0], v[0]) for q, k, v in zip(*rows, strict=True)])[:, None], True),
    Case(attend_documented, {}, "attend_documented(q, k, v)", HEADS, True, three, True),
    Case(attend_returning_heads_third, {},
         "attend_returning_heads_third(query, key, value, attention_mask=…)[0]  # result [batch, seq, head, d]", HEADS, True,
         lambda call, *rows: (call(*rows)[0].transpose(1, 2), call(*rows)[1]), True, second),
    Case(attend_merging, {}, "attend_merging(q, k, v)  # result [batch, seq, head·width]", HEADS, True,
         lambda call, *rows: call(*rows).unflatten(-1, (4, -1)).transpose(1, 2), True),
    Case(attend_needs_mask, {}, "attend_needs_mask(q, k, v, mask=…)", HEADS, True,
         lambda call, *rows: call(*rows, torch.tensor(True)), True),
    Case(ScaledDotProduct, {"d_k": 6}, "forward(Q, K, V, attn_mask=…)[0]", HEADS, True, three, True, second),
    Case(CutsItself, {"num_heads": 2}, "forward(q, k, v)", ROWS, True, three),
]  # fmt: skip
IDS = [f"{case.thing.__name__}-{number}" for number, case in enumerate(CASES)]


def rotation(rows: Tensor) -> Tensor:
    """The angles `[row, 8]` of a half rotation for heads of width 8, from the formula."""
    return torch.tensor(
        [[t / 10000 ** (2 * (i % 4) / 8) for i in range(8)] for t in range(rows.shape[1])], dtype=rows.dtype
    )


def turned_result(call: Any, rows: tuple[Tensor, ...]) -> Any:
    out, pattern = call(*(y.transpose(0, 1) for y in rows), average_attn_weights=False)
    return out.transpose(0, 1), pattern


def rows_for(caller: UserAttention, seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the caller's sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes, middle = caller.sizes, (caller.n_heads,) if caller.is_function else ()

    def draw(length: int, width: int) -> Tensor:
        return torch.randn(sizes.batch, *middle, length, width, generator=generator, dtype=caller.dtype)

    return draw(sizes.q_len, sizes.d_in), draw(sizes.k_len, sizes.d_context), draw(sizes.k_len, sizes.d_context)


def asked_with(caller: UserAttention, q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    """The inputs of this caller, with keys and values only if it has parameters for them."""
    parts = {slot.part for slot in caller.convention.slots}
    return Inputs(q, k if "keys" in parts else None, v if "values" in parts else None)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_how_it_is_called_is_found(case: Case) -> None:
    caller = found(case.thing, case.arguments)
    assert caller.described.startswith(case.described)
    assert caller.convention.axes == case.axes
    assert caller.is_function is case.is_function
    assert caller.takes_context is case.takes_context
    assert caller.dtype == torch.float64 or case.thing is Lazy
    sizes = caller.sizes
    assert (sizes.q_len != sizes.k_len) is case.takes_context
    different = [sizes.batch, sizes.q_len, sizes.d_in, caller.convention.n_heads] + [sizes.k_len] * case.takes_context
    assert len(set(different)) == len(different)
    assert sizes.batch >= 3


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_asking_gives_what_calling_by_hand_gives(case: Case) -> None:
    caller = found(case.thing, case.arguments)
    rows = rows_for(caller)
    with torch.no_grad():
        result = case.by_hand(caller.built.call, *rows)
    out = result if isinstance(result, Tensor) else result[0]
    answer = caller(asked_with(caller, *rows))
    torch.testing.assert_close(answer.out, out, rtol=1e-9, atol=1e-9)
    if case.pattern is None:
        assert answer.pattern is None
    else:
        assert answer.pattern is not None
        torch.testing.assert_close(answer.pattern, case.pattern(result), rtol=1e-9, atol=1e-9)


def test_sizes_are_none_of_its_own_numbers_and_within_its_limit() -> None:
    sizes = found(Fused, {"d_model": 21, "n_heads": 3}).sizes  # heads of 7
    assert (sizes.batch, sizes.q_len) == (4, 5)
    sizes = found(Wide, {"d_in": 24, "d_out": D, "context_length": 4, "num_heads": 2}).sizes
    assert sizes.q_len <= 4


def test_there_are_cases_of_at_least_forty_styles() -> None:
    assert len({case.thing for case in CASES}) >= 40


# Masks

STYLES = [
    (Annotated, {"h": H, "d_model": D}), (ValuesKeysQuery, SIZED), (BertStyle, SIZED), (KeywordMask, SIZED),
    (MaskRequired, SIZED), (FourAxesMaskRequired, SIZED), (BoolMaskHides, SIZED), (TwoMasks, SIZED), (TokenMask, SIZED),
    (Multiplies, SIZED), (PaddingForEachQuery, SIZED), (attend_with_mask, {}), (attend_needs_mask, {}),
    (F.scaled_dot_product_attention, {}), (nn.MultiheadAttention, TORCH),
    (nn.MultiheadAttention, {**TORCH, "batch_first": True}), (ScaledDotProduct, {"d_k": 6}),
]  # fmt: skip


def by_hand_mask(form: MaskForm, keep: Tensor, dtype: torch.dtype) -> Tensor:
    """`keep` `[batch, 1, query or 1, key]` in a form, written axis by axis."""
    index = {"batch": 0, "head": 1, "query": 2, "key": 3}
    for axis in ("query", "head", "batch"):
        if axis not in form.axes:
            keep = keep.select(index[axis], 0)
    true = keep if form.true_means == "keep" else ~keep
    if form.kind == "additive":
        return torch.where(keep, 0.0, -math.inf).to(dtype)
    return true if form.kind == "bool" else true.to(dtype if form.kind == "01" else torch.int64)


def call_with(caller: UserAttention, rows: tuple[Tensor, ...], **masks: Tensor) -> Tensor:
    """The module called by hand, with inputs by name."""
    turn = caller.convention.axes == TURNED
    parts = dict(zip(("queries", "keys", "values"), rows, strict=True))
    named = {slot.parameter: parts[slot.part] for slot in caller.convention.slots}
    with torch.no_grad():
        result = caller.built.call(**{name: y.transpose(0, 1) if turn else y for name, y in named.items()}, **masks)
    out = result[0] if isinstance(result, tuple) else result
    return out.transpose(0, 1) if turn else out


@pytest.mark.parametrize(
    ("thing", "arguments"), STYLES, ids=[f"{thing.__name__}-{n}" for n, (thing, _) in enumerate(STYLES)]
)
def test_masks_are_written_in_every_form_that_was_found(thing: Any, arguments: dict[str, Any]) -> None:
    caller = found(thing, arguments)
    rows = rows_for(caller)
    batch, q_len, k_len = caller.sizes.batch, caller.sizes.q_len, caller.sizes.k_len
    generator = torch.Generator().manual_seed(1)
    assert caller.mask_forms or caller.padding_forms
    for form in caller.mask_forms:
        allowed = torch.rand(batch, 1, q_len, k_len, generator=generator) < 0.5
        allowed[..., 0] = True
        allowed[..., 3] = False
        if "batch" not in form.axes:
            allowed = allowed[:1]
        by_hand = call_with(
            caller, rows, **{form.parameter: by_hand_mask(form, allowed.expand(batch, 1, -1, -1), caller.dtype)}
        )
        answer = caller(asked_with(caller, *rows)._replace(allowed=allowed), mask=form)
        torch.testing.assert_close(answer.out, by_hand, rtol=1e-9, atol=1e-9, equal_nan=True)
    for form in caller.padding_forms:
        real = torch.arange(k_len) < torch.tensor([k_len, 3, 2, 4, 5, 6])[:batch, None]
        keep = real[:, None, None, :]
        if thing is PaddingForEachQuery:
            keep = keep.expand(-1, -1, q_len, -1)
        by_hand = call_with(caller, rows, **{form.parameter: by_hand_mask(form, keep, caller.dtype)})
        answer = caller(asked_with(caller, *rows)._replace(real=real), padding=form)
        torch.testing.assert_close(answer.out, by_hand, rtol=1e-9, atol=1e-9, equal_nan=True)


BHQK, BQK, QK, BK = ("batch", "head", "query", "key"), ("batch", "query", "key"), ("query", "key"), ("batch", "key")


@pytest.mark.parametrize(
    ("thing", "arguments", "first", "padding"),
    [
        (Annotated, {"h": H, "d_model": D}, (BQK, "bool", "keep"), (BQK, "bool", "keep")),
        (ValuesKeysQuery, SIZED, (BHQK, "bool", "keep"), (BHQK, "bool", "keep")),
        (BertStyle, SIZED, (BHQK, "additive", "keep"), (BHQK, "additive", "keep")),
        (FourAxesMaskRequired, SIZED, (BHQK, "additive", "keep"), (BHQK, "additive", "keep")),
        (BoolMaskHides, SIZED, (BHQK, "bool", "hide"), (BHQK, "bool", "hide")),
        (SaysKeepButHides, SIZED, (BHQK, "bool", "keep"), (BHQK, "bool", "keep")),
        (TwoMasks, SIZED, (BHQK, "additive", "keep"), (BK, "bool", "hide")),
        (TokenMask, SIZED, None, (BK, "bool", "keep")),
        (Lengths, SIZED, None, (("batch",), "lengths", "keep")),
        (LengthsRequired, SIZED, None, (("batch",), "lengths", "keep")),
        (Multiplies, SIZED, (BHQK, "bool", "keep"), (BHQK, "bool", "keep")),
        (KeywordMask, SIZED, (BHQK, "bool", "keep"), (BHQK, "bool", "keep")),
        (nn.MultiheadAttention, TORCH, (QK, "bool", "hide"), (BK, "bool", "hide")),
        (F.scaled_dot_product_attention, {}, (BHQK, "bool", "keep"), (BHQK, "bool", "keep")),
        (ScaledDotProduct, {"d_k": 6}, (BHQK, "bool", "hide"), (BHQK, "bool", "hide")),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_likeliest_form_comes_first(thing: Any, arguments: Any, first: Any, padding: Any) -> None:
    caller = found(thing, arguments)
    assert [form[1:4] for form in caller.mask_forms[:1]] == ([first] if first else [])
    assert [form[1:4] for form in caller.padding_forms[:1]] == ([padding] if padding else [])


def test_both_meanings_of_true_are_listed_of_each_form_but_additive_and_lengths() -> None:
    for thing, arguments in STYLES[2::3]:
        caller = found(thing, arguments)
        for forms in (caller.mask_forms, caller.padding_forms):
            for form in forms:
                other = form._replace(true_means="hide" if form.true_means == "keep" else "keep")
                assert (other in forms) is (form.kind not in ("additive", "lengths"))
            assert len(set(forms)) == len(forms)


def test_a_mask_and_padding_for_one_parameter_are_written_as_one() -> None:
    caller = found(ValuesKeysQuery, SIZED)
    q, k, v = rows_for(caller)
    sizes = caller.sizes
    allowed = torch.ones(1, 1, sizes.q_len, sizes.k_len, dtype=torch.bool).tril(2)
    real = torch.arange(sizes.k_len) != torch.tensor([3, 4, 5, 6])[: sizes.batch, None]
    with torch.no_grad():
        by_hand = caller.built.call(v, k, q, allowed & real[:, None, None, :])
    answer = caller(
        Inputs(q, k, v, allowed, real), mask=MaskForm("mask", BHQK, "bool"), padding=MaskForm("mask", BHQK, "01")
    )  # fmt: skip
    torch.testing.assert_close(answer.out, by_hand, rtol=1e-9, atol=1e-9)


def test_two_masks_for_two_parameters_are_both_given() -> None:
    caller = found(TwoMasks, SIZED)
    q, k, v = rows_for(caller)
    allowed = torch.ones(1, 1, caller.sizes.q_len, caller.sizes.k_len, dtype=torch.bool).tril(2)
    real = torch.arange(caller.sizes.k_len) < torch.tensor([3, 4, 5, 6])[: caller.sizes.batch, None]
    with torch.no_grad():
        by_hand = caller.built.call(
            q, k, v, ~real, torch.zeros(allowed.shape[2:], dtype=q.dtype).masked_fill(~allowed[0, 0], -math.inf)
        )
    answer = caller(Inputs(q, k, v, allowed, real), mask=caller.mask_forms[0], padding=caller.padding_forms[0])
    torch.testing.assert_close(answer.out, by_hand, rtol=1e-9, atol=1e-9)


def test_a_mask_of_one_sequence_at_a_time_is_that_sequences() -> None:
    def masked(x, mask=None):
        scores = x @ x.T
        return (scores if mask is None else scores.masked_fill(mask, -math.inf)).softmax(1) @ x

    caller = found(masked)
    q, _, _ = rows_for(caller)
    allowed = torch.rand(caller.sizes.batch, 1, 7, 7, generator=torch.Generator().manual_seed(2)) < 0.6
    allowed[..., 0] = True
    assert caller.convention.axes == SINGLE
    assert caller.mask_forms[0] == MaskForm("mask", QK, "bool", "hide")
    answer = caller(Inputs(q, allowed=allowed), mask=caller.mask_forms[0])
    by_hand = torch.stack([masked(x, ~keep[0]) for x, keep in zip(q, allowed, strict=True)])
    torch.testing.assert_close(answer.out, by_hand, rtol=1e-9, atol=1e-9)


def test_a_mask_that_its_form_cannot_express_is_refused() -> None:
    caller = found(nn.MultiheadAttention, TORCH)
    q, k, v = rows_for(caller)
    allowed = torch.ones(caller.sizes.batch, 1, caller.sizes.q_len, caller.sizes.k_len, dtype=torch.bool)
    allowed[1, 0, 0, 2] = False
    with pytest.raises(ValueError) as refused:
        caller(Inputs(q, k, v, allowed), mask=caller.mask_forms[0])
    assert str(refused.value) == "a mask for attn_mask must be the same for each batch, got different ones"
    with pytest.raises(ValueError) as refused:
        caller(Inputs(q, k, v, allowed))
    assert str(refused.value) == "inputs.allowed must come with the form of a mask, got none"


# Switches, state, dtypes, copies


def test_a_causal_switch_is_set_under_the_causal_option() -> None:
    caller = found(Switches, SIZED, causal=True)
    assert caller.causal_by == "is_causal"
    q, _, _ = rows_for(caller)
    by_hand = caller.built.call(q, is_causal=True)[0].detach()
    torch.testing.assert_close(caller(Inputs(q)).out, by_hand, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(by_hand, caller.built.call(q)[0])
    assert found(Switches, SIZED).causal_by is None


def test_a_causal_switch_that_raises_without_a_mask_is_left_alone() -> None:
    caller = found(nn.MultiheadAttention, TORCH, causal=True)
    assert caller.causal_by is None
    assert "is_causal" not in caller.described


def test_a_causal_switch_that_bears_no_mask_yields_to_it() -> None:
    def strict(q, k, v, mask=None, is_causal=False):
        if is_causal and mask is not None:
            raise ValueError("one of them")
        ahead = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).triu(1)
        hidden = ahead if is_causal else ~mask if mask is not None else torch.tensor(False)
        return attended(q, k, v, lambda s: s.masked_fill(hidden, -math.inf))[0]

    caller = found(strict, causal=True)
    q, k, v = rows_for(caller)
    assert (caller.causal_by, caller.convention.causal_yields) == ("is_causal", True)
    torch.testing.assert_close(caller(Inputs(q, k, v)).out, strict(q, k, v, is_causal=True))
    allowed = torch.ones(1, 1, caller.sizes.q_len, caller.sizes.k_len, dtype=torch.bool).tril(3)
    answer = caller(Inputs(q, k, v, allowed), mask=caller.mask_forms[0])
    torch.testing.assert_close(answer.out, strict(q, k, v, mask=allowed))


def test_training_mode_is_set_on_module_and_call_and_restored() -> None:
    caller = found(Switches, SIZED)
    q, _, _ = rows_for(caller)
    torch.testing.assert_close(caller(Inputs(q), training=True).out, caller(Inputs(q)).out + 1.0)
    gpt = found(GptStyle, {"config": GptConfig()})
    q, _, _ = rows_for(gpt)
    gpt.built.call.c_attn.train()
    trained = gpt(Inputs(q), training=True).out
    assert [part.training for part in gpt.built.call.modules()] == [False, True, False, False]
    assert not torch.allclose(trained, gpt(Inputs(q)).out)
    torch.testing.assert_close(gpt(Inputs(q)).out, gpt(Inputs(q)).out, rtol=0, atol=0)


def test_the_search_leaves_no_state_behind() -> None:
    caller = found(KeepsState, SIZED)
    assert caller.built.call.calls == 0
    q, _, _ = rows_for(caller)
    torch.testing.assert_close(caller(Inputs(q)).out * 2, caller(Inputs(q)).out)


def test_inputs_and_outputs_share_no_memory_with_the_caller() -> None:
    caller = found(ChangesItsInput, SIZED)
    q, _, _ = rows_for(caller)
    kept = q.clone()
    answer = caller(Inputs(q))
    assert torch.equal(q, kept)
    assert not answer.out.requires_grad
    identity = found(lambda q, k, v: attended(q, k, v)[0].mul_(1.0))
    assert identity.is_function


def test_it_is_called_in_float32_if_it_rounds_to_float32_inside() -> None:
    assert found(Float32Inside, SIZED).dtype == torch.float32
    assert found(Float32Only, SIZED).dtype == torch.float32
    assert found(Fused, SIZED).dtype == torch.float64


def test_tensors_that_are_registered_nowhere_come_along_to_float64() -> None:
    assert found(HeldTensor, {"d_model": D}).dtype == torch.float64
    assert found(NoModule, SIZED).dtype == torch.float64


def test_a_matrix_makes_it_a_module_over_rows_and_a_number_does_not() -> None:
    assert not found(HeldMatrices, {"d_model": D}).is_function
    assert found(LearnedScale).is_function


def test_the_copy_in_float64_has_the_numbers_of_what_was_built() -> None:
    one = built(Fused, SIZED)
    caller = find_user_attention(one, TargetRequest("a.py:A"))
    assert caller.built.module is not one.module
    assert next(one.module.parameters()).dtype == torch.float32
    for mine, theirs in zip(caller.built.module.parameters(), one.module.parameters(), strict=True):
        assert torch.equal(mine, theirs.double())


def test_another_copy_is_called_with_the_same_convention() -> None:
    caller = found(BatchSecondUnpacked, SIZED)
    other = copy.deepcopy(caller.built.call).half()
    with torch.no_grad():
        other.q_proj.weight.zero_()
    asked = caller.of(other, torch.float16)
    q, k, v = rows_for(caller)
    answer = asked(Inputs(q, k, v))
    assert answer.out.dtype == torch.float16
    assert asked.built.module is other
    assert (asked.convention, asked.sizes, asked.described) == (caller.convention, caller.sizes, caller.described)


def test_weights_of_a_function_are_made_and_can_be_exchanged() -> None:
    caller = found(functional)
    assert caller.described == "functional(x, w_q=…, w_k=…, w_v=…, w_o=…, n_heads=4)"
    assert {name: list(tensor.shape) for name, tensor in caller.tensors.items()} == {
        name: [D, D] for name in ("w_q", "w_k", "w_v", "w_o")
    }
    assert not caller.is_function
    q, _, _ = rows_for(caller)
    torch.testing.assert_close(caller(Inputs(q)).out, functional(q, **caller.tensors, n_heads=4))
    halved = {name: tensor / 2 for name, tensor in caller.tensors.items()}
    torch.testing.assert_close(replace(caller, tensors=halved)(Inputs(q)).out, functional(q, **halved, n_heads=4))


def test_fused_weights_of_a_function_get_the_shape_that_works() -> None:
    caller = found(functional_fused)
    d = caller.sizes.d_in
    shapes = {name: list(tensor.shape) for name, tensor in caller.tensors.items()}
    assert shapes == {"in_proj_weight": [3 * d, d], "in_proj_bias": [3 * d], "out_proj_weight": [d, d]}
    q, _, _ = rows_for(caller)
    torch.testing.assert_close(caller(Inputs(q)).out, functional_fused(q, **caller.tensors))


def test_keys_that_are_not_given_are_the_queries() -> None:
    for thing in (CapitalLetters, OptionalKeys, OptionalMemory, SourceAndTarget):
        caller = found(thing, SIZED)
        q, _, _ = rows_for(caller)
        torch.testing.assert_close(caller(Inputs(q)).out, caller(Inputs(q, q, q)).out, rtol=1e-9, atol=1e-9)


def test_a_call_argument_is_passed_on_as_a_literal() -> None:
    caller = found(WantsNumber, SIZED, call_arguments=(("fudge", "2.5"),))
    assert caller.described == "forward(x, fudge=2.5)"
    q, _, _ = rows_for(caller)
    torch.testing.assert_close(caller(Inputs(q)).out, caller.built.call(q, 2.5).detach())


def test_numbers_that_a_call_requires_are_those_of_its_rows() -> None:
    def sized(q, k, v, d_k, n_heads, seq_len, scale, dropout_p, batch_size):
        assert (n_heads, d_k) == q.shape[1::2]
        assert (batch_size, seq_len, dropout_p) == (len(q), q.size(2), 0.0)
        return attended(q, k, v)[0] * scale

    assert found(sized, documentation="q: (batch, heads, seq, d_k)").n_heads == 4
    assert found(sized).is_function

    def widths(q, k, v, d_k, scale):
        assert d_k == q.size(-1)
        return (q @ k.mT * scale).softmax(-1) @ v

    caller = found(widths)
    q, k, v = rows_for(caller)
    torch.testing.assert_close(caller(Inputs(q, k, v)).out, attended(q, k, v)[0])


class MaskLast(Projections):
    def forward(self, *, query, key, value, mask=None):
        """Rows are [seq, batch, d_model], the mask [query, key, batch]."""
        if mask is not None:
            assert mask.shape[:2] == (len(query), len(key))
            mask = mask.permute(2, 0, 1)[:, None]
        rows = (y.transpose(0, 1) for y in (query, key, value))
        out, pattern = self.run(*rows, lambda s: s if mask is None else s.masked_fill(mask == 0, -math.inf))
        return out.transpose(0, 1), pattern.permute(2, 3, 0, 1)


def test_a_mask_and_a_pattern_with_the_batch_last_are_found() -> None:
    caller = found(MaskLast, SIZED)
    assert caller.mask_forms[0] == MaskForm("mask", ("query", "key", "batch"), "bool")
    assert caller.padding_forms[0] == MaskForm("mask", ("query", "key", "batch"), "bool")
    q, k, v = rows_for(caller)
    allowed = torch.rand(len(q), 1, q.size(1), k.size(1), generator=torch.Generator().manual_seed(5)) < 0.6
    allowed[..., 0] = True
    named = {"query": q, "key": k, "value": v}
    with torch.no_grad():
        out, pattern = caller.built.call(
            **{n: y.transpose(0, 1) for n, y in named.items()}, mask=allowed[:, 0].permute(1, 2, 0)
        )
    answer = caller(Inputs(q, k, v, allowed), mask=caller.mask_forms[0])
    torch.testing.assert_close(answer.out, out.transpose(0, 1), rtol=1e-9, atol=1e-9)
    assert answer.pattern is not None
    torch.testing.assert_close(answer.pattern, pattern.permute(2, 3, 0, 1), rtol=1e-12, atol=1e-12)


def test_the_search_leaves_the_random_numbers_of_its_caller_alone() -> None:
    class Noisy(Projections):
        def forward(self, x):
            return self.run(x, x, x)[0] + torch.rand(1) * 0

    one = built(Noisy, SIZED)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    find_user_attention(one, TargetRequest("a.py:A"))
    assert torch.equal(torch.rand(2), expected)


# Targets that cannot be called


def refusal(
    thing: Any, arguments: dict[str, Any] | None = None, code: str = "cannot-examine", **request: Any
) -> MhaError:
    with pytest.raises(MhaError) as refused:
        found(thing, arguments, **request)
    assert refused.value.code == code
    return refused.value


def test_a_required_parameter_of_unknown_role_is_named_in_the_error() -> None:
    error = refusal(WantsNumber, SIZED)
    assert error.message == "WantsNumber needs a value for fudge, which mha cannot guess from the name"
    assert error.hint == "give it, for example --call-arg fudge=1"


def test_all_required_parameters_of_unknown_role_are_named_at_once() -> None:
    def wants(x, *, wibble, mask=None, wobble, wubble=1):
        return x

    error = refusal(wants)
    assert error.message.startswith("wants needs a value for wibble and wobble, ")
    assert error.hint == "give them, for example --call-arg wibble=1 --call-arg wobble=1"


def test_a_call_argument_that_there_is_no_parameter_for_is_refused() -> None:
    error = refusal(Fused, SIZED, call_arguments=(("y", "1"),))
    assert (error.message, error.hint) == ("--call-arg y: Fused has no such parameter", "it has x")


class Raises(Projections):
    def forward(self, x):
        raise KeyError("the table of tides is missing")


def test_an_exception_in_user_code_is_reported_with_its_line() -> None:
    error = refusal(Raises, SIZED)
    line = Raises.forward.__code__.co_firstlineno + 1
    assert re.fullmatch(
        rf"""Raises could not be called in any of \d+ usual ways: x \[3, 7, 32\] and \d+ more: """
        rf"""KeyError: 'the table of tides is missing' \(line {line}: raise KeyError\("the table of tides is missing"\)\)""",
        error.message,
    )


def test_the_most_frequent_error_is_reported_in_four_lines_with_the_number_of_others() -> None:
    class Varied(Projections):
        def forward(self, x):
            if x.shape == (3, 7, 32):
                raise KeyError("of the first way alone")
            if x.ndim == 3:
                raise ValueError(f"{len(x)} is " + "very " * 100 + "odd")
            raise ValueError("of other axes; " + "; ".join("far too long a line" for _ in range(20)))

    one = built(Varied, SIZED)
    one = replace(one, guesses=(Guess("d_model", D, "a guess"), Guess("n_heads", H, "a guess")))
    with pytest.raises(MhaError) as refused:
        find_user_attention(one, TargetRequest("a.py:A"))
    message, hint = refused.value.message, refused.value.hint
    assert re.search(r": x \[\d, \d+, 32\] and \d+ more: ValueError: \d is very very ", message)
    assert re.search(r"… \(line \d+: raise ValueError\(f.{30,40}\); and 2 other errors$", message)
    assert len(textwrap.wrap(f"mha: error: {message}", 80)) <= 4
    assert hint == "mha guessed d_model=32, n_heads=4; give others, in the form --arg d_model=32 --arg n_heads=4"
    assert refusal(Varied, SIZED).hint is None


class Divides(Projections):
    def __init__(self, d_model, n_heads, d_head=None):
        super().__init__(d_model, n_heads)

    def forward(self, x):
        return self.run(x, x, x)[0]


class Grouped(nn.Module):
    def __init__(self, embed_dim, num_heads, kv_heads):
        super().__init__()
        self.k_proj, self.times = nn.Linear(embed_dim, embed_dim), (num_heads, kv_heads)

    def forward(self, x):
        k = self.k_proj(x).view(len(x), -1, *self.times)
        return k.expand(len(x), 3, self.times[0], self.times[0])


@pytest.mark.parametrize(
    ("thing", "arguments", "rule", "fits"),
    [
        (Divides, {"d_model": 30, "n_heads": 4}, "Divides: d_model 30 is not a multiple of n_heads 4",
         "--arg d_model=28 or --arg d_model=32 or --arg n_heads=3 or --arg n_heads=5 would fit"),
        (Divides, {"d_model": 7, "n_heads": 8}, "Divides: d_model 7 is not a multiple of n_heads 8",
         "--arg d_model=8 or --arg n_heads=7 would fit"),
        (Grouped, {"embed_dim": 40, "num_heads": 8, "kv_heads": 3},
         "Grouped: num_heads 8 is not a multiple of kv_heads 3",
         "--arg num_heads=6 or --arg num_heads=9 or --arg kv_heads=2 or --arg kv_heads=4 would fit"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide_are_reported_with_nearby_ones_that_do(
    thing: Any, arguments: dict[str, Any], rule: str, fits: str
) -> None:
    error = refusal(thing, arguments)
    assert error.message.startswith(f"{rule}: RuntimeError: shape '")
    assert re.search(r" \(line \d+: .*view\(", error.message)
    assert error.hint == fits


def test_sizes_are_not_blamed_where_they_divide_or_something_else_is_wrong() -> None:
    assert refusal(Raises, {"d_model": 30, "n_heads": 4}).message.startswith("Raises could not be called")
    assert refusal(Divides, {"d_model": 30, "n_heads": 4, "d_head": 5}).message.startswith(
        "Divides could not be called"
    )


@pytest.mark.parametrize(
    ("fault", "message", "code", "hint"),
    [
        (SystemExit(7), "ends the program when it is called: SystemExit: 7", "cannot-examine", None),
        (EOFError("EOF when reading a line"),
         "waits for input from the keyboard: EOFError: EOF when reading a line",
         "cannot-examine", None),
        (AssertionError("Torch not compiled with CUDA enabled"),
         "needs a CUDA device, which this machine does not have: AssertionError: Torch not compiled with CUDA enabled",
         "no-device", None),
        (RuntimeError("Found no NVIDIA driver on your system."),
         "needs a CUDA device, which this machine does not have: RuntimeError: Found no NVIDIA driver on your system.",
         "no-device", None),
        (RuntimeError("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"),
         "puts some tensors on another device than its input, cpu: RuntimeError: Expected all tensors to be on the same device, "
         "but found at least two devices, cuda:0 and cpu!", "cannot-examine", "--device cuda"),
    ],
)  # fmt: skip
def test_an_exit_and_a_missing_device_are_reported(
    fault: BaseException, message: str, code: str, hint: str | None
) -> None:
    class Stops(Projections):
        def forward(self, x):
            raise fault

    error = refusal(Stops, SIZED, code=code)
    where = f" (line {Stops.forward.__code__.co_firstlineno + 1}: raise fault)"
    assert (error.message, error.hint) == (f"Stops {message}{where}", hint)


class TurnsItsResult(Projections):
    """x: [batch, seq, d_model]"""

    def forward(self, x):
        return self.run(x, x, x)[0].transpose(0, 1)


def test_a_result_of_other_axes_is_not_taken_for_the_output() -> None:
    assert (
        "x [3, 7, 32] and 19 more: returned [7, 3, 32], where [3, 7, ·] was to come; and 3 other errors"
        in refusal(TurnsItsResult, SIZED).message
    )


class Looks(nn.Module):
    def __init__(self, n_tokens, d_model):
        super().__init__()
        self.table = nn.Embedding(n_tokens, d_model)

    def forward(self, input_ids):
        return self.table(input_ids)


def test_a_module_that_takes_token_ids_is_not_called_attention() -> None:
    assert (refusal(Looks, {"n_tokens": 50, "d_model": D}).hint or "").endswith(
        "it takes token ids: name the attention inside it, which takes token vectors"
    )


def test_a_function_without_rows_is_refused() -> None:
    error = refusal(lambda: None)
    assert error.message == "<lambda> has no parameter for token vectors, such as x, or query, key and value"


def test_the_search_makes_no_more_than_sixty_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    import mhacli.adapters.usercode.call.trials as trials

    calls: list[int] = []
    before = trials.TrialRunner.call
    monkeypatch.setattr(
        trials.TrialRunner, "call", lambda self, *some, **named: (calls.append(1), before(self, *some, **named))[1]
    )
    for thing, arguments in STYLES[::3]:
        calls.clear()
        found(thing, arguments)
        assert len(calls) <= 60, thing.__name__


def test_a_search_gives_the_same_twice() -> None:
    for thing, arguments in STYLES[:2]:
        one, two = found(thing, arguments), found(thing, arguments)
        assert (one.described, one.mask_forms, one.padding_forms, one.sizes) == (
            two.described,
            two.mask_forms,
            two.padding_forms,
            two.sizes,
        )


# Names and documentation


@pytest.mark.parametrize(
    ("documentation", "parameter", "meaning"),
    [
        (nn.MultiheadAttention.forward.__doc__, "key_padding_mask", "hide"),
        (nn.MultiheadAttention.forward.__doc__, "attn_mask", "hide"),
        (F.scaled_dot_product_attention.__doc__, "attn_mask", "keep"),
        ("mask: True = keep", "mask", "keep"),
        ("mask (Tensor): bool [batch, 1, seq, seq], True means that a key is hidden", "mask", "hide"),
        ("mask: (batch, 1, 1, seq), 1 for tokens that are **not masked**, 0 for tokens that are masked", "mask", "keep"),
        ("attention_mask: 1 for real tokens, 0 for padding", "attention_mask", "keep"),
        ("key_padding_mask: True at padding", "key_padding_mask", "hide"),
        ("goods; key_padding_mask [batch, time] is True where a basket is filled up.", "key_padding_mask", "hide"),
        ("True in the mask marks positions that may not be attended.", "mask", "hide"),
        ("Positions with True are not allowed to attend, says the mask.", "mask", "hide"),
        ("mask: positions to be masked are 1", "mask", "hide"),
        ("mask: 0 = masked, 1 = visible", "mask", "keep"),
        ("mask: False where a query must not see a key", "mask", "keep"),
        ("Args:\n    x: rows\n    mask: a boolean mask;\n        True keeps a key\n    out: True if hidden", "mask", "keep"),
        ("pad_mask: True = padding\nmask: 1 = attend", "mask", "keep"),
        ("pad_mask: True = padding\nmask: the usual", "mask", None),
        ("mask: additive, 0 = keep and -inf = hide", "mask", None),
        ("mask: True = keep. Later: mask: True = hide.", "mask", None),
        ("mask: [batch, 1, seq, seq]", "mask", None),
        ("Masked positions get -1e9. If causal is True, later keys are ignored.", "mask", None),
        ("A fast attention. 1 head is enough.", "mask", None),
        ("", "mask", None),
    ],
)  # fmt: skip
def test_only_a_clear_statement_gives_the_meaning_of_true_in_a_mask(
    documentation: str, parameter: str, meaning: str | None
) -> None:
    assert documented_meaning(documentation, parameter) == meaning


@pytest.mark.parametrize(
    ("documentation", "meaning"),
    [
        ("mask: True unless the key is padding", None),
        ("mask: True at non padding positions", "keep"),
        ("mask: True everywhere except padding", None),
        ("mask: True for all tokens but padding", None),
        ("mask: True for tokens other than padding", None),
        ("mask: 1 for every position apart from the padded ones", None),
        ("mask: True at non-padding positions", "keep"),
        ("mask: True where there is no padding", None),
        ("mask: True for keys that are not padding", "keep"),
        ("mask: True for keys that are neither padding nor in the future", None),
        ("mask: must not be True at padding", None),
        ("mask: never True at padding", None),
        ("mask: False for padding", "keep"),
        ("mask: True up to the padding", None),
        ("mask: 1 for unpadded tokens", None),
        ("mask: False unless the key may be attended", None),
        ("mask: keys are ignored unless True", None),
        ("mask: positions where mask != 1 are ignored", None),
        ("mask: positions where mask == 0 are ignored", "keep"),
        ("mask: positions that are not True are ignored", None),
        ("mask: True for real tokens but False for padding", "keep"),
        ("mask: the padding mask is True for real tokens", "keep"),
        ("mask: True for tokens without padding", None),
        ("mask: nonzero = attend", "keep"),
        ("mask: True for anything but padding", None),
        ("mask: True unless the key is visible", None),
        ("mask: True everywhere except at visible keys", None),
        ("mask: True for all keys but the visible ones", None),
        ("mask: a key is visible unless True", None),
        ("mask: nothing is hidden except where True", None),
        ("mask: True for non-visible keys", "hide"),
        ("mask: False unless the key is padding", None),
        ("mask: False at non padding positions", "hide"),
        ("mask: positions where mask != 0 are ignored", None),
        ("mask: positions where mask > 0 are ignored", None),
        ("mask: True only at padding", "hide"),
        ("mask: True where a key must not be seen", "hide"),
        ("mask: True for padding but False for real tokens", "hide"),
        ("mask: True marks keys that are not real", "hide"),
        ("mask: 1 -> hidden", "hide"),
        ("mask: visible -> 1", "keep"),
        ("mask: 1 x T x T mask of allowed keys", None),
        ("mask: T x 1 mask of hidden keys", None),
        ("mask: 0 keeps a key, -10000 hides it", None),
        ("mask: 0 keeps a key, −1e4 hides it", None),
        ("mask: contains 0 for attended and large negative values for masked positions", None),
        ("mask: is added to the scores. In mask, 0 keeps a key.", None),
        ("mask: masked positions get a weight of 0", None),
        ("mask: all keys but padding are 1", None),
        ("mask: Unlike torch's masks, where True hides a key, this one keeps it.", None),
        ("mask: True marks positions not belonging to any of the padding", None),
        ("mask: no one may attend to padding", None),
        ("mask: unless a key is padding it is True", None),
        ("mask: 1 head may attend", None),
        ("mask: all keys (except padding) are 1", None),
        ("mask: True hides a key except its own", None),
        ("mask: of shape 1, allowed keys", None),
        ("mask: 1 = visible.\n# the mask is filled with -inf where 0", None),
        ("mask: True hides a key; the scores there get -1e9", "hide"),
        ("mask: a boolean mask, added to the scores as -inf where True hides", "hide"),
    ],
)
def test_clauses_with_exceptions_and_negations_have_no_meaning(documentation: str, meaning: str | None) -> None:
    assert documented_meaning(documentation, "mask") == meaning


@pytest.mark.parametrize(
    ("source", "documentation", "axes"),
    [
        ("B, T, C = x.shape", "", ("batch", "row", "width")),
        ("    batch_size, seq_len, _ = x.size()", "", ("batch", "row", "width")),
        ("seq_len, batch_size, d = x.shape", "", ("row", "batch", "width")),
        ("    x = x.transpose(0, 1)\n    T, B, C = x.shape", "", None),
        ("    x = x.view(B, H, T, D)", "", None),
        ("", "x: [T, B, D]", ("row", "batch", "width")),
        ("", "x: tensor of shape (batch_size, n_heads, seq_len, head_dim)", ("batch", "head", "row", "width")),
        ('def f(x: Float[Tensor, "batch seq heads d_head"], y):', "", ("batch", "row", "head", "width")),
        ("n, d = x.shape", "", ("row", "width")),
        ("", "y: [T, B, D]", None),
        ("", "x: [1, 2, 3]", None),
        ("a, b, c = x.shape", "", None),
        ("", "x is (query, key, value)", None),
    ],
)
def test_axes_are_read_from_an_unpacked_shape_or_a_list_beside_the_name(
    source: str, documentation: str, axes: tuple[str, ...] | None
) -> None:
    assert stated_axes(source, documentation, ["x"]) == axes


def roles(function: Callable[..., Any]) -> dict[str, str]:
    return {parameter.name: parameter.role for parameter in signature_of(function).parameters}


def test_parameters_have_the_roles_of_their_names() -> None:
    assert roles(lambda hidden_states, attention_mask, position_ids, past_key_value, output_attentions, use_cache: 0) == {
        "hidden_states": "x", "attention_mask": "mask", "position_ids": "positions", "past_key_value": "cache",
        "output_attentions": "pattern", "use_cache": "cache",
    }  # fmt: skip
    assert roles(lambda values, keys, queries, valid_lens: 0) == {
        "values": "value", "keys": "key", "queries": "query", "valid_lens": "lengths",
    }  # fmt: skip
    assert roles(lambda src, memory, src_key_padding_mask, is_causal=False, mask=True: 0) == {
        "src": "x", "memory": "context", "src_key_padding_mask": "padding", "is_causal": "causal", "mask": "causal",
    }  # fmt: skip
    assert roles(lambda x, wq, W_k, v_weight, out_proj_weight, b_q, num_heads, scale: 0) == {
        "x": "x", "wq": "weight", "W_k": "weight", "v_weight": "weight", "out_proj_weight": "weight", "b_q": "weight bias",
        "num_heads": "heads", "scale": "scale",
    }  # fmt: skip
    assert roles(lambda first, second, third: 0) == {"first": "query", "second": "key", "third": "value"}
    assert roles(F.scaled_dot_product_attention) == {
        "query": "query", "key": "key", "value": "value", "attn_mask": "mask", "dropout_p": "dropout", "is_causal": "causal",
        "scale": "scale", "enable_gqa": "off",
    }  # fmt: skip
