"""Names along the sides of a map: tokens where there is room for them, else positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, radians, sin

from mhacli.render.base.format import fitted
from mhacli.render.figures.svg.elements import SOFT, Piece, element, mono_width, placed, value_text, written

_LONGEST = 18
"""Cells of a token's name; longer ones are cut, and told whole to a pointer."""
_SIZE, _GAP, _TILT = 11.0, 5.0, 50.0
_ROOMY = 9.5
"""The least pitch at which each row or column can have its name."""
_TICKS, _TICK = 9, 4.0


@dataclass(frozen=True)
class Side:
    """One side of a map: names of its cells, how far apart they are, and the token at which cell 0 begins, with the tokens per
    cell, for positions. `title` says what stands there."""

    names: Sequence[str]
    pitch: float
    first: int
    block: int
    title: str

    @property
    def is_named(self) -> bool:
        """Whether every cell has its name, or else some their positions."""
        return self.pitch >= _ROOMY and self.block == 1

    @property
    def size(self) -> float:
        """The size of its letters."""
        return min(_SIZE, self.pitch * 0.92) if self.is_named else 9.5

    @property
    def length(self) -> float:
        """How long the side is."""
        return self.pitch * len(self.names)

    def ticks(self) -> list[tuple[float, str]]:
        """Round positions and where they stand."""
        n_tokens = len(self.names) * self.block + self.first
        step = _round_step(max(1, n_tokens) / _TICKS)
        middle = self.pitch / 2 if self.block == 1 else 0.0
        return [
            ((place - self.first) / self.block * self.pitch + middle, f"{place:,}")
            for place in range(0, n_tokens, step)
        ]


def left_side(side: Side) -> Piece:
    """The names of the rows, right aligned, with the title above them."""
    size = side.size
    if side.is_named:
        marks = [(place * side.pitch + side.pitch / 2, name) for place, name in enumerate(side.names)]
    else:
        marks = side.ticks()
    shown = [(y, fitted(name, _LONGEST), name) for y, name in marks]
    width = max([mono_width(name, size) for _, name, _ in shown] + [mono_width(side.title, 10.0)]) + _GAP
    gap = _GAP if side.is_named else _GAP + _TICK
    content = "".join(
        written(width - _GAP, y + 0.35 * size, cut, size, text_anchor="end", said=name if name != cut else "")
        for y, cut, name in shown
    )
    if not side.is_named:
        content += "".join(_line(width, y, width + _TICK, y) for y, _, _ in shown)
    return Piece(content, width + gap - _GAP, side.length)


def top_side(side: Side) -> tuple[Piece, float]:
    """The names of the columns, tilted where they are too wide to lie flat, and how far the last one reaches beyond them."""
    size = side.size
    if not side.is_named:
        content = "".join(
            _line(x, 0, x, _TICK) + written(x, -_GAP, text, size, text_anchor="middle") for x, text in side.ticks()
        )
        return Piece(placed(Piece(content, 0, 0), 0, size + _GAP), side.length, size + _GAP + _TICK), 12.0
    shown = [(fitted(name, _LONGEST), name) for name in side.names]
    widths = [mono_width(cut, size) for cut, _ in shown]
    if max(widths) <= side.pitch - 4:
        content = "".join(
            written((place + 0.5) * side.pitch, size, cut, size, text_anchor="middle")
            for place, (cut, _) in enumerate(shown)
        )
        return Piece(content, side.length, size + _GAP), 0.0
    tilt = _TILT if side.pitch >= 1.6 * size else 90.0
    height = max(widths) * sin(radians(tilt)) + size * cos(radians(tilt)) + _GAP
    content = "".join(
        _tilted((place + 0.5) * side.pitch, height - _GAP, cut, name, size=size, tilt=tilt)
        for place, (cut, name) in enumerate(shown)
    )
    reach = max((place + 0.5) * side.pitch + width * cos(radians(tilt)) + size for place, width in enumerate(widths))
    return Piece(content, side.length, height), max(0.0, reach - side.length)


def _tilted(x: float, y: float, cut: str, name: str, *, size: float, tilt: float) -> str:
    """A name that begins above the middle of its column."""
    shift = 0.35 * size
    x, y = x + shift * sin(radians(tilt)), y + (shift * cos(radians(tilt)) if tilt < 90 else 0.0) - 1
    turned = f"rotate({value_text(-tilt)} {value_text(x)} {value_text(y)})"
    return written(x, y, cut, size, transform=turned, said=name if name != cut else "")


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=SOFT, stroke_width=0.8)


def _round_step(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20 … that is no less than `least`."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= least:
                return factor * power
        power *= 10
