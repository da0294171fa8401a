"""The convention by which a user's attention is called: its arguments and masks, and the output in what it returns."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.usercode.call.signature import CallParameter, argument_names
from mhacli.usercode.inputs import cast_dtype
from mhacli.usercode.types import AttentionOutput, Inputs, MaskForm

AxisNames = tuple[str, ...]
Path = tuple[int | str | tuple[str], ...]
"""Steps into a result: the index in a tuple or list, the key of a dict, or `(name,)` for an attribute."""

ROW_AXES: AxisNames = ("batch", "row", "width")
HEAD_AXES: AxisNames = ("batch", "head", "row", "width")
PATTERN_AXES: AxisNames = ("batch", "head", "query", "key")
MERGED = "head·width"
"""An axis with the heads side by side."""
_OUTPUT_NAMES = re.compile(
    r"(attn|attention|self_attn|attention_)?_?(out|outputs?|result|context(_layer|_vec\w*)?|hidden_states?|last_hidden_state|z|y|x)"
)
_PARTS = {"x": "queries", "query": "queries", "value": "values"}
_DEEPEST = 3


class AxisSizes(NamedTuple):
    """The sizes of the axes in one call."""

    batch: int
    head: int
    q_len: int
    k_len: int


class ResultPath(NamedTuple):
    """The location and the axes of a tensor in a result."""

    path: Path
    axes: AxisNames


class CallMasks(NamedTuple):
    """The forms of a call's masks."""

    mask: MaskForm | None = None
    padding: MaskForm | None = None


NO_PATH = ResultPath((), ())
"""The output path of a convention that was never tried."""


@dataclass(frozen=True)
class CallConvention:
    """How to call a user's attention, and where its output is in the result.

    `slots` are the parameters of queries, keys and values, and `axes` those of each input. `extras` are the other arguments, and
    `fixed` those with a value from the user. `idle` are required masks, with the form of an open mask (None: pass None).
    `causal_by` is the switch that makes it causal. With an `example`, a function of the callable and a length (`is_resizable`) or
    of the callable alone, the call is the one that it makes, with other inputs and masks in it.
    """

    slots: tuple[CallParameter, ...]
    axes: AxisNames
    is_function: bool
    extras: tuple[ArgumentRecipe, ...] = ()
    idle: tuple[tuple[str, MaskForm | None], ...] = ()
    output: ResultPath = NO_PATH
    causal_by: str | None = None
    n_heads: int = 1
    fixed: Mapping[str, Any] = field(default_factory=dict)
    example: Callable[..., Any] | None = None
    is_resizable: bool = True

    @property
    def canonical(self) -> AxisNames:
        """Our order of axes for these inputs."""
        return HEAD_AXES if self.is_function else ROW_AXES


def part_of(slot: CallParameter) -> str:
    """What a parameter takes: queries, keys, or values."""
    return _PARTS.get(slot.role, "keys")


class ArgumentRecipe(NamedTuple):
    """How to make an argument for each call: its `kind`, a `value` for that kind, and the `variant` of its shape."""

    parameter: str
    kind: str
    value: Any = None
    variant: int = 0


class CallSetting(NamedTuple):
    """The facts that arguments depend on: sizes, dtype, device, training mode, weights by name, and the position of the first
    token."""

    sides: AxisSizes
    dtype: torch.dtype
    device: torch.device
    training: bool
    tensors: Mapping[str, Tensor]
    start: int = 0


# ------------------------------------------------------------------------------------------------------------------ calls


@contextmanager
def quietly(call: Callable[..., Any], training: bool) -> Iterator[None]:
    """Disables gradients and warnings, sets `train` or `eval` mode, and restores the mode afterwards."""
    module = call if isinstance(call, nn.Module) else None
    states = [(part, part.training) for part in module.modules()] if module is not None else []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            if module is not None:
                module.train(training)
            yield
        finally:
            for part, state in states:
                part.training = state


def sides_of(inputs: Inputs, convention: CallConvention) -> AxisSizes:
    """The axis sizes of a call with these inputs."""
    keys = inputs.queries if inputs.keys is None else inputs.keys
    n_heads = inputs.queries.shape[1] if convention.is_function else convention.n_heads
    return AxisSizes(inputs.queries.shape[0], n_heads, inputs.queries.shape[-2], keys.shape[-2])


