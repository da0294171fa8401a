"""The mistakes of `tests/contract/check/test_mistakes.py`, made in right layers of the zoo."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from support import user_code
from support.edits import Edit

KEEP, HIDE, CAUSAL = {"mask_means": "keep"}, {"mask_means": "hide"}, {"causal": True}
GROUPED = {"n_heads": 6, "n_kv_heads": 2}
SIZES = {
    "d_model": 24,
    "n_heads": 3,
    "embed_dim": 24,
    "num_heads": 3,
    "n_embd": 24,
    "n_head": 3,
    "dim": 24,
    "heads": 3,
    "emb_size": 24,
    "units": 24,
    "input_dim": 20,
    "query_dim": 24,
    "context_dim": 20,
    "dim_head": 7,
    "d_k": 8,
    "d_v": 8,
}


def arguments_of(layer: type, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes that a constructor takes by these names and has no default for."""
    code = getattr(layer, "__init__", layer).__code__
    required = code.co_varnames[1 : code.co_argcount - len(layer.__init__.__defaults__ or ())]
    return {name: size for name, size in {**SIZES, **sizes}.items() if name in required}


def examine(mistake: Edit, path: Path, **options: float) -> object:
    thing = getattr(user_code.load(path), mistake.name)
    arguments = arguments_of(thing, mistake.sizes) if isinstance(thing, type) else {}
    return user_code.check(thing, arguments=arguments, **mistake.states, **options)


PAPER = (
    Edit(
        layer="separate:PaperAttention",
        old="return x.view(x.size(0), x.size(1), self.n_heads, self.d_head).transpose(1, 2)",
        new="return x.view(x.size(0), self.n_heads, x.size(1), self.d_head)",
        expect="split-without-transpose",
        states=KEEP,
        common=True,
    ),
    Edit(
        layer="separate:PaperAttention",
        old="return z.transpose(1, 2).contiguous()",
        new="return z.contiguous()",
        expect="merge-without-transpose",
        states=KEEP,
        common=True,
    ),
    Edit(
        layer="separate:PaperAttention",
        old="F.softmax(scores, dim=-1)",
        new="F.softmax(scores, dim=-2)",
        expect="softmax-axis",
        states=KEEP,
        common=True,
    ),
    Edit(
        layer="separate:PaperAttention",
        old=" / math.sqrt(self.d_head)",
        new="",
        expect="scale-missing",
        states=KEEP,
        common=True,
    ),
    Edit(
        layer="separate:PaperAttention",
        old="math.sqrt(self.d_head)",
        new="math.sqrt(self.d_model)",
        expect="scale-d-model",
        states=KEEP,
    ),
    Edit(
        layer="separate:PaperAttention",
        old="mask == 0",
        new="mask == 1",
        expect="mask-inverted",
        states=KEEP,
        common=True,
    ),
    Edit(
        layer="separate:PaperAttention",
        old="scores = scores.masked_fill(mask == 0, -1e9)",
        new="scores = scores * mask",
        expect="mask-multiplied",
        states=KEEP,
    ),
    Edit(
        layer="separate:PaperAttention",
        old="scores = scores.masked_fill(mask == 0, -1e9)",
        new="scores = scores + mask",
        expect="mask-added-as-01",
        states=KEEP,
    ),
    Edit(
        layer="separate:PaperAttention",
        old=(
            "        if mask is not None:\n"
            "            scores = scores.masked_fill(mask == 0, -1e9)\n"
            "        pattern = F.softmax(scores, dim=-1)\n"
        ),
        new=(
            "        pattern = F.softmax(scores, dim=-1)\n"
            "        if mask is not None:\n"
            "            pattern = pattern.masked_fill(mask == 0, 0.0)\n"
        ),
        expect="mask-after-softmax",
        states=KEEP,
    ),
    Edit(
        layer="separate:PaperAttention",
        old="-1e9",
        new="-100.0",
        expect="mask-sentinel-too-small",
        states=KEEP,
        common=True,
    ),
    Edit(
        layer="separate:PaperAttention",
        old="-1e9",
        new="1e-9",
        expect="mask-sentinel-too-small",
        states=KEEP,
    ),
    Edit(
        layer="separate:PaperAttention",
        old="scores = scores.masked_fill(mask == 0, -1e9)",
        new='scores = scores + (1.0 - mask.to(scores.dtype)) * float("-inf")',
        expect="mask-not-finite",
        states=KEEP,
        common=True,
    ),
    Edit(
        layer="separate:PaperAttention",
        old="-1e9",
        new="1e9",
        expect="mask-sign",
        states=KEEP,
    ),
    Edit(
        layer="separate:PaperAttention",
        old="mask == 0",
        new="torch.ones(q.size(2), k.size(2)).tril() == 0",
        expect="mask-ignored",
        states=KEEP,
    ),
    Edit(
        layer="separate:PaperAttention",
        old="scores = scores.masked_fill(",
        new="scores.masked_fill(",
        expect="mask-ignored",
        states=KEEP,
    ),
    Edit(
        layer="separate:PaperAttention",
        old="self.w_v(value)",
        new="self.w_v(key)",
        expect="values-of-keys",
        states=KEEP,
        common=True,
    ),
    Edit(
        layer="separate:PaperAttention",
        old="self.w_v(value)",
        new="self.w_v(query)",
        expect="values-of-queries",
        states=KEEP,
    ),
    Edit(
        layer="separate:PaperAttention",
        old="self.w_k(key)",
        new="self.w_k(value)",
        expect="keys-of-values",
        states=KEEP,
    ),
    Edit(
        layer="separate:PaperAttention",
        old="self.w_k(key)",
        new="self.w_k(query)",
        expect="keys-of-queries",
        states=KEEP,
    ),
    Edit(
        layer="separate:PaperAttention",
        old="self.w_v(value)",
        new="self.w_k(value)",
        expect="values-from-keys",
        states=KEEP,
    ),
)
"""Attention as in the paper, which takes query, key and value."""

