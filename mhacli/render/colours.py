"""Colour scales, and their stand-ins where there is no colour.

The ramp runs dark to bright through blue, green and yellow, so that its order survives colour blindness and grey.
Source: the colours of "viridis" (van der Walt and Smith 2015, CC0), at eight points.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from rich.color import Color
from rich.style import Style

RAMP = (
    (68, 1, 84),
    (70, 50, 127),
    (54, 92, 141),
    (39, 127, 142),
    (31, 161, 135),
    (74, 194, 109),
    (159, 218, 58),
    (253, 231, 37),
)
_SINK = (255, 64, 200)
_MIDDLE = 110
GLYPHS = "·░▒▓█"
"""Small to large, for screens without colour; a forbidden cell is a space."""
NAN_SIGN = "?"
"""In place of a cell that is no number."""
EMPTY = Style(color=Color.from_rgb(128, 128, 128))
"""Of what stands in a cell that has no share: a colour, for no cell is faint, bold or underlined, which terminals draw darker
or brighter than the shade of its number."""


@lru_cache(maxsize=1024)
def shade(level: int) -> Style:
    """The style of a cell at `level` of 0 … 255: background from the ramp, text black or white by luminance."""
    return on_colour(ramp_colour(level))


def on_colour(colour: tuple[int, int, int]) -> Style:
    """The style of text on a background: black or white, whichever is easier to read."""
    return Style(color="bright_white" if is_dark(colour) else "black", bgcolor=Color.from_rgb(*colour))


@lru_cache(maxsize=256)
def sink_shade(level: int) -> Style:
    """The style of a sink's cell at `level` of 0 … 255: another colour than any of the ramp, black to magenta."""
    return Style(bgcolor=Color.from_rgb(*sink_colour(level)))


def sink_colour(level: int) -> tuple[int, int, int]:
    """Red, green and blue of a sink at `level` of 0 … 255."""
    red, green, blue = (round(part * level / 255) for part in _SINK)
    return red, green, blue


def is_dark(colour: tuple[int, int, int]) -> bool:
    """Whether white is easier to read on a colour than black. Source of the weights: ITU-R BT.709."""
    red, green, blue = colour
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue <= _MIDDLE


@lru_cache(maxsize=256)
def ramp_colour(level: int) -> tuple[int, int, int]:
    """Red, green and blue at `level` of 0 … 255, straight between the points of the ramp."""
    place = level / 255 * (len(RAMP) - 1)
    low = min(int(place), len(RAMP) - 2)
    red, green, blue = (round(a + (b - a) * (place - low)) for a, b in zip(RAMP[low], RAMP[low + 1], strict=True))
    return red, green, blue


@lru_cache(maxsize=65536)
def half_block(
    upper: int | None, lower: int | None, colour: Callable[[int], tuple[int, int, int]] = ramp_colour
) -> tuple[str, Style]:
    """One character that shows two cells, the upper as its foreground; None is a cell that shows the screen itself. `colour` is
    that of a level."""
    if upper is None and lower is None:
        return " ", Style.null()
    if upper is None or lower is None:
        level = lower if upper is None else upper
        return "▄" if upper is None else "▀", Style(color=Color.from_rgb(*colour(level or 0)))
    return "▀", Style(color=Color.from_rgb(*colour(upper)), bgcolor=Color.from_rgb(*colour(lower)))


def level_of(share: float, largest: float) -> int:
    """Where a share lies on the linear scale from 0 to `largest`, as 0 … 255."""
    return 255 if share >= largest else max(0, round(255 * share / largest))


def glyph(level: int) -> str:
    """The character that stands for a level where there is no colour."""
    return GLYPHS[min(len(GLYPHS) - 1, level * len(GLYPHS) // 256)]
