"""The compiled block of `block.c`, called through pointers, which lets other threads run meanwhile."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path

_POINTER, _WHOLE = ctypes.c_void_p, ctypes.c_int64


class CompiledBlock(ctypes.Structure):
    """A block of scores to base 2 and what is known of its queries and keys: `Block` of `block.c`."""

    _fields_ = (
        *((name, _WHOLE) for name in ("n_rows", "n_keys", "stride", "query", "key", "low", "high")),
        ("cells", _POINTER),
        ("cell_row", _WHOLE),
        ("cell_key", _WHOLE),
        ("sink", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("first", _WHOLE),
        ("leading", _WHOLE),
        *((name, _POINTER) for name in ("q_tokens", "k_tokens", "before_k")),
        *((name, _WHOLE) for name in ("is_self", "map_block", "map_keys", "zero")),
    )


class CompiledSums(ctypes.Structure):
    """Where the statistics of one head are written or added: `Sums` of `block.c`."""

    _fields_ = tuple(
        (name, _POINTER)
        for name in (
            *("mass", "entropy", "squares", "peak", "distance", "first", "leading", "lse"),
            *("received", "map", "profile", "duplicate", "induction", "columns"),
        )
    )


@lru_cache
def _library() -> ctypes.CDLL | None:
    """The compiled block; None where it was not built, or not for this machine."""
    try:
        library = ctypes.CDLL(str(Path(__file__).with_name("libblock.so")))
    except OSError:
        return None
    library.mha_block.argtypes = (_POINTER, ctypes.POINTER(CompiledBlock), ctypes.POINTER(CompiledSums))
    library.mha_block.restype = ctypes.c_int
    return library


def c_block() -> ctypes.CDLL | None:
    """The library whose `mha_block(scores, block, sums)` is used; None where torch does its work, as `MHA_BLOCK=torch` wants."""
    return None if os.environ.get("MHA_BLOCK") == "torch" else _library()


def compiled_block(scores: int, block: CompiledBlock, sums: CompiledSums) -> bool:
    """Makes weights of the scores at an address, and adds their statistics. Whether it did: not of scores that are not finite, or
    beyond the block's limit."""
    library = c_block()
    assert library is not None
    return bool(library.mha_block(scores, ctypes.byref(block), ctypes.byref(sums)))
