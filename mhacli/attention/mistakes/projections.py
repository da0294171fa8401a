"""Mistakes in projections, norms and rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.stages import (
    Inapplicable,
    Mistake,
    MistakeVariant,
    Pairing,
    ReferenceInputs,
    ReferenceLayer,
    inputs_of,
    out_of,
    require,
    rotated,
)

_USED_TWICE = tuple(permutations(("values", "keys", "queries"), 2))
"""A role, and the role that wrongly replaces it, the likeliest pair first."""


# ----------------------------------------------------------------------------------------------------------- projection roles


OTHER_ORDERS = tuple("".join(order) for order in permutations("qkv") if "".join(order) != "qkv")


def projected(projections_by_role: str = "qkv", *, inputs_by_role: str = "qkv") -> Callable[..., tuple[Tensor, ...]]:
    """Queries, keys and values computed with the projections `by` from the inputs `of`: `qkk` uses the projection, or the
    input, of the keys for the values."""

    def project(layer: ReferenceLayer, rows: ReferenceInputs) -> tuple[Tensor, ...]:
        projections = dict(zip("qkv", inputs_of(layer), strict=True))
        inputs = dict(zip("qkv", rows[:3], strict=True))
        return tuple(projections[p](inputs[r]) for p, r in zip(projections_by_role, inputs_by_role, strict=True))

    return project


_FUSED = (
    Mistake(
        "qkv-order",
        "project",
        tuple(
            MistakeVariant(
                f"what is named q, k, v is used as {', '.join(order)}",
                projected("".join("qkv"[order.index(letter)] for letter in "qkv")),
            )
            for order in OTHER_ORDERS
        ),
        operations=("chunk", "split", "unbind", "tensor_split"),
        applies=lambda hints, layer: hints.is_order_known,
    ),
)


def not_projected(letter: str) -> Callable[..., tuple[Tensor, ...]]:
    """Queries, keys and values, one of them the unprojected input."""

    def project(layer: ReferenceLayer, rows: ReferenceInputs) -> tuple[Tensor, ...]:
        return tuple(
            vectors if name == letter else projection(vectors)
            for name, projection, vectors in zip("qkv", inputs_of(layer), rows[:3], strict=True)
        )

    return project


def taken_as(letters: str) -> Callable[..., tuple[Tensor, ...]]:
    """Heads in other roles: `qkk` uses the keys as values. All must have the same number of heads."""

    def take(layer: ReferenceLayer, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        require(q.shape[1] == k.shape[1] == v.shape[1])
        by_letter = {"q": q, "k": k, "v": v}
        return tuple(by_letter[letter] for letter in letters)

    return take


_EXCHANGED = (
    *(
        Mistake(
            f"{taker}-from-{giver}",
            "project",
            (
                MistakeVariant(
                    f"the {taker} are made by the projection of the {giver}",
                    projected("qkv".replace(taker[0], giver[0])),
                ),
            ),
            site=f"{taker[0]}_proj",
        )
        for taker, giver in _USED_TWICE
    ),
    *(
        Mistake(
            f"{taker}-from-{giver}",
            "take",
            (
                MistakeVariant(
                    f"the {giver} take the place of the {taker}",
                    taken_as("qkv".replace(taker[0], giver[0])),
                ),
            ),
            site="z" if taker == "values" else "qk",
            form="as heads",
        )
        for taker, giver in _USED_TWICE
    ),
    Mistake(
        "one-projection",
        "project",
        tuple(
            MistakeVariant(
                f"queries, keys and values are made by the projection of the {name}",
                projected(name[0] * 3),
            )
            for name in ("queries", "keys", "values")
        ),
    ),
    *(
        Mistake(
            "projection-missing",
            "project",
            (MistakeVariant(f"the rows are taken for the {name} as they are", not_projected(name[0])),),
            site=name[0],
            form=name,
        )
        for name in ("values", "keys", "queries")
    ),
)


_ROWS = (
    Mistake(
        "values-of-queries",
        "project",
        (MistakeVariant("the values come from the rows of the queries", projected(inputs_by_role="qkq")),),
        site="v_proj",
    ),
    Mistake(
        "values-of-keys",
        "project",
        (MistakeVariant("the values come from the rows of the keys", projected(inputs_by_role="qkk")),),
        site="v_proj",
    ),
    Mistake(
        "keys-of-values",
        "project",
        (
            MistakeVariant("the keys come from the rows of the values", projected(inputs_by_role="qvv")),
            MistakeVariant("keys and values come from each other's rows", projected(inputs_by_role="qvk")),
        ),
        site="k_proj",
    ),
    Mistake(
        "keys-of-queries",
        "project",
        (MistakeVariant("the keys come from the rows of the queries", projected(inputs_by_role="qqv")),),
        site="k_proj",
    ),
)


def unbiased(*letters: str) -> Callable[..., tuple[Tensor, ...]]:
    """Projections without the biases of these letters."""

    def project(layer: ReferenceLayer, rows: ReferenceInputs) -> tuple[Tensor, ...]:
        projected = []
        for letter, projection, vectors in zip("qkv", inputs_of(layer), rows[:3], strict=True):
            require(letter not in letters or projection.bias is not None)
            projected.append((projection._replace(bias=None) if letter in letters else projection)(vectors))
        return tuple(projected)

    return project


def out_unbiased(layer: ReferenceLayer, rows: Tensor) -> Tensor:
    """The output projection without its bias."""
    require(out_of(layer).bias is not None)
    return out_of(layer)._replace(bias=None)(rows)


def without_out_projection(layer: ReferenceLayer, rows: Tensor) -> Tensor:
    """The concatenated heads without the output projection."""
    out_of(layer)
    return rows


def out_transposed(layer: ReferenceLayer, rows: Tensor) -> Tensor:
    """The output projection with a transposed weight."""
    out = out_of(layer)
    return out._replace(weight=out.weight.mT)(rows)


def transposed_inputs(layer: ReferenceLayer, rows: ReferenceInputs) -> tuple[Tensor, ...]:
    """Queries, keys and values with transposed weights."""
    transposed = [p._replace(weight=p.weight.mT) for p in inputs_of(layer)]
    return tuple(projection(vectors) for projection, vectors in zip(transposed, rows[:3], strict=True))


_WEIGHTS = (
    Mistake(
        "bias-missing",
        "project",
        tuple(
            MistakeVariant(f"the bias of {' and '.join(of)} is left out", unbiased(*of))
            for of in (("q",), ("v",), ("q", "k", "v"), ("q", "v"), ("q", "k"), ("k", "v"), ("k",))
        ),
    ),
    Mistake(
        "bias-missing",
        "project_out",
        (MistakeVariant("the bias of the output projection is left out", out_unbiased),),
        form="of the output",
    ),
    Mistake(
        "out-proj-missing",
        "project_out",
        (MistakeVariant("the heads side by side are returned as they are", without_out_projection),),
        site="concat",
    ),
    Mistake(
        "out-proj-transposed",
        "project_out",
        (MistakeVariant("the output projection's weight is applied transposed", out_transposed),),
    ),
    Mistake(
        "projection-transposed",
        "project",
        (MistakeVariant("the weights of queries, keys and values are applied transposed", transposed_inputs),),
    ),
)


# ------------------------------------------------------------------------------------ rotary positions: vectors and columns


def pairing_of(layer: ReferenceLayer) -> Pairing:
    """The pairing of rotary columns. Raises `Inapplicable` without rotary positions."""
    if layer.pairing is None:
        raise Inapplicable
    return layer.pairing


class Rotation(NamedTuple):
    """A rotation of queries or keys: `shift` positions too far, with another `pairing` than the layer if given, with `angles`
    laid out for another pairing, and backwards for `sign` −1."""

    pairing: Pairing | None = None
    angles: Pairing | None = None
    shift: int = 0
    sign: int = 1


RIGHT_ROTATION = Rotation()


def rotated_as(
    q_rotation: Rotation | None = RIGHT_ROTATION, k_rotation: Rotation | None = RIGHT_ROTATION
) -> Callable[..., tuple[Tensor, ...]]:
    """Queries and keys with these rotations; None is not rotated."""

    def rotate(layer: ReferenceLayer, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        pairing = pairing_of(layer)
        heads = []
        for t, rotation in ((q, q_rotation), (k, k_rotation)):
            if rotation is not None:
                start = k.shape[2] - t.shape[2] + rotation.shift
                t = rotated(t, layer, start, rotation.pairing or pairing, rotation.angles, sign=rotation.sign)
            heads.append(t)
        return tuple(heads)

    return rotate


def rotated_other(layer: ReferenceLayer, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Queries and keys rotated with the other pairing."""
    other = Rotation("interleaved" if layer.pairing == "half" else "half")
    return rotated_as(other, other)(layer, q, k)


