"""Mistakes in projections, norms and rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.stages import (
    Forms,
    Pairing,
    Projection,
    ReferenceInputs,
    ReferenceLayer,
    inputs_of,
    mistakes,
    require,
    rotated,
)

_NAMES = {"v": "values", "k": "keys", "q": "queries"}

# ----------------------------------------------------------------------------------------------------------- projection roles


def projected(projections: str, inputs: str, layer: ReferenceLayer, rows: ReferenceInputs) -> list[Tensor]:
    """Queries, keys and values with these projections, of these inputs: `qkk` takes those of the keys for the values."""
    by_letter = dict(zip("qkv", zip(inputs_of(layer), rows[:3], strict=True), strict=True))
    return [by_letter[p][0](by_letter[i][1]) for p, i in zip(projections, inputs, strict=True)]


def projected_twice(taker: str, giver: str, layer: ReferenceLayer, rows: ReferenceInputs) -> list[Tensor]:
    """Queries, keys and values, of which one reads another instead of rows."""
    made = dict(zip("qkv", stages.project(layer, rows), strict=True))
    made[taker] = inputs_of(layer)["qkv".index(taker)](made[giver])
    return [*made.values()]


def changed(
    letters: str, change: Callable[[Projection], Any], layer: ReferenceLayer, rows: ReferenceInputs
) -> list[Tensor]:
    """Queries, keys and values with the projections of these letters changed."""
    roles = zip("qkv", inputs_of(layer), rows[:3], strict=True)
    return [(change(p) if letter in letters else p)(vectors) for letter, p, vectors in roles]


@mistakes("project", at=(r"\bchunk\(", r"\bsplit\(", r"\bunbind\(", r"\btensor_split\("), needs=("order",))
def qkv_order() -> Forms:
    """The parts of a fused projection in other roles."""
    for order in list(permutations("qkv"))[1:]:
        roles = "".join("qkv"[order.index(letter)] for letter in "qkv")
        yield "qkv-order", f"what is named q, k, v is used as {', '.join(order)}", partial(projected, roles, "qkv")


@mistakes("project")
def projections() -> Forms:
    """Queries, keys and values by other projections, by one or none, or of other rows."""
    for taker, giver in permutations(_NAMES, 2):  # the likeliest pair first
        name, roles = f"{_NAMES[taker]}-from-{_NAMES[giver]}", "qkv".replace(taker, giver)
        sentence = f"the {_NAMES[taker]} are made by the projection of the {_NAMES[giver]}"
        yield name, sentence, partial(projected, roles, "qkv"), (f"{taker}_proj",)
    for letter in "qkv":
        sentence = f"queries, keys and values are made by the projection of the {_NAMES[letter]}"
        yield "one-projection", sentence, partial(projected, letter * 3, "qkv")
    for letter, name in _NAMES.items():
        code = "projection-missing" if letter == "v" else f"projection-missing, {name}"
        unprojected = partial(changed, letter, lambda projection: lambda vectors: vectors)
        yield code, f"the rows are taken for the {name} as they are", unprojected, (letter,)
    for code, sentence, inputs in (
        ("values-of-queries", "the values come from the rows of the queries", "qkq"),
        ("values-of-keys", "the values come from the rows of the keys", "qkk"),
        ("keys-of-values", "the keys come from the rows of the values", "qvv"),
        ("keys-of-values", "keys and values come from each other's rows", "qvk"),
        ("keys-of-queries", "the keys come from the rows of the queries", "qqv"),
    ):
        yield code, sentence, partial(projected, "qkv", inputs), (f"{code[0]}_proj",)
    for taker, giver in permutations(_NAMES, 2):
        sentence = f"the {_NAMES[taker]} are made of the {_NAMES[giver]} that are projected already"
        name = "projected-twice" if taker == "v" else f"projected-twice, {_NAMES[taker]}"
        yield name, sentence, partial(projected_twice, taker, giver), (f"{taker}_proj",)
    for letters in ("q", "v", "qkv", "qv", "qk", "kv", "k"):
        unbiased = partial(changed, letters, lambda projection: projection._replace(bias=None))
        yield "bias-missing", f"the bias of {', '.join(letters)} is left out", unbiased
    transposed = partial(changed, "qkv", lambda projection: projection._replace(weight=projection.weight.mT))
    yield "projection-transposed", "the weights of queries, keys and values are applied transposed", transposed


@mistakes("take")
def exchanged() -> Forms:
    """Heads in other roles."""

    def take(roles: str, layer: ReferenceLayer, *heads: Tensor) -> list[Tensor]:
        require(len({each.shape[1] for each in heads}) == 1)
        return [heads["qkv".index(letter)] for letter in roles]

    for taker, giver in permutations(_NAMES, 2):
        sentence = f"the {_NAMES[giver]} take the place of the {_NAMES[taker]}"
        name, roles = f"{_NAMES[taker]}-from-{_NAMES[giver]}, as heads", "qkv".replace(taker, giver)
        yield name, sentence, partial(take, roles), ("z" if taker == "v" else "qk",)


def out_with(change: Callable[[Projection], Projection], layer: ReferenceLayer, rows: Tensor) -> Tensor:
    """The output with another weight or bias of its projection."""
    assert layer.weights is not None
    assert layer.weights.out is not None
    return change(layer.weights.out)(rows)


@mistakes("project_out")
def output() -> Forms:
    """The output projected otherwise, or not at all."""
    unbiased = partial(out_with, lambda out: out._replace(bias=None))
    yield "bias-missing, of the output", "the bias of the output projection is left out", unbiased
    yield "out-proj-missing", "the heads side by side are returned as they are", lambda layer, rows: rows, ("concat",)
    transposed = partial(out_with, lambda out: out._replace(weight=out.weight.mT))
    yield "out-proj-transposed", "the output projection's weight is applied transposed", transposed


# ------------------------------------------------------------------------------------------------------------ rotary positions


def turned(layer: ReferenceLayer, t: Tensor, start: int, *, pairing: Pairing | None = None, **turn: Any) -> Tensor:
    """Queries, keys or values rotated from a position on, otherwise than the layer does as `rotated` describes it."""
    assert layer.pairing is not None
    return rotated(t, layer, start, pairing or layer.pairing, **turn)


def both_turned(layer: ReferenceLayer, q: Tensor, k: Tensor, *, q_shift: int = 0, **turn: Any) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated otherwise, or queries by so many positions more."""
    return turned(layer, q, k.shape[2] - q.shape[2] + q_shift, **turn), turned(layer, k, 0, **turn)


