"""The picture of a head of a sequence, in cells of any size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from mhacli.io.data import Array, finite
from mhacli.numbers import shown
from mhacli.render.base.colours import glyph
from mhacli.render.base.grids import MASKED, cell, half_cells, levels
from mhacli.render.base.selection import DrawableHead
from mhacli.render.heads.head_map import KEY, QUERY, grid_of, head_map
from mhacli.text.escape import token_label, without_surrogates

if TYPE_CHECKING:  # a session makes pictures
    from .screen import Cell
    from .session import Session

TAKEN_SIGN = "–"
"""The sign of a removed sink's weight. `.00` would be a small weight."""
HALF = 1
"""The columns of a cell that is half a character high."""
TIGHT = 4
DECIMALS = {TIGHT: 2, 6: 2, 8: 4}
"""The decimals of weights in cells of so many columns. Behind a number that is not tight stands a
blank."""
Size = tuple[int, int]
"""How many tokens a cell stands for in both directions, and its columns."""


class Picture:
    """A head of a sequence: its map `base`, of which sinks are removed if they are hidden, also in
    blocks of several cells. `sizes` are those of cells from the smallest on.
    """

    def __init__(self, session: Session, head: DrawableHead, top: float) -> None:
        self.head = head
        self.sequence = session.sequence
        self.scale = session.scale
        self.top = top
        self.colour = session.colour
        whole = head_map(head, session.sequence)
        self.base = whole.without_sinks() if session.hides_sinks else whole
        self.map = cache(self.base.pooled)
        self.levels = cache(self._levels)
        self.grid = cache(
            lambda factor: grid_of(self.map(factor), "", scale=self.scale, top=self.top)
        )
        self.words = [tuple(map(token_label, text)) for text in self.base.texts]
        least, *wider = (HALF, 2, *DECIMALS) if self.colour else (2, 3, *DECIMALS)
        powers = range(max(self.base.weights.shape).bit_length(), -1, -1)
        self.sizes = [*((1 << power, least) for power in powers), *((1, width) for width in wider)]

    def _levels(self, factor: int) -> Array:
        """The cells as levels of 0 … 255. Removed cells look masked."""
        cells = self.map(factor)
        return levels(cells.weights, cells.is_open & ~cells.is_taken, self.scale, self.top)

    def cell_of(self, axis: int, place: int) -> int:
        """The row or column of a position, also beyond the ends."""
        return (place - self.base.first[axis]) // self.base.block

    def name(self, axis: int, row: int, factor: int = 1) -> str:
        """A row or column, or one of blocks of `factor` cells, in a sentence: `2 sat`, or
        `32–63`.
        """
        cells = self.map(factor)
        name = cells.name(axis, row)
        return f"{cells.place(axis, row)} {name}" if cells.block == 1 else name

    def matches(self, axis: int, typed: str, begin: int) -> list[int]:
        """The positions of tokens that contain the typed text in any case, from `begin` on; of a
        number, that position first.
        """
        if not typed:
            return []
        names = self.words[axis]
        places = [
            place
            for place, name in enumerate(names)
            if typed.casefold() in name.casefold() or typed == str(place)
        ]
        return sorted(places, key=lambda place: (typed != str(place), (place - begin) % len(names)))

    def row_document(self, row: int) -> Mapping[str, Any]:
        """The row as JSON values, schema `mha.row/1`: exact numbers without removed keys; null if
        not finite.
        """
        base = self.base
        head = self.head
        layer = head.layer.inspected
        arrays = head.record.arrays
        hides_sinks = base.taken is not None
        exact = float if hides_sinks or "pattern" not in arrays else arrays["pattern"].dtype.type
        share = finite(float(base.sink_weights[row]))
        return {
            "schema": "mha.row/1",
            "layer": layer.layer if head.layer.label else None,
            "attention": layer.name if head.layer.label else None,
            "head": head.statistics.head,
            "kind": head.statistics.kind,
            "sequence": self.sequence,
            "query": self._json_place(QUERY, row),
            "entropy": None if base.entropy is None else finite(float(base.entropy[row])),
            "sinks": {"places": [*base.sinks], "share": share, "removed": hides_sinks},
            "learned_sink": None if base.learned is None else finite(float(base.learned[row])),
            "shares": "renormalised without sinks" if hides_sinks else "as computed",
            "keys": [  # with as few digits as the dtype needs
                {**self._json_place(KEY, column), "share": finite(float(str(exact(weight))))}
                for column, weight in sorted(base.strongest(row))
            ],
        }

    def _json_place(self, axis: int, row: int) -> dict[str, Any]:
        """The position of a row or column with its token, or the first and last of a block."""
        places = self.base.places(axis, row)
        if self.base.block > 1:
            return {"first": places[0], "last": places[-1]}
        return {"place": places[0], "token": without_surrogates(self.base.texts[axis][places[0]])}

    # ---------------------------------------------------------------------------------------- cells

    def largest(self, lines: int, columns: int) -> int:
        """The place of the largest size in which all cells fit, or of the smallest size."""
        n_rows, n_columns = self.base.weights.shape
        fitting = [
            place
            for place, (factor, width) in enumerate(self.sizes)
            if n_rows <= lines * factor * per_line(width) and n_columns <= columns // width * factor
        ]
        return max(fitting, default=0)

    def cells(self, size: Size, rows: range, columns: range) -> list[Cell]:
        """A line of cells of a size: one row, or two in cells that are half a character high.
        Numbers stand without colour behind the sign of their shade; `0` is masked, `–` removed.
        """
        factor, width = size
        part = slice(columns.start, columns.stop)
        upper, *lower = self.levels(factor)[rows.start : rows.stop, part].tolist()
        if width == HALF:
            return [*half_cells(upper, lower[0] if lower else None)]
        if width not in DECIMALS:
            return [cell(level, width, colour=self.colour) for level in upper]
        grid = self.grid(factor)
        weights = grid.values[rows.start, part].tolist()
        allowed = grid.allowed[rows.start, part].tolist()
        cells = []
        for level, weight, is_open in zip(upper, weights, allowed, strict=True):
            word = shown(weight, "weight", DECIMALS[width])
            if level == MASKED:
                word = TAKEN_SIGN if is_open else "0"
            elif level >= 0 and width > TIGHT and not self.colour:
                word = glyph(level) + word
            cells.append(cell(level, width, colour=self.colour, word=word, gap=int(width > TIGHT)))
        return cells

    def thumbnail(self, lines: int, columns: int) -> Iterator[list[Cell]]:
        """The whole picture, in the largest cells that fit."""
        size = self.sizes[self.largest(lines, columns)]
        factor, width = size
        n_rows, n_columns = self.levels(factor).shape
        step = per_line(width)
        for begin in range(0, n_rows, step):
            yield self.cells(size, range(begin, min(begin + step, n_rows)), range(n_columns))


def per_line(width: int) -> int:
    """The rows of cells of a width in a line of characters."""
    return 2 if width == HALF else 1
