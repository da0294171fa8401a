"""One attention out of people's files into a file of ours, and back, each checked against the other in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from mhacli.attention.layer import MultiHeadAttention
from mhacli.attention.weights.layer_file import Layer, new_attention, require_finite, to_bytes
from mhacli.attention.weights.layouts import from_ours, to_ours, with_all_biases
from mhacli.attention.weights.originals import Answers, original_answers
from mhacli.checkpoints.conversion import Conversion, layer_of_ours
from mhacli.checkpoints.families import Layout
from mhacli.checkpoints.folder import StoredTensor, read_bytes
from mhacli.checkpoints.head_counts import Sizes
from mhacli.checkpoints.mha_weights import EMBEDDING, POSITION_EMBEDDING, LayerFile
from mhacli.errors import EXIT_CHECK, MhaError
from mhacli.io.safetensors import tensors_of
from mhacli.spec.config import Config

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
    layer = Layer(embedding.to(dtype), attention, None if table is None else table.to(dtype))
    content = to_bytes(layer, plan.config, plan.vocabulary)
    written = {name: t for name, t in load(content).items() if name not in (EMBEDDING, POSITION_EMBEDDING)}
    return Converted(content, _agreed(original, written, plan.layout, plan.sizes))


def to_family_file(source: LayerFile, layout: Layout, prefix: str) -> Converted:
    """The content of a safetensors file with the layer of a file of ours, under the names of a layout behind `prefix`.

    Raises `MhaError` where the layout cannot hold the layer, and, with exit code 3, where both do not compute the same.
    """
    sizes = layer_of_ours(source.config)
    ours = {n: t for n, t in tensors_of(source.file, load).items() if n not in (EMBEDDING, POSITION_EMBEDDING)}
    require_finite(ours, source.path)
    content = save({prefix + n: t for n, t in from_ours(ours, layout, sizes).items()}, metadata={"format": "pt"})
    written = {name.removeprefix(prefix): tensor for name, tensor in load(content).items()}
    return Converted(content, _agreed(written, ours, layout, sizes))


def agreement(original: Mapping[str, Tensor], ours: Mapping[str, Tensor], layout: Layout, sizes: Sizes) -> Agreement:
    """Random rows through the tensors of a layout by its own formula, and through a layer of ours, in float64: q, k, v, out."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(N_ROWS, sizes.d_input, generator=generator, dtype=torch.float64)
    theirs = original_answers(original, layout, sizes, rows)
    pairs = list(zip(theirs, _our_answers(ours, sizes, rows), strict=True))
    return Agreement(
        max(float((a - b).abs().max()) for a, b in pairs), max(float(a.abs().max()) for a, _ in pairs)
    )  # fmt: skip


def _agreed(original: Mapping[str, Tensor], ours: Mapping[str, Tensor], layout: Layout, sizes: Sizes) -> Agreement:
    found = agreement(original, ours, layout, sizes)
    if not found.ok:
        raise MhaError(
            f"the converted layer must compute what its source does within {found.tolerance:.3g}, got a difference of "
            f"{found.max_abs_error:.3g}",
            hint="nothing was written",
            code="self-check",
            exit_code=EXIT_CHECK,
        )
    return found


@torch.no_grad()
def _our_answers(ours: Mapping[str, Tensor], sizes: Sizes, rows: Tensor) -> Answers:
    """The same questions to the layer that a run uses, without positions or mask."""
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