SELF = (
    Edit(
        layer="separate:SelfAttention",
        old="self.head_dim**-0.5",
        new="self.head_dim**-1.0",
        expect="scale-not-root",
        common=True,
    ),
    Edit(
        layer="separate:SelfAttention",
        old="energy = q @ k.mT",
        new="energy = (q * self.head_dim**-0.5) @ k.mT",
        expect="scale-twice",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="self.head_dim**-0.5",
        new="self.head_dim**0.5",
        expect="scale-multiplied",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="weights = energy.softmax(dim=-1)",
        new="weights = energy.softmax(dim=-1) * self.head_dim**-0.5",
        expect="scale-after-softmax",
        also=(("q @ k.mT * self.head_dim**-0.5", "q @ k.mT"),),
    ),
    Edit(
        layer="separate:SelfAttention",
        old="self.head_dim**-0.5",
        new="self.num_heads**-0.5",
        expect="scale-heads",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="self.head_dim**-0.5",
        new="(1 << (self.head_dim - 1).bit_length()) ** -0.5",
        expect="scale-power-of-two",
        sizes={"embed_dim": 36},
    ),
    Edit(
        layer="separate:SelfAttention",
        old="self.head_dim**-0.5",
        new="t**-0.5",
        expect="scale-length",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="self.head_dim**-0.5",
        new="b**-0.5",
        expect="scale-batch",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="q @ k.mT * self.head_dim**-0.5",
        new="(q * self.head_dim**-0.25) @ k.mT",
        expect="scale-one-side",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="q @ k.mT",
        new="k @ q.mT",
        expect="qk-swapped",
        common=True,
    ),
    Edit(
        layer="separate:SelfAttention",
        old="self.value(x)",
        new="self.value(self.key(x))",
        expect="projected-twice",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="weights @ v",
        new="weights.mT @ v",
        expect="pattern-transposed",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="weights = energy.softmax(dim=-1)",
        new="weights = energy",
        expect="softmax-missing",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="energy.softmax(dim=-1)",
        new="energy.softmax(dim=-1).softmax(dim=-1)",
        expect="softmax-twice",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="energy.softmax(dim=-1)",
        new="energy.exp() / energy.exp().sum(dim=-1, keepdim=True)",
        expect="softmax-overflow",
        common=True,
    ),
    Edit(
        layer="separate:SelfAttention",
        old="v = self.value(x)",
        new="v = self.query(x)",
        expect="values-from-queries",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="k = self.key(x)",
        new="k = self.query(x)",
        expect="keys-from-queries",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="k = self.key(x)",
        new="k = self.value(x)",
        expect="keys-from-values",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="q = self.query(x)",
        new="q = self.key(x)",
        expect="queries-from-keys",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="q = self.query(x)",
        new="q = self.value(x)",
        expect="queries-from-values",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="k = self.key(x)",
        new="k = self.query(x)",
        expect="one-projection",
        also=(("v = self.value(x)", "v = self.query(x)"),),
    ),
    Edit(
        layer="separate:SelfAttention",
        old="v = self.value(x).view",
        new="v = x.view",
        expect="projection-missing",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="q = self.query(x)",
        new="q = (x @ self.query.weight + self.query.bias)",
        expect="projection-transposed",
        also=(
            ("k = self.key(x)", "k = (x @ self.key.weight + self.key.bias)"),
            ("v = self.value(x)", "v = (x @ self.value.weight + self.value.bias)"),
        ),
    ),
    Edit(
        layer="separate:SelfAttention",
        old="k = self.key(x)",
        new="k = (x @ self.key.weight + self.key.bias)",
        expect="projection-transposed",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="return self.dense(out)",
        new="return out",
        expect="out-proj-missing",
        common=True,
    ),
    Edit(
        layer="separate:SelfAttention",
        old="self.dense(out)",
        new="out @ self.dense.weight + self.dense.bias",
        expect="out-proj-transposed",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="self.dense(out)",
        new="F.linear(out, self.dense.weight)",
        expect="bias-missing",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="context.transpose(1, 2)",
        new="context.transpose(2, 3)",
        expect="merge-axis-order",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="context.transpose(1, 2)",
        new="context.transpose(0, 1)",
        expect="merge-batch-moved",
    ),
    Edit(
        layer="separate:SelfAttention",
        old=".view(b, t, self.num_heads, self.head_dim).transpose(1, 2)",
        new=".reshape(b, self.num_heads, t, self.head_dim)",
        expect="split-without-transpose|merge-without-transpose",
        also=(
            (
                ".view(b, t, self.num_heads, self.head_dim).transpose(1, 2)",
                ".reshape(b, self.num_heads, t, self.head_dim)",
            ),
            (
                ".view(b, t, self.num_heads, self.head_dim).transpose(1, 2)",
                ".reshape(b, self.num_heads, t, self.head_dim)",
            ),
            ("context.transpose(1, 2).reshape", "context.reshape"),
        ),
    ),
    Edit(
        layer="separate:SelfAttention",
        old="out = context.transpose(1, 2).reshape(b, t, d)",
        new="out = context.mean(dim=1)",
        expect="heads-averaged",
        also=(("self.dense = nn.Linear(embed_dim,", "self.dense = nn.Linear(self.head_dim,"),),
    ),
    Edit(
        layer="separate:SelfAttention",
        old="out = context.transpose(1, 2).reshape(b, t, d)",
        new="out = context.sum(dim=1)",
        expect="heads-summed",
        also=(("self.dense = nn.Linear(embed_dim,", "self.dense = nn.Linear(self.head_dim,"),),
    ),
    Edit(
        layer="separate:SelfAttention",
        old="v = self.value(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)",
        new="v = self.value(x).unsqueeze(1)",
        expect="value-not-split",
        also=(
            ("self.dense = nn.Linear(embed_dim,", "self.dense = nn.Linear(num_heads * embed_dim,"),
            ("reshape(b, t, d)", "reshape(b, t, self.num_heads * d)"),
        ),
    ),
    Edit(
        layer="separate:SelfAttention",
        old="weights @ v",
        new="weights @ v[:, :1]",
        expect="value-of-one-head",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="q @ k.mT",
        new="q @ k[:, :1].mT",
        expect="key-of-one-head",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="q @ k.mT",
        new="q[:, :1] @ k.mT",
        expect="query-of-one-head",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="weights @ v",
        new="weights.mean(dim=1, keepdim=True) @ v",
        expect="pattern-of-one-head",
    ),
    Edit(
        layer="separate:SelfAttention",
        old="out = context.transpose(1, 2)",
        new="out = context[:, :1].expand_as(context).transpose(1, 2)",
        expect="head-repeated",
    ),
    Edit(
        layer="separate:SelfAttention",
        old=".transpose(1, 2)\n",
        new="\n",
        expect="attention-over-heads",
        also=(
            (".transpose(1, 2)\n", "\n"),
            (".transpose(1, 2)\n", "\n"),
            ("context.transpose(1, 2).reshape", "context.reshape"),
        ),
        is_line_named=False,
    ),
    Edit(
        layer="separate:SelfAttention",
        old=".view(b, t, self.num_heads, self.head_dim)",
        new=".view(b, t, self.head_dim, self.num_heads)",
        expect="head-width",
        also=(
            (
                ".view(b, t, self.num_heads, self.head_dim)",
                ".view(b, t, self.head_dim, self.num_heads)",
            ),
            (
                ".view(b, t, self.num_heads, self.head_dim)",
                ".view(b, t, self.head_dim, self.num_heads)",
            ),
            ("self.head_dim**-0.5", "self.num_heads**-0.5"),
        ),
        is_line_named=False,
    ),
    Edit(
        layer="separate:SelfAttention",
        old=".view(b, t, self.num_heads, self.head_dim).transpose(1, 2)",
        new=".unsqueeze(1)",
        expect="heads-missing",
        also=(
            (".view(b, t, self.num_heads, self.head_dim).transpose(1, 2)", ".unsqueeze(1)"),
            (".view(b, t, self.num_heads, self.head_dim).transpose(1, 2)", ".unsqueeze(1)"),
            ("self.head_dim**-0.5", "d**-0.5"),
        ),
        is_line_named=False,
    ),
    Edit(
        layer="separate:SelfAttention",
        old="context = weights @ v",
        new="context = weights @ v.cumsum(0)",
        expect="batch-leak",
        is_line_named=False,
    ),
    Edit(
        layer="separate:SelfAttention",
        old="q = self.query(x)",
        new="q = x.cos()",
        expect="unused-parameters",
        is_line_named=False,
    ),
)
"""Attention of a text to itself, with separate projections."""

