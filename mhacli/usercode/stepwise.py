"""Calls a user's attention step by step, trying the usual ways to pass a cache and a position."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.usercode.call.convention import (
    ArgumentRecipe,
    AxisSizes,
    CallSetting,
    call_with,
    leaves,
    make_argument,
    open_mask,
    output_in,
    output_of,
    part_at,
    parts_of,
    rearranged,
    write_mask,
)
from mhacli.usercode.call.signature import CallParameter, call_role, called_function, signature_of, source_of
from mhacli.usercode.call.user_attention import UserAttention
from mhacli.usercode.inputs import copied
from mhacli.usercode.types import Inputs, MaskForm

_SWITCH = re.compile(r"(use|return|output|with|keep|store|update|enable)_?(new_?)?(kv_?)?(cache|past|present|kv|key_?values?)s?"
                     r"|(kv_?)?caching|decod(e|ing)|incremental|is_?decod(e|ing)|cached")  # fmt: skip
_CACHE_NAME = re.compile(r"(?i)cache|past|keys?|values?|kv|mem|buf|(^|[._])[kv]s?($|[._])|[._]([kv])$")
_MOST_OBJECTS = 12


class CachePassing(NamedTuple):
    """How a cache passes between calls. `names` are its arguments. `make` creates the first value (None: no value). `paths`
    locate the cache in each result (empty: the same objects are passed again). Without `names` the module keeps its own cache,
    after `make` prepares it."""

    names: tuple[str, ...] = ()
    make: Maker | None = None
    paths: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True)
class StepConvention:
    """One way to call attention step by step. `position_arguments` are the arguments for the position of a step, each with its
    format: a number, a tensor with one number, or the positions of all rows with none, one or all batch axes. `switches` are
    set to True. `is_table_whole`: rotations cover all positions, not only those of the step. `mask` is the form of the step's
    mask; `is_mask_whole`: it covers all keys for which the cache has room, not only the keys so far."""

    caller: UserAttention
    sizes: CacheSizes
    passing: CachePassing
    position_arguments: tuple[tuple[str, str], ...] = ()
    switches: tuple[str, ...] = ()
    is_table_whole: bool = False
    mask: MaskForm | None = None
    is_mask_whole: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments that pass the cache and the position."""
        return (*self.passing.names, *(name for name, _ in self.position_arguments), *self.switches)

    @property
    def text(self) -> str:
        """A description for reports."""
        names = ", ".join(self.names)
        return names if self.passing.names else f"{names} and a cache of its own"

    def __call__(self, rows: Tensor, ends: Sequence[int]) -> StepResults:
        """The outputs for token vectors `[batch, length, d_in]`, in steps that end at `ends`. Raises what the call raises, and
        ValueError if a result has no output or no cache."""
        call = copied(self.caller.built.call)
        cache = None if self.passing.make is None else self.passing.make(call)
        states = [_state(call if not self.passing.names else cache)]
        outs, start = [], 0
        for end in ends:
            result = self._call_step(call, rows[:, start:end], start, cache)
            outs.append(self._output(result, rows.shape[0], end - start, end))
            if self.passing.paths:
                cache = [part_at(result, path) for path in self.passing.paths]
                cache = cache if len(cache) > 1 else cache[0]
            states.append(_state(call if not self.passing.names else cache))
            start = end
        return StepResults(tuple(outs), tuple(states))

    def _call_step(self, call: Callable[..., Any], rows: Tensor, start: int, cache: Any) -> Any:
        caller, convention = self.caller, self.caller.convention
        end = start + rows.shape[1]
        fixed = dict(convention.fixed) | dict.fromkeys(self.switches, True)
        fixed |= {
            name: _position_argument(kind, rows.shape[0], start, end, caller.device)
            for name, kind in self.position_arguments
        }
        if self.passing.names and cache is not None:
            values = cache if len(self.passing.names) > 1 else [cache]
            fixed |= dict(zip(self.passing.names, values, strict=True))
        setting = CallSetting(
            AxisSizes(rows.shape[0], convention.n_heads, rows.shape[1], end),
            caller.dtype,
            caller.device,
            False,
            caller.tensors,
        )
        fixed |= self._masks(setting, start, end) | self._rotations(setting, start, end)
        extras = tuple(recipe for recipe in convention.extras if recipe.parameter not in fixed)
        plain = replace(convention, fixed=fixed, extras=extras, idle=())
        return call_with(call, plain, Inputs(rows), setting)

    def _masks(self, setting: CallSetting, start: int, end: int) -> dict[str, Any]:
        """The masks of a step: its rows of the causal mask, and open masks for the other required ones."""
        sides, dtype, device = setting.sides, setting.dtype, setting.device
        masks: dict[str, Any] = {
            name: None if form is None else open_mask(form, sides, device, dtype)
            for name, form in self.caller.convention.idle
        }
        if self.mask is not None:
            k_len = self.sizes.length if self.is_mask_whole else end
            keep = torch.ones(end - start, k_len, dtype=torch.bool, device=device).tril(start)[None, None]
            masks[self.mask.parameter] = write_mask(self.mask, keep, None, sides._replace(k_len=k_len), dtype)
        return masks

    def _rotations(self, setting: CallSetting, start: int, end: int) -> dict[str, Any]:
        """The rotations of a step: the whole table, or its rows."""

        def table(recipe: ArgumentRecipe, length: int) -> tuple[Tensor, ...]:
            value = make_argument(recipe, setting._replace(sides=setting.sides._replace(q_len=length)))
            return value if isinstance(value, tuple) else (value,)

        rotations: dict[str, Any] = {}
        for recipe in self.caller.convention.extras:
            if recipe.kind != "rope":
                continue
            parts = table(recipe, self.sizes.length)
            if not self.is_table_whole:
                others = table(recipe, self.sizes.length + 1)
                axes = [
                    next(n for n in range(a.ndim) if a.shape[n] != b.shape[n])
                    for a, b in zip(parts, others, strict=True)
                ]
                parts = tuple(part.narrow(axis, start, end - start) for part, axis in zip(parts, axes, strict=True))
            rotations[recipe.parameter] = parts if isinstance(make_argument(recipe, setting), tuple) else parts[0]
        return rotations

    def _output(self, result: Any, batch: int, q_len: int, k_len: int) -> Tensor:
        convention = self.caller.convention
        sides = AxisSizes(batch, convention.n_heads, q_len, k_len)
        output = output_in(result, [convention.output.axes], sides)
        if output is None:
            raise ValueError("the result of a step must hold its output")
        tensor = next(tensor for path, tensor in leaves(result) if path == output.path)
        out = output_of(tensor.detach(), output.axes, convention.canonical, convention.n_heads)
        return out.to("cpu", torch.float64).clone()


