"""Writes SVG: elements, text of known width, tables and images, as pieces that are put together.

Callers pass text through `visible` or `token_label`, which leaves no character that XML forbids;
here it is escaped.
"""

import json
import struct
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.text import Text

from mhacli.io.data import Array
from mhacli.render.page.elements import Html, segments_of, styled, tag
from mhacli.render.page.elements import text as escaped

MONO = "'DejaVu Sans Mono', Menlo, Consolas, monospace"
INK = "#1a1a1a"
SOFT = "#555555"
FAINT = "#b8b8b8"
PAPER = "#ffffff"
MONO_EM = 0.602
"""The width of a monospaced character in ems. Source: advance 1233 of 2048 units, DejaVu Sans
Mono."""
_KEPT = {"xml:space": "preserve"}
_STYLE = (
    ".failed { fill: #b3261e } .warning { fill: #8a5a00 } .ok { fill: #1d6b3a } .sink { fill:"
    " #a8127d } .name { fill: #0d6270 } .dim { fill: #555555 } .bold { font-weight: bold }"
)
"""The colours of text, which are those of pages on a light ground."""
_LINE = 1.35
"""The line height in ems."""
_SIZE = 10.0
"""The usual size of text."""


@dataclass(frozen=True)
class Piece:
    """A part of a picture: its SVG with the upper left corner at (0, 0), and its size."""

    content: str = ""
    width: float = 0.0
    height: float = 0.0


def element(name: str, *children: str, tooltip: str = "", **attributes: Any) -> str:
    """An SVG element with SVG children. Attribute values are escaped, `font_size` becomes
    `font-size`, and None is omitted.
    """
    title = [tag("title", escaped(tooltip))] if tooltip else []
    values = {
        key: value if value is None else value_text(value) for key, value in attributes.items()
    }
    return tag(name, *title, *map(Html, children), **values)


def value_text(value: str | float) -> str:
    """An attribute's value; numbers have at most two decimals.

    >>> value_text(12.50)
    '12.5'
    """
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def rectangle(x: float, y: float, width: float, height: float, fill: str, **more: Any) -> str:
    """A rectangle."""
    return element("rect", x=x, y=y, width=width, height=height, fill=fill, **more)


def written(x: float, y: float, text: str, size: float, *, fill: str = INK, **more: Any) -> str:
    """A line of text with its baseline at `y`. Spaces are kept."""
    return element("text", escaped(text), x=x, y=y, font_size=size, fill=fill, **more, **_KEPT)


def mono_width(text: str, size: float) -> float:
    """The width of monospaced text. Characters of two terminal cells count double."""
    return cell_len(text) * MONO_EM * size


def placed(piece: Piece, x: float, y: float) -> str:
    """A piece at a position within a larger one."""
    return element("g", piece.content, transform=f"translate({value_text(x)} {value_text(y)})")


def stacked(pieces: Sequence[Piece], gap: float) -> Piece:
    """Pieces below each other, aligned on the left."""
    content = ""
    y = 0.0
    for piece in pieces:
        content += placed(piece, 0, y)
        y += piece.height + gap
    return Piece(content, max(piece.width for piece in pieces), max(0.0, y - gap))


def lines(texts: Sequence[str], *, size: float = _SIZE, fill: str = INK) -> Piece:
    """Lines of monospaced text."""
    content = ""
    for place, text in enumerate(texts, 1):
        content += written(0, place * _LINE * size - 0.3 * size, text, size, fill=fill)
    return Piece(content, max(mono_width(text, size) for text in texts), len(texts) * _LINE * size)


def paragraph(text: str, width: float, *, size: float = _SIZE, fill: str = INK) -> Piece:
    """Text in lines of at most this width."""
    wrapped = Text(text).wrap(Console(), max(30, int(width / (MONO_EM * size))))
    return lines([line.plain for line in wrapped], size=size, fill=fill)


