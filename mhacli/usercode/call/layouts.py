"""The calls to try for a user's attention, in order: by the names of its parameters, and by the sizes that its module shows."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mhacli.errors import MhaError
from mhacli.usercode.arguments import stated
from mhacli.usercode.call.results import HEAD_AXES, PATTERN_AXES, ROW_AXES, AxisNames
from mhacli.usercode.call.signature import (
    MASKS,
    ROWS,
    CallParameter,
    called_function,
    never_read,
    signature_of,
    source_of,
)
from mhacli.usercode.call.user_attention import N_VARIANTS, ArgumentRecipe, UserAttention, part_of
from mhacli.usercode.types import Built, InputSizes, MaskForm, MaskKind, MaskMeaning

_HEADS, _HEAD_WIDTH = 4, 8
"""The sizes for a target without sizes of its own, such as a plain function."""
_LENGTHS = ((3, 4, 6, 9, 15), (5, 7, 9, 6, 15), (7, 5, 9, 6, 15), (11, 13, 10, 9, 15))
"""The numbers to choose from of texts, of queries, of queries that are keys too, and of keys."""
_LONGEST = 4096
_BATCH_SECOND: AxisNames = ("row", "batch", "width")
_MAP: AxisNames = ("batch", "width", "row", "column")
_OF_HEADS: tuple[AxisNames, ...] = (HEAD_AXES, ("batch", "row", "head", "width"), ROW_AXES)
_KEYS = re.compile(r"(?i)(^|[._])(w?_?kv?|to_?kv?|keys?|key_value)")
_OF_POSITIONS = re.compile(r"(?i)pos|rel|(^|\.)er$")
_LENGTH_FIRST = re.compile(
    r"(?im)^\s*(t|l|s|n?_?seq\w*|\w*len\w*|time), *(b|n|bs\w*|batch\w*), *\w+ *= *\w+\.(shape|size\(\))"
)
"""Code that calls the first axis of its inputs a length and the second a batch: `T, B, C = x.shape`."""
_OPTIONAL = ("rope", "positions", "offset")


def calls_to_try(like: UserAttention, *, causal: bool) -> Iterator[UserAttention]:
    """The calls, the likeliest first; `like` has what they have in common, such as the device."""
    built, signature = like.built, signature_of(like.built.call)
    free = [parameter for parameter in signature if parameter.name not in like.fixed]
    given = {**{parameter.name: parameter.default for parameter in signature}, **like.fixed}
    states = {**vars(built.module or object), **built.arguments, **given}
    states = {name: number for name, number in states.items() if isinstance(number, int)}
    width, d_head = stated(states, "d_model") or 0, stated(states, "d_head") or 0
    n_heads = stated(states, "n_heads") or (width // d_head if width and d_head else _HEADS)
    projects = bool(weights_of(built)) or any(p.role in ("weight", "heads") for p in signature)
    for slots in _slots(free, built):
        is_function = len({part_of(slot) for slot in slots}) == 3 and not projects
        of_head = d_head or width // n_heads or _HEAD_WIDTH
        widths = [(of_head, of_head)] if is_function else _widths(built, width or n_heads * _HEAD_WIDTH)
        layouts = _layouts(built, states, is_pair=len(slots) > 1, is_function=is_function)
        for (d_in, d_context), (axes, lengths) in itertools.product(widths, layouts):
            of_head = d_in if is_function else d_head or max(1, d_in // n_heads)
            numbers = {"heads": n_heads, "d_head": of_head, "scale": of_head**-0.5, "dropout": 0.0, "causal": causal}
            numbers["d_model"] = n_heads * d_in if is_function else d_in
            for variant, idle in itertools.product(_variants(free), _open_masks(free)):
                yield replace(
                    like,
                    slots=slots,
                    axes=axes,
                    is_function=is_function,
                    extras=_extras(free, numbers, variant),
                    idle=idle,
                    n_heads=n_heads if is_function and "head" in axes else 1,
                    sizes=InputSizes(*lengths, d_in, d_context),
                )


def _slots(free: list[CallParameter], built: Built) -> list[tuple[CallParameter, ...]]:
    """The parameters of queries, keys and values: all, then only the required ones. Raises `MhaError` without any."""
    unread = never_read(built.call)
    rows = [p for p in free if p.role in ROWS and (p.required or p.name not in unread)]
    if {"query", "key"} <= {parameter.role for parameter in rows}:
        rows = [parameter for parameter in rows if parameter.role != "context" or parameter.required]
    if not rows and any(parameter.role == "rest" for parameter in free):
        places = [CallParameter(f"args[{n}]", role, True, True) for n, role in enumerate(ROWS[1:4])]
        return [(places[0],), tuple(places)]
    needed = [slot for slot in rows if slot.required or part_of(slot) == "queries"]
    if needed:
        return [tuple(each) for each in ([rows] if rows == needed else [rows, needed])]
    raise MhaError(
        f"{built.name} has no parameter for token vectors, such as x, or query, key and value",
        hint="name a class or function that computes attention, or give --example", code="cannot-examine", path=built.file,
    )  # fmt: skip


def _extras(free: list[CallParameter], numbers: Mapping[str, Any], variant: int) -> tuple[ArgumentRecipe, ...]:
    """Recipes for the arguments besides inputs and masks: the required ones, switches by which the pattern is computed and those
    that are asked for, and with the later variants optional positions."""
    recipes: list[ArgumentRecipe] = []
    values = {"pattern": True, "mean": False, "off": False, "rope": numbers["d_head"], **numbers}
    for name, role, required, _, _ in free:
        is_switch = role in ("training", "pattern", "mean") or (role == "causal" and numbers["causal"])
        is_wanted = required or is_switch or (variant >= N_VARIANTS and role in _OPTIONAL)
        if not is_wanted or role in (*ROWS, *MASKS, "unknown"):
            continue
        kind, value = role, values.get(role)
        if role in ("weight", "weight bias"):
            kind, value = "weight", _weight(name, numbers["d_model"], len(recipes))
            value = value[:, 0] if role == "weight bias" else value.T if variant else value
        recipes.append(ArgumentRecipe(name, kind, value, variant % N_VARIANTS))
    return tuple(recipes)


def _weight(name: str, d_model: int, seed: int) -> Tensor:
    """A random weight `[d_out, d_model]` for an argument, of several projections by its name."""
    words = name.lower().split("_")
    n_fused = 3 if "in" in words or "qkv" in name else 2 if "kv" in name else 1
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n_fused * d_model, d_model, generator=generator, dtype=torch.float64) / math.sqrt(d_model)


def _variants(free: list[CallParameter]) -> list[int]:
    """The shapes of the extra arguments to try, without optional ones and then with them."""
    has_shapes = any(p.required and p.role in (*_OPTIONAL, "weight") for p in free)
    has_optional = any(not p.required and p.role in _OPTIONAL for p in free)
    return [*range(N_VARIANTS if has_shapes else 1), *range(N_VARIANTS, 2 * N_VARIANTS if has_optional else 0)]


_OF_MASKS: tuple[AxisNames, ...] = (PATTERN_AXES, ("batch", "query", "key"), ("query", "key"))
_OF_PADDING: tuple[AxisNames, ...] = (("batch", "key"), PATTERN_AXES, ("batch", "query", "key"))
_KINDS: tuple[MaskKind, ...] = ("bool", "01", "whole", "additive")
_MEANINGS: tuple[MaskMeaning, ...] = ("keep", "hide")


def forms_of(parameter: CallParameter, *, padding: bool) -> list[MaskForm]:
    """The forms in which a mask, or padding, may be given, the likeliest first."""
    name, role = parameter.name, parameter.role
    if role == "lengths":
        return [MaskForm(name, ("batch",), "lengths")]
    choices = itertools.product(_OF_PADDING if padding else _OF_MASKS, _KINDS, _MEANINGS)
    forms = [MaskForm(name, *choice) for choice in choices if choice[1:] != ("additive", "hide")]
    return [form for form in forms if role != "bias" or (form.kind == "additive" and not padding)]


def _open_masks(free: list[CallParameter]) -> list[Mapping[str, MaskForm | None]]:
    """Values for the required masks, by name: None, then masks that hide nothing, in each form for all of them."""
    empty = [p.name for p in free if isinstance(p.default, Tensor) and p.default.numel() == 0]
    needed = [p for p in free if p.role in MASKS and (p.required or p.name in empty)]
    masks: list[Mapping[str, MaskForm | None]] = [dict.fromkeys(p.name for p in needed)]
    forms = [forms_of(p, padding=False) + forms_of(p, padding=True) for p in needed]
    for row in itertools.zip_longest(*forms):
        masks.append({**masks[-1], **{form.parameter: form for form in row if form is not None}})
    return masks


def _layouts(
    built: Built, states: Mapping[str, int], *, is_pair: bool, is_function: bool
) -> list[tuple[AxisNames, tuple[int, int, int]]]:
    """The axes of the inputs with their lengths (batch, queries, keys): lengths that differ come first, because only the right
    axes take them. No length equals another size where that can be."""
    taken = {*states.values(), *(size for _, weight in weights_of(built) for size in weight.shape)}
    batch, q_len, same, k_len = (next(n for n in numbers if n not in taken) for numbers in _LENGTHS)
    lengths = [(batch, q_len, k_len), (batch, q_len, 4)] if is_pair else []
    equal = [2 * size for name, size in states.items() if "window" in name]
    equal += [same, stated(built.arguments, "context_length") or same]
    buffers = () if built.module is None else built.module.buffers()
    equal += [table.shape[-1] for table in buffers if table.ndim > 1 and table.shape[-1] == table.shape[-2]]
    equal += [table.shape[-2] for name, table in weights_of(built) if _OF_POSITIONS.search(name)]
    for length in dict.fromkeys([*(n for n in equal if 1 < n <= _LONGEST), 8, 16]):
        lengths.append((batch + 1 if batch == length else batch, length, length))
    source = source_of(called_function(built.call))
    is_second = states.get("batch_first", True) is False or _LENGTH_FIRST.search(source) is not None
    orders = _OF_HEADS if is_function else (_BATCH_SECOND, ROW_AXES) if is_second else (ROW_AXES,)
    layouts = [(axes, each) for each in lengths for axes in orders]
    return layouts if is_function else [*layouts, (_MAP, (batch, 12, 12))]


def _widths(built: Built, width: int) -> list[tuple[int, int]]:
    """The widths of the queries and of the keys to try: what is stated, and what the weights take."""
    shapes = [(name, weight.shape) for name, weight in weights_of(built)]
    found = [stated(built.arguments, "d_model"), *(shape[side] for side in (1, 0) for _, shape in shapes)]
    widths = list(dict.fromkeys(size for size in found if isinstance(size, int) and size > 1))[:4] or [width]
    of_keys = [shape[1] for name, shape in shapes if _KEYS.search(name) and shape[1] > 1]
    return list(dict.fromkeys([(widths[0], [*of_keys, widths[0]][0]), *zip(widths, widths, strict=True)]))


def weights_of(built: Built) -> list[tuple[str, Tensor]]:
    """The weights of at least two axes that the target holds, or a module in it, by name."""
    held = getattr(built.call, "__dict__", {})
    modules = [part for part in (built.call, *held.values()) if isinstance(part, nn.Module)]
    named: list[tuple[str, Tensor]] = [pair for module in modules for pair in module.named_parameters()]
    named += [(name, part) for name, part in held.items() if isinstance(part, Tensor)]
    return [(name, weight) for name, weight in named if not nn.parameter.is_lazy(weight) and weight.ndim > 1]