STORY = (
    Edit(
        layer="separate:StoryAttention",
        old="att = att.masked_fill(",
        new="att.masked_fill(",
        expect="causal-missing",
        states=CAUSAL,
        common=True,
    ),
    Edit(
        layer="separate:StoryAttention",
        old="torch.ones(block_size, block_size))",
        new="torch.ones(block_size, block_size), diagonal=1)",
        expect="causal-off-by-one",
        states=CAUSAL,
        common=True,
    ),
    Edit(
        layer="separate:StoryAttention",
        old="torch.tril(",
        new="torch.triu(",
        expect="causal-transposed",
        states=CAUSAL,
    ),
    Edit(
        layer="separate:StoryAttention",
        old='att.masked_fill(self.tril[:T, :T] == 0, float("-inf"))',
        new="att + self.tril[:T, :T]",
        expect="mask-added-as-01",
        states=CAUSAL,
    ),
    Edit(
        layer="separate:StoryAttention",
        old='float("-inf")',
        new="-10.0",
        expect="mask-sentinel-too-small",
        states=CAUSAL,
    ),
    Edit(
        layer="separate:StoryAttention",
        old="att = self.attn_drop(att)",
        new="att = att * (torch.rand_like(att) > self.attn_drop.p) if self.training else att",
        expect="dropout-not-rescaled",
        states=CAUSAL,
        common=True,
    ),
    Edit(
        layer="targets:TokenMask",
        old="(1.0 - hide) * -1e9",
        new="(1.0 - hide) * -10",
        expect="mask-sentinel-too-small",
    ),
    Edit(
        layer="separate:StoryAttention",
        old="att = att.masked_fill(",
        new="att.masked_fill(",
        expect="mask-ignored",
    ),
    Edit(
        layer="separate:StoryAttention",
        old="att = self.attn_drop(att)",
        new=(
            "att = self.attn_drop(att)\n"
            "        self.seen = att = att + getattr(self, 'seen', 0 * att)[: len(att), :, "
            ":T, :T].mean()"
        ),
        expect="state-kept-between-calls",
        states=CAUSAL,
        is_line_named=False,
        common=True,
    ),
)
"""Causal attention with dropout, as in small language models."""

