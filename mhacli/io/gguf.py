"""Reads the header of a GGUF file from an untrusted source by the library gguf. Source:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Mapping
from typing import Any

from mhacli.errors import guarded, library

from .safetensors import TensorInfo

HEADER = "the GGUF header"


def read_gguf_header(path: str) -> Mapping[str, TensorInfo]:
    """The tensors of a file by its names for them, as float32, to which transformers widens them.
    Raises `MhaError`, also for a file that ends before its last tensor.
    """
    base: Any = library("gguf", "a GGUF file").GGUFReader

    class Reader(base):  # type: ignore[misc]
        def _get(self, offset: int, dtype: Any, count: Any = 1, *order: Any, **named: Any) -> Any:
            """The numbers at an offset; the library gives fewer where the file ends."""
            found = super()._get(offset, dtype, count, *order, **named)
            if len(found) < count:
                raise ValueError("the file ends too early: the download may be incomplete")
            return found

    tensors = guarded(HEADER, path, lambda: Reader(path).tensors)
    return {
        each.name: TensorInfo(each.name, "F32", tuple(each.shape.tolist()), 0, 4 * each.n_elements)
        for each in tensors
    }
