"""The maps of a head of two records on common axes: each token of either text has its row and its column, whoever has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from mhacli.render.base.cells import FORBIDDEN
from mhacli.render.heads.head_map import HeadMap, sums
from mhacli.results.diff.result import Match, TextDifference
from mhacli.results.record.arrays import Array


@dataclass(frozen=True)
class GridLine:
    """A row or column of both maps: its index in that of A and of B, −1 where it has none, and whether both mean the same, or one
    token replaces the other, `is_replaced`."""

    a: int
    b: int
    is_same: bool
    is_replaced: bool = False

    @property
    def is_compared(self) -> bool:
        """Whether the numbers of both are compared."""
        return self.is_same or self.is_replaced


@dataclass(frozen=True)
class Grids:
    """Three pictures on the same axes: shares of A and of B `[row, column]`, `FORBIDDEN` where no cell may be attended or where
    there is none; and `change`, B − A, NaN where nothing is compared, infinite where one alone is no number.

    `rows` and `columns` are the names of tokens or blocks, `row_places` and `column_places` where those begin in A. A cell stands
    for `block` × `block` tokens: in it is the largest share, or the change that is largest either way.
    """

    a: Array
    b: Array
    change: Array
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    row_places: tuple[int, ...]
    column_places: tuple[int, ...]
    block: int

    def fitting(self, rows: int, columns: int) -> Grids:
        """In blocks large enough that no more than `rows` × `columns` are needed."""
        n_rows, n_columns = self.a.shape
        block = max(1, -(-n_rows // max(1, rows)), -(-n_columns // max(1, columns)))
        if block == 1:
            return self
        return replace(
            self,
            a=_extremes(np.maximum, self.a, block),
            b=_extremes(np.maximum, self.b, block),
            change=_largest_change(self.change, block),
            rows=self.rows[::block],
            columns=self.columns[::block],
            row_places=self.row_places[::block],
            column_places=self.column_places[::block],
            block=self.block * block,
        )


def _extremes(ufunc: np.ufunc, cells: Array, block: int) -> Array:
    for axis in (0, 1):
        cells = ufunc.reduceat(cells, np.arange(0, cells.shape[axis], block), axis=axis)
    return cells


def _largest_change(change: Array, block: int) -> Array:
    """Of each block the change that is largest either way; NaN where none is known."""
    is_known = ~np.isnan(change)
    up = _extremes(np.maximum, np.where(is_known, change, -np.inf), block)
    down = _extremes(np.minimum, np.where(is_known, change, np.inf), block)
    n_known = sums(sums(is_known.astype(int), block), block, axis=1)
    return np.where(n_known > 0, np.where(-down > up, down, up), np.nan)


def grids(a: HeadMap, b: HeadMap, queries: TextDifference, keys: TextDifference) -> Grids | None:
    """Both maps and their difference; None where blocks of tokens cannot lie beside each other."""
    rows, columns = _lines(a, b, queries, 0), _lines(a, b, keys, 1)
    if rows is None or columns is None:
        return None
    one = _spread(a.shares, [line.a for line in rows], [line.a for line in columns])
    other = _spread(b.shares, [line.b for line in rows], [line.b for line in columns])
    same = np.outer([line.is_compared for line in rows], [line.is_compared for line in columns])
    is_open = (one != FORBIDDEN) | (other != FORBIDDEN)
    change = np.where(other == FORBIDDEN, 0.0, other) - np.where(one == FORBIDDEN, 0.0, one)
    n_nan = np.isnan(one).astype(int) + np.isnan(other)
    change = np.select([n_nan == 1, n_nan == 2], [np.inf, 0.0], change)
    return Grids(
        a=one,
        b=other,
        change=np.where(same & is_open, change, np.nan),
        rows=tuple(_name(line, a.query_name, b.query_name) for line in rows),
        columns=tuple(_name(line, a.key_name, b.key_name) for line in columns),
        row_places=tuple(_place(line, a, 0) for line in rows),
        column_places=tuple(_place(line, a, 1) for line in columns),
        block=a.block,
    )


def _name(line: GridLine, of_a: Callable[[int], str], of_b: Callable[[int], str]) -> str:
    if line.is_same or line.b < 0:
        return of_a(line.a)
    return of_b(line.b) if line.a < 0 else f"{of_a(line.a)}|{of_b(line.b)}"


def _place(line: GridLine, drawn: HeadMap, axis: int) -> int:
    """The place of a line's first token in A; negative for padding, and for what B alone has."""
    return -1 if line.a < 0 else line.a * drawn.block + drawn.first[axis]


def _spread(shares: Array, rows: list[int], columns: list[int]) -> Array:
    """The shares at these rows and columns, `FORBIDDEN` at −1."""
    padded = np.pad(shares, ((0, 1), (0, 1)), constant_values=FORBIDDEN)
    found: Array = padded[np.ix_(rows, columns)]
    return found


def _lines(a: HeadMap, b: HeadMap, text: TextDifference, axis: int) -> tuple[GridLine, ...] | None:
    if a.block == b.block == 1 and a.first[axis] == b.first[axis] == 0:
        return tuple(_token_lines(text))
    if (a.block, a.first[axis], a.shares.shape[axis]) != (b.block, b.first[axis], b.shares.shape[axis]):
        return None
    return tuple(_block_lines(a, text, axis))


def _token_lines(text: TextDifference) -> Iterator[GridLine]:
    """Tokens that took each other's place share a line, the others have their own."""
    a = b = 0
    for match in (*text.matches, Match(text.n_a, text.n_b, 0)):
        is_replaced = match.a - a == match.b - b
        for n in range(max(match.a - a, match.b - b)):
            places = a + n if a + n < match.a else -1, b + n if b + n < match.b else -1
            yield GridLine(*places, is_same=False, is_replaced=is_replaced)
        yield from (GridLine(match.a + n, match.b + n, True) for n in range(match.length))
        a, b = match.a + match.length, match.b + match.length


def _block_lines(drawn: HeadMap, text: TextDifference, axis: int) -> Iterator[GridLine]:
    """Blocks mean the same where each of their tokens, or what replaces it, stands in the same place of both texts; padding of
    both does."""
    first = drawn.first[axis]
    is_same = np.ones(drawn.block * drawn.shares.shape[axis], bool)
    is_same[-first : -first + max(text.n_a, text.n_b)] = False
    for match in text.compared:
        if match.a == match.b:
            is_same[match.a - first : match.a - first + match.length] = True
    blocks = is_same.reshape(-1, drawn.block)
    yield from (GridLine(index, index, bool(block.all())) for index, block in enumerate(blocks))
