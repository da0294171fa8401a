"""Arrays of a record by their names: numpy arrays, those of one layer, and arrays that are read late."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # numpy is loaded where numbers are, not to print a help text
    import numpy.typing as npt

    Array = npt.NDArray[Any]
else:
    Array = Any

T = TypeVar("T")


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


class LateArrays(Mapping[str, Array]):
    """Arrays whose names are known; `read` gives them all when the first is asked for."""

    def __init__(self, names: Iterable[str], read: Callable[[], Mapping[str, Array]]) -> None:
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> Array:
        """An array by its name. Raises what reading raises."""
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
        return self._read()


def are_read(arrays: Mapping[str, Array]) -> bool:
    """Whether the numbers of a record are in memory, or would be read from its file."""
    return not isinstance(arrays, LateArrays) or arrays.is_read
