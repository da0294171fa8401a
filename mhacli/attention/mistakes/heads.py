"""Mistakes in splitting vectors into heads, sharing kv heads, and merging heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.stages import Form, Forms, ReferenceInputs, ReferenceLayer, mistakes, require

_AXES = {"b": "batch", "3": "3", "h": "head", "t": "length", "d": "d_head"}
"""The axes of vectors by a letter; 3 are queries, keys and values."""


def _in_words(order: str) -> str:
    return f"[{', '.join(_AXES[axis] for axis in order)}]"


# -------------------------------------------------------------------------------------------------------------------- splitting


def split_alone(letters: str, layer: ReferenceLayer, rows: Tensor, n_heads: int, role: str) -> Tensor:
    """Some of q, k and v reshaped to heads without a transpose."""
    if role not in letters:
        return stages.split(layer, rows, n_heads, role)
    return rows.reshape(rows.shape[0], n_heads, rows.shape[1], -1)


def batch_moved(letters: str, layer: ReferenceLayer, rows: Tensor, n_heads: int, role: str) -> Tensor:
    """Heads of some of q, k and v in the order head, batch instead of batch, head."""
    heads = stages.split(layer, rows, n_heads, role)
    return heads.transpose(0, 1).reshape(heads.shape) if role in letters else heads


def heads_last(layer: ReferenceLayer, rows: Tensor, n_heads: int, role: str) -> Tensor:
    """`[batch, length, head, d]` with heads in place of tokens: the heads of a token attend to each other."""
    require(layer.n_heads == layer.n_kv_heads > 1 and not layer.interleaved_split)
    return rows.reshape(*rows.shape[:2], n_heads, -1)


def heads_last_moved(layer: ReferenceLayer, z: Tensor) -> Tensor:
    """Heads in place of tokens, transposed to tokens in place of heads."""
    return z.transpose(1, 2).reshape(z.shape[0], z.shape[1], -1)


def whole_values(layer: ReferenceLayer, rows: Tensor, n_heads: int, role: str) -> Tensor:
    """Whole value vectors for every head."""
    return rows[:, None] if role == "v" else stages.split(layer, rows, n_heads, role)


@mistakes("split")
def splitting() -> Forms:
    """Heads of other columns or tokens."""
    for letters in ("qkv", "v", "qk", "kv", "q", "qv", "k"):
        yield Form("split-without-transpose", partial(split_alone, letters), ", ".join(letters), letters[0])
    for letters in ("q", "k", "v", "qk", "qv", "kv"):
        yield Form("split-batch-moved", partial(batch_moved, letters), ", ".join(letters), letters[0])
    yield Form("attention-over-heads", {"split": heads_last, "merge": lambda layer, z: z.flatten(2)})
    moved = "transposed all the same when they are joined"
    yield Form("attention-over-heads", {"split": heads_last, "merge": heads_last_moved}, moved)
    yield Form("value-not-split", whole_values, site="z")


def fused(order: str, layer: ReferenceLayer, rows: ReferenceInputs) -> Sequence[Tensor]:
    """A fused projection reshaped to axes in another order."""
    require(layer.n_heads == layer.n_kv_heads and not layer.interleaved_split)
    whole = torch.cat(stages.project(layer, ReferenceInputs(rows.queries, rows.queries, rows.queries)), dim=-1)
    sizes = {"b": whole.shape[0], "3": 3, "h": layer.n_heads, "t": whole.shape[1], "d": -1}
    reshaped = whole.reshape([sizes[axis] for axis in order])
    return [part.flatten(2) for part in reshaped.permute([order.index(axis) for axis in "3bthd"])]


@mistakes("project")
def splitting_fused() -> Forms:
    """A fused projection reshaped to axes in the wrong order."""
    for order in ("b3htd", "3bhtd", "3bthd", "b3thd", "bht3d", "bh3td"):
        yield Form("split-without-transpose, fused", partial(fused, order), _in_words(order), "q")


# ----------------------------------------------------------------------------------------------------------------------- merging


def merged_as(order: str, layer: ReferenceLayer, z: Tensor) -> Tensor:
    """Heads merged with the axes in this order."""
    return z.permute(["bhtd".index(axis) for axis in order]).reshape(z.shape[0], z.shape[2], -1)


def heads_first(layer: ReferenceLayer, z: Tensor) -> Tensor:
    """Planes of batch and head read in the order head, batch."""
    return stages.merge(layer, z.reshape(z.shape[1], z.shape[0], *z.shape[2:]).transpose(0, 1))


def one_for_all(layer: ReferenceLayer, z: Tensor, head: Tensor) -> Tensor:
    """One head for all, repeated to the width of the output projection if necessary."""
    out = None if layer.weights is None else layer.weights.out
    return head if out is None or out.weight.shape[1] == head.shape[-1] else head.repeat(1, 1, z.shape[1])


@mistakes("merge")
def merging() -> Forms:
    """Heads that are joined in another order, or not at all."""
    yield Form("merge-without-transpose", partial(merged_as, "bhtd"))
    for order in ("bhdt", "btdh", "bdht", "bdth"):
        yield Form("merge-axis-order", partial(merged_as, order), _in_words(order))
    for order in ("hbtd", "htbd", "tbhd", "thbd"):
        yield Form("merge-batch-moved", partial(merged_as, order), _in_words(order))
    yield Form("merge-batch-moved", heads_first, "[batch · head, query, d_v] is read as [head, batch, query, d_v]")
    yield Form("heads-averaged", lambda layer, z: one_for_all(layer, z, z.mean(dim=1)))
    yield Form("heads-summed", lambda layer, z: one_for_all(layer, z, z.sum(dim=1)))
    yield Form("head-repeated", lambda layer, z: stages.merge(layer, z[:, :1].expand_as(z)))


# --------------------------------------------------------------------------------------------------------------------- sharing


def tiled(heads: Tensor, n_heads: int) -> Tensor:
    """KV heads repeated as 0 1 0 1 instead of 0 0 1 1."""
    return heads.repeat(1, n_heads // heads.shape[1], 1, 1)


def first_for_all(heads: Tensor, n_heads: int) -> Tensor:
    """The first head for every query head."""
    return heads[:, :1].expand(-1, n_heads, -1, -1)


def shared_as(choice: Callable[..., Tensor], letters: str, layer: ReferenceLayer, heads: Tensor, role: str) -> Tensor:
    """Keys, values or both of another kv head for each query head."""
    return choice(heads, layer.n_heads) if role in letters else stages.repeat_kv(layer, heads, role)


@mistakes("repeat_kv", at=(r"\brepeat\(", r"\btile\(", r"\bcat\(", r"\bexpand\("))
def tiling() -> Forms:
    """KV heads of other groups."""
    yield Form("gqa-tiled", partial(shared_as, tiled, "kv"))
    yield Form("gqa-tiled", partial(shared_as, tiled, "k"), "of the keys alone")
    yield Form("gqa-tiled", partial(shared_as, tiled, "v"), "of the values alone", "z")


@mistakes("repeat_kv")
def sharing() -> Forms:
    """One kv head for all."""
    yield Form("kv-head-shared-by-all", partial(shared_as, first_for_all, "kv"))
    yield Form("value-of-one-head", partial(shared_as, first_for_all, "v"), site="z")
    yield Form("key-of-one-head", partial(shared_as, first_for_all, "k"))


@mistakes("products")
def sharing_queries() -> Forms:
    """The queries of one head."""
    yield Form("query-of-one-head", lambda layer, q, k: q[:, :1] @ k.mT)


@mistakes("value_weights")
def sharing_patterns() -> Forms:
    """One pattern for all heads."""
    yield Form(
        "pattern-of-one-head", lambda layer, pattern, *_: pattern[:, :1].expand_as(pattern), "that of head 0", "z"
    )
    yield Form(
        "pattern-of-one-head", lambda layer, pattern, *_: pattern.mean(1, True).expand_as(pattern), "the mean", "z"
    )
