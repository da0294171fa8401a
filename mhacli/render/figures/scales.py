"""The surroundings of maps: common colour scale, legend, and names along the sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, radians, sin

import numpy as np

from mhacli.record.arrays import Array
from mhacli.render.base.cells import FORBIDDEN, NOT_A_NUMBER, levels, range_text
from mhacli.render.base.colours import RAMP, is_dark, ramp_colour, sink_colour
from mhacli.render.base.format import fitted, weight_text
from mhacli.render.base.options import Scale
from mhacli.render.figures.svg import (
    FAINT,
    INK,
    SOFT,
    Piece,
    beside,
    element,
    mono_width,
    placed,
    rectangle,
    value_text,
    written,
)
from mhacli.render.heads.head_map import HeadMap, largest_of_maps

Colour = tuple[int, int, int]
BLANK: Colour = (228, 228, 228)
"""The colour of a masked cell: lighter than most of the ramp, and without a hue."""
UNKNOWN: Colour = (214, 39, 40)
"""The colour of NaN: red, which is not in the ramp."""
_RAMP = np.array([ramp_colour(level) for level in range(256)], np.uint8)
_BAR, _HIGH, _SIZE = 220.0, 12.0, 10.0
_ALIKE = 1e-4
"""A relative excess over the scale's top that its four digits cannot show."""


@dataclass(frozen=True)
class Shading:
    """Maps on one scale. `levels` are those of each map, 0 … 255; `largest` is the scale's top.

    The top may be exceeded by queries that see a single key (`is_exceeded`). Ranks are among the `n_open` cells of each
    map.
    """

    scale: Scale
    largest: float
    levels: tuple[Array, ...]
    is_exceeded: bool
    has_unknown: bool
    has_blank: bool
    is_empty: bool

    @property
    def range(self) -> str:
        """The type and range of the scale: `linear, 0 … .62`."""
        return f"{self.scale}, {range_text(self.scale, self.largest, is_exceeded=self.is_exceeded)}"


def shading(maps: Sequence[HeadMap], scale: Scale) -> Shading:
    """The common scale of the maps."""
    weights = np.concatenate([head_map.weights.ravel() for head_map in maps])
    largest = largest_of_maps(maps)
    of_maps = tuple(levels(head_map.weights, scale, largest) for head_map in maps)
    all_levels = np.concatenate([part.ravel() for part in of_maps])
    return Shading(
        scale=scale,
        largest=largest,
        levels=of_maps,
        is_exceeded=bool((np.nan_to_num(weights) > (1 + _ALIKE) * largest).any()),
        has_unknown=bool((all_levels == NOT_A_NUMBER).any()),
        has_blank=bool((all_levels == FORBIDDEN).any()),
        is_empty=not bool((np.nan_to_num(weights) > 0).any()),
    )


def colours_of(level_array: Array) -> Array:
    """RGB values of levels, `[…, 3]`."""
    colours: Array = _RAMP[np.clip(level_array, 0, 255).astype(int)]
    colours[level_array == FORBIDDEN] = BLANK
    colours[level_array == NOT_A_NUMBER] = UNKNOWN
    return colours


def sink_colours(weights: Array) -> Array:
    """RGB values of sink weights from 0 to 1, unlike any of the ramp."""
    sink_levels = np.rint(255 * np.clip(np.nan_to_num(weights), 0, 1)).astype(int)
    rgb = [sink_colour(level) for level in sink_levels.ravel().tolist()]
    colours: Array = np.array(rgb, np.uint8).reshape(*sink_levels.shape, 3)
    colours[np.isnan(weights)] = UNKNOWN
    return colours


def hex_of(colour: Sequence[int]) -> str:
    """A colour as an SVG attribute.

    >>> hex_of((68, 1, 84))
    '#440154'
    """
    return "#" + "".join(f"{int(part):02x}" for part in colour)


def ink_on(colour: Sequence[int]) -> str:
    """Black or white, whichever is readable on a colour."""
    red, green, blue = (int(part) for part in colour)
    return "#ffffff" if is_dark((red, green, blue)) else "#000000"


def scale_bar(shaded: Shading, precision: int, *, what: str, has_sinks: bool = False) -> Piece:
    """The legend of a picture: the ramp with its type and range, and the other colours."""
    pieces = [_ramp(shaded, what)]
    pieces += [_swatch(BLANK, "masked", "0")] if shaded.has_blank else []
    pieces += [_swatch(UNKNOWN, "not a number", "?")] if shaded.has_unknown else []
    pieces += [_sink_ramp(precision)] if has_sinks else []
    return beside(pieces, 22)


def _ramp(shaded: Shading, what: str) -> Piece:
    stops = [
        element("stop", offset=f"{100 * place / (len(RAMP) - 1):.4f}%", stop_color=hex_of(colour))
        for place, colour in enumerate(RAMP)
    ]
    gradient = element("linearGradient", *stops, id="ramp")
    bar = rectangle(0, 0, _BAR, _HIGH, "url(#ramp)", stroke=FAINT, stroke_width=0.5)
    return _labelled(element("defs", gradient) + bar, _BAR, f"{what}: {shaded.range}")


def _labelled(shape: str, width: float, label: str) -> Piece:
    text = written(0, _HIGH + 1.25 * _SIZE, label, _SIZE, fill=INK)
    return Piece(shape + text, max(width, mono_width(label, _SIZE)), _HIGH + 1.6 * _SIZE)


