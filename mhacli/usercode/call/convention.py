"""The call convention of a user's attention: builds its arguments, and converts its results to our order of axes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.usercode.call.signature import AxisNames, CallParameter
from mhacli.usercode.types import AttentionOutput, Inputs, MaskForm

Key = int | str | tuple[str]
"""A step into a result: the index in a tuple or list, the key of a dict, or `(name,)` for an attribute."""
Path = tuple[Key, ...]

ROW_AXES: AxisNames = ("batch", "row", "width")
HEAD_AXES: AxisNames = ("batch", "head", "row", "width")
PATTERN_AXES: AxisNames = ("batch", "head", "query", "key")
MERGED = "head·width"
"""An axis with the heads side by side."""
_OUTPUT_NAMES = re.compile(
    r"(attn|attention|self_attn|attention_)?_?(out|outputs?|result|context(_layer|_vec\w*)?|hidden_states?|last_hidden_state|z|y|x)"
)
_PATTERN_NAMES = re.compile(
    r".*(weights?|attn|attention|attentions|pattern|probs|probabilities|probas|scores|att|map|alpha|a|p|w)s?"
)
_DEEPEST = 3
_SUM_TOLERANCE = 1e-3
"""The tolerance for the row sums of a pattern, enough for half precision."""


class AxisSizes(NamedTuple):
    """The sizes of the axes in one call."""

    batch: int
    head: int
    q_len: int
    k_len: int

    def of(self, axis: str) -> int | None:
        """The size of an axis, None if any size is valid."""
        sizes = {"batch": self.batch, "head": self.head, "row": self.q_len, "query": self.q_len, "key": self.k_len}
        return sizes.get(axis)


class ResultPath(NamedTuple):
    """The location and the axes of a tensor in a result."""

    path: Path
    axes: AxisNames


RowPart = Literal["queries", "keys", "values"]


class RowArgument(NamedTuple):
    """A parameter for queries, keys or values. `required` is False if self-attention may omit it."""

    parameter: str
    part: RowPart
    required: bool = True
    by_place: bool = False


class CallMasks(NamedTuple):
    """The forms of a call's masks."""

    mask: MaskForm | None = None
    padding: MaskForm | None = None


NO_PATH = ResultPath((), ())
"""The output path of a convention that was never tried."""


@dataclass(frozen=True)
class CallConvention:
    """How to call a user's attention, and where its output and pattern are in the result.

    `axes` are the axes of the inputs, without "batch" if each call takes one sequence; `output` and `pattern` give path and
    axes. `idle` are required masks, with the form of an open mask (None: pass None). `spread` lists padding masks, by parameter
    and axes, that must be repeated for each query. `causal_yields`: calls with a mask omit the switch `causal_by`, because it
    excludes a mask.
    """

    slots: tuple[RowArgument, ...]
    axes: AxisNames
    is_function: bool
    extras: tuple[ArgumentRecipe, ...] = ()
    idle: tuple[tuple[str, MaskForm | None], ...] = ()
    output: ResultPath = NO_PATH
    pattern: ResultPath | None = None
    spread: frozenset[tuple[str, AxisNames]] = frozenset()
    causal_by: str | None = None
    causal_yields: bool = False
    n_heads: int = 1
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def canonical(self) -> AxisNames:
        """Our order of axes for these inputs."""
        return HEAD_AXES if self.is_function else ROW_AXES

    @property
    def batched(self) -> bool:
        """Whether one call takes all sequences."""
        return "batch" in self.axes


class CallResult(NamedTuple):
    """The raw results of a call, one or one for each sequence, with the sizes of each call."""

    results: tuple[Any, ...]
    sides: AxisSizes


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


def call_with(
    call: Callable[..., Any],
    convention: CallConvention,
    inputs: Inputs,
    setting: CallSetting,
    forms: CallMasks = CallMasks(),  # noqa: B008
) -> CallResult:
    """The raw results of the call. The sizes are those of `inputs`, not `setting.sides`. Raises what the call raises."""
    sides = sides_of(inputs, convention)
    if convention.batched:
        return CallResult((_call_once(call, convention, inputs, setting._replace(sides=sides), forms),), sides)
    single_sides = sides._replace(batch=1)
    parts = [_sequence(inputs, number) for number in range(sides.batch)]
    return CallResult(
        tuple(_call_once(call, convention, part, setting._replace(sides=single_sides), forms) for part in parts),
        single_sides,
    )


