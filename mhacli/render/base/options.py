"""The options of views, and the screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mhacli.errors import UsageError, out_of_range

if TYPE_CHECKING:
    from mhacli.record.record import LayerChoice

View = Literal["auto", "matrix", "heatmap", "top", "none"]
"""`auto` is the matrix, or, if it does not fit, the view that shows most."""
Scale = Literal["linear", "log", "rank"]
Figure = Literal["head", "grid", "walk", "effects"]
Rows = Literal["generated", "last"] | tuple[int, ...]
"""Query rows of a text: those whose next token was generated, the last one, or positions."""


@dataclass(frozen=True)
class ViewOptions:
    """The options of a view.

    `heads` and `sequences` None: as many as fit on a screen. `everything`: all, in full. `maps` (heads) and `sort` are
    for records of many heads. For a checkpoint, `layers` to draw have a kind (None: any) and a number; `rows` are the
    queries to draw of each text (None: all); `words` merges the parts of a word. `map_scale` None: linear for short
    texts, log for long ones. For files, `figure` selects the picture (None: by the record), `hide_sinks` renormalises
    weights without sinks, and `full` puts every cell into a page. `tokens`, `shapes` and `timings` add these tables;
    `verbose` adds all of them and every column of a matrix; `brief` omits the table of heads.
    """

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
    """The width in columns, and whether colour is supported."""

    width: int
    colour: bool


@dataclass(frozen=True)
class Selection:
    """Indices to draw in order, and the number hidden after the first `before`."""

    shown: tuple[int, ...]
    hidden: int

    @property
    def before(self) -> int:
        """The number of indices before the gap."""
        return (len(self.shown) + 1) // 2 if self.hidden else len(self.shown)


def balanced(count: int, room: int) -> Selection:
    """All of `count` indices, or the first and last ones if only `room` fit.

    >>> balanced(9, 4)
    Selection(shown=(0, 1, 7, 8), hidden=5)
    """
    if count <= room:
        return Selection(tuple(range(count)), 0)
    head, tail = (room + 1) // 2, room // 2
    return Selection((*range(head), *range(count - tail, count)), count - room)


def chosen(request: Sequence[int] | None, count: int, room: int, everything: bool, name: str) -> Selection:
    """The requested indices, or all, or a balanced few. Raises `UsageError` for an index out of range."""
    for index in request or ():
        if not 0 <= index < count:
            raise UsageError(out_of_range(f"--{name}", index, count))
    if request is not None:
        return Selection(tuple(dict.fromkeys(request)), 0)
    return balanced(count, count if everything else room)


def sequences_to_draw(options: ViewOptions, count: int) -> Selection:
    """The sequences of a checkpoint's record to draw. Raises `UsageError` for an index out of range."""
    return chosen(options.sequences, count, _MAX_SEQUENCES, options.everything, "sequence")


_MAX_SEQUENCES = 4


def require_choices(record_heads: int, n_sequences: int, options: ViewOptions) -> None:
    """Raises `UsageError` for a head or sequence out of range, before any computation."""
    chosen(options.heads, record_heads, 1, False, "head")
    chosen(options.sequences, n_sequences, 1, False, "sequence")
