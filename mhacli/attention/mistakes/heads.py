"""Mistakes in splitting vectors into heads, sharing kv heads, and merging heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.stages import Forms, ReferenceInputs, ReferenceLayer, inputs_of, mistakes, require

_AXES = {"b": "batch", "3": "3", "h": "head", "t": "length", "d": "d_head"}
"""The axes of vectors by a letter; 3 are queries, keys and values."""

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


def whole_values(layer: ReferenceLayer, rows: Tensor, n_heads: int, role: str) -> Tensor:
    """Whole value vectors for every head."""
    return rows[:, None] if role == "v" else stages.split(layer, rows, n_heads, role)


@mistakes("split")
def splitting() -> Forms:
    """Heads of other columns or tokens."""
    for letters in ("qkv", "v", "qk", "kv", "q", "qv", "k"):
        sentence = f"a reshape alone splits {', '.join(letters)} into heads"
        yield "split-without-transpose", sentence, partial(split_alone, letters), tuple(letters)
    for letters in ("q", "k", "v", "qk", "qv", "kv"):
        sentence = f"the planes of {', '.join(letters)} lie head after head, those of the others batch after batch"
        yield "split-batch-moved", sentence, partial(batch_moved, letters), tuple(letters)
    attended = "[batch, length, head, d_head] is attended over its heads"
    as_it_is = {"split": heads_last, "merge": lambda layer, z: z.flatten(2)}
    yield "attention-over-heads", attended, as_it_is
    moved = {"split": heads_last, "merge": lambda layer, z: z.transpose(1, 2).reshape(z.shape[0], z.shape[1], -1)}
    yield "attention-over-heads", f"{attended}, and transposed all the same when they are joined", moved
    yield "value-not-split", "each head weighs the whole rows of v", whole_values, ("z",)


def fused(order: str, layer: ReferenceLayer, rows: ReferenceInputs) -> Sequence[Tensor]:
    """A fused projection reshaped to axes in another order."""
    require(layer.n_heads == layer.n_kv_heads and not layer.interleaved_split)
    whole = torch.cat([projection(rows.queries) for projection in inputs_of(layer)], dim=-1)
    sizes = {"b": whole.shape[0], "3": 3, "h": layer.n_heads, "t": whole.shape[1], "d": -1}
    reshaped = whole.reshape([sizes[axis] for axis in order])
    return [part.flatten(2) for part in reshaped.permute([order.index(axis) for axis in "3bthd"])]


@mistakes("project")
def splitting_fused() -> Forms:
    """A fused projection reshaped to axes in the wrong order."""
    for order in ("b3htd", "3bhtd", "3bthd", "b3thd", "bht3d", "bh3td"):
        sentence = f"the fused projection is reshaped to [{', '.join(_AXES[axis] for axis in order)}]"
        yield "split-without-transpose, fused", sentence, partial(fused, order), ("q",)


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
    reshaped = "[batch, head, query, d_v] is reshaped to [batch, query, head·d_v] without a transpose"
    yield "merge-without-transpose", reshaped, partial(merged_as, "bhtd")
    for code, *orders in (
        ("merge-axis-order", "bhdt", "btdh", "bdht", "bdth"),
        ("merge-batch-moved", "hbtd", "htbd", "tbhd", "thbd"),
    ):
        for order in orders:
            axes = ", ".join(_AXES[axis] for axis in order)
            yield code, f"the heads are joined in the order {axes}", partial(merged_as, order)
    yield "merge-batch-moved", "[batch · head, query, d_v] is read as [head, batch, query, d_v]", heads_first
    averaged = "the heads are averaged instead of joined"
    yield "heads-averaged", averaged, lambda layer, z: one_for_all(layer, z, z.mean(dim=1))
    summed = "the heads are added up instead of joined"
    yield "heads-summed", summed, lambda layer, z: one_for_all(layer, z, z.sum(dim=1))
    repeated = "the output of head 0 is repeated for every head"
    yield "head-repeated", repeated, lambda layer, z: stages.merge(layer, z[:, :1].expand_as(z))


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
    for letters, words, site in (
        ("kv", "kv heads", "qk"),
        ("k", "the heads of the keys alone", "qk"),
        ("v", "the heads of the values alone", "z"),
    ):
        sentence = f"{words} are tiled, head h reading kv head h mod n_kv_heads"
        yield "gqa-tiled", sentence, partial(shared_as, tiled, letters), (site,)


@mistakes("repeat_kv")
def sharing() -> Forms:
    """One kv head for all."""
    yield "kv-head-shared-by-all", "every query head reads kv head 0", partial(shared_as, first_for_all, "kv")
    yield "value-of-one-head", "every head reads the values of head 0", partial(shared_as, first_for_all, "v"), ("z",)
    yield "key-of-one-head", "every head reads the keys of head 0", partial(shared_as, first_for_all, "k")


@mistakes("products")
def sharing_queries() -> Forms:
    """The queries of one head."""
    yield "query-of-one-head", "every head reads the queries of head 0", lambda layer, q, k: q[:, :1] @ k.mT


@mistakes("value_weights")
def sharing_patterns() -> Forms:
    """One pattern for all heads."""
    first = "every head weighs by the pattern of head 0"
    yield "pattern-of-one-head", first, lambda layer, pattern, *_: pattern[:, :1].expand_as(pattern), ("z",)
    mean = "every head weighs by the mean of all patterns"
    yield "pattern-of-one-head", mean, lambda layer, pattern, *_: pattern.mean(1, True).expand_as(pattern), ("z",)
