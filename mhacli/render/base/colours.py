"""Colour scales for weights and changes, signs of head types, and characters for screens without
colour.

The ramp runs from dark to bright through blue, green and yellow, so that its order survives colour
blindness and grey. Source: the colours of "viridis" (van der Walt and Smith 2015, CC0), at eight
points.

Terminals with 256 or 16 colours have few of these, and the nearest ones are not in order. So each
scale has a palette for such terminals, chosen by hand so that lightness (L* of CIELAB) rises from
step to step: with 256 colours in equal steps, none more than a fifth away from the mean. The look
of the 16 colours depends on the terminal.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from rich.color import Color, ColorSystem, ColorType
from rich.color_triplet import ColorTriplet
from rich.style import Style

from mhacli.record.heads import UNTYPED, Kind

RGB = tuple[int, int, int]
_MIDDLE = 110
NAN_SIGN = "?"
"""The sign for a weight that is NaN."""


class _Picked(Color):
    """A colour with chosen substitutes in palettes of 256 and 16 colours."""

    of_256: int
    of_16: int

    # rich keeps what it found, which no override needs
    def downgrade(self, system: ColorSystem) -> Color:  # type: ignore[override]
        """The colour in a terminal's colour system."""
        if system == ColorSystem.TRUECOLOR:
            return self
        return Color.from_ansi(self.of_256 if system == ColorSystem.EIGHT_BIT else self.of_16)


def picked(colour: RGB, of_256: int, of_16: int) -> Color:
    """A colour with its substitutes. The name distinguishes it from other colours with the same RGB
    values.
    """
    substituted = _Picked(
        f"{colour} or {of_256} or {of_16}", ColorType.TRUECOLOR, None, ColorTriplet(*colour)
    )
    substituted.of_256, substituted.of_16 = of_256, of_16
    return substituted


EMPTY = Style(color=picked((128, 128, 128), 244, 8))
"""The style of text in a cell without an attention weight. It is a colour, because faint and bold
text changes shades on terminals."""
PLAIN = Style.null()
DIM = Style(dim=True)
ACCENT = Style(color="cyan", bold=True)
CURSOR = Style(reverse=True)
"""The style, never bold, of the cell under a cursor."""
UNKNOWN: RGB = (214, 39, 40)
"""The colour of NaN in pages and pictures: red, which is not in the ramp."""
SINK: RGB = (255, 64, 200)
"""The colour of sinks that were taken out: pink, which is not in the ramp."""


@lru_cache(maxsize=4096)
def on_colour(colour: Color) -> Style:
    """The style of text on a background: black or white, whichever reads better on its RGB
    values.
    """
    white, black = picked((255, 255, 255), 231, 15), picked((0, 0, 0), 16, 0)
    return Style(color=white if is_dark(colour.get_truecolor()) else black, bgcolor=colour)


def is_dark(colour: Sequence[int]) -> bool:
    """Whether white text reads better on a colour than black. Source of the weights: ITU-R
    BT.709.
    """
    red, green, blue = colour
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue <= _MIDDLE


def hex_of(colour: Sequence[int]) -> str:
    """A colour as an attribute of SVG or HTML.

    >>> hex_of((68, 1, 84))
    '#440154'
    """
    return "#" + "".join(f"{int(part):02x}" for part in colour)


def ink_on(colour: Sequence[int]) -> str:
    """Black or white, whichever is readable on a colour."""
    return "#ffffff" if is_dark(colour) else "#000000"


# -------------------------------------------------------------------------------------------- ramps