_HALVES, _NEIGHBOURS = Rotation("half"), Rotation("interleaved")
_HALVES_BY_NEIGHBOURS, _NEIGHBOURS_BY_HALVES = Rotation("half", "interleaved"), Rotation("interleaved", "half")
_PAIRING = Mistake(
    "rope-pairing",
    "rotate",
    (
        MistakeVariant(
            "neighbouring columns are rotated by angles laid out for halves",
            rotated_as(_NEIGHBOURS_BY_HALVES, _NEIGHBOURS_BY_HALVES),
        ),
        MistakeVariant(
            "halves are rotated by angles laid out for neighbouring columns",
            rotated_as(_HALVES_BY_NEIGHBOURS, _HALVES_BY_NEIGHBOURS),
        ),
        MistakeVariant("queries are rotated by halves and keys by neighbours", rotated_as(_HALVES, _NEIGHBOURS)),
        MistakeVariant("queries are rotated by neighbours and keys by halves", rotated_as(_NEIGHBOURS, _HALVES)),
    ),
)
_ROTATIONS = (
    _PAIRING,
    replace(
        _PAIRING,
        variants=(MistakeVariant("columns are paired in the other of the two ways", rotated_other),),
        applies=lambda hints, layer: hints.is_pairing_stated,
    ),
    Mistake(
        "rope-of-values",
        "rotate_values",
        (MistakeVariant("the values are rotated too", lambda layer, v: rotated(v, layer, 0, pairing_of(layer))),),
    ),
    Mistake(
        "rope-of-queries-only",
        "rotate",
        (MistakeVariant("the keys are not rotated", rotated_as(k_rotation=None)),),
        site="k",
    ),
    Mistake(
        "rope-of-keys-only",
        "rotate",
        (MistakeVariant("the queries are not rotated", rotated_as(q_rotation=None)),),
    ),
    Mistake(
        "rope-offset",
        "rotate",
        (
            MistakeVariant("queries are rotated one place too far", rotated_as(Rotation(shift=1))),
            MistakeVariant("keys are rotated one place too far", rotated_as(Rotation(shift=-1))),
        ),
    ),
)


