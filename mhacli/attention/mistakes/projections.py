"""Mistakes in projections, norms and rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    mistake,
    require,
    rotated,
)

_LETTERS = {"values": "v", "keys": "k", "queries": "q"}
_ROLES = tuple(permutations(_LETTERS, 2))
"""A role, and the role that wrongly replaces it, the likeliest pair first."""


# ----------------------------------------------------------------------------------------------------------- projection roles


def projected(projections: str = "qkv", *, inputs: str = "qkv") -> Callable[..., tuple[Tensor, ...]]:
    """Queries, keys and values with these projections, of these inputs: `qkk` takes those of the keys for the values."""

    def project(layer: ReferenceLayer, rows: ReferenceInputs) -> tuple[Tensor, ...]:
        by_letter = dict(zip("qkv", zip(inputs_of(layer), rows[:3], strict=True), strict=True))
        return tuple(by_letter[p][0](by_letter[i][1]) for p, i in zip(projections, inputs, strict=True))

    return project


@mistake("qkv-order", "project", at=(r"\bchunk\(", r"\bsplit\(", r"\bunbind\(", r"\btensor_split\("), needs=("order",))
def qkv_order() -> Forms:
    """The parts of a fused projection in other roles."""
    for order in ("".join(letters) for letters in permutations("qkv")):
        if order != "qkv":
            roles = "".join("qkv"[order.index(letter)] for letter in "qkv")
            yield f"what is named q, k, v is used as {', '.join(order)}", projected(roles)


def add_exchanged(taker: str, giver: str) -> None:
    """Adds the mistakes in which one role takes the projection, or the heads, of another."""
    roles = "qkv".replace(_LETTERS[taker], _LETTERS[giver])

    @mistake(f"{taker}-from-{giver}", "project", site=f"{_LETTERS[taker]}_proj")
    def by_projection() -> Forms:
        yield f"the {taker} are made by the projection of the {giver}", projected(roles)

    @mistake(f"{taker}-from-{giver}", "take", form="as heads", site="z" if taker == "values" else "qk")
    def as_heads() -> Forms:
        def take(layer: ReferenceLayer, *heads: Tensor) -> list[Tensor]:
            require(len({each.shape[1] for each in heads}) == 1)
            return [heads["qkv".index(letter)] for letter in roles]

        yield f"the {giver} take the place of the {taker}", take


for _taker, _giver in _ROLES:
    add_exchanged(_taker, _giver)


@mistake("one-projection", "project")
def one_projection() -> Forms:
    """One projection in all roles."""
    for name in ("queries", "keys", "values"):
        sentence = f"queries, keys and values are made by the projection of the {name}"
        yield sentence, projected(_LETTERS[name] * 3)


def changed(letters: str, change: Callable[[Projection], Any]) -> Callable[..., list[Tensor]]:
    """Queries, keys and values with the projections of these letters changed."""

    def project(layer: ReferenceLayer, rows: ReferenceInputs) -> list[Tensor]:
        roles = zip("qkv", inputs_of(layer), rows[:3], strict=True)
        return [(change(p) if letter in letters else p)(vectors) for letter, p, vectors in roles]

    return project


def add_unprojected(name: str) -> None:
    """Adds the mistake in which a role takes its input unprojected."""

    @mistake("projection-missing", "project", form=name, site=_LETTERS[name])
    def projection_missing() -> Forms:
        unprojected = changed(_LETTERS[name], lambda projection: lambda vectors: vectors)
        yield f"the rows are taken for the {name} as they are", unprojected


for _name in _LETTERS:
    add_unprojected(_name)


def add_other_rows(code: str, sentence: str, inputs: str) -> None:
    """Adds the mistake in which a role is projected from the rows of another."""

    @mistake(code, "project", site=f"{code[0]}_proj")
    def other_rows() -> Forms:
        yield sentence, projected(inputs=inputs)


add_other_rows("values-of-queries", "the values come from the rows of the queries", "qkq")
add_other_rows("values-of-keys", "the values come from the rows of the keys", "qkk")
add_other_rows("keys-of-values", "the keys come from the rows of the values", "qvv")
add_other_rows("keys-of-values", "keys and values come from each other's rows", "qvk")
add_other_rows("keys-of-queries", "the keys come from the rows of the queries", "qqv")


# --------------------------------------------------------------------------------------------------------- weights and biases


def out_changed(**changes: Callable[[Projection], Any]) -> Callable[..., Tensor]:
    """The output with another weight or bias of its projection."""

    def project_out(layer: ReferenceLayer, rows: Tensor) -> Tensor:
        assert layer.weights is not None
        assert layer.weights.out is not None
        out = layer.weights.out
        return out._replace(**{name: change(out) for name, change in changes.items()})(rows)

    return project_out


@mistake("bias-missing", "project")
def bias_missing() -> Forms:
    """Projections without their biases."""
    for letters in ("q", "v", "qkv", "qv", "qk", "kv", "k"):
        unbiased = changed(letters, lambda projection: projection._replace(bias=None))
        yield f"the bias of {' and '.join(letters)} is left out", unbiased


@mistake("bias-missing", "project_out", form="of the output")
def bias_of_the_output_missing() -> Forms:
    """The output without its bias."""
    yield "the bias of the output projection is left out", out_changed(bias=lambda out: None)


@mistake("out-proj-missing", "project_out", site="concat")
def out_proj_missing() -> Forms:
    """The concatenated heads."""
    yield "the heads side by side are returned as they are", lambda layer, rows: rows


@mistake("out-proj-transposed", "project_out")
def out_proj_transposed() -> Forms:
    """The transposed output projection."""
    yield "the output projection's weight is applied transposed", out_changed(weight=lambda out: out.weight.mT)


@mistake("projection-transposed", "project")
def projection_transposed() -> Forms:
    """The transposed projections."""
    transposed = changed("qkv", lambda projection: projection._replace(weight=projection.weight.mT))
    yield "the weights of queries, keys and values are applied transposed", transposed


# ------------------------------------------------------------------------------------ rotary positions: vectors and columns


Turn = Mapping[str, Any]
"""How queries or keys are rotated: `shift` positions too far, with another `pairing` than the layer, with `angles` laid out for
another pairing, and backwards for `sign` −1."""


def rotated_as(q_turn: Turn | None = None, k_turn: Turn | None = None) -> Callable[..., tuple[Tensor, Tensor]]:
    """Queries and keys rotated like this, correctly for None."""

    def rotate(layer: ReferenceLayer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        past_length = k.shape[2] - q.shape[2]
        return _turned(layer, q, past_length, **q_turn or {}), _turned(layer, k, 0, **k_turn or {})

    return rotate


def _turned(
    layer: ReferenceLayer, t: Tensor, start: int, *, pairing: Pairing | None = None, shift: int = 0, **turn: Any
) -> Tensor:
    assert layer.pairing is not None
    return rotated(t, layer, start + shift, pairing or layer.pairing, **turn)


@mistake("rope-pairing", "rotate")
def rope_pairing() -> Forms:
    """Columns that are paired otherwise than their angles, or otherwise in queries than in keys."""
    neighbours, halves = {"pairing": "interleaved"}, {"pairing": "half"}
    by_halves, by_neighbours = {**neighbours, "angles": "half"}, {**halves, "angles": "interleaved"}
    yield "neighbouring columns are rotated by angles laid out for halves", rotated_as(by_halves, by_halves)
    yield "halves are rotated by angles laid out for neighbouring columns", rotated_as(by_neighbours, by_neighbours)
    yield "queries are rotated by halves and keys by neighbours", rotated_as(halves, neighbours)
    yield "queries are rotated by neighbours and keys by halves", rotated_as(neighbours, halves)


@mistake("rope-pairing", "rotate", needs=("pairing",))
def rope_other_pairing() -> Forms:
    """The other pairing."""

    def rotate(layer: ReferenceLayer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        other: Pairing = "interleaved" if layer.pairing == "half" else "half"
        return stages.rotate(replace(layer, pairing=other), q, k)

    yield "columns are paired in the other of the two ways", rotate


@mistake("rope-of-values", "take", site="v")
def rope_of_values() -> Forms:
    """Rotated values."""
    yield "the values are rotated too", lambda layer, q, k, v: (q, k, _turned(layer, v, 0))


@mistake("rope-of-queries-only", "rotate", site="k")
def rope_of_queries_only() -> Forms:
    """Keys as they are."""
    yield "the keys are not rotated", lambda layer, q, k: (stages.rotate(layer, q, k)[0], k)


@mistake("rope-of-keys-only", "rotate")
def rope_of_keys_only() -> Forms:
    """Queries as they are."""
    yield "the queries are not rotated", lambda layer, q, k: (q, stages.rotate(layer, q, k)[1])


@mistake("rope-offset", "rotate")
def rope_offset() -> Forms:
    """Positions of queries and keys that are one apart."""
    yield "queries are rotated one place too far", rotated_as(q_turn={"shift": 1})
    yield "keys are rotated one place too far", rotated_as(q_turn={"shift": -1})


# --------------------------------------------------------------------------------------------------- norms of queries and keys


def normed_as(of_q: str, of_k: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Queries and keys with the norm of queries or keys, `q` or `k`, or without one, empty."""

    def norm(layer: ReferenceLayer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        norms = {"q": layer.q_norm, "k": layer.k_norm, "": None}
        return stages.norm(replace(layer, q_norm=norms[of_q], k_norm=norms[of_k]), q, k)

    return norm


@mistake("qk-norm-shared", "norm")
def qk_norm_shared() -> Forms:
    """One norm for queries and keys."""
    yield "the keys are normalised by the norm of the queries", normed_as("q", "q"), ("k",)
    yield "the queries are normalised by the norm of the keys", normed_as("k", "k")


@mistake("qk-norm-of-one", "norm")
def qk_norm_of_one() -> Forms:
    """Queries or keys as they are."""
    yield "the keys are not normalised", normed_as("q", ""), ("k",)
    yield "the queries are not normalised", normed_as("", "k")


# ---------------------------------------------------------------------------------------------- rotary positions: their angles


@mistake("rope-axis", "rotate")
def rope_axis() -> Forms:
    """The number of a head in place of a position."""

    def rotate(layer: ReferenceLayer, q: Tensor, k: Tensor) -> Sequence[Tensor]:
        return [_turned(layer, heads.transpose(1, 2), 0).transpose(1, 2) for heads in (q, k)]

    yield "the number of the head is taken for the place", rotate


@mistake("rope-rates", "rotate")
def rope_rates() -> Forms:
    """Other angles, from the right ones."""

    def rotate(rates: Callable[[Tensor], Tensor], layer: ReferenceLayer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        d = q.shape[-1]
        require(layer.rates is None and d >= 4)
        right = layer.theta ** -(torch.arange(0, d, 2, dtype=q.dtype, device=q.device) / d)
        return stages.rotate(replace(layer, rates=rates(right)), q, k)

    yield "the angles grow from pair to pair by theta^(2j/d)", partial(rotate, torch.reciprocal)
    yield "all pairs are rotated by one angle", partial(rotate, torch.ones_like)


@mistake("rope-sign", "rotate", site="k")
def rope_sign() -> Forms:
    """Keys rotated backwards."""
    yield "keys are rotated backwards", rotated_as(k_turn={"sign": -1})


@mistake("rope-without-minus", "rotate")
def rope_without_minus() -> Forms:
    """The sine with the same sign in both columns of a pair."""

    def one_signed(layer: ReferenceLayer, t: Tensor, start: int) -> Tensor:
        column = torch.arange(t.shape[-1], device=t.device)
        is_first = column < t.shape[-1] // 2 if layer.pairing == "half" else column % 2 == 0
        return torch.where(is_first, _turned(layer, t, start, sign=-1), _turned(layer, t, start))

    def rotate(layer: ReferenceLayer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return one_signed(layer, q, k.shape[2] - q.shape[2]), one_signed(layer, k, 0)

    yield "no column of a pair is rotated with a minus", rotate