def _swatch(colour: Colour, label: str, sign: str) -> Piece:
    side = 2 * _HIGH
    box = rectangle(0, 0, side, _HIGH, hex_of(colour), stroke=FAINT, stroke_width=0.5)
    fill = SOFT if colour == BLANK else ink_on(colour)
    box += written(side / 2, _HIGH - 2.5, sign, _SIZE, fill=fill, text_anchor="middle")
    return _labelled(box, side, label)


def _sink_ramp(precision: int) -> Piece:
    ends = [
        element("stop", offset=f"{100 * level // 255}%", stop_color=hex_of(sink_colour(level))) for level in (0, 255)
    ]
    bar = rectangle(0, 0, _BAR / 2, _HIGH, "url(#sinks)", stroke=FAINT, stroke_width=0.5)
    gradient = element("defs", element("linearGradient", *ends, id="sinks"))
    return _labelled(gradient + bar, _BAR / 2, f"sink: linear, 0 … {weight_text(1.0, precision)}")


# --------------------------------------------------------------------------------------------------------------- sides


_LONGEST = 18
"""The most cells of a token's name. Longer names are cut, with the whole name as tooltip."""
_NAME_SIZE, _GAP, _TILT = 11.0, 5.0, 50.0
_ROOMY = 9.5
"""The least pitch at which every row or column has its name."""
_TICKS, _TICK = 9, 4.0


@dataclass(frozen=True)
class MapSide:
    """One side of a map: the names of its cells, their pitch, and for positions the first token and the tokens per
    cell.

    `title` describes the side.
    """

    names: Sequence[str]
    pitch: float
    first: int
    block: int
    title: str

    @property
    def is_named(self) -> bool:
        """Whether every cell has its name; otherwise some have positions."""
        return self.pitch >= _ROOMY and self.block == 1

    @property
    def size(self) -> float:
        """The font size."""
        return min(_NAME_SIZE, self.pitch * 0.92) if self.is_named else 9.5

    @property
    def length(self) -> float:
        """The length of the side."""
        return self.pitch * len(self.names)

    def ticks(self) -> list[tuple[float, str]]:
        """Round positions and their coordinates."""
        n_tokens = len(self.names) * self.block + self.first
        step = _round_step(max(1, n_tokens) / _TICKS)
        middle = self.pitch / 2 if self.block == 1 else 0.0
        return [
            ((place - self.first) / self.block * self.pitch + middle, f"{place:,}")
            for place in range(0, n_tokens, step)
        ]


def left_side(side: MapSide) -> Piece:
    """The names of the rows, right aligned, with the title above."""
    size = side.size
    if side.is_named:
        marks = [(place * side.pitch + side.pitch / 2, name) for place, name in enumerate(side.names)]
    else:
        marks = side.ticks()
    labels = [(y, fitted(name, _LONGEST), name) for y, name in marks]
    width = max([mono_width(name, size) for _, name, _ in labels] + [mono_width(side.title, 10.0)]) + _GAP
    gap = _GAP if side.is_named else _GAP + _TICK
    content = "".join(
        written(width - _GAP, y + 0.35 * size, cut, size, text_anchor="end", tooltip=name if name != cut else "")
        for y, cut, name in labels
    )
    if not side.is_named:
        content += "".join(_line(width, y, width + _TICK, y) for y, _, _ in labels)
    return Piece(content, width + gap - _GAP, side.length)


def top_side(side: MapSide) -> tuple[Piece, float]:
    """The names of the columns, tilted if they are too wide, and how far the last one extends beyond them."""
    size = side.size
    if not side.is_named:
        content = "".join(
            _line(x, 0, x, _TICK) + written(x, -_GAP, text, size, text_anchor="middle") for x, text in side.ticks()
        )
        return Piece(placed(Piece(content, 0, 0), 0, size + _GAP), side.length, size + _GAP + _TICK), 12.0
    labels = [(fitted(name, _LONGEST), name) for name in side.names]
    widths = [mono_width(cut, size) for cut, _ in labels]
    if max(widths) <= side.pitch - 4:
        content = "".join(
            written((place + 0.5) * side.pitch, size, cut, size, text_anchor="middle")
            for place, (cut, _) in enumerate(labels)
        )
        return Piece(content, side.length, size + _GAP), 0.0
    tilt = _TILT if side.pitch >= 1.6 * size else 90.0
    height = max(widths) * sin(radians(tilt)) + size * cos(radians(tilt)) + _GAP
    content = "".join(
        _tilted((place + 0.5) * side.pitch, height - _GAP, cut, name, size=size, tilt=tilt)
        for place, (cut, name) in enumerate(labels)
    )
    reach = max((place + 0.5) * side.pitch + width * cos(radians(tilt)) + size for place, width in enumerate(widths))
    return Piece(content, side.length, height), max(0.0, reach - side.length)


def _tilted(x: float, y: float, cut: str, name: str, *, size: float, tilt: float) -> str:
    """A name that begins above the middle of its column."""
    shift = 0.35 * size
    x, y = x + shift * sin(radians(tilt)), y + (shift * cos(radians(tilt)) if tilt < 90 else 0.0) - 1
    rotation = f"rotate({value_text(-tilt)} {value_text(x)} {value_text(y)})"
    return written(x, y, cut, size, transform=rotation, tooltip=name if name != cut else "")


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=SOFT, stroke_width=0.8)


def _round_step(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20 … that is at least `least`."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= least:
                return factor * power
        power *= 10
