"""The map of a head in a picture: its cells, their colours and numbers, and what a pointer is told about each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mhacli.render.base.cells import FORBIDDEN
from mhacli.render.base.format import share_text
from mhacli.render.figures.scales import colours_of, hex_of, sink_colours
from mhacli.render.figures.subject import Subject
from mhacli.render.figures.svg import FAINT, rectangle
from mhacli.results.record.arrays import Array

DIGITS = 6
"""Of a share that is told to a pointer: what a float32 holds."""


def cell_colours(one: Subject, levels: Array) -> Array:
    """The colours of the cells, `[row, column, 3]`; of sinks that are hidden those of what they got."""
    colours = colours_of(levels)
    columns = [*one.hidden_columns]
    is_open = one.whole.is_open[:, columns]
    of_sinks = sink_colours(one.whole.of_sinks[:, columns])
    colours[:, columns] = np.where(is_open[..., None], of_sinks, colours[:, columns])
    return colours


def cell_share(one: Subject, row: int, column: int) -> float:
    """The share of a cell that is drawn; of a sink that is hidden what it got."""
    shown = one.whole if column in one.hidden_columns else one.shown
    return float(shown.shares[row, column])


def cell_text(share: float, precision: int) -> str:
    """The number of a cell: `0` where nothing may be attended, which looks unlike `.00`."""
    return "0" if share == FORBIDDEN else "?" if math.isnan(share) else share_text(share, precision)


def cell_said(one: Subject, row: int, column: int) -> str:
    """What a pointer is told about a cell: `cat → the: 0.170927`."""
    share = cell_share(one, row, column)
    told = "not a number" if math.isnan(share) else f"{share:.{DIGITS}g}"
    told += ", a sink, taken out" if column in one.hidden_columns else ""
    names = f"{one.query_name(row)} → {one.shown.key_name(column)}"
    return f"{names}: {'not allowed' if share == FORBIDDEN else told}"


def cell_shape(one: Subject, at: tuple[int, int], colour: Sequence[int], cell: tuple[float, float]) -> str:
    """A cell as a shape of that width and height, which tells a pointer its share."""
    (row, column), (width, height) = at, cell
    said = cell_said(one, row, column)
    return rectangle(column * width, row * height, width, height, hex_of(colour), said, shape_rendering="crispEdges")


def map_frame(width: float, height: float) -> str:
    """The line around a map."""
    return rectangle(0, 0, width, height, "none", stroke=FAINT, stroke_width=0.8)
