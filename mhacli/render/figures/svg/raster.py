"""Maps of many cells as an image within the picture: a PNG of one pixel per cell, as a data address."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode

import numpy as np

from mhacli.render.figures.svg.elements import element
from mhacli.results.record.arrays import Array

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_DEPTH, _TRUE_COLOUR, _BEST = 8, 2, 9


def image(x: float, y: float, colours: Array, cell: tuple[float, float]) -> str:
    """Colours `[row, column, 3]` as an image whose cells are so wide and high, with sharp edges."""
    rows, columns = colours.shape[:2]
    address = f"data:image/png;base64,{b64encode(encoded(colours)).decode()}"
    return element(
        "image",
        x=x,
        y=y,
        width=columns * cell[0],
        height=rows * cell[1],
        preserveAspectRatio="none",
        image_rendering="optimizeSpeed",
        style="image-rendering:pixelated",
        href=address,
    )


def encoded(colours: Array) -> bytes:
    """A PNG of red, green and blue `[row, column, 3]`, bytes. Source: PNG specification, third edition, sections 5 and 11."""
    rows, columns = colours.shape[:2]
    header = struct.pack(">IIBBBBB", columns, rows, _DEPTH, _TRUE_COLOUR, 0, 0, 0)
    unfiltered = np.concatenate([np.zeros((rows, 1), np.uint8), colours.astype(np.uint8).reshape(rows, -1)], axis=1)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(unfiltered.tobytes(), _BEST)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(name, content) for name, content in chunks)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
