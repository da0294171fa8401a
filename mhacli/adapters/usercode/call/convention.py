"""How a user's attention is called: its arguments, made from ours, and its results, read in our order of axes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.adapters.usercode.call.signature import AxisNames, CallParameter
from mhacli.adapters.usercode.types import AttentionOutput, Inputs, MaskForm

Key = int | str | tuple[str]
"""A step into a result: a place in a tuple or list, a key of a dict, or `(name,)`, an attribute."""
Path = tuple[Key, ...]

ROW_AXES: AxisNames = ("batch", "row", "width")
HEAD_AXES: AxisNames = ("batch", "head", "row", "width")
PATTERN_AXES: AxisNames = ("batch", "head", "query", "key")
MERGED = "head·width"
"""An axis that holds the heads side by side."""
_OUTPUT_NAMES = re.compile(
    r"(attn|attention|self_attn|attention_)?_?(out|outputs?|result|context(_layer|_vec\w*)?|hidden_states?|last_hidden_state|z|y|x)"
)
_PATTERN_NAMES = re.compile(
    r".*(weights?|attn|attention|attentions|pattern|probs|probabilities|probas|scores|att|map|alpha|a|p|w)s?"
)
_DEEPEST = 3
_EVEN = 1e-3
"""How far from one rows of a pattern may sum; of half precision."""


class AxisSizes(NamedTuple):
    """How many of each axis there are in one call."""

    batch: int
    head: int
    q_len: int
    k_len: int

    def of(self, axis: str) -> int | None:
        """How many of an axis there are, None where any number is right."""
        known = {"batch": self.batch, "head": self.head, "row": self.q_len, "query": self.q_len, "key": self.k_len}
        return known.get(axis)


class ResultPath(NamedTuple):
    """Where in a result a tensor is, and which axes it has."""

    path: Path
    axes: AxisNames


RowPart = Literal["queries", "keys", "values"]


class RowArgument(NamedTuple):
    """A parameter for rows: which rows it takes, and whether it may be left out where the keys are the queries' own rows."""

    parameter: str
    part: RowPart
    required: bool = True
    by_place: bool = False


class CallMasks(NamedTuple):
    """What a call's masks are to say, in the forms in which they are to be written."""

    mask: MaskForm | None = None
    padding: MaskForm | None = None


NO_PATH = ResultPath((), ())
"""Where the output of a convention is that was never tried."""


