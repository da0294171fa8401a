"""How numbers travel in a page: as bytes, deflated, in base64; shares exactly, or in 16 or 8 bits."""

from __future__ import annotations

import base64
import zlib
from typing import Literal

import numpy as np

from mhacli.results.record.arrays import Array

CodeName = Literal["f32", "u16", "u8"]
_MISSING = {"u16": 65535, "u8": 255}
"""The largest number that a code holds. It stands for what is not a number; shares take those below it."""


def b64z(numbers: Array) -> str:
    """The numbers' bytes, row by row and the lowest byte first, deflated, in base64."""
    ordered = np.ascontiguousarray(numbers, dtype=numbers.dtype.newbyteorder("<"))
    return base64.b64encode(zlib.compress(ordered.tobytes(), 9)).decode("ascii")


def floats(numbers: Array) -> str:
    """The same of 32-bit floats."""
    return b64z(np.asarray(numbers, dtype=np.float32))


def bits(cells: Array) -> str:
    """Truth values as bits, eight to a byte, the first one the highest."""
    return b64z(np.packbits(cells))


def coded(shares: Array, top: float, code: CodeName) -> Array:
    """Shares of 0 … `top` in a code: themselves in 32 bits, or the square root of each as a whole number, so that small shares
    keep more digits than large ones. What is not a number stays that."""
    if code == "f32":
        return shares.astype(np.float32)
    missing = np.isnan(shares)
    roots = np.sqrt(np.clip(np.where(missing, 0.0, shares) / (top or 1.0), 0, 1))
    whole = np.where(missing, _MISSING[code], np.rint(roots * (_MISSING[code] - 1)))
    return whole.astype({"u16": np.uint16, "u8": np.uint8}[code])


def decoded(numbers: Array, top: float, code: CodeName) -> Array:
    """The shares that a reader of the code gets."""
    if code == "f32":
        return numbers.astype(np.float64)
    shares = top * (numbers.astype(np.float64) / (_MISSING[code] - 1)) ** 2
    return np.where(numbers == _MISSING[code], np.nan, shares)
