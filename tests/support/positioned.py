"""Realistic mistakes in the layers of `attentions/positioned.py`: what is written instead, and how it is to be named.

Codes of None: not named, but never called right.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parent / "attentions" / "positioned.py"
RIGHT = (
    "T5", "LearnedDistance", "ALiBi", "Bloom", "SwinWindow", "ShiftedWindow", "SwinCosine", "WithSinks", "PartialNeoX",
    "ComplexLlama", "NanoChat", "Qwen3", "ViT22B", "HandNormed",
)  # fmt: skip


class Slip(NamedTuple):
    """A mistake in a layer."""

    layer: str
    right: str
    wrong: str
    code: str | None

    def text(self) -> str:
        """The file with the mistake in its layer."""
        text = FILE.read_text(encoding="utf-8")
        begin = text.index(f"class {self.layer}(")
        end = text.find("\nclass ", begin)
        body = text[begin:end]
        assert self.right in body
        return text[:begin] + body.replace(self.right, self.wrong, 1) + text[end:]


BIASED = (
    Slip("T5", "z.transpose(1, 2).contiguous().view(b, t, d)", "z.contiguous().view(b, t, d)", "merge-without-transpose"),
    Slip("T5", "F.softmax(scores.float(), dim=-1)", "F.softmax(scores.float(), dim=-2)", "softmax-axis"),
    Slip("T5", ".permute(2, 0, 1).unsqueeze(0)", ".reshape(1, -1, q_len, k_len)", "bias-head-order"),
    Slip("LearnedDistance", "triu(1)", "triu(2)", "causal-off-by-one"),
    Slip("LearnedDistance", " / math.sqrt(q.size(-1))", "", "scale-missing"),
    Slip("LearnedDistance", " / math.sqrt(q.size(-1))", " / q.size(-1)", "scale-not-root"),
    Slip("ALiBi", "far = torch.arange(t)[None, :] - torch.arange(t)[:, None]\n        bias = self.slopes[:, None, None] * far",
         "far = torch.arange(t)[None, :] - torch.arange(t)[:, None]\n        bias = self.slopes[:, None, None] * -far",
         "bias-reversed"),
    Slip("ALiBi", "z.transpose(1, 2).reshape(b, t, d)", "z.reshape(b, t, d)", "merge-without-transpose"),
    Slip("ALiBi", "far > 0", "far >= 0", "causal-off-by-one"),
    Slip("Bloom", "alibi.reshape(batch * self.n_head, 1, t)",
         "alibi.transpose(0, 1).reshape(batch * self.n_head, 1, t)", "bias-head-order"),
    Slip("Bloom", "alpha=self.inv_norm_factor", "alpha=1.0", "scale-missing"),
    Slip("Bloom", "torch.arange(t, dtype=dtype)", "torch.arange(t - 1, -1, -1, dtype=dtype)", "bias-reversed"),
    Slip("SwinWindow", "view(N, N, -1)\n        bias = bias.permute(2, 0, 1).contiguous()", "view(-1, N, N)",
         "bias-head-order"),
    Slip("SwinWindow", "q = q * self.scale", "q = q", "scale-missing"),
    Slip("SwinWindow", "attn = attn.softmax(dim=-1)", "attn = attn.softmax(dim=1)", "softmax-axis"),
    Slip("ShiftedWindow", "view(B // n_windows, n_windows, self.num_heads, N, N) + mask[None, :, None]",
         "view(n_windows, B // n_windows, self.num_heads, N, N) + mask[:, None, None]", "mask-window-order"),
    Slip("ALiBi", 'float("-inf")', "-20.0", "mask-sentinel-too-small"),
    Slip("WithSinks", "probs[..., :-1]", "probs[..., 1:]", "sink-dropped-wrongly"),
    Slip("WithSinks", "z = probs[..., :-1] @ v",
         "probs = probs[..., :-1]\n        z = probs / probs.sum(-1, keepdim=True) @ v", "sink-without-effect"),
    Slip("WithSinks", " * self.d**-0.5", "", "scale-missing"),
    Slip("WithSinks", "z.transpose(1, 2).reshape(b, t, -1)", "z.reshape(b, t, -1)", "merge-without-transpose"),
)  # fmt: skip

TURNED = (
    Slip("PartialNeoX", "k = self.move(k, t)", "k = k", "rope-of-queries-only"),
    Slip("PartialNeoX", "q = self.move(q, t)", "q = q", "rope-of-keys-only"),
    Slip("PartialNeoX", "k = self.move(k, t)", "k, v = self.move(k, t), self.move(v, t)", "rope-of-values"),
    Slip("PartialNeoX", "z.transpose(1, 2).reshape(b, t, w)", "z.reshape(b, t, w)", "merge-without-transpose"),
    Slip("PartialNeoX", "table = torch.cat((table, table), dim=-1)", "table = table.repeat_interleave(2, dim=-1)", None),
    Slip("PartialNeoX", "mask = torch.ones(t, t, dtype=torch.bool).tril()",
         "mask = torch.ones(t, t, dtype=torch.bool).tril(1)", "causal-off-by-one"),
    Slip("ComplexLlama", "k = rot(k, self.phases[:t])", "k = rot(k, self.phases[:t].conj())", "rope-sign"),
    Slip("ComplexLlama", "k = rot(k, self.phases[:t])", "k = rot(k, self.phases[1 : t + 1])", "rope-offset"),
    Slip("ComplexLlama", "1.0 / (theta", "1.0 * (theta", "rope-rates"),
    Slip("ComplexLlama", "k = k.repeat_interleave(self.n_heads // self.n_kv_heads, dim=2)",
         "k = k.repeat(1, 1, self.n_heads // self.n_kv_heads, 1)", None),
)  # fmt: skip

NORMED = (
    Slip("Qwen3", "self.k_norm(self.k_proj(x)", "self.q_norm(self.k_proj(x)",
         "qk-norm-shared"),
    Slip("Qwen3", "self.k_norm(self.k_proj(x).view(b, t, self.kv, self.d))", "self.k_proj(x).view(b, t, self.kv, self.d)",
         "qk-norm-of-one"),
    Slip("Qwen3", "k = k * c + flip(k) * s", "k = k * c - flip(k) * s", "rope-sign"),
    Slip("Qwen3", " * self.d**-0.5", "", "scale-missing"),
    Slip("Qwen3", "u.repeat_interleave(self.h // self.kv, dim=1)", "u.repeat(1, self.h // self.kv, 1, 1)", "gqa-tiled"),
    Slip("ViT22B", "k = F.layer_norm(k, k.shape[-1:], self.k_gain)", "k = k", None),
    Slip("ViT22B", "z.transpose(1, 2).reshape(B, N, C)", "z.reshape(B, N, C)", "merge-without-transpose"),
    Slip("ViT22B", "attn.softmax(dim=-1)", "attn.softmax(dim=-2)", "softmax-axis"),
    Slip("HandNormed", "k = k / k.pow(2).mean(-1, keepdim=True)", "k = k / k.pow(2).mean(-2, keepdim=True)", None),
    Slip("HandNormed", "a * angle.sin() + b * angle.cos()", "b * angle.cos() - a * angle.sin()", None),
    Slip("HandNormed", "q, k = self.at_places(q), self.at_places(k)", "q = self.at_places(q)", None),
    Slip("NanoChat", "y.transpose(1, 2).contiguous().view(B, T, -1)", "y.contiguous().view(B, T, -1)",
         "merge-without-transpose"),
    Slip("NanoChat", "q, k = unit(q), unit(k)", "q = unit(q)", None),
    Slip("SwinCosine", "attn = attn * logit_scale\n", "attn = attn * C**-0.5\n", None),
    Slip("SwinCosine", "F.normalize(q, dim=-1) @ F.normalize(k, dim=-1)",
         "F.normalize(q, dim=-2) @ F.normalize(k, dim=-2)", None),
    Slip("SwinCosine", "F.normalize(q, dim=-1) @ F.normalize(k, dim=-1)", "F.normalize(q, dim=-1) @ k", None),
    Slip("SwinCosine", "(attn @ v).transpose(1, 2).reshape(B, N, C)", "(attn @ v).reshape(B, N, C)",
         "merge-without-transpose"),
    Slip("SwinCosine", "attn = attn * logit_scale", "attn = attn * logit_scale * q.shape[-1] ** -0.5", None),
)  # fmt: skip
