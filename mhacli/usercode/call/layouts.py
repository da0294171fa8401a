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
from mhacli.usercode.call.convention import (
    HEAD_AXES,
    N_ROTATIONS,
    PATTERN_AXES,
    ROW_AXES,
    ArgumentRecipe,
    AxisNames,
    CallConvention,
    part_of,
)
from mhacli.usercode.call.signature import MASKS, ROWS, CallParameter, called_function, signature_of, source_of
from mhacli.usercode.call.user_attention import UserAttention
from mhacli.usercode.types import Built, InputSizes, MaskForm, MaskKind

FREE_WIDTH, FREE_HEADS, FREE_HEAD_WIDTH = 32, 4, 8
"""The width, heads and head width for a target without sizes of its own, such as a plain function."""
_BATCH_SECOND: AxisNames = ("row", "batch", "width")
_MAP: AxisNames = ("batch", "width", "row", "column")
_OF_HEADS: tuple[AxisNames, ...] = (HEAD_AXES, ("batch", "row", "head", "width"), ROW_AXES)
_LONGEST, _LARGEST_COPIED = 4096, 4_000_000
_OPTIONAL = ("rope", "positions", "offset")
_Lengths = tuple[int, int, int]


def calls_to_try(
    built: Built, fixed: Mapping[str, Any], like: UserAttention, *, causal: bool
) -> Iterator[UserAttention]:
    """The calls, the likeliest first; `like` has what they have in common, such as the device."""
    signature = signature_of(built.call)
    free = [parameter for parameter in signature.parameters if parameter.name not in fixed]
    module = built.module
    sizes = _known_sizes(built)
    has_weights = _has_weights(built) or any(parameter.role == "weight" for parameter in free)
    for slots in _slots(free, built):
        parts = {part_of(slot) for slot in slots}
        is_function = len(parts) == 3 and not has_weights and not any(p.role == "heads" for p in signature.parameters)
        heads = [fixed.get(p.name, p.default) for p in signature.of_role("heads")]
        n_heads = next((n for n in [*heads, sizes["n_heads"]] if isinstance(n, int) and n), FREE_HEADS)
        widths = _widths(built, sizes, n_heads, is_function=is_function)
        layouts = list(_layouts(built, slots, {*sizes["taken"], n_heads}, is_function=is_function))
        for d_in, (axes, lengths) in itertools.product(widths, layouts):
            d_context = d_in if is_function or d_in != widths[0] else _context_width(module, d_in)
            d_head = d_in if is_function else sizes["d_head"] or max(1, d_in // n_heads)
            numbers = {"heads": n_heads, "d_head": d_head, "scale": d_head**-0.5, "dropout": 0.0, "causal": causal}
            numbers["d_model"] = n_heads * d_in if is_function else d_in
            for (variant, with_optional), idle in itertools.product(_variants(free), _open_masks(free)):
                convention = CallConvention(
                    slots=slots,
                    axes=axes,
                    is_function=is_function,
                    extras=_extras(free, numbers, variant, with_optional=with_optional),
                    idle=idle,
                    n_heads=n_heads if is_function and "head" in axes else 1,
                    fixed=fixed,
                )
                yield replace(
                    like,
                    convention=convention,
                    sizes=InputSizes(*lengths, d_in, d_context),
                    n_heads=convention.n_heads,
                    n_rows=len(parts),
                    tensors=_weights(free, n_heads, d_in, like, transposed=variant > 0),
                    is_forgetful=_is_small(module),
                )


def _slots(free: list[CallParameter], built: Built) -> list[tuple[CallParameter, ...]]:
    """The parameters of queries, keys and values: all, then only the required ones. Raises `MhaError` without any."""
    rows = [parameter for parameter in free if parameter.role in ROWS]
    roles = {parameter.role for parameter in rows}
    if {"query", "key"} <= roles:
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


def _extras(
    free: list[CallParameter], numbers: Mapping[str, Any], variant: int, *, with_optional: bool
) -> tuple[ArgumentRecipe, ...]:
    """Recipes for the arguments besides inputs and masks: the required ones, and optional positions with `with_optional`."""
    recipes = []
    for name, role, required, _, _ in free:
        is_wanted = required or role == "training" or (with_optional and role in _OPTIONAL)
        if not is_wanted or role in (*ROWS, *MASKS, "rest", "unknown"):
            continue
        if role == "rope":
            recipes.append(ArgumentRecipe(name, "rope", numbers["d_head"], variant))
        elif role in ("weight", "weight bias"):
            recipes.append(ArgumentRecipe(name, "weight"))
        else:
            value = numbers.get(role, False if role in ("pattern", "mean", "off") else None)
            recipes.append(ArgumentRecipe(name, role, value, variant))
    return tuple(recipes)


def _variants(free: list[CallParameter]) -> list[tuple[int, bool]]:
    """The shapes of the extra arguments to try, without optional ones and then with them."""
    shaped = any(p.required and p.role in (*_OPTIONAL, "weight") for p in free)
    optional = any(not p.required and p.role in _OPTIONAL for p in free)
    required = [(n, False) for n in range(N_ROTATIONS if shaped else 1)]
    return required + [(n, True) for n in range(N_ROTATIONS if optional else 0)]


def _open_masks(free: list[CallParameter]) -> list[tuple[tuple[str, MaskForm | None], ...]]:
    """Values for the required masks, by name: None, then masks that hide nothing."""
    padding: list[tuple[AxisNames, MaskKind]] = [
        (("batch", "key"), "bool"),
        (("batch", "key"), "01"),
        (PATTERN_AXES, "bool"),
    ]
    wide: list[tuple[AxisNames, MaskKind]] = [
        (PATTERN_AXES, "bool"),
        (("query", "key"), "bool"),
        (PATTERN_AXES, "additive"),
    ]
    wide += [(("query", "key"), "additive"), (("batch", "query", "key"), "bool"), (("batch", "key"), "bool")]
    choices = []
    for parameter in free:
        is_empty = isinstance(parameter.default, Tensor) and parameter.default.numel() == 0
        if (parameter.required or is_empty) and parameter.role in MASKS:
            own = {"padding": padding, "lengths": [(("batch",), "lengths"), *padding]}.get(parameter.role, wide)
            forms = [MaskForm(parameter.name, axes, kind) for axes, kind in own]
            choices.append([(parameter.name, form) for form in (None, *forms)])
    return list(itertools.product(*choices))


def _weights(
    free: list[CallParameter], n_heads: int, d_model: int, like: UserAttention, *, transposed: bool
) -> dict[str, Tensor]:
    """Random float64 weights for a function's weight parameters, `[d_out, d_model]` or `transposed`."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for parameter in free:
        if not parameter.required or parameter.role not in ("weight", "weight bias"):
            continue
        name = parameter.name.lower()
        n_fused = 3 if "qkv" in name or "in" in name.split("_") else 2 if "kv" in name else 1
        shape = (n_fused * d_model, d_model) if parameter.role == "weight" else (n_fused * d_model,)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        drawn *= d_model**-0.5 if parameter.role == "weight" else 0.3
        tensors[parameter.name] = (drawn.T if transposed else drawn).contiguous().to(like.device, like.dtype)
    return tensors


# -------------------------------------------------------------------------------------------------------------- layouts


def _layouts(
    built: Built, slots: tuple[CallParameter, ...], taken: set[int], *, is_function: bool
) -> Iterator[tuple[AxisNames, _Lengths]]:
    """The axes of the inputs with their lengths (batch, queries, keys): lengths that differ come first, because only the right
    axes take them."""
    states = {**vars(built.module or object), **built.arguments}
    is_second = states.get("batch_first", True) is False or _unpacks_length_first(built)
    orders = _OF_HEADS if is_function else (_BATCH_SECOND, ROW_AXES) if is_second else (ROW_AXES,)
    limits = sorted(limit for limit in _limits(built) if 1 < limit <= _LONGEST)
    most = limits[0] if limits else _LONGEST
    batch = _pick((3, 4, 6), taken, _LONGEST)
    q_len = _pick((5, 7, 9, 6), taken | {batch}, most)
    k_len = _pick((11, 13, 10, 9, 8, 7, 6, 5, 4, 3, 2), taken | {batch, q_len}, most)
    same = _pick((7, 5, 9, 6, 4, 3, 2), taken | {batch}, most)
    if len(slots) > 1 and q_len != k_len:
        yield from ((axes, (batch, q_len, k_len)) for axes in orders)
    windows = [2 * size for name, size in states.items() if "window" in name and type(size) is int and 1 < size < most]
    for length in dict.fromkeys([*windows, same, *limits, *(n for n in (8, 16) if n <= most)]):
        yield from ((axes, (batch + (batch == length), length, length)) for axes in orders)
    if not is_function:
        yield _MAP, (batch, 12, 12)


def _pick(preferred: tuple[int, ...], taken: set[int], most: int) -> int:
    """The first number that has no other meaning, else the first that is not too large."""
    small = [number for number in preferred if number <= most] or [most]
    return next((number for number in small if number not in taken), small[0])


def _unpacks_length_first(built: Built) -> bool:
    """Whether the code calls the first axis of its inputs a length and the second a batch: `T, B, C = x.shape`."""
    length, batch = r"(t|l|s|n?_?seq\w*|\w*len\w*|time|steps)", r"(b|n|bs\w*|batch\w*)"
    first = rf"^\s*{length}, *{batch}, *\w+ *= *\w+\.(shape|size\(\))"
    return re.search(first, source_of(called_function(built.call)), re.M | re.I) is not None


def _limits(built: Built) -> Iterator[int]:
    """The longest texts, or the only ones, that the module takes: stated, or the sizes of its masks and tables."""
    stated_limit = stated(built.arguments, "context_length")
    if isinstance(stated_limit, int):
        yield stated_limit
    if built.module is not None:
        yield from (buffer.shape[-1] for buffer in built.module.buffers() if buffer.ndim > 1 and _is_square(buffer))
        names = [(name, p) for name, p in _matrices(built.module) if re.search(r"pos|rel|(^|\.)er$", name, re.I)]
        yield from (parameter.shape[-2] for _, parameter in names)


def _is_square(buffer: Tensor) -> bool:
    return buffer.shape[-1] == buffer.shape[-2]


# ---------------------------------------------------------------------------------------------------------------- sizes


def _known_sizes(built: Built) -> dict[str, Any]:
    """The number and the width of the heads, as far as arguments and attributes state them, and the numbers that are `taken`:
    a length that equals one of them would not show which axis it is."""
    attributes = {} if built.module is None else vars(built.module)
    states = {name: size for name, size in attributes.items() if type(size) is int} | dict(built.arguments)
    counts = [size for size in states.values() if type(size) is int and size > 0]
    n_heads, d_head, width = (stated(states, role) for role in ("n_heads", "d_head", "d_model"))
    n_heads, d_head, width = (size if isinstance(size, int) and size > 0 else None for size in (n_heads, d_head, width))
    if width and d_head and not n_heads:
        n_heads = width // d_head
    if width and n_heads and not d_head:
        d_head = width // n_heads
    shapes = [size for _, parameter in _matrices(built.module) for size in parameter.shape]
    return {"n_heads": n_heads, "d_head": d_head, "taken": {*counts, *shapes, n_heads, d_head}}


def _matrices(module: nn.Module | None) -> list[tuple[str, Tensor]]:
    if module is None:
        return []
    return [(name, p) for name, p in module.named_parameters() if not nn.parameter.is_lazy(p) and p.ndim > 1]


def _widths(built: Built, sizes: Mapping[str, Any], n_heads: int, *, is_function: bool) -> list[int]:
    """The widths of the inputs to try: what the queries are projected from, what the arguments state, what any layer takes."""
    if is_function:
        return [sizes["d_head"] or FREE_HEAD_WIDTH]
    found = _linear_widths(built.module, r"(^|[._])(w?_?q|to_?q|query|queries|qkv|c_attn|in_proj|w?qkv)")[:1]
    width = stated(built.arguments, "d_model")
    found += [width] if isinstance(width, int) else []
    found += _linear_widths(built.module, "")[:1]
    sides = [size for _, parameter in _matrices(built.module) for size in parameter.shape[-2:] if size > 1]
    free = [n_heads * FREE_HEAD_WIDTH] if n_heads != FREE_HEADS else [FREE_WIDTH]
    return list(dict.fromkeys(found or sides or free))[:3]


def _context_width(module: nn.Module | None, d_in: int) -> int:
    """The width of the keys: what they are projected from."""
    return next(iter(_linear_widths(module, r"(^|[._])(w?_?kv?|to_?kv?|keys?|key_value)")), d_in)


def _linear_widths(module: nn.Module | None, pattern: str) -> list[int]:
    """The input widths of the linear layers with a matching name, in order of creation."""
    parts = [] if module is None else [part for name, part in module.named_modules() if re.search(pattern, name, re.I)]
    widths = []
    for part in parts:
        if isinstance(part, nn.Linear):
            widths.append(part.in_features)
        elif isinstance(part, nn.Conv1d | nn.Conv2d):
            widths.append(part.in_channels)
        elif type(part).__name__ == "Conv1D":
            widths.append(part.weight.shape[0])
    return [width for width in widths if width > 0]


def _has_weights(built: Built) -> bool:
    """Whether the target projects, with parameters of its own or of modules that it holds."""
    attributes = list(getattr(built.call, "__dict__", {}).values())
    if built.module is None and any(isinstance(part, nn.Module) for part in attributes):
        return True
    tensors = [*attributes, *([] if built.module is None else built.module.parameters())]
    return any(isinstance(part, Tensor) and (nn.parameter.is_lazy(part) or part.ndim in (2, 3)) for part in tensors)


def _is_small(module: nn.Module | None) -> bool:
    """Whether a module may be copied for each call, so that no state passes to the next."""
    if module is None:
        return True
    parameters = list(module.parameters())
    is_lazy = any(nn.parameter.is_lazy(parameter) for parameter in parameters)
    return not is_lazy and sum(p.numel() for p in itertools.chain(parameters, module.buffers())) <= _LARGEST_COPIED
