"""Draws grids as SVG: side by side and in rows, on one scale, with the names of their rows and
columns, and the scale.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mhacli.io.data import Array
from mhacli.numbers import shown
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

from .svg import (
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

ROOMY = 9.5
"""The least size of cells at which every row and column has its name."""
_LARGEST = 42.0
"""The largest side of a cell."""
_LEAST_SHAPE = 14.0
"""The least width of a cell that is a rectangle with a tooltip; smaller ones are pixels of an
image."""
_WIDEST = 64.0
"""The largest width that a number gives to a cell."""
_LEAST_HEIGHT = 14.0
"""The least height of few rows with many columns."""
_GAP = 10.0
"""The gap between grids."""
_SIZE = 10.0
"""The size of titles."""
_LONGEST = 18
"""The most characters of a name."""
_MASKED_COLOUR = (228, 228, 228)
"""The colour of masked cells: lighter than most of the ramp, without a hue."""
_BLANK = (255, 255, 255)
"""The colour of masked cells among changes."""


class GridRow(NamedTuple):
    """Grids side by side, with a name before them."""

    name: str
    panels: Sequence[Grid]


class _CellSize(NamedTuple):
    """The width and height of cells, and the size of the numbers in them: 0 if not all have
    room.
    """

    width: float
    height: float
    number: float = 0.0


def grids(rows: Sequence[GridRow], side: float) -> Piece:
    """Rows of grids, each grid at most about `side` large."""
    panels = [g for row in rows for g in row.panels]
    first = panels[0]
    size = _cell_size(panels, side)
    is_alike = all((g.rows, g.columns) == (first.rows, first.columns) for g in panels)
    left = _row_names(first.rows, size.height) if is_alike else Piece()
    top = _column_names(first.columns, size.width) if is_alike else Piece()
    above = top.height + (_SIZE + 5 if any(g.title for g in panels) else 0.0)
    label = max(mono_width(f"{row.name}  ", _SIZE) if row.name else 0.0 for row in rows)
    start = max(label + left.width, mono_width(f"{first.corner} ", _SIZE))
    widths = [max(len(g.columns) * size.width, mono_width(g.title, _SIZE)) for g in panels]
    step = max(top.width, *widths) + _GAP

    y = above
    content = ""
    if first.corner:
        content = written(start - 6, y - 6, first.corner, _SIZE, fill=SOFT, text_anchor="end")
    for row in rows:
        height = max(len(g.rows) for g in row.panels) * size.height
        if row.name:
            middle = y + height / 2 + 0.35 * _SIZE
            content += written(label - 8, middle, row.name, _SIZE, text_anchor="end")
        content += placed(left, start - left.width, y)
        for place, g in enumerate(row.panels):
            title = written(0, -top.height - 5, g.title, _SIZE) if g.title else ""
            parts = title + placed(top, 0, -top.height) + _cells(g, size)
            at = f"translate({value_text(start + place * step)} {value_text(y)})"
            content += element("g", parts, tooltip=g.meaning, transform=at)
        y += height + _GAP + above
    width = start + max(len(row.panels) for row in rows) * step - _GAP
    return Piece(content, width, y - _GAP - above)


def _cell_size(panels: Sequence[Grid], side: float) -> _CellSize:
    """The common size of the cells of some grids."""
    n_rows = max(len(g.values) for g in panels)
    n_columns = max(g.values.shape[1] for g in panels)
    width = height = max(1.0, min(_LARGEST, side // max(n_rows, n_columns)))
    if 4 * n_rows < n_columns:
        height = max(height, _LEAST_HEIGHT)
    if width >= _LEAST_SHAPE:
        number = min(11.0, 3 + width / 5)
        widest = max(len(_words(g, *at)[0]) for g in panels for at in np.ndindex(g.values.shape))
        needed = mono_width("0" * widest, number) + 5
        if needed <= _WIDEST:
            return _CellSize(max(width, needed), height, number)
    return _CellSize(width, height)


def _cells(g: Grid, size: _CellSize) -> str:
    """The cells of a grid in a frame, each with its tooltip, and its number if it fits."""
    shades = levels(g.values, g.allowed, g.scale, g.top)
    colours: Array = np.array(ramp_of(g).colours, np.uint8)[np.clip(shades, 0, None)]
    colours[shades == NOT_A_NUMBER] = UNKNOWN
    if g.taken is not None:
        colours[g.taken] = SINK
    colours[shades == MASKED] = _BLANK if g.scale == "change" else _MASKED_COLOUR
    wide, high, _ = size
    if wide < _LEAST_SHAPE:
        content = image(colours, (wide, high))
    else:
        content = "".join(
            _cell(g, row, column, colours[row, column].tolist(), size)
            for row, column in np.ndindex(shades.shape)
        )
    n_rows, n_columns = shades.shape
    return content + rectangle(
        0, 0, n_columns * wide, n_rows * high, "none", stroke=FAINT, stroke_width=0.8
    )


def _cell(g: Grid, row: int, column: int, colour: Sequence[int], size: _CellSize) -> str:
    """A cell with its tooltip, and its number if it fits; empty without a tooltip."""
    wide, high, number_size = size
    number, words = _words(g, row, column)
    tooltip = f"{g.rows[row]} → {g.columns[column]}: {words}"
    if g.about:
        tooltip = g.about(row, column)
        if not tooltip:
            return ""
    x = column * wide
    y = row * high
    shape = rectangle(
        x, y, wide, high, hex_of(colour), tooltip=tooltip, shape_rendering="crispEdges"
    )
    if not number_size:
        return shape
    ink = ink_on(colour) if g.allowed[row, column] else SOFT
    # the number ignores the pointer, so that the tooltip shows
    return shape + written(
        x + wide / 2,
        y + high / 2 + 0.35 * number_size,
        number,
        number_size,
        fill=ink,
        text_anchor="middle",
        pointer_events="none",
    )


def _words(g: Grid, row: int, column: int) -> tuple[str, str]:
    """The number in a cell, `0` if masked, unlike `.00`, and what its tooltip says: all digits of a
    float32.
    """
    value = float(g.values[row, column])
    if not g.allowed[row, column]:
        return "0" if g.scale != "change" else "", "masked"
    if g.taken is not None and g.taken[row, column]:
        return "–", "a sink, taken out"
    if math.isnan(value):
        return "?", "not a number"
    return shown(value, g.unit, g.digits), f"{value:.6g}"


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
        x = (column + 0.5) * pitch
        y = height - 5
        direction = {"text_anchor": "middle"}
        if not is_level:
            x += 0.35 * size
            direction = {"transform": f"rotate(-90 {value_text(x)} {value_text(y)})"}
        content += written(x, y, texts[column], size, **direction)
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

_BAR = 220.0
"""The width of the ramp."""
_HIGH = 12.0
"""The height of the ramp and the other colours."""
_BESIDE = 22.0
"""The gap between them."""


def legend(panels: Sequence[Grid], what: str) -> Piece:
    """The ramp with its range and what it is of, and the other colours that occur."""
    colours = [ramp_of(panels[0]).colours[level] for level in swatch_levels(panels)]
    stops = [
        element("stop", offset=f"{100 * step / (len(colours) - 1):g}%", stop_color=hex_of(colour))
        for step, colour in enumerate(colours)
    ]
    entries = [("url(#scale)", _BAR, f"{what}: {scale_words(panels)}")]
    if panels[0].scale != "change" and not all(g.allowed.all() for g in panels):
        entries.append((hex_of(_MASKED_COLOUR), _HIGH, "masked"))
    if any(np.isnan(g.visible).any() for g in panels):
        entries.append((hex_of(UNKNOWN), _HIGH, "not a number"))
    if any(g.taken is not None and g.taken.any() for g in panels):
        entries.append((hex_of(SINK), _HIGH, "sink, taken out"))
    content = element("defs", element("linearGradient", *stops, id="scale"))
    x = 0.0
    for fill, width, label in entries:
        content += rectangle(x, 0, width, _HIGH, fill, stroke=FAINT, stroke_width=0.5)
        content += written(x, _HIGH + 1.25 * _SIZE, label, _SIZE)
        x += max(width, mono_width(label, _SIZE)) + _BESIDE
    return Piece(content, x - _BESIDE, _HIGH + 1.6 * _SIZE)
