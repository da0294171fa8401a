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
_LENGTH_FIRST = re.compile(
    r"(?im)^\s*(t|l|s|n?_?seq\w*|\w*len\w*|time|steps), *(b|n|bs\w*|batch\w*), *\w+ *= *\w+\.(shape|size\(\))"
)
"""Code that calls the first axis of its inputs a length and the second a batch: `T, B, C = x.shape`."""


def calls_to_try(like: UserAttention, *, causal: bool) -> Iterator[UserAttention]:
    """The calls, the likeliest first; `like` has what they have in common, such as the device."""
    built, signature = like.built, signature_of(like.built.call)
    free = [parameter for parameter in signature if parameter.name not in like.fixed]
    states = _states(like)
    n_heads, width, d_head = (stated(states, role) or 0 for role in ("n_heads", "d_model", "d_head"))
    if n_heads == 0:
        n_heads = width // d_head if width and d_head else _HEADS
    is_projecting = bool(weights_of(built)) or any(p.role in ("weight", "heads") for p in signature)
    has_shapes = any(p.required and p.role in ("rope", "positions", "offset", "weight") for p in free)
    variants = range(N_VARIANTS if has_shapes else 1)
    for slots in _slots(free, built):
        is_function = len({part_of(slot) for slot in slots}) == 3 and not is_projecting
        widths = _widths(built, width or n_heads * _HEAD_WIDTH)
        if is_function:
            width = d_head or width // n_heads or _HEAD_WIDTH
            widths = [(width, width)]
        layouts = _layouts(built, states, is_pair=len(slots) > 1, is_function=is_function)
        choices = itertools.product(widths, layouts, variants, _open_masks(free))
        for (d_in, d_context), (axes, batch, q_len, k_len), variant, idle in choices:
            d_model, of_head = d_in, d_head or max(1, d_in // n_heads)
            if is_function:
                d_model, of_head = n_heads * d_in, d_in
            numbers = {"heads": n_heads, "d_head": of_head, "d_model": d_model, "causal": causal}
            yield replace(
                like,
                slots=slots,
                axes=axes,
                is_function=is_function,
                extras=_extras(free, numbers, variant),
                idle=idle,
                n_heads=n_heads if is_function and "head" in axes else 1,
                sizes=InputSizes(batch, q_len, k_len, d_in, d_context if len(slots) > 1 else d_in),
            )


def _slots(free: list[CallParameter], built: Built) -> list[tuple[CallParameter, ...]]:
    """The parameters of queries, keys and values: all, then only the required ones. Raises `MhaError` without any."""
    unread = never_read(built.call)
    rows = [p for p in free if p.role in ROWS and (p.required or p.name not in unread)]
    if not rows and any(parameter.role == "rest" for parameter in free):
        rows = [CallParameter(f"args[{n}]", role, n == 0, True) for n, role in enumerate(ROWS[1:4])]
    needed = [slot for slot in rows if slot.required or part_of(slot) == "queries"]
    if not needed:
        raise MhaError(
            f"{built.name} has no parameter for token vectors, such as x, or query, key and value",
            hint="name a class or function that computes attention, or give --example",
            code="cannot-examine",
            path=built.file,
        )
    return [tuple(rows)] if rows == needed else [tuple(rows), tuple(needed)]


def _extras(free: list[CallParameter], numbers: Mapping[str, Any], variant: int) -> tuple[ArgumentRecipe, ...]:
    """Recipes for the arguments besides inputs and masks: the required ones, and switches by which the pattern is computed or
    that are asked for."""
    recipes: list[ArgumentRecipe] = []
    values = {**numbers, "pattern": True, "mean": False, "off": False, "rope": numbers["d_head"], "dropout": 0.0}
    values["scale"] = 1 / math.sqrt(numbers["d_head"])
    for name, role, required, _, _ in free:
        is_switch = role in ("training", "pattern", "mean") or (role == "causal" and numbers["causal"])
        if role in (*ROWS, *MASKS, "unknown") or not (required or is_switch):
            continue
        recipe = ArgumentRecipe(name, role, values.get(role), variant)
        if role in ("weight", "weight bias"):
            weight = _weight(name, numbers["d_model"], len(recipes))
            if role == "weight bias":
                weight = weight[:, 0]
            elif variant > 0:
                weight = weight.T
            recipe = ArgumentRecipe(name, "weight", weight)
        recipes.append(recipe)
    return tuple(recipes)


def _weight(name: str, d_model: int, seed: int) -> Tensor:
    """A random weight `[d_out, d_model]` for an argument, of several projections by its name."""
    n_fused = 2 if "kv" in name else 1
    if "qkv" in name or "in" in name.split("_"):
        n_fused = 3
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n_fused * d_model, d_model, generator=generator, dtype=torch.float64) / math.sqrt(d_model)


