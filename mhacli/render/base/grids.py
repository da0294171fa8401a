"""Draws grids on a terminal: as numbers where they fit, else as shades, and several side by side.

With colour a shade is a background, and long grids have two rows on a line; without, it is a sign.
A masked cell is 0 among numbers, and else blank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import Literal, NamedTuple, assert_never

import numpy as np
from rich.cells import cell_len, chop_cells, set_cell_size
from rich.style import Style
from rich.text import Text

from mhacli.io.data import Array
from mhacli.numbers import Unit, shown

from .colours import CHANGES, EMPTY, NAN_SIGN, PLAIN, WEIGHTS, Ramp
from .doc import Column, Grid, Scale
from .format import count_of, fitted, flowing
from .options import Screen, Selection, balanced

MASKED = -1
"""The level of a masked cell."""
NOT_A_NUMBER = -2
"""The level of a cell that is not a number."""
_STEPS = 16
"""The steps between the shades that explain a scale."""
DECADES = 3
"""The range of a log scale below the largest weight. Smaller weights are as dark as 0."""

Form = Literal["auto", "numbers", "shades"]

MAX_ROWS = 24
"""The most rows of numbers. Shades of more rows have two of them on a line."""
MAX_LINES = 40
"""The most lines of shades."""
_GAP = 2
"""The columns between grids."""
_WIDEST_NAME = 10
"""The most characters of a line of a name above numbers."""
_NAME_LINES = 5
"""The most lines of the name of a column."""
_NAMED_SHADE = 4
"""The columns of a shade whose column has its name, in lines of one less."""
_WIDEST_SHADE = 8
"""The most columns of a cell that is a shade."""
_RULE = 3
"""The least columns of the line behind a title, with the blank before it."""
_LEAST_NUMBER = 3
"""The least columns of a cell that is a number: no number needs fewer."""
_LEAST_WORD = 3
"""The least columns of a shade whose column has words for a name."""
_LEAST_LABEL = 13
"""The columns that names of pooled rows need at least."""


@dataclass(frozen=True, eq=False)
class _Panel:
    """A form of a grid: as numbers or as shades, with columns beside the cells; `is_whole` if it
    needs room for the names of columns: above numbers on one line.
    """

    grid: Grid
    has_numbers: bool
    beside: Sequence[Column[int]]
    is_whole: bool = False

    @cached_property
    def rows(self) -> Selection:
        """The rows that are shown."""
        n_rows = len(self.grid.rows)
        is_cut = self.has_numbers and not self.grid.has_all_rows
        return balanced(n_rows, MAX_ROWS if is_cut else n_rows)

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
        return self.starred(word, is_marked=is_marked)

    def starred(self, word: str, *, is_marked: bool = False) -> str:
        """A word with its star, or a blank in its place, where cells may have stars."""
        if self.grid.marked is None:
            return word
        return f"{word}*" if is_marked else f"{word} "

    @cached_property
    def least(self) -> int:
        """The least width of a cell: that of the widest number behind a blank, or of a shade. The
        widest weight is the largest or the smallest.
        """
        g = self.grid
        if self.is_whole and not self.has_numbers:
            return min(_NAMED_SHADE, _longest(g) + 1)
        if not self.has_numbers:
            return 2 if len(g.rows) <= MAX_ROWS and any(g.columns) else 1
        numbers = g.visible
        if g.unit == "weight" and len(numbers):  # a sum is NaN if any number is
            numbers = np.array(
                [
                    np.nanmax(numbers, initial=0.0),
                    np.nanmin(numbers, initial=0.0),
                    numbers.sum() * 0,
                ]
            )
        return max((len(self.number(number)) for number in numbers.tolist()), default=1) + 1

    @cached_property
    def needed(self) -> int:
        """The least width of the whole grid with its title."""
        n = len(self.grid.columns)
        room = self.around + (_WIDEST_NAME + 2) * n
        size = self.size(room) if self.is_whole and self.has_numbers else self.least
        return self.width(size * n)

    @property
    def inside(self) -> int:
        """The least width of the whole grid."""
        return self.around + self.least * len(self.grid.columns)

    def width(self, cells: int) -> int:
        """The width of the whole grid with its title and cells that have a width together."""
        return max(self.around + cells, cell_len(self.grid.title) + _RULE)

    def sizes(self, room: int) -> list[int]:
        """The widths of the cells of each column in a room: the same for all, or where that breaks
        words, those of their longest words if these fit.
        """
        names, size = self.grid.columns, self.size(room)
        if self.grid.has_words and size <= _longest(self.grid):
            longest = [max(map(cell_len, name.split())) for name in names]
            sizes = [max(_LEAST_WORD, 1 + n) for n in longest]
            if sum(sizes) <= room - self.around:
                return sizes
        return [size] * len(names)

    def size(self, room: int) -> int:
        """The width of a cell in a room: as wide as its name needs and fits, at least what a number
        or shade takes.
        """
        names = _longest(self.grid) + 1
        spare = (room - self.around) // len(self.grid.columns)
        if self.has_numbers:
            names = min(_WIDEST_NAME + 1, names) + (self.grid.marked is not None)
            return max(self.least, min(names, spare))
        return max(1, min(_WIDEST_SHADE, names, spare))


class _SizedPanel(NamedTuple):
    """A form of a grid, and the widths of its cells by column."""

    panel: _Panel
    sizes: Sequence[int]

    @property
    def width(self) -> int:
        """The width of the whole grid with its title."""
        return self.panel.width(sum(self.sizes))


def _longest(g: Grid) -> int:
    """The width of the longest name of a column."""
    return max(map(cell_len, g.columns))


def _forms(g: Grid, *, has_numbers: bool, is_whole: bool = False) -> list[_Panel]:
    """The forms of a grid, the wider one first: the columns beside it that can be dropped stand
    only beside numbers, and shades without room for names have numbered rows and columns.
    """
    beside = [column for column in g.beside if not column.drop]
    forms = [_Panel(g, has_numbers, beside, is_whole)]
    if has_numbers:
        forms.insert(0, _Panel(g, has_numbers, g.beside, is_whole))
    elif g.numbered:
        numbered = _Panel(replace(g, rows=g.numbered), has_numbers, beside)
        forms = [_Panel(g, has_numbers, beside, is_whole=True), numbered]
    return forms


def grids(
    panels: Sequence[Grid],
    screen: Screen,
    *,
    form: Form = "auto",
    everything: bool = False,
    most: int | None = None,
    n_more: int = 0,
) -> Iterator[Text]:
    """The lines of grids on a common scale, and what their shades and signs mean.

    Of more than `most` lines the first grids are drawn, and the others counted with `n_more`; with
    `everything` all rows of shades.
    """
    match form:
        case "numbers":
            has_numbers = True
        case "shades":
            has_numbers = False
        case "auto":
            has_numbers = _fit_as_numbers(panels, screen.width)
        case _:
            assert_never(form)
    if has_numbers:
        parts = [part for g in panels for part in _split(g, screen.width)]
    else:
        is_alone = len(panels) == 1
        parts = [_pooled(g, screen, everything=everything, is_alone=is_alone) for g in panels]
    rows = _arranged(parts, screen.width, has_numbers=has_numbers)
    widths = [max(sized.width for sized in filter(None, place)) for place in zip_longest(*rows)]
    n_lines = 0
    visible: list[_Panel] = []
    for row in rows:
        lines = [*_side_by_side(row, widths, screen)]
        if visible and most is not None and n_lines + len(lines) > most:
            break
        yield from lines
        n_lines += len(lines)
        visible += [sized.panel for sized in row]
    n_more += len(parts) - len(visible)
    if n_more:
        yield Text(f"⋮ {count_of(n_more, 'more pattern')} not drawn (--all or --head)", "dim")
    caption = [*_caption(visible, screen)] if visible else []
    if caption:
        yield flowing(caption, screen.width, style="dim")


# ---------------------------------------------------------------------------------------- what fits


def _fit_as_numbers(panels: Sequence[Grid], width: int) -> bool:
    """Whether each grid has room as numbers."""
    # first by the number of columns, because measuring the numbers of a large grid takes long
    if any(_LEAST_NUMBER * len(g.columns) >= width for g in panels):
        return False
    return all(_forms(g, has_numbers=True)[-1].inside <= width for g in panels)


def _arranged(parts: Sequence[Grid], width: int, *, has_numbers: bool) -> list[list[_SizedPanel]]:
    """The grids in rows, those of a scale up to a common top. Numbers have whole names of columns
    if that takes no more than `MAX_ROWS` lines.
    """
    tops = {
        scale: max(g.top for g in parts if g.scale == scale) for scale in {g.scale for g in parts}
    }
    parts = [replace(g, top=tops[g.scale]) for g in parts]
    rows = _rows(parts, width, has_numbers=has_numbers, is_whole=has_numbers)
    if not rows or sum(len(row[0].panel.rows.shown) for row in rows) > MAX_ROWS:
        return _rows(parts, width, has_numbers=has_numbers)
    return rows


def _rows(
    parts: Sequence[Grid], width: int, *, has_numbers: bool, is_whole: bool = False
) -> list[list[_SizedPanel]]:
    """The grids with the width of their cells in as few rows as fit, with whole names of columns
    (none if they fit nowhere) or at least their cells, evenly filled, with the same room below each
    other.
    """
    for n_rows in range(1, len(parts) + 1):
        n = -(-len(parts) // n_rows)
        rows = [
            _forms_in_row(parts[start : start + n], has_numbers=has_numbers, is_whole=is_whole)
            for start in range(0, len(parts), n)
        ]
        needed = [[forms[-1].needed for forms in row] for row in rows]
        rooms = [max(place) for place in zip_longest(*needed, fillvalue=0)]
        spare = width - sum(rooms) - _GAP * (n - 1)
        if spare >= 0 or (n == 1 and not is_whole):
            rooms = [room + max(0, spare) // n for room in rooms]
            return [[*map(_fitting, row, rooms)] for row in rows]
    return []


def _forms_in_row(
    parts: Sequence[Grid], *, has_numbers: bool, is_whole: bool
) -> list[list[_Panel]]:
    """The forms of grids side by side. Of grids with the same rows the first names them."""
    named = [
        replace(g, rows=[""] * len(g.rows), corner="") if number and g.rows is parts[0].rows else g
        for number, g in enumerate(parts)
    ]
    return [_forms(g, has_numbers=has_numbers, is_whole=is_whole) for g in named]


def _fitting(forms: Sequence[_Panel], room: int) -> _SizedPanel:
    """The widest form that fits into a room, or else the narrowest."""
    panel = next((form for form in forms if form.needed <= room), forms[-1])
    return _SizedPanel(panel, panel.sizes(room))


def _pooled(g: Grid, screen: Screen, *, everything: bool, is_alone: bool) -> Grid:
    """The grid with as many rows and columns as fit; one that does not is pooled so that two stand
    side by side.
    """
    lines = len(g.rows) if everything else MAX_LINES * (2 if screen.colour else 1)
    names = max(_forms(g, has_numbers=False)[-1].around, _LEAST_LABEL)
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


def _side_by_side(
    row: Sequence[_SizedPanel], widths: Sequence[int], screen: Screen
) -> Iterator[Text]:
    """The lines of some grids below their titles, each in its width."""
    headings = [_headings(*sized) for sized in row]
    height = max(map(len, headings))
    blocks = [
        [
            *_title(sized.panel.grid, width),
            *_painted(*sized, screen, lines + [""] * (height - len(lines))),
        ]
        for sized, width, lines in zip(row, widths, headings, strict=False)
    ]
    for texts in zip_longest(*blocks, fillvalue=Text()):
        line = Text(no_wrap=True)
        for place, text in enumerate(texts):
            line.append_text(text)
            if place < len(texts) - 1:
                line.append(" " * (widths[place] + _GAP - text.cell_len))
        if not screen.colour:
            line.rstrip()
        yield line


def _title(g: Grid, width: int) -> Iterator[Text]:
    """The line with the title of a grid, if it has one."""
    if g.title:
        rule = Text(g.title, "bold", overflow="ellipsis", no_wrap=True)
        yield rule.append(" " + "─" * (width - cell_len(g.title) - 1), style="not bold dim")


def _painted(
    panel: _Panel, sizes: Sequence[int], screen: Screen, names: Sequence[str]
) -> Iterator[Text]:
    """The lines with the names of the columns, then one for each row, or for two as half blocks."""
    g = panel.grid
    label = panel.label
    beside = [*zip(panel.beside, panel.widths_beside, strict=True)]
    first, *others = names
    headings = "".join(f"{column.heading:>{width}}" for column, width in beside)
    yield Text(f"{g.corner:<{label}}{first}{headings}", "dim")
    yield from (Text(" " * label + line, "dim") for line in others)
    is_halved = (
        not panel.has_numbers
        and screen.colour
        and g.signs is None
        and not g.has_words
        and len(g.rows) > MAX_ROWS
    )
    allowed = g.allowed if panel.has_numbers or g.taken is None else g.allowed & ~g.taken
    cells = levels(g.values, allowed, g.scale, g.top).tolist()
    for number, row in enumerate(panel.rows.shown):
        if panel.rows.hidden and number == panel.rows.before:
            yield Text(f"⋮ {panel.rows.hidden} rows (--all)", "dim")
        if is_halved and row % 2:
            continue
        line = Text()
        if label:
            line.append(g.rows[row] + " " * (label - cell_len(g.rows[row])), style="bold")
        if is_halved:
            lower = cells[row + 1] if row + 1 < len(cells) else None
            line.append_tokens(half_cells(cells[row], lower, ramp_of(g)))
        else:
            line.append_tokens(_cells(panel, row, cells[row], sizes, colour=screen.colour))
        line.append_tokens(
            (f"{column.text(row):>{width}}", column.style(row)) for column, width in beside
        )
        yield line


def _headings(panel: _Panel, sizes: Sequence[int]) -> list[str]:
    """The lines of the names of the columns: names that are wider than their cells go on below; or
    where they have no room some of their numbers.
    """
    g = panel.grid
    longest = _longest(g)
    size = sizes[0] if sizes else 0
    if not panel.has_numbers and not g.has_words and (size <= min(3, longest) or not longest):
        return [ticks(g.places or range(len(g.columns)), size, every=10 if size == 1 else 5)]
    names = []
    for name, size in zip(g.columns, sizes, strict=True):
        room = max(1, size - 1)
        if panel.has_numbers and cell_len(panel.starred(name)) <= room:
            word = panel.starred(name)
            names.append([" " * (size - cell_len(word)) + word])
        else:
            lines = chop_cells(fitted(name, room * _NAME_LINES), room)[:_NAME_LINES]
            if g.has_words and all(cell_len(word) <= room for word in name.split()):
                lines = name.split()
            before = " " * panel.has_numbers
            names.append([set_cell_size(before + line, size) for line in lines])
    return [
        "".join(word or " " * size for word, size in zip(line, sizes, strict=True))
        for line in zip_longest(*names)
    ]


def _cells(
    panel: _Panel, row: int, cells: list[int], sizes: Sequence[int], *, colour: bool
) -> Iterator[tuple[str, Style]]:
    """The cells of a row as signs, as shades, or as numbers behind a blank."""
    g = panel.grid
    ramp = ramp_of(g)
    masked = "" if g.scale == "change" else panel.starred("0")
    for column, (level, size) in enumerate(zip(cells, sizes, strict=True)):
        if g.signs is not None:
            yield g.signs[row][column]
            yield " " * (size - 1), PLAIN
        elif not panel.has_numbers:
            yield cell(
                level, size, colour=colour, ramp=ramp, gap=int(size > (1 if g.has_words else 3))
            )
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
    room = width - gap
    style = PLAIN
    if level == MASKED:
        sign = " "
        style = EMPTY if word and colour else PLAIN
    elif level == NOT_A_NUMBER:
        sign = NAN_SIGN
    elif colour:
        sign = " "
        style = ramp.style(level)
    else:
        sign = ramp.sign(level)
    text = f"{word:>{room}}" if word else sign * room
    return text + " " * gap, style


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


def ramp_of(g: Grid) -> Ramp:
    """The ramp of the scale of a grid."""
    return CHANGES if g.scale == "change" else WEIGHTS


def levels(values: Array, allowed: Array, scale: Scale, top: float) -> Array:
    """Levels of 0 … 255 on a scale: `linear` from 0 to `top`, `log` over the decades below it; of a
    `change` 0 … 510 from −`top` on. `MASKED` where a cell is masked, and `NOT_A_NUMBER`.
    """
    top = top or 1.0
    is_known = allowed & np.isfinite(values)
    known = np.where(is_known, values, 0.0)
    match scale:
        case "linear":
            scaled = np.rint(255 * np.clip(known / top, 0, 1))
        case "log":
            decades = np.log10(np.maximum(known, top * 10.0**-DECADES) / top)
            scaled = np.rint(255 * np.clip(1 + decades / DECADES, 0, 1))
        case "change":
            scaled = 255 + np.rint(255 * np.clip(known / top, -1, 1))
        case _:
            assert_never(scale)
    return np.select([~allowed, ~is_known], [MASKED, NOT_A_NUMBER], scaled).astype(np.int16)


def ends(
    scale: Scale,
    top: float,
    unit: Unit = "number",
    digits: int | None = None,
    *,
    least: float = 0.0,
    largest: float = 0.0,
) -> tuple[str, str]:
    """What the ends of a scale stand for: `0` and `.62`, or `≥ .62` if the digits show that the
    `largest` cell exceeds it; of changes `-.5` and `.5`, or `0` if none is less.
    """
    high = shown(top, unit, digits)
    match scale:
        case "change":
            return (shown(-top, unit, digits) if least < 0 else "0"), high
        case "linear":
            low = "0"
        case "log":
            low = f"≤ {f'{top / 10**DECADES:.1g}'.removeprefix('0')}"
        case _:
            assert_never(scale)
    is_exceeded = largest > top and shown(largest, unit, digits) != high
    return low, f"≥ {high}" if is_exceeded else high


def scale_words(group: Sequence[Grid], unit: Unit = "number", digits: int | None = None) -> str:
    """The kind and the range of the common scale of some grids: `linear, 0 … .62`, of changes `-.5
    … .5`.
    """
    scale = group[0].scale
    cells = np.concatenate([g.visible for g in group])
    least = float(np.nanmin(cells, initial=0.0))
    largest = float(np.nanmax(cells, initial=0.0))
    words = " … ".join(ends(scale, group[0].top, unit, digits, least=least, largest=largest))
    return words if scale == "change" else f"{scale}, {words}"


def swatch_levels(group: Sequence[Grid]) -> list[int]:
    """Levels of the ramp of some grids in equal steps; of changes from the middle on if none is
    less.
    """
    top = ramp_of(group[0]).top
    has_less = any((g.visible < 0).any() for g in group)
    begin = top // 2 if group[0].scale == "change" and not has_less else 0
    return [begin + (top - begin) * step // _STEPS for step in range(_STEPS + 1)]


def swatches(group: Sequence[Grid], *, colour: bool) -> Text:
    """The shades of the common scale of some grids, without colour its signs."""
    ramp = ramp_of(group[0])
    steps = swatch_levels(group)
    if not colour:
        return Text("".join(dict.fromkeys(map(ramp.sign, steps))))
    return Text.assemble(*((" ", ramp.style(level)) for level in steps))


# ------------------------------------------------------------------------------------------ caption


def _caption(panels: Sequence[_Panel], screen: Screen) -> Iterator[str | Text]:
    """What a cell is, the scales of what is shaded, and the signs that occur."""
    parts = [panel.grid for panel in panels]
    has_numbers = panels[0].has_numbers
    yield from dict.fromkeys(g.meaning for g in parts if g.meaning)
    if has_numbers and any(g.marked is not None for g in parts):
        yield "* row maximum"
    if screen.colour or not has_numbers:
        yield from _scales(parts, screen, has_numbers=has_numbers)
    yield from _signs(parts, has_numbers=has_numbers)
    columns = [column for panel in panels for column in panel.beside if column.meaning]
    yield from dict.fromkeys(f"{column.heading} {column.meaning}" for column in columns)


def _signs(parts: Sequence[Grid], *, has_numbers: bool) -> Iterator[str]:
    """What stands in cells without a number, as far as it occurs."""
    if any(g.signs is None and g.scale != "change" and not g.allowed.all() for g in parts):
        yield "0 masked" if has_numbers else f"a blank is {parts[0].masked}"
    if any(np.isnan(g.visible).any() for g in parts):
        yield f"{'nan' if has_numbers else NAN_SIGN} not a number"


def _scales(parts: Sequence[Grid], screen: Screen, *, has_numbers: bool) -> Iterator[Text]:
    """The range of each scale with its shades, and which grids have it if there are several."""
    shaded = [g for g in parts if g.signs is None]
    graded = [g for g in shaded if (g.visible != g.top).any()]
    for scale in dict.fromkeys(g.scale for g in graded):
        group = [g for g in shaded if g.scale == scale]
        words = Text(f"shade {scale_words(group, group[0].unit, group[0].digits)}", "dim")
        if len(group) < len(shaded):
            words.append(f" in {' and '.join(g.title for g in group)}")
        elif len(shaded) > 1:
            words.append(" in all")
        if not has_numbers:
            words = Text.assemble(words.append(": "), swatches(group, colour=screen.colour))
        yield words
