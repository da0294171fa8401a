"""Every known mistake, made in right attention of several styles, is named with its code, its line
and a proof.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from support import user_code
from support.documents import ROOT

import mhacli

pytestmark = pytest.mark.filterwarnings("ignore")

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
GROUPED = {"n_heads": 6, "n_kv_heads": 2}
KEEP, HIDE, CAUSAL = {"mask_means": "keep"}, {"mask_means": "hide"}, {"causal": True}


class Mistake(NamedTuple):
    """A mistake: the words that are replaced in a right layer, of which the first stand on its
    line.

    `code` may list several, separated by `|`, where they give the same numbers; `states` is what
    the user states about the layer. Only the `common` ones are run by default. `line` is False
    where no line is wrong by itself, or where the line of another operation is named.
    """

    layer: str
    code: str
    pairs: tuple[tuple[str, str], ...]
    states: Mapping[str, object] = MappingProxyType({})
    common: bool = False
    line: bool = True
    sizes: Mapping[str, int] = MappingProxyType({})


USED_AT = {
    "SelfAttention": "weights @ v",
    "StoryAttention": "self.tril[:T, :T]",
    "VisionAttention": "* self.scale",
    "LengthsAttention": "scores = q @ k.mT",
    "TransformerAttention": "q / self.temperature",
    "T5Attention": "scores += self",
    "AlibiAttention": "attn_mask=self.penalty",
    "PartialNeoX": "torch.cat((part, rest)",
    "ComplexLlama": "pairs * phases",
    "RotaryAttention": "q = q * angles.cos()",
    "PastAttention": "torch.cat([past_k, k]",
    "RotaryPast": "angle = place",
    "SeparateCaches": "torch.cat([past_k, k]",
    "MultiHeadedAttention": "torch.matmul(p_attn, value)",
}
"""Where a layer uses what another line computes: a finding may name this line as well."""
NEARBY = 2
"""A mistake and what it leaves out take several lines."""


def in_layer(layer: str, *rows: tuple, **same: object) -> list[Mistake]:
    """Mistakes of one layer. A row is a code, pairs of old and new words, and at last `True` if it
    is common.
    """
    mistakes = []
    for code, *words in rows:
        common = words[-1] is True
        words = [word for word in words if word is not True]
        pairs = tuple(zip(words[::2], words[1::2], strict=True))
        mistakes.append(Mistake(layer, code, pairs, common=common, **same))
    return mistakes


SPLIT = "return x.view(x.size(0), x.size(1), self.n_heads, self.d_head).transpose(1, 2)"
FILLED = "scores = scores.masked_fill(mask == 0, -1e9)"
AFTER_SOFTMAX = (
    (
        f"        if mask is not None:\n            {FILLED}\n        pattern = F.softmax(scores,"
        " dim=-1)\n"
    ),
    (
        "        pattern = F.softmax(scores, dim=-1)\n"
        "        if mask is not None:\n            pattern = pattern.masked_fill(mask == 0, {})\n"
    ),
)
HEADS = ".view(b, t, self.num_heads, self.head_dim).transpose(1, 2)"

PAPER = in_layer(
    "separate:PaperAttention",
    (
        "split-without-transpose",
        SPLIT,
        "return x.view(x.size(0), self.n_heads, x.size(1), self.d_head)",
        True,
    ),
    (
        "merge-without-transpose",
        "return z.transpose(1, 2).contiguous()",
        "return z.contiguous()",
        True,
    ),
    ("softmax-axis", "F.softmax(scores, dim=-1)", "F.softmax(scores, dim=-2)", True),
    ("scale-missing", " / math.sqrt(self.d_head)", "", True),
    ("scale-d-model", "math.sqrt(self.d_head)", "math.sqrt(self.d_model)"),
    ("mask-inverted", "mask == 0", "mask == 1", True),
    ("mask-multiplied", FILLED, "scores = scores * mask"),
    ("mask-added-as-01", FILLED, "scores = scores + mask"),
    ("mask-after-softmax", AFTER_SOFTMAX[0], AFTER_SOFTMAX[1].format("0.0")),
    ("mask-sentinel-too-small", "-1e9", "-100.0", True),
    ("mask-sentinel-too-small", "-1e9", "1e-9"),
    (
        "mask-not-finite",
        FILLED,
        'scores = scores + (1.0 - mask.to(scores.dtype)) * float("-inf")',
        True,
    ),
    ("mask-sign", "-1e9", "1e9"),
    ("mask-ignored", "mask == 0", "torch.ones(q.size(2), k.size(2)).tril() == 0"),
    ("mask-ignored", "scores = scores.masked_fill(", "scores.masked_fill("),
    ("values-of-keys", "self.w_v(value)", "self.w_v(key)", True),
    ("values-of-queries", "self.w_v(value)", "self.w_v(query)"),
    ("keys-of-values", "self.w_k(key)", "self.w_k(value)"),
    ("keys-of-queries", "self.w_k(key)", "self.w_k(query)"),
    ("values-from-keys", "self.w_v(value)", "self.w_k(value)"),
    states=KEEP,
)

SELF = in_layer(
    "separate:SelfAttention",
    ("scale-not-root", "self.head_dim**-0.5", "self.head_dim**-1.0", True),
    ("scale-twice", "energy = q @ k.mT", "energy = (q * self.head_dim**-0.5) @ k.mT"),
    ("scale-multiplied", "self.head_dim**-0.5", "self.head_dim**0.5"),
    (
        "scale-after-softmax",
        "weights = energy.softmax(dim=-1)",
        "weights = energy.softmax(dim=-1) * self.head_dim**-0.5",
        "q @ k.mT * self.head_dim**-0.5",
        "q @ k.mT",
    ),
    ("scale-heads", "self.head_dim**-0.5", "self.num_heads**-0.5"),
    ("scale-length", "self.head_dim**-0.5", "t**-0.5"),
    ("scale-batch", "self.head_dim**-0.5", "b**-0.5"),
    ("scale-one-side", "q @ k.mT * self.head_dim**-0.5", "(q * self.head_dim**-0.25) @ k.mT"),
    ("qk-swapped", "q @ k.mT", "k @ q.mT", True),
    ("projected-twice", "self.value(x)", "self.value(self.key(x))"),
    ("pattern-transposed", "weights @ v", "weights.mT @ v"),
    ("softmax-missing", "weights = energy.softmax(dim=-1)", "weights = energy"),
    ("softmax-twice", "energy.softmax(dim=-1)", "energy.softmax(dim=-1).softmax(dim=-1)"),
    (
        "softmax-overflow",
        "energy.softmax(dim=-1)",
        "energy.exp() / energy.exp().sum(dim=-1, keepdim=True)",
        True,
    ),
    ("values-from-queries", "v = self.value(x)", "v = self.query(x)"),
    ("keys-from-queries", "k = self.key(x)", "k = self.query(x)"),
    ("keys-from-values", "k = self.key(x)", "k = self.value(x)"),
    ("queries-from-keys", "q = self.query(x)", "q = self.key(x)"),
    ("queries-from-values", "q = self.query(x)", "q = self.value(x)"),
    (
        "one-projection",
        "k = self.key(x)",
        "k = self.query(x)",
        "v = self.value(x)",
        "v = self.query(x)",
    ),
    ("projection-missing", "v = self.value(x).view", "v = x.view"),
    (
        "projection-transposed",
        "q = self.query(x)",
        "q = (x @ self.query.weight + self.query.bias)",
        "k = self.key(x)",
        "k = (x @ self.key.weight + self.key.bias)",
        "v = self.value(x)",
        "v = (x @ self.value.weight + self.value.bias)",
    ),
    ("projection-transposed", "k = self.key(x)", "k = (x @ self.key.weight + self.key.bias)"),
    ("out-proj-missing", "return self.dense(out)", "return out", True),
    ("out-proj-transposed", "self.dense(out)", "out @ self.dense.weight + self.dense.bias"),
    ("bias-missing", "self.dense(out)", "F.linear(out, self.dense.weight)"),
    ("merge-axis-order", "context.transpose(1, 2)", "context.transpose(2, 3)"),
    ("merge-batch-moved", "context.transpose(1, 2)", "context.transpose(0, 1)"),
    (
        "split-without-transpose|merge-without-transpose",
        HEADS,
        ".reshape(b, self.num_heads, t, self.head_dim)",
        HEADS,
        ".reshape(b, self.num_heads, t, self.head_dim)",
        HEADS,
        ".reshape(b, self.num_heads, t, self.head_dim)",
        "context.transpose(1, 2).reshape",
        "context.reshape",
    ),
    (
        "heads-averaged",
        "out = context.transpose(1, 2).reshape(b, t, d)",
        "out = context.mean(dim=1)",
        "self.dense = nn.Linear(embed_dim,",
        "self.dense = nn.Linear(self.head_dim,",
    ),
    (
        "heads-summed",
        "out = context.transpose(1, 2).reshape(b, t, d)",
        "out = context.sum(dim=1)",
        "self.dense = nn.Linear(embed_dim,",
        "self.dense = nn.Linear(self.head_dim,",
    ),
    (
        "value-not-split",
        "v = self.value(x)" + HEADS,
        "v = self.value(x).unsqueeze(1)",
        "self.dense = nn.Linear(embed_dim,",
        "self.dense = nn.Linear(num_heads * embed_dim,",
        "reshape(b, t, d)",
        "reshape(b, t, self.num_heads * d)",
    ),
    ("value-of-one-head", "weights @ v", "weights @ v[:, :1]"),
    ("key-of-one-head", "q @ k.mT", "q @ k[:, :1].mT"),
    ("query-of-one-head", "q @ k.mT", "q[:, :1] @ k.mT"),
    ("pattern-of-one-head", "weights @ v", "weights.mean(dim=1, keepdim=True) @ v"),
    (
        "head-repeated",
        "out = context.transpose(1, 2)",
        "out = context[:, :1].expand_as(context).transpose(1, 2)",
    ),
)
SELF += in_layer(
    "separate:SelfAttention",
    (
        "attention-over-heads",
        ".transpose(1, 2)\n",
        "\n",
        ".transpose(1, 2)\n",
        "\n",
        ".transpose(1, 2)\n",
        "\n",
        "context.transpose(1, 2).reshape",
        "context.reshape",
    ),
    (
        "head-width",
        *(
            ".view(b, t, self.num_heads, self.head_dim)",
            ".view(b, t, self.head_dim, self.num_heads)",
        )
        * 3,
        "self.head_dim**-0.5",
        "self.num_heads**-0.5",
    ),
    line=False,
)
SELF += in_layer(
    "separate:SelfAttention",
    ("heads-missing", *(HEADS, ".unsqueeze(1)") * 3, "self.head_dim**-0.5", "d**-0.5"),
    line=False,
)

SELF += in_layer(
    "separate:SelfAttention",
    ("batch-leak", "context = weights @ v", "context = weights @ v.cumsum(0)"),
    ("unused-parameters", "q = self.query(x)", "q = x.cos()"),
    line=False,
)

STORY = in_layer(
    "separate:StoryAttention",
    ("causal-missing", "att = att.masked_fill(", "att.masked_fill(", True),
    (
        "causal-off-by-one",
        "torch.ones(block_size, block_size))",
        "torch.ones(block_size, block_size), diagonal=1)",
        True,
    ),
    ("causal-transposed", "torch.tril(", "torch.triu("),
    (
        "mask-added-as-01",
        'att.masked_fill(self.tril[:T, :T] == 0, float("-inf"))',
        "att + self.tril[:T, :T]",
    ),
    ("mask-sentinel-too-small", 'float("-inf")', "-10.0"),
    (
        "dropout-not-rescaled",
        "att = self.attn_drop(att)",
        "att = att * (torch.rand_like(att) > self.attn_drop.p) if self.training else att",
        True,
    ),
    states=CAUSAL,
)
STATE = (
    "att = self.attn_drop(att)",
    (
        "att = self.attn_drop(att)\n        self.seen = att = att + getattr(self, 'seen', 0 *"
        " att)[: len(att), :, :T, :T].mean()"
    ),
)
STORY += in_layer(
    "targets:TokenMask", ("mask-sentinel-too-small", "(1.0 - hide) * -1e9", "(1.0 - hide) * -10")
)
STORY += in_layer(
    "separate:StoryAttention", ("mask-ignored", "att = att.masked_fill(", "att.masked_fill(")
)
STORY += in_layer(
    "separate:StoryAttention", ("state-kept-between-calls", *STATE, True), states=CAUSAL, line=False
)

MASKED = [
    *in_layer(
        "separate:NewestAttention",
        ("causal-top-left", ".tril(k_len - q_len)", ".tril()"),
        states=CAUSAL,
    ),
    *in_layer(
        "separate:PaddedAttention",
        (
            "padding-ignored|mask-ignored",
            "scores = scores.masked_fill(",
            "scores.masked_fill(",
            True,
        ),
        ("padding-inverted|mask-inverted", "(key_padding_mask[", "(~key_padding_mask["),
        ("padding-of-queries", "[:, None, None, :]", "[:, None, :, None]"),
        ("padding-of-first-sequence", "key_padding_mask[:,", "key_padding_mask[:1,"),
        states=HIDE,
    ),
    *in_layer(
        "separate:ChatAttention",
        ("fully-masked-row", "-1e9", 'float("-inf")', True),
        ("causal-lost", "hide = hide | key_padding_mask", "hide = key_padding_mask"),
        states=HIDE | CAUSAL,
    ),
    *in_layer(
        "separate:GroupedAttention",
        (
            "gqa-tiled",
            "k.repeat_interleave(self.n_rep, dim=1)",
            "k.repeat(1, self.n_rep, 1, 1)",
            "v.repeat_interleave(self.n_rep, dim=1)",
            "v.repeat(1, self.n_rep, 1, 1)",
            True,
        ),
        ("gqa-tiled", "k.repeat_interleave(self.n_rep, dim=1)", "k.repeat(1, self.n_rep, 1, 1)"),
        (
            "kv-head-shared-by-all",
            "k.repeat_interleave(self.n_rep, dim=1)",
            "k[:, :1].expand_as(q)",
            "v.repeat_interleave(self.n_rep, dim=1)",
            "v[:, :1].expand_as(q)",
        ),
        states=CAUSAL,
        sizes=GROUPED,
    ),
]

VISION = in_layer(
    "fused:VisionAttention",
    (
        "split-without-transpose",
        "reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)",
        "reshape(B, 3, self.num_heads, N, C // self.num_heads).transpose(0, 1)",
    ),
    ("merge-without-transpose", "(attn @ v).transpose(1, 2)", "(attn @ v)"),
    ("attention-over-heads", ".permute(2, 0, 3, 1, 4)", ".permute(2, 0, 1, 3, 4)"),
    ("qkv-order", "q, k, v = qkv.unbind(0)", "k, q, v = qkv.unbind(0)"),
    ("values-from-keys", "qkv.unbind(0)", "qkv[0], qkv[1], qkv[1]"),
    ("softmax-axis", "attn.softmax(dim=-1)", "attn.softmax(dim=0)"),
    (
        "value-not-split|heads-averaged|pattern-of-one-head",
        "x = (attn @ v).transpose(1, 2).reshape(B, N, C)",
        "x = (attn @ v.transpose(1, 2).reshape(B, 1, N, C)).mean(dim=1)",
    ),
)

FUSED = [
    *in_layer(
        "fused:ChunkedAttention",
        ("mask-inverted", "masked_fill(mask,", "masked_fill(~mask,"),
        ("mask-transposed", "masked_fill(mask,", "masked_fill(mask.transpose(-2, -1),"),
        ("mask-not-finite", 'dots.masked_fill(mask, float("-inf"))', 'dots + mask * float("-inf")'),
        states=HIDE,
    ),
    *in_layer(
        "fused:KernelAttention",
        ("scale-missing", "attn_mask=mask", "attn_mask=mask, scale=1.0"),
        ("scale-twice", "_attention(q,", "_attention(q * self.scale,"),
        ("mask-inverted", "attn_mask=mask", "attn_mask=None if mask is None else ~mask"),
        (
            "mask-added-as-01",
            "attn_mask=mask",
            "attn_mask=None if mask is None else mask.to(q.dtype)",
        ),
        states=KEEP,
    ),
    *in_layer(
        "fused:CausalAttention",
        ("causal-missing", ", is_causal=True", ""),
        ("dropout-in-eval", "p = self.dropout if self.training else 0.0", "p = self.dropout", True),
        states=CAUSAL,
    ),
    *in_layer(
        "fused:TriangleAttention",
        ("causal-off-by-one", "diagonal=1", "diagonal=2"),
        (
            "causal-off-by-one",
            "ones(n, n, device=x.device), diagonal=1",
            "ones(x.shape[1:2] * 2, dtype=torch.float32,\n  device=x.device), diagonal=2",
        ),
        ("causal-off-by-one|fully-masked-row", "diagonal=1", "diagonal=0"),
        ("dropout-in-eval", ", self.training)", ")"),
        (
            "dropout-not-rescaled",
            "weights = F.dropout(weights, self.drop_rate, self.training)",
            (
                "weights = weights * torch.bernoulli(torch.full_like(weights, 1 - self.drop_rate *"
                " self.training))"
            ),
        ),
        states=CAUSAL,
    ),
    *in_layer(
        "fused:LengthsAttention",
        ("padding-ignored", "scores = scores.masked_fill(", "scores.masked_fill("),
        ("padding-inverted", "masked_fill(~real", "masked_fill(real"),
        ("padding-of-first-sequence", "lengths[:, None]", "lengths[:1, None]"),
    ),
    *in_layer(
        "fused:FlatAttention",
        (
            "mask-head-order",
            "mask.repeat_interleave(self.num_heads, dim=0)",
            "mask.repeat(self.num_heads, 1, 1)",
        ),
        (
            "merge-batch-moved",
            "z.view(b, self.num_heads, n, -1).transpose(1, 2)",
            "z.view(self.num_heads, b, n, -1).permute(1, 2, 0, 3)",
        ),
        states=HIDE,
    ),
    *in_layer(
        "fused:PerHeadAttention",
        ("merge-without-transpose", "values.permute(0, 2, 1, 3)", "values"),
        states=KEEP,
    ),
    *in_layer(
        "fused:ContextAttention",
        (
            "split-batch-moved",
            "q = self.to_q(x).reshape(b, n, h, -1).permute(0, 2, 1, 3)",
            "q = self.to_q(x).reshape(b, n, h, -1).permute(2, 0, 1, 3)",
        ),
        (
            "merge-batch-moved",
            "out.reshape(b, h, n, -1)",
            "out.reshape(h, b, n, -1).transpose(0, 1)",
        ),
    ),
    *in_layer(
        "fused:ContextAttention",
        (
            "values-from-keys|one-projection",
            '("bij,bjd->bid", attn, v)',
            '("bij,bjd->bid", attn, k)',
        ),
        line=False,
    ),
    *in_layer(
        "right:ContextAttention",
        (
            "keys-of-queries|mask-ignored|padding-ignored",
            "rows = x if context is None else context",
            "rows = x",
        ),
    ),
    *in_layer(
        "fused:FusedGroups",
        (
            "gqa-tiled",
            "y[:, :, None].expand(-1, -1, groups, -1, -1)",
            "y[:, None].expand(-1, groups, -1, -1, -1)",
        ),
        sizes=GROUPED,
    ),
]

KNOWN = [
    *in_layer(
        "known:TransformerAttention",
        ("scale-d-model", "temperature=d_k**0.5", "temperature=d_model**0.5"),
        states=KEEP,
    ),
    *in_layer(
        "known:MultiHeadedAttention",
        (
            "values-from-keys|values-of-keys",
            "attention(query, key, value, mask=mask",
            "attention(query, key, key, mask=mask",
        ),
        ("values-of-keys", "(query, key, value), s", "(query, key, key), s"),
        ("qk-swapped", "torch.matmul(query, key.tr", "torch.matmul(key, query.tr"),
        states=KEEP,
        sizes={"h": 4, "d_model": 32},
    ),
    *in_layer(
        "functions:attend",
        ("scale-missing", " / math.sqrt(q.size(-1))", ""),
        ("softmax-axis", "dim=-1", "dim=1"),
        ("values-from-keys|values-of-keys", "dim=-1) @ v", "dim=-1) @ k"),
    ),
    *in_layer(
        "known:attention",
        ("scale-not-root", "math.sqrt(d_k)", "d_k"),
        ("softmax-axis", "softmax(dim=-1)", "softmax(dim=1)"),
        states=KEEP,
    ),
    *in_layer(
        "functions:attend_causally",
        ("causal-top-left", ".triu(k_len - q_len + 1)", ".triu(1)"),
        ("causal-off-by-one", ".triu(k_len - q_len + 1)", ".triu(0)"),
        states=CAUSAL,
    ),
]

BIASED = [
    *in_layer(
        "positions:T5Attention",
        (
            "bias-head-order",
            ".permute(2, 0, 1).unsqueeze(0)",
            ".reshape(1, -1, q_len, k_len)",
            True,
        ),
        states={"scale": 1.0},
    ),
    *in_layer(
        "positions:AlibiAttention",
        (
            "bias-reversed",
            "self.slopes[:, None, None] * far",
            "self.slopes[:, None, None] * -far",
            True,
        ),
        ("causal-off-by-one", "far > 0", "far >= 0"),
        states=CAUSAL,
    ),
    *in_layer(
        "positions:BloomAttention",
        ("bias-head-order", "alibi.reshape(", "alibi.transpose(0, 1).reshape("),
        ("scale-missing", "alpha=self.inv_norm_factor", "alpha=1.0"),
        (
            "bias-reversed",
            "torch.arange(t, dtype=dtype)",
            "torch.arange(t - 1, -1, -1, dtype=dtype)",
        ),
        states=CAUSAL,
        line=False,
    ),
    *in_layer(
        "positions:SwinWindow",
        (
            "bias-head-order",
            "view(N, N, -1)\n        bias = bias.permute(2, 0, 1).contiguous()",
            "view(-1, N, N)",
        ),
    ),
    *in_layer(
        "positions:ShiftedWindow",
        (
            "mask-window-order",
            "attn.view(B // n_windows, n_windows, self.num_heads, N, N) + mask[None, :, None]",
            "attn.view(n_windows, B // n_windows, self.num_heads, N, N) + mask[:, None, None]",
        ),
    ),
    *in_layer(
        "positions:WithSinks",
        ("sink-dropped-wrongly", "probs[..., :-1]", "probs[..., 1:]", True),
        (
            "sink-without-effect",
            "probs[..., :-1] @ v",
            "(probs / probs[..., :-1].sum(-1, keepdim=True))[..., :-1] @ v",
        ),
        states=CAUSAL,
    ),
    *in_layer(
        "positions:CappedAttention",
        ("softcap-not-scaled-back", "self.softcap * torch.tanh", "torch.tanh"),
        (
            "softcap-missing",
            "scores = self.softcap * torch.tanh(scores / self.softcap)",
            "scores = scores",
        ),
        (
            "softcap-after-mask",
            'scores.masked_fill(future, float("-inf"))',
            "scores",
            "self.softcap * torch.tanh(scores / self.softcap)",
            'self.softcap * torch.tanh(scores.masked_fill(future, float("-inf")) / self.softcap)',
        ),
        states=CAUSAL,
    ),
]

ROTATED = [
    *in_layer(
        "positions:Qwen3",
        ("rope-rates", ".to(x) / self.d)", ".to(x) / x.shape[-1])"),
        states=CAUSAL,
    ),
    *in_layer(
        "positions:PartialNeoX",
        ("rope-of-queries-only", "k = self.rotate(k, t)", "k = k"),
        ("rope-of-keys-only", "q = self.rotate(q, t)", "q = q"),
        ("rope-of-values", "k = self.rotate(k, t)", "k, v = self.rotate(k, t), self.rotate(v, t)"),
        states=CAUSAL,
    ),
    *in_layer(
        "positions:ComplexLlama",
        ("rope-sign", "k = rot(k, self.phases[:t])", "k = rot(k, self.phases[:t].conj())"),
        ("rope-offset", "k = rot(k, self.phases[:t])", "k = rot(k, self.phases[1 : t + 1])"),
        ("rope-rates", "1.0 / (theta", "1.0 * (theta"),
        states=CAUSAL,
    ),
    *in_layer(
        "positions:ComplexLlama",
        (
            "gqa-tiled",
            "k = k.repeat_interleave(self.n_heads // self.n_kv_heads, dim=2)",
            "k = k.repeat(1, 1, self.n_heads // self.n_kv_heads, 1)",
        ),
        states=CAUSAL,
    ),
    *in_layer(
        "positions:RotaryAttention",
        ("rope-pairing", "torch.cat((angles, angles), -1)", "angles.repeat_interleave(2, dim=-1)"),
        ("rope-without-minus", "torch.cat((-b, a), dim=-1)", "torch.cat((b, a), dim=-1)"),
        (
            "rope-axis",
            "torch.arange(q.shape[2]).to(x)[:, None] * inverse",
            "torch.arange(q.shape[1]).to(x)[:, None, None] * inverse",
        ),
    ),
    *in_layer(
        "positions:RotaryAttention",
        (
            "rope-of-queries-only",
            "k = k * angles.cos() + rotate_half(k) * angles.sin()",
            "k = k",
            True,
        ),
        line=False,
    ),
    *in_layer(
        "positions:Qwen3",
        ("qk-norm-shared", "self.k_norm(self.k_proj(x)", "self.q_norm(self.k_proj(x)", True),
        (
            "qk-norm-of-one",
            "self.k_norm(self.k_proj(x).view(b, t, self.kv, self.d))",
            "self.k_proj(x).view(b, t, self.kv, self.d)",
        ),
        states=CAUSAL,
        line=False,
    ),
    *in_layer(
        "positions:HandNormed",
        ("rope-of-queries-only", "q, k = self.rotated(q), self.rotated(k)", "q = self.rotated(q)"),
    ),
    *in_layer("right:GatedMap", ("merge-axis-order", "bts,bcs->bct", "bts,bcs->btc")),
    *in_layer(
        "positions:ViT22B",
        ("qk-norm-of-one", "k = F.layer_norm(k, k.shape[-1:], self.k_gain)", "k = k"),
        (
            "scale-not-root|scale-twice",
            "q @ k.transpose(-2, -1)",
            "q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])",
        ),
    ),
    *in_layer(
        "positions:NanoChat",
        ("qk-norm-of-one", "q, k = unit(q), unit(k)", "q = unit(q)"),
        states=CAUSAL,
        line=False,
    ),
    *in_layer(
        "positions:SwinCosine",
        (
            "qk-norm-of-one",
            "F.normalize(q, dim=-1) @ F.normalize(k, dim=-1)",
            "F.normalize(q, dim=-1) @ k",
        ),
        line=False,
    ),
    *in_layer(
        "positions:RotaryAttention",
        (
            "rope-pairing",
            "a, b = x.chunk(2, dim=-1)\n    return torch.cat((-b, a), dim=-1)",
            "a, b = x[..., ::2], x[..., 1::2]\n    return torch.stack((-b, a), dim=-1).flatten(-2)",
            "torch.cat((angles, angles), -1)",
            "angles.repeat_interleave(2, dim=-1)",
        ),
        states={"rope": "half"},
        line=False,
    ),
]

CACHED = [
    *in_layer(
        "cached:LlamaAttention",
        (
            "cache-order",
            "self.cache_v[:bsz, start_pos : start_pos + seqlen] =",
            "self.cache_v[:bsz, :seqlen] =",
        ),
    ),
    *in_layer(
        "cached:OwnRotations",
        (
            "cache-position",
            "self.cos[start_pos : start_pos + t], self.sin[start_pos : start_pos + t]",
            "self.cos[:t], self.sin[:t]",
        ),
        (
            "cache-position",
            "self.rotate(k, cos, sin)",
            "self.rotate(k, self.cos[:t], self.sin[:t])",
        ),
        ("cache-mask", ".triu(start_pos + 1)", ".triu(1)", True),
    ),
    *in_layer(
        "cached:PastAttention",
        ("cache-order", "torch.cat([past_v, v], dim=2)", "torch.cat([v, past_v], dim=2)", True),
        ("cache-order", "return y, (k, v)", "return y, (k[:, :, -T:], v[:, :, -T:])"),
        ("cache-mask", "self.bias[:, :, S - T : S, :S]", "self.bias[:, :, :T, :S]"),
    ),
    *in_layer(
        "cached:RotaryPast",
        (
            "cache-position",
            "self.rope(q, start), self.rope(k, start)",
            "self.rope(q, 0), self.rope(k, 0)",
        ),
        ("cache-mask", "attn_mask=allowed", "is_causal=True"),
    ),
    *in_layer(
        "cached:OneTokenAtATime", ("cache-mask", "is_causal=kv_cache is None", "is_causal=True")
    ),
    *in_layer(
        "cached:HubAttention",
        ("cache-order", "past_key_value.update(k, v,", "past_key_value.update(v, k,"),
    ),
    *in_layer(
        "cached:GrowingCacheAttention",
        (
            "cache-order",
            "torch.cat([self.keys, keys], dim=1)",
            "torch.cat([keys, self.keys], dim=1)",
        ),
    ),
    *in_layer(
        "cached:SeparateCaches",
        ("cache-order", "return self.out_proj(out), k, v", "return self.out_proj(out), v, k"),
    ),
    *in_layer(
        "cached:PositionIds",
        ("cache-mask", "> position_ids[0][:, None]", "> torch.arange(t, device=q.device)[:, None]"),
    ),
    *in_layer("cached:OwnGrowingCache", ("cache-mask", "triu(start + 1)", "triu(1)")),
]
WITHOUT_CODE_TODAY = [
    *in_layer(
        "positions:PartialNeoX",
        ("rope-pairing", "torch.cat((table, table), dim=-1)", "table.repeat_interleave(2, dim=-1)"),
        states=CAUSAL,
    ),
    *in_layer(
        "positions:SwinCosine",
        (
            "scale-twice|scale-not-root",
            "attn = attn * logit_scale",
            "attn = attn * logit_scale * q.shape[-1] ** -0.5",
        ),
    ),
]
LINE_WRONG_TODAY = [
    *in_layer(
        "fused:ContextAttention",
        ("values-from-keys", '("bij,bjd->bid", attn, v)', '("bij,bjd->bid", attn, k)'),
    ),
    *in_layer(
        "positions:BloomAttention",
        ("bias-head-order", "alibi.reshape(", "alibi.transpose(0, 1).reshape("),
        ("scale-missing", "alpha=self.inv_norm_factor", "alpha=1.0"),
        states=CAUSAL,
    ),
    *in_layer(
        "positions:Qwen3",
        ("qk-norm-shared", "self.k_norm(self.k_proj(x)", "self.q_norm(self.k_proj(x)"),
        states=CAUSAL,
    ),
]
STATED = {"heads-not-as-stated", "scale-not-as-stated"}
"""Codes of statements that the code contradicts; see `test_statements.py`."""

MISTAKES = [*PAPER, *SELF, *STORY, *MASKED, *VISION, *FUSED, *KNOWN, *BIASED, *ROTATED, *CACHED]


def parameters(mistakes: list[Mistake]) -> list[object]:
    """Rows with readable names; those that are not common are marked."""
    rows, seen = [], dict[str, int]()
    for mistake in mistakes:
        name = f"{mistake.layer.partition(':')[2]}-{mistake.code.partition('|')[0]}"
        seen[name] = seen.get(name, 0) + 1
        name = name if seen[name] == 1 else f"{name}-{seen[name]}"
        rows.append(
            pytest.param(mistake, id=name, marks=[] if mistake.common else [pytest.mark.real])
        )
    return rows


def arguments_of(layer: type, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes that a constructor takes by these names and has no default for."""
    code = getattr(layer, "__init__", layer).__code__
    required = code.co_varnames[1 : code.co_argcount - len(layer.__init__.__defaults__ or ())]
    return {name: size for name, size in {**SIZES, **sizes}.items() if name in required}


