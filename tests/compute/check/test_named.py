"""One mistake in a right module, in several widely copied styles: the module passes, and the mistake is named."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest
from support.examined import examination_of

from mhacli.cli.values import pairs
from mhacli.requests.user_code import CheckRequest, TargetRequest
from mhacli.results.check import Examination


class Style(NamedTuple):
    """A right module: its name, its arguments, and its source."""

    name: str
    arguments: str
    source: str


STYLES = {
    "transformer": Style(
        "MultiHeadAttention",
        "n_head=4 d_model=32 d_k=8 d_v=8",
        """
        import torch
        import torch.nn as nn
        import torch.nn.functional as F


        class ScaledDotProductAttention(nn.Module):
            def __init__(self, temperature, attn_dropout=0.1):
                super().__init__()
                self.temperature = temperature
                self.dropout = nn.Dropout(attn_dropout)

            def forward(self, q, k, v, mask=None):
                attn = torch.matmul(q / self.temperature, k.transpose(2, 3))
                if mask is not None:
                    attn = attn.masked_fill(mask == 0, -1e9)
                attn = self.dropout(F.softmax(attn, dim=-1))
                return torch.matmul(attn, v), attn


        class MultiHeadAttention(nn.Module):
            def __init__(self, n_head, d_model, d_k, d_v, dropout=0.1):
                super().__init__()
                self.n_head, self.d_k, self.d_v = n_head, d_k, d_v
                self.w_qs = nn.Linear(d_model, n_head * d_k, bias=False)
                self.w_ks = nn.Linear(d_model, n_head * d_k, bias=False)
                self.w_vs = nn.Linear(d_model, n_head * d_v, bias=False)
                self.fc = nn.Linear(n_head * d_v, d_model, bias=False)
                self.attention = ScaledDotProductAttention(temperature=d_k ** 0.5)
                self.dropout = nn.Dropout(dropout)
                self.layer_norm = nn.LayerNorm(d_model, eps=1e-6)

            def forward(self, q, k, v, mask=None):
                batch, q_len, k_len, residual = q.size(0), q.size(1), k.size(1), q
                q = self.w_qs(q).view(batch, q_len, self.n_head, self.d_k).transpose(1, 2)
                k = self.w_ks(k).view(batch, k_len, self.n_head, self.d_k).transpose(1, 2)
                v = self.w_vs(v).view(batch, k_len, self.n_head, self.d_v).transpose(1, 2)
                q, attn = self.attention(q, k, v, mask=None if mask is None else mask.unsqueeze(1))
                q = q.transpose(1, 2).contiguous().view(batch, q_len, -1)
                return self.layer_norm(self.dropout(self.fc(q)) + residual), attn
        """,
    ),
    "nano": Style(
        "CausalSelfAttention",
        "n_embd=32 n_head=4 block_size=64",
        """
        import math
        import torch
        import torch.nn as nn
        from torch.nn import functional as F


        class CausalSelfAttention(nn.Module):
            def __init__(self, n_embd, n_head, block_size):
                super().__init__()
                self.c_attn = nn.Linear(n_embd, 3 * n_embd)
                self.c_proj = nn.Linear(n_embd, n_embd)
                self.n_head, self.n_embd = n_head, n_embd
                self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

            def forward(self, x):
                B, T, C = x.size()
                q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
                k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
                q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
                v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
                att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
                att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
                att = F.softmax(att, dim=-1)
                y = att @ v
                return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        """,
    ),
    "vision": Style(
        "Attention",
        "dim=32 num_heads=4",
        """
        from torch import nn


        class Attention(nn.Module):
            def __init__(self, dim, num_heads=8):
                super().__init__()
                self.num_heads = num_heads
                self.scale = (dim // num_heads) ** -0.5
                self.qkv = nn.Linear(dim, dim * 3, bias=False)
                self.proj = nn.Linear(dim, dim)

            def forward(self, x):
                B, N, C = x.shape
                qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
                q, k, v = qkv.unbind(0)
                attn = (q @ k.transpose(-2, -1)) * self.scale
                attn = attn.softmax(dim=-1)
                x = (attn @ v).transpose(1, 2).reshape(B, N, C)
                return self.proj(x)
        """,
    ),
    "annotated": Style(
        "MultiHeadedAttention",
        "h=4 d_model=32",
        """
        import copy
        import math
        import torch
        from torch import nn


        def attention(query, key, value, mask=None, dropout=None):
            scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
            if mask is not None:
                scores = scores.masked_fill(mask == 0, -1e9)
            p_attn = scores.softmax(dim=-1)
            if dropout is not None:
                p_attn = dropout(p_attn)
            return torch.matmul(p_attn, value), p_attn


        class MultiHeadedAttention(nn.Module):
            def __init__(self, h, d_model, dropout=0.1):
                super().__init__()
                self.d_k, self.h = d_model // h, h
                self.linears = nn.ModuleList([copy.deepcopy(nn.Linear(d_model, d_model)) for _ in range(4)])
                self.dropout = nn.Dropout(p=dropout)

            def forward(self, query, key, value, mask=None):
                mask = None if mask is None else mask.unsqueeze(1)
                n = query.size(0)
                query, key, value = [
                    lin(x).view(n, -1, self.h, self.d_k).transpose(1, 2)
                    for lin, x in zip(self.linears, (query, key, value))
                ]
                x, _ = attention(query, key, value, mask, self.dropout)
                return self.linears[-1](x.transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k))
        """,
    ),
    "function": Style(
        "scaled_dot_product_attention",
        "",
        """
        import math
        import torch


        def scaled_dot_product_attention(q, k, v, mask=None):
            scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
            if mask is not None:
                scores = scores.masked_fill(mask == 0, float("-inf"))
            return torch.matmul(torch.softmax(scores, dim=-1), v)
        """,
    ),
    "one key head": Style(
        "MultiQueryAttention",
        "d_model=32 n_heads=4",
        """
        import math
        from torch import nn


        class MultiQueryAttention(nn.Module):
            def __init__(self, d_model, n_heads):
                super().__init__()
                self.n_heads, self.d_head = n_heads, d_model // n_heads
                self.wq = nn.Linear(d_model, d_model)
                self.wk = nn.Linear(d_model, self.d_head)
                self.wv = nn.Linear(d_model, self.d_head)
                self.wo = nn.Linear(d_model, d_model)

            def forward(self, x):
                b, t, d = x.shape
                q = self.wq(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
                k, v = self.wk(x)[:, None], self.wv(x)[:, None]
                att = (q @ k.transpose(-2, -1) / math.sqrt(self.d_head)).softmax(dim=-1)
                return self.wo((att @ v[:, :1]).transpose(1, 2).reshape(b, t, d))
        """,
    ),
    "cross": Style(
        "CrossAttention",
        "query_dim=32 context_dim=24 heads=4 dim_head=8",
        """
        from torch import einsum, nn


        class CrossAttention(nn.Module):
            def __init__(self, query_dim, context_dim, heads=8, dim_head=64):
                super().__init__()
                self.scale, self.heads = dim_head ** -0.5, heads
                self.to_q = nn.Linear(query_dim, dim_head * heads, bias=False)
                self.to_k = nn.Linear(context_dim, dim_head * heads, bias=False)
                self.to_v = nn.Linear(context_dim, dim_head * heads, bias=False)
                self.to_out = nn.Linear(dim_head * heads, query_dim)

            def forward(self, x, context):
                h, (b, n, _), m = self.heads, x.shape, context.shape[1]
                q = self.to_q(x).reshape(b, n, h, -1).permute(0, 2, 1, 3).reshape(b * h, n, -1)
                k = self.to_k(context).reshape(b, m, h, -1).permute(0, 2, 1, 3).reshape(b * h, m, -1)
                v = self.to_v(context).reshape(b, m, h, -1).permute(0, 2, 1, 3).reshape(b * h, m, -1)
                attn = (einsum("b i d, b j d -> b i j", q, k) * self.scale).softmax(dim=-1)
                out = einsum("b i j, b j d -> b i d", attn, v)
                return self.to_out(out.reshape(b, h, n, -1).permute(0, 2, 1, 3).reshape(b, n, -1))
        """,
    ),
    "rotary": Style(
        "Attention",
        "dim=32 n_heads=4",
        """
        import math
        import torch
        from torch import nn


        def rotate_half(x):
            x1, x2 = x.chunk(2, dim=-1)
            return torch.cat((-x2, x1), dim=-1)


        class Attention(nn.Module):
            def __init__(self, dim, n_heads):
                super().__init__()
                self.n_heads, self.head_dim = n_heads, dim // n_heads
                self.q_proj = nn.Linear(dim, dim, bias=False)
                self.k_proj = nn.Linear(dim, dim, bias=False)
                self.v_proj = nn.Linear(dim, dim, bias=False)
                self.o_proj = nn.Linear(dim, dim, bias=False)

            def forward(self, x):
                b, t, d = x.shape
                q, k, v = (
                    proj(x).view(b, t, self.n_heads, self.head_dim).transpose(1, 2)
                    for proj in (self.q_proj, self.k_proj, self.v_proj)
                )
                inverse = 10000.0 ** (-torch.arange(0, self.head_dim, 2, dtype=x.dtype) / self.head_dim)
                angles = torch.arange(t, dtype=x.dtype)[:, None] * inverse[None]
                emb = torch.cat((angles, angles), -1)
                q, k = (u * emb.cos() + rotate_half(u) * emb.sin() for u in (q, k))
                p = (q @ k.transpose(2, 3) / math.sqrt(self.head_dim)).softmax(dim=-1)
                return self.o_proj((p @ v).transpose(1, 2).reshape(b, t, d))
        """,
    ),
}


class Edit(NamedTuple):
    """The original text, the wrong text, and the code of the mistake."""

    style: str
    code: str
    old: str
    new: str


EDITS = (
    Edit("transformer", "scale-d-model", "temperature=d_k ** 0.5", "temperature=d_model ** 0.5"),
    Edit("transformer", "scale-not-root", "temperature=d_k ** 0.5", "temperature=d_k"),
    Edit("transformer", "scale-multiplied", "temperature=d_k ** 0.5", "temperature=d_k ** -0.5"),
    Edit("transformer", "values-from-keys", "self.w_vs(v)", "self.w_ks(v)"),
    Edit("transformer", "queries-from-keys", "self.w_qs(q)", "self.w_ks(q)"),
    Edit("transformer", "scale-heads", "temperature=d_k ** 0.5", "temperature=n_head ** 0.5"),
    Edit("transformer", "merge-batch-moved", "q.transpose(1, 2).contiguous()", "q.transpose(0, 1).contiguous()"),
    Edit("nano", "value-of-one-head", "att @ v", "att @ v[:, :1]"),
    Edit("nano", "value-of-one-head", "att @ v", "att @ v[:, 0].unsqueeze(1)"),
    Edit("nano", "value-of-one-head", "att @ v", "att @ v[:, -1:]"),
    Edit("nano", "key-of-one-head", "q @ k.transpose", "q @ k[:, [0]].transpose"),
    Edit("nano", "query-of-one-head", "q @ k.transpose", "q[:, :1].expand_as(q) @ k.transpose"),
    Edit("nano", "values-from-keys", "att @ v", "att @ k"),
    Edit("nano", "scale-length", "math.sqrt(k.size(-1))", "T ** 0.5"),
    Edit("nano", "scale-length", "math.sqrt(k.size(-1))", "T"),
    Edit("nano", "scale-d-model", "math.sqrt(k.size(-1))", "C"),
    Edit("nano", "merge-batch-moved", "y.transpose(1, 2)", "y.permute(2, 0, 1, 3)"),
    Edit("nano", "mask-sign", 'float("-inf")', 'float("inf")'),
    Edit("nano", "mask-sign", 'float("-inf")', "1e9"),
    Edit("nano", "mask-sentinel-too-small", 'float("-inf")', "1e-9"),
    Edit(
        "nano",
        "split-without-transpose",
        "q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)",
        "q = q.reshape(B, self.n_head, T, C // self.n_head)",
    ),
    Edit("vision", "attention-over-heads", ".permute(2, 0, 3, 1, 4)", ".permute(2, 0, 1, 3, 4)"),
    Edit("vision", "values-from-keys", "qkv.unbind(0)", "qkv[0], qkv[1], qkv[1]"),
    Edit("vision", "scale-length", "* self.scale", "* N**-0.5"),
    Edit("vision", "pattern-transposed", "attn @ v", "attn.transpose(-2, -1) @ v"),
    Edit(
        "vision",
        "split-without-transpose",
        "reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)",
        "reshape(3, B, self.num_heads, N, C // self.num_heads)",
    ),
    Edit("annotated", "scale-length", "math.sqrt(query.size(-1))", "math.sqrt(key.size(-2))"),
    Edit(
        "annotated",
        "values-from-keys",
        "attention(query, key, value, mask, self",
        "attention(query, key, key, mask, self",
    ),
    Edit("transformer", "projection-missing", "self.w_vs(v).view", "v.view"),
    Edit("vision", "one-projection", "qkv.unbind(0)", "qkv[0], qkv[0], qkv[0]"),
    Edit("nano", "softmax-twice", "att = att.masked_fill", "att = att.softmax(-1).masked_fill"),
    Edit(
        "cross",
        "split-batch-moved",
        "self.to_q(x).reshape(b, n, h, -1).permute(0, 2, 1, 3)",
        "self.to_q(x).reshape(b, n, h, -1).permute(2, 0, 1, 3)",
    ),
    Edit("cross", "softmax-axis", "softmax(dim=-1)", "softmax(dim=0)"),
    Edit("cross", "merge-batch-moved", "out.reshape(b, h, n, -1)", "out.reshape(h, b, n, -1).transpose(0, 1)"),
    Edit("rotary", "rope-without-minus", "(-x2, x1)", "(x2, x1)"),
    Edit("rotary", "values-from-keys", "p @ v", "p @ k"),
    Edit("function", "queries-from-keys", "matmul(q, k.t", "matmul(k, k.t"),
    Edit("function", "values-from-keys", "dim=-1), v)", "dim=-1), k)"),
    Edit("function", "scale-length", "math.sqrt(q.size(-1))", "math.sqrt(k.size(-2))"),
    Edit("function", "value-of-one-head", "dim=-1), v)", "dim=-1), v[:, :1])"),
    Edit(
        "transformer",
        "split-without-transpose",
        "self.w_qs(q).view(batch, q_len, self.n_head, self.d_k).transpose(1, 2)",
        "self.w_qs(q).view(batch, self.n_head, q_len, self.d_k)",
    ),
)


def examined_with(folder: Path, style: Style, source: str) -> Examination:
    path = folder / "theirs.py"
    path.write_text(source, encoding="utf-8")
    return examination_of(CheckRequest(TargetRequest(f"{path}:{style.name}", pairs(style.arguments.split(), "arg"))))


@pytest.mark.parametrize("name", STYLES)
def test_a_right_module_of_a_style_is_right(name: str, tmp_path: Path) -> None:
    examination = examined_with(tmp_path, STYLES[name], dedent(STYLES[name].source))
    assert examination.verdict == "right"


@pytest.mark.parametrize("edit", EDITS, ids=[f"{edit.style}-{edit.code}-{n}" for n, edit in enumerate(EDITS)])
def test_one_mistake_in_it_is_named_with_a_proof(edit: Edit, tmp_path: Path) -> None:
    source = dedent(STYLES[edit.style].source)
    assert source.count(edit.old) == 1
    examination = examined_with(tmp_path, STYLES[edit.style], source.replace(edit.old, edit.new))
    assert examination.verdict == "wrong"
    assert [finding.code for finding in examination.findings] == [edit.code]
    assert all(finding.proven for finding in examination.findings)


@pytest.mark.full
def test_dropout_that_always_acts_is_no_state_that_is_kept(tmp_path: Path) -> None:
    style = STYLES["annotated"]
    source = dedent(style.source).replace("dropout(p_attn)", "torch.nn.functional.dropout(p_attn, 0.1)")
    examination = examined_with(tmp_path, style, source)
    assert [finding.code for finding in examination.findings] == ["dropout-in-eval"]
