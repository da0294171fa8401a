"""What a family's own attention computes from its own tensors: the second opinion about a conversion.

Nothing of a layer of ours is used, and no weight is rearranged: rows go through the tensors as they were stored, and the
*results* are cut into heads, in the words of the modules that the tensors come from. Source: transformers 5.23
(`GPT2Attention`, `GPTNeoXAttention`, `FalconAttention._split_heads`, `CodeGenAttention`), `keras.layers.MultiHeadAttention`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from mhacli.checkpoints.families import Layout
from mhacli.checkpoints.head_counts import Sizes


class Answers(NamedTuple):
    """Queries, keys and values by head, every query head with its own keys and values, and the output."""

    q: Float[Tensor, "head row d_head"]
    k: Float[Tensor, "head row d_head"]
    v: Float[Tensor, "head row d_v"]
    out: Float[Tensor, "row d_model"]


def original_answers(
    tensors: Mapping[str, Tensor], layout: Layout, sizes: Sizes, rows: Float[Tensor, "row d_input"]
) -> Answers:
    """The answers of a layout's tensors, by their names behind the prefix, to `rows`, in their dtype.

    Attention is plain: every row sees all, without positions, scaled by `1/√d_head`.
    """
    tensors = {name: tensor.to(rows.dtype) for name, tensor in tensors.items()}
    cut = _cut_fused if len(layout.qkv) == 1 else _cut_separate
    q, k, v = cut(tensors, layout, sizes, rows)
    shares = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) / sizes.d_head**0.5, dim=-1)
    z = torch.einsum("hqk,khd->qhd", shares, v)
    if layout.order == "kernels":
        out = torch.einsum("qhd,hdm->qm", z, tensors[layout.out])
    else:
        out = _through(z.reshape(len(rows), -1), tensors[layout.out], layout)
    out = out + tensors[layout.out_bias] if layout.out_bias in tensors else out
    return Answers(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), out)


def _through(rows: Tensor, weight: Tensor, layout: Layout) -> Tensor:
    """A linear layer, or the `Conv1D` of GPT-2, whose matrix stands the other way."""
    return rows @ weight if layout.transposed else torch.nn.functional.linear(rows, weight)


def _cut_separate(
    tensors: Mapping[str, Tensor], layout: Layout, sizes: Sizes, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Projections of their own, kernels among them: `[row, head, width]` each."""
    fused_bias = (
        tensors[layout.qkv_bias[0]].chunk(3) if len(layout.qkv_bias) == 1 and layout.qkv_bias[0] in tensors else None
    )
    cut = []
    heads = (sizes.n_heads, sizes.n_kv_heads, sizes.n_kv_heads)
    for place, (name, n) in enumerate(zip(layout.qkv, heads, strict=True)):
        weight = tensors[name]
        bias = fused_bias[place] if fused_bias is not None else tensors.get((*layout.qkv_bias, "", "")[place])
        if layout.order == "kernels":
            each = torch.einsum("rm,mhd->rhd", rows, weight) + (0.0 if bias is None else bias)
        else:
            each = _through(rows, weight, layout) + (0.0 if bias is None else bias)
            each = each.view(len(rows), n, -1)
        cut.append(each.repeat_interleave(sizes.n_heads // n, dim=1))
    return cut[0], cut[1], cut[2]


def _cut_fused(
    tensors: Mapping[str, Tensor], layout: Layout, sizes: Sizes, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One projection for all three, whose result is cut as the family's module does: `[row, head, width]` each."""
    n, kv, d = sizes.n_heads, sizes.n_kv_heads, sizes.d_head
    fused = _through(rows, tensors[layout.qkv[0]], layout)
    fused = fused + tensors[layout.qkv_bias[0]] if layout.qkv_bias[0] in tensors else fused
    if layout.order == "per-head":  # GPT-NeoX: view(…, heads, 3·d_head).chunk(3)
        q, k, v = fused.view(len(rows), n, 3 * d).chunk(3, dim=-1)
        return q, k, v
    if layout.order == "per-group":  # Falcon: view(…, groups, queries + 2, d_head)
        groups = fused.view(len(rows), -1, n // kv + 2, d)
        q, k, v = groups[:, :, :-2], groups[:, :, [-2]], groups[:, :, [-1]]
        return q.flatten(1, 2), k.expand_as(q).flatten(1, 2), v.expand_as(q).flatten(1, 2)
    if layout.order == "four-blocks":  # CodeGen: reshape(…, 4, -1), each block split into q, v, k
        q, v, k = torch.split(fused.reshape(len(rows), 4, -1), d * n // 4, dim=-1)
        return q.reshape(len(rows), n, d), k.reshape(len(rows), n, d), v.reshape(len(rows), n, d)
    q, k = fused[:, : n * d], fused[:, n * d : n * d + kv * d]
    v = fused[:, n * d + kv * d :]
    q, k, v = q.view(len(rows), n, -1), k.view(len(rows), kv, -1), v.view(len(rows), kv, -1)
    return q, k.repeat_interleave(n // kv, dim=1), v.repeat_interleave(n // kv, dim=1)
