"""Converts frozen dataclasses to JSON and back.

Input is untrusted: every field is checked against its annotation, and every error names the path of the value. Fields
marked `metadata={"json": False}` are left out.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from inspect import get_annotations
from itertools import repeat
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mhacli.errors import MhaError

T = TypeVar("T")
MAX_WHOLE = 2**64


def finite(number: float | None) -> float | None:
    """The number, or None for NaN and infinities, which JSON cannot express."""
    return number if number is not None and math.isfinite(number) else None


def plain(value: Any) -> Any:
    """Dataclasses, mappings and sequences as JSON values; non-finite numbers become null. A field marked
    `metadata={"omit_empty": True}` is omitted if it is empty."""
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, (str, int)):  # most values, before what takes longer to find out
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((f.metadata, f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: plain(content) for metadata, name, content in fields if content or not metadata.get("omit_empty")}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value


def load_json(text: str | bytes, source: str) -> Any:
    """JSON as Python values. Raises `MhaError` for invalid JSON, too deep nesting and duplicate names."""
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise MhaError(f"{source} is JSON that is nested too deeply", code="bad-file") from None
    except UnicodeDecodeError as fault:
        raise MhaError(f"{source} is not UTF-8: byte {fault.start} cannot be decoded", code="bad-file") from None
    except ValueError as fault:
        raise MhaError(f"{source} is not JSON: {fault}", code="bad-file") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the name {key!r:.200} occurs twice")
        result[key] = value
    return result


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON number")


def decode(kind: type[T], value: Any, place: str) -> T:
    """`value` (parsed JSON) as the dataclass `kind`.

    Unknown fields are ignored, because later versions add fields. A field that is missing takes the `absent` of its
    metadata, if it has one. Raises `MhaError` with the path of the value, such as `run.safetensors: config.d_model`,
    and what was expected there.
    """
    annotation: Any = kind
    try:
        return _decoder(annotation)(value)  # type: ignore[no-any-return]
    except _Wrong as wrong:
        where = place + "".join(reversed(wrong.steps))
        raise MhaError(f"{where} {wrong.fault}", code="bad-file") from None


class _Wrong(Exception):
    """A wrong value. `fault` completes a sentence that begins with its path; `steps` collects the path from the inside
    out."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self.fault = fault
        self.steps: list[str] = []


def _no(expected: str, value: Any) -> _Wrong:
    return _Wrong(f"must be {expected}, got {json.dumps(value, ensure_ascii=False, default=repr)[:80]}")


_Decoder = Callable[[Any], Any]


@cache
def _decoder(kind: Any) -> _Decoder:
    """The function that decodes a value of the annotated type, or raises `_Wrong`."""
    if dataclasses.is_dataclass(kind):
        return _dataclass_decoder(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _union_decoder(arguments)
    if origin is Literal:
        return _literal_decoder(arguments)
    if origin is Mapping:
        return _mapping_decoder(_decoder(arguments[1]))
    if origin is tuple and arguments[-1] is Ellipsis:
        return _list_decoder(_decoder(arguments[0]))
    if get_origin(base := getattr(kind, "__orig_bases__", (None,))[0]) is tuple:  # a subclass of a tuple type
        inner = _decoder(base)
        return lambda value: kind(inner(value))
    if origin is tuple:
        return _tuple_decoder(tuple(map(_decoder, arguments)))
    return {float: _float, int: _int}.get(kind) or _plain_decoder(kind)


def _dataclass_decoder(kind: Any) -> _Decoder:
    names = [f.name for f in dataclasses.fields(kind) if f.metadata.get("json", True)]
    decoders: dict[str, _Decoder] = {}
    absent = {f.name: {f.name: f.metadata["absent"]} for f in dataclasses.fields(kind) if "absent" in f.metadata}

    def decode_fields(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _no("an object", value)
        fields: dict[str, Any] = {}
        for name in names:
            if name not in value:
                fields |= absent.get(name, {})
                continue
            if name not in decoders:
                decoders[name] = _decoder(_hint(kind, name))
            try:
                fields[name] = decoders[name](value[name])
            except _Wrong as wrong:
                wrong.steps.append(f".{name}")
                raise
        try:
            return kind(**fields)
        except TypeError:
            raise _missing(kind, fields) from None

    return decode_fields


def _missing(kind: Any, fields: Mapping[str, Any]) -> _Wrong:
    required = {f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING}
    missing = sorted(required - fields.keys())
    return _Wrong(f"lacks the field{'s' if len(missing) > 1 else ''} {', '.join(missing)}")


@cache
def _hint(kind: Any, name: str) -> Any:
    """The resolved type of a field, in the namespace of the module whose class declares it."""
    (field,) = (field for field in dataclasses.fields(kind) if field.name == name)
    declaring = next(base for base in kind.__mro__ if name in get_annotations(base))
    alone = types.SimpleNamespace(__annotations__={name: field.type})
    return get_type_hints(alone, vars(sys.modules[declaring.__module__]))[name]


def _union_decoder(choices: tuple[Any, ...]) -> _Decoder:
    (kind,) = [choice for choice in choices if choice is not type(None)]
    inner = _decoder(kind)
    return (lambda value: None if value is None else inner(value)) if type(None) in choices else inner


def _literal_decoder(words: tuple[Any, ...]) -> _Decoder:
    def decode_word(value: Any) -> Any:
        if value not in words:
            raise _no(f"one of {', '.join(map(str, words))}", value)
        return value

    return decode_word


def _mapping_decoder(inner: _Decoder) -> _Decoder:
    def decode_items(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _no("an object", value)
        decoded = {}
        for key, item in value.items():
            try:
                decoded[key] = inner(item)
            except _Wrong as wrong:
                wrong.steps.append(f".{key:.80}")
                raise
        return decoded

    return decode_items


def _list_decoder(inner: _Decoder) -> _Decoder:
    def decode_list(value: Any) -> Any:
        return tuple(_decoded_items(_listed(value), repeat(inner)))

    return decode_list


def _tuple_decoder(inners: tuple[_Decoder, ...]) -> _Decoder:
    def decode_tuple(value: Any) -> Any:
        if len(_listed(value)) != len(inners):
            raise _no(f"a list of {len(inners)}", value)
        return tuple(_decoded_items(value, inners))

    return decode_tuple


def _listed(value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise _no("a list", value)
    return value


def _decoded_items(items: Sequence[Any], inners: Iterable[_Decoder]) -> list[Any]:
    decoded: list[Any] = []
    try:
        for item, inner in zip(items, inners, strict=False):  # `inners` may be endless
            decoded.append(inner(item))
    except _Wrong as wrong:
        wrong.steps.append(f"[{len(decoded)}]")
        raise
    return decoded


def _float(value: Any) -> Any:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _no("a number", value)
    if not abs(value) < 1e308:
        raise _no("a finite number", value)
    return float(value)


def _int(value: Any) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _no("a whole number", value)
    if abs(value) > MAX_WHOLE:
        raise _Wrong(f"must be a whole number of at most {MAX_WHOLE}, got a larger one")
    return value


def _plain_decoder(kind: type) -> _Decoder:
    expected = {str: "a string", bool: "true or false", dict: "an object", list: "a list"}.get(kind, kind.__name__)

    def decode_plain(value: Any) -> Any:
        if not isinstance(value, kind):
            raise _no(expected, value)
        return value

    return decode_plain
