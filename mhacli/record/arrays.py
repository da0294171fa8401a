"""The arrays of a record: in memory, or in a file until they are used."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # numpy is loaded with numbers, not for a help text
    import numpy.typing as npt

    Array = npt.NDArray[Any]
else:
    Array = Any


class StoredArray:
    """An array in a file. `read` gives it on first use."""

    def __init__(self, read: Callable[[], Array]) -> None:
        self._read = read

    @cached_property
    def value(self) -> Array:
        """The array. Raises the errors of reading."""
        return self._read()


class StoredArrays(Mapping[str, Array]):
    """Arrays in a file by name, each read on first use."""

    def __init__(self, arrays: Mapping[str, StoredArray]) -> None:
        self.arrays = arrays

    def __getitem__(self, name: str) -> Array:
        """The array with this name. Raises the errors of reading."""
        return self.arrays[name].value

    def __contains__(self, name: object) -> bool:
        """Whether the array exists. Reads nothing."""
        return name in self.arrays

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self.arrays)

    def __len__(self) -> int:
        """The number of arrays."""
        return len(self.arrays)


def under(arrays: Mapping[str, Array], prefix: str) -> Mapping[str, Array]:
    """The arrays whose names begin with the prefix, by the rest of their names. Reads nothing."""
    if isinstance(arrays, StoredArrays):
        return StoredArrays({n.removeprefix(prefix): a for n, a in arrays.arrays.items() if n.startswith(prefix)})
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def read_arrays(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
    """The arrays that are in memory."""
    if isinstance(arrays, StoredArrays):
        return {name: array.value for name, array in arrays.arrays.items() if "value" in vars(array)}
    return arrays


def checksum(array: Array) -> str:
    """The sha256 of an array's numbers, dtype and shape."""
    digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    digest.update(array.tobytes() if array.nbytes < 1 << 20 or not array.flags.c_contiguous else array.reshape(-1).data)
    return digest.hexdigest()
