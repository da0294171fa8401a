"""A cell of a map: its colour, the number in it, and what a pointer is told about it."""

from __future__ import annotations

import math

import numpy as np

from mhacli.render.base.cells import FORBIDDEN
from mhacli.render.base.format import share_text
from mhacli.render.figures.heads.subject import Subject
from mhacli.render.figures.svg.colour_scale import colours_of, sink_colours
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
