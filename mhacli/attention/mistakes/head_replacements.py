"""What people put in the place of cutting rows into heads, of sharing heads, and of joining them again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.replacements import Inapplicable, inputs_of, out_of
from mhacli.attention.mistakes.stages import Layer, Rows


def fused_read(order: str) -> Callable[..., tuple[Tensor, ...]]:
    """One projection of all three, reshaped to axes in another order than they lie in: `b` the batch, `3` queries, keys and
    values, `h` heads, `t` tokens, `d` columns. The rows are cut right afterwards."""

    def project(layer: Layer, rows: Rows) -> tuple[Tensor, ...]:
        if layer.n_heads != layer.n_kv_heads or layer.n_heads == 1 or layer.interleaved_split:
            raise Inapplicable
        fused = torch.cat([projection(rows.queries) for projection in inputs_of(layer)], dim=-1)
        sizes = {"b": fused.shape[0], "3": 3, "h": layer.n_heads, "t": fused.shape[1], "d": -1}
        read = fused.reshape([sizes[axis] for axis in order])
        return tuple(part.flatten(2) for part in read.permute([order.index(axis) for axis in "3bthd"]).unbind(0))

    return project


def split_flat(*of: str) -> Callable[..., Tensor]:
    """Rows read as heads without moving the axis, for some of q, k and v."""

    def split(layer: Layer, rows: Tensor, n_heads: int, which: str) -> Tensor:
        if n_heads == 1:
            raise Inapplicable
        if which not in of:
            return stages.split(layer, rows, n_heads, which)
        return rows.reshape(rows.shape[0], n_heads, rows.shape[1], -1)

    return split


def values_whole(layer: Layer, rows: Tensor, n_heads: int, which: str) -> Tensor:
    """Values that are not cut: every head weighs whole rows."""
    if n_heads == 1:
        raise Inapplicable
    return rows[:, None] if which == "v" else stages.split(layer, rows, n_heads, which)


def merged_as(order: str) -> Callable[..., Tensor]:
    """Heads read as rows with the axes in this order: `b` the batch, `h` heads, `t` tokens, `d` columns."""

    def merge(layer: Layer, z: Tensor) -> Tensor:
        if z.shape[1] == 1:
            raise Inapplicable
        return z.permute(["bhtd".index(axis) for axis in order]).reshape(z.shape[0], z.shape[2], -1)

    return merge


def planes_read(layer: Layer, z: Tensor) -> Tensor:
    """Planes that lie batch after batch, each with its heads, read as heads, each with its batch."""
    batch, n_heads = z.shape[:2]
    if n_heads == 1 or batch == 1:
        raise Inapplicable
    return stages.merge(layer, z.reshape(n_heads, batch, *z.shape[2:]).transpose(0, 1))


def planes_laid(layer: Layer, z: Tensor) -> Tensor:
    """Planes that lie head after head, each with its batch, read as batches, each with its heads."""
    if z.shape[0] == 1 or z.shape[1] == 1:
        raise Inapplicable
    return stages.merge(layer, z.transpose(0, 1).reshape(z.shape))


def repeated_head(layer: Layer, z: Tensor) -> Tensor:
    """Head 0 side by side with itself."""
    if z.shape[1] == 1:
        raise Inapplicable
    return stages.merge(layer, z[:, :1].expand_as(z))


def planes_split(*of: str) -> Callable[..., Tensor]:
    """Planes of head and batch, head after head, where the others lie batch after batch, for some of q, k and v."""

    def split(layer: Layer, rows: Tensor, n_heads: int, which: str) -> Tensor:
        heads = stages.split(layer, rows, n_heads, which)
        if rows.shape[0] == 1 or n_heads == 1:
            raise Inapplicable
        return heads.transpose(0, 1).reshape(heads.shape) if which in of else heads

    return split


def heads_as_tokens(layer: Layer, rows: Tensor, n_heads: int, which: str) -> Tensor:
    """`[batch, length, head, d]`, whose heads lie where tokens should: they attend to each other within a token."""
    if layer.n_heads == 1 or layer.n_kv_heads != layer.n_heads or layer.interleaved_split:
        raise Inapplicable
    return rows.reshape(*rows.shape[:2], n_heads, -1)


def tokens_side_by_side(layer: Layer, z: Tensor) -> Tensor:
    """`[batch, length, head, d]` with its heads side by side."""
    return z.flatten(2)


def tokens_moved(layer: Layer, z: Tensor) -> Tensor:
    """`[batch, length, head, d]`, from which the axis of the tokens is moved before it is read as rows."""
    return z.transpose(1, 2).reshape(z.shape[0], z.shape[1], -1)


def heads_as(reduced: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Heads made one by a mean or a sum, as wide as the output projection reads."""

    def merge(layer: Layer, z: Tensor) -> Tensor:
        if z.shape[1] == 1:
            raise Inapplicable
        one = reduced(z)
        wide = layer.weights is not None and layer.weights.out is not None
        return one if not wide or out_of(layer).weight.shape[1] == one.shape[-1] else one.repeat(1, 1, z.shape[1])

    return merge


def mean_of_heads(z: Tensor) -> Tensor:
    """`[batch, query, d_v]`."""
    return z.mean(dim=1)


def sum_of_heads(z: Tensor) -> Tensor:
    """`[batch, query, d_v]`."""
    return z.sum(dim=1)


def shared_as(chosen: Callable[[Tensor, int], Tensor], of: str = "kv") -> Callable[..., Tensor]:
    """Another kv head for each query head, of keys, values or both."""

    def share(layer: Layer, heads: Tensor, which: str) -> Tensor:
        if heads.shape[1] == 1:
            raise Inapplicable
        return chosen(heads, layer.n_heads) if which in of else stages.share(layer, heads, which)

    return share


def tiled(heads: Tensor, n_heads: int) -> Tensor:
    """0 1 0 1 where 0 0 1 1 is right."""
    if heads.shape[1] == n_heads:
        raise Inapplicable
    return heads.repeat(1, n_heads // heads.shape[1], 1, 1)


def first_for_all(heads: Tensor, n_heads: int) -> Tensor:
    """Head 0 for every query head."""
    return heads[:, :1].expand(-1, n_heads, -1, -1)


def last_for_all(heads: Tensor, n_heads: int) -> Tensor:
    """The last head for every query head."""
    return heads[:, -1:].expand(-1, n_heads, -1, -1)


def asked_by_one(chosen: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """Products of one head's queries with the keys of all."""

    def products(layer: Layer, q: Tensor, k: Tensor) -> Tensor:
        if q.shape[1] == 1:
            raise Inapplicable
        return chosen(q, q.shape[1]) @ k.mT

    return products


def patterns_as(chosen: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """One pattern for all heads."""

    def shares(layer: Layer, pattern: Tensor, scaled: Tensor, keep: Tensor | None) -> Tensor:
        if pattern.shape[1] == 1:
            raise Inapplicable
        return chosen(pattern, pattern.shape[1])

    return shares


def mean_for_all(heads: Tensor, n_heads: int) -> Tensor:
    """The mean of the heads for each."""
    return heads.mean(dim=1, keepdim=True).expand(-1, n_heads, -1, -1)