class StepResults(NamedTuple):
    """The output of each step, and copies of the cached tensors by name, before the first step and after each."""

    outs: tuple[Tensor, ...]
    kept: tuple[dict[str, Tensor], ...]


def step_conventions(caller: UserAttention, sizes: CacheSizes, mask: MaskForm | None) -> Iterator[StepConvention]:
    """The ways to call attention step by step, the likeliest first; none without any sign of a cache. `mask` is the form of a
    mask that makes it causal, None if it always is."""
    convention, parameters = caller.convention, signature_of(caller.built.call).parameters
    if caller.is_function:
        return
    free = [parameter for parameter in parameters if parameter.name not in convention.fixed]
    switches = tuple(p.name for p in free if _SWITCH.fullmatch(p.name.lower()))
    caches = tuple(p.name for p in free if p.role == "cache" and p.name not in switches)
    positions = [_position_formats(parameter) for parameter in free if parameter.role in ("offset", "positions")]
    if not caches and not positions and not switches:
        return
    base = StepConvention(caller, sizes, CachePassing(), switches=switches)
    tables = [True, False] if any(recipe.kind == "rope" for recipe in convention.extras) else [False]
    masks = (
        [(None, False)] if mask is None else [(mask, False), (mask, True), *_other_kinds(caller, mask), (None, False)]
    )
    for passing in _cache_passings(base, caches):
        for (form, is_whole), chosen, is_table_whole in product(masks, product(*positions), tables):
            yield replace(
                base,
                passing=passing,
                position_arguments=chosen,
                is_table_whole=is_table_whole,
                mask=form,
                is_mask_whole=is_whole,
            )


def _other_kinds(caller: UserAttention, mask: MaskForm) -> list[tuple[MaskForm, bool]]:
    """The mask in the other kinds that one call takes: a step with a cache may take one of them alone."""
    return [(form, False) for form in caller.mask_forms if form.parameter == mask.parameter and form.kind != mask.kind]


def _cache_passings(base: StepConvention, caches: tuple[str, ...]) -> Iterator[CachePassing]:
    call = base.caller.built.call
    if not caches:
        yield from (CachePassing((), make) for make in preparations(call, base.sizes))
        return
    for paths in _cache_paths(base, len(caches)):
        yield CachePassing(caches, None, paths)
    makers = list(cache_makers(call, caches, base.sizes))[:_MOST_OBJECTS]
    for make in makers:
        yield CachePassing(caches, make)
    yield from (CachePassing((), make) for make in preparations(call, base.sizes))