def examine(mistake: Mistake, path: Path, **options: float) -> object:
    thing = getattr(user_code.load(path), mistake.layer.partition(":")[2])
    arguments = arguments_of(thing, mistake.sizes) if isinstance(thing, type) else {}
    return mhacli.check(thing, arguments=arguments, **mistake.states, **options)


def is_at(mistake: Mistake, path: Path, line: int, named: int | None) -> bool:
    """Whether a line is that of the mistake, or the one that uses its result."""
    words = USED_AT.get(mistake.layer.partition(":")[2])
    used = (
        words is not None
        and named is not None
        and words in path.read_text().splitlines()[named - 1]
    )
    return used or (named is not None and abs(named - line) <= NEARBY)


@pytest.mark.parametrize("mistake", parameters(MISTAKES))
def test_a_mistake_is_named_with_its_line_and_a_proof(mistake: Mistake, tmp_path: Path) -> None:
    path, line = user_code.write(tmp_path, mistake.layer, *mistake.pairs)
    examination = examine(mistake, path)
    codes = {finding.code for finding in examination.findings}
    assert examination.verdict == "wrong"
    assert codes
    assert codes <= set(mistake.code.split("|"))
    assert not mistake.line or any(
        is_at(mistake, path, line, finding.line) for finding in examination.findings
    )
    for finding in examination.findings:
        assert finding.file is None or Path(finding.file) == path
        assert (
            not finding.source
            or finding.source.strip() in path.read_text().splitlines()[finding.line - 1]
        )


