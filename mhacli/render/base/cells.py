"""Cells of maps: from weights to levels on a scale, and from levels to terminal output.

A level is 0 … 255 (0 … 510 for a change), or one of two codes: `FORBIDDEN` for a masked cell, and `NOT_A_NUMBER`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from rich.color import Color
from rich.style import Style

from mhacli.record.arrays import Array
from mhacli.render.base.colours import (
    GLYPHS,
    NAN_SIGN,
    change_glyph,
    change_paint,
    glyph,
    on_colour,
    ramp_paint,
)
from mhacli.render.base.doc import Grid
from mhacli.render.base.options import Scale
from mhacli.text.numbers import Unit, shown

FORBIDDEN, NOT_A_NUMBER = -1, -2
DECADES = 3
"""The range of a log scale below the largest weight. Smaller weights are as dark as 0."""
_PLAIN = Style.null()


# ------------------------------------------------------------------------------------------------------------- scales


def levels(weights: Array, scale: Scale, top: float) -> Array:
    """Levels of 0 … 255 on a scale: `linear` from 0 to `top`, `log` over the decades below it.

    `FORBIDDEN` stays, and NaN becomes `NOT_A_NUMBER`.
    """
    is_open = (weights != FORBIDDEN) & ~np.isnan(weights)
    top, finite = top or 1.0, np.where(is_open, weights, 0.0)
    if scale == "log":
        parts = 1 + np.log10(np.maximum(finite, top * 10.0**-DECADES) / top) / DECADES
    else:
        parts = finite / top
    scaled = np.where(is_open, np.rint(255 * np.clip(parts, 0, 1)), FORBIDDEN)
    return np.where(np.isnan(weights), NOT_A_NUMBER, scaled)


def change_levels(changes: Array, largest: float) -> Array:
    """Levels of 0 … 510 for changes from −`largest` to `largest`; `FORBIDDEN` for NaN (not compared), `NOT_A_NUMBER`
    for infinity."""
    is_known = np.isfinite(changes)
    scaled = 255 + np.rint(255 * np.clip(np.where(is_known, changes, 0.0) / (largest or 1.0), -1, 1))
    return np.select([np.isnan(changes), ~is_known], [FORBIDDEN, NOT_A_NUMBER], scaled)


def levels_of(of: Grid, top: float | None = None, *, is_linear: bool = False) -> Array:
    """The levels of the cells of a grid, up to the common `top` of several. Weights are linear wherever numbers stand in the
    cells."""
    top = of.top if top is None else top
    if of.scale != "change":
        weights = np.where(of.allowed, of.values, FORBIDDEN)
        return levels(weights, "linear" if is_linear else of.scale, top)
    changes = change_levels(np.where(np.isnan(of.values), np.inf, of.values), top)
    return np.where(of.allowed, changes, FORBIDDEN)


def range_text(
    scale: Scale, top: float, unit: Unit = "number", digits: int | None = None, *, is_exceeded: bool = False
) -> str:
    """The range of a scale: `0 … .62`. With `is_exceeded`, some cells lie above the top and are drawn like it."""
    low = "0" if scale == "linear" else f"{shown(top / 10**DECADES, 'number')} or less"
    return f"{low} … {shown(top, unit, digits)}" + (" or more" if is_exceeded else "")


def range_words(
    every: Sequence[Grid], top: float, unit: Unit = "number", digits: int | None = None, *, is_log: bool
) -> str:
    """The range of the common scale of some grids: `0 … .62`, `−.5 … .5`; `or more` where the digits show that cells
    exceed it."""
    high, cells = shown(top, unit, digits), np.concatenate([each.values[each.allowed] for each in every])
    if every[0].scale == "change":
        low = f"−{high}" if (cells < 0).any() else "0"
        return f"{low} … {high}"
    largest = float(np.nanmax(cells, initial=0.0))
    is_exceeded = largest > top and shown(largest, unit, digits) != high
    return range_text("log" if is_log else "linear", top, unit, digits, is_exceeded=is_exceeded)


# ------------------------------------------------------------------------------------------------------------ painting


@dataclass(frozen=True)
class Ramp:
    """The look of levels 0 … `top`: the colour of a cell, and its `sign` without colour."""

    top: int
    paint: Callable[[int], Color]
    sign: Callable[[int], str]
    signs: str

    def style(self, level: int) -> Style:
        """The style of a cell: its background, and black or white text."""
        return on_colour(self.paint(level))

    def swatches(self, count: int = 16, *, colour: bool) -> list[tuple[str, Style]]:
        """The ramp in `count` cells; without colour its signs."""
        if not colour:
            return [(self.signs, _PLAIN)]
        return [(" ", self.style(round(self.top * place / (count - 1)))) for place in range(count)]


WEIGHTS = Ramp(255, ramp_paint, glyph, GLYPHS)
CHANGES = Ramp(510, change_paint, change_glyph, "=-.+#")


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
    return (_half_cell(*pair, ramp.paint) for pair in pairs)


@lru_cache(maxsize=65536)
def _half_cell(upper: int, lower: int, paint: Callable[[int], Color]) -> tuple[str, Style]:
    """One character for two cells, with the upper in the foreground. A masked cell shows the screen's background."""
    if NOT_A_NUMBER in (upper, lower):
        return NAN_SIGN, _PLAIN
    if upper == lower == FORBIDDEN:
        return " ", _PLAIN
    if FORBIDDEN in (upper, lower):
        return "▄" if upper == FORBIDDEN else "▀", Style(color=paint(max(upper, lower)))
    return "▀", Style(color=paint(upper), bgcolor=paint(lower))


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
