"""One attention out of people's files into a file of ours, and back, each checked against the other in float64.

Ours is the layout of `mha.weights/1`; the others are data, in `mhacli.checkpoints.families`. Only rows move, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from safetensors.torch import load, save
from torch import Tensor

from mhacli.attention.layer import MultiHeadAttention
from mhacli.attention.layer_file import LayerWeights, new_attention, require_finite, to_bytes
from mhacli.attention.weights_file import EMBEDDING, POSITION_EMBEDDING, LayerFile
from mhacli.checkpoints.conversion import Conversion, projection_sizes
from mhacli.checkpoints.families import Layout, expected_shapes, require_fitting_heads
from mhacli.errors import EXIT_CHECK, MhaError
from mhacli.io.safetensors import tensors_of
from mhacli.models.folder import StoredTensor, read_bytes
from mhacli.models.sizes import ProjectionSizes
from mhacli.settings import Config

TOLERANCE = 1e-10
"""Largest difference relative to the largest number compared: float64 sums in another order, with room."""
N_ROWS = 11
"""Random rows that both sides answer."""
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Agreement(NamedTuple):
    """How far the converted layer is from the family's own formula: the largest difference of q, k, v and out."""

    max_abs_error: float
    largest: float

    @property
    def tolerance(self) -> float:
        """The largest difference that rounding explains."""
        return TOLERANCE * max(self.largest, 1e-300)

    @property
    def ok(self) -> bool:
        """Whether the conversion is right."""
        return self.max_abs_error <= self.tolerance


class Converted(NamedTuple):
    """A file's content, and how it was checked."""

    content: bytes
    agreement: Agreement


def to_layer_file(plan: Conversion) -> Converted:
    """The content of a weights file of ours with one layer of a checkpoint.

    Raises `MhaError` for numbers that are not finite, and, with exit code 3, where the layer in the content does not compute
    what the checkpoint's own tensors do.
    """
    original = {name: _read(tensor) for name, tensor in plan.found.tensors.items()}
    require_finite(original, plan.found.prefix or plan.checkpoint.path)
    dtype = getattr(torch, plan.config.dtype)
    ours = with_all_biases(to_ours(original, plan.layout, plan.sizes))
    attention = new_attention(plan.config, torch.Generator())
    attention.load_state_dict({name: tensor.to(dtype) for name, tensor in ours.items()})
    width = plan.sizes.d_input
    embedding = torch.zeros(0, width) if plan.embedding is None else _read(plan.embedding)[: plan.n_tokens]
    table = None if plan.table is None else _read(plan.table).reshape(-1, width)[plan.table_skip :]
    layer = LayerWeights(embedding.to(dtype), attention, None if table is None else table.to(dtype))
    content = to_bytes(layer, plan.config, plan.vocabulary, number=plan.layer)
    written = {name: t for name, t in load(content).items() if name not in (EMBEDDING, POSITION_EMBEDDING)}
    return Converted(content, _agreed(original, written, plan.layout, plan.sizes))


def to_family_file(source: LayerFile, layout: Layout, prefix: str) -> Converted:
    """The content of a safetensors file with the layer of a file of ours, under the names of a layout behind `prefix`.

    Raises `MhaError` where the layout cannot hold the layer, and, with exit code 3, where both do not compute the same.
    """
    sizes = projection_sizes(source.config)
    ours = {n: t for n, t in tensors_of(source.file, load).items() if n not in (EMBEDDING, POSITION_EMBEDDING)}
    require_finite(ours, source.path)
    content = save({prefix + n: t for n, t in from_ours(ours, layout, sizes).items()}, metadata={"format": "pt"})
    written = {name.removeprefix(prefix): tensor for name, tensor in load(content).items()}
    return Converted(content, _agreed(written, ours, layout, sizes))


