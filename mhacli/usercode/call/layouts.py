"""The calls to try for a user's attention, in order: by the names of its parameters, and by the sizes that its module shows."""

from __future__ import annotations

import itertools
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
_BATCH_SECOND: AxisNames = ("row", "batch", "width")
_MAP: AxisNames = ("batch", "width", "row", "column")
_OF_HEADS: tuple[AxisNames, ...] = (HEAD_AXES, ("batch", "row", "head", "width"), ROW_AXES)
_LENGTHS = ((3, 4, 6, 9, 15), (5, 7, 9, 6, 15), (11, 13, 10, 9, 15), (7, 5, 9, 6, 15))
_LONGEST = 4096
_KEYS = re.compile(r"(?i)(^|[._])(w?_?kv?|to_?kv?|keys?|key_value)")
_OPTIONAL = ("rope", "positions", "offset")


def calls_to_try(like: UserAttention, *, causal: bool) -> Iterator[UserAttention]:
    """The calls, the likeliest first; `like` has what they have in common, such as the device."""
    built, signature = like.built, signature_of(like.built.call)
    free = [parameter for parameter in signature if parameter.name not in like.fixed]
    has_weights = holds_weights(built) or any(parameter.role == "weight" for parameter in free)
    counts = [like.fixed.get(p.name, p.default) for p in signature if p.role == "heads"]
    stated_sizes = _stated_sizes(built)
    n_heads = next((n for n in [*counts, stated_sizes["n_heads"]] if isinstance(n, int) and n), _HEADS)
    for slots in _slots(free, built):
        is_function = len({part_of(slot) for slot in slots}) == 3 and not has_weights and not counts
        widths = _widths(built, n_heads)
        if is_function:
            widths = [(stated_sizes["d_head"] or _HEAD_WIDTH,) * 2]
        layouts = _layouts(built, slots, is_function=is_function)
        for (d_in, d_context), (axes, lengths) in itertools.product(widths, layouts):
            d_head = d_in if is_function else stated_sizes["d_head"] or max(1, d_in // n_heads)
            numbers = {"heads": n_heads, "d_head": d_head, "scale": d_head**-0.5, "dropout": 0.0, "causal": causal}
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
                    tensors=_weights(free, d_in, like, is_transposed=variant > 0),
                )


def _slots(free: list[CallParameter], built: Built) -> list[tuple[CallParameter, ...]]:
    """The parameters of queries, keys and values: all, then only the required ones. Raises `MhaError` without any."""
    unread = never_read(built.call)
    rows = [p for p in free if p.role in ROWS and (p.required or p.name not in unread)]
    if {"query", "key"} <= {parameter.role for parameter in rows}:
        rows = [parameter for parameter in rows if parameter.role != "context" or parameter.required]
    if rows:
        needed = [slot for slot in rows if slot.required or part_of(slot) == "queries"]
        return [tuple(rows)] if len(needed) == len(rows) else [tuple(rows), tuple(needed)]
    if any(parameter.role == "rest" for parameter in free):
        places = [CallParameter(f"args[{n}]", role, True, True) for n, role in enumerate(ROWS[1:4])]
        return [(places[0],), tuple(places)]
    raise MhaError(
        f"{built.name} has no parameter for token vectors, such as x, or query, key and value",
        hint="name a class or function that computes attention, or give --example", code="cannot-examine", path=built.file,
    )  # fmt: skip


def _extras(free: list[CallParameter], numbers: Mapping[str, Any], variant: int) -> tuple[ArgumentRecipe, ...]:
    """Recipes for the arguments besides inputs and masks: the required ones, switches by which the pattern is computed and those
    that are asked for, and with the later variants optional positions."""
    recipes = []
    for name, role, required, _, _ in free:
        is_switch = role in ("training", "pattern", "mean") or (role == "causal" and numbers["causal"])
        is_wanted = required or is_switch or (variant >= N_VARIANTS and role in _OPTIONAL)
        if not is_wanted or role in (*ROWS, *MASKS, "unknown"):
            continue
        value = numbers["d_head"] if role == "rope" else numbers.get(role, role == "pattern" or None)
        kind = "weight" if role == "weight bias" else role
        recipes.append(ArgumentRecipe(name, kind, False if role in ("mean", "off") else value, variant % N_VARIANTS))
    return tuple(recipes)


