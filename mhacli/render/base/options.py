"""What of a record to draw, and on what kind of screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mhacli.errors import UsageError, out_of_range

if TYPE_CHECKING:
    from mhacli.results.record.record import LayerChoice

View = Literal["auto", "matrix", "heatmap", "top", "none"]
"""`auto`: the matrix, or what shows most where it does not fit."""
Scale = Literal["linear", "log", "rank"]
Figure = Literal["head", "grid", "walk", "effects"]
Rows = Literal["generated", "last"] | tuple[int, ...]
"""Queries of a text: those of which the model made the next token, the last one, or places."""


@dataclass(frozen=True)
class ViewOptions:
    """The choices of a view. `heads` and `sequences` None: as many as a screen takes; `everything`: all, whole. `maps` (heads)
    and `sort` are for records of many heads. Of a checkpoint `layers` are drawn, each of a kind (None: any) and a number; `rows`
    are the queries that are drawn of each text (None: all); `words` merges the parts of a word. `map_scale` None: linear for
    short texts, log for long ones. Of files, `figure` says what is drawn (None: what was chosen), `hide_sinks` renormalises what
    is left beside sinks, and `full` puts every cell into a page. `tokens`, `shapes` and `timings` add these tables, `verbose` all
    of them and every column of a matrix; `brief` leaves the table of heads alone."""

    view: View = "matrix"
    heads: tuple[int, ...] | None = None
    sequences: tuple[int, ...] | None = None
    top: int = 3
    precision: int = 2
    everything: bool = False
    maps: tuple[int, ...] = ()
    map_scale: Scale | None = None
    sort: str = "head"
    layers: tuple[LayerChoice, ...] | None = None
    rows: Rows | None = None
    words: bool = False
    figure: Figure | None = None
    hide_sinks: bool = False
    full: bool = False
    tokens: bool = False
    shapes: bool = False
    timings: bool = False
    verbose: bool = False
    brief: bool = False


@dataclass(frozen=True)
class Screen:
    """Columns to fill, and whether colour can be used."""

    width: int
    colour: bool


@dataclass(frozen=True)
class Selection:
    """Indices to draw, in order, and how many are left out between `before` and the rest."""

    shown: tuple[int, ...]
    hidden: int

    @property
    def before(self) -> int:
        """How many of the shown ones come before the gap."""
        return (len(self.shown) + 1) // 2 if self.hidden else len(self.shown)


def balanced(count: int, room: int) -> Selection:
    """All of `count` indices, or the first and last ones where only `room` fit.

    >>> balanced(9, 4)
    Selection(shown=(0, 1, 7, 8), hidden=5)
    """
    if count <= room:
        return Selection(tuple(range(count)), 0)
    head, tail = (room + 1) // 2, room // 2
    return Selection((*range(head), *range(count - tail, count)), count - room)


def chosen(asked: Sequence[int] | None, count: int, room: int, everything: bool, name: str) -> Selection:
    """The indices asked for, or all, or a balanced few. Raises `UsageError` for one that does not exist."""
    for index in asked or ():
        if not 0 <= index < count:
            raise UsageError(out_of_range(f"--{name}", index, count))
    if asked is not None:
        return Selection(tuple(dict.fromkeys(asked)), 0)
    return balanced(count, count if everything else room)


def drawn_sequences(options: ViewOptions, count: int) -> Selection:
    """The sequences of a checkpoint's record that are drawn. Raises `UsageError` for one that does not exist."""
    return chosen(options.sequences, count, _MAX_SEQUENCES, options.everything, "sequence")


_MAX_SEQUENCES = 4


def require_choices(record_heads: int, n_sequences: int, options: ViewOptions) -> None:
    """Raises `UsageError` for a head or sequence that does not exist, before anything is computed."""
    chosen(options.heads, record_heads, 1, False, "head")
    chosen(options.sequences, n_sequences, 1, False, "sequence")