def _cache_paths(base: StepConvention, n_caches: int) -> Iterator[tuple[tuple[Any, ...], ...]]:
    """The paths in a first result that may hold the cache: everything except the output, tuples before tensors."""
    caller = base.caller
    rows = torch.zeros(
        base.sizes.batch, caller.sizes.q_len, caller.sizes.d_in, dtype=caller.dtype, device=caller.device
    )
    formats = [
        _position_formats(p)
        for p in signature_of(caller.built.call).of_role("offset", "positions")
        if p.name not in caller.convention.fixed
    ]
    for chosen in product(*formats):
        convention = replace(base, position_arguments=tuple(chosen))
        try:
            result = convention._call_step(copied(caller.built.call), rows, 0, None)
            break
        except Exception:  # the call requires another position format
            continue
    else:
        return
    parts = [
        (path, part) for path, part in parts_of(result) if isinstance(part, Tensor) or any(True for _ in leaves(part))
    ]
    parts = [(path, part) for path, part in parts if not _is_output(part, caller, rows)]
    if n_caches == 1:
        yield from (
            ((*path,),) for path, part in sorted(parts, key=lambda path_and_part: isinstance(path_and_part[1], Tensor))
        )
        return
    flat = [path for path, part in parts if isinstance(part, Tensor)]
    inner = [
        [(*path, key) for key in range(n_caches)]
        for path, part in parts
        if isinstance(part, list | tuple) and len(part) == n_caches
    ]
    yield from (tuple(paths) for paths in inner)
    if len(flat) >= n_caches:
        yield tuple(flat[-n_caches:])


def _is_output(part: Any, caller: UserAttention, rows: Tensor) -> bool:
    shape = rearranged(rows, caller.convention.canonical, caller.convention.axes).shape
    return isinstance(part, Tensor) and part.shape[:-1] == shape[:-1] and part.ndim == len(shape)


def _position_formats(parameter: CallParameter) -> list[tuple[str, str]]:
    """The formats that a position argument may take, the likeliest first."""
    if parameter.role == "positions":
        ids = "[1, row]" if "ids" in parameter.name else "[row]"
        return [(parameter.name, kind) for kind in dict.fromkeys((ids, "[row]", "[batch, row]"))]
    kinds = ("number",) if isinstance(parameter.default, int) else ("number", "tensor", "[row]")
    return [(parameter.name, kind) for kind in kinds]


def _position_argument(kind: str, batch: int, start: int, end: int, device: torch.device) -> Any:
    if kind == "number":
        return start
    if kind == "tensor":
        return torch.tensor(start, device=device)
    rows = torch.arange(start, end, device=device)
    return {"[row]": rows, "[1, row]": rows[None], "[batch, row]": rows.expand(batch, -1)}[kind]


def _state(holder: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors_in(holder)}


def cache_is_kept(stepped: StepResults, *, by_itself: bool) -> bool:
    """Whether the first step changed the cache. `by_itself`: count only module tensors with a cache-like name."""
    before, after = stepped.kept[0], stepped.kept[1]
    names = [name for name in after if not by_itself or _CACHE_NAME.search(name)]
    return any(name not in before or not torch.equal(before[name], after[name]) for name in names)


def cache_grows(stepped: StepResults) -> bool:
    """Whether a cached tensor grows with each step."""
    first, second = stepped.kept[1], stepped.kept[2]
    return any(name in second and second[name].numel() > tensor.numel() for name, tensor in first.items())


# --------------------------------------------------------------------------------------------------------------- caches


_CACHE_CLASS = re.compile(r"(?i)cache|past")
_NO_CACHE = re.compile(r"(?i)attention|attn|layer$|block$|model$|decoder|encoder|config|args$")
_MAKER = re.compile(r"(?i)_*(setup|set_up|init|initiali[sz]e|alloc\w*|create|make|enable|reset|clear|build|new|start|empty|get)_?"
                    r"(empty_)?(kv_?)?(caches?|past)\w*")  # fmt: skip
_LENGTH = re.compile(r"(?i)(max|seq|ctx|context|cache|block|n)?_*(max_*)?(seq|sequence|cache|context|ctx|block|position)?s?_*"
                     r"(len|length|size|positions?|tokens|ctx)|capacity|max_t|t_max|max_position_embeddings")  # fmt: skip
