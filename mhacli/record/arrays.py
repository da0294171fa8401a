"""The arrays of a record: in memory, or in a file until they are used."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # numpy is loaded with numbers, not for a help text
    import numpy.typing as npt

    Array = npt.NDArray[Any]
else:
    Array = Any


class StoredArrays(UserDict[str, Any]):
    """Arrays in a file by name. `data` has a cached function for each, which reads it on first use."""

    def __getitem__(self, name: str) -> Array:
        """The array with this name. Raises the errors of reading."""
        array: Array = self.data[name]()
        return array


def under(arrays: Mapping[str, Array], prefix: str) -> Mapping[str, Array]:
    """The arrays whose names begin with the prefix, by the rest of their names. Reads nothing."""
    if isinstance(arrays, StoredArrays):
        return StoredArrays(under(arrays.data, prefix))
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def read_arrays(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
    """The arrays that are in memory."""
    if isinstance(arrays, StoredArrays):
        return {name: read() for name, read in arrays.data.items() if read.cache_info().currsize}
    return arrays


def checksum(array: Array) -> str:
    """The sha256 of an array's numbers, dtype and shape."""
    import hashlib  # not for a help text

    digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    digest.update(array.tobytes() if array.nbytes < 1 << 20 or not array.flags.c_contiguous else array.reshape(-1).data)
    return digest.hexdigest()
