"""The weights of an attention from people's layouts to ours and back, bit for bit: only rows move.

Ours is that of `mha.weights/1`: `q_proj.weight [n_heads·d_head, d_input]`, `k_proj`, `v_proj`,
`o_proj.weight [d_model, n_heads·d_v]`, and a `.bias` where there is one. The layouts are data, in `mhacli.checkpoints.families`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mhacli.checkpoints.families import Layout, expected_shapes, require_fitting_heads
from mhacli.checkpoints.head_counts import Sizes
from mhacli.errors import MhaError

_QKV = ("q_proj", "k_proj", "v_proj")


def to_ours(tensors: Mapping[str, Tensor], layout: Layout, sizes: Sizes) -> dict[str, Tensor]:
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


def from_ours(tensors: Mapping[str, Tensor], layout: Layout, sizes: Sizes) -> dict[str, Tensor]:
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


def _require_shapes(tensors: Mapping[str, Tensor], layout: Layout, sizes: Sizes) -> None:
    require_fitting_heads(layout, sizes)
    shapes = expected_shapes(layout, sizes)
    faults = [f"{name} {list(shape)} is missing" for name, shape in shapes.weights.items() if name not in tensors]
    for name, shape in (*shapes.weights.items(), *shapes.biases.items()):
        if name in tensors and tuple(tensors[name].shape) != shape:
            faults.append(f"{name} must be {list(shape)}, got {list(tensors[name].shape)}")
    if faults:
        raise MhaError(f"tensors must be those of layout {layout.name}; {'; '.join(faults)}", code="bad-file")


def _split(fused: Tensor, layout: Layout, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
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


def _joined(name: str, rows: list[Tensor | None], layout: Layout, sizes: Sizes) -> dict[str, Tensor]:
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


def _kernel(rows: Tensor, part: str, layout: Layout, sizes: Sizes) -> Tensor:
    """The reverse of `_rows`."""
    if layout.order != "kernels":
        return rows.T if layout.transposed and rows.ndim == 2 else rows
    n = sizes.n_heads if part == "q_proj" else sizes.n_kv_heads
    heads: Tensor = rows.unflatten(0, (n, -1))
    return heads if rows.ndim == 1 else heads.permute(2, 0, 1)


def _require_zeros(bias: Tensor, name: str, layout: Layout) -> None:
    if bias.any():
        raise MhaError(
            f"{name} must be zeros for layout {layout.name}, which has no place for it, got {int(bias.count_nonzero())} others",
            hint="a layout with that bias can hold the layer: bert, gpt2, torch",
            code="unsupported",
        )
