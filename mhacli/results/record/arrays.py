"""The arrays of a record in its file: which it may hold, and of what shape, is known from the header; numbers are read late."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from mhacli.errors import MhaError
from mhacli.io.memory import uncollected
from mhacli.io.safetensors import TensorFile, TensorHeader, TensorInfo, shown_name, tensors_of
from mhacli.spec.sites import SITES

if TYPE_CHECKING:  # numpy is loaded where numbers are, not to print a help text
    import numpy.typing as npt

    from mhacli.results.record.record import Record
    from mhacli.results.record.tiled import Survey
    from mhacli.spec.facts import Facts

    Array = npt.NDArray[Any]
else:
    Array = Any

T = TypeVar("T")
_PER_QUERY = ("entropy", "strongest_key", "allowed")
_ROUNDING = 1e-3
_NO_FLOATS = {"ids": "int", "strongest_key": "int", "visible": "int", "top_keys": "int", "allowed": "bool"}
_KINDS = {"int": "whole numbers", "bool": "true or false", "float": "floating point numbers"}
_READABLE = {"F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64", "I32": "int32", "BOOL": "bool"}


class Prefixed(Mapping[str, T]):
    """Those of some named things whose names begin with a prefix, by the rest of their names."""

    def __init__(self, every: Mapping[str, T], prefix: str) -> None:
        self._every, self._prefix = every, prefix

    def __getitem__(self, name: str) -> T:
        """One of them, by the rest of its name."""
        return self._every[self._prefix + name]

    def __contains__(self, name: object) -> bool:
        """Whether there is one of that name; to know it nothing is read."""
        return isinstance(name, str) and self._prefix + name in self._every

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return (name.removeprefix(self._prefix) for name in self._every if name.startswith(self._prefix))

    def __len__(self) -> int:
        """How many they are."""
        return sum(1 for _ in self)


class StoredArrays(Mapping[str, Array]):
    """The arrays of a checked file that have a meaning in the record; all are read when the first is asked for.

    `views` are the record or its layers, by what the names of their arrays begin with in the file; `read` gives the file with
    its numbers. Raises `MhaError` for arrays that do not fit, and, when one is asked for, where numbers have no meaning.
    """

    def __init__(
        self, file: TensorFile | TensorHeader, views: Mapping[str, Record], read: Callable[[], TensorFile]
    ) -> None:
        _require_readable(file)
        self._names = {prefix + name: None for prefix, view in views.items() for name in _fitting(view, file, prefix)}
        self._views, self._read = views, read

    def __getitem__(self, name: str) -> Array:
        """An array, by its name in the file."""
        if name not in self._names:  # to know that, nothing is read
            raise KeyError(name)
        return self._arrays[name]

    def __contains__(self, name: object) -> bool:
        """Whether there is an array of that name; to know it nothing is read."""
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._names)

    def __len__(self) -> int:
        """How many they are."""
        return len(self._names)

    @property
    def is_read(self) -> bool:
        """Whether the numbers have been read."""
        return "_arrays" in self.__dict__

    @cached_property
    def _arrays(self) -> Mapping[str, Array]:
        file = self._read()
        every = _loaded(file)
        arrays = {name: every[name] for name in self._names}
        for prefix, view in self._views.items():
            _require_meaning(Prefixed(arrays, prefix), view.facts, file.path)
        return arrays


def are_read(arrays: Mapping[str, Array]) -> bool:
    """Whether the numbers of a record are in memory, or would be read from its file."""
    return not isinstance(arrays, StoredArrays) or arrays.is_read


def _require_readable(file: TensorFile | TensorHeader) -> None:
    for name, info in file.tensors.items():
        if info.dtype not in _READABLE:
            raise MhaError(
                f"{file.path} must hold arrays of {', '.join(_READABLE)}, got {info.dtype} for {shown_name(name)}",
                code="bad-file",
                path=file.path,
            )


def _loaded(file: TensorFile) -> Mapping[str, Array]:
    with uncollected():
        from safetensors.numpy import load
    return tensors_of(file, load)


def _fitting(view: Record, file: TensorFile | TensorHeader, prefix: str) -> Iterator[str]:
    """The names of the arrays of a record, or of one layer, that have a meaning there, by what the header says of them. Raises
    `MhaError` for those that do not fit. `prefix` is what their names begin with in the file."""
    path, shapes = file.path, _shapes(view)
    arrays = {name: info for name, info in Prefixed(file.tensors, prefix).items() if name in shapes}
    for name, info in arrays.items():
        _require_fitting(name, info, shapes[name], path)
    required = _PER_QUERY if view.survey is None else _required_of_survey(shapes, arrays)
    for name in required:
        if name not in arrays:
            raise MhaError(f"{path} must hold the array {prefix}{name}, got none", code="bad-file", path=path)
    yield from arrays


_Shapes = Mapping[str, tuple[tuple[int, ...], ...]]


def _shapes(record: Record) -> _Shapes:
    """The arrays that a record may hold, and the shapes that each may have, the usual one first."""
    facts = record.facts
    if record.survey is not None:
        return _shapes_of_survey(record.survey, record)
    whole = SITES["pattern"].shape_for(facts)
    expected = {name: (site.shape_for(facts),) for name, site in SITES.items()}
    for_all_heads = (whole[0], 1, *whole[2:])
    per_query = {"entropy": (whole[:3],), "strongest_key": (whole[:3],)}
    return {**expected, **per_query, "allowed": (for_all_heads, whole)}  # a mask may differ from head to head


def _shapes_of_survey(survey: Survey, record: Record) -> _Shapes:
    from mhacli.results.record.tiled import FOR_ALL_HEADS, survey_shapes

    facts = record.facts
    shapes = survey_shapes(
        survey,
        batch=facts.batch,
        n_heads=len(record.heads),
        q_len=facts.q_len,
        k_len=facts.k_len,
        d_v=record.config.d_v or 0,
        n_spans=len(record.spans),
    )
    return {
        name: ((shape[0], 1, *shape[2:]), shape) if name in FOR_ALL_HEADS else (shape,)
        for name, shape in shapes.items()
    }


def _required_of_survey(shapes: Iterable[str], held: Container[str]) -> Iterable[str]:
    from mhacli.results.record.tiled import MATRICES, OPTIONAL

    yield from (name for name in shapes if name not in OPTIONAL)
    if any(name in held for name in MATRICES):  # without their mask nobody knows which cells are there
        yield "allowed"


def _require_fitting(name: str, info: TensorInfo, shapes: tuple[tuple[int, ...], ...], path: str) -> None:
    """Arrays and tokens that disagree would be drawn under the wrong names: such a file is refused."""
    if info.shape not in shapes:
        raise MhaError(
            f"{path}: {name} must have the shape {list(shapes[0])} of its tokens and heads, got {list(info.shape)}",
            code="bad-file",
            path=path,
        )
    dtype, kind = _READABLE[info.dtype], _NO_FLOATS.get(name, "float")
    if not dtype.startswith(kind):
        raise MhaError(f"{path}: {name} must hold {_KINDS[kind]}, got {dtype}", code="bad-file", path=path)


def _require_meaning(arrays: Mapping[str, Array], facts: Facts, path: str) -> None:
    """Numbers that views index or scale by lie in their range. NaN may stand anywhere: it is shown as what it is."""
    import numpy as np

    last_key, most = facts.k_len - 1, facts.q_len * (1 + _ROUNDING)
    keys, shares = (-1, last_key, f"key positions from -1 to {last_key}"), (0, 1 + _ROUNDING, "shares from 0 to 1")
    limits: dict[str, tuple[float, float, str]] = {"strongest_key": keys, "top_keys": keys}
    limits |= dict.fromkeys(
        ("pattern", "map", "corner", "top_shares", "sink", "profile", "uniform_profile", "span_mass"), shares
    )
    limits |= dict.fromkeys(("uniform_map", "uniform_span_mass"), shares)
    limits |= dict.fromkeys(("received", "uniform_received"), (0, most, f"sums of shares of {facts.q_len} queries"))
    limits["visible"] = (0, facts.k_len, f"counts of keys from 0 to {facts.k_len}")
    limits["entropy"] = (-_ROUNDING, 1e3, "nats that are finite and not negative")
    limits["distance"] = (-_ROUNDING, 1.01 * max(facts.q_len, facts.k_len), "distances within the text")
    for name, (low, high, meaning) in limits.items():
        if name in arrays and (
            np.fmin.reduce(arrays[name], axis=None) < low or np.fmax.reduce(arrays[name], axis=None) > high
        ):
            raise MhaError(f"{path}: {name} must hold {meaning}", code="bad-file", path=path)
    if "allowed" in arrays and arrays["allowed"].view(np.uint8).max() > 1:
        raise MhaError(f"{path}: allowed must hold bytes of 0 and 1", code="bad-file", path=path)