MASKED = (
    Edit(
        layer="separate:NewestAttention",
        old=".tril(k_len - q_len)",
        new=".tril()",
        expect="causal-top-left",
        states=CAUSAL,
    ),
    Edit(
        layer="separate:PaddedAttention",
        old="scores = scores.masked_fill(",
        new="scores.masked_fill(",
        expect="padding-ignored|mask-ignored",
        states=HIDE,
        common=True,
    ),
    Edit(
        layer="separate:PaddedAttention",
        old="(key_padding_mask[",
        new="(~key_padding_mask[",
        expect="padding-inverted|mask-inverted",
        states=HIDE,
    ),
    Edit(
        layer="separate:PaddedAttention",
        old="[:, None, None, :]",
        new="[:, None, :, None]",
        expect="padding-of-queries",
        states=HIDE,
    ),
    Edit(
        layer="separate:PaddedAttention",
        old="key_padding_mask[:,",
        new="key_padding_mask[:1,",
        expect="padding-of-first-sequence",
        states=HIDE,
    ),
    Edit(
        layer="separate:ChatAttention",
        old="-1e9",
        new='float("-inf")',
        expect="fully-masked-row",
        states=HIDE | CAUSAL,
        common=True,
    ),
    Edit(
        layer="separate:ChatAttention",
        old="hide = hide | key_padding_mask",
        new="hide = key_padding_mask",
        expect="causal-lost",
        states=HIDE | CAUSAL,
    ),
    Edit(
        layer="separate:GroupedAttention",
        old="k.repeat_interleave(self.n_rep, dim=1)",
        new="k.repeat(1, self.n_rep, 1, 1)",
        expect="gqa-tiled",
        also=(("v.repeat_interleave(self.n_rep, dim=1)", "v.repeat(1, self.n_rep, 1, 1)"),),
        states=CAUSAL,
        sizes=GROUPED,
        common=True,
    ),
    Edit(
        layer="separate:GroupedAttention",
        old="k.repeat_interleave(self.n_rep, dim=1)",
        new="k.repeat(1, self.n_rep, 1, 1)",
        expect="gqa-tiled",
        states=CAUSAL,
        sizes=GROUPED,
    ),
    Edit(
        layer="separate:GroupedAttention",
        old="k.repeat_interleave(self.n_rep, dim=1)",
        new="k[:, :1].expand_as(q)",
        expect="kv-head-shared-by-all",
        also=(("v.repeat_interleave(self.n_rep, dim=1)", "v[:, :1].expand_as(q)"),),
        states=CAUSAL,
        sizes=GROUPED,
    ),
)
"""Masks of the future and of padding, and shared heads."""

VISION = (
    Edit(
        layer="fused:VisionAttention",
        old="reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)",
        new="reshape(B, 3, self.num_heads, N, C // self.num_heads).transpose(0, 1)",
        expect="split-without-transpose",
    ),
    Edit(
        layer="fused:VisionAttention",
        old="(attn @ v).transpose(1, 2)",
        new="(attn @ v)",
        expect="merge-without-transpose",
    ),
    Edit(
        layer="fused:VisionAttention",
        old=".permute(2, 0, 3, 1, 4)",
        new=".permute(2, 0, 1, 3, 4)",
        expect="attention-over-heads",
    ),
    Edit(
        layer="fused:VisionAttention",
        old="q, k, v = qkv.unbind(0)",
        new="k, q, v = qkv.unbind(0)",
        expect="qkv-order",
    ),
    Edit(
        layer="fused:VisionAttention",
        old="qkv.unbind(0)",
        new="qkv[0], qkv[1], qkv[1]",
        expect="values-from-keys",
    ),
    Edit(
        layer="fused:VisionAttention",
        old="attn.softmax(dim=-1)",
        new="attn.softmax(dim=0)",
        expect="softmax-axis",
    ),
    Edit(
        layer="fused:VisionAttention",
        old="x = (attn @ v).transpose(1, 2).reshape(B, N, C)",
        new="x = (attn @ v.transpose(1, 2).reshape(B, 1, N, C)).mean(dim=1)",
        expect="value-not-split|heads-averaged|pattern-of-one-head",
    ),
)
"""Queries, keys and values of one projection."""