_BATCH = re.compile(r"(?i)(max_?)?(batch(_?size)?|bsz|bs|b|n_?batch)")
_LAYERS = re.compile(r"(?i)(n|num)_?(hidden_?)?layers?")
_KV_HEADS = re.compile(r"(?i)(n|num)_?(local_?)?(kv_?|key_?value_?)?heads?|h|heads|n_?head")
_DEEPEST = 4
Maker = Callable[[Any], Any]
"""Creates a cache, or prepares the given module to keep one."""


class CacheSizes(NamedTuple):
    """The sizes, dtype and device of a cache."""

    batch: int
    length: int
    n_kv_heads: int
    d_head: int
    d_v: int
    dtype: torch.dtype
    device: torch.device


class GrowingCache:
    """A cache that keeps the keys and values `[batch, head, length, d]` of each layer and appends new ones.

    It has the methods of the caches in `transformers`. Source: Hugging Face transformers, cache_utils.DynamicCache.
    """

    def __init__(self) -> None:
        self.layers: dict[Any, tuple[Tensor, Tensor]] = {}

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, the new ones last. The layer is the first number or string among the arguments."""
        values = [*args, *kwargs.values()]
        key, value = [value for value in values if isinstance(value, Tensor) and value.ndim >= 3][:2]
        layer = next((value for value in values if isinstance(value, int | str)), None)
        if layer in self.layers:
            old_key, old_value = self.layers[layer]
            key, value = torch.cat([old_key, key], dim=-2), torch.cat([old_value, value], dim=-2)
        self.layers[layer] = key, value
        return key, value

    insert_kv = append = store = update

    def get_seq_length(self, layer_idx: Any = None) -> int:
        """The number of cached tokens."""
        cached = self.layers.get(layer_idx) or next(iter(self.layers.values()), None)
        return 0 if cached is None else cached[0].shape[-2]

    def get_usable_length(self, new_seq_length: int, layer_idx: Any = None) -> int:
        """The number of cached tokens; none is ever dropped."""
        return self.get_seq_length(layer_idx)

    def get_max_length(self) -> None:
        """No limit."""

    get_max_cache_shape = get_max_length

    @property
    def seen_tokens(self) -> int:
        """The number of cached tokens."""
        return self.get_seq_length()

    @property
    def key_cache(self) -> list[Tensor]:
        """The keys of each layer."""
        return [key for key, _ in self.layers.values()]

    @property
    def value_cache(self) -> list[Tensor]:
        """The values of each layer."""
        return [value for _, value in self.layers.values()]

    def __len__(self) -> int:
        """The number of layers in the cache."""
        return len(self.layers)

    def __bool__(self) -> bool:
        """True, even for an empty cache."""
        return True

    def __getitem__(self, layer: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer."""
        return self.layers[layer]


def cache_makers(call: Callable[..., Any], names: tuple[str, ...], sizes: CacheSizes) -> Iterator[Maker]:
    """Functions that create a cache for the named parameters, the likeliest first."""
    yield from (_by_method(name, sizes) for name in _maker_methods(call))
    yield from (_by_class(kind, sizes) for kind in _cache_classes(call, names))
    source = source_of(called_function(call))
    keys = _keys_read(names, source)
    if re.search(r"\.(update|insert_kv|append|store|get_\w*length)\(", source):
        yield lambda _: GrowingCache()
    yield lambda _: {}
    if keys:
        yield lambda _: dict.fromkeys(keys)
    yield from _allocated(keys, sizes)
    yield lambda _: []
    yield lambda _: GrowingCache()


def preparations(call: Callable[..., Any], sizes: CacheSizes) -> Iterator[Maker]:
    """Ways to prepare a module that keeps its own cache: nothing, one of its methods, or a cache class for an attribute that is
    None."""
    yield lambda _: None
    yield from (_by_method(name, sizes) for name in _maker_methods(call))
    empty = [
        name for name, value in getattr(call, "__dict__", {}).items() if value is None and _CACHE_CLASS.search(name)
    ]
    for attribute in empty:
        yield from (_by_attribute(attribute, kind, sizes) for kind in _cache_classes(call, ()))


def _by_method(name: str, sizes: CacheSizes) -> Maker:
    return lambda module: _call_with_sizes(getattr(module, name), sizes)


def _by_class(kind: type, sizes: CacheSizes) -> Maker:
    return lambda module: _call_with_sizes(kind, sizes)


def _by_attribute(attribute: str, kind: type, sizes: CacheSizes) -> Maker:
    return lambda module: setattr(module, attribute, _call_with_sizes(kind, sizes))


