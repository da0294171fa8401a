"""Frozen dataclasses from untrusted JSON: every field checked against its annotation, every fault named by its place.

Fields marked `metadata={"json": False}` are left out.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from inspect import get_annotations
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mhacli.errors import MhaError

T = TypeVar("T")
MAX_WHOLE = 2**64


def load_json(text: str | bytes, source: str) -> Any:
    """JSON as Python values. Raises `MhaError` for what is not JSON, nests too deeply or names a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise MhaError(f"{source} must be JSON of moderate depth, got deeper nesting", code="bad-file") from None
    except UnicodeDecodeError as fault:
        raise MhaError(f"{source} must be UTF-8, got a bad byte at {fault.start}", code="bad-file") from None
    except ValueError as fault:
        raise MhaError(f"{source} must be JSON, got: {fault}", code="bad-file") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the name {key!r:.200} stands twice")
        result[key] = value
    return result


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON number")


def section(module: str) -> Mapping[str, str]:
    """Metadata of a field whose type is defined in `module`, which is loaded when a document has something there."""
    return {"section": module}


def decode(kind: type[T], value: Any, place: str) -> T:
    """`value` (parsed JSON) as the dataclass `kind`. Unknown fields are ignored: files of later versions add some.

    Raises `MhaError` that names the place, such as `run.safetensors: config.d_model`, and what was expected there.
    """
    return _decode(kind, value, place)  # type: ignore[no-any-return]


def _decode(kind: Any, value: Any, place: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, place)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _decode_union(arguments, value, place)
    if origin is Literal:
        return value if value in arguments else _refuse(f"one of {', '.join(map(str, arguments))}", value, place)
    if origin is Mapping:
        if not isinstance(value, dict):
            _refuse("an object", value, place)
        return {key: _decode(arguments[1], item, f"{place}.{key:.80}") for key, item in value.items()}
    if origin is tuple:
        return _decode_tuple(arguments, value, place)
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if abs(value) < 1e308 else _refuse("a finite number", value, place)
    if kind is int and isinstance(value, int) and abs(value) > MAX_WHOLE:
        return _refuse(f"a whole number of at most {MAX_WHOLE}", "a larger one", place)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return _refuse(f"a value of type {kind.__name__}", value, place)
    return value


def _decode_dataclass(kind: Any, value: Any, place: str) -> Any:
    if not isinstance(value, dict):
        _refuse("an object", value, place)
    found = {}
    for name, default in _defaults(kind).items():
        if name in value and not _is_empty(value[name], default):
            found[name] = _decode(_hint(kind, name), value[name], f"{place}.{name}")
    try:
        return kind(**found)
    except TypeError:
        required = {f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING}
        missing = ", ".join(sorted(required - found.keys()))
        raise MhaError(f"{place} must have the fields {missing}, got none of that name", code="bad-file") from None


@cache
def _defaults(kind: Any) -> dict[str, Any]:
    """The fields that a document may have, and their defaults."""
    return {f.name: f.default for f in dataclasses.fields(kind) if f.metadata.get("json", True)}


def _is_empty(value: Any, default: Any) -> bool:
    """Whether nothing is said but what holds anyway; then nobody needs to know the field's type."""
    return (value is None and default is None) or (value == [] and default == ())


@cache
def _hint(kind: Any, name: str) -> Any:
    """The type of a field, with the names of the module of the class that declares it, and of that where its section stands."""
    (field,) = (field for field in dataclasses.fields(kind) if field.name == name)
    declaring = next(base for base in kind.__mro__ if name in get_annotations(base))
    names = vars(import_module(field.metadata["section"])) if "section" in field.metadata else None
    alone = types.SimpleNamespace(__annotations__={name: field.type})
    return get_type_hints(alone, vars(sys.modules[declaring.__module__]), names)[name]


def _decode_union(choices: tuple[Any, ...], value: Any, place: str) -> Any:
    if value is None and type(None) in choices:
        return None
    (kind,) = [choice for choice in choices if choice is not type(None)]
    return _decode(kind, value, place)


def _decode_tuple(arguments: tuple[Any, ...], value: Any, place: str) -> Any:
    if not isinstance(value, (list, tuple)):
        _refuse("a list", value, place)
    if arguments[-1] is Ellipsis:
        return tuple(_decode(arguments[0], item, f"{place}[{i}]") for i, item in enumerate(value))
    if len(value) != len(arguments):
        _refuse(f"a list of {len(arguments)}", value, place)
    return tuple(
        _decode(kind, item, f"{place}[{i}]") for i, (kind, item) in enumerate(zip(arguments, value, strict=True))
    )


def _refuse(expected: str, value: Any, place: str) -> Any:
    raise MhaError(f"{place} must be {expected}, got {value!r:.80}", code="bad-file")
