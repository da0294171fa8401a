"""Draws grids on a terminal: as numbers where they fit, else as shades, and several side by side.

With colour a shade is a background, and long grids have two rows on a line; without, it is a sign.
A masked cell is 0 among numbers, and else blank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import Literal

import numpy as np
from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

from mhacli.io.data import Array
from mhacli.render.base.colours import CHANGES, EMPTY, NAN_SIGN, PLAIN, WEIGHTS, Ramp
from mhacli.render.base.doc import Column, Grid
from mhacli.render.base.format import count_of, fitted, flowing
from mhacli.render.base.options import Screen, Selection, balanced
from mhacli.text.numbers import Unit, shown

MASKED, NOT_A_NUMBER = -1, -2
"""The levels of a masked cell, and of what is not a number."""
_STEPS = 16
"""The steps between the shades that explain a scale."""
DECADES = 3
"""The range of a log scale below the largest weight. Smaller weights are as dark as 0."""

Form = Literal["auto", "numbers", "shades"]

MAX_ROWS, MAX_LINES = 24, 40
"""The most rows of numbers, and the most lines of shades. Grids with more rows than the first have
two of them on a line."""
_GAP, _WIDEST_NAME, _WIDEST_SHADE, _RULE = 2, 10, 8, 3


@dataclass(frozen=True, eq=False)
class _Panel:
    """A form of a grid: as numbers or as shades, with columns beside the cells."""

    grid: Grid
    has_numbers: bool
    beside: Sequence[Column[int]]

    @cached_property
    def rows(self) -> Selection:
        """The rows that are shown."""
        n_rows = len(self.grid.rows)
        return balanced(
            n_rows, MAX_ROWS if self.has_numbers and not self.grid.has_all_rows else n_rows
        )

    @cached_property
    def label(self) -> int:
        """The columns of the names of rows. Shades stand behind a blank, numbers have one of their
        own.
        """
        width = max(map(cell_len, (self.grid.corner, *self.grid.rows)), default=0)
        return width + (width > 0 and not self.has_numbers)

    @cached_property
    def widths_beside(self) -> Sequence[int]:
        """The widths of the columns beside the cells, each with a blank before it."""
        return [
            1 + max(map(cell_len, [column.heading, *map(column.text, self.rows.shown)]))
            for column in self.beside
        ]

    @property
    def around(self) -> int:
        """The columns beside the cells."""
        return self.label + sum(self.widths_beside)

    def number(self, number: float, *, is_marked: bool = False) -> str:
        """A number with its star. A weight from 1 on has 1 of the usual 2 decimals, so that it is
        as wide as the others.
        """
        g = self.grid
        word = shown(number, g.unit, g.digits)
        if g.unit == "weight" and g.digits in (None, 2) and word[:1].isdigit():
            word = shown(number, g.unit, 1)
        return word if g.marked is None else word + ("*" if is_marked else " ")

    @cached_property
    def least(self) -> int:
        """The least width of a cell: that of the widest number behind a blank, or of a shade. The
        widest weight is the largest or the smallest.
        """
        g = self.grid
        if not self.has_numbers:
            return 2 if len(g.rows) <= MAX_ROWS and any(g.columns) else 1
        numbers: Array = g.values[g.allowed]
        if g.unit == "weight" and len(numbers):  # a sum is NaN if any number is
            numbers = np.array(
                [
                    np.nanmax(numbers, initial=0.0),
                    np.nanmin(numbers, initial=0.0),
                    numbers.sum() * 0,
                ]
            )
        return max((len(self.number(number)) for number in numbers.tolist()), default=1) + 1

    def needed(self, *, is_whole: bool) -> int:
        """The least width of the whole grid with its title, or that with whole names of columns."""
        room = self.around + (_WIDEST_NAME + 2) * len(self.grid.columns)
        return self.width(self.size(room) if is_whole else self.least)

    @property
    def inside(self) -> int:
        """The least width of the whole grid."""
        return self.around + self.least * len(self.grid.columns)

    def width(self, size: int) -> int:
        """The width of the whole grid with its title and cells of a width."""
        return max(self.around + size * len(self.grid.columns), cell_len(self.grid.title) + _RULE)

    def size(self, room: int) -> int:
        """The width of a cell in a room: as wide as its name needs and fits, at least what a number
        or shade takes.
        """
        names, spare = _longest(self.grid) + 1, (room - self.around) // len(self.grid.columns)
        if self.has_numbers:
            names = min(_WIDEST_NAME + 1, names) + (self.grid.marked is not None)
            return max(self.least, min(names, spare))
        return max(1, min(_WIDEST_SHADE, names, spare))


_Row = list[tuple[_Panel, int]]
"""Panels side by side, each with the width of its cells."""


def _longest(g: Grid) -> int:
    """The width of the longest name of a column."""
    return max(map(cell_len, g.columns))


def _forms(g: Grid, *, has_numbers: bool) -> list[_Panel]:
    """The forms of a grid, the wider one first: the columns beside it that can be dropped stand
    only beside numbers.
    """
    always = [column for column in g.beside if not column.drop]
    return [
        _Panel(g, has_numbers, beside)
        for beside in ((g.beside, always) if has_numbers else (always,))
    ]


def grids(
    panels: Sequence[Grid],
    screen: Screen,
    *,
    form: Form = "auto",
    everything: bool = False,
    in_one_row: bool = False,
    most: int | None = None,
    n_more: int = 0,
) -> Iterator[Text]:
    """The lines of grids on a common scale, and what their shades and signs mean.

    Of more than `most` lines the first grids are drawn, and the others counted with `n_more`; with
    `everything` all rows of shades. With `in_one_row` they are numbers only where all stand in one
    row.
    """
    has_numbers = form == "numbers"
    if form == "auto":  # a number is at least 3 wide
        is_narrow = all(3 * len(g.columns) < screen.width for g in panels)
        has_numbers = is_narrow and all(
            _forms(g, has_numbers=True)[-1].inside <= screen.width for g in panels
        )
        if has_numbers and in_one_row:
            has_numbers = len(_rows(panels, screen.width, has_numbers=True)) == 1
    if has_numbers:
        parts = [part for g in panels for part in _split(g, screen.width)]
    else:
        parts = [
            _pooled(g, screen, everything=everything, is_alone=len(panels) == 1) for g in panels
        ]
    parts = [
        replace(g, top=max(other.top for other in parts if other.scale == g.scale)) for g in parts
    ]
    sized = _rows(
        parts, screen.width, has_numbers=has_numbers, is_whole=has_numbers and not in_one_row
    )
    if not sized or sum(len(row[0][0].rows.shown) for row in sized) > MAX_ROWS:
        sized = _rows(parts, screen.width, has_numbers=has_numbers)
    widths = [
        max(panel.width(size) for panel, size in filter(None, place))
        for place in zip_longest(*sized)
    ]
    n_lines, drawn = 0, list[_Panel]()
    for of_row in sized:
        lines = [*_side_by_side(of_row, widths, screen)]
        if drawn and most is not None and n_lines + len(lines) > most:
            break
        yield from lines
        drawn += [panel for panel, _ in of_row]
        n_lines += len(lines)
    n_more += len(parts) - len(drawn)
    if n_more:
        yield Text(f"⋮ {count_of(n_more, 'more pattern')} not drawn (--all or --head)", style="dim")
    caption = [*_caption(drawn, screen)] if drawn else []
    if caption:
        yield flowing(caption, screen.width)


# ---------------------------------------------------------------------------------------- what fits


def _rows(
    parts: Sequence[Grid], width: int, *, has_numbers: bool, is_whole: bool = False
) -> list[_Row]:
    """The grids with the width of their cells in as few rows as fit, with whole names of columns
    (none if they fit nowhere) or at least their cells, evenly filled, with the same room below each
    other. Of grids with the same rows the first in a row names them.
    """
    sized: list[_Row] = []
    for n_rows in range(1, len(parts) + 1):
        n = -(-len(parts) // n_rows)
        rows: list[list[list[_Panel]]] = []
        for start in range(0, len(parts), n):
            rows.append([])
            for g in parts[start : start + n]:
                is_named = g is parts[start] or g.rows is not parts[start].rows
                named = g if is_named else replace(g, rows=[""] * len(g.rows), corner="")
                rows[-1].append(_forms(named, has_numbers=has_numbers))
        widths = [[forms[-1].needed(is_whole=is_whole) for forms in row] for row in rows]
        rooms = [max(place) for place in zip_longest(*widths, fillvalue=0)]
        spare = width - sum(rooms) - _GAP * (n - 1)
        if spare >= 0 or (n == 1 and not is_whole):
            for row in rows:
                sized.append([])
                for forms, least in zip(row, rooms, strict=False):
                    room = least + max(0, spare) // n
                    panel = next(
                        (p for p in forms if p.needed(is_whole=is_whole) <= room), forms[-1]
                    )
                    sized[-1].append((panel, panel.size(room)))
            break
    return sized


def _pooled(g: Grid, screen: Screen, *, everything: bool, is_alone: bool) -> Grid:
    """The grid with as many rows and columns as fit; one that does not is pooled so that two stand
    side by side.
    """
    lines = len(g.rows) if everything else MAX_LINES * (2 if screen.colour else 1)
    names = max(_forms(g, has_numbers=False)[-1].around, 13)
    room = screen.width - names
    if g.smaller is None or (len(g.rows) <= lines and len(g.columns) <= room):
        return g
    if not is_alone:
        room = (screen.width - _GAP) // 2 - names
    return g.smaller(lines, max(1, room))


def _split(g: Grid, width: int) -> Iterator[Grid]:
    """The grid in parts that fit as numbers, each with as many columns as have room. Shades of
    numbers are never log.
    """
    panel = _forms(g, has_numbers=True)[-1]
    n = max(1, (width - panel.around) // panel.least)
    g = replace(g, scale="linear" if g.scale == "log" else g.scale)
    for start in range(0, len(g.columns), n):
        part = slice(start, start + n)
        marked = None if g.marked is None else g.marked[:, part]
        yield replace(
            g,
            values=g.values[:, part],
            allowed=g.allowed[:, part],
            marked=marked,
            columns=g.columns[part],
        )


# ----------------------------------------------------------------------------------------- painting


def _side_by_side(row: _Row, widths: Sequence[int], screen: Screen) -> Iterator[Text]:
    """The lines of some grids below their titles, each with the width of its cells."""
    painted = [[*_painted(panel, size, screen)] for panel, size in row]
    for place, title in enumerate(panel.grid.title for panel, _ in row):
        if title:
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


def _painted(panel: _Panel, size: int, screen: Screen) -> Iterator[Text]:
    """The names of the columns, then a line for each row, or for two as half blocks."""
    g, label, rows = panel.grid, panel.label, panel.rows
    beside = [*zip(panel.beside, panel.widths_beside, strict=True)]
    above = "".join(f"{column.heading:>{width}}" for column, width in beside)
    yield Text(f"{g.corner:<{label}}{_heading(panel, size)}", style="dim").append(
        above, style="dim"
    )
    is_halved = (
        not panel.has_numbers and screen.colour and g.signs is None and len(g.rows) > MAX_ROWS
    )
    allowed = g.allowed if panel.has_numbers or g.taken is None else g.allowed & ~g.taken
    cells = levels(g.values, allowed, g.scale, g.top).tolist()
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
        else:
            line.append_tokens(_cells(panel, row, cells[row], size, colour=screen.colour))
        line.append_tokens(
            (f"{column.text(row):>{width}}", column.style(row)) for column, width in beside
        )
        yield line


def _heading(panel: _Panel, size: int) -> str:
    """The names of the columns, or where they have no room some of their numbers."""
    g, longest = panel.grid, _longest(panel.grid)
    if panel.has_numbers:
        star = " " * (g.marked is not None)
        words = [fitted(name, size - 1 - len(star)) + star for name in g.columns]
        return "".join(" " * (size - cell_len(word)) + word for word in words)
    if size <= min(3, longest) or not longest:
        return ticks(g.places or range(len(g.columns)), size, every=10 if size == 1 else 5)
    words = [fitted(name, size - 1) for name in g.columns]
    return "".join(word + " " * (size - cell_len(word)) for word in words)


def _cells(
    panel: _Panel, row: int, cells: list[int], size: int, *, colour: bool
) -> Iterator[tuple[str, Style]]:
    """The cells of a row as signs, as shades, or as numbers behind a blank."""
    g, ramp = panel.grid, ramp_of(panel.grid)
    masked = "" if g.scale == "change" else "0" + " " * (g.marked is not None)
    for column, level in enumerate(cells):
        if g.signs is not None:
            yield g.signs[row][column]
            yield " " * (size - 1), PLAIN
        elif not panel.has_numbers:
            yield cell(level, size, colour=colour, ramp=ramp, gap=int(size > 3))
        else:
            is_marked = g.marked is not None and bool(g.marked[row, column])
            number = panel.number(float(g.values[row, column]), is_marked=is_marked)
            word = masked if level == MASKED else number
            yield " ", PLAIN
            yield cell(level, size - 1, colour=colour, ramp=ramp, word=word)


def cell(
    level: int, width: int = 1, *, colour: bool, ramp: Ramp = WEIGHTS, gap: int = 0, word: str = ""
) -> tuple[str, Style]:
    """A cell of `width` columns, with `word` or signs in all but the last `gap` columns."""
    room, is_number = width - gap, level != NOT_A_NUMBER
    if level == MASKED:
        return f"{word:>{room}}" + " " * gap, EMPTY if word and colour else PLAIN
    sign = NAN_SIGN if not is_number else " " if colour else ramp.sign(level)
    text = f"{word:>{room}}" if word else sign * room
    return text + " " * gap, ramp.style(level) if colour and is_number else PLAIN


def half_cells(
    upper: Sequence[int], lower: Sequence[int] | None, ramp: Ramp = WEIGHTS
) -> Iterator[tuple[str, Style]]:
    """Two rows of levels as one line with a character per pair; None without a second row."""
    pairs = zip(upper, lower or [MASKED] * len(upper), strict=True)
    return (_half_cell(*pair, ramp) for pair in pairs)


@lru_cache(maxsize=65536)
def _half_cell(upper: int, lower: int, ramp: Ramp) -> tuple[str, Style]:
    """One character for two cells, with the upper in the foreground. A masked cell shows the
    screen's background.
    """
    if NOT_A_NUMBER in (upper, lower):
        return NAN_SIGN, PLAIN
    if upper == lower == MASKED:
        return " ", PLAIN
    if MASKED in (upper, lower):
        return "▄" if upper == MASKED else "▀", Style(color=ramp.paints[max(upper, lower)])
    return "▀", Style(color=ramp.paints[upper], bgcolor=ramp.paints[lower])


def ticks(places: Sequence[int], width: int = 1, *, every: int = 10, begin: int = 0) -> str:
    """An axis for columns of `width` cells: every so many columns the position, where it fits and
    is not negative.

    `begin` is the index of the first column.

    >>> ticks(range(3), 2, every=2)
    '0   2 '
    """
    axis = [" "] * (len(places) * width)
    for column, place in enumerate(places):
        at, number = column * width, str(place)
        if (begin + column) % every == 0 and place >= 0 and at + len(number) <= len(axis):
            axis[at : at + len(number)] = number
    return "".join(axis)


# ------------------------------------------------------------------------------------------- scales


def ramp_of(of: Grid) -> Ramp:
    """The ramp of the scale of a grid."""
    return CHANGES if of.scale == "change" else WEIGHTS


def levels(values: Array, allowed: Array, scale: str, top: float) -> Array:
    """Levels of 0 … 255 on a scale: `linear` from 0 to `top`, `log` over the decades below it; of a
    `change` 0 … 510 from −`top` on. `MASKED` where a cell is masked, and `NOT_A_NUMBER`.
    """
    is_known = allowed & np.isfinite(values)
    known, top = np.where(is_known, values, 0.0), top or 1.0
    if scale == "log":
        parts = 1 + np.log10(np.maximum(known, top * 10.0**-DECADES) / top) / DECADES
    else:
        parts = known / top
    least, middle = (-1, 255) if scale == "change" else (0, 0)
    scaled = middle + np.rint(255 * np.clip(parts, least, 1))
    return np.select([~allowed, ~is_known], [MASKED, NOT_A_NUMBER], scaled).astype(np.int16)


def ends(
    scale: str,
    top: float,
    unit: Unit = "number",
    digits: int | None = None,
    *,
    least: float = 0.0,
    largest: float = 0.0,
) -> tuple[str, str]:
    """What the ends of a scale stand for: `0` and `.62`, or `.62 or more` if the digits show that
    the `largest` cell exceeds it; of changes `-.5` and `.5`, or `0` if none is less.
    """
    high = shown(top, unit, digits)
    if scale == "change":
        return (shown(-top, unit, digits) if least < 0 else "0"), high
    is_exceeded = largest > top and shown(largest, unit, digits) != high
    low = "0" if scale == "linear" else f"{top / 10**DECADES:.1g} or less".removeprefix("0")
    return low, high + " or more" * is_exceeded


def scale_words(every: Sequence[Grid], unit: Unit = "number", digits: int | None = None) -> str:
    """The kind and the range of the common scale of some grids: `linear, 0 … .62`, of changes `-.5
    … .5`.
    """
    of = every[0]
    cells = np.concatenate([each.values[each.allowed] for each in every])
    least, largest = float(np.nanmin(cells, initial=0.0)), float(np.nanmax(cells, initial=0.0))
    words = " … ".join(ends(of.scale, of.top, unit, digits, least=least, largest=largest))
    return words if of.scale == "change" else f"{of.scale}, {words}"


def swatch_levels(every: Sequence[Grid]) -> list[int]:
    """Levels of the ramp of some grids in equal steps; of changes from the middle on if none is
    less.
    """
    top = ramp_of(every[0]).top
    is_upper = every[0].scale == "change" and not any(
        (each.values[each.allowed] < 0).any() for each in every
    )
    begin = top // 2 if is_upper else 0
    return [begin + (top - begin) * step // _STEPS for step in range(_STEPS + 1)]


def swatches(every: Sequence[Grid], *, colour: bool) -> Text:
    """The shades of the common scale of some grids, without colour its signs."""
    ramp, levels_of_all = ramp_of(every[0]), swatch_levels(every)
    if not colour:
        return Text("".join(dict.fromkeys(map(ramp.sign, levels_of_all))))
    return Text.assemble(*((" ", ramp.style(level)) for level in levels_of_all))


# ------------------------------------------------------------------------------------------ caption


def _caption(panels: Sequence[_Panel], screen: Screen) -> Iterator[Text]:
    """What a cell is, the scales of what is shaded, and the signs that occur."""
    parts, has_numbers = [panel.grid for panel in panels], panels[0].has_numbers
    words = [*dict.fromkeys(g.meaning for g in parts if g.meaning)]
    words += ["* row maximum"] if has_numbers and any(g.marked is not None for g in parts) else []
    yield from (Text(word, style="dim") for word in words)
    shaded = [g for g in parts if g.signs is None]
    graded = [g for g in shaded if (g.values[g.allowed] != g.top).any()]
    for scale in dict.fromkeys(g.scale for g in graded) if screen.colour or not has_numbers else ():
        yield _scale(
            [g for g in shaded if g.scale == scale], shaded, screen, has_numbers=has_numbers
        )
    signs = []
    if any(not g.allowed.all() and g.scale != "change" for g in shaded):
        signs.append("0 masked" if has_numbers else "a blank is masked")
    if any(bool(np.isnan(g.values[g.allowed]).any()) for g in parts):
        signs.append(f"{'nan' if has_numbers else NAN_SIGN} not a number")
    signs += dict.fromkeys(
        f"{c.heading} {c.meaning}" for panel in panels for c in panel.beside if c.meaning
    )
    yield from (Text(sign, style="dim") for sign in signs)


def _scale(
    of_scale: Sequence[Grid], parts: Sequence[Grid], screen: Screen, *, has_numbers: bool
) -> Text:
    """The range of a scale with its shades, and of which grids it is if there are several."""
    text = Text(f"shade {scale_words(of_scale, of_scale[0].unit, of_scale[0].digits)}", style="dim")
    if len(of_scale) < len(parts):
        text.append(f" in {' and '.join(each.title for each in of_scale)}")
    elif len(parts) > 1:
        text.append(" in all")
    return (
        text
        if has_numbers
        else Text.assemble(text.append(": "), swatches(of_scale, colour=screen.colour))
    )