def tensors_in(holder: Any, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a cache or module, by name, without parameters."""
    if isinstance(holder, nn.Parameter) or depth > _DEEPEST:
        return
    if isinstance(holder, Tensor):
        yield "", holder
        return
    parts: list[tuple[Any, Any]] = []
    if isinstance(holder, Mapping):
        parts = list(holder.items())
    elif isinstance(holder, list | tuple):
        parts = list(enumerate(holder))
    elif isinstance(holder, nn.Module):
        parts = [*holder._buffers.items(), *holder._modules.items()]
        parts += [
            (name, value)
            for name, value in vars(holder).items()
            if not name.startswith("_") or _CACHE_CLASS.search(name)
        ]
    elif hasattr(holder, "__dict__") and not isinstance(holder, type) and not callable(holder):
        parts = list(vars(holder).items())
    for name, part in parts:
        for inner, tensor in tensors_in(part, depth + 1):
            yield f"{name}.{inner}" if inner else str(name), tensor


def _maker_methods(call: Callable[..., Any]) -> list[str]:
    attributes = vars(type(call)) if isinstance(call, nn.Module) else {}
    return [name for name, value in attributes.items() if _MAKER.fullmatch(name) and inspect.isfunction(value)]


def _cache_classes(call: Callable[..., Any], names: tuple[str, ...]) -> list[type]:
    """Cache classes: those in the parameters' annotations, then those of the same file by name."""
    function = called_function(call)
    module = sys.modules.get(str(getattr(inspect.unwrap(function), "__module__", "")))
    namespace = vars(module) if module is not None else {}
    local = [
        value
        for value in namespace.values()
        if inspect.isclass(value) and value.__module__ == getattr(module, "__name__", "")
    ]
    caches = [kind for kind in local if _CACHE_CLASS.search(kind.__name__) and not _NO_CACHE.search(kind.__name__)]
    annotated = " ".join(str(getattr(function, "__annotations__", {}).get(name, "")) for name in names)
    from_annotations = [kind for kind in local if re.search(rf"\b{kind.__name__}\b", annotated)]
    return list(dict.fromkeys([*from_annotations, *caches]))


def _call_with_sizes(function: Callable[..., Any], sizes: CacheSizes) -> Any:
    """Calls a cache maker with arguments chosen by name. Raises what the function raises."""
    named, position_arguments = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        value = _size(parameter.name, sizes)
        if value is None and parameter.default is parameter.empty:
            raise TypeError(f"no value is known for the argument {parameter.name}")
        if value is not None and parameter.kind is parameter.POSITIONAL_ONLY:
            position_arguments.append(value)
        elif value is not None:
            named[parameter.name] = value
    return function(*position_arguments, **named)


def _size(name: str, sizes: CacheSizes) -> Any:
    role = call_role(name, annotation=int)
    if name in ("dtype", "device"):
        return getattr(sizes, name)
    if name.lower() in ("shape", "cache_shape"):
        return (sizes.batch, sizes.length, sizes.n_kv_heads, sizes.d_head)
    if _LAYERS.fullmatch(name):
        return 1
    if _BATCH.fullmatch(name):
        return sizes.batch
    if role == "d_head":
        return sizes.d_head
    if role == "d_model":
        return sizes.n_kv_heads * sizes.d_head
    if _KV_HEADS.fullmatch(name):
        return sizes.n_kv_heads
    return sizes.length if _LENGTH.fullmatch(name) else None


def _keys_read(names: tuple[str, ...], source: str) -> list[str]:
    """The keys that the source reads from a dict with one of these names."""
    names_pattern = "|".join(map(re.escape, names)) or "$."
    matches = re.findall(
        rf"""\b(?:{names_pattern})(?:\[|\.get\(|\.setdefault\()\s*["'](\w+)["']|["'](\w+)["']\s+(?:not\s+)?in\s+(?:{names_pattern})\b""",
        source,
    )
    return list(dict.fromkeys(first or second for first, second in matches))


def _allocated(keys: list[str], sizes: CacheSizes) -> Iterator[Maker]:
    """Zero-filled keys and values of full length: `[batch, length, head, d]` or `[batch, head, length, d]`."""
    for middle in ((sizes.length, sizes.n_kv_heads), (sizes.n_kv_heads, sizes.length)):
        if len(keys) == 2:
            yield _by_zeros(middle, sizes, sorted(keys))
        yield _by_zeros(middle, sizes, None)


def _by_zeros(middle: tuple[int, int], sizes: CacheSizes, keys: list[str] | None) -> Maker:
    def make(module: Any) -> Any:
        rows = tuple(
            torch.zeros(sizes.batch, *middle, width, dtype=sizes.dtype, device=sizes.device)
            for width in (sizes.d_head, sizes.d_v)
        )
        return rows if keys is None else dict(zip(keys, rows, strict=True))

    return make
