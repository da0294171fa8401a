"""Files with one wrong part: what a careless or hostile writer could make of a file of ours."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

HUGE = int("9" * 400)
"""More than any number of a machine."""
NULL = "__metadata__"
"""The part of a header that the format lets be null."""
Place = tuple[str | int, ...]


def mutated(path: Path, seed: int) -> tuple[bytes, str]:
    """The record in a file with one field or array changed, and what was changed. The same seed
    gives the same bytes.
    """
    chance = random.Random(seed)
    arrays, document = stored(path)
    for name in ("checksum", "array_checksums"):  # so that only the contradiction can be noticed
        document.pop(name, None)
    what = chance.random()
    if what < 0.02:
        return _without_metadata(arrays), NULL
    if arrays and what < 0.35:
        with np.errstate(all="ignore"):
            arrays, place = _other_arrays(arrays, chance)
    else:
        document, place = other_json(document, chance)
    return saved(arrays, document), place


def stored(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of a file of ours, and its JSON."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return dict(load(data)), json.loads(header["__metadata__"]["mha"])


def saved(arrays: dict[str, np.ndarray], document: Any) -> bytes:
    """The content of a file of ours."""
    kept = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return save(kept, metadata={"mha": json.dumps(document)})


def other_json(document: Any, chance: random.Random) -> tuple[Any, str]:
    """JSON with one value changed, and its place. Each kind of place is as likely as any other."""
    document = copy.deepcopy(document)
    kinds: dict[Place, list[Place]] = {}
    for place in _places(document):
        kinds.setdefault(tuple("*" if isinstance(key, int) else key for key in place), []).append(
            place
        )
    place = chance.choice(kinds[chance.choice(list(kinds))])
    *outer, last = place
    holder = document
    for key in outer:
        holder = holder[key]
    new = chance.choice([*_others(holder[last])])
    if new is _GONE:
        del holder[last]
    else:
        holder[last] = new
    text = json.dumps("gone" if new is _GONE else new)
    return document, f"{'.'.join(map(str, place))} = {text[:60]}"


_GONE = object()


def _places(value: Any, place: Place = ()) -> Iterator[Place]:
    """The place of every value inside, lists of numbers as one."""
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    for key, each in inner:
        yield (*place, key)
        yield from _places(each, (*place, key))


def _others(value: Any) -> Iterator[Any]:
    """Other values for one."""
    yield from (None, _GONE, {}, [], "")
    match value:
        case bool():
            yield not value
        case int():
            yield from (0, -1, value + 1, value - 1, 10**9, 1 << 63, HUGE, 0.5)
        case float():
            yield from (0.0, -1.0, 1e308, -1e308, HUGE, 3)
        case str():
            yield from ("x", value + "x", "\x1b[31m", "注" * 999, "\udc80", 7)
        case list():
            if value:
                yield from (value[1:], value[:-1], value * 2, value[::-1], [*value, value[0]])
            yield from ([None], [0], [[]], ["x"], [HUGE])
        case dict():
            if value:
                yield dict([*value.items()][1:])
                yield dict([*value.items()][:-1])
            yield {"x": 1}
        case _:
            yield from (0, -1, 1.5, "x", [0], True, HUGE)


def _other_arrays(
    arrays: dict[str, np.ndarray], chance: random.Random
) -> tuple[dict[str, np.ndarray], str]:
    name = chance.choice(sorted(arrays))
    array = arrays[name]
    axis = chance.randrange(array.ndim) if array.ndim else 0
    others: dict[str, Any] = {
        "gone": None,
        "one axis more": array[None],
        "transposed": array.T,
        "flat": array.reshape(-1),
        "float64": array.astype(np.float64),
        "float16": array.astype(np.float16),
        "int64": np.nan_to_num(array.astype(np.float64)).astype(np.int64),
        "bytes": np.nan_to_num(array.astype(np.float64)).astype(np.uint8),
        "bool": array.astype(bool),
        "huge": (array * 0 + 10**9).astype(array.dtype),
        "negative": (array * 0 - 7).astype(array.dtype) if array.dtype.kind in "fi" else ~array,
    }
    if array.dtype.kind == "f":
        others |= {"nan": array * np.nan, "inf": array * 0 + np.inf}
    if array.ndim:
        others |= {
            "empty": array.take([], axis=axis),
            "shorter": array.take(range(array.shape[axis] - 1), axis=axis),
            "longer": np.concatenate([array, array], axis=axis),
            "first": array.take(0, axis=axis),
        }
    how = chance.choice(sorted(others))
    rest = {key: each for key, each in arrays.items() if key != name}
    return rest if how == "gone" else rest | {name: others[how]}, f"{name} {how}, axis {axis}"


def _without_metadata(arrays: dict[str, np.ndarray]) -> bytes:
    data = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    length = struct.unpack("<Q", data[:8])[0]
    header = json.dumps({NULL: None} | json.loads(data[8 : 8 + length])).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


# ----------------------------------------------------------------------------------------- any file


def changed(content: bytes, seed: int) -> tuple[bytes, str]:
    """A file of any kind with one part changed, and what was changed: a value of its JSON or of the
    header of a safetensors file, an array, or some bytes. The same seed gives the same bytes.
    """
    chance = random.Random(seed)
    with contextlib.suppress(ValueError):
        document = json.loads(content)
        if chance.random() < 0.85:
            document, what = other_json(document, chance)
            return json.dumps(document).encode(), what
    length = int.from_bytes(content[:8], "little")
    if content[8:9] == b"{" and length < len(content) and chance.random() < 0.6:
        header, what = other_json(json.loads(content[8 : 8 + length]), chance)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + length :], what
    return _other_bytes(content, chance)


def _other_bytes(content: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Bytes in which a piece is other, more often near the begin, where a format says most."""
    most = len(content) if chance.random() < 0.3 else min(len(content), 4096)
    begin = chance.randrange(most + 1)
    end = min(len(content), begin + chance.choice([1, 1, 2, 4, 8, 64]))
    pieces = {
        "a bit": bytes([content[begin] ^ 1 << chance.randrange(8)]) if begin < end else b"",
        "zeros": bytes(end - begin),
        "ones": b"\xff" * (end - begin),
        "gone": b"",
        "twice": content[begin:end] * 2,
        "random": chance.randbytes(end - begin),
        "inserted": content[begin:end] + chance.randbytes(4),
    }
    how = chance.choice(["cut", *pieces])
    if how == "cut":
        return content[:begin], f"cut at {begin}"
    end = begin + 1 if how == "a bit" else end
    return content[:begin] + pieces[how] + content[end:], f"{begin}:{end} {how}"