FUSED = (
    Edit(
        layer="fused:ChunkedAttention",
        old="masked_fill(mask,",
        new="masked_fill(~mask,",
        expect="mask-inverted",
        states=HIDE,
    ),
    Edit(
        layer="fused:ChunkedAttention",
        old="masked_fill(mask,",
        new="masked_fill(mask.transpose(-2, -1),",
        expect="mask-transposed",
        states=HIDE,
    ),
    Edit(
        layer="fused:ChunkedAttention",
        old='dots.masked_fill(mask, float("-inf"))',
        new='dots + mask * float("-inf")',
        expect="mask-not-finite",
        states=HIDE,
    ),
    Edit(
        layer="fused:KernelAttention",
        old="attn_mask=mask",
        new="attn_mask=mask, scale=1.0",
        expect="scale-missing",
        states=KEEP,
    ),
    Edit(
        layer="fused:KernelAttention",
        old="_attention(q,",
        new="_attention(q * self.scale,",
        expect="scale-twice",
        states=KEEP,
    ),
    Edit(
        layer="fused:KernelAttention",
        old="attn_mask=mask",
        new="attn_mask=None if mask is None else ~mask",
        expect="mask-inverted",
        states=KEEP,
    ),
    Edit(
        layer="fused:KernelAttention",
        old="attn_mask=mask",
        new="attn_mask=None if mask is None else mask.to(q.dtype)",
        expect="mask-added-as-01",
        states=KEEP,
    ),
    Edit(
        layer="fused:CausalAttention",
        old=", is_causal=True",
        new="",
        expect="causal-missing",
        states=CAUSAL,
    ),
    Edit(
        layer="fused:CausalAttention",
        old="p = self.dropout if self.training else 0.0",
        new="p = self.dropout",
        expect="dropout-in-eval",
        states=CAUSAL,
        common=True,
    ),
    Edit(
        layer="fused:TriangleAttention",
        old="diagonal=1",
        new="diagonal=2",
        expect="causal-off-by-one",
        states=CAUSAL,
    ),
    Edit(
        layer="fused:TriangleAttention",
        old="ones(n, n, device=x.device), diagonal=1",
        new=("ones(x.shape[1:2] * 2, dtype=torch.float32,\n  device=x.device), diagonal=2"),
        expect="causal-off-by-one",
        states=CAUSAL,
    ),
    Edit(
        layer="fused:TriangleAttention",
        old="diagonal=1",
        new="diagonal=0",
        expect="causal-off-by-one|fully-masked-row",
        states=CAUSAL,
    ),
    Edit(
        layer="fused:TriangleAttention",
        old=", self.training)",
        new=")",
        expect="dropout-in-eval",
        states=CAUSAL,
    ),
    Edit(
        layer="fused:TriangleAttention",
        old="weights = F.dropout(weights, self.drop_rate, self.training)",
        new=(
            "weights = weights * torch.bernoulli(torch.full_like(weights, 1 - "
            "self.drop_rate * self.training))"
        ),
        expect="dropout-not-rescaled",
        states=CAUSAL,
    ),
    Edit(
        layer="fused:LengthsAttention",
        old="scores = scores.masked_fill(",
        new="scores.masked_fill(",
        expect="padding-ignored",
    ),
    Edit(
        layer="fused:LengthsAttention",
        old="masked_fill(~real",
        new="masked_fill(real",
        expect="padding-inverted",
    ),
    Edit(
        layer="fused:LengthsAttention",
        old="lengths[:, None]",
        new="lengths[:1, None]",
        expect="padding-of-first-sequence",
    ),
    Edit(
        layer="fused:FlatAttention",
        old="mask.repeat_interleave(self.num_heads, dim=0)",
        new="mask.repeat(self.num_heads, 1, 1)",
        expect="mask-head-order",
        states=HIDE,
    ),
    Edit(
        layer="fused:FlatAttention",
        old="z.view(b, self.num_heads, n, -1).transpose(1, 2)",
        new="z.view(self.num_heads, b, n, -1).permute(1, 2, 0, 3)",
        expect="merge-batch-moved",
        states=HIDE,
    ),
    Edit(
        layer="fused:PerHeadAttention",
        old="values.permute(0, 2, 1, 3)",
        new="values",
        expect="merge-without-transpose",
        states=KEEP,
    ),
    Edit(
        layer="fused:ContextAttention",
        old="q = self.to_q(x).reshape(b, n, h, -1).permute(0, 2, 1, 3)",
        new="q = self.to_q(x).reshape(b, n, h, -1).permute(2, 0, 1, 3)",
        expect="split-batch-moved",
    ),
    Edit(
        layer="fused:ContextAttention",
        old="out.reshape(b, h, n, -1)",
        new="out.reshape(h, b, n, -1).transpose(0, 1)",
        expect="merge-batch-moved",
    ),
    Edit(
        layer="fused:ContextAttention",
        old='("bij,bjd->bid", attn, v)',
        new='("bij,bjd->bid", attn, k)',
        expect="values-from-keys|one-projection",
        is_line_named=False,
    ),
    Edit(
        layer="right:ContextAttention",
        old="rows = x if context is None else context",
        new="rows = x",
        expect="keys-of-queries|mask-ignored|padding-ignored",
    ),
    Edit(
        layer="fused:FusedGroups",
        old="y[:, :, None].expand(-1, -1, groups, -1, -1)",
        new="y[:, None].expand(-1, groups, -1, -1, -1)",
        expect="gqa-tiled",
        sizes=GROUPED,
    ),
)
"""Kernels, fused projections, and heads on the axis of the batch."""

