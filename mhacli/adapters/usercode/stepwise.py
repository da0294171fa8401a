"""Calls a user's attention step by step with its cache, in every way in which people hand a cache and a position on."""

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

from mhacli.adapters.usercode.asker import copied
from mhacli.adapters.usercode.call.convention import (
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
from mhacli.adapters.usercode.call.signature import CallParameter, call_role, called_function, signature_of, source_of
from mhacli.adapters.usercode.call.user_attention import UserAttention
from mhacli.adapters.usercode.types import Inputs, MaskForm

_SWITCH = re.compile(r"(use|return|output|with|keep|store|update|enable)_?(new_?)?(kv_?)?(cache|past|present|kv|key_?values?)s?"
                     r"|(kv_?)?caching|decod(e|ing)|incremental|is_?decod(e|ing)|cached")  # fmt: skip
_KEPT = re.compile(r"(?i)cache|past|keys?|values?|kv|mem|buf|(^|[._])[kv]s?($|[._])|[._]([kv])$")
_MOST_OBJECTS = 12


class CachePassing(NamedTuple):
    """How the cache goes from one call to the next: as the arguments `names`, made by `make` before the first call (None:
    nothing is given then), taken from `paths` of each result (empty: the same objects again). Without names the module keeps it
    itself, after `make` has made it ready."""

    names: tuple[str, ...] = ()
    make: Maker | None = None
    paths: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True)
