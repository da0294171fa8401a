"""What is stated and what is seen, as pictures of cells: the difference in one colour."""

import numpy as np

from mhacli.io.data import Array
from mhacli.render.base.doc import Grid
from mhacli.render.figures.grids import GridRow, grids
from mhacli.render.figures.svg import Piece, lines

from .result import Examination, SeenCells

_SIDE = 300.0
"""The longest side of a picture, in pixels."""
_MOST = 8
"""The most matrices that are drawn."""


def pictures(examination: Examination) -> list[Piece]:
    """The cells of each layer and head, stated, measured and different; nothing without them."""
    every = examination.sees[:_MOST]
    if not every:
        return []
    words = "rows: queries; columns: keys; yellow: seen; pink: seen and not stated, or the reverse"
    of_all = "as a whole" if every[1:] else ""
    rows = [GridRow(seen.words or of_all, _panels(seen)) for seen in every]
    return [lines([words]), grids(rows, _SIDE)]


def _panels(seen: SeenCells) -> list[Grid]:
    measured = _matrix(seen.measured)
    nothing = np.zeros_like(measured)
    drawn = _grid("measured", measured, nothing)
    if not seen.stated:
        return [drawn]
    stated = _matrix(seen.stated)
    apart = _grid("difference", nothing, stated != measured)
    return [_grid("stated", stated, nothing), drawn, apart]


def _matrix(rows: tuple[str, ...]) -> Array:
    return np.array([[sign == "1" for sign in row] for row in rows])


def _grid(title: str, cells: Array, apart: Array) -> Grid:
    """A matrix of 0 and 1, with the cells that are apart from another one in a colour."""
    n_rows, n_columns = cells.shape
    first = n_columns - n_rows

    def about(row: int, key: int) -> str:
        word = "seen" if cells[row, key] else "hidden"
        if apart[row, key]:
            word = "wrong"
        return f"query {row + first} → key {key}: {word}"

    return Grid(
        title=title,
        values=cells.astype(float),
        allowed=np.ones_like(cells),
        rows=[str(first + row) for row in range(n_rows)],
        columns=[str(key) for key in range(n_columns)],
        top=1.0,
        digits=0,
        taken=apart,
        about=about,
    )
