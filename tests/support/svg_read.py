"""An SVG picture read back: its elements where they stand, and the pixels of its images."""

from __future__ import annotations

import re
import struct
import zlib
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

import numpy as np

from support.records import make_record

FIVE, THREE = ("the", "cat", "sat", "on", "mats"), ("a", "dog", "ran")
SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Shape:
    """An element where it stands on the page."""

    tag: str
    x: float
    y: float
    attributes: dict[str, str]
    text: str
    said: str

    def number(self, name: str) -> float:
        return float(self.attributes[name])

    @property
    def rgb(self) -> tuple[int, ...]:
        return tuple(bytes.fromhex(self.attributes["fill"][1:]))

    @property
    def cell(self) -> tuple[int, int]:
        return round(self.y), round(self.x)


def shapes(svg: str) -> list[Shape]:
    """All elements with their places, groups resolved."""

    def below(element: ElementTree.Element, x: float, y: float) -> Iterator[Shape]:
        moved = re.fullmatch(r"translate\(([-\d.]+) ([-\d.]+)\)", element.get("transform", ""))
        x, y = (x + float(moved[1]), y + float(moved[2])) if moved else (x, y)
        title = element.find(f"{SVG}title")
        text = (element.text or "") + "".join(child.tail or "" for child in element)
        here = x + float(element.get("x", 0)), y + float(element.get("y", 0))
        yield Shape(
            element.tag.removeprefix(SVG), *here, dict(element.attrib), text, title.text if title is not None else ""
        )
        for child in element:
            yield from below(child, x, y)

    return [*below(ElementTree.fromstring(svg), 0.0, 0.0)]


def cells(svg: str) -> list[Shape]:
    """The cells of maps, which tell a pointer their share, row by row of the page."""
    found = [one for one in shapes(svg) if one.tag == "rect" and " → " in one.said]
    return sorted(found, key=lambda one: one.cell)


def texts(svg: str) -> list[str]:
    return [one.text for one in shapes(svg) if one.tag == "text"]


def of_tokens(tokens, **choices):
    return make_record(tuple(tokens), **choices)


def pixels(content: bytes) -> np.ndarray:
    """The colours of a PNG without filters, `[row, column, 3]`."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    place, header, packed = 8, b"", b""
    while place < len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        name, body = content[place + 4 : place + 8], content[place + 8 : place + 8 + length]
        assert struct.unpack(">I", content[place + 8 + length : place + 12 + length])[0] == zlib.crc32(name + body)
        header, packed = (body if name == b"IHDR" else header), packed + (body if name == b"IDAT" else b"")
        place += 12 + length
    width, height, depth, kind = struct.unpack(">IIBB", header[:10])
    assert (depth, kind) == (8, 2)
    rows = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def images(svg: str) -> list[np.ndarray]:
    found = [one.attributes["href"] for one in shapes(svg) if one.tag == "image"]
    return [pixels(b64decode(address.removeprefix("data:image/png;base64,"))) for address in found]