# --------------------------------------------------------------------------------------------------- norms of queries and keys


def normed_as(of_q: str | None, of_k: str | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """Queries and keys normalised with the norm of queries or keys, or without one."""

    def norm(layer: ReferenceLayer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if layer.q_norm is None or layer.k_norm is None or layer.q_norm is layer.k_norm:
            raise Inapplicable
        chosen = {"q": layer.q_norm, "k": layer.k_norm}
        return q if of_q is None else chosen[of_q](q), k if of_k is None else chosen[of_k](k)

    return norm


_NORMS = (
    Mistake(
        "qk-norm-shared",
        "norm",
        (
            MistakeVariant("the keys are normalised by the norm of the queries", normed_as("q", "q"), ("k",)),
            MistakeVariant("the queries are normalised by the norm of the keys", normed_as("k", "k")),
        ),
    ),
    Mistake(
        "qk-norm-of-one",
        "norm",
        (
            MistakeVariant("the keys are not normalised", normed_as("q", None), ("k",)),
            MistakeVariant("the queries are not normalised", normed_as(None, "k")),
        ),
    ),
)


# ---------------------------------------------------------------------------------------------- rotary positions: their angles


def rotated_by_head(layer: ReferenceLayer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated by head number instead of position."""
    if layer.pairing is None or q.shape[1] == 1:
        raise Inapplicable
    q, k = (rotated(t.transpose(1, 2), layer, 0, layer.pairing).transpose(1, 2) for t in (q, k))
    return q, k


def rotated_with(rates: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Queries and keys rotated with other rates, computed from the right ones."""

    def rotate(layer: ReferenceLayer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if layer.pairing is None or layer.rates is not None or q.shape[-1] < 4:
            raise Inapplicable
        d = q.shape[-1]
        right = layer.theta ** -(torch.arange(0, d, 2, dtype=q.dtype, device=q.device) / d)
        return stages.rotate(replace(layer, rates=rates(right)), q, k)

    return rotate


def rotated_one_way(layer: ReferenceLayer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with the sine added with the same sign to both columns of a pair."""
    pairing = pairing_of(layer)
    start = k.shape[2] - q.shape[2]
    return _one_signed(q, layer, start, pairing), _one_signed(k, layer, 0, pairing)


def _one_signed(t: Tensor, layer: ReferenceLayer, start: int, pairing: Pairing) -> Tensor:
    forth, back = rotated(t, layer, start, pairing), rotated(t, layer, start, pairing, sign=-1)
    column = torch.arange(t.shape[-1], device=t.device)
    is_first = column < t.shape[-1] // 2 if pairing == "half" else column % 2 == 0
    return torch.where(is_first, back, forth)


_ANGLES = (
    Mistake(
        "rope-axis",
        "rotate",
        (MistakeVariant("the number of the head is taken for the place", rotated_by_head),),
    ),
    Mistake(
        "rope-rates",
        "rotate",
        (
            MistakeVariant("the angles grow from pair to pair by theta^(2j/d)", rotated_with(torch.reciprocal)),
            MistakeVariant("all pairs are rotated by one angle", rotated_with(torch.ones_like)),
        ),
    ),
    Mistake(
        "rope-sign",
        "rotate",
        (MistakeVariant("keys are rotated backwards", rotated_as(k_rotation=Rotation(sign=-1))),),
        site="k",
    ),
    Mistake(
        "rope-without-minus",
        "rotate",
        (MistakeVariant("no column of a pair is rotated with a minus", rotated_one_way),),
    ),
)


PROJECTIONS = (*_FUSED, *_EXCHANGED, *_ROWS, *_WEIGHTS, *_ROTATIONS, *_NORMS, *_ANGLES)
