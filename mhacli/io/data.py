"""Data in files: frozen data to JSON and back, of which msgspec checks every field against its
annotation; device maps; and arrays, in memory or in a file until they are used.
"""

import json
import math
import os
import re
import shlex
from collections import UserDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from mhacli.errors import UsageError, bad_file, first_names

from .files import read_whole

T = TypeVar("T")


def finite(number: float | None) -> float | None:
    """The number, or None for NaN and infinities, which JSON cannot express."""
    return number if number is not None and math.isfinite(number) else None


def plain(value: Any) -> Any:
    """Data as JSON values; non-finite numbers become null."""

    def builtin(value: object) -> object:
        """A string or number of torch's or numpy's subclasses as Python's own."""
        return float(value) if isinstance(value, float) else str.__str__(value)

    return json.loads(
        json.dumps(msgspec.to_builtins(value, enc_hook=builtin)), parse_constant=lambda word: None
    )


def json_checksum(values: Any) -> str:
    """The sha256 of JSON values."""
    import hashlib  # not for a help text

    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def load_json(text: str | bytes, source: str, *, path: str | None = None) -> Any:
    """JSON as Python values; half a character, such as "\\ud800", stays what it is. Raises
    `MhaError` that begins with the source, the part of a file at `path`, for anything else, for
    numbers beyond 64 bits, with the field, and for too deep nesting.
    """

    def refuse(word: str) -> Any:
        field = str(text)[: str(text).find(word)].rpartition('":')[0].rpartition('"')[2]
        raise ValueError(f"{word:.20} in {field!r:.80} is not a JSON number")

    def whole(word: str) -> Any:
        return int(word) if len(word) < 21 else refuse(word)

    def real(word: str) -> Any:
        number = float(word)
        return number if math.isfinite(number) else refuse(word)

    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return json.loads(text, parse_constant=refuse, parse_int=whole, parse_float=real)
    except (ValueError, RecursionError) as fault:
        raise bad_file(path or source, f"{source} is not JSON: {fault}") from None


_MOST_SAID = 150
"""Characters at the beginning and at the end of a message of msgspec that are shown."""


def decode(kind: type[T], value: Any, source: str, *, path: str | None = None) -> T:
    """JSON values as the type `kind`. Unknown fields are ignored, because later versions add
    fields.

    Raises `MhaError`, with the file at `path` or the source, that names the place of the value,
    such as `$.config.d_model`, and what was expected there."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError, UnicodeEncodeError) as fault:
        said = str(fault)
        if len(said) > 2 * _MOST_SAID:  # a value of any length; the place is at the end
            said = f"{said[:_MOST_SAID]}…{said[-_MOST_SAID:]}"
        raise bad_file(path or source, f"{source}: {said}") from None


def with_earlier_config(document: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a file with a config. A file that says nothing of marks inside words is of a
    version that dropped them.
    """
    config = document.get("config")
    return (
        document | {"config": {"inner_marks": False} | config}
        if isinstance(config, dict)
        else document
    )


# -------------------------------------------------------------------------------------- device maps

DeviceMap = Literal["auto"] | Mapping[str, str]
"""`auto` fills GPUs, then the CPU, then the disk. A mapping has the device of each named module:
`cpu`, `disk`, `mps`, `cuda` or `cuda:N`; the name "" is the whole model."""

_DEVICE = "cpu|disk|mps|cuda(:[0-9]{1,4})?"
_EXAMPLE = 'a file holds JSON, such as {"model.layers.0": "cuda:0", "model.layers.1": "cpu"}'
_MAX_FILE_BYTES = 1 << 24


def read_device_map(word: str) -> DeviceMap:
    """The device map in `--device-map`. Raises `UsageError` for an unknown keyword, and `MhaError`
    for an invalid file.
    """
    if word == "auto":
        return "auto"
    if not os.path.lexists(word):
        raise UsageError(
            f"--device-map {shlex.quote(word[:200])} is neither auto nor a file", hint=_EXAMPLE
        )
    numbered = decode(
        dict[str, str | int], load_json(read_whole(word, _MAX_FILE_BYTES), word), word
    )
    devices = {
        name: f"cuda:{device}" if isinstance(device, int) else device
        for name, device in numbered.items()
    }
    unknown = [
        f"{name!r:.80}: {device!r:.80}"
        for name, device in devices.items()
        if not re.fullmatch(_DEVICE, device)
    ]
    if unknown or not devices or ("" in devices and len(devices) > 1):
        rule = (
            'needs cpu, disk, mps, cuda, cuda:N or the number of a GPU for each module, or for ""'
            " alone, the whole model"
        )
        given = first_names(unknown or map(repr, devices)) or "nothing"
        raise bad_file(word, f"{word} {rule}, not {given}", hint=_EXAMPLE)
    return devices


# ------------------------------------------------------------------------------------------- arrays

if TYPE_CHECKING:  # numpy is loaded with numbers, not for a help text
    import numpy.typing as npt

    Array = npt.NDArray[Any]
else:
    Array = Any


class StoredArrays(UserDict[str, Any]):
    """Arrays in a file by name. `data` has a cached function for each, which reads it on first
    use.
    """

    def __getitem__(self, name: str) -> Array:
        """The array with this name. Raises the errors of reading."""
        array: Array = self.data[name]()
        return array


def under(arrays: Mapping[str, Array], prefix: str) -> Mapping[str, Array]:
    """The arrays whose names begin with the prefix, by the rest of their names. Reads nothing."""
    if isinstance(arrays, StoredArrays):
        return StoredArrays(under(arrays.data, prefix))
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def checksum(array: Array) -> str:
    """The sha256 of an array's numbers, dtype and shape."""
    import hashlib  # not for a help text

    digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    digest.update(
        array.tobytes()
        if array.nbytes < 1 << 20 or not array.flags.c_contiguous
        else array.reshape(-1).data
    )
    return digest.hexdigest()