def _variants(free: list[CallParameter]) -> list[int]:
    """The shapes of the extra arguments to try, without optional ones and then with them."""
    has_shapes = any(p.required and p.role in (*_OPTIONAL, "weight") for p in free)
    has_optional = any(not p.required and p.role in _OPTIONAL for p in free)
    return [*range(N_VARIANTS if has_shapes else 1), *range(N_VARIANTS, 2 * N_VARIANTS if has_optional else 0)]


_OF_MASKS: tuple[AxisNames, ...] = (PATTERN_AXES, ("batch", "query", "key"), ("query", "key"))
_OF_PADDING: tuple[AxisNames, ...] = (("batch", "key"), PATTERN_AXES, ("batch", "query", "key"))
_KINDS: tuple[tuple[MaskKind, MaskMeaning], ...] = (
    ("bool", "keep"), ("bool", "hide"), ("01", "keep"), ("01", "hide"), ("whole", "keep"), ("whole", "hide"),
    ("additive", "keep"),
)  # fmt: skip


def forms_of(parameter: CallParameter, *, padding: bool) -> list[MaskForm]:
    """The forms in which a mask, or padding, may be given, the likeliest first."""
    name, role = parameter.name, parameter.role
    if role == "lengths":
        return [MaskForm(name, ("batch",), "lengths")]
    if role == "bias":
        return [] if padding else [MaskForm(name, axes, "additive") for axes in _OF_MASKS]
    choices = itertools.product(_OF_PADDING if padding else _OF_MASKS, _KINDS)
    return [MaskForm(name, axes, *kind) for axes, kind in choices]


def _open_masks(free: list[CallParameter]) -> list[Mapping[str, MaskForm | None]]:
    """Values for the required masks, by name: None, then masks that hide nothing, in each form for all of them."""
    empty = [p.name for p in free if isinstance(p.default, Tensor) and p.default.numel() == 0]
    needed = [p for p in free if p.role in MASKS and (p.required or p.name in empty)]
    none: dict[str, MaskForm | None] = dict.fromkeys(p.name for p in needed)
    forms = [[form for padding in (False, True) for form in forms_of(p, padding=padding)] for p in needed]
    return [
        none,
        *({**none, **{form.parameter: form for form in row if form}} for row in itertools.zip_longest(*forms)),
    ]