@dataclass(frozen=True)
class CallConvention:
    """How a user's attention is called, and where its output and pattern are in what it returns.

    `axes` are those of the rows as it wants them, without "batch" where it takes one sequence at a time; `output` tells where the
    output is and its axes, `pattern` the same of the pattern. `idle` are masks that are required, in the form that is given when
    no mask is asked for (None: None). `spread` names masks of keys that must be written for each query, by parameter and axes.
    `causal_yields`: the switch `causal_by` is left out of calls with a mask, for it does not bear one.
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
        """Our own order of axes for what this takes."""
        return HEAD_AXES if self.is_function else ROW_AXES

    @property
    def batched(self) -> bool:
        """Whether it takes all sequences at once."""
        return "batch" in self.axes


class CallResult(NamedTuple):
    """What a call returned, before the output is searched in it: a result for each sequence where it takes one at a
    time, else one; with the sizes that each call had."""

    results: tuple[Any, ...]
    sides: AxisSizes


@contextmanager
def quietly(call: Callable[..., Any], training: bool) -> Iterator[None]:
    """Runs a call without gradients and warnings, with the module in `eval` or `train` mode, which is restored afterwards."""
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
    """What the call returns. `setting.sides` is not read: the sizes are those of the inputs. Raises what the call raises."""
    sides = sides_of(inputs, convention)
    if convention.batched:
        return CallResult((_once(call, convention, inputs, setting._replace(sides=sides), forms),), sides)
    single = sides._replace(batch=1)
    parts = [_sequence(inputs, number) for number in range(sides.batch)]
    return CallResult(
        tuple(_once(call, convention, part, setting._replace(sides=single), forms) for part in parts), single
    )


def sides_of(inputs: Inputs, convention: CallConvention) -> AxisSizes:
    """The sizes of one call."""
    keys = inputs.queries if inputs.keys is None else inputs.keys
    n_heads = inputs.queries.shape[1] if convention.is_function else convention.n_heads
    return AxisSizes(inputs.queries.shape[0], n_heads, inputs.queries.shape[-2], keys.shape[-2])


def _sequence(inputs: Inputs, number: int) -> Inputs:
    def one(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[number : number + 1] if tensor.shape[0] > 1 else tensor

    return Inputs(inputs.queries[number : number + 1], *(one(tensor) for tensor in inputs[1:]))


def _once(
    call: Callable[..., Any], convention: CallConvention, inputs: Inputs, setting: CallSetting, forms: CallMasks
) -> Any:
    places, names = _arguments(convention, inputs, setting, forms)
    with quietly(call, setting.training):
        return call(*places, **names)


def _arguments(
    convention: CallConvention, inputs: Inputs, setting: CallSetting, forms: CallMasks
) -> tuple[list[Any], dict[str, Any]]:
    places: list[Any] = []
    names: dict[str, Any] = dict(convention.fixed)
    masks = _masks(convention, inputs, setting, forms)
    for slot in convention.slots:
        rows = _rows(inputs, slot)
        if rows is None:
            continue
        theirs = (
            rearranged(rows.to(setting.device, setting.dtype), convention.canonical, convention.axes)
            .contiguous()
            .clone()
        )
        if slot.by_place:
            places.append(theirs)
        else:
            names[slot.parameter] = theirs
    asks = (
        any(name not in dict(convention.idle) for name in masks)
        or inputs.allowed is not None
        or inputs.real is not None
    )
    for recipe in convention.extras:
        if not (asks and convention.causal_yields and recipe.parameter == convention.causal_by):
            names[recipe.parameter] = make_argument(recipe, setting)
    return places, names | masks


def _rows(inputs: Inputs, slot: RowArgument) -> Tensor | None:
    """The rows of a slot; None where the call makes them itself, from the queries."""
    if slot.part == "queries":
        return inputs.queries
    own = inputs.keys if slot.part == "keys" or inputs.values is None else inputs.values
    if own is None and slot.required:
        return inputs.queries
    return own


def _masks(convention: CallConvention, inputs: Inputs, setting: CallSetting, forms: CallMasks) -> dict[str, Any]:
    """The masks of a call by name, each written anew."""
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
        everywhere = None
        if (padding.parameter, padding.axes) in convention.spread:
            everywhere = torch.ones(1, 1, sides.q_len, sides.k_len, dtype=torch.bool, device=device)
        masks[padding.parameter] = write_mask(padding, everywhere, real, sides, dtype)
    return masks


def read_answer(asked: CallResult, convention: CallConvention) -> AttentionOutput:
    """The output and the pattern of what came back, in our order of axes, as copies."""
    outs, patterns = [], []
    for result in asked.results:
        tensor = tensor_at(result, convention.output.path)
        if tensor is None:
            tensor = next((leaf for _, leaf in leaves(result) if leaf.ndim == len(convention.output.axes)), None)
        if tensor is None:
            where = path_text(convention.output.path) or "its top"
            raise ValueError(f"the result must hold the output at {where}, got {type(result).__name__}")
        outs.append(output_of(tensor.detach(), convention.output.axes, convention.canonical, asked.sides.head))
        pattern = None if convention.pattern is None else tensor_at(result, convention.pattern.path)
        if pattern is not None and convention.pattern is not None and pattern.ndim == len(convention.pattern.axes):
            patterns.append(pattern_of(pattern.detach(), convention.pattern.axes, asked.sides.batch))
    whole = torch.cat(patterns) if len(patterns) == len(outs) else None
    return AttentionOutput(torch.cat(outs).contiguous().clone(), None if whole is None else whole.contiguous().clone())


# ------------------------------------------------------------------------------------------------------ other arguments


ROPE_BASE = 10000.0
"""Source: Su et al. 2021, "RoFormer", section 3.2.2."""
N_VARIANTS = 5


class ArgumentRecipe(NamedTuple):
    """How an argument is made for each call: its `kind`, what that needs to know, and which of several usual shapes."""

    parameter: str
    kind: str
    value: Any = None
    variant: int = 0


class CallSetting(NamedTuple):
    """What arguments are made for: the sizes of a call, its dtype and device, whether it trains, and the weights by name."""

    sides: AxisSizes
    dtype: torch.dtype
    device: torch.device
    training: bool
    tensors: Mapping[str, Tensor]


def recipe_for(
    parameter: CallParameter, *, n_heads: int, d_head: int, d_model: int, causal: bool, variant: int
) -> ArgumentRecipe | None:
    """How to make an argument that is required; None where its meaning is unknown."""
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
        "positions backwards": lambda: _positions(recipe.variant, setting).flip(-1),
        "rope": lambda: _rotation(recipe, setting),
        "weight": lambda: setting.tensors[recipe.parameter].clone(),
        "weight bias": lambda: setting.tensors[recipe.parameter].clone(),
    }
    return simple[recipe.kind]()


def _positions(variant: int, setting: CallSetting) -> Tensor:
    q_idx = torch.arange(setting.sides.q_len, device=setting.device)
    return (q_idx[None], q_idx, q_idx.expand(setting.sides.batch, -1))[min(variant, 2)]


def angles(q_len: int, d_head: int, device: torch.device) -> Tensor:
    """`[row, d_head / 2]`: the angle of each position and pair of columns, in float64."""
    place = torch.arange(0, d_head - 1, 2, dtype=torch.float64, device=device)
    return torch.outer(torch.arange(q_len, dtype=torch.float64, device=device), ROPE_BASE ** (-place / d_head))


def _rotation(recipe: ArgumentRecipe, setting: CallSetting) -> Any:
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


def rotation_text(recipe: ArgumentRecipe, setting: CallSetting) -> str:
    """What a rotation was made of, for the line that says how it is called."""
    value = make_argument(recipe, setting)
    one = value[0] if isinstance(value, tuple) else value
    kind = "complex" if one.is_complex() else "(cos, sin)" if isinstance(value, tuple) else "half rotation"
    return f"{recipe.parameter}: {kind} {list(one.shape)}, base {ROPE_BASE:g}"


def weights_for(
    parameters: tuple[CallParameter, ...], *, n_heads: int, d_model: int, variant: int, seed: int
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


# ---------------------------------------------------------------------------------------------------------------- masks


def write_mask(
    form: MaskForm, allowed: Tensor | None, real: Tensor | None, sides: AxisSizes, dtype: torch.dtype
) -> Tensor:
    """A mask in that form. `allowed` bool `[batch or 1, 1, query, key]`, `real` bool `[batch, key]`, or both, True = keep.

    Axes of the form that the mask does not tell apart are of one, but batch, which is whole. Raises ValueError where the mask
    tells apart what the form has no axis for.
    """
    if form.kind == "lengths":
        return _lengths(real, sides)
    keep = torch.ones((), dtype=torch.bool)
    if allowed is not None:
        keep = allowed
    if real is not None:
        keep = keep.to(real.device) & real[:, None, None, :]
    for place, axis in enumerate(PATTERN_AXES):
        if axis not in form.axes and keep.shape[place] > 1:
            first = keep.narrow(place, 0, 1)
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
    true = keep if form.true_means == "keep" else ~keep
    if form.kind == "bool":
        return true
    return true.to(dtype if form.kind == "01" else torch.int64)


def _lengths(real: Tensor | None, sides: AxisSizes) -> Tensor:
    if real is None:
        return torch.full((sides.batch,), sides.k_len)
    counts = real.sum(-1)
    if not torch.equal(real, torch.arange(real.shape[-1], device=real.device) < counts[:, None]):
        raise ValueError("lengths describe padding on the right only, and here tokens follow padding")
    return counts


def open_mask(form: MaskForm, sides: AxisSizes, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The mask in that form that lets every query attend to every key."""
    everything = torch.ones(1, 1, sides.q_len, sides.k_len, dtype=torch.bool, device=device)
    if form.kind == "lengths":
        return _lengths(None, sides).to(device)
    return write_mask(form, everything, None, sides, dtype)


