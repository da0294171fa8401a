"""Cells of maps: from weights to levels on a scale, and from levels to terminal output.

A level is 0 … 255 (0 … 510 for a change), or one of two codes: `FORBIDDEN` for a masked cell, and `NOT_A_NUMBER`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from rich.style import Style

from mhacli.io.data import Array
from mhacli.render.base.colours import CHANGES, NAN_SIGN, WEIGHTS, Ramp
from mhacli.render.base.doc import Grid
from mhacli.text.numbers import Unit, shown

FORBIDDEN, NOT_A_NUMBER = -1, -2
DECADES = 3
"""The range of a log scale below the largest weight. Smaller weights are as dark as 0."""
_PLAIN = Style.null()


# ------------------------------------------------------------------------------------------------------------- scales


def levels(values: Array, allowed: Array, scale: str, top: float) -> Array:
    """Levels of 0 … 255 on a scale: `linear` from 0 to `top`, `log` over the decades below it; of a `change` 0 … 510 from −`top`
    on. `FORBIDDEN` where a cell is masked, and `NOT_A_NUMBER`."""
    is_known = allowed & np.isfinite(values)
    known, top = np.where(is_known, values, 0.0), top or 1.0
    if scale == "log":
        parts = 1 + np.log10(np.maximum(known, top * 10.0**-DECADES) / top) / DECADES
    else:
        parts = known / top
    least, middle = (-1, 255) if scale == "change" else (0, 0)
    scaled = middle + np.rint(255 * np.clip(parts, least, 1))
    return np.select([~allowed, ~is_known], [FORBIDDEN, NOT_A_NUMBER], scaled).astype(np.int16)


def ends(
    scale: str,
    top: float,
    unit: Unit = "number",
    digits: int | None = None,
    *,
    least: float = 0.0,
    largest: float = 0.0,
) -> tuple[str, str]:
    """What the ends of a scale stand for: `0` and `.62`, or `.62 or more` if the digits show that the `largest` cell exceeds it;
    of changes `−.5` and `.5`, or `0` if none is less."""
    high = shown(top, unit, digits)
    if scale == "change":
        return (f"−{high}" if least < 0 else "0"), high
    is_exceeded = largest > top and shown(largest, unit, digits) != high
    low = "0" if scale == "linear" else f"{shown(top / 10**DECADES, 'number')} or less"
    return low, high + " or more" * is_exceeded


def ends_of(
    every: Sequence[Grid], top: float, scale: str, unit: Unit = "number", digits: int | None = None
) -> tuple[str, str]:
    """What the ends of the common scale of some grids stand for."""
    cells = np.concatenate([each.values[each.allowed] for each in every])
    least, largest = float(np.nanmin(cells, initial=0.0)), float(np.nanmax(cells, initial=0.0))
    return ends(scale, top, unit, digits, least=least, largest=largest)


def scale_words(every: Sequence[Grid]) -> str:
    """The kind and the range of the common scale of some grids: `linear, 0 … .62`."""
    scale = every[0].scale
    words = " … ".join(ends_of(every, every[0].top, scale))
    return words if scale == "change" else f"{scale}, {words}"


def swatch_levels(every: Sequence[Grid], count: int) -> list[int]:
    """So many levels of the ramp of some grids in equal steps; of changes from the middle on if none is less."""
    top = ramp_of(every[0]).top
    is_upper = every[0].scale == "change" and not any((each.values[each.allowed] < 0).any() for each in every)
    begin = top // 2 if is_upper else 0
    return [begin + (top - begin) * place // (count - 1) for place in range(count)]


# ------------------------------------------------------------------------------------------------------------ painting


def ramp_of(of: Grid) -> Ramp:
    """The ramp of the scale of a grid."""
    return CHANGES if of.scale == "change" else WEIGHTS


def cell(
    level: int, width: int = 1, *, colour: bool, ramp: Ramp = WEIGHTS, gap: int = 0, word: str = ""
) -> tuple[str, Style]:
    """A cell of `width` columns, with `word` or signs in all but the last `gap` columns."""
    if level == FORBIDDEN:
        return " " * width, _PLAIN
    room, is_number = width - gap, level != NOT_A_NUMBER
    sign = NAN_SIGN if not is_number else " " if colour else ramp.sign(level)
    text = f"{word:>{room}}" if word else sign * room
    return text + " " * gap, ramp.style(level) if colour and is_number else _PLAIN


def half_cells(upper: Sequence[int], lower: Sequence[int] | None, ramp: Ramp = WEIGHTS) -> Iterator[tuple[str, Style]]:
    """Two rows of levels as one line with a character per pair; None without a second row."""
    pairs = zip(upper, lower or [FORBIDDEN] * len(upper), strict=True)
    return (_half_cell(*pair, ramp) for pair in pairs)


@lru_cache(maxsize=65536)
def _half_cell(upper: int, lower: int, ramp: Ramp) -> tuple[str, Style]:
    """One character for two cells, with the upper in the foreground. A masked cell shows the screen's background."""
    if NOT_A_NUMBER in (upper, lower):
        return NAN_SIGN, _PLAIN
    if upper == lower == FORBIDDEN:
        return " ", _PLAIN
    if FORBIDDEN in (upper, lower):
        return "▄" if upper == FORBIDDEN else "▀", Style(color=ramp.paints[max(upper, lower)])
    return "▀", Style(color=ramp.paints[upper], bgcolor=ramp.paints[lower])


def ticks(places: Sequence[int], width: int = 1, *, every: int = 10, begin: int = 0) -> str:
    """An axis for columns of `width` cells: every so many columns the position, where it fits and is not negative.

    `begin` is the index of the first column.

    >>> ticks(range(3), 2, every=2)
    '0   2 '
    """
    axis = [" "] * (len(places) * width)
    for column, place in enumerate(places):
        at, number = column * width, str(place)
        if (begin + column) % every == 0 and place >= 0 and at + len(number) <= len(axis):
            axis[at : at + len(number)] = number
    return "".join(axis)