def call_with(
    call: Callable[..., Any],
    convention: CallConvention,
    inputs: Inputs,
    setting: CallSetting,
    forms: CallMasks = CallMasks(),  # noqa: B008
) -> Any:
    """The raw result of the call. The sizes are those of `inputs`, not `setting.sides`. Raises what the call raises."""
    setting = setting._replace(sides=sides_of(inputs, convention))
    rows = _rows(convention, inputs, setting)
    masks = _masks(convention, inputs, setting, forms)
    if convention.example is not None:
        made = _by_example(call, convention, rows | masks, setting)
        with quietly(call, setting.training):
            return convention.example(made, *[setting.sides.q_len][: convention.is_resizable])
    by_place = [slot.name for slot in convention.slots if slot.by_place]
    positional = [rows.pop(name) for name in by_place if name in rows]
    extras = {recipe.parameter: make_argument(recipe, setting) for recipe in convention.extras}
    with quietly(call, setting.training):
        return call(*positional, **convention.fixed, **rows, **(extras | masks))


def _by_example(
    call: Callable[..., Any], convention: CallConvention, given: Mapping[str, Any], setting: CallSetting
) -> Callable[..., Any]:
    """The callable for an example: some of its arguments are replaced by those `given`, by name."""

    def ready(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return argument.to(setting.device, cast_dtype(argument, setting.dtype))
        return type(argument)(map(ready, argument)) if type(argument) in (tuple, list) else argument

    def made(*positional: Any, **keywords: Any) -> Any:
        names = argument_names(call, len(positional))
        values = [given.get(name, ready(value)) for name, value in zip(names, positional, strict=True)]
        return call(*values, **{name: given.get(name, ready(value)) for name, value in keywords.items()})

    return made


def _rows(convention: CallConvention, inputs: Inputs, setting: CallSetting) -> dict[str, Tensor]:
    """The token vectors of a call, by parameter; without those that self-attention may omit."""
    rows = {}
    for slot in convention.slots:
        part = inputs.queries
        if part_of(slot) != "queries":
            separate = inputs.keys if part_of(slot) == "keys" or inputs.values is None else inputs.values
            if separate is None and not slot.required:
                continue
            part = inputs.queries if separate is None else separate
        own = rearranged(part.to(setting.device, setting.dtype), convention.canonical, convention.axes)
        rows[slot.name] = own.contiguous().clone()
    return rows


def _masks(convention: CallConvention, inputs: Inputs, setting: CallSetting, forms: CallMasks) -> dict[str, Any]:
    """The mask arguments of a call, by name."""
    sides, device, dtype = setting.sides, setting.device, setting.dtype
    masks: dict[str, Any] = {}
    for name, form in convention.idle:
        masks[name] = None if form is None else open_mask(form, sides, device, dtype)
    allowed = None if inputs.allowed is None else inputs.allowed.to(device)
    real = None if inputs.real is None else inputs.real.to(device)
    for needed, form in ((allowed, forms.mask), (real, forms.padding)):
        if needed is not None and form is None:
            raise ValueError("inputs with a mask must come with its form, got none")
    is_one = forms.mask is not None and forms.padding is not None and forms.mask.parameter == forms.padding.parameter
    if allowed is not None and forms.mask is not None:
        masks[forms.mask.parameter] = write_mask(forms.mask, allowed, real if is_one else None, sides, dtype)
    if real is not None and forms.padding is not None and not (is_one and allowed is not None):
        masks[forms.padding.parameter] = write_mask(forms.padding, None, real, sides, dtype)
    return masks


def make_argument(recipe: ArgumentRecipe, setting: CallSetting) -> Any:
    """The argument for one call."""
    sides = setting.sides
    if recipe.kind == "rope":
        return _rotation(recipe, setting)
    if recipe.kind in ("positions", "positions backwards"):
        q_idx = torch.arange(setting.start, setting.start + sides.q_len, device=setting.device)
        q_idx = q_idx if recipe.kind == "positions" else q_idx.flip(-1)
        return (q_idx[None], q_idx, q_idx.expand(sides.batch, -1))[min(recipe.variant, 2)]
    if recipe.kind == "weight":
        return setting.tensors[recipe.parameter].clone()
    if recipe.kind == "offset":
        return torch.tensor(setting.start, device=setting.device) if recipe.variant else setting.start
    numbers = {"training": setting.training, "batch": sides.batch, "q_len": sides.q_len, "k_len": sides.k_len}
    return numbers.get(recipe.kind, recipe.value)


# -------------------------------------------------------------------------------------------------------------- rotations


ROPE_BASE = 10000.0
"""Source: Su et al. 2021, "RoFormer", section 3.2.2."""
N_ROTATIONS = 4


def _rotation(recipe: ArgumentRecipe, setting: CallSetting) -> Any:
    """A table of rotations: complex or, for all columns, cosines and sines; the same without an axis in front; cosines and sines
    in pairs; the angles."""
    d_head, name = recipe.value, recipe.parameter.lower()
    column = torch.arange(0, d_head - 1, 2, dtype=torch.float64, device=setting.device)
    position = torch.arange(setting.sides.q_len, dtype=torch.float64, device=setting.device) + setting.start
    half = torch.outer(position, ROPE_BASE ** (-column / d_head))
    whole = torch.cat([half, half], -1)
    is_pair = "emb" in name
    if "cos" in name or "sin" in name:
        shaped = (whole, whole[None], whole[None, None], half)[recipe.variant]
        return (shaped.cos() if "cos" in name else shaped.sin()).to(setting.dtype)
    if recipe.variant == 1 or (recipe.variant == 0 and is_pair):
        shaped = whole[None] if (recipe.variant == 0) or not is_pair else whole
        return shaped.cos().to(setting.dtype), shaped.sin().to(setting.dtype)
    if recipe.variant == 2:
        return torch.stack([half.cos(), half.sin()], -1).to(setting.dtype)
    if recipe.variant == 3:
        return half.to(setting.dtype)
    is_float64 = setting.dtype == torch.float64
    return torch.polar(torch.ones_like(half), half).to(torch.complex128 if is_float64 else torch.complex64)


def rotation_text(recipe: ArgumentRecipe, setting: CallSetting) -> str:
    """A description of a rotation argument."""
    value = make_argument(recipe, setting)
    tensor = value[0] if isinstance(value, tuple) else value
    kind = "complex" if tensor.is_complex() else "(cos, sin)" if isinstance(value, tuple) else "table"
    return f"{recipe.parameter}: {kind} {list(tensor.shape)}, base {ROPE_BASE:g}"


# ---------------------------------------------------------------------------------------------------------------- masks


def write_mask(
    form: MaskForm, allowed: Tensor | None, real: Tensor | None, sides: AxisSizes, dtype: torch.dtype
) -> Tensor:
    """The mask in the given form, from `allowed`, bool `[batch or 1, 1, query, key]`, `real`, bool `[batch, key]`, or both;
    True = keep.

    The batch axis has full size; other axes have size 1 if the mask is constant along them. Raises ValueError for a mask that
    varies along an axis that the form lacks.
    """
    if form.kind == "lengths":
        return _lengths(real, sides)
    keep = torch.ones((), dtype=torch.bool)
    if allowed is not None:
        keep = allowed
    if real is not None:
        keep = keep.to(real.device) & real[:, None, None, :]
    for dim, axis in enumerate(PATTERN_AXES):
        if axis not in form.axes and keep.shape[dim] > 1:
            first = keep.narrow(dim, 0, 1)
            if not torch.equal(first.expand_as(keep), keep):
                raise ValueError(f"a mask for {form.parameter} must be the same for each {axis}, got different ones")
            keep = first
    if "batch" in form.axes:
        keep = keep.expand(sides.batch, -1, -1, -1)[: sides.batch // form.n_shared]
    keep = rearranged(keep, PATTERN_AXES, form.axes)
    if form.kind == "additive":
        return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill(~keep, -torch.inf)
    marked = keep if form.true_means == "keep" else ~keep
    return marked.to({"01": dtype, "whole": torch.int64}.get(form.kind, torch.bool)).contiguous().clone()


def _lengths(real: Tensor | None, sides: AxisSizes) -> Tensor:
    if real is None:
        return torch.full((sides.batch,), sides.k_len)
    counts = real.sum(-1)
    if not torch.equal(real, torch.arange(real.shape[-1], device=real.device) < counts[:, None]):
        raise ValueError("lengths describe padding on the right only, and here tokens follow padding")
    return counts


def open_mask(form: MaskForm, sides: AxisSizes, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A mask in the given form that hides nothing."""
    allowed = torch.ones(1, 1, sides.q_len, sides.k_len, dtype=torch.bool, device=device)
    return write_mask(form, allowed, None, sides, dtype).to(device)


# -------------------------------------------------------------------------------------------------------------- results


def read_output(result: Any, convention: CallConvention) -> AttentionOutput:
    """A copy of the output in a result, in our order of axes."""
    output = convention.output
    tensor = tensor_at(result, output.path)
    if tensor is None:
        tensor = next((leaf for _, leaf in leaves(result) if leaf.ndim == len(output.axes)), None)
    if tensor is None:
        location = path_text(output.path) or "its top"
        raise ValueError(f"the result must hold the output at {location}, got {type(result).__name__}")
    out = output_of(tensor.detach(), output.axes, convention.canonical, convention.n_heads)
    return AttentionOutput(out.contiguous().clone())


def leaves(result: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in nested tuples, lists, dicts and dataclasses, in order, with its path."""
    if isinstance(result, Tensor):
        yield path, result
    elif len(path) < _DEEPEST:
        for key, part in _parts(result):
            yield from leaves(part, (*path, key))


def _parts(result: Any) -> Iterator[tuple[int | str | tuple[str], Any]]:
    if isinstance(result, Mapping):
        yield from ((key, part) for key, part in result.items() if isinstance(key, str))
    elif isinstance(result, tuple) and hasattr(result, "_fields"):
        yield from (((name,), getattr(result, name)) for name in result._fields)
    elif isinstance(result, list | tuple):
        yield from enumerate(result)
    elif is_dataclass(result):
        yield from (((field.name,), getattr(result, field.name)) for field in fields(result))
    elif type(result).__module__ != "builtins" and hasattr(result, "__dict__"):
        yield from (((name,), part) for name, part in vars(result).items() if not name.startswith("_"))


def tensor_at(result: Any, path: Path) -> Tensor | None:
    """The tensor at a path, None if there is none."""
    return next((tensor for leaf_path, tensor in leaves(result) if leaf_path == path), None)


def path_text(path: Path) -> str:
    """A path in Python syntax: `[0]`, `["out"]`, `.context`."""
    return "".join(f".{key[0]}" if isinstance(key, tuple) else f"[{key!r}]".replace("'", '"') for key in path)


def output_in(result: Any, axes_to_try: Sequence[AxisNames], sides: AxisSizes) -> ResultPath | None:
    """The path of the output among the floating-point tensors that fit one of the axes. It prefers names of outputs, then
    tensors not as wide as a pattern, then earlier axes."""
    found: list[tuple[tuple[bool, bool, int], ResultPath]] = []
    for path, tensor in leaves(result):
        names = [key[0] if isinstance(key, tuple) else key for key in path if not isinstance(key, int)]
        is_unnamed = bool(names) and _OUTPUT_NAMES.fullmatch(str(names[-1]).lower()) is None
        for number, axes in enumerate(axes_to_try):
            if tensor.is_floating_point() and _fits(tensor.shape, axes, sides):
                found.append(((is_unnamed, tensor.shape[-1] == sides.k_len, number), ResultPath(path, axes)))
    return min(found, key=lambda ranked: ranked[0])[1] if found else None


def _fits(shape: Sequence[int], axes: AxisNames, sides: AxisSizes) -> bool:
    """Whether a tensor of this shape may have these axes. A width may have any size but 0."""
    if len(shape) != len(axes) or 0 in shape:
        return False
    if MERGED in axes and shape[axes.index(MERGED)] % sides.head:
        return False
    sizes = {"batch": sides.batch, "head": sides.head, "row": sides.q_len}
    if "column" in axes:
        sizes["row"], sizes["column"] = _grid(sides.q_len)
    return all(sizes.get(axis, size) == size for size, axis in zip(shape, axes, strict=True))


def _grid(length: int) -> tuple[int, int]:
    """The height and the width of a map of so many cells, as square as possible."""
    height = next(n for n in range(math.isqrt(length), 0, -1) if length % n == 0)
    return height, length // height


def rearranged(tensor: Tensor, have: AxisNames, want: AxisNames) -> Tensor:
    """The tensor with its axes in another order. Extra axes are squeezed, missing ones are added with size 1; the rows lie on a
    map where a `column` is wanted. Raises ValueError for an extra axis of another size."""
    if "column" in want and "column" not in have:
        dim = have.index("row")
        tensor, have = tensor.unflatten(dim, _grid(tensor.shape[dim])), (*have[: dim + 1], "column", *have[dim + 1 :])
    if "column" in have and "column" not in want:
        dim = have.index("row")
        tensor, have = tensor.flatten(dim, dim + 1), (*have[: dim + 1], *have[dim + 2 :])
    for axis in [axis for axis in have if axis not in want]:
        dim = have.index(axis)
        if tensor.shape[dim] != 1:
            raise ValueError(f"{axis} must be 1 for a call without that axis, got {tensor.shape[dim]}")
        tensor, have = tensor.squeeze(dim), have[:dim] + have[dim + 1 :]
    for axis in [axis for axis in want if axis not in have]:
        tensor, have = tensor.unsqueeze(0), (axis, *have)
    return tensor.permute([have.index(axis) for axis in want])


def output_of(tensor: Tensor, axes: AxisNames, canonical: AxisNames, n_heads: int) -> Tensor:
    """The output in our order of axes."""
    if MERGED in axes:
        dim = axes.index(MERGED)
        tensor = tensor.unflatten(dim, (n_heads, -1))
        axes = (*axes[:dim], "head", "width", *axes[dim + 1 :])
    return rearranged(tensor, axes, canonical)
