"""Mistakes in splitting vectors into heads, sharing kv heads, and merging heads."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.stages import (
    Mistake,
    MistakeVariant,
    ReferenceInputs,
    ReferenceLayer,
    Symptoms,
    inputs_of,
    out_of,
    require,
)

# -------------------------------------------------------------------------------------------------------------------- splitting


def split_flat(*letters: str) -> Callable[..., Tensor]:
    """Vectors split into heads by a reshape without a transpose, for some of q, k and v."""

    def split(layer: ReferenceLayer, rows: Tensor, n_heads: int, role: str) -> Tensor:
        require(n_heads > 1)
        if role not in letters:
            return stages.split(layer, rows, n_heads, role)
        return rows.reshape(rows.shape[0], n_heads, rows.shape[1], -1)

    return split


def fused_read(order: str) -> Callable[..., tuple[Tensor, ...]]:
    """A fused projection reshaped to axes in the wrong order: `b` batch, `3` queries, keys and values, `h` heads, `t` tokens,
    `d` columns."""

    def project(layer: ReferenceLayer, rows: ReferenceInputs) -> tuple[Tensor, ...]:
        require(layer.n_heads == layer.n_kv_heads > 1 and not layer.interleaved_split)
        fused = torch.cat([projection(rows.queries) for projection in inputs_of(layer)], dim=-1)
        sizes = {"b": fused.shape[0], "3": 3, "h": layer.n_heads, "t": fused.shape[1], "d": -1}
        reshaped = fused.reshape([sizes[axis] for axis in order])
        return tuple(part.flatten(2) for part in reshaped.permute([order.index(axis) for axis in "3bthd"]).unbind(0))

    return project


def planes_split(*letters: str) -> Callable[..., Tensor]:
    """Heads in the order head, batch instead of batch, head, for some of q, k and v."""

    def split(layer: ReferenceLayer, rows: Tensor, n_heads: int, role: str) -> Tensor:
        heads = stages.split(layer, rows, n_heads, role)
        require(rows.shape[0] > 1 and n_heads > 1)
        return heads.transpose(0, 1).reshape(heads.shape) if role in letters else heads

    return split


_SPLITTING = (
    Mistake(
        "split-without-transpose",
        "split",
        (
            MistakeVariant(
                "q, k and v are split into heads by a reshape alone", split_flat("q", "k", "v"), ("q", "k", "v")
            ),
            MistakeVariant("v is split into heads by a reshape alone", split_flat("v"), ("v",)),
            MistakeVariant("q and k are split into heads by a reshape alone", split_flat("q", "k"), ("q", "k")),
            MistakeVariant("k and v are split into heads by a reshape alone", split_flat("k", "v"), ("k", "v")),
            MistakeVariant("q is split into heads by a reshape alone", split_flat("q"), ("q",)),
            MistakeVariant("q and v are split into heads by a reshape alone", split_flat("q", "v"), ("q", "v")),
            MistakeVariant("k is split into heads by a reshape alone", split_flat("k"), ("k",)),
        ),
    ),
    Mistake(
        "split-without-transpose",
        "project",
        form="fused",
        variants=tuple(
            MistakeVariant(f"the fused projection is reshaped to [{axes}]", fused_read(order))
            for order, axes in (
                ("b3htd", "batch, 3, head, length, d_head"),
                ("3bhtd", "3, batch, head, length, d_head"),
                ("3bthd", "3, batch, length, head, d_head"),
                ("b3thd", "batch, 3, length, head, d_head"),
                ("bht3d", "batch, head, length, 3 · d_head"),
                ("bh3td", "batch, head, 3, length, d_head"),
            )
        ),
        site="q",
    ),
    Mistake(
        "split-batch-moved",
        "split",
        tuple(
            MistakeVariant(
                f"the planes of {' and '.join(of)} lie head after head, those of the others batch after batch",
                planes_split(*of),
                of,
            )
            for of in (("q",), ("k",), ("v",), ("q", "k"), ("q", "v"), ("k", "v"))
        ),
    ),
)


# ----------------------------------------------------------------------------------------------------------------------- merging


def merged_as(order: str) -> Callable[..., Tensor]:
    """Heads merged with the axes in this order: `b` batch, `h` heads, `t` tokens, `d` columns."""

    def merge(layer: ReferenceLayer, z: Tensor) -> Tensor:
        require(z.shape[1] > 1)
        return z.permute(["bhtd".index(axis) for axis in order]).reshape(z.shape[0], z.shape[2], -1)

    return merge


def planes_read(layer: ReferenceLayer, z: Tensor) -> Tensor:
    """Merged heads, with planes in the order batch, head read as head, batch."""
    batch, n_heads = z.shape[:2]
    require(n_heads > 1 and batch > 1)
    return stages.merge(layer, z.reshape(n_heads, batch, *z.shape[2:]).transpose(0, 1))


def planes_laid(layer: ReferenceLayer, z: Tensor) -> Tensor:
    """Merged heads, with planes in the order head, batch read as batch, head."""
    require(z.shape[0] > 1 and z.shape[1] > 1)
    return stages.merge(layer, z.transpose(0, 1).reshape(z.shape))


_MERGING = (
    Mistake(
        "merge-without-transpose",
        "merge",
        (
            MistakeVariant(
                "[batch, head, query, d_v] is reshaped to [batch, query, head·d_v] without a transpose",
                merged_as("bhtd"),
            ),
        ),
    ),
    Mistake(
        "merge-axis-order",
        "merge",
        tuple(
            MistakeVariant(f"the heads are read as rows in the order {axes}", merged_as(order))
            for order, axes in (
                ("bhdt", "batch, head, column, query"),
                ("btdh", "batch, query, column, head"),
                ("bdht", "batch, column, head, query"),
                ("bdth", "batch, column, query, head"),
            )
        ),
    ),
    Mistake(
        "merge-batch-moved",
        "merge",
        (
            MistakeVariant("[batch · head, query, d_v] is read as [head, batch, query, d_v]", planes_read),
            MistakeVariant("[head · batch, query, d_v] is read as [batch, head, query, d_v]", planes_laid),
            *(
                MistakeVariant(f"the heads are read as rows in the order {axes}", merged_as(order))
                for order, axes in (
                    ("hbtd", "head, batch, query, column"),
                    ("htbd", "head, query, batch, column"),
                    ("tbhd", "query, batch, head, column"),
                    ("thbd", "query, head, batch, column"),
                )
            ),
        ),
    ),
)


def heads_as_tokens(layer: ReferenceLayer, rows: Tensor, n_heads: int, role: str) -> Tensor:
    """`[batch, length, head, d]` with heads in place of tokens: the heads of a token attend to each other."""
    require(layer.n_heads == layer.n_kv_heads > 1 and not layer.interleaved_split)
    return rows.reshape(*rows.shape[:2], n_heads, -1)


def values_whole(layer: ReferenceLayer, rows: Tensor, n_heads: int, role: str) -> Tensor:
    """Heads, but whole value vectors for every head."""
    require(n_heads > 1)
    return rows[:, None] if role == "v" else stages.split(layer, rows, n_heads, role)


_NOT_SPLIT = (
    Mistake(
        "attention-over-heads",
        "split",
        (
            MistakeVariant(
                "[batch, length, head, d_head] is attended over its heads",
                heads_as_tokens,
                besides={"merge": lambda layer, z: z.flatten(2)},
            ),
            MistakeVariant(
                "[batch, length, head, d_head] is attended over its heads, and transposed all the same when they are joined",
                heads_as_tokens,
                besides={"merge": lambda layer, z: z.transpose(1, 2).reshape(z.shape[0], z.shape[1], -1)},
            ),
        ),
    ),
    Mistake(
        "value-not-split",
        "split",
        (MistakeVariant("each head weighs the whole rows of v", values_whole),),
        site="z",
    ),
)


def heads_as(reduced: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """One head from all by a mean or a sum, repeated to the width of the output projection if necessary."""

    def merge(layer: ReferenceLayer, z: Tensor) -> Tensor:
        require(z.shape[1] > 1)
        single = reduced(z)
        has_out = layer.weights is not None and layer.weights.out is not None
        return (
            single
            if not has_out or out_of(layer).weight.shape[1] == single.shape[-1]
            else single.repeat(1, 1, z.shape[1])
        )

    return merge


_REDUCED = (
    Mistake(
        "heads-averaged",
        "merge",
        (MistakeVariant("the heads are averaged instead of joined", heads_as(lambda z: z.mean(dim=1))),),
    ),
    Mistake(
        "heads-summed",
        "merge",
        (MistakeVariant("the heads are added up instead of joined", heads_as(lambda z: z.sum(dim=1))),),
    ),
)


# --------------------------------------------------------------------------------------------------------------------- sharing


def shared_as(head_choice: Callable[[Tensor, int], Tensor], letters: str = "kv") -> Callable[..., Tensor]:
    """Keys, values or both of another kv head for each query head."""

    def repeat_kv(layer: ReferenceLayer, heads: Tensor, role: str) -> Tensor:
        require(heads.shape[1] > 1)
        return head_choice(heads, layer.n_heads) if role in letters else stages.repeat_kv(layer, heads, role)

    return repeat_kv


def tiled(heads: Tensor, n_heads: int) -> Tensor:
    """KV heads repeated as 0 1 0 1 instead of 0 0 1 1."""
    require(heads.shape[1] != n_heads)
    return heads.repeat(1, n_heads // heads.shape[1], 1, 1)


_TILED = (
    Mistake(
        "gqa-tiled",
        "repeat_kv",
        (
            MistakeVariant("kv heads are tiled, head h reading kv head h mod n_kv_heads", shared_as(tiled)),
            *(
                MistakeVariant(
                    f"the heads of the {name} alone are tiled, head h reading kv head h mod n_kv_heads",
                    shared_as(tiled, letter),
                    (site,),
                )
                for letter, name, site in (("k", "keys", "qk"), ("v", "values", "z"))
            ),
        ),
        operations=("repeat", "tile", "cat", "expand"),
    ),
)


def repeated_head(layer: ReferenceLayer, z: Tensor) -> Tensor:
    """Head 0 repeated in place of all heads."""
    require(z.shape[1] > 1)
    return stages.merge(layer, z[:, :1].expand_as(z))


def first_for_all(heads: Tensor, n_heads: int) -> Tensor:
    """The first head for every query head."""
    return heads[:, :1].expand(-1, n_heads, -1, -1)


def last_for_all(heads: Tensor, n_heads: int) -> Tensor:
    """The last head for every query head."""
    return heads[:, -1:].expand(-1, n_heads, -1, -1)


def queries_of_one_head(head_choice: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """Products of one head's queries with all keys."""

    def products(layer: ReferenceLayer, q: Tensor, k: Tensor) -> Tensor:
        require(q.shape[1] > 1)
        return head_choice(q, q.shape[1]) @ k.mT

    return products


