"""Draws grids on a terminal: as numbers where they fit, else as shades, and several side by side.

With colour a shade is a background, and long grids have two rows on a line; without, it is a sign. A masked cell is 0 among
numbers, and else blank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Literal

import numpy as np
from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

from mhacli.record.arrays import Array
from mhacli.render.base.cells import FORBIDDEN, cell, ends_of, half_cells, levels, ramp_of, ticks
from mhacli.render.base.colours import EMPTY, NAN_SIGN
from mhacli.render.base.doc import Column, Grid
from mhacli.render.base.format import fitted, flowing
from mhacli.render.base.options import Screen, Selection, balanced
from mhacli.text.numbers import shown

Form = Literal["auto", "numbers", "shades"]

MAX_ROWS, MAX_LINES = 24, 40
"""The most rows of numbers, and the most lines of shades. Grids with more rows than the first have two of them on a line."""
_GAP, _WIDEST_NAME, _WIDEST_SHADE, _RULE = 2, 10, 8, 3


@dataclass(frozen=True, eq=False)
class _Panel:
    """A grid as numbers or as shades: the width of a cell, and the columns beside that have room. Tight weights from 1 on have a
    decimal less."""

    grid: Grid
    has_numbers: bool
    is_tight: bool = False
    size: int = 1
    beside: Sequence[Column[int]] = ()

    @cached_property
    def rows(self) -> Selection:
        """The rows that are shown."""
        n_rows = len(self.grid.rows)
        return balanced(n_rows, MAX_ROWS if self.has_numbers and not self.grid.has_all_rows else n_rows)

    @cached_property
    def label(self) -> int:
        """The columns of the names of rows. Shades stand behind a blank, numbers have one of their own."""
        width = max(map(cell_len, (self.grid.corner, *self.grid.rows)), default=0)
        return width + (width > 0 and not self.has_numbers)

    def width_beside(self, column: Column[int]) -> int:
        """The width of a column beside the cells, with a blank before it."""
        texts = [column.heading, *map(column.text, self.rows.shown)]
        return max(map(cell_len, texts)) + 1

    @property
    def around(self) -> int:
        """The columns beside the cells."""
        return self.label + sum(map(self.width_beside, self.beside))

    @property
    def width(self) -> int:
        """The columns of the whole grid with its title."""
        return max(self.around + self.size * len(self.grid.columns), cell_len(self.grid.title) + _RULE)

    def number(self, number: float, *, is_marked: bool = False) -> str:
        """A number with its star."""
        g = self.grid
        word = shown(number, g.unit, g.digits)
        if self.is_tight and word.lstrip("-")[:1].isdigit():
            word = shown(number, g.unit, (2 if g.digits is None else g.digits) - 1)
        return word if g.marked is None else word + ("*" if is_marked else " ")

    @property
    def least(self) -> int:
        """The least width of a cell: that of the widest number behind a blank, or of a shade. The widest weight is the largest or
        the smallest."""
        g = self.grid
        if not self.has_numbers:
            return 2 if len(g.rows) <= MAX_ROWS and any(g.columns) else 1
        numbers: Array = g.values[g.allowed]
        if g.unit == "weight" and len(numbers):  # a sum is NaN if any number is
            numbers = np.array([np.nanmax(numbers, initial=0.0), np.nanmin(numbers, initial=0.0), numbers.sum() * 0])
        return max((len(self.number(number)) for number in numbers.tolist()), default=1) + 1


def _longest(g: Grid) -> int:
    """The width of the longest name of a column."""
    return max(map(cell_len, g.columns))


def _narrowest(g: Grid, *, has_numbers: bool) -> _Panel:
    """A grid in its least width: with tight weights, and only the columns beside that always stay."""
    always = [column for column in g.beside if not column.drop]
    panel = _Panel(g, has_numbers, has_numbers and g.unit == "weight", beside=always)
    return replace(panel, size=panel.least)


def _widest(g: Grid, room: int, *, has_numbers: bool) -> _Panel:
    """A grid in a width: names and cells as wide as fit, and the columns beside that have room."""
    tight = _narrowest(g, has_numbers=has_numbers)
    loose = replace(tight, is_tight=False)
    whole = [replace(panel, beside=g.beside) for panel in (loose, tight)] if has_numbers else []
    for panel in (*whole, loose, tight):
        spare = (room - panel.around) // len(g.columns)
        if panel.least <= spare:
            break
    if has_numbers:
        names = min(_WIDEST_NAME, _longest(g)) + (g.marked is not None) + 1
        return replace(panel, size=max(panel.least, min(names, spare)))
    return replace(panel, size=max(1, min(_WIDEST_SHADE, _longest(g) + 1, spare)))


def grids(
    panels: Sequence[Grid],
    screen: Screen,
    *,
    form: Form = "auto",
    everything: bool = False,
    in_one_row: bool = False,
    most: int | None = None,
    n_more: int = 0,
    not_drawn: str = "not drawn (--all)",
) -> Iterator[Text]:
    """The lines of grids on a common scale, and what their shades and signs mean.

    Of more than `most` lines the first grids are drawn, and the others counted with `n_more`; with `everything` no column is
    left out. With `in_one_row` they are numbers only where all stand in one row.
    """
    of_numbers = form == "numbers"
    if form == "auto":  # a number is at least 3 wide
        narrow = [g for g in panels if 3 * len(g.columns) < screen.width]
        widths = [_narrowest(g, has_numbers=True).width for g in narrow]
        of_numbers = len(narrow) == len(panels) and max(widths, default=0) <= screen.width
        if in_one_row and of_numbers:
            of_numbers = len(_rows(panels, screen.width, of_numbers=True)) == 1
    if of_numbers:
        parts = [part for g in panels for part in _split(g, screen.width, everything=everything)]
    else:
        parts = [_pooled(g, screen, everything=everything) for g in panels]
    scales: dict[str, None] = dict.fromkeys(g.scale for g in parts)
    tops = {scale: max(g.top for g in parts if g.scale == scale) for scale in scales}
    n_lines, drawn = 0, list[_Panel]()
    for row in _rows(parts, screen.width, of_numbers=of_numbers):
        least = [_narrowest(g, has_numbers=of_numbers).width for g in row]
        spare = max(0, screen.width - sum(least) - _GAP * (len(row) - 1)) // len(row)
        of_row = [_widest(g, width + spare, has_numbers=of_numbers) for g, width in zip(row, least, strict=True)]
        lines = [*_side_by_side(of_row, tops, screen)]
        if drawn and most is not None and n_lines + len(lines) > most:
            break
        yield from lines
        drawn += of_row
        n_lines += len(lines)
    n_more += len(parts) - len(drawn)
    if n_more:
        yield Text(f"⋮ {n_more} more {not_drawn}", style="dim")
    caption = [*_caption(drawn, tops, screen)] if drawn else []
    if caption:
        yield flowing(caption, screen.width)


def _rows(parts: Sequence[Grid], width: int, *, of_numbers: bool) -> list[list[Grid]]:
    """The grids in as few rows as fit, evenly filled. Of grids with the same rows the first in a row names them."""
    rows: list[list[Grid]] = []
    for n_rows in range(1, len(parts) + 1):
        n = -(-len(parts) // n_rows)
        rows = [[*parts[start : start + n]] for start in range(0, len(parts), n)]
        rows = [[row[0], *(_unnamed(g) if g.rows is row[0].rows else g for g in row[1:])] for row in rows]
        least = [sum(_narrowest(g, has_numbers=of_numbers).width for g in row) for row in rows]
        if n == 1 or max(least) + _GAP * (n - 1) <= width:
            break
    return rows


def _unnamed(g: Grid) -> Grid:
    return replace(g, rows=[""] * len(g.rows), corner="")


def _side_by_side(panels: Sequence[_Panel], tops: Mapping[str, float], screen: Screen) -> Iterator[Text]:
    """The lines of some grids."""
    painted = [[*_painted(panel, tops[panel.grid.scale], screen)] for panel in panels]
    widths = [max(line.cell_len for line in lines) for lines in painted]
    for place, title in enumerate(panel.grid.title for panel in panels):
        if title:
            widths[place] = max(widths[place], cell_len(title) + _RULE) if len(panels) > 1 else screen.width
            rule = Text(title, style="bold", overflow="ellipsis", no_wrap=True)
            rule.append(" " + "─" * (widths[place] - cell_len(title) - 1), style="not bold dim")
            painted[place].insert(0, rule)
    for texts in zip_longest(*painted, fillvalue=Text()):
        line = Text(no_wrap=True)
        for place, text in enumerate(texts):
            line.append_text(text)
            if place < len(texts) - 1:
                line.append(" " * (widths[place] + _GAP - text.cell_len))
        if not screen.colour:
            line.rstrip()
        yield line


# -------------------------------------------------------------------------------------------------------- what fits


def _pooled(g: Grid, screen: Screen, *, everything: bool) -> Grid:
    """The grid with as many rows and columns as fit."""
    lines = len(g.rows) if everything else MAX_LINES * (2 if screen.colour else 1)
    room = screen.width - max(_Panel(g, False).label, 13)
    if g.smaller is None or (len(g.rows) <= lines and len(g.columns) <= room):
        return g
    return g.smaller(lines, max(1, room))


def _split(g: Grid, width: int, *, everything: bool) -> list[Grid]:
    """The grid with all columns that fit: the first and the last, or, with `everything`, all in several grids."""
    panel = _narrowest(g, has_numbers=True)
    if panel.width <= width:
        return [g]
    n = max(2, (width - panel.around) // panel.least - (not everything))  # a column more has what is between
    if not everything:
        return [_of_columns(g, balanced(len(g.columns), n))]
    starts = range(0, len(g.columns), n)
    return [_of_columns(g, Selection(tuple(range(start, min(start + n, len(g.columns)))), 0)) for start in starts]


def _of_columns(g: Grid, columns: Selection) -> Grid:
    """Some columns of a grid, and one for those between: their sum."""
    kept, at = [*columns.shown], columns.before
    part = replace(
        g,
        values=g.values[:, kept],
        allowed=g.allowed[:, kept],
        marked=None if g.marked is None else g.marked[:, kept],
        columns=[g.columns[place] for place in kept],
    )
    if not columns.hidden:
        return part
    between = slice(kept[at - 1] + 1, kept[at])
    meaning = f"… the sum of {columns.hidden} more (--all)"
    return replace(
        part,
        values=np.insert(part.values, at, g.values[:, between].sum(axis=1), axis=1),
        allowed=np.insert(part.allowed, at, g.allowed[:, between].any(axis=1), axis=1),
        marked=None if part.marked is None else np.insert(part.marked, at, False, axis=1),
        columns=[*part.columns[:at], "…", *part.columns[at:]],
        meaning=f"{g.meaning} · {meaning}" if g.meaning else meaning,
    )


# ----------------------------------------------------------------------------------------------------------- painting


def _painted(panel: _Panel, top: float, screen: Screen) -> Iterator[Text]:
    """The names of the columns, then a line for each row, or for two as half blocks."""
    g, label, rows = panel.grid, panel.label, panel.rows
    widths = [panel.width_beside(column) for column in panel.beside]
    above = "".join(f"{c.heading:>{width}}" for c, width in zip(panel.beside, widths, strict=True))
    yield _heading(panel).append(above, style="dim")
    is_halved = not panel.has_numbers and screen.colour and g.signs is None and len(g.rows) > MAX_ROWS
    scale = "linear" if panel.has_numbers and g.scale == "log" else g.scale
    cells = levels(g.values, g.allowed, scale, top).tolist()
    for number, row in enumerate(rows.shown):
        if rows.hidden and number == rows.before:
            yield Text(f"⋮ {rows.hidden} rows (--all)", style="dim")
        if is_halved and row % 2:
            continue
        line = Text()
        if label:
            line.append(g.rows[row] + " " * (label - cell_len(g.rows[row])), style="bold")
        if is_halved:
            lower = cells[row + 1] if row + 1 < len(cells) else None
            line.append_tokens(half_cells(cells[row], lower, ramp_of(g)))
        elif panel.has_numbers:
            line.append_tokens(_numbers(panel, row, cells[row], colour=screen.colour))
        else:
            line.append_tokens(_shades(panel, row, cells[row], colour=screen.colour))
        for column, width in zip(panel.beside, widths, strict=True):
            line.append_tokens([(f"{column.text(row):>{width}}", column.style(row))])
        yield line


def _heading(panel: _Panel) -> Text:
    """The names of the columns, or where they have no room some of their numbers."""
    g, size, names = panel.grid, panel.size, panel.grid.columns
    line = Text(f"{g.corner:<{panel.label}}", style="dim")
    if panel.has_numbers:
        star = " " * (g.marked is not None)
        words = [fitted(name, size - 1 - len(star)) + star for name in names]
        return line.append("".join(" " * (size - cell_len(word)) + word for word in words))
    longest = _longest(g)
    if size <= min(3, longest) or not longest:
        return line.append(ticks(g.places or range(len(names)), size, every=10 if size == 1 else 5))
    words = [fitted(name, size - 1) for name in names]
    return line.append("".join(word + " " * (size - cell_len(word)) for word in words))


def _shades(panel: _Panel, row: int, cells: list[int], *, colour: bool) -> Iterator[tuple[str, Style]]:
    """The cells of a row as signs or shades."""
    g, size = panel.grid, panel.size
    if g.signs is None:
        yield from (cell(level, size, colour=colour, ramp=ramp_of(g), gap=int(size > 3)) for level in cells)
        return
    for sign in g.signs[row]:
        yield sign
        yield " " * (size - 1), Style.null()


def _numbers(panel: _Panel, row: int, cells: list[int], *, colour: bool) -> Iterator[tuple[str, Style]]:
    """The cells of a row as numbers behind a blank."""
    g, size, null = panel.grid, panel.size, Style.null()
    masked = "" if g.scale == "change" else "0" if g.marked is None else "0 "
    marked = [False] * len(cells) if g.marked is None else g.marked[row].tolist()
    for level, number, is_marked in zip(cells, g.values[row].tolist(), marked, strict=True):
        if level == FORBIDDEN:
            yield f"{masked:>{size}}", EMPTY if colour else null
            continue
        word = panel.number(number, is_marked=is_marked)
        yield " ", null
        yield cell(level, size - 1, colour=colour, ramp=ramp_of(g), word=word)


# ------------------------------------------------------------------------------------------------------------ caption


def _caption(panels: Sequence[_Panel], tops: Mapping[str, float], screen: Screen) -> Iterator[Text]:
    """What a row is, the scales, and the signs that occur."""
    parts, of_numbers = [panel.grid for panel in panels], panels[0].has_numbers
    words = [*dict.fromkeys(g.meaning for g in parts if g.meaning)]
    words += ["* the row's maximum"] if of_numbers and any(g.marked is not None for g in parts) else []
    yield from (Text(word, style="dim") for word in words)
    shaded = [g for g in parts if g.signs is None]
    for scale in dict.fromkeys(g.scale for g in shaded):
        yield _scale([g for g in shaded if g.scale == scale], shaded, tops[scale], screen, of_numbers=of_numbers)
    signs = []
    if any(not g.allowed.all() and g.scale != "change" for g in shaded):
        signs.append("0 masked" if of_numbers else "a blank is masked")
    if any(bool(np.isnan(g.values[g.allowed]).any()) for g in parts):
        signs.append(f"{'nan' if of_numbers else NAN_SIGN} not a number")
    signs += dict.fromkeys(f"{c.heading} {c.meaning}" for panel in panels for c in panel.beside if c.meaning)
    yield from (Text(sign, style="dim") for sign in signs)


def _scale(of_scale: Sequence[Grid], parts: Sequence[Grid], top: float, screen: Screen, *, of_numbers: bool) -> Text:
    """The range of a scale with its shades, and of which grids it is if there are several."""
    g = of_scale[0]
    scale = "linear" if of_numbers and g.scale == "log" else g.scale
    low, high = ends_of(of_scale, top, scale, g.unit, g.digits)
    kind = "shade" if scale == "change" else f"shade {scale}"
    text = Text(f"{kind}, {low} … {high}", style="dim")
    if len(of_scale) < len(parts):
        text.append(f" in {' and '.join(each.title for each in of_scale)}")
    elif len(parts) > 1:
        text.append(" in all")
    if of_numbers:
        return text
    swatches = Text.assemble(*ramp_of(g).swatches(colour=screen.colour))
    is_upper = g.scale == "change" and low == "0"
    return text.append(": ").append_text(swatches[len(swatches) // 2 :] if is_upper else swatches)