def printed(view: RenderableType, columns: int) -> Piece:
    """The lines of a terminal view in its colours."""
    content = ""
    rows = segments_of(view, columns)
    widest, n_lines = Segment.get_shape(rows)
    for place, row in enumerate(rows, 1):
        spans = (styled(segment, "tspan") for segment in row)
        content += element(
            "text", *spans, x=0, y=(place * _LINE - 0.3) * _SIZE, font_size=_SIZE, fill=INK, **_KEPT
        )
    return Piece(content, widest * MONO_EM * _SIZE, n_lines * _LINE * _SIZE)


_MARGIN = 18.0
_LEAST = 560.0
"""The least width of a picture without margins."""
_GAP = 14.0
"""The gap between the pieces of a picture."""
_TITLE = 16.0
"""The size of the title."""
_TITLE_EM = 0.68
"""An upper bound of the width of the title's bold characters in ems."""
_ABOUT = 11.0
"""The size of the lines below the title."""


def document(
    title: str,
    body: Sequence[Piece],
    metadata: Mapping[str, object],
    *,
    about: Sequence[str] = (),
    caption: Sequence[str] = (),
) -> str:
    """A picture as an SVG document: from top to bottom its title, lines `about` it, the pieces of
    its body, and the parts of its `caption`.
    """
    family = "'DejaVu Sans', Helvetica, Arial, sans-serif"
    heading = written(0, _TITLE, title, _TITLE, font_weight="bold", font_family=family)
    title_width = cell_len(title) * _TITLE_EM * _TITLE
    width = max(_LEAST, title_width, *(piece.width for piece in body))
    head = [Piece(heading, title_width, 1.35 * _TITLE)]
    head += [paragraph(line, width, size=_ABOUT, fill=SOFT) for line in about]
    pieces = [stacked(head, 2), *body]
    if caption:
        pieces.append(paragraph(" · ".join(caption), width))
    whole = stacked(pieces, _GAP)
    width = max(width, whole.width) + 2 * _MARGIN
    height = whole.height + 2 * _MARGIN
    content = [
        element("title", escaped(title), id="title"),
        element("desc", escaped(". ".join(caption or about or [title])), id="desc"),
        element("metadata", escaped(json.dumps(metadata))),
        element("style", _STYLE),
        rectangle(0, 0, width, height, PAPER),
        placed(whole, _MARGIN, _MARGIN),
    ]
    root = picture(Piece("".join(content), width, height), aria_labelledby="title desc")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{root}\n'


def picture(piece: Piece, **more: Any) -> Html:
    """A piece as an element of its size, which can stand alone."""
    content, width, height = piece.content, piece.width, piece.height
    box = f"0 0 {value_text(width)} {value_text(height)}"
    return Html(
        element(
            "svg",
            content,
            xmlns="http://www.w3.org/2000/svg",
            width=width,
            height=height,
            viewBox=box,
            role="img",
            font_family=MONO,
            **more,
        )
    )


# ------------------------------------------------------------------------------------------- images

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_DEPTH = 8
"""The bits of a channel of a colour."""
_TRUE_COLOUR = 2
"""The type of colours without a palette."""
_BEST = 9
"""The level of compression."""


def image(colours: Array, cell: tuple[float, float]) -> str:
    """Colours `[row, column, 3]` as an image with sharp cells of the given size.

    Source of the format: PNG specification, third edition, sections 5 and 11.
    """
    rows, columns = colours.shape[:2]
    header = struct.pack(">IIBBBBB", columns, rows, _DEPTH, _TRUE_COLOUR, 0, 0, 0)
    unfiltered = np.concatenate(
        [np.zeros((rows, 1), np.uint8), colours.astype(np.uint8).reshape(rows, -1)], axis=1
    )
    file = _SIGNATURE
    chunks = {b"IHDR": header, b"IDAT": zlib.compress(unfiltered.tobytes(), _BEST), b"IEND": b""}
    for name, content in chunks.items():
        length = struct.pack(">I", len(content))
        checksum = struct.pack(">I", zlib.crc32(name + content))
        file += length + name + content + checksum
    return element(
        "image",
        width=columns * cell[0],
        height=rows * cell[1],
        preserveAspectRatio="none",
        image_rendering="optimizeSpeed",
        style="image-rendering:pixelated",
        href=f"data:image/png;base64,{b64encode(file).decode()}",
    )