def patterns_as(head_choice: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """One pattern for all heads."""

    def value_weights(layer: ReferenceLayer, pattern: Tensor, scaled: Tensor, keep: Tensor | None) -> Tensor:
        require(pattern.shape[1] > 1)
        return head_choice(pattern, pattern.shape[1])

    return value_weights


def mean_for_all(heads: Tensor, n_heads: int) -> Tensor:
    """The mean head for every query head."""
    return heads.mean(dim=1, keepdim=True).expand(-1, n_heads, -1, -1)


_SHARED = (
    Mistake(
        "head-repeated",
        "merge",
        (MistakeVariant("the output of head 0 is repeated for every head", repeated_head),),
    ),
    Mistake(
        "kv-head-shared-by-all",
        "repeat_kv",
        (MistakeVariant("every query head reads kv head 0", shared_as(first_for_all)),),
    ),
    *(
        Mistake(
            f"{singular}-of-one-head",
            stage,
            tuple(
                MistakeVariant(f"every head reads the {plural} of head {name}", replacement_for(chosen))
                for name, chosen in (("0", first_for_all), ("n_heads − 1", last_for_all))
            ),
            site=site,
        )
        for singular, plural, stage, site, replacement_for in (
            ("value", "values", "repeat_kv", "z", functools.partial(shared_as, letters="v")),
            ("key", "keys", "repeat_kv", "qk", functools.partial(shared_as, letters="k")),
            ("query", "queries", "products", "qk", queries_of_one_head),
        )
    ),
    Mistake(
        "pattern-of-one-head",
        "value_weights",
        (
            MistakeVariant("every head weighs by the pattern of head 0", patterns_as(first_for_all)),
            MistakeVariant("every head weighs by the mean of all patterns", patterns_as(mean_for_all)),
        ),
        site="z",
    ),
)


# ------------------------------------------------------------------------------------------------------------ found by probes


def _as_wide_as_one_head(symptoms: Symptoms) -> str | None:
    n_heads, layer = symptoms.n_heads, symptoms.layer
    if n_heads == 1:
        return None
    if symptoms.query_width * n_heads == symptoms.d_in and symptoms.joins_heads and not symptoms.may_be_narrow:
        widths = f"{symptoms.query_name} makes {symptoms.query_width} columns of {symptoms.d_in}"
        return f"{widths}; {n_heads} heads of {symptoms.query_width} columns are {symptoms.d_in}"
    is_exchanged = layer is not None and layer.d_head == n_heads and layer.n_heads != n_heads
    if layer is None or not is_exchanged or _is_never_split(symptoms):
        return None
    stated = f"{n_heads} heads of {layer.n_heads} columns are given"
    return f"matches exactly if there are {layer.n_heads} heads of {n_heads} columns, where {stated}"


def _is_never_split(symptoms: Symptoms) -> str | None:
    if symptoms.n_heads == 1 or symptoms.layer is None or symptoms.layer.n_heads > 1 or not symptoms.joins_heads:
        return None
    return f"matches exactly if there is one head, where {symptoms.n_heads} are given"


_WIDTHS = (
    Mistake(
        "head-width",
        site="q",
        symptom=_as_wide_as_one_head,
    ),
    Mistake(
        "heads-missing",
        site="qk",
        symptom=_is_never_split,
    ),
)


HEADS = (*_SPLITTING, *_MERGING, *_NOT_SPLIT, *_REDUCED, *_TILED, *_SHARED, *_WIDTHS)