def _weights(free: list[CallParameter], d_model: int, like: UserAttention, *, is_transposed: bool) -> dict[str, Tensor]:
    """Random float64 weights for a function's weight parameters, `[d_out, d_model]` or transposed."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, role, required, _, _ in free:
        if not required or role not in ("weight", "weight bias"):
            continue
        words = name.lower()
        n_fused = 3 if "qkv" in words or "in" in words.split("_") else 2 if "kv" in words else 1
        shape = (n_fused * d_model, d_model)[: 2 if role == "weight" else 1]
        drawn = d_model**-0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors[name] = (drawn.T if is_transposed else drawn).contiguous().to(like.device, like.dtype)
    return tensors


# ------------------------------------------------------------------------------------------------- layouts and sizes


def _layouts(
    built: Built, slots: tuple[CallParameter, ...], *, is_function: bool
) -> list[tuple[AxisNames, tuple[int, int, int]]]:
    """The axes of the inputs with their lengths (batch, queries, keys): lengths that differ come first, because only the right
    axes take them. No length equals another size where that can be."""
    states = _states(built)
    is_second = states.get("batch_first", True) is False or _unpacks_length_first(built)
    orders = _OF_HEADS if is_function else (_BATCH_SECOND, ROW_AXES) if is_second else (ROW_AXES,)
    limits = sorted(limit for limit in _limits(built) if 1 < limit <= _LONGEST)
    taken = {*states.values(), *(size for _, matrix in _matrices(built) for size in matrix.shape)}
    batch, q_len, k_len, same = (next(n for n in some if n not in taken) for some in _LENGTHS)
    lengths = [(batch, q_len, k_len), (batch, q_len, 4)] if len(slots) > 1 else []
    windows = [2 * size for name, size in states.items() if "window" in name]
    for length in dict.fromkeys([*windows, same, *limits, 8, 16]):
        lengths.append((batch + (batch == length), length, length))
    layouts = [(axes, each) for each in lengths for axes in orders]
    return layouts if is_function else [*layouts, (_MAP, (batch, 12, 12))]


def _unpacks_length_first(built: Built) -> bool:
    """Whether the code calls the first axis of its inputs a length and the second a batch: `T, B, C = x.shape`."""
    length, batch = r"(t|l|s|n?_?seq\w*|\w*len\w*|time|steps)", r"(b|n|bs\w*|batch\w*)"
    first = rf"^\s*{length}, *{batch}, *\w+ *= *\w+\.(shape|size\(\))"
    return re.search(first, source_of(called_function(built.call)), re.M | re.I) is not None


def _limits(built: Built) -> Iterator[int]:
    """The longest texts, or the only ones, that the module takes: stated, or the sizes of its masks and tables."""
    yield stated(built.arguments, "context_length") or 0
    buffers = () if built.module is None else built.module.buffers()
    yield from (b.shape[-1] for b in buffers if b.ndim > 1 and b.shape[-1] == b.shape[-2])
    yield from (p.shape[-2] for name, p in _matrices(built) if re.search(r"pos|rel|(^|\.)er$", name, re.I))


def _states(built: Built) -> dict[str, int]:
    """The numbers and switches with which the target was built, and those that its module has."""
    states = {**vars(built.module or object), **built.arguments}
    return {name: size for name, size in states.items() if isinstance(size, int)}


def _stated_sizes(built: Built) -> dict[str, int]:
    """The number and the width of the heads, as far as arguments and attributes state them, else 0."""
    states = _states(built)
    n_heads, d_head, width = (stated(states, role) or 0 for role in ("n_heads", "d_head", "d_model"))
    return {
        "n_heads": n_heads or (width // d_head if d_head else 0),
        "d_head": d_head or (width // n_heads if n_heads else 0),
    }


def _matrices(built: Built) -> list[tuple[str, Tensor]]:
    """The weights of at least two axes by name."""
    named = [] if built.module is None else list(built.module.named_parameters())
    return [(name, p) for name, p in named if not nn.parameter.is_lazy(p) and p.ndim > 1]


def _widths(built: Built, n_heads: int) -> list[tuple[int, int]]:
    """The widths of the queries and of the keys to try: what the arguments state, and what the weights take."""
    matrices = [(name, matrix.shape) for name, matrix in _matrices(built)]
    found = [
        stated(built.arguments, "d_model"),
        *(shape[1] for _, shape in matrices),
        *(shape[0] for _, shape in matrices),
    ]
    widths = list(dict.fromkeys(size for size in found if isinstance(size, int) and size > 1))[:4]
    of_keys = [shape[1] for name, shape in matrices if _KEYS.search(name) and shape[1] > 1]
    widths = widths or [n_heads * _HEAD_WIDTH]
    pairs = [*((widths[0], width) for width in of_keys[:1]), *((width, width) for width in widths)]
    return list(dict.fromkeys(pairs))


def holds_weights(built: Built) -> bool:
    """Whether the target projects, with parameters of its own or of modules that it holds."""
    parts = list(getattr(built.call, "__dict__", {}).values())
    if built.module is None and any(isinstance(part, nn.Module) for part in parts):
        return True
    parts += [] if built.module is None else built.module.parameters()
    return any(isinstance(part, Tensor) and (nn.parameter.is_lazy(part) or part.ndim in (2, 3)) for part in parts)
