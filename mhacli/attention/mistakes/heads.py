"""Mistakes in splitting vectors into heads, sharing kv heads, and merging heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.stages import Mistake, ReferenceInputs, ReferenceLayer, require, wrong_for

_AXES = {"b": "batch", "3": "3", "h": "head", "t": "length", "d": "d_head"}
"""The axes of vectors by a letter; 3 are queries, keys and values."""


def _in_words(order: str) -> str:
    return f"[{', '.join(_AXES[axis] for axis in order)}]"


def mistakes() -> Iterator[Mistake]:
    """Heads of other columns or tokens, in another order or number."""
    for letters in ("qkv", "v", "qk", "kv", "q", "qv", "k"):
        wrong = wrong_for(letters, "split", untransposed)
        yield Mistake("split-without-transpose", wrong, ", ".join(letters), letters[0])
    for letters in ("q", "k", "v", "qk", "qv", "kv"):
        wrong = wrong_for(letters, "split", batch_moved)
        yield Mistake("split-batch-moved", wrong, ", ".join(letters), letters[0])
    yield Mistake("attention-over-heads", {"split": heads_last, "merge": lambda layer, z: z.flatten(2)})
    moved = "transposed all the same when they are joined"
    yield Mistake("attention-over-heads", {"split": heads_last, "merge": heads_last_moved}, moved)
    whole = wrong_for("v", "split", lambda layer, rows, role: rows[:, None])
    yield Mistake("value-not-split", whole, changes="z")
    for order in ("b3htd", "3bhtd", "3bthd", "b3thd", "bht3d", "bh3td"):
        wrong = {"project": partial(fused, order)}
        yield Mistake("split-without-transpose, fused", wrong, _in_words(order), "q")

    yield Mistake("merge-without-transpose", {"merge": partial(merged_as, "bhtd")})
    for order in ("bhdt", "btdh", "bdht", "bdth"):
        yield Mistake("merge-axis-order", {"merge": partial(merged_as, order)}, _in_words(order))
    for order in ("hbtd", "htbd", "tbhd", "thbd"):
        yield Mistake("merge-batch-moved", {"merge": partial(merged_as, order)}, _in_words(order))
    planes = "[batch · head, query, d_v] is read as [head, batch, query, d_v]"
    yield Mistake("merge-batch-moved", {"merge": heads_first}, planes)
    yield Mistake("heads-averaged", {"merge": lambda layer, z: one_for_all(layer, z, z.mean(dim=1))})
    yield Mistake("heads-summed", {"merge": lambda layer, z: one_for_all(layer, z, z.sum(dim=1))})
    yield Mistake("head-repeated", {"merge": lambda layer, z: stages.merge(layer, z[:, :1].expand_as(z))})

    repeating = (r"\brepeat\(", r"\btile\(", r"\bcat\(", r"\bexpand\(")
    for letters, detail, site in (
        ("kv", "", "qk"),
        ("k", "of the keys alone", "qk"),
        ("v", "of the values alone", "z"),
    ):
        yield Mistake("gqa-tiled", wrong_for(letters, "repeat_kv", tiled), detail, site, at=repeating)
    yield Mistake("kv-head-shared-by-all", wrong_for("kv", "repeat_kv", first_for_all))
    yield Mistake("value-of-one-head", wrong_for("v", "repeat_kv", first_for_all), changes="z")
    yield Mistake("key-of-one-head", wrong_for("k", "repeat_kv", first_for_all))
    yield Mistake("query-of-one-head", {"products": lambda layer, q, k: q[:, :1] @ k.mT})
    first = {"value_weights": lambda layer, pattern, *_: pattern[:, :1].expand_as(pattern)}
    yield Mistake("pattern-of-one-head", first, "that of head 0", "z")
    mean = {"value_weights": lambda layer, pattern, *_: pattern.mean(1, True).expand_as(pattern)}
    yield Mistake("pattern-of-one-head", mean, "the mean", "z")


def untransposed(layer: ReferenceLayer, rows: Tensor, role: str) -> Tensor:
    """Vectors reshaped to heads without a transpose."""
    return rows.reshape(stages.split(layer, rows, role).shape)


def batch_moved(layer: ReferenceLayer, rows: Tensor, role: str) -> Tensor:
    """Heads in the order head, batch instead of batch, head."""
    heads = stages.split(layer, rows, role)
    return heads.transpose(0, 1).reshape(heads.shape)


def heads_last(layer: ReferenceLayer, rows: Tensor, role: str) -> Tensor:
    """`[batch, length, head, d]` with heads in place of tokens: the heads of a token attend to each other."""
    require(layer.n_heads == layer.n_kv_heads > 1 and not layer.interleaved_split)
    return rows.reshape(*rows.shape[:2], layer.n_heads, -1)


def heads_last_moved(layer: ReferenceLayer, z: Tensor) -> Tensor:
    """Heads in place of tokens, transposed to tokens in place of heads."""
    return z.transpose(1, 2).reshape(z.shape[0], z.shape[1], -1)


def fused(order: str, layer: ReferenceLayer, rows: ReferenceInputs) -> Sequence[Tensor]:
    """A fused projection reshaped to axes in another order."""
    require(layer.n_heads == layer.n_kv_heads and not layer.interleaved_split)
    whole = torch.cat(stages.project(layer, ReferenceInputs(rows.queries, rows.queries, rows.queries)), dim=-1)
    sizes = {"b": whole.shape[0], "3": 3, "h": layer.n_heads, "t": whole.shape[1], "d": -1}
    reshaped = whole.reshape([sizes[axis] for axis in order])
    return [part.flatten(2) for part in reshaped.permute([order.index(axis) for axis in "3bthd"])]


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


def tiled(layer: ReferenceLayer, heads: Tensor, role: str) -> Tensor:
    """KV heads repeated as 0 1 0 1 instead of 0 0 1 1."""
    return heads.repeat(1, layer.n_heads // heads.shape[1], 1, 1)


def first_for_all(layer: ReferenceLayer, heads: Tensor, role: str) -> Tensor:
    """The first head for every query head."""
    return heads[:, :1].expand(-1, layer.n_heads, -1, -1)