_OF_MASKS: tuple[AxisNames, ...] = (PATTERN_AXES, ("batch", "query", "key"), ("query", "key"))
_OF_PADDING: tuple[AxisNames, ...] = (("batch", "key"), PATTERN_AXES, ("batch", "query", "key"))
_KINDS: tuple[MaskKind, ...] = ("bool", "01", "whole", "additive")
_MEANINGS: tuple[MaskMeaning, ...] = ("keep", "hide")


def forms_of(parameter: CallParameter, *, padding: bool) -> list[MaskForm]:
    """The forms in which a mask, or padding, may be given, the likeliest first."""
    if parameter.role == "lengths":
        return [MaskForm(parameter.name, ("batch",), "lengths")]
    forms = []
    for axes, kind, meaning in itertools.product(_OF_PADDING if padding else _OF_MASKS, _KINDS, _MEANINGS):
        is_added = kind == "additive" and meaning == "keep"
        if is_added or (kind != "additive" and parameter.role != "bias"):
            forms.append(MaskForm(parameter.name, axes, kind, meaning))
    return forms


def _open_masks(free: list[CallParameter]) -> list[Mapping[str, MaskForm | None]]:
    """Values for the required masks, by name: None, then masks that hide nothing, in each form for all of them."""
    empty = [p.name for p in free if isinstance(p.default, Tensor) and p.default.numel() == 0]
    needed = [p for p in free if p.role in MASKS and (p.required or p.name in empty)]
    masks: list[Mapping[str, MaskForm | None]] = [dict.fromkeys(p.name for p in needed)]
    forms = [forms_of(p, padding=False) + forms_of(p, padding=True) for p in needed]
    for row in itertools.zip_longest(*forms):
        masks.append({**masks[-1], **{form.parameter: form for form in row if form is not None}})
    return masks


# ------------------------------------------------------------------------------------------------- layouts and sizes


def _layouts(
    built: Built, states: Mapping[str, int], *, is_pair: bool, is_function: bool
) -> list[tuple[AxisNames, int, int, int]]:
    """The axes of the inputs with their lengths (batch, queries, keys): lengths that differ come first, because only the right
    axes take them. No length equals another size where that can be."""
    taken = {*states.values(), *(size for _, weight in weights_of(built) for size in weight.shape)}
    batch, q_len, same, k_len = (next(n for n in numbers if n not in taken) for numbers in _LENGTHS)
    equal = [2 * size for name, size in states.items() if "window" in name]
    equal += [same, stated(built.arguments, "context_length") or same]
    for table in () if built.module is None else built.module.buffers():
        if table.ndim > 1 and table.shape[-1] == table.shape[-2]:
            equal.append(table.shape[-1])
    lengths = [(batch, q_len, k_len)] if is_pair else []
    for length in dict.fromkeys([*(n for n in equal if 1 < n <= _LONGEST), 8, 16]):
        lengths.append((batch + 1 if batch == length else batch, length, length))
    orders: tuple[AxisNames, ...] = _OF_HEADS if is_function else (ROW_AXES,)
    is_length_first = _LENGTH_FIRST.search(source_of(called_function(built.call))) is not None
    if not is_function and (is_length_first or states.get("batch_first", True) is False):
        orders = (_BATCH_SECOND, ROW_AXES)
    layouts = [(axes, *each) for each in lengths for axes in orders]
    return layouts if is_function else [*layouts, (_MAP, batch, 12, 12)]


def _states(like: UserAttention) -> dict[str, int]:
    """The numbers and switches of the target: of its module, its constructor, and its call."""
    defaults = {parameter.name: parameter.default for parameter in signature_of(like.built.call)}
    states = {**vars(like.built.module or object), **like.built.arguments, **defaults, **like.fixed}
    return {name: number for name, number in states.items() if isinstance(number, int)}


def _widths(built: Built, width: int) -> list[tuple[int, int]]:
    """The widths of the queries and of the keys to try: what is stated, and what the weights take."""
    shapes = {name: weight.shape for name, weight in weights_of(built)}
    found = [stated(built.arguments, "d_model") or 0]
    found += [shape[1] for shape in shapes.values()]
    found += [shape[0] for shape in shapes.values()]
    widths = list(dict.fromkeys(size for size in found if size > 1))[:4] or [width]
    of_keys = [shape[1] for name, shape in shapes.items() if _KEYS.search(name)]
    pairs = [(size, size) for size in widths]
    return pairs if max(of_keys, default=0) < 2 else [(widths[0], of_keys[0]), *pairs]


def weights_of(built: Built) -> list[tuple[str, Tensor]]:
    """The weights of at least two axes that the target holds, or a module in it, by name."""
    if built.module is not None:
        named: list[tuple[str, Tensor]] = list(built.module.named_parameters())
    else:
        held = getattr(built.call, "__dict__", {})
        named = [(name, part) for name, part in held.items() if isinstance(part, Tensor)]
        for part in held.values():
            named += part.named_parameters() if isinstance(part, nn.Module) else ()
    return [(name, weight) for name, weight in named if not nn.parameter.is_lazy(weight) and weight.ndim > 1]
