"""Mistakes in projections, norms and rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.stages import (
    RIGHT,
    Mistake,
    Projection,
    Projections,
    ReferenceInputs,
    ReferenceLayer,
    Stages,
    require,
    rotated,
    wrong_for,
)

_NAMES = {"v": "values", "k": "keys", "q": "queries"}


def mistakes() -> Iterator[Mistake]:
    """Queries, keys and values by other projections, by one or none, of other rows or heads, and with other norms."""
    splitting = (r"\bchunk\(", r"\bsplit\(", r"\bunbind\(", r"\btensor_split\(")
    for order in map("".join, list(permutations("qkv"))[1:]):
        words = f"{', '.join(order)} serve as q, k, v"
        yield Mistake("qkv-order", by_others(order), words, at=splitting, needs=("order",))
    for taker, giver in permutations(_NAMES, 2):  # the likeliest pair first
        name, roles = f"{_NAMES[taker]}-from-{_NAMES[giver]}", "qkv".replace(taker, giver)
        yield Mistake(name, by_others(roles), changes=f"{taker}_proj")
    for letter in "qkv":
        yield Mistake("one-projection", by_others(letter * 3), f"that of the {_NAMES[letter]}")
    for letter, of in _NAMES.items():
        code = "projection-missing" if letter == "v" else f"projection-missing, {of}"
        yield Mistake(code, changed(letter, unprojected), changes=letter)
    for code, givers in (
        ("values-of-queries", "qkq"),
        ("values-of-keys", "qkk"),
        ("keys-of-values", "qvv"),
        ("keys-of-values", "qvk"),
        ("keys-of-queries", "qqv"),
    ):
        yield Mistake(code, {"project": partial(of_rows, givers)}, changes=f"{code[0]}_proj")
    for taker, giver in permutations(_NAMES, 2):
        name = "projected-twice" if taker == "v" else f"projected-twice, {_NAMES[taker]}"
        twice = {"project": partial(projected_twice, taker, giver)}
        yield Mistake(name, twice, f"by the {_NAMES[giver]}", f"{taker}_proj")
    for letters in ("q", "v", "qkv", "qv", "qk", "kv", "k"):
        yield Mistake("bias-missing", changed(letters, unbiased), ", ".join(letters))
    yield Mistake("projection-transposed", changed("qkv", transposed))
    for taker, giver in permutations(_NAMES, 2):
        name, roles = f"{_NAMES[taker]}-from-{_NAMES[giver]}, as heads", "qkv".replace(taker, giver)
        yield Mistake(name, {"take": partial(exchanged, roles)}, changes="z" if taker == "v" else "qk")
    yield Mistake("bias-missing, of the output", changed(["out"], unbiased, "project_out"))
    yield Mistake("out-proj-missing", {"project_out": lambda layer, rows: rows}, changes="concat")
    yield Mistake("out-proj-transposed", changed(["out"], transposed, "project_out"))
    yield from of_rotations()
    yield Mistake("qk-norm-of-one", wrong_for("k", "norm", unchanged), "the keys are not", "k")
    yield Mistake("qk-norm-of-one", wrong_for("q", "norm", unchanged), "the queries are not")


def of_rotations() -> Iterator[Mistake]:
    """Columns that are paired otherwise than their angles, and queries or keys at other positions, by other angles, or not at
    all."""
    halves = "neighbouring columns are rotated by angles laid out for halves"
    neighbours = "halves are rotated by angles laid out for neighbouring columns"
    for letters, code, rotate, detail in (
        ("qk", "rope-pairing", partial(rotated, pairing="interleaved", angles="half"), halves),
        ("qk", "rope-pairing", partial(rotated, pairing="half", angles="interleaved"), neighbours),
        ("k", "rope-of-queries-only", unchanged, ""),
        ("q", "rope-of-keys-only", unchanged, ""),
        (
            "q",
            "rope-offset",
            lambda layer, heads, start, role: rotated(layer, heads, start + 1),
            "queries one place too far",
        ),
        (
            "q",
            "rope-offset",
            lambda layer, heads, start, role: rotated(layer, heads, start - 1),
            "keys one place too far",
        ),
        ("qk", "rope-axis", by_head, ""),
        ("qk", "rope-rates", partial(at_rates, torch.reciprocal), "they grow by theta^(2j/d)"),
        ("qk", "rope-rates", partial(at_rates, torch.ones_like), "all pairs are rotated by one angle"),
        ("k", "rope-sign", partial(rotated, sign=-1), ""),
        ("qk", "rope-without-minus", one_signed, ""),
    ):
        yield Mistake(code, wrong_for(letters, "rotate", rotate), detail, letters[0])
    yield Mistake("rope-pairing", {"rotate": other_pairing}, "in the other of the two ways", needs=("pairing",))
    of_values = {"take": lambda layer, q, k, v: (q, k, rotated(layer, v, 0))}
    yield Mistake("rope-of-values", of_values, changes="v")


# ----------------------------------------------------------------------------------------------------------------- projections


def in_order(givers: str, qkv: Sequence[Any]) -> list[Any]:
    """What stands for these roles, of what stands for q, k and v: `qkk` takes that of the keys for the values."""
    return [qkv["qkv".index(giver)] for giver in givers]


def changed(names: Sequence[str], change: Callable[[Projection], Projection], stage: str = "project") -> Stages:
    """A stage with some projections changed."""

    def wrong(layer: ReferenceLayer, rows: Any) -> Any:
        assert layer.weights is not None
        others = {name: change(getattr(layer.weights, name)) for name in names}
        return RIGHT[stage](replace(layer, weights=layer.weights._replace(**others)), rows)

    return {stage: wrong}


def by_others(givers: str) -> Stages:
    """Queries, keys and values by the projections of other roles."""

    def wrong(layer: ReferenceLayer, rows: ReferenceInputs) -> Any:
        assert layer.weights is not None
        return stages.project(replace(layer, weights=Projections(*in_order(givers, layer.weights))), rows)

    return {"project": wrong}


def unprojected(projection: Projection) -> Projection:
    """A projection that leaves vectors as they are."""
    return Projection(torch.eye(projection.weight.shape[1]).to(projection.weight))


def unbiased(projection: Projection) -> Projection:
    """A projection without its bias."""
    return projection._replace(bias=None)


def transposed(projection: Projection) -> Projection:
    """A projection whose weight is applied transposed."""
    return projection._replace(weight=projection.weight.mT)


def of_rows(givers: str, layer: ReferenceLayer, rows: ReferenceInputs) -> Sequence[Tensor]:
    """Queries, keys and values of the rows of other arguments."""
    return stages.project(layer, ReferenceInputs(*in_order(givers, rows)))


def projected_twice(taker: str, giver: str, layer: ReferenceLayer, rows: ReferenceInputs) -> Sequence[Tensor]:
    """Queries, keys and values, of which one reads another instead of rows."""
    made = dict(zip("qkv", stages.project(layer, rows), strict=True))
    made[taker] = getattr(layer.weights, taker)(made[giver])
    return [*made.values()]


def exchanged(givers: str, layer: ReferenceLayer, *heads: Tensor) -> list[Tensor]:
    """Heads in other roles."""
    require(len({each.shape[1] for each in heads}) == 1)
    return in_order(givers, heads)


# ------------------------------------------------------------------------------------------------------------ rotary positions


def unchanged(layer: ReferenceLayer, heads: Tensor, *_: Any) -> Tensor:
    """Heads that are neither rotated nor normalised."""
    return heads


def other_pairing(layer: ReferenceLayer, heads: Tensor, start: int, role: str) -> Tensor:
    """Heads rotated in the other pairing."""
    return rotated(layer, heads, start, pairing="interleaved" if layer.pairing == "half" else "half")


def by_head(layer: ReferenceLayer, heads: Tensor, start: int, role: str) -> Tensor:
    """Heads rotated by their number."""
    return rotated(layer, heads.transpose(1, 2), 0).transpose(1, 2)


def at_rates(rates: Callable[[Tensor], Tensor], layer: ReferenceLayer, heads: Tensor, start: int, role: str) -> Tensor:
    """Heads rotated by other angles, from the right ones."""
    d = heads.shape[-1]
    require(layer.rates is None and d >= 4)
    right = layer.theta ** -(torch.arange(0, d, 2, dtype=heads.dtype, device=heads.device) / d)
    return stages.rotate(replace(layer, rates=rates(right)), heads, start, role)


def one_signed(layer: ReferenceLayer, heads: Tensor, start: int, role: str) -> Tensor:
    """Heads with the sine of the same sign in both columns of a pair."""
    column = torch.arange(heads.shape[-1], device=heads.device)
    is_first = column < heads.shape[-1] // 2 if layer.pairing == "half" else column % 2 == 0
    backwards, forwards = rotated(layer, heads, start, sign=-1), rotated(layer, heads, start)
    return torch.where(is_first, backwards, forwards)