TRIL = ("torch.tril(", "torch.triu(")
BY_HAND = (
    "att * torch.bernoulli(torch.full_like(att, 1 - self.attn_drop.p)) / (1 - self.attn_drop.p)"
)


@pytest.mark.parametrize(
    ("layer", "code", "pairs", "fix"),
    [
        (
            "separate:StoryAttention",
            "causal-transposed",
            (TRIL, ("self.attn_drop(att)", "torch.dropout(att, 0.5, True)")),
            "att = torch.dropout(att, 0.5, self.training)",
        ),
        (
            "separate:StoryAttention",
            "causal-transposed",
            (TRIL, ("self.attn_drop(att)", "nn.Dropout(0.5)(att)")),
            "att = F.dropout(att, 0.5, training=self.training)",
        ),
        (
            "separate:StoryAttention",
            "causal-transposed",
            (TRIL, ("self.attn_drop(att)", BY_HAND)),
            None,
        ),
        (
            "fused:CausalAttention",
            "causal-missing",
            (("dropout_p=p, is_causal=True", "None, 0.5"),),
            "y = F.scaled_dot_product_attention(q, k, v, None, 0.5 if self.training else 0.0)",
        ),
    ],
)
def test_a_mistake_beside_dropout_that_always_acts_is_named(
    layer: str, code: str, pairs: tuple, fix: str | None, tmp_path: Path
) -> None:
    path, _ = user_code.write(tmp_path, layer, *pairs)
    fixes = {
        finding.code: finding.fix
        for finding in examine(Mistake(layer, code, pairs, CAUSAL), path).findings
    }
    assert {*fixes} == {code, "dropout-in-eval"}
    assert fix in (None, fixes["dropout-in-eval"])


