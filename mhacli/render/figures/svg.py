"""Writes SVG: elements, text of known width, tables and images, as pieces that are put together.

Callers pass text through `visible` or `token_label`, which leaves no character that XML forbids; here it is escaped.
"""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from mhacli.record.arrays import Array
from mhacli.render.base.doc import Row, Table
from mhacli.render.base.format import count_of
from mhacli.render.base.options import balanced

MONO = "'DejaVu Sans Mono', Menlo, Consolas, monospace"
INK, SOFT, FAINT, PAPER = "#1a1a1a", "#555555", "#b8b8b8", "#ffffff"
MONO_EM = 0.602
"""The width of a monospaced character in ems. Source: advance 1233 of 2048 units, DejaVu Sans Mono."""
_KEPT = {"xml:space": "preserve"}
_LINE = 1.35
"""The line height in ems."""


@dataclass(frozen=True)
class Piece:
    """A part of a picture: its SVG with the upper left corner at (0, 0), and its size."""

    content: str = ""
    width: float = 0.0
    height: float = 0.0


def element(name: str, *children: str, tooltip: str = "", **attributes: Any) -> str:
    """An SVG element with SVG children. Attribute values are escaped, `font_size` becomes `font-size`, and None is
    omitted."""
    written = "".join(
        f' {key.replace("_", "-")}="{value_text(value)}"' for key, value in attributes.items() if value is not None
    )
    title = f"<title>{escape(tooltip, quote=False)}</title>" if tooltip else ""
    content = title + "".join(children)
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def value_text(value: str | float) -> str:
    """An attribute's value; numbers have at most two decimals.

    >>> value_text(12.50)
    '12.5'
    """
    if isinstance(value, str):
        return escape(value, quote=True)
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


def rectangle(x: float, y: float, width: float, height: float, fill: str, **more: Any) -> str:
    """A rectangle."""
    return element("rect", x=x, y=y, width=width, height=height, fill=fill, **more)


def written(x: float, y: float, text: str, size: float, *, fill: str = INK, **more: Any) -> str:
    """A line of text with its baseline at `y`. Spaces are kept."""
    return element("text", escape(text, quote=False), x=x, y=y, font_size=size, fill=fill, **more, **_KEPT)


def mono_width(text: str, size: float) -> float:
    """The width of monospaced text. Characters of two terminal cells count double."""
    return cell_len(text) * MONO_EM * size


def placed(piece: Piece, x: float, y: float) -> str:
    """A piece at a position within a larger one."""
    return element("g", piece.content, transform=f"translate({value_text(x)} {value_text(y)})")


def stacked(pieces: Sequence[Piece], gap: float) -> Piece:
    """Pieces below each other, aligned on the left."""
    content, y = "", 0.0
    for piece in pieces:
        content += placed(piece, 0, y)
        y += piece.height + gap
    return Piece(content, max(piece.width for piece in pieces), max(0.0, y - gap))


def paragraph(text: str, width: float, *, size: float = 10.0, fill: str = INK) -> Piece:
    """Text in lines of at most this width."""
    lines = [line.plain for line in Text(text).wrap(Console(), max(30, int(width / (MONO_EM * size))))]
    content = "".join(
        written(0, (place + 1) * _LINE * size - 0.3 * size, line, size, fill=fill) for place, line in enumerate(lines)
    )
    return Piece(content, max(mono_width(line, size) for line in lines), len(lines) * _LINE * size)


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """The contents of a picture, from top to bottom: its `title`, lines `about` it, the pieces of its `body`, and the
    parts of its `caption`. The metadata has the `scale` and the names of what is `drawn`."""

    title: str
    about: Sequence[str] = ()
    body: Sequence[Piece]
    caption: Sequence[str] = ()
    scale: str = ""
    drawn: Sequence[str]


# -------------------------------------------------------------------------------------------------------------- tables

_SIZE, _ROW, _GAP = 10.0, 17.0, 2
"""The size of the text of a table, the height of a row, and the characters between columns."""


def table(of: Table[Row]) -> Piece:
    """The table with all columns; of more than `most` rows the first and the last."""
    selection = balanced(len(of.rows), len(of.rows) if of.most is None else of.most)
    lines = [[column.text(of.rows[place]) for column in of.columns] for place in selection.shown]
    headings = [column.heading for column in of.columns]
    widths = [max(map(cell_len, cells)) for cells in zip(headings, *lines, strict=True)]
    starts = [sum(widths[:place]) + place * _GAP for place in range(len(widths))]
    cell = MONO_EM * _SIZE
    width = (sum(widths) + _GAP * (len(widths) - 1)) * cell

    def line(texts: list[str], y: float, fill: str) -> str:
        parts = []
        for text, column, start, size in zip(texts, of.columns, starts, widths, strict=True):
            is_left = column.unit == "word"
            x = start if is_left else start + size
            anchor = None if is_left else "end"
            parts.append(written(x * cell, y + 0.7 * _ROW, text, _SIZE, fill=fill, text_anchor=anchor))
        return "".join(parts)

    content, y = line(headings, 0, SOFT), _ROW
    for place, texts in enumerate(lines):
        if selection.hidden and place == selection.before:
            more = f"⋮ {count_of(selection.hidden, 'row')} not drawn"
            content += written(0, y + 0.7 * _ROW, more, _SIZE, fill=SOFT)
            y += _ROW
        content += element("line", x1=0, y1=y, x2=width, y2=y, stroke=FAINT, stroke_width=0.5)
        content += line(texts, y, INK)
        y += _ROW
    return Piece(content, width, y)


# -------------------------------------------------------------------------------------------------------------- images

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_DEPTH, _TRUE_COLOUR, _BEST = 8, 2, 9


def image(colours: Array, cell: tuple[float, float]) -> str:
    """Colours `[row, column, 3]` as an image with sharp cells of the given size.

    Source of the format: PNG specification, third edition, sections 5 and 11.
    """
    rows, columns = colours.shape[:2]
    header = struct.pack(">IIBBBBB", columns, rows, _DEPTH, _TRUE_COLOUR, 0, 0, 0)
    unfiltered = np.concatenate([np.zeros((rows, 1), np.uint8), colours.astype(np.uint8).reshape(rows, -1)], axis=1)
    file = _SIGNATURE
    for name, content in ((b"IHDR", header), (b"IDAT", zlib.compress(unfiltered.tobytes(), _BEST)), (b"IEND", b"")):
        file += struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    return element(
        "image",
        width=columns * cell[0],
        height=rows * cell[1],
        preserveAspectRatio="none",
        image_rendering="optimizeSpeed",
        style="image-rendering:pixelated",
        href=f"data:image/png;base64,{b64encode(file).decode()}",
    )
