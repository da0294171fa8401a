"""What a command shows, as data. A view says what its tables hold; the renderers measure, format,
colour and explain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Generic, Literal, TypeVar

from rich.console import RenderableType
from rich.style import Style

from mhacli.io.data import Array
from mhacli.numbers import Unit, shown
from mhacli.record.glossary import words_of

Row = TypeVar("Row")
Scale = Literal["linear", "log", "change"]
"""How shades follow numbers: in proportion, by their logarithm, or by their difference from 0."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Column(Generic[Row]):
    """A column of a table: its heading, and the value of a row with its unit, weights with
    `digits`, and `none` without a value.

    `meaning` explains the heading in the legend, `explanation` in tooltips, and `about` a cell in
    its own. Where a screen is narrow, the columns with the largest `drop` go first, and those with
    0 stay. The main column, which has a `least` width or else the widest words, is shortened, or
    broken if it `wraps`: down to that width before any column goes, or as the last resort. `style`
    is that of a cell on the terminal.
    """

    heading: str = field(kw_only=False)
    value: Callable[[Row], object] = field(kw_only=False)
    unit: Unit = "word"
    digits: int | None = None
    none: str = "–"
    drop: int = 0
    least: int | None = None
    wraps: bool = False
    style: Callable[[Row], str] = lambda row: ""
    meaning: str = ""
    explanation: str = ""
    about: Callable[[Row], str] = lambda row: ""

    def text(self, row: Row) -> str:
        """The cell of a row."""
        value = self.value(row)
        return self.none if value is None else shown(value, self.unit, self.digits)


def column(
    table: str, name: str, value: Callable[[Row], object], unit: Unit = "word", **more: Any
) -> Column[Row]:
    """A column whose words are those of `name` in a table of record/columns.toml."""
    word = words_of("columns", table)[name]
    more = {"meaning": word.legend, **more}
    return Column(word.heading, value, unit=unit, explanation=word.explanation, **more)


def fields(units: Mapping[str, Unit]) -> list[Column[Mapping[str, Any]]]:
    """The columns of rows that are mappings: a heading for each field, whose values have this
    unit.
    """
    return [Column(name, itemgetter(name), unit=unit) for name, unit in units.items()]


@dataclass(frozen=True, kw_only=True)
class Table(Generic[Row]):
    """Rows under columns. Of more than `most` rows the first are shown, or, with `has_ends`, the
    first and the last.

    The rows of the `foot` stand below. `legend` explains what is no heading, as far as there is
    room, and `remarks` what cells mean, on lines of their own. Columns are `gap` blanks apart. On
    the terminal the lines of `above` and `below` stand around a row, across all columns.
    """

    columns: Sequence[Column[Row]] = field(kw_only=False)
    rows: Sequence[Row] = field(kw_only=False)
    foot: Sequence[Row] = ()
    title: str = ""
    most: int | None = None
    has_ends: bool = False
    legend: Sequence[str] = ()
    remarks: Sequence[str] = ()
    gap: int = 2
    above: Callable[[Row], Sequence[RenderableType]] = lambda row: ()
    below: Callable[[Row], Sequence[RenderableType]] = lambda row: ()

    def meanings(self, columns: Sequence[Column[Row]]) -> list[str]:
        """What the headings of columns mean, in their order."""
        return [f"{column.heading} = {column.meaning}" for column in columns if column.meaning]


def pairs(
    rows: Sequence[tuple[str, object]], *, style: str = "", gap: int = 2, title: str = ""
) -> Table[tuple[str, object]]:
    """Names in a style, and words beside them that may take several lines."""
    name: Column[tuple[str, object]] = Column("", lambda row: row[0], style=lambda row: style)
    words: Column[tuple[str, object]] = Column("", lambda row: row[1], least=20, wraps=True)
    return Table([name, words], rows, gap=gap, title=title)


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """A matrix of numbers `[row, column]` with names along both axes. NaN is not a number; where
    `allowed` is false a cell is masked.

    Shades reach from 0 to `top`, or for a change from −`top`. `places` are the numbers of columns
    where names do not fit (None: from 0 on), and `numbered` the names of rows beside these.
    `marked` cells have a star, and `signs` stand in place of numbers, each with its style. Columns
    `beside` the cells are of the number of a row; those with a `drop` go first. With `has_all_rows`
    none is left out. `smaller` gives the grid with at most so many rows and columns. `taken` are
    the cells that were taken out, and `about` gives the tooltip of a cell (None: its names and
    number; a cell without tooltip is not drawn). With `has_words` the columns have names of which
    no word is broken where they fit. A blank is `masked`, or what that word says.
    """

    title: str = ""
    values: Array
    allowed: Array
    rows: Sequence[str]
    columns: Sequence[str]
    top: float
    scale: Scale = "linear"
    unit: Unit = "weight"
    digits: int | None = None
    corner: str = ""
    meaning: str = ""
    places: Sequence[int] | None = None
    numbered: Sequence[str] = ()
    marked: Array | None = None
    signs: Sequence[Sequence[tuple[str, Style]]] | None = None
    beside: Sequence[Column[int]] = ()
    has_all_rows: bool = False
    smaller: Callable[[int, int], Grid] | None = None
    taken: Array | None = None
    about: Callable[[int, int], str] | None = None
    has_words: bool = False
    masked: str = "masked"

    @property
    def visible(self) -> Array:
        """The numbers of the cells that are not masked."""
        numbers: Array = self.values[self.allowed]
        return numbers