KNOWN = (
    Edit(
        layer="known:TransformerAttention",
        old="temperature=d_k**0.5",
        new="temperature=d_model**0.5",
        expect="scale-d-model",
        states=KEEP,
    ),
    Edit(
        layer="known:MultiHeadedAttention",
        old="attention(query, key, value, mask=mask",
        new="attention(query, key, key, mask=mask",
        expect="values-from-keys|values-of-keys",
        states=KEEP,
        sizes={"h": 4, "d_model": 32},
    ),
    Edit(
        layer="known:MultiHeadedAttention",
        old="(query, key, value), s",
        new="(query, key, key), s",
        expect="values-of-keys",
        states=KEEP,
        sizes={"h": 4, "d_model": 32},
    ),
    Edit(
        layer="known:MultiHeadedAttention",
        old="torch.matmul(query, key.tr",
        new="torch.matmul(key, query.tr",
        expect="qk-swapped",
        states=KEEP,
        sizes={"h": 4, "d_model": 32},
    ),
    Edit(
        layer="functions:attend",
        old=" / math.sqrt(q.size(-1))",
        new="",
        expect="scale-missing",
    ),
    Edit(
        layer="functions:attend",
        old="dim=-1",
        new="dim=1",
        expect="softmax-axis",
    ),
    Edit(
        layer="functions:attend",
        old="dim=-1) @ v",
        new="dim=-1) @ k",
        expect="values-from-keys|values-of-keys",
    ),
    Edit(
        layer="known:attention",
        old="math.sqrt(d_k)",
        new="d_k",
        expect="scale-not-root",
        states=KEEP,
    ),
    Edit(
        layer="known:attention",
        old="softmax(dim=-1)",
        new="softmax(dim=1)",
        expect="softmax-axis",
        states=KEEP,
    ),
    Edit(
        layer="functions:attend_causally",
        old=".triu(k_len - q_len + 1)",
        new=".triu(0)",
        expect="causal-off-by-one",
        states=CAUSAL,
    ),
)
"""Code that many have copied, and functions."""

BIASED = (
    Edit(
        layer="positions:T5Attention",
        old=".permute(2, 0, 1).unsqueeze(0)",
        new=".reshape(1, -1, q_len, k_len)",
        expect="bias-head-order",
        states={"scale": 1.0},
        common=True,
    ),
    Edit(
        layer="positions:AlibiAttention",
        old="self.slopes[:, None, None] * far",
        new="self.slopes[:, None, None] * -far",
        expect="bias-reversed",
        states=CAUSAL,
        common=True,
    ),
    Edit(
        layer="positions:AlibiAttention",
        old="far > 0",
        new="far >= 0",
        expect="causal-off-by-one",
        states=CAUSAL,
    ),
    Edit(
        layer="positions:BloomAttention",
        old="alibi.reshape(",
        new="alibi.transpose(0, 1).reshape(",
        expect="bias-head-order",
        states=CAUSAL,
        is_line_named=False,
    ),
    Edit(
        layer="positions:BloomAttention",
        old="alpha=self.inv_norm_factor",
        new="alpha=1.0",
        expect="scale-missing",
        states=CAUSAL,
        is_line_named=False,
    ),
    Edit(
        layer="positions:BloomAttention",
        old="torch.arange(t, dtype=dtype)",
        new="torch.arange(t - 1, -1, -1, dtype=dtype)",
        expect="bias-reversed",
        states=CAUSAL,
        is_line_named=False,
    ),
    Edit(
        layer="positions:SwinWindow",
        old=("view(N, N, -1)\n        bias = bias.permute(2, 0, 1).contiguous()"),
        new="view(-1, N, N)",
        expect="bias-head-order",
    ),
    Edit(
        layer="positions:ShiftedWindow",
        old="attn.view(B // n_windows, n_windows, self.num_heads, N, N) + mask[None, :, None]",
        new="attn.view(n_windows, B // n_windows, self.num_heads, N, N) + mask[:, None, None]",
        expect="mask-window-order",
    ),
    Edit(
        layer="positions:WithSinks",
        old="probs[..., :-1]",
        new="probs[..., 1:]",
        expect="sink-dropped-wrongly",
        states=CAUSAL,
        common=True,
    ),
    Edit(
        layer="positions:WithSinks",
        old="probs[..., :-1] @ v",
        new="(probs / probs[..., :-1].sum(-1, keepdim=True))[..., :-1] @ v",
        expect="sink-without-effect",
        states=CAUSAL,
    ),
    Edit(
        layer="positions:CappedAttention",
        old="self.softcap * torch.tanh",
        new="torch.tanh",
        expect="softcap-not-scaled-back",
        states=CAUSAL,
    ),
    Edit(
        layer="positions:CappedAttention",
        old="scores = self.softcap * torch.tanh(scores / self.softcap)",
        new="scores = scores",
        expect="softcap-missing",
        states=CAUSAL,
    ),
    Edit(
        layer="positions:CappedAttention",
        old='scores.masked_fill(future, float("-inf"))',
        new="scores",
        expect="softcap-after-mask",
        also=(
            (
                "self.softcap * torch.tanh(scores / self.softcap)",
                "self.softcap"
                ' * torch.tanh(scores.masked_fill(future, float("-inf")) / self.softcap)',
            ),
        ),
        states=CAUSAL,
    ),
)
"""Biases of the scores, sinks and caps."""

