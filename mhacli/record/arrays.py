"""The arrays of a record: in memory, or in a file until they are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # numpy is loaded with numbers, not for a help text
    from functools import _lru_cache_wrapper

    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Reader = _lru_cache_wrapper[Array]
else:
    Array = Any


class StoredArrays(Mapping[str, Array]):
    """Arrays in a file by name. Each has a function that reads it and is called once, on first use."""

    def __init__(self, readers: Mapping[str, Reader]) -> None:
        self.readers = readers

    def __getitem__(self, name: str) -> Array:
        """The array with this name. Raises the errors of reading."""
        return self.readers[name]()

    def __contains__(self, name: object) -> bool:
        """Whether the array exists. Reads nothing."""
        return name in self.readers

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self.readers)

    def __len__(self) -> int:
        """The number of arrays."""
        return len(self.readers)


def under(arrays: Mapping[str, Array], prefix: str) -> Mapping[str, Array]:
    """The arrays whose names begin with the prefix, by the rest of their names. Reads nothing."""
    if isinstance(arrays, StoredArrays):
        return StoredArrays(
            {n.removeprefix(prefix): read for n, read in arrays.readers.items() if n.startswith(prefix)}
        )
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def read_arrays(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
    """The arrays that are in memory."""
    if isinstance(arrays, StoredArrays):
        return {name: read() for name, read in arrays.readers.items() if read.cache_info().currsize}
    return arrays


def checksum(array: Array) -> str:
    """The sha256 of an array's numbers, dtype and shape."""
    import hashlib  # not for a help text

    digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    digest.update(array.tobytes() if array.nbytes < 1 << 20 or not array.flags.c_contiguous else array.reshape(-1).data)
    return digest.hexdigest()
