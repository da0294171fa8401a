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
    Form,
    Forms,
    Pairing,
    Projection,
    Projections,
    ReferenceInputs,
    ReferenceLayer,
    mistakes,
    require,
    rotated,
)

Change = Callable[[Projections], Projections]
_NAMES = {"v": "values", "k": "keys", "q": "queries"}

# ----------------------------------------------------------------------------------------------------------- projection roles


def with_weights(stage: Callable[..., Any], change: Change) -> Callable[..., Any]:
    """A stage with other projections."""
    return lambda layer, rows: stage(replace(layer, weights=change(layer.weights)), rows)


def of_roles(givers: str) -> Change:
    """The projections of other roles: `qkk` takes those of the keys for the values."""
    return lambda weights: weights._replace(
        **{role: getattr(weights, of) for role, of in zip("qkv", givers, strict=True)}
    )


def each(names: Sequence[str], change: Callable[[Projection], Projection]) -> Change:
    """Some projections changed."""
    return lambda weights: weights._replace(**{name: change(getattr(weights, name)) for name in names})


def unbiased(projection: Projection) -> Projection:
    """A projection without its bias."""
    return projection._replace(bias=None)


def transposed(projection: Projection) -> Projection:
    """A projection whose weight is applied transposed."""
    return projection._replace(weight=projection.weight.mT)


def of_rows(givers: str, layer: ReferenceLayer, rows: ReferenceInputs) -> Sequence[Tensor]:
    """Queries, keys and values of the rows of other arguments: `qkk` takes those of the keys for the values."""
    by_role = {"q": rows.queries, "k": rows.keys, "v": rows.values}
    queries, keys, values = (by_role[giver] for giver in givers)
    return stages.project(layer, ReferenceInputs(queries, keys, values))


def projected_twice(taker: str, giver: str, layer: ReferenceLayer, rows: ReferenceInputs) -> Sequence[Tensor]:
    """Queries, keys and values, of which one reads another instead of rows."""
    assert layer.weights is not None
    made = dict(zip("qkv", stages.project(layer, rows), strict=True))
    made[taker] = getattr(layer.weights, taker)(made[giver])
    return [*made.values()]


@mistakes("project", at=(r"\bchunk\(", r"\bsplit\(", r"\bunbind\(", r"\btensor_split\("), needs=("order",))
def qkv_order() -> Forms:
    """The parts of a fused projection in other roles."""
    for order in map("".join, list(permutations("qkv"))[1:]):
        yield Form("qkv-order", with_weights(stages.project, of_roles(order)), f"{', '.join(order)} serve as q, k, v")


@mistakes("project")
def projections() -> Forms:
    """Queries, keys and values by other projections, by one or none, or of other rows."""
    for taker, giver in permutations(_NAMES, 2):  # the likeliest pair first
        roles = of_roles("qkv".replace(taker, giver))
        name, site = f"{_NAMES[taker]}-from-{_NAMES[giver]}", f"{taker}_proj"
        yield Form(name, with_weights(stages.project, roles), site=site)
    for letter in "qkv":
        yield Form(
            "one-projection", with_weights(stages.project, of_roles(letter * 3)), f"that of the {_NAMES[letter]}"
        )
    for letter, name in _NAMES.items():
        code = "projection-missing" if letter == "v" else f"projection-missing, {name}"
        unprojected = each(
            letter, lambda projection: Projection(torch.eye(projection.weight.shape[1]).to(projection.weight))
        )
        yield Form(code, with_weights(stages.project, unprojected), site=letter)
    for code, inputs in (
        ("values-of-queries", "qkq"),
        ("values-of-keys", "qkk"),
        ("keys-of-values", "qvv"),
        ("keys-of-values", "qvk"),
        ("keys-of-queries", "qqv"),
    ):
        yield Form(code, partial(of_rows, inputs), site=f"{code[0]}_proj")
    for taker, giver in permutations(_NAMES, 2):
        name = "projected-twice" if taker == "v" else f"projected-twice, {_NAMES[taker]}"
        yield Form(name, partial(projected_twice, taker, giver), f"by the {_NAMES[giver]}", f"{taker}_proj")
    for letters in ("q", "v", "qkv", "qv", "qk", "kv", "k"):
        yield Form("bias-missing", with_weights(stages.project, each(letters, unbiased)), ", ".join(letters))
    yield Form("projection-transposed", with_weights(stages.project, each("qkv", transposed)))


@mistakes("take")
def exchanged() -> Forms:
    """Heads in other roles."""

    def take(roles: str, layer: ReferenceLayer, *heads: Tensor) -> list[Tensor]:
        require(len({each.shape[1] for each in heads}) == 1)
        return [heads["qkv".index(letter)] for letter in roles]

    for taker, giver in permutations(_NAMES, 2):
        name, roles = f"{_NAMES[taker]}-from-{_NAMES[giver]}, as heads", "qkv".replace(taker, giver)
        yield Form(name, partial(take, roles), site="z" if taker == "v" else "qk")


@mistakes("project_out")
def output() -> Forms:
    """The output projected otherwise, or not at all."""
    yield Form("bias-missing, of the output", with_weights(stages.project_out, each(["out"], unbiased)))
    yield Form("out-proj-missing", lambda layer, rows: rows, site="concat")
    yield Form("out-proj-transposed", with_weights(stages.project_out, each(["out"], transposed)))


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
    yield Form("rope-pairing", partial(both_turned, pairing="interleaved", angles="half"), halves)
    neighbours = "halves are rotated by angles laid out for neighbouring columns"
    yield Form("rope-pairing", partial(both_turned, pairing="half", angles="interleaved"), neighbours)
    yield Form("rope-of-queries-only", lambda layer, q, k: (stages.rotate(layer, q, k)[0], k), site="k")
    yield Form("rope-of-keys-only", lambda layer, q, k: (q, stages.rotate(layer, q, k)[1]))
    yield Form("rope-offset", partial(both_turned, q_shift=1), "queries one place too far")
    yield Form("rope-offset", partial(both_turned, q_shift=-1), "keys one place too far")
    yield Form("rope-axis", by_head)
    yield Form("rope-rates", partial(at_rates, torch.reciprocal), "they grow by theta^(2j/d)")
    yield Form("rope-rates", partial(at_rates, torch.ones_like), "all pairs are rotated by one angle")
    yield Form("rope-sign", lambda layer, q, k: (stages.rotate(layer, q, k)[0], turned(layer, k, 0, sign=-1)), site="k")
    yield Form("rope-without-minus", one_signed)


@mistakes("rotate", needs=("pairing",))
def rope_other_pairing() -> Forms:
    """The other pairing."""
    yield Form("rope-pairing", other_pairing, "in the other of the two ways")


@mistakes("take")
def rope_of_values() -> Forms:
    """Rotated values."""
    yield Form("rope-of-values", lambda layer, q, k, v: (q, k, turned(layer, v, 0)), site="v")


# --------------------------------------------------------------------------------------------------- norms of queries and keys


@mistakes("norm")
def norms() -> Forms:
    """A norm of queries or of keys alone."""
    yield Form("qk-norm-of-one", lambda layer, q, k: (stages.norm(layer, q, k)[0], k), "the keys are not", "k")
    yield Form("qk-norm-of-one", lambda layer, q, k: (q, stages.norm(layer, q, k)[1]), "the queries are not")