def agreement(
    original: Mapping[str, Tensor], ours: Mapping[str, Tensor], layout: Layout, sizes: ProjectionSizes
) -> Agreement:
    """Random rows through the tensors of a layout by its own formula, and through a layer of ours, in float64: q, k, v, out."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(N_ROWS, sizes.d_input, generator=generator, dtype=torch.float64)
    theirs = original_answers(original, layout, sizes, rows)
    pairs = list(zip(theirs, _our_answers(ours, sizes, rows), strict=True))
    return Agreement(
        max(float((a - b).abs().max()) for a, b in pairs), max(float(a.abs().max()) for a, _ in pairs)
    )  # fmt: skip


def _agreed(
    original: Mapping[str, Tensor], ours: Mapping[str, Tensor], layout: Layout, sizes: ProjectionSizes
) -> Agreement:
    found = agreement(original, ours, layout, sizes)
    if not found.ok:
        raise MhaError(
            f"the converted layer does not compute what its source does: a difference of {found.max_abs_error:.3g} is above "
            f"the tolerance of {found.tolerance:.3g}",
            hint="nothing was written",
            code="self-check",
            exit_code=EXIT_CHECK,
        )
    return found


@torch.no_grad()
def _our_answers(ours: Mapping[str, Tensor], sizes: ProjectionSizes, rows: Tensor) -> Answers:
    """The answers of the layer that a run uses to the same inputs, without positions or mask."""
    has_bias = "o_proj.bias" in ours or "q_proj.bias" in ours
    config = Config(
        d_model=sizes.d_model, n_heads=sizes.n_heads, n_kv_heads=sizes.n_kv_heads, d_head=sizes.d_head, d_v=sizes.d_v,
        d_input=sizes.d_input, bias=has_bias, positions="none", dtype="float64",
    ).resolved()  # fmt: skip
    layer: MultiHeadAttention = new_attention(config, torch.Generator())
    layer.load_state_dict({name: tensor.double() for name, tensor in with_all_biases(ours).items()})
    seen: dict[str, Tensor] = {}
    layer(rows[None], tap=lambda site, tensor, **_: seen.update({site: tensor}))
    shared = sizes.n_heads // sizes.n_kv_heads
    k, v = (seen[name][0].repeat_interleave(shared, dim=0) for name in "kv")
    return Answers(seen["q"][0], k, v, seen["out"][0])


def _read(tensor: StoredTensor) -> Tensor:
    """A tensor's numbers, as they are stored."""
    content = read_bytes(tensor)
    if not content:
        return torch.zeros(tensor.shape, dtype=_DTYPES[tensor.dtype])
    return torch.frombuffer(content, dtype=_DTYPES[tensor.dtype]).reshape(tensor.shape)


# -------------------------------------------------------------------------------------------------------------- layouts


_QKV = ("q_proj", "k_proj", "v_proj")


def to_ours(tensors: Mapping[str, Tensor], layout: Layout, sizes: ProjectionSizes) -> dict[str, Tensor]:
    """The layer's tensors by our names, from those of a layout, by their names behind the prefix of the layer.

    A bias that the source does not have is absent. Raises `MhaError` for tensors that are missing or of other shapes.
    """
    _require_shapes(tensors, layout, sizes)
    found: dict[str, Tensor] = {}
    for names, suffix in ((layout.qkv, "weight"), (layout.qkv_bias, "bias")):
        rows: tuple[Tensor | None, ...]
        if len(names) == 1 and names[0] in tensors:
            fused = tensors[names[0]]
            rows = _split(fused.T if layout.transposed and fused.ndim == 2 else fused, layout, sizes)
        else:
            rows = tuple(_rows(tensors[name], layout) if name in tensors else None for name in names)
        found |= {f"{part}.{suffix}": each for part, each in zip(_QKV, rows, strict=False) if each is not None}
    out = tensors[layout.out]
    if layout.order == "kernels":
        out = out.permute(2, 0, 1).flatten(1)
    found["o_proj.weight"] = out.T if layout.transposed else out
    if layout.out_bias in tensors:
        found["o_proj.bias"] = tensors[layout.out_bias]
    return {name: tensor.contiguous() for name, tensor in found.items()}