def sides_of(inputs: Inputs, convention: CallConvention) -> AxisSizes:
    """The axis sizes of a call with these inputs."""
    keys = inputs.queries if inputs.keys is None else inputs.keys
    n_heads = inputs.queries.shape[1] if convention.is_function else convention.n_heads
    return AxisSizes(inputs.queries.shape[0], n_heads, inputs.queries.shape[-2], keys.shape[-2])


def _sequence(inputs: Inputs, number: int) -> Inputs:
    def select(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[number : number + 1] if tensor.shape[0] > 1 else tensor

    return Inputs(inputs.queries[number : number + 1], *(select(tensor) for tensor in inputs[1:]))


def _call_once(
    call: Callable[..., Any], convention: CallConvention, inputs: Inputs, setting: CallSetting, forms: CallMasks
) -> Any:
    positional, keywords = _arguments(convention, inputs, setting, forms)
    with quietly(call, setting.training):
        return call(*positional, **keywords)


def _arguments(
    convention: CallConvention, inputs: Inputs, setting: CallSetting, forms: CallMasks
) -> tuple[list[Any], dict[str, Any]]:
    positional: list[Any] = []
    keywords: dict[str, Any] = dict(convention.fixed)
    masks = _masks(convention, inputs, setting, forms)
    for slot in convention.slots:
        rows = _rows(inputs, slot)
        if rows is None:
            continue
        argument = (
            rearranged(rows.to(setting.device, setting.dtype), convention.canonical, convention.axes)
            .contiguous()
            .clone()
        )
        if slot.by_place:
            positional.append(argument)
        else:
            keywords[slot.parameter] = argument
    has_mask = (
        any(name not in dict(convention.idle) for name in masks)
        or inputs.allowed is not None
        or inputs.real is not None
    )
    for recipe in convention.extras:
        if not (has_mask and convention.causal_yields and recipe.parameter == convention.causal_by):
            keywords[recipe.parameter] = make_argument(recipe, setting)
    return positional, keywords | masks


def _rows(inputs: Inputs, slot: RowArgument) -> Tensor | None:
    """The tensor for a parameter; None if self-attention omits it."""
    if slot.part == "queries":
        return inputs.queries
    tensor = inputs.keys if slot.part == "keys" or inputs.values is None else inputs.values
    if tensor is None and slot.required:
        return inputs.queries
    return tensor


def _masks(convention: CallConvention, inputs: Inputs, setting: CallSetting, forms: CallMasks) -> dict[str, Any]:
    """The mask arguments of a call, by name."""
    masks: dict[str, Any] = {}
    sides, device, dtype = setting.sides, setting.device, setting.dtype
    for name, form in convention.idle:
        masks[name] = None if form is None else open_mask(form, sides, device, dtype)
    mask, padding = forms.mask, forms.padding
    allowed = None if inputs.allowed is None else inputs.allowed.to(device)
    real = None if inputs.real is None else inputs.real.to(device)
    if allowed is not None and mask is None:
        raise ValueError("inputs.allowed must come with the form of a mask, got none")
    if real is not None and padding is None:
        raise ValueError("inputs.real must come with the form of a padding mask, got none")
    both = allowed is not None and real is not None
    if both and mask is not None and padding is not None and mask.parameter == padding.parameter:
        return masks | {mask.parameter: write_mask(mask, allowed, real, sides, dtype)}
    if allowed is not None and mask is not None:
        masks[mask.parameter] = write_mask(mask, allowed, None, sides, dtype)
    if real is not None and padding is not None:
        all_allowed = None
        if (padding.parameter, padding.axes) in convention.spread:
            all_allowed = torch.ones(1, 1, sides.q_len, sides.k_len, dtype=torch.bool, device=device)
        masks[padding.parameter] = write_mask(padding, all_allowed, real, sides, dtype)
    return masks


def read_output(call_result: CallResult, convention: CallConvention) -> AttentionOutput:
    """Copies of the output and the pattern in a result, in our order of axes."""
    outs, patterns = [], []
    for result in call_result.results:
        tensor = tensor_at(result, convention.output.path)
        if tensor is None:
            tensor = next((leaf for _, leaf in leaves(result) if leaf.ndim == len(convention.output.axes)), None)
        if tensor is None:
            location = path_text(convention.output.path) or "its top"
            raise ValueError(f"the result must hold the output at {location}, got {type(result).__name__}")
        outs.append(output_of(tensor.detach(), convention.output.axes, convention.canonical, call_result.sides.head))
        pattern = None if convention.pattern is None else tensor_at(result, convention.pattern.path)
        if pattern is not None and convention.pattern is not None and pattern.ndim == len(convention.pattern.axes):
            patterns.append(pattern_of(pattern.detach(), convention.pattern.axes, call_result.sides.batch))
    pattern_found = torch.cat(patterns) if len(patterns) == len(outs) else None
    return AttentionOutput(
        torch.cat(outs).contiguous().clone(), None if pattern_found is None else pattern_found.contiguous().clone()
    )


# ------------------------------------------------------------------------------------------------------ other arguments


ROPE_BASE = 10000.0
"""Source: Su et al. 2021, "RoFormer", section 3.2.2."""
N_VARIANTS = 5


class ArgumentRecipe(NamedTuple):
    """How to make an argument for each call: its `kind`, a `value` for that kind, and the `variant` of its shape."""

    parameter: str
    kind: str
    value: Any = None
    variant: int = 0


class CallSetting(NamedTuple):
    """The facts that arguments depend on: sizes, dtype, device, training mode, and weights by name."""

    sides: AxisSizes
    dtype: torch.dtype
    device: torch.device
    training: bool
    tensors: Mapping[str, Tensor]


def recipe_for(
    parameter: CallParameter, *, n_heads: int, d_head: int, d_model: int, causal: bool, variant: int
) -> ArgumentRecipe | None:
    """The recipe for a required argument; None for an unknown role."""
    name, role = parameter.name, parameter.role
    numbers = {"heads": n_heads, "d_head": d_head, "d_model": d_model, "scale": d_head**-0.5, "dropout": 0.0}
    if role in numbers:
        return ArgumentRecipe(name, "literal", numbers[role])
    if role in ("cache", "other mask"):
        return ArgumentRecipe(name, "literal", None)
    if role in ("pattern", "mean", "off"):
        return ArgumentRecipe(name, "literal", False)
    if role == "causal":
        return ArgumentRecipe(name, "literal", causal)
    if role == "rope":
        return ArgumentRecipe(name, "rope", d_head, variant)
    if role in ("training", "positions", "offset", "batch", "q_len", "k_len", "weight", "weight bias"):
        return ArgumentRecipe(name, role, None, variant)
    return None


def make_argument(recipe: ArgumentRecipe, setting: CallSetting) -> Any:
    """The argument for one call."""
    sides = setting.sides
    makers: dict[str, Callable[[], Any]] = {
        "literal": lambda: recipe.value,
        "training": lambda: setting.training,
        "batch": lambda: sides.batch,
        "q_len": lambda: sides.q_len,
        "k_len": lambda: sides.k_len,
        "offset": lambda: torch.tensor(0, device=setting.device) if recipe.variant else 0,
        "positions": lambda: _positions(recipe.variant, setting),
        "positions backwards": lambda: _positions(recipe.variant, setting).flip(-1),
        "rope": lambda: _rotation(recipe, setting),
        "weight": lambda: setting.tensors[recipe.parameter].clone(),
        "weight bias": lambda: setting.tensors[recipe.parameter].clone(),
    }
    return makers[recipe.kind]()


def _positions(variant: int, setting: CallSetting) -> Tensor:
    q_idx = torch.arange(setting.sides.q_len, device=setting.device)
    return (q_idx[None], q_idx, q_idx.expand(setting.sides.batch, -1))[min(variant, 2)]


def angles(q_len: int, d_head: int, device: torch.device) -> Tensor:
    """The rotation angles `[row, d_head / 2]` in float64."""
    column = torch.arange(0, d_head - 1, 2, dtype=torch.float64, device=device)
    return torch.outer(torch.arange(q_len, dtype=torch.float64, device=device), ROPE_BASE ** (-column / d_head))


def _rotation(recipe: ArgumentRecipe, setting: CallSetting) -> Any:
    name, half = recipe.parameter.lower(), angles(setting.sides.q_len, recipe.value, setting.device)
    doubled = torch.cat([half, half], -1)
    shaped = (doubled, doubled[None], doubled[None, None], half, half[None])[min(recipe.variant, 4)]
    if "cos" in name:
        return shaped.cos().to(setting.dtype)
    if "sin" in name:
        return shaped.sin().to(setting.dtype)
    paired = name.startswith(("position_emb", "pos_emb"))
    if paired:
        shaped = doubled[None] if recipe.variant == 0 else doubled if recipe.variant == 1 else shaped
    if paired or recipe.variant in (1, 2):
        return (shaped.cos().to(setting.dtype), shaped.sin().to(setting.dtype))
    if recipe.variant == 0 or setting.dtype.is_complex:
        is_float64 = setting.dtype == torch.float64
        return torch.polar(torch.ones_like(half), half).to(torch.complex128 if is_float64 else torch.complex64)
    return (half if recipe.variant == 3 else doubled).to(setting.dtype)


def rotation_text(recipe: ArgumentRecipe, setting: CallSetting) -> str:
    """A description of a rotation argument."""
    value = make_argument(recipe, setting)
    tensor = value[0] if isinstance(value, tuple) else value
    kind = "complex" if tensor.is_complex() else "(cos, sin)" if isinstance(value, tuple) else "half rotation"
    return f"{recipe.parameter}: {kind} {list(tensor.shape)}, base {ROPE_BASE:g}"


def weights_for(
    parameters: tuple[CallParameter, ...], *, n_heads: int, d_model: int, variant: int, seed: int
) -> dict[str, Tensor]:
    """Random float64 weights for a function's weight parameters, `[d_model, d_model]` for variant 0.

    Further variants have fused weights `[d_model, 3·d_model]`, and a matrix for each head.
    """
    generator = torch.Generator().manual_seed(seed)
    d_head, tensors = d_model // n_heads, {}
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
        tensors[parameter.name] = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return tensors


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
    return _of_kind(keep, form, dtype).contiguous().clone()


def _of_kind(keep: Tensor, form: MaskForm, dtype: torch.dtype) -> Tensor:
    if form.kind == "additive":
        return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill(~keep, -torch.inf)
    marked = keep if form.true_means == "keep" else ~keep
    if form.kind == "bool":
        return marked
    return marked.to(dtype if form.kind == "01" else torch.int64)


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
    if form.kind == "lengths":
        return _lengths(None, sides).to(device)
    return write_mask(form, allowed, None, sides, dtype)


# -------------------------------------------------------------------------------------------------------------- results


def leaves(result: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in nested tuples, lists, dicts and dataclasses, in order, with its path."""
    if isinstance(result, Tensor):
        yield path, result
    elif len(path) < _DEEPEST:
        for key, part in _parts(result):
            yield from leaves(part, (*path, key))


def _parts(result: Any) -> Iterator[tuple[Key, Any]]:
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


def parts_of(result: Any) -> list[tuple[Path, Any]]:
    """The top-level parts of a result with their paths; empty for a tensor."""
    return [] if isinstance(result, Tensor) else [((key,), part) for key, part in _parts(result)]


def part_at(result: Any, path: Path) -> Any:
    """The part at a path. Raises ValueError if there is none."""
    for step in path:
        parts = dict(_parts(result))
        if step not in parts:
            raise ValueError(f"the result must hold something at {path_text(path)}")
        result = parts[step]
    return result


def tensor_at(result: Any, path: Path) -> Tensor | None:
    """The tensor at a path, None if there is none."""
    return next((tensor for leaf_path, tensor in leaves(result) if leaf_path == path), None)


def path_text(path: Path) -> str:
    """A path in Python syntax: `[0]`, `["out"]`, `.context`."""
    return "".join(f".{key[0]}" if isinstance(key, tuple) else f"[{key!r}]".replace("'", '"') for key in path)


def fits(shape: Sequence[int], axes: AxisNames, sides: AxisSizes) -> bool:
    """Whether a tensor of this shape may have these axes. A width may have any size but 0."""
    if len(shape) != len(axes) or 0 in shape:
        return False
    for size, axis in zip(shape, axes, strict=True):
        if axis == MERGED and size % sides.head:
            return False
        if axis == "batch·head" and (size % sides.batch or size == sides.batch):
            return False
        expected = 1 if axis == "1" else sides.of(axis)
        if expected is not None and size != expected:
            return False
    return True


def output_in(result: Any, axes_to_try: Sequence[AxisNames], sides: AxisSizes) -> ResultPath | None:
    """The path of the output among the floating-point tensors that fit one of the axes. It prefers names of outputs, then
    tensors not as wide as a pattern, then earlier axes."""
    candidates = [
        (_output_rank(path, tensor, sides.k_len), number, ResultPath(path, axes))
        for path, tensor in leaves(result)
        for number, axes in enumerate(axes_to_try)
        if tensor.is_floating_point() and fits(tensor.shape, axes, sides)
    ]
    return min(candidates, key=lambda candidate: candidate[:2])[2] if candidates else None


def _output_rank(path: Path, tensor: Tensor, k_len: int) -> tuple[bool, bool]:
    name = _last_name(path)
    named = name is None or _OUTPUT_NAMES.fullmatch(name) is not None
    return not named, tensor.shape[-1] == k_len


def _last_name(path: Path) -> str | None:
    names = [key[0] if isinstance(key, tuple) else key for key in path if not isinstance(key, int)]
    return str(names[-1]).lower() if names else None


def pattern_in(result: Any, output: Path, sides: AxisSizes, *, batched: bool) -> ResultPath | None:
    """The path of the pattern among the other tensors with axes query and key. It prefers rows that sum to 1, then names of
    patterns, then earlier axes."""
    axes_to_try: list[AxisNames] = (
        [PATTERN_AXES, ("batch", "query", "key"), ("batch·head", "query", "key")] if batched else []
    )
    axes_to_try += [("query", "key")] if sides.batch == 1 or not batched else []
    axes_to_try += (
        [("query", "key", "batch", "head")] if batched else [("1", "head", "query", "key"), ("head", "query", "key")]
    )
    any_heads = sides._replace(head=-1)
    candidates: list[tuple[tuple[bool, bool, int], ResultPath]] = []
    for path, tensor in leaves(result):
        for axes in axes_to_try if path != output and tensor.is_floating_point() else ():
            if _fits_pattern(tensor.shape, axes, any_heads):
                sums = bool((tensor.double().sum(axes.index("key")) - 1).abs().max() < _SUM_TOLERANCE)
                name = _last_name(path)
                named = name is not None and _PATTERN_NAMES.fullmatch(name) is not None
                candidates.append(((not sums, not named, axes_to_try.index(axes)), ResultPath(path, axes)))
                break
    return min(candidates, key=lambda candidate: candidate[0])[1] if candidates else None


def _fits_pattern(shape: Sequence[int], axes: AxisNames, sides: AxisSizes) -> bool:
    loose = tuple("any" if axis == "head" else axis for axis in axes)
    return fits(shape, loose, sides)


def rearranged(tensor: Tensor, have: AxisNames, want: AxisNames) -> Tensor:
    """The tensor with its axes in another order. Extra axes are squeezed, missing ones are added with size 1. Raises ValueError
    for an extra axis of another size."""
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


def pattern_of(tensor: Tensor, axes: AxisNames, batch: int) -> Tensor:
    """The pattern as `[batch, head, query, key]`."""
    if axes[0] == "batch·head":
        return tensor.reshape(batch, -1, *tensor.shape[1:])
    if axes[0] == "1":
        return rearranged(tensor, ("batch", *axes[1:]), PATTERN_AXES)
    return rearranged(tensor, axes, PATTERN_AXES)