ROTATED = (
    Edit(
        layer="positions:Qwen3",
        old=".to(x) / self.d)",
        new=".to(x) / x.shape[-1])",
        expect="rope-rates",
        states=CAUSAL,
    ),
    Edit(
        layer="positions:PartialNeoX",
        old="k = self.rotate(k, t)",
        new="k = k",
        expect="rope-of-queries-only",
        states=CAUSAL,
    ),
    Edit(
        layer="positions:PartialNeoX",
        old="q = self.rotate(q, t)",
        new="q = q",
        expect="rope-of-keys-only",
        states=CAUSAL,
    ),
    Edit(
        layer="positions:PartialNeoX",
        old="k = self.rotate(k, t)",
        new="k, v = self.rotate(k, t), self.rotate(v, t)",
        expect="rope-of-values",
        states=CAUSAL,
    ),
    Edit(
        layer="positions:ComplexLlama",
        old="k = rot(k, self.phases[:t])",
        new="k = rot(k, self.phases[:t].conj())",
        expect="rope-sign",
        states=CAUSAL,
    ),
    Edit(
        layer="positions:ComplexLlama",
        old="k = rot(k, self.phases[:t])",
        new="k = rot(k, self.phases[1 : t + 1])",
        expect="rope-offset",
        states=CAUSAL,
    ),
    Edit(
        layer="positions:ComplexLlama",
        old="1.0 / (theta",
        new="1.0 * (theta",
        expect="rope-rates",
        states=CAUSAL,
    ),
    Edit(
        layer="positions:ComplexLlama",
        old="k = k.repeat_interleave(self.n_heads // self.n_kv_heads, dim=2)",
        new="k = k.repeat(1, 1, self.n_heads // self.n_kv_heads, 1)",
        expect="gqa-tiled",
        states=CAUSAL,
    ),
    Edit(
        layer="positions:RotaryAttention",
        old="torch.cat((angles, angles), -1)",
        new="angles.repeat_interleave(2, dim=-1)",
        expect="rope-pairing",
    ),
    Edit(
        layer="positions:RotaryAttention",
        old="torch.cat((-b, a), dim=-1)",
        new="torch.cat((b, a), dim=-1)",
        expect="rope-without-minus",
    ),
    Edit(
        layer="positions:RotaryAttention",
        old="torch.arange(q.shape[2]).to(x)[:, None] * inverse",
        new="torch.arange(q.shape[1]).to(x)[:, None, None] * inverse",
        expect="rope-axis",
    ),
    Edit(
        layer="positions:RotaryAttention",
        old="k = k * angles.cos() + rotate_half(k) * angles.sin()",
        new="k = k",
        expect="rope-of-queries-only",
        is_line_named=False,
        common=True,
    ),
    Edit(
        layer="positions:Qwen3",
        old="self.k_norm(self.k_proj(x)",
        new="self.q_norm(self.k_proj(x)",
        expect="qk-norm-shared",
        states=CAUSAL,
        is_line_named=False,
        common=True,
    ),
    Edit(
        layer="positions:Qwen3",
        old="self.k_norm(self.k_proj(x).view(b, t, self.kv, self.d))",
        new="self.k_proj(x).view(b, t, self.kv, self.d)",
        expect="qk-norm-of-one",
        states=CAUSAL,
        is_line_named=False,
    ),
    Edit(
        layer="positions:HandNormed",
        old="q, k = self.rotated(q), self.rotated(k)",
        new="q = self.rotated(q)",
        expect="rope-of-queries-only",
    ),
    Edit(
        layer="right:GatedMap",
        old="bts,bcs->bct",
        new="bts,bcs->btc",
        expect="merge-axis-order",
    ),
    Edit(
        layer="positions:ViT22B",
        old="k = F.layer_norm(k, k.shape[-1:], self.k_gain)",
        new="k = k",
        expect="qk-norm-of-one",
    ),
    Edit(
        layer="positions:ViT22B",
        old="q @ k.transpose(-2, -1)",
        new="q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])",
        expect="scale-not-root|scale-twice",
    ),
    Edit(
        layer="positions:NanoChat",
        old="q, k = unit(q), unit(k)",
        new="q = unit(q)",
        expect="qk-norm-of-one",
        states=CAUSAL,
        is_line_named=False,
    ),
    Edit(
        layer="positions:SwinCosine",
        old="F.normalize(q, dim=-1) @ F.normalize(k, dim=-1)",
        new="F.normalize(q, dim=-1) @ k",
        expect="qk-norm-of-one",
        is_line_named=False,
    ),
    Edit(
        layer="positions:RotaryAttention",
        old=("a, b = x.chunk(2, dim=-1)\n    return torch.cat((-b, a), dim=-1)"),
        new=(
            "a, b = x[..., ::2], x[..., 1::2]\n    return torch.stack((-b, a), dim=-1).flatten(-2)"
        ),
        expect="rope-pairing",
        also=(("torch.cat((angles, angles), -1)", "angles.repeat_interleave(2, dim=-1)"),),
        states={"rope": "half"},
        is_line_named=False,
    ),
)
"""Rotary positions and norms of queries and keys."""

