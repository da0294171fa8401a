"""Asking somebody's attention step by step, with a cache: the ways in which people hand a cache and a position on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhacli.adapters.usercode.asker import copied
from mhacli.adapters.usercode.call.convention import raw
from mhacli.adapters.usercode.call.extras import Recipe, Setting, made
from mhacli.adapters.usercode.call.find_call import Caller
from mhacli.adapters.usercode.call.mask_forms import nothing_hidden, written
from mhacli.adapters.usercode.call.results import Sides, arranged, leaves, output_in, output_of, part_at, parts_of
from mhacli.adapters.usercode.call.signature import Parameter, signature_of
from mhacli.adapters.usercode.stepwise.cache_objects import CacheSizes, Maker, cache_makers, preparations, tensors_in
from mhacli.adapters.usercode.user_attention import Inputs, MaskForm

_SWITCH = re.compile(r"(use|return|output|with|keep|store|update|enable)_?(new_?)?(kv_?)?(cache|past|present|kv|key_?values?)s?"
                     r"|(kv_?)?caching|decod(e|ing)|incremental|is_?decod(e|ing)|cached")  # fmt: skip
_KEPT = re.compile(r"(?i)cache|past|keys?|values?|kv|mem|buf|(^|[._])[kv]s?($|[._])|[._]([kv])$")
_EXTRA = 3
"""How many more positions than tokens a table of rotations has that is given whole."""
_MOST_OBJECTS = 12


class Passing(NamedTuple):
    """How the cache goes from one call to the next: as the arguments `names`, made by `make` before the first call (None:
    nothing is given then), taken from `paths` of each result (empty: the same objects again). Without names the module keeps it
    itself, after `make` has made it ready."""

    names: tuple[str, ...] = ()
    make: Maker | None = None
    paths: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True)
class Stepping:
    """A way of asking step by step. `placed` are the arguments that say where a step stands, each with how it is written: a
    number, a tensor of one number, or the positions of its rows with none, one or all axes of the batch. `switches` are set to
    True.
    `is_table_whole`: rotations are given for all positions, not those of the step alone. `mask` is the form in which a step is
    told what it may see, `is_mask_whole`: for all the keys that a cache has room for, not those that it has seen."""

    caller: Caller
    sizes: CacheSizes
    passing: Passing
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
    def told(self) -> str:
        """What it hands on, in words."""
        given = ", ".join(self.names)
        return given if self.passing.names else f"{given} and a cache of its own"

    def __call__(self, rows: Tensor, ends: Sequence[int]) -> Stepped:
        """The outputs of a text `[batch, length, d_in]` whose parts end at `ends`, asked one after the other. Raises what the
        call raises, and ValueError where a result holds no output or no cache."""
        call = copied(self.caller.built.call)
        held = None if self.passing.make is None else self.passing.make(call)
        kept = [_state(call if not self.passing.names else held)]
        outs, start = [], 0
        for end in ends:
            result = self._asked(call, rows[:, start:end], start, held)
            outs.append(self._output(result, rows.shape[0], end - start, end))
            if self.passing.paths:
                held = [part_at(result, path) for path in self.passing.paths]
                held = held if len(held) > 1 else held[0]
            kept.append(_state(call if not self.passing.names else held))
            start = end
        return Stepped(tuple(outs), tuple(kept))

    def _asked(self, call: Callable[..., Any], rows: Tensor, start: int, held: Any) -> Any:
        caller, way = self.caller, self.caller.way
        end = start + rows.shape[1]
        fixed = dict(way.fixed) | dict.fromkeys(self.switches, True)
        fixed |= {name: _place(kind, rows.shape[0], start, end, caller.device) for name, kind in self.placed}
        if self.passing.names and held is not None:
            values = held if len(self.passing.names) > 1 else [held]
            fixed |= dict(zip(self.passing.names, values, strict=True))
        setting = Setting(
            Sides(rows.shape[0], way.n_heads, rows.shape[1], end), caller.dtype, caller.device, False, caller.tensors
        )
        fixed |= self._masks(setting, start, end) | self._rotations(setting, start, end)
        extras = tuple(recipe for recipe in way.extras if recipe.parameter not in fixed)
        plain = replace(way, fixed=fixed, extras=extras, idle=())
        return raw(call, plain, Inputs(rows), setting).results[0]

    def _masks(self, setting: Setting, start: int, end: int) -> dict[str, Any]:
        """The masks of a step: its own rows of the causal one, and of those that are required besides such as hide nothing."""
        sides, dtype, device = setting.sides, setting.dtype, setting.device
        masks: dict[str, Any] = {
            name: None if form is None else nothing_hidden(form, sides, device, dtype)
            for name, form in self.caller.way.idle
        }
        if self.mask is not None:
            k_len = self.sizes.length if self.is_mask_whole else end
            keep = torch.ones(end - start, k_len, dtype=torch.bool, device=device).tril(start)[None, None]
            masks[self.mask.parameter] = written(self.mask, keep, None, sides._replace(k_len=k_len), dtype)
        return masks

    def _rotations(self, setting: Setting, start: int, end: int) -> dict[str, Any]:
        """The rotations of a step: a whole table, or its rows of one."""

        def table(recipe: Recipe, length: int) -> tuple[Tensor, ...]:
            value = made(recipe, setting._replace(sides=setting.sides._replace(q_len=length)))
            return value if isinstance(value, tuple) else (value,)

        found: dict[str, Any] = {}
        for recipe in self.caller.way.extras:
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
            found[recipe.parameter] = parts if isinstance(made(recipe, setting), tuple) else parts[0]
        return found

    def _output(self, result: Any, batch: int, q_len: int, k_len: int) -> Tensor:
        way = self.caller.way
        sides = Sides(batch, way.n_heads, q_len, k_len)
        place = output_in(result, [way.output.axes], sides)
        if place is None:
            raise ValueError("the result of a step must hold its output")
        tensor = next(tensor for path, tensor in leaves(result) if path == place.path)
        out = output_of(tensor.detach(), place.axes, way.canonical, way.n_heads)
        return out.to("cpu", torch.float64).clone()


class Stepped(NamedTuple):
    """The output of each step, and what was kept before the first and after each, copies of tensors by their names."""

    outs: tuple[Tensor, ...]
    kept: tuple[dict[str, Tensor], ...]


def steppings(caller: Caller, sizes: CacheSizes, mask: MaskForm | None) -> Iterator[Stepping]:
    """The ways in which it may be asked step by step, the likeliest first; none where nothing speaks of a cache. `mask` is the
    form of a mask that makes it causal, None where it is so itself."""
    way, parameters = caller.way, signature_of(caller.built.call).parameters
    if caller.is_function or not way.batched:
        return
    free = [parameter for parameter in parameters if parameter.name not in way.fixed]
    switches = tuple(p.name for p in free if _SWITCH.fullmatch(p.name.lower()))
    caches = tuple(p.name for p in free if p.role == "cache" and p.name not in switches)
    placed = [_kinds(parameter) for parameter in free if parameter.role in ("offset", "positions")]
    if not caches and not placed and not switches:
        return
    base = Stepping(caller, sizes, Passing(), switches=switches)
    tables = [True, False] if any(recipe.kind == "rope" for recipe in way.extras) else [False]
    masks = [(mask, False), (mask, True), (None, False)] if mask is not None else [(None, False)]
    for passing in _passings(base, caches):
        for (form, is_wide), places, whole in product(masks, product(*placed), tables):
            yield replace(base, passing=passing, placed=places, is_table_whole=whole, mask=form, is_mask_whole=is_wide)


def _passings(base: Stepping, caches: tuple[str, ...]) -> Iterator[Passing]:
    call = base.caller.built.call
    if not caches:
        yield from (Passing((), make) for make in preparations(call, base.sizes))
        return
    for paths in _returned(base, len(caches)):
        yield Passing(caches, None, paths)
    makers = list(cache_makers(call, caches, base.sizes))[:_MOST_OBJECTS]
    for make in makers:
        yield Passing(caches, make)
    yield from (Passing((), make) for make in preparations(call, base.sizes))


def _returned(base: Stepping, n_caches: int) -> Iterator[tuple[tuple[Any, ...], ...]]:
    """The places of a first result that may hold the cache: what stands beside the output, named so or not, the last first."""
    caller = base.caller
    rows = torch.zeros(
        base.sizes.batch, caller.sizes.q_len, caller.sizes.d_in, dtype=caller.dtype, device=caller.device
    )
    places = [
        _kinds(p)
        for p in signature_of(caller.built.call).of_role("offset", "positions")
        if p.name not in caller.way.fixed
    ]
    for placed in product(*places):
        chosen = replace(base, placed=tuple(placed))
        try:
            result = chosen._asked(copied(caller.built.call), rows, 0, None)
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


def _is_output(part: Any, caller: Caller, rows: Tensor) -> bool:
    shape = arranged(rows, caller.way.canonical, caller.way.axes).shape
    return isinstance(part, Tensor) and part.shape[:-1] == shape[:-1] and part.ndim == len(shape)


def _kinds(parameter: Parameter) -> list[tuple[str, str]]:
    """How an argument that says where a step stands may be written, the likeliest first."""
    if parameter.role == "positions":
        one = "[1, row]" if "ids" in parameter.name else "[row]"
        return [(parameter.name, kind) for kind in dict.fromkeys((one, "[row]", "[batch, row]"))]
    kinds = ("number",) if isinstance(parameter.default, int) else ("number", "tensor", "[row]")
    return [(parameter.name, kind) for kind in kinds]


def _place(kind: str, batch: int, start: int, end: int, device: torch.device) -> Any:
    if kind == "number":
        return start
    if kind == "tensor":
        return torch.tensor(start, device=device)
    rows = torch.arange(start, end, device=device)
    return {"[row]": rows, "[1, row]": rows[None], "[batch, row]": rows.expand(batch, -1)}[kind]


def _state(held: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors_in(held)}


def is_kept(stepped: Stepped, *, by_itself: bool) -> bool:
    """Whether the first step left anything behind; of a module's own tensors such as are named like a cache."""
    before, after = stepped.kept[0], stepped.kept[1]
    names = [name for name in after if not by_itself or _KEPT.search(name)]
    return any(name not in before or not torch.equal(before[name], after[name]) for name in names)


def grows(stepped: Stepped) -> bool:
    """Whether a tensor that is kept gets longer with every step."""
    first, second = stepped.kept[1], stepped.kept[2]
    return any(name in second and second[name].numel() > tensor.numel() for name, tensor in first.items())