# -------------------------------------------------------------------------------------------------------------- results


def leaves(result: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor of a result of tuples, lists, dicts and dataclasses, in order, with the path to it."""
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
    """What a result is made of at its top, with the path to each; nothing of a tensor."""
    return [] if isinstance(result, Tensor) else [((key,), part) for key, part in _parts(result)]


def part_at(result: Any, path: Path) -> Any:
    """What stands at a path. Raises ValueError where nothing does."""
    for step in path:
        found = dict(_parts(result))
        if step not in found:
            raise ValueError(f"the result must hold something at {path_text(path)}")
        result = found[step]
    return result


def tensor_at(result: Any, path: Path) -> Tensor | None:
    """The tensor at a path, None where there is none."""
    return next((tensor for found, tensor in leaves(result) if found == path), None)


def path_text(path: Path) -> str:
    """A path as Python writes it: `[0]`, `["out"]`, `.context`."""
    return "".join(f".{key[0]}" if isinstance(key, tuple) else f"[{key!r}]".replace("'", '"') for key in path)


def fits(shape: Sequence[int], axes: AxisNames, sides: AxisSizes) -> bool:
    """Whether a tensor of that shape may have those axes; a width may be anything but nothing."""
    if len(shape) != len(axes) or 0 in shape:
        return False
    for size, axis in zip(shape, axes, strict=True):
        if axis == MERGED and size % sides.head:
            return False
        if axis == "batch·head" and (size % sides.batch or size == sides.batch):
            return False
        wanted = 1 if axis == "1" else sides.of(axis)
        if wanted is not None and size != wanted:
            return False
    return True


def output_in(result: Any, wanted: Sequence[AxisNames], sides: AxisSizes) -> ResultPath | None:
    """The output: of the floating tensors whose shape fits any of the wanted axes one that is named like an output, or else that
    is not as wide as there are keys, as a pattern is, or else the first; of axes that fit the first."""
    found = [
        (_strangeness(path, tensor, sides.k_len), number, ResultPath(path, axes))
        for path, tensor in leaves(result)
        for number, axes in enumerate(wanted)
        if tensor.is_floating_point() and fits(tensor.shape, axes, sides)
    ]
    return min(found, key=lambda one: one[:2])[2] if found else None


def _strangeness(path: Path, tensor: Tensor, k_len: int) -> tuple[bool, bool]:
    name = _last_name(path)
    named = name is None or _OUTPUT_NAMES.fullmatch(name) is not None
    return not named, tensor.shape[-1] == k_len


def _last_name(path: Path) -> str | None:
    names = [key[0] if isinstance(key, tuple) else key for key in path if not isinstance(key, int)]
    return str(names[-1]).lower() if names else None


def pattern_in(result: Any, output: Path, sides: AxisSizes, *, batched: bool) -> ResultPath | None:
    """The pattern: of the other tensors whose last axes are query × key, the one whose rows sum to one, or else the one that is
    named so, or else the first."""
    wanted: list[AxisNames] = (
        [PATTERN_AXES, ("batch", "query", "key"), ("batch·head", "query", "key")] if batched else []
    )
    wanted += [("query", "key")] if sides.batch == 1 or not batched else []
    wanted += (
        [("query", "key", "batch", "head")] if batched else [("1", "head", "query", "key"), ("head", "query", "key")]
    )
    any_heads = sides._replace(head=-1)
    found: list[tuple[tuple[bool, bool, int], ResultPath]] = []
    for path, tensor in leaves(result):
        for axes in wanted if path != output and tensor.is_floating_point() else ():
            if _fits_pattern(tensor.shape, axes, any_heads):
                sums = bool((tensor.double().sum(axes.index("key")) - 1).abs().max() < _EVEN)
                name = _last_name(path)
                named = name is not None and _PATTERN_NAMES.fullmatch(name) is not None
                found.append(((not sums, not named, wanted.index(axes)), ResultPath(path, axes)))
                break
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _fits_pattern(shape: Sequence[int], axes: AxisNames, sides: AxisSizes) -> bool:
    loose = tuple("any" if axis == "head" else axis for axis in axes)
    return fits(shape, loose, sides)


def rearranged(tensor: Tensor, have: AxisNames, want: AxisNames) -> Tensor:
    """A tensor with its axes in another order: an axis that is not wanted must be of one and goes, one that is missing is made
    of one. Raises ValueError where an axis that goes holds more."""
    for axis in [axis for axis in have if axis not in want]:
        place = have.index(axis)
        if tensor.shape[place] != 1:
            raise ValueError(f"{axis} must be 1 for a call without that axis, got {tensor.shape[place]}")
        tensor, have = tensor.squeeze(place), have[:place] + have[place + 1 :]
    for axis in [axis for axis in want if axis not in have]:
        tensor, have = tensor.unsqueeze(0), (axis, *have)
    return tensor.permute([have.index(axis) for axis in want])


def output_of(tensor: Tensor, axes: AxisNames, canonical: AxisNames, n_heads: int) -> Tensor:
    """An output of the user's axes in ours."""
    if MERGED in axes:
        place = axes.index(MERGED)
        tensor = tensor.unflatten(place, (n_heads, -1))
        axes = (*axes[:place], "head", "width", *axes[place + 1 :])
    return rearranged(tensor, axes, canonical)


def pattern_of(tensor: Tensor, axes: AxisNames, batch: int) -> Tensor:
    """A pattern of the user's axes as `[batch, head, query, key]`."""
    if axes[0] == "batch·head":
        return tensor.reshape(batch, -1, *tensor.shape[1:])
    if axes[0] == "1":
        return rearranged(tensor, ("batch", *axes[1:]), PATTERN_AXES)
    return rearranged(tensor, axes, PATTERN_AXES)
