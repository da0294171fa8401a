"""Mappings of a record's arrays: by layer, and with delayed reading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # numpy is loaded with numbers, not for a help text
    import numpy.typing as npt

    Array = npt.NDArray[Any]
else:
    Array = Any

T = TypeVar("T")


class Prefixed(Mapping[str, T]):
    """The items whose names begin with a prefix, by the rest of their names."""

    def __init__(self, every: Mapping[str, T], prefix: str) -> None:
        self._every, self._prefix = every, prefix

    def __getitem__(self, name: str) -> T:
        """The item with this name."""
        return self._every[self._prefix + name]

    def __contains__(self, name: object) -> bool:
        """Whether the item exists. Reads no array."""
        return isinstance(name, str) and self._prefix + name in self._every

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return (name.removeprefix(self._prefix) for name in self._every if name.startswith(self._prefix))

    def __len__(self) -> int:
        """The number of items."""
        return sum(1 for _ in self)


class LateArrays(Mapping[str, Array]):
    """Arrays with known names. `read` loads them all on first access."""

    def __init__(self, names: Iterable[str], read: Callable[[], Mapping[str, Array]]) -> None:
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> Array:
        """The array with this name. Raises the errors of reading."""
        if name not in self._names:  # without reading
            raise KeyError(name)
        return self._arrays[name]

    def __contains__(self, name: object) -> bool:
        """Whether the array exists. Reads no array."""
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._names)

    def __len__(self) -> int:
        """The number of arrays."""
        return len(self._names)

    @property
    def is_read(self) -> bool:
        """Whether the arrays have been read."""
        return "_arrays" in self.__dict__

    @cached_property
    def _arrays(self) -> Mapping[str, Array]:
        return self._read()


def are_read(arrays: Mapping[str, Array]) -> bool:
    """Whether the arrays are in memory, rather than still in the file."""
    return not isinstance(arrays, LateArrays) or arrays.is_read
