"""What a command shows, as data. A view says what its tables hold; the renderers measure, format, colour and explain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from mhacli.record.glossary import words_of
from mhacli.render.base.format import bytes_text, count_text, number_text, percent_text, seconds_text, short_text

Row = TypeVar("Row")
Unit = Literal["word", "id", "integer", "number", "short", "change", "size", "percent", "count", "bytes", "seconds"]
"""What a value is: an `id` has no separators, a `change` a sign and the `size` of a change none; a `count` is of operations."""


def _size_text(number: float) -> str:
    """A change with as many digits as the others of its column: `0.2500`, `1.2e-05`, `0`."""
    return "0" if number == 0 else f"{number:.4f}" if abs(number) >= 1e-4 else f"{number:.1e}"


def _change_text(number: float) -> str:
    """A change with its sign: `-0.2500`, `+1.2e-05`, `0`."""
    return f"{'+' if number > 0 else ''}{_size_text(number)}"


_TEXTS: dict[Unit, Callable[[Any], str]] = {
    "word": str,
    "id": str,
    "integer": "{:,}".format,
    "number": number_text,
    "short": short_text,
    "change": _change_text,
    "size": _size_text,
    "percent": percent_text,
    "count": count_text,
    "bytes": bytes_text,
    "seconds": seconds_text,
}


def shown(value: object, unit: Unit) -> str:
    """A value as text; a dash for None."""
    return "–" if value is None else _TEXTS[unit](value)


@dataclass(frozen=True, kw_only=True)
class Column(Generic[Row]):
    """A column of a table: its heading, and the value of a row with its unit.

    `meaning` explains the heading in the legend, `explanation` in tooltips. Where a screen is narrow, the columns with the
    largest `drop` go first, and those with 0 stay. The main column, which has a `least` width or else the widest words, is
    shortened: down to that width before any column goes, or as the last resort. `style` is that of a cell on the terminal.
    """

    heading: str
    value: Callable[[Row], object]
    unit: Unit = "word"
    drop: int = 0
    least: int | None = None
    style: Callable[[Row], str] = lambda row: ""
    meaning: str = ""
    explanation: str = ""

    def text(self, row: Row) -> str:
        """The cell of a row."""
        return shown(self.value(row), self.unit)


def column(table: str, name: str, value: Callable[[Row], object], unit: Unit = "word", **how: Any) -> Column[Row]:
    """A column whose words are those of `name` in a table of record/columns.toml."""
    word = words_of("columns", table)[name]
    how = {"meaning": word.legend, **how}
    return Column(heading=word.heading, value=value, unit=unit, explanation=word.explanation, **how)


@dataclass(frozen=True, kw_only=True)
class Table(Generic[Row]):
    """Rows under columns. Of more than `most` rows the first are shown, or, with `has_ends`, the first and the last."""

    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    title: str = ""
    most: int | None = None
    has_ends: bool = False
