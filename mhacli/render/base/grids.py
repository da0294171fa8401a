"""Draws grids on a terminal: as numbers where they fit, else as shades, and several side by side.

With colour a shade is a background, and long grids have two rows on a line; without, it is a sign. A masked cell is 0 among
numbers, and else blank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

import numpy as np
from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

from mhacli.record.arrays import Array
from mhacli.render.base.cells import (
    DECADES,
    FORBIDDEN,
    cell,
    half_cells,
    levels_of,
    ramp_of,
    ticks,
)
from mhacli.render.base.colours import EMPTY, NAN_SIGN
from mhacli.render.base.doc import Column, Grid, shown
from mhacli.render.base.format import fitted, flowing, number_text
from mhacli.render.base.options import Screen, Selection, balanced

Form = Literal["auto", "numbers", "shades"]

MAX_ROWS, MAX_LINES = 24, 40
"""The most rows of numbers, and the most lines of shades. Grids with more rows than the first have two of them on a line."""
_GAP, _WIDEST_NAME, _WIDEST_SHADE, _RULE = 2, 10, 8, 3
_Least = Callable[[Grid], int]


@dataclass(frozen=True)
class _Layout:
    """A grid with the width of a cell, whether its numbers are tight (None: it has shades), and the columns beside that have
    room."""

    grid: Grid
    size: int
    is_tight: bool | None
    beside: Sequence[Column[int]]


def grids(
    panels: Sequence[Grid],
    screen: Screen,
    *,
    form: Form = "auto",
    everything: bool = False,
    most: int | None = None,
    n_more: int = 0,
    not_drawn: str = "not drawn (--all)",
) -> Iterator[Text]:
    """The lines of grids on a common scale, and what their shades and signs mean.

    Of more than `most` lines the first grids are drawn, and the others counted with `n_more`; with `everything` no column is
    left out.
    """
    panels = [_short_named(g, screen.width // 3) for g in panels]
    if form == "numbers" or (form == "auto" and all(are_numbers_narrow(g, screen.width) for g in panels)):
        of_numbers = True
        parts = [part for g in panels for part in _parts(g, screen.width, everything=everything)]
        least: _Least = _least_of_numbers
    else:
        of_numbers = False
        parts = [_pooled(g, screen, everything=everything) for g in panels]
        least = _least_of_shades(screen.width)
    scales: dict[str, None] = dict.fromkeys(g.scale for g in parts)
    tops = {scale: max(g.top for g in parts if g.scale == scale) for scale in scales}
    n_lines = n_shown = 0
    layouts: list[_Layout] = []
    for row in _rows(parts, least, screen.width):
        spare = max(0, screen.width - sum(map(least, row)) - _GAP * (len(row) - 1)) // len(row)
        of_row = [_layout(g, least(g) + spare, of_numbers=of_numbers) for g in row]
        lines = [*_side_by_side(of_row, tops, screen)]
        if n_shown and most is not None and n_lines + len(lines) > most:
            break
        yield from lines
        layouts += of_row
        n_lines += len(lines)
        n_shown += len(row)
    n_more += len(parts) - n_shown
    if n_more:
        yield Text(f"⋮ {n_more} more {not_drawn}", style="dim")
    caption = [*_caption(layouts, tops, screen)] if layouts else []
    if caption:
        yield flowing(caption, screen.width)


def _rows(parts: Sequence[Grid], least: _Least, width: int) -> list[list[Grid]]:
    """The grids in as few rows as fit, evenly filled. Of grids with the same rows the first in a row names them."""
    rows: list[list[Grid]] = []
    for n_rows in range(1, len(parts) + 1):
        n = -(-len(parts) // n_rows)
        rows = [[*parts[start : start + n]] for start in range(0, len(parts), n)]
        rows = [[g if g is row[0] or g.rows is not row[0].rows else _unnamed(g) for g in row] for row in rows]
        if n == 1 or all(sum(map(least, row)) + _GAP * (len(row) - 1) <= width for row in rows):
            break
    return rows


def _short_named(g: Grid, most: int) -> Grid:
    """The grid with names of rows of at most so many columns."""
    is_short = all(cell_len(name) <= most for name in g.rows)
    return g if is_short else replace(g, rows=[fitted(name, most) for name in g.rows])


def _unnamed(g: Grid) -> Grid:
    return replace(g, rows=[""] * len(g.rows), corner="")


def _side_by_side(layouts: Sequence[_Layout], tops: Mapping[str, float], screen: Screen) -> Iterator[Text]:
    """The lines of some grids."""
    painted = [[*_painted(each, tops[each.grid.scale], screen)] for each in layouts]
    widths = [max(line.cell_len for line in lines) for lines in painted]
    for place, title in enumerate(each.grid.title for each in layouts):
        if title:
            widths[place] = max(widths[place], cell_len(title) + _RULE) if len(layouts) > 1 else screen.width
            rule = Text(title, style="bold", overflow="ellipsis", no_wrap=True)
            painted[place].insert(
                0, rule.append(" " + "─" * (widths[place] - cell_len(title) - 1), style="not bold dim")
            )
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


def _label(g: Grid) -> int:
    """The columns of the names of rows, with a blank behind them."""
    width = max(map(cell_len, (g.corner, *g.rows)), default=0)
    return width and width + 1


def _longest(g: Grid) -> int:
    """The width of the longest name of a column, of one or two lines."""
    return max(cell_len(line) for name in g.columns for line in name.split("\n"))


def _shown_rows(g: Grid, *, of_numbers: bool) -> Selection:
    return balanced(len(g.rows), len(g.rows) if g.has_all_rows or not of_numbers else MAX_ROWS)


def _beside_width(g: Grid, beside: Sequence[Column[int]], *, of_numbers: bool) -> int:
    rows = _shown_rows(g, of_numbers=of_numbers).shown
    return sum(max(map(cell_len, (c.heading, *map(c.text, rows)))) + 1 for c in beside)


def _text(g: Grid, number: float, *, is_marked: bool, is_tight: bool) -> str:
    """A number with its star. If `is_tight`, weights from 1 on have a decimal less."""
    word = shown(number, g.unit, g.digits)
    if is_tight and word.lstrip("-")[:1].isdigit():
        word = shown(number, g.unit, (g.digits if g.digits is not None else 2) - 1)
    return word if g.marked is None else word + ("*" if is_marked else " ")


def _widest(g: Grid, *, is_tight: bool) -> int:
    """The width of the widest number, and of the blank before it. The widest weight is the largest or the smallest."""
    numbers: Array = g.values[g.allowed]
    if g.unit == "weight" and len(numbers):  # a sum is NaN if any number is
        numbers = np.array([np.nanmax(numbers, initial=0.0), np.nanmin(numbers, initial=0.0), numbers.sum() * 0])
    texts = (_text(g, number, is_marked=False, is_tight=is_tight) for number in numbers.tolist())
    return max(map(len, texts), default=1) + 1


def are_numbers_narrow(g: Grid, width: int) -> bool:
    """Whether all columns fit as numbers, whose least width is 3."""
    return 3 * len(g.columns) < width and _least_of_numbers(g) <= width


def _least_of_numbers(g: Grid) -> int:
    """The least width of a grid as numbers."""
    beside = _beside_width(g, [c for c in g.beside if not c.drop], of_numbers=True)
    cells = _widest(g, is_tight=g.unit == "weight") * len(g.columns)
    return max(_label(g) - 1 + cells + beside, cell_len(g.title) + _RULE)


def _least_of_shades(width: int) -> _Least:
    def least(g: Grid) -> int:
        label = _label(g) + _beside_width(g, [c for c in g.beside if not c.drop], of_numbers=False)
        is_small = len(g.rows) <= MAX_ROWS and label + 2 * len(g.columns) <= width and any(g.columns)
        return max(label + (2 if is_small else 1) * len(g.columns), cell_len(g.title) + _RULE)

    return least


def _pooled(g: Grid, screen: Screen, *, everything: bool) -> Grid:
    """The grid with as many rows and columns as fit."""
    lines = len(g.rows) if everything else MAX_LINES * (2 if screen.colour else 1)
    room = screen.width - max(_label(g), 13)
    if g.smaller is None or (len(g.rows) <= lines and len(g.columns) <= room):
        return g
    return g.smaller(lines, max(1, room))


def _parts(g: Grid, width: int, *, everything: bool) -> list[Grid]:
    """The grid with all columns that fit: the first and the last, or, with `everything`, all in several grids."""
    if _least_of_numbers(g) <= width:
        return [g]
    beside = [c for c in g.beside if not c.drop]
    room = width - _label(g) + 1 - _beside_width(g, beside, of_numbers=True)
    n = max(2, room // _widest(g, is_tight=g.unit == "weight") - (not everything))  # a column more has what is between
    if not everything:
        return [_of_columns(g, balanced(len(g.columns), n))]
    starts = range(0, len(g.columns), n)
    return [_of_columns(g, Selection(tuple(range(start, min(start + n, len(g.columns)))), 0)) for start in starts]


def _of_columns(g: Grid, columns: Selection) -> Grid:
    """Some columns of a grid, and one for those between: their sum."""
    kept, at = [*columns.shown], columns.before
    values, allowed, names = g.values[:, kept], g.allowed[:, kept], [g.columns[place] for place in kept]
    marked = None if g.marked is None else g.marked[:, kept]
    if columns.hidden:
        between = slice(kept[at - 1] + 1, kept[at])
        values = np.insert(values, at, g.values[:, between].sum(axis=1), axis=1)
        allowed = np.insert(allowed, at, g.allowed[:, between].any(axis=1), axis=1)
        marked = None if marked is None else np.insert(marked, at, False, axis=1)
        names.insert(at, "…")
        g = replace(g, meaning=" · ".join(filter(None, [g.meaning, f"… the sum of {columns.hidden} more (--all)"])))
    return replace(g, values=values, allowed=allowed, marked=marked, columns=names)


# ----------------------------------------------------------------------------------------------------------- painting


def _layout(g: Grid, room: int, *, of_numbers: bool) -> _Layout:
    """The layout in a width: names and cells as wide as fit, and the columns beside that have room."""
    always, label = [c for c in g.beside if not c.drop], _label(g)
    if not of_numbers:
        left = room - label - _beside_width(g, always, of_numbers=False)
        size = min(_WIDEST_SHADE, _longest(g) + 1, left // len(g.columns))
        return _Layout(g, max(1, size), None, always)
    is_weight = g.unit == "weight"
    for is_tight, beside in ((False, [*g.beside]), (is_weight, [*g.beside]), (False, always), (is_weight, always)):
        left = room - label + 1 - _beside_width(g, beside, of_numbers=True)
        least = _widest(g, is_tight=is_tight)
        if least * len(g.columns) <= left:
            break
    names = min(_WIDEST_NAME, _longest(g)) + (g.marked is not None) + 1
    return _Layout(g, max(least, min(names, left // len(g.columns))), is_tight, beside)


def _painted(layout: _Layout, top: float, screen: Screen) -> Iterator[Text]:
    """The names of the columns, then a line for each row, or for two as half blocks."""
    g, size, beside, of_numbers = layout.grid, layout.size, layout.beside, layout.is_tight is not None
    label, rows = _label(g), _shown_rows(g, of_numbers=of_numbers)
    widths = [_beside_width(g, [c], of_numbers=of_numbers) - 1 for c in beside]
    above = "".join(f" {c.heading:>{width}}" for c, width in zip(beside, widths, strict=True))
    upper = [name.partition("\n")[0] for name in g.columns]
    if upper != [*g.columns]:
        yield _heading(replace(g, columns=upper, corner=""), size, label, of_numbers=of_numbers)
        g = replace(g, columns=[name.partition("\n")[2] for name in g.columns])
    yield _heading(g, size, label, of_numbers=of_numbers).append(above, style="dim")
    is_halved = not of_numbers and screen.colour and g.signs is None and len(g.rows) > MAX_ROWS
    cells = levels_of(g, top, is_linear=of_numbers).astype(int).tolist()
    for number, row in enumerate(rows.shown):
        if rows.hidden and number == rows.before:
            yield Text(f"⋮ {rows.hidden} rows (--all)", style="dim")
        if is_halved and row % 2:
            continue
        line = Text()
        if label:
            line.append(g.rows[row] + " " * (label - of_numbers - cell_len(g.rows[row])), style="bold")
        if is_halved:
            lower = cells[row + 1] if row + 1 < len(cells) else None
            line.append_tokens(half_cells(cells[row], lower, ramp_of(g)))
        else:
            line.append_tokens(_cells(layout, row, cells[row], screen))
        words = (f" {c.text(row):>{width}}" for c, width in zip(beside, widths, strict=True))
        yield line.append_tokens((word, c.style(row)) for word, c in zip(words, beside, strict=True))


def _heading(g: Grid, size: int, label: int, *, of_numbers: bool) -> Text:
    """The names of the columns, or where they have no room some of their numbers."""
    line = Text(f"{g.corner:<{max(0, label - of_numbers)}}", style="dim")
    longest = _longest(g)
    if not of_numbers and (size <= min(3, longest) or not longest):
        return line.append(ticks(g.places or range(len(g.columns)), size, every=10 if size == 1 else 5))
    for name in g.columns:
        if of_numbers:
            name = fitted(name, size - 1 - (g.marked is not None)) + " " * (g.marked is not None)
            line.append(" " * (size - cell_len(name)) + name)
        else:
            name = fitted(name, size - 1)
            line.append(name + " " * (size - cell_len(name)))
    return line


def _cells(layout: _Layout, row: int, cells: list[int], screen: Screen) -> Iterator[tuple[str, Style]]:
    """The cells of a row: signs, numbers behind a blank, or shades."""
    g, size, null = layout.grid, layout.size, Style.null()
    ramp = ramp_of(g)
    if g.signs is not None:
        yield from (part for sign in g.signs[row] for part in (sign, (" " * (size - 1), null)))
        return
    if layout.is_tight is None:
        yield from (cell(level, size, colour=screen.colour, ramp=ramp, gap=int(size > 3)) for level in cells)
        return
    masked = "" if g.scale == "change" else "0" if g.marked is None else "0 "
    marked = [False] * len(cells) if g.marked is None else g.marked[row].tolist()
    words = [
        masked if level == FORBIDDEN else _text(g, number, is_marked=is_marked, is_tight=layout.is_tight)
        for level, number, is_marked in zip(cells, g.values[row].tolist(), marked, strict=True)
    ]
    if not screen.colour:
        yield "".join(f"{word:>{size}}" for word in words), null
        return
    for level, word in zip(cells, words, strict=True):
        if level == FORBIDDEN:
            yield f"{word:>{size}}", EMPTY
        else:
            yield " ", null
            yield cell(level, size - 1, colour=True, ramp=ramp, word=word)


# ------------------------------------------------------------------------------------------------------------ caption


def _caption(layouts: Sequence[_Layout], tops: Mapping[str, float], screen: Screen) -> Iterator[Text]:
    """What a row is, the scales, and the signs that occur."""
    parts, of_numbers = [each.grid for each in layouts], layouts[0].is_tight is not None
    words = [*dict.fromkeys(g.meaning for g in parts if g.meaning)]
    words += ["* the row's maximum"] if of_numbers and any(g.marked is not None for g in parts) else []
    yield from (Text(word, style="dim") for word in words)
    shaded = [g for g in parts if g.signs is None]
    for scale in dict.fromkeys(g.scale for g in shaded):
        yield _scale([g for g in shaded if g.scale == scale], shaded, tops[scale], screen, of_numbers=of_numbers)
    signs = []
    if any(not g.allowed.all() and g.scale != "change" for g in shaded):
        signs.append("0 masked" if of_numbers else "a blank is masked")
    if any(bool(np.isnan(np.where(g.allowed, g.values, 0)).any()) for g in parts):
        signs.append(f"{'nan' if of_numbers else NAN_SIGN} not a number")
    signs += dict.fromkeys(f"{c.heading} {c.meaning}" for each in layouts for c in each.beside if c.meaning)
    yield from (Text(sign, style="dim") for sign in signs)


def _scale(of_scale: Sequence[Grid], parts: Sequence[Grid], top: float, screen: Screen, *, of_numbers: bool) -> Text:
    """The range of a scale with its shades, and of which grids it is if there are several."""
    g = of_scale[0]
    largest = max(float(np.nanmax(np.where(each.allowed, each.values, 0), initial=0.0)) for each in of_scale)
    high = shown(top, g.unit, g.digits)
    is_exceeded = g.scale != "change" and shown(largest, g.unit, g.digits) != high and largest > top
    is_log = g.scale == "log" and not of_numbers
    has_signs = g.scale == "change" and any(bool((each.values < 0).any()) for each in of_scale)
    low = f"{number_text(top / 10**DECADES)} or less" if is_log else f"−{high}" if has_signs else "0"
    kind = "shade log" if is_log else "shade linear" if g.scale != "change" else "shade"
    text = Text(f"{kind}, {low} … {high}{' or more' * is_exceeded}", style="dim")
    if len(of_scale) < len(parts):
        text.append(f" in {' and '.join(each.title for each in of_scale)}")
    elif len(parts) > 1:
        text.append(" in all")
    if of_numbers:
        return text
    swatches = Text.assemble(*ramp_of(g).swatches(colour=screen.colour))
    is_upper = g.scale == "change" and not has_signs
    return text.append(": ").append_text(swatches[len(swatches) // 2 :] if is_upper else swatches)