def from_ours(tensors: Mapping[str, Tensor], layout: Layout, sizes: ProjectionSizes) -> dict[str, Tensor]:
    """The layer's tensors by the names of a layout, without the prefix of a layer: what `to_ours` came from, bit for bit.

    A bias that the layout has no place for is left out where it is all zeros. Raises `MhaError` where it is not, and where
    the layout cannot hold such heads.
    """
    require_fitting_heads(layout, sizes)
    found: dict[str, Tensor] = {}
    for names, suffix in ((layout.qkv, "weight"), (layout.qkv_bias, "bias")):
        rows = [tensors.get(f"{part}.{suffix}") for part in _QKV]
        if len(names) == 1:
            found |= _joined(names[0], rows, layout, sizes)
        else:
            for part, name, each in zip(_QKV, names, rows, strict=True):
                if name and each is not None:
                    found[name] = _kernel(each, part, layout, sizes)
                elif each is not None:
                    _require_zeros(each, f"{part}.{suffix}", layout)
    out = tensors["o_proj.weight"]
    if layout.order == "kernels":
        out = out.unflatten(1, (sizes.n_heads, sizes.d_v)).permute(1, 2, 0)
    found[layout.out] = out.T if layout.transposed else out
    if "o_proj.bias" in tensors and layout.out_bias:
        found[layout.out_bias] = tensors["o_proj.bias"]
    elif "o_proj.bias" in tensors:
        _require_zeros(tensors["o_proj.bias"], "o_proj.bias", layout)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def with_all_biases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same layer with a bias of zeros wherever another projection has one: a file of ours has all or none."""
    if not any(name.endswith(".bias") for name in tensors):
        return dict(tensors)
    zeros = {
        f"{part}.bias": torch.zeros(len(tensors[f"{part}.weight"]), dtype=tensors[f"{part}.weight"].dtype)
        for part in (*_QKV, "o_proj")
    }
    return zeros | dict(tensors)


def _require_shapes(tensors: Mapping[str, Tensor], layout: Layout, sizes: ProjectionSizes) -> None:
    require_fitting_heads(layout, sizes)
    shapes = expected_shapes(layout, sizes)
    faults = [f"{name} {list(shape)} is missing" for name, shape in shapes.weights.items() if name not in tensors]
    for name, shape in (*shapes.weights.items(), *shapes.biases.items()):
        if name in tensors and tuple(tensors[name].shape) != shape:
            faults.append(f"{name} is {list(tensors[name].shape)}, not {list(shape)}")
    if faults:
        raise MhaError(f"the tensors do not fit layout {layout.name}: {'; '.join(faults)}", code="bad-file")


def _split(fused: Tensor, layout: Layout, sizes: ProjectionSizes) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of queries, keys and values out of a fused `[rows, …]`, by the order of the layout."""
    n, kv, d = sizes.n_heads, sizes.n_kv_heads, sizes.d_head
    if layout.order == "per-head":
        q, k, v = fused.unflatten(0, (n, 3, d)).unbind(1)
        return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    if layout.order == "per-group":
        groups = fused.unflatten(0, (kv, n // kv + 2, d))
        return groups[:, :-2].flatten(0, 2), groups[:, -2].flatten(0, 1), groups[:, -1].flatten(0, 1)
    if layout.order == "four-blocks":
        q, v, k = fused.unflatten(0, (4, 3, n // 4 * d)).unbind(1)
        return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    q, k, v = fused.split([n * d, kv * d, kv * sizes.d_v])
    return q, k, v


def _joined(name: str, rows: list[Tensor | None], layout: Layout, sizes: ProjectionSizes) -> dict[str, Tensor]:
    """The reverse of `_split`, under its name: nothing where there are no rows, zeros where one of three is missing."""
    given = [each for each in rows if each is not None]
    if not given:
        return {}
    n, kv, d = sizes.n_heads, sizes.n_kv_heads, sizes.d_head
    counts = (n * d, kv * d, kv * sizes.d_v)
    q, k, v = (
        each if each is not None else given[0].new_zeros(count) for each, count in zip(rows, counts, strict=True)
    )
    if layout.order == "per-head":
        fused = torch.stack([each.unflatten(0, (n, d)) for each in (q, k, v)], dim=1).flatten(0, 2)
    elif layout.order == "per-group":
        queries = q.unflatten(0, (kv, n // kv, d))
        fused = torch.cat([queries, *(each.unflatten(0, (kv, 1, d)) for each in (k, v))], dim=1).flatten(0, 2)
    elif layout.order == "four-blocks":
        fused = torch.stack([each.unflatten(0, (4, -1)) for each in (q, v, k)], dim=1).flatten(0, 2)
    else:
        fused = torch.cat([q, k, v])
    return {name: fused.T if layout.transposed and fused.ndim == 2 else fused}


def _rows(tensor: Tensor, layout: Layout) -> Tensor:
    """A projection of its own as rows: `[d_model, head, d_head]` becomes `[head·d_head, d_model]`."""
    if layout.order == "kernels":
        return tensor.flatten() if tensor.ndim == 2 else tensor.permute(1, 2, 0).flatten(0, 1)
    return tensor.T if layout.transposed and tensor.ndim == 2 else tensor


def _kernel(rows: Tensor, part: str, layout: Layout, sizes: ProjectionSizes) -> Tensor:
    """The reverse of `_rows`."""
    if layout.order != "kernels":
        return rows.T if layout.transposed and rows.ndim == 2 else rows
    n = sizes.n_heads if part == "q_proj" else sizes.n_kv_heads
    heads: Tensor = rows.unflatten(0, (n, -1))
    return heads if rows.ndim == 1 else heads.permute(2, 0, 1)


def _require_zeros(bias: Tensor, name: str, layout: Layout) -> None:
    if bias.any():
        raise MhaError(
            f"layout {layout.name} has no {name}, and {int(bias.count_nonzero())} of its numbers are not 0",
            hint="the layouts bert, gpt2 and torch have that bias",
            code="unsupported",
        )


# ------------------------------------------------------------------------------------------- the formula of each family


class Answers(NamedTuple):
    """Queries, keys and values by head, every query head with its own keys and values, and the output."""

    q: Float[Tensor, "head row d_head"]
    k: Float[Tensor, "head row d_head"]
    v: Float[Tensor, "head row d_v"]
    out: Float[Tensor, "row d_model"]


def original_answers(
    tensors: Mapping[str, Tensor], layout: Layout, sizes: ProjectionSizes, rows: Float[Tensor, "row d_input"]
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
    tensors: Mapping[str, Tensor], layout: Layout, sizes: ProjectionSizes, rows: Tensor
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
    tensors: Mapping[str, Tensor], layout: Layout, sizes: ProjectionSizes, rows: Tensor
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
