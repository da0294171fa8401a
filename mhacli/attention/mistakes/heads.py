"""Mistakes in splitting vectors into heads, sharing kv heads, and merging heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.stages import Forms, ReferenceInputs, ReferenceLayer, inputs_of, mistake, require

# -------------------------------------------------------------------------------------------------------------------- splitting


@mistake("split-without-transpose", "split")
def split_without_transpose() -> Forms:
    """Vectors split into heads by a reshape without a transpose, for some of q, k and v."""

    def split(letters: str, layer: ReferenceLayer, rows: Tensor, n_heads: int, role: str) -> Tensor:
        if role not in letters:
            return stages.split(layer, rows, n_heads, role)
        return rows.reshape(rows.shape[0], n_heads, rows.shape[1], -1)

    yield "q, k and v are split into heads by a reshape alone", partial(split, "qkv"), ("q", "k", "v")
    for letters in ("v", "qk", "kv", "q", "qv", "k"):
        verb = "is" if len(letters) == 1 else "are"
        yield (
            f"{' and '.join(letters)} {verb} split into heads by a reshape alone",
            partial(split, letters),
            tuple(letters),
        )


@mistake("split-without-transpose", "project", form="fused", site="q")
def fused_without_transpose() -> Forms:
    """A fused projection reshaped to axes in the wrong order: `b` batch, `3` queries, keys and values, `h` heads, `t` tokens,
    `d` columns."""

    def project(order: str, layer: ReferenceLayer, rows: ReferenceInputs) -> Sequence[Tensor]:
        require(layer.n_heads == layer.n_kv_heads and not layer.interleaved_split)
        fused = torch.cat([projection(rows.queries) for projection in inputs_of(layer)], dim=-1)
        sizes = {"b": fused.shape[0], "3": 3, "h": layer.n_heads, "t": fused.shape[1], "d": -1}
        reshaped = fused.reshape([sizes[axis] for axis in order])
        return [part.flatten(2) for part in reshaped.permute([order.index(axis) for axis in "3bthd"])]

    for order, axes in (
        ("b3htd", "batch, 3, head, length, d_head"),
        ("3bhtd", "3, batch, head, length, d_head"),
        ("3bthd", "3, batch, length, head, d_head"),
        ("b3thd", "batch, 3, length, head, d_head"),
        ("bht3d", "batch, head, length, 3 · d_head"),
        ("bh3td", "batch, head, 3, length, d_head"),
    ):
        yield f"the fused projection is reshaped to [{axes}]", partial(project, order)


@mistake("split-batch-moved", "split")
def split_batch_moved() -> Forms:
    """Heads in the order head, batch instead of batch, head, for some of q, k and v."""

    def split(letters: str, layer: ReferenceLayer, rows: Tensor, n_heads: int, role: str) -> Tensor:
        heads = stages.split(layer, rows, n_heads, role)
        return heads.transpose(0, 1).reshape(heads.shape) if role in letters else heads

    for letters in ("q", "k", "v", "qk", "qv", "kv"):
        planes = f"the planes of {' and '.join(letters)} lie head after head, those of the others batch after batch"
        yield planes, partial(split, letters), tuple(letters)


# ----------------------------------------------------------------------------------------------------------------------- merging


def merged_as(order: str) -> Callable[..., Tensor]:
    """Heads merged with the axes in this order: `b` batch, `h` heads, `t` tokens, `d` columns."""

    def merge(layer: ReferenceLayer, z: Tensor) -> Tensor:
        return z.permute(["bhtd".index(axis) for axis in order]).reshape(z.shape[0], z.shape[2], -1)

    return merge


def read_as_rows(*orders: str) -> Forms:
    """Heads merged with the axes in each of these orders."""
    names = {"b": "batch", "h": "head", "t": "query", "d": "column"}
    for order in orders:
        axes = ", ".join(names[axis] for axis in order)
        yield f"the heads are read as rows in the order {axes}", merged_as(order)


@mistake("merge-without-transpose", "merge")
def merge_without_transpose() -> Forms:
    """Heads before tokens."""
    yield "[batch, head, query, d_v] is reshaped to [batch, query, head·d_v] without a transpose", merged_as("bhtd")


@mistake("merge-axis-order", "merge")
def merge_axis_order() -> Forms:
    """The axes of each sequence in another order."""
    yield from read_as_rows("bhdt", "btdh", "bdht", "bdth")


@mistake("merge-batch-moved", "merge")
def merge_batch_moved() -> Forms:
    """Planes of batch and head in the other order, or the batch behind another axis."""

    def read(layer: ReferenceLayer, z: Tensor) -> Tensor:
        return stages.merge(layer, z.reshape(z.shape[1], z.shape[0], *z.shape[2:]).transpose(0, 1))

    def laid(layer: ReferenceLayer, z: Tensor) -> Tensor:
        return stages.merge(layer, z.transpose(0, 1).reshape(z.shape))

    yield "[batch · head, query, d_v] is read as [head, batch, query, d_v]", read
    yield "[head · batch, query, d_v] is read as [batch, head, query, d_v]", laid
    yield from read_as_rows("hbtd", "htbd", "tbhd", "thbd")


@mistake("attention-over-heads", "split")
def attention_over_heads() -> Forms:
    """`[batch, length, head, d]` with heads in place of tokens: the heads of a token attend to each other."""

    def split(layer: ReferenceLayer, rows: Tensor, n_heads: int, role: str) -> Tensor:
        require(layer.n_heads == layer.n_kv_heads > 1 and not layer.interleaved_split)
        return rows.reshape(*rows.shape[:2], n_heads, -1)

    def merge_transposed(layer: ReferenceLayer, z: Tensor) -> Tensor:
        return z.transpose(1, 2).reshape(z.shape[0], z.shape[1], -1)

    as_it_is: Mapping[str, Callable[..., Tensor]] = {"split": split, "merge": lambda layer, z: z.flatten(2)}
    transposed: Mapping[str, Callable[..., Tensor]] = {"split": split, "merge": merge_transposed}
    attended = "[batch, length, head, d_head] is attended over its heads"
    yield attended, as_it_is
    yield f"{attended}, and transposed all the same when they are joined", transposed


@mistake("value-not-split", "split", site="z")
def value_not_split() -> Forms:
    """Whole value vectors for every head."""

    def split(layer: ReferenceLayer, rows: Tensor, n_heads: int, role: str) -> Tensor:
        return rows[:, None] if role == "v" else stages.split(layer, rows, n_heads, role)

    yield "each head weighs the whole rows of v", split


def joined(layer: ReferenceLayer, z: Tensor, head: Tensor) -> Tensor:
    """One head for all, repeated to the width of the output projection if necessary."""
    out = None if layer.weights is None else layer.weights.out
    return head if out is None or out.weight.shape[1] == head.shape[-1] else head.repeat(1, 1, z.shape[1])


@mistake("heads-averaged", "merge")
def heads_averaged() -> Forms:
    """The mean head."""
    yield "the heads are averaged instead of joined", lambda layer, z: joined(layer, z, z.mean(dim=1))


@mistake("heads-summed", "merge")
def heads_summed() -> Forms:
    """The sum of all heads."""
    yield "the heads are added up instead of joined", lambda layer, z: joined(layer, z, z.sum(dim=1))


# --------------------------------------------------------------------------------------------------------------------- sharing


def tiled(heads: Tensor, n_heads: int) -> Tensor:
    """KV heads repeated as 0 1 0 1 instead of 0 0 1 1."""
    return heads.repeat(1, n_heads // heads.shape[1], 1, 1)


def first_for_all(heads: Tensor, n_heads: int) -> Tensor:
    """The first head for every query head."""
    return heads[:, :1].expand(-1, n_heads, -1, -1)


def last_for_all(heads: Tensor, n_heads: int) -> Tensor:
    """The last head for every query head."""
    return heads[:, -1:].expand(-1, n_heads, -1, -1)


_ONE_HEAD = (("0", first_for_all), ("n_heads − 1", last_for_all))


def shared_as(head_choice: Callable[[Tensor, int], Tensor], letters: str = "kv") -> Callable[..., Tensor]:
    """Keys, values or both of another kv head for each query head."""

    def repeat_kv(layer: ReferenceLayer, heads: Tensor, role: str) -> Tensor:
        return head_choice(heads, layer.n_heads) if role in letters else stages.repeat_kv(layer, heads, role)

    return repeat_kv


@mistake("gqa-tiled", "repeat_kv", at=(r"\brepeat\(", r"\btile\(", r"\bcat\(", r"\bexpand\("))
def gqa_tiled() -> Forms:
    """KV heads of other groups."""
    yield "kv heads are tiled, head h reading kv head h mod n_kv_heads", shared_as(tiled)
    for name, site in (("keys", "qk"), ("values", "z")):
        heads = f"the heads of the {name} alone are tiled, head h reading kv head h mod n_kv_heads"
        yield heads, shared_as(tiled, name[0]), (site,)


@mistake("head-repeated", "merge")
def head_repeated() -> Forms:
    """Head 0 in place of all heads."""
    yield "the output of head 0 is repeated for every head", lambda layer, z: stages.merge(layer, z[:, :1].expand_as(z))


@mistake("kv-head-shared-by-all", "repeat_kv")
def kv_head_shared_by_all() -> Forms:
    """KV head 0 in place of all kv heads."""
    yield "every query head reads kv head 0", shared_as(first_for_all)


@mistake("value-of-one-head", "repeat_kv", site="z")
def value_of_one_head() -> Forms:
    """The values of one head."""
    for name, choice in _ONE_HEAD:
        yield f"every head reads the values of head {name}", shared_as(choice, "v")


@mistake("key-of-one-head", "repeat_kv", site="qk")
def key_of_one_head() -> Forms:
    """The keys of one head."""
    for name, choice in _ONE_HEAD:
        yield f"every head reads the keys of head {name}", shared_as(choice, "k")


@mistake("query-of-one-head", "products")
def query_of_one_head() -> Forms:
    """Products of one head's queries with all keys."""

    def products(choice: Callable[[Tensor, int], Tensor], layer: ReferenceLayer, q: Tensor, k: Tensor) -> Tensor:
        return choice(q, q.shape[1]) @ k.mT

    for name, choice in _ONE_HEAD:
        yield f"every head reads the queries of head {name}", partial(products, choice)


@mistake("pattern-of-one-head", "value_weights", site="z")
def pattern_of_one_head() -> Forms:
    """One pattern for all heads."""

    def first(layer: ReferenceLayer, pattern: Tensor, scaled: Tensor, keep: Tensor | None) -> Tensor:
        return pattern[:, :1].expand_as(pattern)

    def mean(layer: ReferenceLayer, pattern: Tensor, scaled: Tensor, keep: Tensor | None) -> Tensor:
        return pattern.mean(dim=1, keepdim=True).expand_as(pattern)

    yield "every head weighs by the pattern of head 0", first
    yield "every head weighs by the mean of all patterns", mean