@pytest.mark.parametrize("mistake", parameters(LINE_WRONG_TODAY))
@pytest.mark.xfail(strict=True, reason="the line of another operation is named")
def test_the_line_is_that_of_the_mistake(mistake: Mistake, tmp_path: Path) -> None:
    path, line = user_code.write(tmp_path, mistake.layer, *mistake.pairs)
    (finding,) = examine(mistake, path).findings
    assert is_at(mistake, path, line, finding.line)


@pytest.mark.real
@pytest.mark.parametrize("mistake", parameters(WITHOUT_CODE_TODAY))
@pytest.mark.xfail(strict=True, reason="the verdict is unknown, or another code is named")
def test_a_mistake_that_is_not_named_today_is_named(mistake: Mistake, tmp_path: Path) -> None:
    path, _ = user_code.write(tmp_path, mistake.layer, *mistake.pairs)
    codes = {finding.code for finding in examine(mistake, path, time_limit_s=0.5).findings}
    assert codes
    assert codes <= set(mistake.code.split("|"))


def test_every_code_that_the_program_knows_is_made(mha) -> None:
    terms = mha("explain", "--json").json["terms"]
    known = {term["name"] for term in terms if term["group"] == "mistake"}
    made = {code for mistake in MISTAKES for code in mistake.code.split("|")}
    assert known - made == STATED
    page = (ROOT / "docs" / "CHECK.md").read_text()
    assert [code for code in known if f"`{code}`" not in page] == []
