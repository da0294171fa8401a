"""Converts frozen data to JSON and back. msgspec checks every field against its annotation."""

from __future__ import annotations

import json
import math
from typing import Any, TypeVar

import msgspec

from mhacli.errors import bad_file

T = TypeVar("T")


def finite(number: float | None) -> float | None:
    """The number, or None for NaN and infinities, which JSON cannot express."""
    return number if number is not None and math.isfinite(number) else None


def plain(value: Any) -> Any:
    """Data as JSON values; non-finite numbers become null."""

    def builtin(value: object) -> object:
        """A string or number of torch's or numpy's subclasses as Python's own."""
        return float(value) if isinstance(value, float) else str.__str__(value)

    return json.loads(json.dumps(msgspec.to_builtins(value, enc_hook=builtin)), parse_constant=lambda word: None)


def json_checksum(values: Any) -> str:
    """The sha256 of JSON values."""
    import hashlib  # not for a help text

    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def load_json(text: str | bytes, source: str, *, path: str | None = None) -> Any:
    """JSON as Python values; half a character, such as "\\ud800", stays what it is. Raises `MhaError` that begins with
    the source, the part of a file at `path`, for anything else and for too deep nesting."""

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is not a JSON number")

    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as fault:
        raise bad_file(path or source, f"{source} is not JSON: {fault}") from None


def decode(kind: type[T], value: Any, source: str, *, path: str | None = None) -> T:
    """JSON values as the type `kind`. Unknown fields are ignored, because later versions add fields.

    Raises `MhaError`, with the file at `path` or the source, that names the place of the value, such as `$.config.d_model`,
    and what was expected there."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError, UnicodeEncodeError) as fault:
        raise bad_file(path or source, f"{source}: {fault}") from None


def with_earlier_config(document: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a file with a config. A file that says nothing of marks inside words is of a version that dropped
    them."""
    config = document.get("config")
    return document | {"config": {"inner_marks": False} | config} if isinstance(config, dict) else document
