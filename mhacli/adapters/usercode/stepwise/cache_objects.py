"""Caches to give to somebody's attention: the kinds that people write, and those that its own file makes."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.adapters.usercode.call.signature import called_function, role_of, source_of

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
            raise TypeError(f"nobody knows what {parameter.name} is")
        if value is not None and parameter.kind is parameter.POSITIONAL_ONLY:
            placed.append(value)
        elif value is not None:
            named[parameter.name] = value
    return function(*placed, **named)


def _size(name: str, sizes: CacheSizes) -> Any:
    role = role_of(name, annotation=int)
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