def other_pairing(layer: ReferenceLayer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated in the other pairing."""
    return both_turned(layer, q, k, pairing="interleaved" if layer.pairing == "half" else "half")


def by_head(layer: ReferenceLayer, q: Tensor, k: Tensor) -> Sequence[Tensor]:
    """Queries and keys rotated by the number of their head."""
    return [turned(layer, heads.transpose(1, 2), 0).transpose(1, 2) for heads in (q, k)]


def at_rates(rates: Callable[[Tensor], Tensor], layer: ReferenceLayer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated by other angles, from the right ones."""
    d = q.shape[-1]
    require(layer.rates is None and d >= 4)
    right = layer.theta ** -(torch.arange(0, d, 2, dtype=q.dtype, device=q.device) / d)
    return stages.rotate(replace(layer, rates=rates(right)), q, k)


def one_signed(layer: ReferenceLayer, q: Tensor, k: Tensor) -> list[Tensor]:
    """Queries and keys with the sine of the same sign in both columns of a pair."""
    column = torch.arange(q.shape[-1], device=q.device)
    is_first = column < q.shape[-1] // 2 if layer.pairing == "half" else column % 2 == 0
    pairs = zip(both_turned(layer, q, k, sign=-1), both_turned(layer, q, k), strict=True)
    return [torch.where(is_first, backwards, forwards) for backwards, forwards in pairs]


@mistakes("rotate")
def rotation() -> Forms:
    """Columns that are paired otherwise than their angles, and queries or keys at other positions, by other angles, or not at
    all."""
    halves = "neighbouring columns are rotated by angles laid out for halves"
    yield "rope-pairing", halves, partial(both_turned, pairing="interleaved", angles="half")
    neighbours = "halves are rotated by angles laid out for neighbouring columns"
    yield "rope-pairing", neighbours, partial(both_turned, pairing="half", angles="interleaved")
    keys_left = "the keys are not rotated"
    yield "rope-of-queries-only", keys_left, lambda layer, q, k: (stages.rotate(layer, q, k)[0], k), ("k",)
    queries_left = "the queries are not rotated"
    yield "rope-of-keys-only", queries_left, lambda layer, q, k: (q, stages.rotate(layer, q, k)[1])
    yield "rope-offset", "queries are rotated one place too far", partial(both_turned, q_shift=1)
    yield "rope-offset", "keys are rotated one place too far", partial(both_turned, q_shift=-1)
    yield "rope-axis", "the number of the head is taken for the place", by_head
    yield "rope-rates", "the angles grow from pair to pair by theta^(2j/d)", partial(at_rates, torch.reciprocal)
    yield "rope-rates", "all pairs are rotated by one angle", partial(at_rates, torch.ones_like)
    backwards = "keys are rotated backwards"
    yield (
        "rope-sign",
        backwards,
        lambda layer, q, k: (stages.rotate(layer, q, k)[0], turned(layer, k, 0, sign=-1)),
        ("k",),
    )
    yield "rope-without-minus", "no column of a pair is rotated with a minus", one_signed


@mistakes("rotate", needs=("pairing",))
def rope_other_pairing() -> Forms:
    """The other pairing."""
    yield "rope-pairing", "columns are paired in the other of the two ways", other_pairing


@mistakes("take")
def rope_of_values() -> Forms:
    """Rotated values."""
    yield "rope-of-values", "the values are rotated too", lambda layer, q, k, v: (q, k, turned(layer, v, 0)), ("v",)


# --------------------------------------------------------------------------------------------------- norms of queries and keys


def normed_as(of_q: str, of_k: str, layer: ReferenceLayer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with the norm of queries or keys, `q` or `k`, or without one, empty."""
    norms = {"q": layer.q_norm, "k": layer.k_norm, "": None}
    return stages.norm(replace(layer, q_norm=norms[of_q], k_norm=norms[of_k]), q, k)


@mistakes("norm")
def norms() -> Forms:
    """One norm for queries and keys, or none."""
    yield "qk-norm-shared", "the keys are normalised by the norm of the queries", partial(normed_as, "q", "q"), ("k",)
    yield "qk-norm-shared", "the queries are normalised by the norm of the keys", partial(normed_as, "k", "k")
    yield "qk-norm-of-one", "the keys are not normalised", partial(normed_as, "q", ""), ("k",)
    yield "qk-norm-of-one", "the queries are not normalised", partial(normed_as, "", "k")