@dataclass(frozen=True)
class Side:
    """A scale from its middle to one end: colours in equal steps, and palette numbers for terminals
    with 256 and 16 colours.

    Numbers from 16 on look the same on every terminal. Source: Moy et al., "XTerm Control
    Sequences".
    """

    points: Sequence[RGB]
    of_256: Sequence[int]
    of_16: Sequence[int]

    def paints(self) -> Iterator[Color]:
        """The colours of the levels 0 … 255 from the middle, interpolated between the points."""
        for level in range(256):
            place = level / 255 * (len(self.points) - 1)
            low = min(int(place), len(self.points) - 2)
            ends = zip(self.points[low], self.points[low + 1], strict=True)
            red, green, blue = (round(a + (b - a) * (place - low)) for a, b in ends)
            palettes = (
                numbers[level * len(numbers) // 256] for numbers in (self.of_256, self.of_16)
            )
            yield picked((red, green, blue), *palettes)


@dataclass(frozen=True, eq=False)
class Ramp:
    """The levels 0 … `top` as colours, also for terminals with few, and as a `sign` without
    colour.
    """

    sides: Sequence[Side]
    sign: Callable[[int], str]

    @cached_property
    def paints(self) -> Sequence[Color]:
        """The colours of the levels for any terminal."""
        *less, more = ([*side.paints()] for side in self.sides)
        return [*(paint for side in less for paint in side[:0:-1]), *more]

    @cached_property
    def colours(self) -> Sequence[RGB]:
        """The RGB values of the levels."""
        return [paint.get_truecolor() for paint in self.paints]

    @property
    def top(self) -> int:
        """The largest level."""
        return 255 * len(self.sides)

    def style(self, level: int) -> Style:
        """The style of a cell: its background, and black or white text."""
        return on_colour(self.paints[level])


GLYPHS = "·░▒▓█"
"""Small to large, for screens without colour. A masked cell is a space."""


def glyph(level: int) -> str:
    """The character for a level on screens without colour."""
    return GLYPHS[min(len(GLYPHS) - 1, level * len(GLYPHS) // 256)]


_VIRIDIS = (
    (68, 1, 84),
    (70, 50, 127),
    (54, 92, 141),
    (39, 127, 142),
    (31, 161, 135),
    (74, 194, 109),
    (159, 218, 58),
    (253, 231, 37),
)
WEIGHTS = Ramp([Side(_VIRIDIS, (53, 56, 26, 31, 36, 41, 220, 226), (4, 12, 6, 10, 11))], glyph)
"""Purple, blue, teal, green, yellow, with L* from 21 to 97. The palette has few other colours
between them but greys."""

_NONE = (68, 68, 68)
_STRONG = 0.5
"""The fraction of the largest change from which a sign is a strong one."""
_FAINT = 0.05
"""The fraction of the largest change below which a sign means no change."""


def change_glyph(level: int) -> str:
    """The sign of a change: `=` and `-` for much and little less, `.` for about none, `+` and `#`
    for little and much more. All are ASCII, since `·` looks like `-`.
    """
    part = abs(level - 255) / 255
    if part < _FAINT:
        return "."
    weak, strong = ("-", "=") if level < 255 else ("+", "#")
    return strong if part >= _STRONG else weak


CHANGES = Ramp(
    [
        Side((_NONE, (86, 180, 233)), (238, 60, 67, 74, 117), (8, 6, 6, 6, 14, 14)),
        Side((_NONE, (230, 159, 0)), (238, 94, 136, 178, 220), (8, 3, 3, 3, 11, 11)),
    ],
    change_glyph,
)
"""Less on one side, more on the other, 255 in the middle. The ends are the sky blue and the orange
of Okabe and Ito, which differ for every kind of colour blindness. Both are equally far from the
dark grey of no change, so that brightness shows the size of a change in either direction. Source:
Okabe and Ito 2008, "Color Universal Design", https://jfly.uni-koeln.de/color/."""


# --------------------------------------------------------------------------------------- head types


class KindSign(NamedTuple):
    """The sign of a head type, and its colour on a terminal."""

    sign: str
    colour: str


KIND_SIGNS: Mapping[Kind, KindSign] = {
    "previous-token": KindSign("◀", "cyan"),
    "sink": KindSign("┃", "magenta"),
    "diagonal": KindSign("╲", "bright_magenta"),
    "duplicate-token": KindSign("≡", "yellow"),
    "induction": KindSign("↻", "green"),
    "local": KindSign("▪", "bright_blue"),
    "positional": KindSign("⇠", "cyan"),
    "uniform": KindSign("░", "default"),
    "mixed": KindSign("○", "default"),
}


def type_sign(kind: Kind) -> tuple[str, Style]:
    """The sign of a head type in its colour; grey for an unknown type."""
    sign, colour = KIND_SIGNS[kind]
    return sign, EMPTY if kind in UNTYPED else Style(color=colour)
