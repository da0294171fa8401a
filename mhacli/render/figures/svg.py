"""A small SVG writer: elements, text of known width, and pieces to arrange.

Callers pass text through `visible` or `token_label`, which leaves no character that XML forbids; here it is escaped.
"""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from rich.cells import cell_len

from mhacli.record.arrays import Array
from mhacli.render.base.doc import Row, Table
from mhacli.render.base.format import count_of, fitted
from mhacli.render.base.options import balanced

MONO = "'DejaVu Sans Mono', Menlo, Consolas, monospace"
SANS = "'DejaVu Sans', Helvetica, Arial, sans-serif"
INK, SOFT, FAINT, PAPER, ALARM = "#1a1a1a", "#555555", "#b8b8b8", "#ffffff", "#b00020"
MONO_EM = 0.602
"""The width of a monospaced character in ems. Source: advance 1233 of 2048 units, DejaVu Sans Mono."""
SANS_EM = 0.68
"""An upper bound of the average width of a character in bold titles, in ems."""
LINE = 1.35
"""The line height in ems."""

Attribute = str | float | None


@dataclass(frozen=True)
class Piece:
    """A part of a picture: its SVG with the upper left corner at (0, 0), and its size."""

    content: str
    width: float
    height: float


def element(name: str, *children: str, **attributes: Attribute) -> str:
    """An SVG element with SVG children. Attribute values are escaped, `font_size` becomes `font-size`, and None is
    omitted."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{value_text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    content = "".join(children)
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def value_text(value: str | float) -> str:
    """An attribute's value; numbers have at most two decimals.

    >>> value_text(12.50)
    '12.5'
    """
    if isinstance(value, str):
        return escape(value, quote=True)
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


def characters(text: str) -> str:
    """Text as the content of an element."""
    return escape(text, quote=False)


def rectangle(
    x: float, y: float, width: float, height: float, fill: str, tooltip: str = "", **attributes: Attribute
) -> str:
    """A rectangle with an optional tooltip."""
    title = [element("title", characters(tooltip))] if tooltip else []
    return element("rect", *title, x=x, y=y, width=width, height=height, fill=fill, **attributes)


def written(
    x: float, y: float, text: str, size: float, *, fill: str = INK, tooltip: str = "", **attributes: Attribute
) -> str:
    """A line of text with its baseline at `y` and an optional tooltip. Spaces are kept."""
    title = [element("title", characters(tooltip))] if tooltip else []
    return element(
        "text", *title, characters(text), x=x, y=y, font_size=size, fill=fill, **{"xml:space": "preserve"}, **attributes
    )


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


def beside(pieces: Sequence[Piece], gap: float) -> Piece:
    """Pieces next to each other, aligned at the top."""
    content, x = "", 0.0
    for piece in pieces:
        content += placed(piece, x, 0)
        x += piece.width + gap
    return Piece(content, max(0.0, x - gap), max(piece.height for piece in pieces))


def paragraph(lines: Iterable[str], size: float, *, fill: str = INK) -> Piece:
    """Lines of monospaced text."""
    texts = [*lines]
    content = "".join(
        written(0, (place + 1) * LINE * size - 0.3 * size, line, size, fill=fill) for place, line in enumerate(texts)
    )
    return Piece(content, max((mono_width(line, size) for line in texts), default=0.0), len(texts) * LINE * size)


def heading(text: str, size: float) -> Piece:
    """A bold title."""
    content = written(0, size, text, size, font_weight="bold", font_family=SANS)
    return Piece(content, cell_len(text) * SANS_EM * size, LINE * size)


def wrapped(text: str, cells: int) -> list[str]:
    """The text in lines of at most `cells` cells, broken at spaces, and within longer words."""
    lines, line = [], ""
    for word in text.split(" "):
        joined = f"{line} {word}" if line else word
        if cell_len(joined) <= cells:
            line = joined
            continue
        if line:
            lines.append(line)
        while cell_len(word) > cells:
            cut = fitted(word, cells + 1)[:-1] or word[0]
            lines.append(cut)
            word = word[len(cut) :]
        line = word
    return [*lines, line] if line or not lines else lines


# -------------------------------------------------------------------------------------------------------------- tables


_ROW_SIZE, _ROW, _GAP = 10.0, 17.0, 2
"""Of a table: the size of the text, the height of a row, and the characters between columns."""


def table(of: Table[Row]) -> Piece:
    """The table with all columns; of more than `most` rows the first and the last."""
    selection = balanced(len(of.rows), len(of.rows) if of.most is None else of.most)
    lines = [[column.text(of.rows[place]) for column in of.columns] for place in selection.shown]
    headings = [column.heading for column in of.columns]
    widths = [max(map(cell_len, cells)) for cells in zip(headings, *lines, strict=True)]
    starts = [sum(widths[:place]) + place * _GAP for place in range(len(widths))]
    cell = MONO_EM * _ROW_SIZE
    width = (sum(widths) + _GAP * (len(widths) - 1)) * cell

    def line(texts: list[str], y: float, fill: str) -> str:
        parts = []
        for text, column, start, size in zip(texts, of.columns, starts, widths, strict=True):
            is_left = column.unit == "word"
            x = start if is_left else start + size
            anchor = None if is_left else "end"
            parts.append(written(x * cell, y + 0.7 * _ROW, text, _ROW_SIZE, fill=fill, text_anchor=anchor))
        return "".join(parts)

    content, y = line(headings, 0, SOFT), _ROW
    for place, texts in enumerate(lines):
        if selection.hidden and place == selection.before:
            more = f"⋮ {count_of(selection.hidden, 'row')} not drawn"
            content += written(0, y + 0.7 * _ROW, more, _ROW_SIZE, fill=SOFT)
            y += _ROW
        content += element("line", x1=0, y1=y, x2=width, y2=y, stroke=FAINT, stroke_width=0.5)
        content += line(texts, y, INK)
        y += _ROW
    return Piece(content, width, y)


# -------------------------------------------------------------------------------------------------------------- sheets


@dataclass(frozen=True)
class Sheet:
    """A picture with its `title`, the `sentences` below it, the names of its contents (`drawn`), and its options
    (`drawn_as`), which the record's command lacks."""

    body: Piece
    title: str
    sentences: Sequence[str]
    drawn: Sequence[str]
    drawn_as: str


# -------------------------------------------------------------------------------------------------------------- images


_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_DEPTH, _TRUE_COLOUR, _BEST = 8, 2, 9


def image(x: float, y: float, colours: Array, cell: tuple[float, float]) -> str:
    """Colours `[row, column, 3]` as an image with sharp cells of the given size."""
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
    """A PNG of RGB bytes `[row, column, 3]`. Source: PNG specification, third edition, sections 5 and 11."""
    rows, columns = colours.shape[:2]
    header = struct.pack(">IIBBBBB", columns, rows, _DEPTH, _TRUE_COLOUR, 0, 0, 0)
    unfiltered = np.concatenate([np.zeros((rows, 1), np.uint8), colours.astype(np.uint8).reshape(rows, -1)], axis=1)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(unfiltered.tobytes(), _BEST)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(name, content) for name, content in chunks)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
