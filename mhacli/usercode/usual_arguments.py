"""The values of the arguments that a call takes besides its inputs and masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple, assert_never, get_args

import torch
from torch import Tensor

from mhacli.attention.layer import rates
from mhacli.usercode.axes import CallSizes, MadeForSizes
from mhacli.usercode.roles import MASKS, ROWS, CallParameter

PositionShape = Literal["batched", "plain", "expanded"]
"""The shape of the positions of a call: `[1, query]`, `[query]`, or `[batch, query]`."""
SHAPES: tuple[PositionShape, ...] = get_args(PositionShape)


class LayerSizes(NamedTuple):
    """The sizes of a layer that a call may ask for."""

    n_heads: int = 1
    d_head: int = 1
    d_model: int = 1


def usual_arguments(
    parameters: Sequence[CallParameter], layer: LayerSizes, shape: PositionShape, *, causal: bool
) -> dict[str, Any]:
    """The values of the required parameters besides inputs and masks, of the switches for training
    and, if it is asked for, of those for a causal mask; positions have a shape.
    """
    values: dict[str, Any] = {
        **layer._asdict(),
        "scale": 1 / math.sqrt(layer.d_head),
        "dropout": 0.0,
        "causal": causal,
        "off": False,
        "result": False,
        "training": MadeForSizes(attrgetter("training")),
        **{role: made_place(role, shape) for role in ("offset", "positions", "segments")},
    }
    others = dict[str, Any]()
    for name, role, required, _, _ in parameters:
        is_switch = role == "training" or (role == "causal" and causal)
        if role in (*ROWS, *MASKS, "unknown") or not (required or is_switch):
            continue
        if role == "rope":
            others[name] = MadeForSizes(partial(_rotation, name, layer.d_head, shape))
        elif role in ("weight", "weight bias"):
            weight = _weight(name, layer.d_model, seed=len(others) + 1)
            others[name] = weight[:, 0] if role == "weight bias" else weight
        else:
            others[name] = values.get(role)
    return others


def made_place(role: str, shape: PositionShape) -> MadeForSizes:
    """Where the tokens of a call stand, by a role: the number of tokens before it, or the segment
    or the position of each.
    """

    def make(sizes: CallSizes) -> Any:
        if role == "offset":
            return sizes.start if shape == "batched" else torch.tensor(sizes.start)
        if role == "segments":
            return torch.zeros(sizes.batch, sizes.q_len, dtype=torch.long)
        q_idx = _positions(sizes)
        match shape:
            case "batched":
                return q_idx[None]
            case "plain":
                return q_idx
            case "expanded":
                return q_idx.expand(sizes.batch, -1)
            case _:
                assert_never(shape)

    return MadeForSizes(make)


def _positions(sizes: CallSizes) -> Tensor:
    return torch.arange(sizes.start, sizes.start + sizes.q_len)


def _rotation(name: str, d_head: int, shape: PositionShape, sizes: CallSizes) -> Any:
    """A table of rotations: complex, or cosines and sines of all columns, or in pairs. A form of it
    goes with each shape of positions, so that a call with both is tried in three variants, not in
    nine; the likeliest form by the name goes with the likeliest shape.
    """
    frequencies = rates(d_head, 10_000.0, torch.device("cpu"))
    angle = torch.outer(_positions(sizes).double(), frequencies)
    turns = torch.polar(torch.ones_like(angle), angle)
    whole = torch.cat([turns, turns], -1)
    pair, of_pairs = (whole[None].real, whole[None].imag), torch.view_as_real(turns)
    lower = name.lower()
    if "cos" in lower:
        forms: list[Any] = [whole.real, whole[None].real, turns.real]
    elif "sin" in lower:
        forms = [whole.imag, whole[None].imag, turns.imag]
    elif "emb" in lower:
        forms = [pair, turns, of_pairs]
    else:
        forms = [turns, pair, of_pairs]
    return forms[SHAPES.index(shape)]


def _weight(name: str, d_model: int, seed: int) -> Tensor:
    """A random weight `[d_out, d_model]` of one, two or three projections, as its name says."""
    n_projections = 1
    if "qkv" in name or "in" in name.split("_"):
        n_projections = 3
    elif "kv" in name:
        n_projections = 2
    generator = torch.Generator().manual_seed(seed)
    shape = (n_projections * d_model, d_model)
    return torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(d_model)