CACHED = (
    Edit(
        layer="cached:LlamaAttention",
        old="self.cache_v[:bsz, start_pos : start_pos + seqlen] =",
        new="self.cache_v[:bsz, :seqlen] =",
        expect="cache-order",
    ),
    Edit(
        layer="cached:OwnRotations",
        old="self.cos[start_pos : start_pos + t], self.sin[start_pos : start_pos + t]",
        new="self.cos[:t], self.sin[:t]",
        expect="cache-position",
    ),
    Edit(
        layer="cached:OwnRotations",
        old="self.rotate(k, cos, sin)",
        new="self.rotate(k, self.cos[:t], self.sin[:t])",
        expect="cache-position",
    ),
    Edit(
        layer="cached:OwnRotations",
        old=".triu(start_pos + 1)",
        new=".triu(1)",
        expect="cache-mask",
        common=True,
    ),
    Edit(
        layer="cached:PastAttention",
        old="torch.cat([past_v, v], dim=2)",
        new="torch.cat([v, past_v], dim=2)",
        expect="cache-order",
        common=True,
    ),
    Edit(
        layer="cached:PastAttention",
        old="return y, (k, v)",
        new="return y, (k[:, :, -T:], v[:, :, -T:])",
        expect="cache-order",
    ),
    Edit(
        layer="cached:PastAttention",
        old="self.bias[:, :, S - T : S, :S]",
        new="self.bias[:, :, :T, :S]",
        expect="cache-mask",
    ),
    Edit(
        layer="cached:RotaryPast",
        old="self.rope(q, start), self.rope(k, start)",
        new="self.rope(q, 0), self.rope(k, 0)",
        expect="cache-position",
    ),
    Edit(
        layer="cached:RotaryPast",
        old="attn_mask=allowed",
        new="is_causal=True",
        expect="cache-mask",
    ),
    Edit(
        layer="cached:OneTokenAtATime",
        old="is_causal=kv_cache is None",
        new="is_causal=True",
        expect="cache-mask",
    ),
    Edit(
        layer="cached:HubAttention",
        old="past_key_value.update(k, v,",
        new="past_key_value.update(v, k,",
        expect="cache-order",
    ),
    Edit(
        layer="cached:GrowingCacheAttention",
        old="torch.cat([self.keys, keys], dim=1)",
        new="torch.cat([keys, self.keys], dim=1)",
        expect="cache-order",
    ),
    Edit(
        layer="cached:SeparateCaches",
        old="return self.out_proj(out), k, v",
        new="return self.out_proj(out), v, k",
        expect="cache-order",
    ),
    Edit(
        layer="cached:PositionIds",
        old="> position_ids[0][:, None]",
        new="> torch.arange(t, device=q.device)[:, None]",
        expect="cache-mask",
    ),
    Edit(
        layer="cached:OwnGrowingCache",
        old="triu(start + 1)",
        new="triu(1)",
        expect="cache-mask",
    ),
)
"""Caches of keys and values."""


ALL = (*PAPER, *SELF, *STORY, *MASKED, *VISION, *FUSED, *KNOWN, *BIASED, *ROTATED, *CACHED)

LINE_WRONG_TODAY = (
    Edit(
        layer="fused:ContextAttention",
        old='("bij,bjd->bid", attn, v)',
        new='("bij,bjd->bid", attn, k)',
        expect="values-from-keys",
    ),
    Edit(
        layer="positions:BloomAttention",
        old="alibi.reshape(",
        new="alibi.transpose(0, 1).reshape(",
        expect="bias-head-order",
        states=CAUSAL,
    ),
    Edit(
        layer="positions:BloomAttention",
        old="alpha=self.inv_norm_factor",
        new="alpha=1.0",
        expect="scale-missing",
        states=CAUSAL,
    ),
    Edit(
        layer="positions:Qwen3",
        old="self.k_norm(self.k_proj(x)",
        new="self.q_norm(self.k_proj(x)",
        expect="qk-norm-shared",
        states=CAUSAL,
    ),
)
"""Mistakes of which the line of another operation is named."""

WITHOUT_CODE_TODAY = (
    Edit(
        layer="positions:PartialNeoX",
        old="torch.cat((table, table), dim=-1)",
        new="table.repeat_interleave(2, dim=-1)",
        expect="rope-pairing",
        states=CAUSAL,
    ),
    Edit(
        layer="positions:SwinCosine",
        old="attn = attn * logit_scale",
        new="attn = attn * logit_scale * q.shape[-1] ** -0.5",
        expect="scale-twice|scale-not-root",
    ),
)
"""Mistakes of which the verdict is unknown, or of which another code is named."""