class StepConvention:
    """A way of asking step by step. `placed` are the arguments that say where a step stands, each with how it is written: a
    number, a tensor of one number, or the positions of its rows with none, one or all axes of the batch. `switches` are set to
    True.
    `is_table_whole`: rotations are given for all positions, not those of the step alone. `mask` is the form in which a step is
    given what it may see, `is_mask_whole`: for all the keys that a cache has room for, not those that it has seen."""

    caller: UserAttention
    sizes: CacheSizes
    passing: CachePassing
    placed: tuple[tuple[str, str], ...] = ()
    switches: tuple[str, ...] = ()
    is_table_whole: bool = False
    mask: MaskForm | None = None
    is_mask_whole: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments that it gives."""
        return (*self.passing.names, *(name for name, _ in self.placed), *self.switches)

    @property
    def text(self) -> str:
        """What it hands on, in words."""
        given = ", ".join(self.names)
        return given if self.passing.names else f"{given} and a cache of its own"

    def __call__(self, rows: Tensor, ends: Sequence[int]) -> StepResults:
        """The outputs of a text `[batch, length, d_in]` whose parts end at `ends`, asked one after the other. Raises what the
        call raises, and ValueError where a result holds no output or no cache."""
        call = copied(self.caller.built.call)
        held = None if self.passing.make is None else self.passing.make(call)
        kept = [_state(call if not self.passing.names else held)]
        outs, start = [], 0
        for end in ends:
            result = self._call_step(call, rows[:, start:end], start, held)
            outs.append(self._output(result, rows.shape[0], end - start, end))
            if self.passing.paths:
                held = [part_at(result, path) for path in self.passing.paths]
                held = held if len(held) > 1 else held[0]
            kept.append(_state(call if not self.passing.names else held))
            start = end
        return StepResults(tuple(outs), tuple(kept))

    def _call_step(self, call: Callable[..., Any], rows: Tensor, start: int, held: Any) -> Any:
        caller, convention = self.caller, self.caller.convention
        end = start + rows.shape[1]
        fixed = dict(convention.fixed) | dict.fromkeys(self.switches, True)
        fixed |= {
            name: _position_argument(kind, rows.shape[0], start, end, caller.device) for name, kind in self.placed
        }
        if self.passing.names and held is not None:
            values = held if len(self.passing.names) > 1 else [held]
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
        return call_with(call, plain, Inputs(rows), setting).results[0]

    def _masks(self, setting: CallSetting, start: int, end: int) -> dict[str, Any]:
        """The masks of a step: its own rows of the causal one, and of those that are required besides such as hide nothing."""
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
        """The rotations of a step: a whole table, or its rows of one."""

        def table(recipe: ArgumentRecipe, length: int) -> tuple[Tensor, ...]:
            value = make_argument(recipe, setting._replace(sides=setting.sides._replace(q_len=length)))
            return value if isinstance(value, tuple) else (value,)

        found: dict[str, Any] = {}
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
            found[recipe.parameter] = parts if isinstance(make_argument(recipe, setting), tuple) else parts[0]
        return found

    def _output(self, result: Any, batch: int, q_len: int, k_len: int) -> Tensor:
        convention = self.caller.convention
        sides = AxisSizes(batch, convention.n_heads, q_len, k_len)
        place = output_in(result, [convention.output.axes], sides)
        if place is None:
            raise ValueError("the result of a step must hold its output")
        tensor = next(tensor for path, tensor in leaves(result) if path == place.path)
        out = output_of(tensor.detach(), place.axes, convention.canonical, convention.n_heads)
        return out.to("cpu", torch.float64).clone()


class StepResults(NamedTuple):
    """The output of each step, and what was kept before the first and after each, copies of tensors by their names."""

    outs: tuple[Tensor, ...]
    kept: tuple[dict[str, Tensor], ...]


def step_conventions(caller: UserAttention, sizes: CacheSizes, mask: MaskForm | None) -> Iterator[StepConvention]:
    """The ways in which it may be asked step by step, the likeliest first; none where nothing speaks of a cache. `mask` is the
    form of a mask that makes it causal, None where it is so itself."""
    convention, parameters = caller.convention, signature_of(caller.built.call).parameters
    if caller.is_function or not convention.batched:
        return
    free = [parameter for parameter in parameters if parameter.name not in convention.fixed]
    switches = tuple(p.name for p in free if _SWITCH.fullmatch(p.name.lower()))
    caches = tuple(p.name for p in free if p.role == "cache" and p.name not in switches)
    placed = [_kinds(parameter) for parameter in free if parameter.role in ("offset", "positions")]
    if not caches and not placed and not switches:
        return
    base = StepConvention(caller, sizes, CachePassing(), switches=switches)
    tables = [True, False] if any(recipe.kind == "rope" for recipe in convention.extras) else [False]
    masks = [(mask, False), (mask, True), (None, False)] if mask is not None else [(None, False)]
    for passing in _passings(base, caches):
        for (form, is_wide), places, whole in product(masks, product(*placed), tables):
            yield replace(base, passing=passing, placed=places, is_table_whole=whole, mask=form, is_mask_whole=is_wide)


def _passings(base: StepConvention, caches: tuple[str, ...]) -> Iterator[CachePassing]:
    call = base.caller.built.call
    if not caches:
        yield from (CachePassing((), make) for make in preparations(call, base.sizes))
        return
    for paths in _returned(base, len(caches)):
        yield CachePassing(caches, None, paths)
    makers = list(cache_makers(call, caches, base.sizes))[:_MOST_OBJECTS]
    for make in makers:
        yield CachePassing(caches, make)
    yield from (CachePassing((), make) for make in preparations(call, base.sizes))


def _returned(base: StepConvention, n_caches: int) -> Iterator[tuple[tuple[Any, ...], ...]]:
    """The places of a first result that may hold the cache: what stands beside the output, named so or not, the last first."""
    caller = base.caller
    rows = torch.zeros(
        base.sizes.batch, caller.sizes.q_len, caller.sizes.d_in, dtype=caller.dtype, device=caller.device
    )
    places = [
        _kinds(p)
        for p in signature_of(caller.built.call).of_role("offset", "positions")
        if p.name not in caller.convention.fixed
    ]
    for placed in product(*places):
        chosen = replace(base, placed=tuple(placed))
        try:
            result = chosen._call_step(copied(caller.built.call), rows, 0, None)
            break
        except Exception:  # a position that is written in another way
            continue
    else:
        return
    parts = [
        (path, part) for path, part in parts_of(result) if isinstance(part, Tensor) or any(True for _ in leaves(part))
    ]
    parts = [(path, part) for path, part in parts if not _is_output(part, caller, rows)]
    if n_caches == 1:
        yield from (((*path,),) for path, part in sorted(parts, key=lambda one: isinstance(one[1], Tensor)))
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


def _kinds(parameter: CallParameter) -> list[tuple[str, str]]:
    """How an argument that says where a step stands may be written, the likeliest first."""
    if parameter.role == "positions":
        one = "[1, row]" if "ids" in parameter.name else "[row]"
        return [(parameter.name, kind) for kind in dict.fromkeys((one, "[row]", "[batch, row]"))]
    kinds = ("number",) if isinstance(parameter.default, int) else ("number", "tensor", "[row]")
    return [(parameter.name, kind) for kind in kinds]


def _position_argument(kind: str, batch: int, start: int, end: int, device: torch.device) -> Any:
    if kind == "number":
        return start
    if kind == "tensor":
        return torch.tensor(start, device=device)
    rows = torch.arange(start, end, device=device)
    return {"[row]": rows, "[1, row]": rows[None], "[batch, row]": rows.expand(batch, -1)}[kind]


def _state(held: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors_in(held)}


def cache_is_kept(stepped: StepResults, *, by_itself: bool) -> bool:
    """Whether the first step left anything behind; of a module's own tensors such as are named like a cache."""
    before, after = stepped.kept[0], stepped.kept[1]
    names = [name for name in after if not by_itself or _KEPT.search(name)]
    return any(name not in before or not torch.equal(before[name], after[name]) for name in names)


