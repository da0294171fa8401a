"""Draws grids as SVG: side by side and in rows, on one scale, with the names of their rows and
columns, and the scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mhacli.io.data import Array
from mhacli.render.base.colours import SINK, UNKNOWN, hex_of, ink_on
from mhacli.render.base.doc import Grid
from mhacli.render.base.format import fitted
from mhacli.render.base.grids import (
    MASKED,
    NOT_A_NUMBER,
    levels,
    ramp_of,
    scale_words,
    swatch_levels,
)
from mhacli.render.figures.svg import (
    FAINT,
    SOFT,
    Piece,
    element,
    image,
    mono_width,
    placed,
    rectangle,
    value_text,
    written,
)
from mhacli.text.numbers import shown

ROOMY = 9.5
"""The least size of cells at which every row and column has its name."""
_LARGEST, _LEAST_SHAPE, _WIDEST, _LEAST_HEIGHT = 42.0, 14.0, 64.0, 14.0
"""The largest cell, the least one that is a rectangle with a number and a tooltip, and the widest;
smaller ones are pixels of an image. And the least height of few rows with many columns."""
_GAP, _SIZE, _LONGEST = 10.0, 10.0, 18
"""The gap between grids, the size of titles, and the most characters of a name."""
_MASKED_COLOUR, _BLANK = (228, 228, 228), (255, 255, 255)
"""Masked cells are lighter than most of the ramp, without a hue; among changes they are blank."""


def grids(rows: Sequence[tuple[str, Sequence[Grid]]], side: float) -> Piece:
    """Rows of grids, each row with its name, and each grid at most about `side` large."""
    every = [of for _, row in rows for of in row]
    first, (wide, high, number) = every[0], _cells_of(every, side)
    is_alike = all((of.rows, of.columns) == (first.rows, first.columns) for of in every)
    has_names = len(every) == 1 or (is_alike and min(wide, high) >= ROOMY)
    left = _row_names(first.rows, high) if has_names else Piece()
    top = _column_names(first.columns, wide) if has_names else Piece()
    above = top.height + (_SIZE + 5 if any(of.title for of in every) else 0.0)
    of_rows = max(mono_width(f"{name}  ", _SIZE) if name else 0.0 for name, _ in rows)
    start = max(of_rows + left.width, mono_width(f"{first.corner} ", _SIZE))
    step = (
        max(max(len(of.columns) * wide, top.width, mono_width(of.title, _SIZE)) for of in every)
        + _GAP
    )

    y = above
    content = (
        written(start - 6, y - 6, first.corner, _SIZE, fill=SOFT, text_anchor="end")
        if first.corner
        else ""
    )
    for name, row in rows:
        height = max(len(of.rows) for of in row) * high
        if name:
            content += written(
                of_rows - 8, y + height / 2 + 0.35 * _SIZE, name, _SIZE, text_anchor="end"
            )
        content += placed(left, start - left.width, y)
        for place, of in enumerate(row):
            title = written(0, -top.height - 5, of.title, _SIZE) if of.title else ""
            parts = title + placed(top, 0, -top.height) + _drawn(of, wide, high, number)
            at = f"translate({value_text(start + place * step)} {value_text(y)})"
            content += element("g", parts, tooltip=of.meaning, transform=at)
        y += height + _GAP + above
    width = start + max(len(row) for _, row in rows) * step - _GAP
    return Piece(content, width, y - _GAP - above)


def _cells_of(every: Sequence[Grid], side: float) -> tuple[float, float, float]:
    """The common width and height of cells, and the size of numbers in them: 0 if not all have
    room.
    """
    n_rows, n_columns = (max(of.values.shape[axis] for of in every) for axis in (0, 1))
    width = height = max(1.0, min(_LARGEST, side // max(n_rows, n_columns)))
    if 4 * n_rows < n_columns:
        height = max(height, _LEAST_HEIGHT)
    number = min(11.0, 3 + width / 5)
    if width < _LEAST_SHAPE:
        return width, height, 0.0
    widest = max(len(_words(of, *at)[0]) for of in every for at in np.ndindex(of.values.shape))
    needed = mono_width("0" * widest, number) + 5
    return (max(width, needed), height, number) if needed <= _WIDEST else (width, height, 0.0)


def _drawn(of: Grid, wide: float, high: float, size: float) -> str:
    """The cells of a grid in a frame, each with its tooltip, and its number if it fits."""
    shades = levels(of.values, of.allowed, of.scale, of.top)
    colours: Array = np.array(ramp_of(of).colours, np.uint8)[np.clip(shades, 0, None)]
    colours[shades == NOT_A_NUMBER] = UNKNOWN
    if of.taken is not None:
        colours[of.taken] = SINK
    colours[shades == MASKED] = _BLANK if of.scale == "change" else _MASKED_COLOUR
    n_rows, n_columns = shades.shape
    is_image = wide < _LEAST_SHAPE
    content = image(colours, (wide, high)) if is_image else ""
    for row, column in np.ndindex(shades.shape) if not is_image else ():
        number, words = _words(of, row, column)
        tooltip = (
            of.about(row, column) if of.about else f"{of.rows[row]} → {of.columns[column]}: {words}"
        )
        if not tooltip:
            continue
        x, y, colour = column * wide, row * high, colours[row, column].tolist()
        content += rectangle(
            x, y, wide, high, hex_of(colour), tooltip=tooltip, shape_rendering="crispEdges"
        )
        if size:  # it ignores the pointer, so that the tooltip shows
            ink, y = ink_on(colour) if of.allowed[row, column] else SOFT, y + high / 2 + 0.35 * size
            content += written(
                x + wide / 2, y, number, size, fill=ink, text_anchor="middle", pointer_events="none"
            )
    return content + rectangle(
        0, 0, n_columns * wide, n_rows * high, "none", stroke=FAINT, stroke_width=0.8
    )


def _words(of: Grid, row: int, column: int) -> tuple[str, str]:
    """The number in a cell, `0` if masked, unlike `.00`, and what its tooltip says: all digits of a
    float32.
    """
    value = float(of.values[row, column])
    if not of.allowed[row, column]:
        return "0" if of.scale != "change" else "", "masked"
    if of.taken is not None and of.taken[row, column]:
        return "–", "a sink, taken out"
    if math.isnan(value):
        return "?", "not a number"
    return shown(value, of.unit, of.digits), f"{value:.6g}"


# -------------------------------------------------------------------------------------------- names


def _row_names(names: Sequence[str], pitch: float) -> Piece:
    """The names of rows, right aligned; where they have no room, of every 2nd, 5th, 10th … row."""
    size = _size_of(pitch)
    texts = {
        row: fitted(names[row], _LONGEST) for row in range(0, len(names), _every(2 * ROOMY, pitch))
    }
    width = max(mono_width(text, size) for text in texts.values()) + 5
    content = ""
    for row, text in texts.items():
        content += written(
            width - 5, (row + 0.5) * pitch + 0.35 * size, text, size, text_anchor="end"
        )
    return Piece(content, width, len(names) * pitch)


def _column_names(names: Sequence[str], pitch: float) -> Piece:
    """The names of columns, upright if they are too wide; where they have no room, of every 2nd,
    5th, 10th … column.
    """
    size = _size_of(pitch)
    texts = [fitted(name, _LONGEST) for name in names]
    widest = max(mono_width(text, size) for text in texts)
    every = _every(widest + 8, pitch)
    is_level = widest <= every * pitch - 4
    height = (size if is_level else widest) + 5
    content = ""
    for column in range(0, len(names), every):
        x, y = (column + 0.5) * pitch, height - 5
        how = {"text_anchor": "middle"}
        if not is_level:
            x += 0.35 * size
            how = {"transform": f"rotate(-90 {value_text(x)} {value_text(y)})"}
        content += written(x, y, texts[column], size, **how)
    return Piece(content, len(names) * pitch + (widest / 2 if every > 1 else 0.0), height)


def _size_of(pitch: float) -> float:
    """The size of names that stand so far apart."""
    return min(11.0, 0.92 * pitch) if pitch >= ROOMY else ROOMY


def _every(room: float, pitch: float) -> int:
    """The smallest of 1, 2, 5, 10, 20 … places that have so much room; 1 where every place has its
    name.
    """
    steps = (factor * 10**power for power in range(9) for factor in (1, 2, 5))
    return 1 if pitch >= ROOMY else next(step for step in steps if step * pitch >= room)


# -------------------------------------------------------------------------------------------- scale

_BAR, _HIGH, _BESIDE = 220.0, 12.0, 22.0


def legend(every: Sequence[Grid], what: str) -> Piece:
    """The ramp with its range and what it is of, and the other colours that occur."""
    colours = [ramp_of(every[0]).colours[level] for level in swatch_levels(every)]
    stops = [
        element("stop", offset=f"{100 * step / (len(colours) - 1):g}%", stop_color=hex_of(colour))
        for step, colour in enumerate(colours)
    ]
    entries = [("url(#scale)", _BAR, f"{what}: {scale_words(every)}")]
    if every[0].scale != "change" and not all(of.allowed.all() for of in every):
        entries.append((hex_of(_MASKED_COLOUR), _HIGH, "masked"))
    if any(bool(np.isnan(of.values[of.allowed]).any()) for of in every):
        entries.append((hex_of(UNKNOWN), _HIGH, "not a number"))
    if any(of.taken is not None and of.taken.any() for of in every):
        entries.append((hex_of(SINK), _HIGH, "sink, taken out"))
    content, x = element("defs", element("linearGradient", *stops, id="scale")), 0.0
    for fill, width, label in entries:
        content += rectangle(x, 0, width, _HIGH, fill, stroke=FAINT, stroke_width=0.5)
        content += written(x, _HIGH + 1.25 * _SIZE, label, _SIZE)
        x += max(width, mono_width(label, _SIZE)) + _BESIDE
    return Piece(content, x - _BESIDE, _HIGH + 1.6 * _SIZE)
