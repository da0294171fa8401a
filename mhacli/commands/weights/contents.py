"""The contents of a checkpoint or a weights file from its headers: sizes, heads, dtypes and KV-cache bytes per token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from shlex import quote
from typing import Any

from mhacli.attention.weights_file import EMBEDDING, FORMAT, Metadata
from mhacli.checkpoints.families import Layout, family_of, layout_named, layout_of
from mhacli.checkpoints.tensor_names import find_layer, layers_in, stacks_in
from mhacli.errors import MhaError
from mhacli.io.json_schema import decode
from mhacli.io.safetensors import ITEM_BITS
from mhacli.models.folder import Checkpoint, StoredTensor
from mhacli.models.sizes import HeadCounts, head_counts
from mhacli.settings import Config

SCHEMA = "mha.weights-info/1"


@dataclass(frozen=True)
class DtypeCount:
    """The tensors of one dtype."""

    dtype: str
    n_tensors: int
    n_parameters: int
    n_bytes: int


@dataclass(frozen=True)
class StackAttention:
    """The attention of one stack. `biases` are the letters (of q, k, v and o) of the projections with a bias.

    `cache_bytes` are the bytes of one token in the KV cache of all layers, in the dtype of the key projection; None if
    the stack has no cache.
    """

    stack: str
    n_layers: int | None
    n_heads: int | None
    n_kv_heads: int | None
    d_head: int | None
    d_v: int | None
    d_model: int | None
    biases: str
    cache_bytes: int | None


@dataclass(frozen=True)
class Contents:
    """The result of `mha weights info`. `kind` is `checkpoint`, or `layer` for a weights file of mha."""

    path: str
    kind: str
    family: str | None
    layout: str | None
    n_tensors: int
    n_parameters: int
    n_bytes: int
    dtypes: tuple[DtypeCount, ...]
    files: tuple[tuple[str, int], ...]
    attentions: tuple[StackAttention, ...]
    vocabulary: int | None
    positions: int | None
    notes: tuple[str, ...]
    tensors: tuple[StoredTensor, ...] = ()


def contents_of(checkpoint: Checkpoint, *, layout: str | None = None) -> Contents:
    """The contents by headers and config. Raises `MhaError` for a saved record and for damaged metadata of mha."""
    schema = checkpoint.metadata.get("schema") if isinstance(checkpoint.metadata, dict) else None
    if schema is not None:
        raise MhaError(
            f"{checkpoint.path} is a saved record ({schema}), not weights", hint=f"mha show {quote(checkpoint.path)} draws it",
            path=checkpoint.path,
        )  # fmt: skip
    if isinstance(checkpoint.metadata, dict) and checkpoint.metadata.get("format") == FORMAT:
        return _mha_contents(checkpoint)
    chosen, notes = _layout(checkpoint, layout)
    counts = head_counts(checkpoint.config)
    attentions = (
        [] if chosen is None else [_attention(checkpoint, chosen, stack) for stack in stacks_in(checkpoint, chosen)]
    )
    if chosen is not None and not attentions:
        notes.append(f"no tensor is named as in layout {chosen.name}")
    if not attentions and counts.n_heads is not None:
        attentions = [_from(counts, "self", counts.n_layers, "", None)]
    for attention in attentions:
        n_layers = head_counts(checkpoint.config, attention.stack).n_layers
        if (
            n_layers is not None
            and attention.n_layers != n_layers
            and chosen is not None
            and "{layer}" in _stem(chosen, attention.stack)
        ):
            notes.append(
                f"config.json gives {n_layers} layers of {attention.stack}, but the tensors make {attention.n_layers}"
            )
    return _contents(
        checkpoint, "checkpoint", None if chosen is None else chosen.name, tuple(attentions), counts, tuple(notes)
    )


def to_json(contents: Contents, *, with_tensors: bool) -> str:
    """The document of schema `mha.weights-info/1`."""
    document: dict[str, Any] = {"schema": SCHEMA} | asdict(contents)
    document["files"] = [{"name": name, "n_bytes": n_bytes} for name, n_bytes in contents.files]
    del document["tensors"]
    if with_tensors:
        document["tensors"] = [
            {"name": t.name, "dtype": t.dtype, "shape": t.shape, "n_bytes": t.n_bytes} for t in contents.tensors
        ]
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _layout(checkpoint: Checkpoint, name: str | None) -> tuple[Layout | None, list[str]]:
    """The layout, or None and the reason why it is unknown."""
    if name is not None:
        return layout_named(name), []
    if not checkpoint.config:
        return None, [
            "no config.json is beside the file, so its names are not recognised: "
            "--tensors lists them, --layout NAME names their layout"
        ]
    try:
        return layout_of(checkpoint.config, checkpoint.path), []
    except MhaError as fault:
        return None, [fault.message.removeprefix(f"{checkpoint.path}: ")]


def _stem(layout: Layout, stack: str) -> str:
    return layout.stacks[stack].stems[0]


def _attention(checkpoint: Checkpoint, layout: Layout, stack: str) -> StackAttention:
    counts = head_counts(checkpoint.config, stack)
    layers = layers_in(checkpoint, layout, stack)
    n_layers = len(layers) if "{layer}" in _stem(layout, stack) else counts.n_layers or len(layers)
    try:
        found_layer = find_layer(checkpoint, layout, layers[0], stack=stack)
    except MhaError:  # several towers, or a damaged layer
        return _from(counts, stack, n_layers, "", None)
    biases = _biases(found_layer.tensors, layout)
    family = family_of(checkpoint.config)
    causal = (family is not None and stack in family.causal) or bool(checkpoint.config.get("is_decoder"))
    n_kv, d_head, d_v = counts.n_kv_heads, counts.d_head, counts.d_v
    cache = None
    if causal and n_kv is not None and d_head is not None and d_v is not None:
        cache = n_layers * n_kv * (d_head + d_v) * ITEM_BITS[found_layer.tensors[layout.qkv[-1]].dtype] // 8
    return _from(counts, stack, n_layers, biases, cache)


def _biases(tensors: Mapping[str, StoredTensor], layout: Layout) -> str:
    if len(layout.qkv_bias) == 1:
        letters = "qkv" if layout.qkv_bias[0] in tensors else ""
    else:
        letters = "".join(letter for letter, name in zip("qkv", layout.qkv_bias, strict=True) if name in tensors)
    return letters + ("o" if layout.out_bias in tensors else "")


def _from(counts: HeadCounts, stack: str, n_layers: int | None, biases: str, cache: int | None) -> StackAttention:
    return StackAttention(
        stack, n_layers, counts.n_heads, counts.n_kv_heads, counts.d_head, counts.d_v, counts.d_model, biases, cache
    )  # fmt: skip


def _contents(
    checkpoint: Checkpoint, kind: str, layout: str | None, attentions: tuple[StackAttention, ...], counts: HeadCounts,
    notes: tuple[str, ...],
) -> Contents:  # fmt: skip
    every = tuple(checkpoint.tensors.values())
    dtypes = [
        DtypeCount(dtype, len(same), sum(t.n_parameters for t in same), sum(t.n_bytes for t in same))
        for dtype in sorted({t.dtype for t in every})
        if (same := [t for t in every if t.dtype == dtype])
    ]
    return Contents(
        path=checkpoint.path, kind=kind, family=checkpoint.family, layout=layout, n_tensors=len(every),
        n_parameters=sum(d.n_parameters for d in dtypes), n_bytes=sum(d.n_bytes for d in dtypes), dtypes=tuple(dtypes),
        files=tuple((file.name, file.n_bytes) for file in checkpoint.files), attentions=attentions,
        vocabulary=counts.vocabulary, positions=counts.positions, notes=(*checkpoint.notes, *notes), tensors=every,
    )  # fmt: skip


def _mha_contents(checkpoint: Checkpoint) -> Contents:
    """The contents of a `mha.weights/1` file, which holds one layer."""
    config: Config = decode(Metadata, checkpoint.metadata, checkpoint.path).config.resolved()
    keys = checkpoint.tensors.get("k_proj.weight")
    per_token = (config.n_kv_heads or 0) * ((config.d_head or 0) + (config.d_v or 0))
    attention = StackAttention(
        "self", 1, config.n_heads, config.n_kv_heads, config.d_head, config.d_v, config.d_model,
        "".join(letter for letter in "qkvo" if f"{letter}_proj.bias" in checkpoint.tensors),
        None if keys is None else per_token * ITEM_BITS[keys.dtype] // 8,
    )  # fmt: skip
    embedding = checkpoint.tensors.get(EMBEDDING)
    rows = embedding.shape[0] if embedding is not None and embedding.shape else None
    table = config.max_positions if config.positions == "learned" else None
    return _contents(checkpoint, "layer", "mha", (attention,), HeadCounts(vocabulary=rows, positions=table), ())
