"""An SVG picture read back: its elements where they stand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

import numpy as np

SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Shape:
    """An element where it stands on the page, with its text and its tooltip."""

    tag: str
    x: float
    y: float
    attributes: dict[str, str]
    text: str
    tooltip: str

    def number(self, name: str) -> float:
        return float(self.attributes[name])

    @property
    def colour(self) -> tuple[int, ...]:
        return tuple(bytes.fromhex(self.attributes["fill"].removeprefix("#")))

    @property
    def weight(self) -> float:
        """The number at the end of the tooltip; NaN without one."""
        parsed = re.match(r"[\d.e-]+", self.tooltip.rpartition(": ")[2])
        return float(parsed[0]) if parsed else np.nan


def shapes(svg: str) -> list[Shape]:
    """All elements, with the places that their groups give them."""

    def below(element: ElementTree.Element, x: float, y: float) -> Iterator[Shape]:
        moved = re.fullmatch(r"translate\(([-\d.]+) ([-\d.]+)\)", element.get("transform", ""))
        x, y = (x + float(moved[1]), y + float(moved[2])) if moved else (x, y)
        here = x + float(element.get("x", 0)), y + float(element.get("y", 0))
        text = (element.text or "") + "".join(child.tail or "" for child in element)
        tag = element.tag.removeprefix(SVG)
        yield Shape(tag, *here, dict(element.attrib), text, element.findtext(f"{SVG}title") or "")
        for child in element:
            yield from below(child, x, y)

    return [*below(ElementTree.fromstring(svg), 0.0, 0.0)]


def cells(svg: str) -> list[Shape]:
    """The cells of maps, row by row of the page."""
    parsed = [shape for shape in shapes(svg) if shape.tag == "rect" and " → " in shape.tooltip]
    return sorted(parsed, key=lambda cell: (round(cell.y), round(cell.x)))


def texts(svg: str) -> list[str]:
    return [shape.text for shape in shapes(svg) if shape.tag == "text"]


def brightness(colour: tuple[int, ...]) -> float:
    return float(np.dot(colour, (0.2126, 0.7152, 0.0722)))