def cache_grows(stepped: StepResults) -> bool:
    """Whether a tensor that is kept gets longer with every step."""
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
"""Makes a cache, or makes a module ready to keep one; it is given the module."""


class CacheSizes(NamedTuple):
    """What a cache must hold: sequences, tokens, heads of keys and values, and their widths; and of which dtype."""

    batch: int
    length: int
    n_kv_heads: int
    d_head: int
    d_v: int
    dtype: torch.dtype
    device: torch.device


class GrowingCache:
    """A cache that keeps the keys and values `[batch, head, length, d]` of each layer and joins new ones behind them.

    It has the methods by which `transformers` speaks to its caches. Source: Hugging Face transformers, cache_utils.DynamicCache.
    """

    def __init__(self) -> None:
        self.layers: dict[Any, tuple[Tensor, Tensor]] = {}

    def update(self, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, the new ones last; the layer is whatever number or name is given besides."""
        values = [*given, *named.values()]
        key, value = [one for one in values if isinstance(one, Tensor) and one.ndim >= 3][:2]
        layer = next((one for one in values if isinstance(one, int | str)), None)
        if layer in self.layers:
            old_key, old_value = self.layers[layer]
            key, value = torch.cat([old_key, key], dim=-2), torch.cat([old_value, value], dim=-2)
        self.layers[layer] = key, value
        return key, value

    insert_kv = append = store = update

    def get_seq_length(self, layer_idx: Any = None) -> int:
        """How many tokens are kept."""
        kept = self.layers.get(layer_idx) or next(iter(self.layers.values()), None)
        return 0 if kept is None else kept[0].shape[-2]

    def get_usable_length(self, new_seq_length: int, layer_idx: Any = None) -> int:
        """How many tokens are kept: none is ever dropped."""
        return self.get_seq_length(layer_idx)

    def get_max_length(self) -> None:
        """No limit."""

    get_max_cache_shape = get_max_length

    @property
    def seen_tokens(self) -> int:
        """How many tokens are kept."""
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
        """How many layers have kept something."""
        return len(self.layers)

    def __bool__(self) -> bool:
        """A cache is there, though it be empty."""
        return True

    def __getitem__(self, layer: Any) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer."""
        return self.layers[layer]


def cache_makers(call: Callable[..., Any], names: tuple[str, ...], sizes: CacheSizes) -> Iterator[Maker]:
    """Functions that make a cache for the parameters of these names, the likeliest first; each is given the module."""
    yield from (_by_method(name, sizes) for name in _methods(call))
    yield from (_by_class(kind, sizes) for kind in _classes(call, names))
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
    """What may have to be done before a module keeps a cache of its own: nothing, a method of its own, or a cache from its file
    in an attribute that is None."""
    yield lambda _: None
    yield from (_by_method(name, sizes) for name in _methods(call))
    empty = [
        name for name, value in getattr(call, "__dict__", {}).items() if value is None and _CACHE_CLASS.search(name)
    ]
    for attribute in empty:
        yield from (_by_attribute(attribute, kind, sizes) for kind in _classes(call, ()))


def _by_method(name: str, sizes: CacheSizes) -> Maker:
    return lambda module: _called(getattr(module, name), sizes)


def _by_class(kind: type, sizes: CacheSizes) -> Maker:
    return lambda module: _called(kind, sizes)


def _by_attribute(attribute: str, kind: type, sizes: CacheSizes) -> Maker:
    return lambda module: setattr(module, attribute, _called(kind, sizes))


def tensors_in(held: Any, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a cache, or of a module, with the name by which it is kept; parameters are none of them."""
    if isinstance(held, nn.Parameter) or depth > _DEEPEST:
        return
    if isinstance(held, Tensor):
        yield "", held
        return
    parts: list[tuple[Any, Any]] = []
    if isinstance(held, Mapping):
        parts = list(held.items())
    elif isinstance(held, list | tuple):
        parts = list(enumerate(held))
    elif isinstance(held, nn.Module):
        parts = [*held._buffers.items(), *held._modules.items()]
        parts += [
            (name, value) for name, value in vars(held).items() if not name.startswith("_") or _CACHE_CLASS.search(name)
        ]
    elif hasattr(held, "__dict__") and not isinstance(held, type) and not callable(held):
        parts = list(vars(held).items())
    for name, part in parts:
        for inner, tensor in tensors_in(part, depth + 1):
            yield f"{name}.{inner}" if inner else str(name), tensor


def _methods(call: Callable[..., Any]) -> list[str]:
    own = vars(type(call)) if isinstance(call, nn.Module) else {}
    return [name for name, value in own.items() if _MAKER.fullmatch(name) and inspect.isfunction(value)]


def _classes(call: Callable[..., Any], names: tuple[str, ...]) -> list[type]:
    """Classes of caches: those that annotate the parameters, then those of its file that are named so."""
    function = called_function(call)
    home = sys.modules.get(str(getattr(inspect.unwrap(function), "__module__", "")))
    held = vars(home) if home is not None else {}
    found = [
        value for value in held.values() if inspect.isclass(value) and value.__module__ == getattr(home, "__name__", "")
    ]
    caches = [kind for kind in found if _CACHE_CLASS.search(kind.__name__) and not _NO_CACHE.search(kind.__name__)]
    annotated = " ".join(str(getattr(function, "__annotations__", {}).get(name, "")) for name in names)
    first = [kind for kind in found if re.search(rf"\b{kind.__name__}\b", annotated)]
    return list(dict.fromkeys([*first, *caches]))


def _called(function: Callable[..., Any], sizes: CacheSizes) -> Any:
    """What a function gives that makes or empties a cache; its arguments are found by their names. Raises what it raises."""
    named, placed = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        value = _size(parameter.name, sizes)
        if value is None and parameter.default is parameter.empty:
            raise TypeError(f"no value is known for the argument {parameter.name}")
        if value is not None and parameter.kind is parameter.POSITIONAL_ONLY:
            placed.append(value)
        elif value is not None:
            named[parameter.name] = value
    return function(*placed, **named)


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
    """The keys that its lines read from a dict of these names."""
    whose = "|".join(map(re.escape, names)) or "$."
    found = re.findall(
        rf"""\b(?:{whose})(?:\[|\.get\(|\.setdefault\()\s*["'](\w+)["']|["'](\w+)["']\s+(?:not\s+)?in\s+(?:{whose})\b""",
        source,
    )
    return list(dict.fromkeys(first or second for first, second in found))


def _allocated(keys: list[str], sizes: CacheSizes) -> Iterator[Maker]:
    """Keys and values of zeros, as long as they may become: `[batch, length, head, d]` or `[batch, head, length, d]`."""
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
