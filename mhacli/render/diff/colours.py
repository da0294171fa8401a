"""The colours of a difference: less, none, more; and the signs that stand for them where there is no colour.

Both ends are the sky blue and the orange of Okabe and Ito, which differ for every kind of colour blindness, as far from the dark
grey of no difference as each other, so that a bright cell is a large change whichever way it goes.
Source: Okabe and Ito 2008, "Color Universal Design", https://jfly.uni-koeln.de/color/.
"""

from __future__ import annotations

from functools import lru_cache

from rich.color import Color
from rich.style import Style

from mhacli.render.base.colours import RGB, Steps, on_colour, picked

LESS, NONE, MORE = (86, 180, 233), (68, 68, 68), (230, 159, 0)
LESS_STEPS, MORE_STEPS = Steps((238, 24, 31, 74, 81), (8, 6, 14)), Steps((238, 94, 136, 178, 214), (8, 3, 11))
"""Both sides on small terminals, from no change on."""
STRONG = 0.5
"""From half of the largest change on a sign is a strong one."""
FAINT = 0.05
"""Below this part of the largest change a sign says that there is about none."""


@lru_cache(maxsize=512)
def change_colour(level: int) -> RGB:
    """Red, green and blue of a change at `level` of −255 … 255: straight from no change to the end of its side."""
    end, part = (LESS, -level) if level < 0 else (MORE, level)
    red, green, blue = (round(a + (b - a) * part / 255) for a, b in zip(NONE, end, strict=True))
    return red, green, blue


@lru_cache(maxsize=512)
def change_paint(level: int) -> Color:
    """The colour of a change at `level` of −255 … 255 on any terminal."""
    steps = LESS_STEPS if level < 0 else MORE_STEPS
    return picked(change_colour(level), *steps.at(abs(level)))


@lru_cache(maxsize=512)
def change_style(level: int) -> Style:
    """The style of a cell at `level` of −255 … 255: its background, with text black or white by luminance."""
    return on_colour(change_paint(level))


def change_glyph(level: int) -> str:
    """The sign of a change: `=` and `-` for much and little less, `.` for about none, `+` and `#` for little and much more: all
    of ASCII, where `·` would be told as `-`."""
    part = abs(level) / 255
    if part < FAINT:
        return "."
    weak, strong = ("-", "=") if level < 0 else ("+", "#")
    return strong if part >= STRONG else weak
