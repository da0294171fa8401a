"""Draws grids on a terminal: as numbers where they fit, else as shades, and several side by side.

With colour a shade is a background, and long grids have two rows on a line; without, it is a sign. A masked cell is 0 among
numbers, and else blank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Literal

import numpy as np
from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

from mhacli.record.arrays import Array
from mhacli.render.base.cells import (
    CHANGES,
    DECADES,
    FORBIDDEN,
    WEIGHTS,
    cell,
    change_levels,
    half_cells,
    levels,
    ticks,
)
from mhacli.render.base.colours import EMPTY, NAN_SIGN, change_paint, ramp_paint
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
    """A grid with the width of a cell, its numbers with stars, None for shades, and the columns beside that have room."""

    grid: Grid
    size: int
    texts: list[list[str]] | None
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
    has_caption: bool = True,
) -> Iterator[Text]:
    """The lines of grids on a common scale, and what their shades and signs mean.

    Of more than `most` lines the first grids are drawn, and the others counted with `n_more`; with `everything` no column is
    left out.
    """
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
    caption = [*_caption(layouts, tops, screen)] if layouts and has_caption else []
    if caption:
        yield flowing(caption, screen.width)


def _rows(parts: Sequence[Grid], least: _Least, width: int) -> list[Sequence[Grid]]:
    """The grids in as few rows as fit, evenly filled."""
    for n_rows in range(1, len(parts) + 1):
        n = -(-len(parts) // n_rows)
        rows = [parts[start : start + n] for start in range(0, len(parts), n)]
        if n == 1 or all(sum(map(least, row)) + _GAP * (len(row) - 1) <= width for row in rows):
            break
    return rows if parts else []


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
        for text, width in zip(texts, widths, strict=True):
            line.append_text(text).append(" " * (width + _GAP - text.cell_len))
        line.rstrip()
        yield line


# -------------------------------------------------------------------------------------------------------- what fits


def _label(g: Grid) -> int:
    """The columns of the names of rows, with a blank behind them."""
    width = max(map(cell_len, (g.corner, *g.rows)), default=0)
    return width and width + 1


def _beside_width(g: Grid, beside: Sequence[Column[int]]) -> int:
    return sum(max(map(cell_len, (c.heading, *map(c.text, range(len(g.rows)))))) + 1 for c in beside)


def _texts(g: Grid, *, is_tight: bool = False) -> list[list[str]]:
    """The numbers of all cells with their stars. If `is_tight`, weights from 1 on have a decimal less."""
    digits = g.digits if g.digits is not None else 2
    texts = []
    for row, allowed in zip(g.values.tolist(), g.allowed.tolist(), strict=True):
        words = [
            shown(number, g.unit, g.digits) if is_open else "" for number, is_open in zip(row, allowed, strict=True)
        ]
        if is_tight:
            words = [
                shown(number, g.unit, digits - 1) if len(word) > digits + 1 else word
                for number, word in zip(row, words, strict=True)
            ]
        texts.append(words)
    if g.marked is not None:
        stars = np.where(g.marked, "*", " ").tolist()
        texts = [[w + s for w, s in zip(*row, strict=True)] for row in zip(texts, stars, strict=True)]
    return texts


def are_numbers_narrow(g: Grid, width: int) -> bool:
    """Whether all columns fit as numbers, whose least width is 3."""
    return 3 * len(g.columns) < width and _least_of_numbers(g) <= width


def _least_of_numbers(g: Grid) -> int:
    """The least width of a grid as numbers."""
    cells = max(map(len, chain(*_texts(g, is_tight=g.unit == "weight"))), default=1) + 1
    beside = _beside_width(g, [c for c in g.beside if not c.drop])
    return max(_label(g) - 1 + cells * len(g.columns) + beside, cell_len(g.title) + _RULE)


def _least_of_shades(width: int) -> _Least:
    def least(g: Grid) -> int:
        label = _label(g) + _beside_width(g, [c for c in g.beside if not c.drop])
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
    excess = _least_of_numbers(g) - width
    if excess <= 0:
        return [g]
    size = max(map(len, chain(*_texts(g, is_tight=True)))) + 1
    gap = len(f"… {len(g.columns)} … ") - 1
    n = max(
        2,
        (width - _label(g) + 1 - _beside_width(g, [c for c in g.beside if not c.drop]) - (0 if everything else gap))
        // size,
    )
    if everything:
        starts = range(0, len(g.columns), n)
        return [_of_columns(g, Selection(tuple(range(start, min(start + n, len(g.columns)))), 0)) for start in starts]
    return [_of_columns(g, balanced(len(g.columns), n))]


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
        names.insert(at, f"… {columns.hidden} …")
    return replace(g, values=values, allowed=allowed, marked=marked, columns=names)


# ----------------------------------------------------------------------------------------------------------- painting


def _layout(g: Grid, room: int, *, of_numbers: bool) -> _Layout:
    """The layout in a width: names and cells as wide as fit."""
    label, beside = _label(g), [c for c in g.beside if not c.drop]
    if not of_numbers:
        names = max(map(cell_len, g.columns)) + 1
        size = min(_WIDEST_SHADE, names, (room - label - _beside_width(g, beside)) // len(g.columns))
        return _Layout(g, max(1, size), None, beside)
    texts, beside = _fitting_numbers(g, room)
    least = max(map(len, chain(*texts)), default=1)
    names = min(_WIDEST_NAME, max(map(cell_len, g.columns))) + (g.marked is not None)
    size = min(max(least, names), (room - label + 1 - _beside_width(g, beside)) // len(g.columns) - 1)
    return _Layout(g, max(size, least) + 1, texts, beside)


def _painted(layout: _Layout, top: float, screen: Screen) -> Iterator[Text]:
    """The names of the columns, then a line for each row, or for two as half blocks."""
    g, size, texts, beside = layout.grid, layout.size, layout.texts, layout.beside
    label, of_numbers = _label(g), texts is not None
    widths = [_beside_width(g, [c]) - 1 for c in beside]
    above = "".join(f" {c.heading:>{width}}" for c, width in zip(beside, widths, strict=True))
    yield _heading(g, size, label, of_numbers=of_numbers).append(above, style="dim")
    rows = balanced(len(g.rows), len(g.rows) if g.has_all_rows or not of_numbers else MAX_ROWS)
    is_halved = not of_numbers and screen.colour and g.signs is None and len(g.rows) > MAX_ROWS
    cells = _levels(g, top, of_numbers=of_numbers)
    for number, row in enumerate(rows.shown):
        if rows.hidden and number == rows.before:
            yield Text(f"⋮ {rows.hidden} rows (--all)", style="dim")
        if is_halved and row % 2:
            continue
        line = Text()
        if label:
            line.append(g.rows[row] + " " * (label - of_numbers - cell_len(g.rows[row])), style="bold")
        if is_halved:
            paint = ramp_paint if g.scale != "change" else lambda level: change_paint(level - 255)
            line.append_tokens(half_cells(cells[row], cells[row + 1] if row + 1 < len(cells) else None, paint=paint))
        else:
            line.append_tokens(_cells(layout, row, cells[row], screen))
        words = (f" {c.text(row):>{width}}" for c, width in zip(beside, widths, strict=True))
        yield line.append_tokens((word, c.style(row)) for word, c in zip(words, beside, strict=True))


def _fitting_numbers(g: Grid, room: int) -> tuple[list[list[str]], list[Column[int]]]:
    """The numbers and the columns beside them: all, or what has room."""
    always = [c for c in g.beside if not c.drop]
    for is_tight, beside in ((False, [*g.beside]), (True, [*g.beside]), (False, always)):
        texts = _texts(g, is_tight=is_tight and g.unit == "weight")
        size = max(map(len, chain(*texts)), default=1) + 1
        if _label(g) - 1 + size * len(g.columns) + _beside_width(g, beside) <= room:
            return texts, beside
    return _texts(g, is_tight=g.unit == "weight"), always


def _heading(g: Grid, size: int, label: int, *, of_numbers: bool) -> Text:
    """The names of the columns, or where they have no room some of their numbers."""
    line = Text(f"{g.corner:<{max(0, label - of_numbers)}}", style="dim")
    longest = max(map(cell_len, g.columns))
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


def _levels(g: Grid, top: float, *, of_numbers: bool) -> list[list[int]]:
    """The levels of the cells. Numbers are shaded on a linear scale."""
    if g.scale == "change":
        changes = change_levels(np.where(np.isnan(g.values), np.inf, g.values), top)
        cells: Array = np.where(g.allowed, changes, FORBIDDEN)
    else:
        cells = levels(np.where(g.allowed, g.values, FORBIDDEN), "linear" if of_numbers else g.scale, top)
    found: list[list[int]] = cells.astype(int).tolist()
    return found


def _cells(layout: _Layout, row: int, cells: list[int], screen: Screen) -> Iterator[tuple[str, Style]]:
    """The cells of a row: signs, numbers behind a blank, or shades."""
    g, size = layout.grid, layout.size
    ramp = CHANGES if g.scale == "change" else WEIGHTS
    for column, level in enumerate(cells):
        if g.signs is not None:
            yield g.signs[row][column]
            yield " " * (size - 1), Style.null()
        elif layout.texts is None:
            yield cell(level, size, colour=screen.colour, ramp=ramp, gap=int(size > 3))
        elif level == FORBIDDEN and g.scale != "change":
            yield f"{'0' + ' ' * (g.marked is not None):>{size}}", EMPTY if screen.colour else Style.null()
        else:
            yield " ", Style.null()
            yield cell(level, size - 1, colour=screen.colour, ramp=ramp, word=layout.texts[row][column])


# ------------------------------------------------------------------------------------------------------------ caption


def _caption(layouts: Sequence[_Layout], tops: Mapping[str, float], screen: Screen) -> Iterator[Text]:
    """What a row is, the scales, and the signs that occur."""
    parts, of_numbers = [each.grid for each in layouts], layouts[0].texts is not None
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
    low = f"{number_text(top / 10**DECADES)} or less" if is_log else f"−{high}" if g.scale == "change" else "0"
    kind = "shade log" if is_log else "shade linear" if g.scale != "change" else "shade"
    text = Text(f"{kind}, {low} … {high}{' or more' * is_exceeded}", style="dim")
    if len(of_scale) < len(parts):
        text.append(f" in {' and '.join(each.title for each in of_scale)}")
    elif len(parts) > 1:
        text.append(" in all")
    if of_numbers:
        return text
    ramp = CHANGES if g.scale == "change" else WEIGHTS
    return text.append(": ").append_tokens((word, style) for word, style in ramp.swatches(colour=screen.colour))
