"""Arguments of a call that are neither rows nor masks: switches, positions, rotations, weights, numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhacli.adapters.usercode.call.results import Sides
from mhacli.adapters.usercode.call.signature import Parameter

ROPE_BASE = 10000.0
"""Source: Su et al. 2021, "RoFormer", section 3.2.2."""
N_VARIANTS = 5


class Recipe(NamedTuple):
    """How an argument is made for each call: its `kind`, what that needs to know, and which of several usual shapes."""

    parameter: str
    kind: str
    value: Any = None
    variant: int = 0


class Setting(NamedTuple):
    """What arguments are made for: the sizes of a call, its dtype and device, whether it trains, and the weights by name."""

    sides: Sides
    dtype: torch.dtype
    device: torch.device
    training: bool
    tensors: Mapping[str, Tensor]


def recipe_for(
    parameter: Parameter, *, n_heads: int, d_head: int, d_model: int, causal: bool, variant: int
) -> Recipe | None:
    """How to make an argument that is required; None where nobody knows what it is."""
    name, role = parameter.name, parameter.role
    numbers = {"heads": n_heads, "d_head": d_head, "d_model": d_model, "scale": d_head**-0.5, "dropout": 0.0}
    if role in numbers:
        return Recipe(name, "literal", numbers[role])
    if role in ("cache", "other mask"):
        return Recipe(name, "literal", None)
    if role in ("pattern", "mean", "off"):
        return Recipe(name, "literal", False)
    if role == "causal":
        return Recipe(name, "literal", causal)
    if role == "rope":
        return Recipe(name, "rope", d_head, variant)
    if role in ("training", "positions", "offset", "batch", "q_len", "k_len", "weight", "weight bias"):
        return Recipe(name, role, None, variant)
    return None


def made(recipe: Recipe, setting: Setting) -> Any:
    """The argument itself."""
    sides = setting.sides
    simple: dict[str, Callable[[], Any]] = {
        "literal": lambda: recipe.value,
        "training": lambda: setting.training,
        "batch": lambda: sides.batch,
        "q_len": lambda: sides.q_len,
        "k_len": lambda: sides.k_len,
        "offset": lambda: torch.tensor(0, device=setting.device) if recipe.variant else 0,
        "positions": lambda: _positions(recipe.variant, setting),
        "rope": lambda: _rotation(recipe, setting),
        "weight": lambda: setting.tensors[recipe.parameter].clone(),
        "weight bias": lambda: setting.tensors[recipe.parameter].clone(),
    }
    return simple[recipe.kind]()


def _positions(variant: int, setting: Setting) -> Tensor:
    q_idx = torch.arange(setting.sides.q_len, device=setting.device)
    return (q_idx[None], q_idx, q_idx.expand(setting.sides.batch, -1))[min(variant, 2)]


def angles(q_len: int, d_head: int, device: torch.device) -> Tensor:
    """`[row, d_head / 2]`: the angle of each position and pair of columns, in float64."""
    place = torch.arange(0, d_head - 1, 2, dtype=torch.float64, device=device)
    return torch.outer(torch.arange(q_len, dtype=torch.float64, device=device), ROPE_BASE ** (-place / d_head))


def _rotation(recipe: Recipe, setting: Setting) -> Any:
    name, half = recipe.parameter.lower(), angles(setting.sides.q_len, recipe.value, setting.device)
    whole = torch.cat([half, half], -1)
    shaped = (whole, whole[None], whole[None, None], half, half[None])[min(recipe.variant, 4)]
    if "cos" in name:
        return shaped.cos().to(setting.dtype)
    if "sin" in name:
        return shaped.sin().to(setting.dtype)
    paired = name.startswith(("position_emb", "pos_emb"))
    if paired:
        shaped = whole[None] if recipe.variant == 0 else whole if recipe.variant == 1 else shaped
    if paired or recipe.variant in (1, 2):
        return (shaped.cos().to(setting.dtype), shaped.sin().to(setting.dtype))
    if recipe.variant == 0 or setting.dtype.is_complex:
        doubled = setting.dtype == torch.float64
        return torch.polar(torch.ones_like(half), half).to(torch.complex128 if doubled else torch.complex64)
    return (half if recipe.variant == 3 else whole).to(setting.dtype)


def told_rotation(recipe: Recipe, setting: Setting) -> str:
    """What a rotation was made of, for the line that says how it is called."""
    value = made(recipe, setting)
    one = value[0] if isinstance(value, tuple) else value
    kind = "complex" if one.is_complex() else "(cos, sin)" if isinstance(value, tuple) else "half rotation"
    return f"{recipe.parameter}: {kind} {list(one.shape)}, base {ROPE_BASE:g}"


def weights_for(
    parameters: tuple[Parameter, ...], *, n_heads: int, d_model: int, variant: int, seed: int
) -> dict[str, Tensor]:
    """A weight for each parameter of a function that wants them, `[d_model, d_model]` by preference, in float64.

    Further variants have fused weights `[d_model, 3·d_model]`, and a matrix for each head.
    """
    generator = torch.Generator().manual_seed(seed)
    d_head, made_tensors = d_model // n_heads, {}
    for parameter in parameters:
        name = parameter.name.lower()
        n_fused = 3 if "qkv" in name or "in" in name.split("_") else 2 if "kv" in name else 1
        if parameter.role == "weight bias":
            shape: tuple[int, ...] = (n_fused * d_model,)
        elif variant == 0:
            shape = (n_fused * d_model, d_model)
        elif variant == 1 or n_fused > 1:
            shape = (d_model, n_fused * d_model)
        elif variant == 2:
            shape = (n_heads, d_head, d_model) if "o" in name.replace("proj", "") else (n_heads, d_model, d_head)
        else:
            shape = (n_heads, d_head, d_model) if "o" in name.replace("proj", "") else (d_model, n_heads, d_head)
        scale = 0.3 if parameter.role == "weight bias" else d_model**-0.5
        made_tensors[parameter.name] = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return made_tensors
