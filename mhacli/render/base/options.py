"""The options of views, and the screen."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from mhacli import settings
from mhacli.errors import UsageError, out_of_range
from mhacli.record.exports import MEAN_OF_HEADS
from mhacli.record.heads import SORTS, require_order
from mhacli.settings import (
    CHECKPOINT,
    LAYERS,
    PICTURES,
    VIEW,
    LayerChoices,
    index_list,
    layer_list,
    setting,
)

View = Literal["auto", "matrix", "heatmap", "top", "none"]
"""`auto` is the matrix, or, if it does not fit, the heatmap."""
Scale = Literal["linear", "log"]
Figure = Literal["head", "grid", "walk", "effects"]
Rows = Literal["generated", "last"] | tuple[int, ...]
"""Query rows of a text: those whose next token was generated, the last one, or positions."""


def row_choice(word: str) -> Rows:
    """The queries that a word names. Raises `ValueError` for any other word."""
    names: tuple[Literal["generated", "last"], ...] = ("generated", "last")
    if word in names:
        return names[names.index(word)]
    try:
        return index_list(word)
    except ValueError:
        raise ValueError(
            f"{word[:80]!r} is not one of generated, last, and numbers of queries such as 0,4-6"
        ) from None


def _order(word: str) -> str:
    require_order(word)
    return word


def head_list(word: str) -> tuple[int, ...]:
    """Heads, or the mean of all. Raises `ValueError` with the form."""
    return (MEAN_OF_HEADS,) if word == "mean" else settings.head_list(word)


_indices = partial(setting, parse=index_list, metavar="LIST")
HEADS_COMPUTED = "Compute only these heads, such as 0,2 or 0-3."
SEQUENCES_SHOWN = "Show only these sequences, such as 0,2."
_HIDE_SINKS = "Leave out sinks, and rescale each row to sum to 1."
_SORT = (
    "Order the heads by a statistic, such as entropy, or by the condition of --where (where):"
    " largest first, or with :up smallest first."
)
_ROWS = (
    "Show only these queries: generated, last, or positions such as 3,7-9, with --words those of"
    " words; without --layer and --head, what they attend to on average."
)
_ALL = "Show everything; leave out no row, column, head or layer."
_FITTING = "all that fit"
_DETAILS = ("tokens", "shapes", "timings", "verbose")
BY_LENGTH = "linear, log for long texts"
_BY_HEAD = "the head chosen by --head, or all in a grid"


@dataclass(frozen=True)
class ViewOptions:
    """The options of a view.

    `heads` and `sequences` None: as many as fit on a screen. `everything`: all, in full. `maps`
    (heads) and `sort` are for records of many heads. For a checkpoint, `layers` to draw have a kind
    (None: any) and a number; `rows` are the queries to draw of each text (None: all); `words`
    merges the parts of a word. `map_scale` None: linear for short texts, log for long ones. For
    files, `figure` selects the picture (None: by the record), `hide_sinks` renormalises weights
    without sinks, and `full` puts every cell into a page. `tokens`, `shapes` and `timings` add
    these tables; `verbose` adds all of them and every column of a matrix; `brief` omits the table
    of heads.
    """

    view: View = setting("auto", VIEW, "How to draw each head.", common=True)
    heads: tuple[int, ...] | None = setting(
        None,
        VIEW,
        "Show only these heads, such as 0,2 or 0-3, or with --model the mean of all: mean.",
        "--head",
        parse=head_list,
        metavar="LIST",
        default=_FITTING,
        common=True,
    )
    sequences: tuple[int, ...] | None = _indices(
        None, VIEW, SEQUENCES_SHOWN, "--sequence", default=_FITTING
    )
    top: int = setting(
        3,
        VIEW,
        "Keys per query, with --view top.",
        "--top --top-k",
        low=1,
        high=1000,
        metavar="K",
        idle=("view=top", "rows"),
    )
    precision: int = setting(
        2, VIEW, "Decimals of attention weights.", "--precision --decimals", low=1, high=9
    )
    everything: bool = setting(False, VIEW, _ALL, "--all")
    tokens: bool = setting(False, VIEW, "Print the tokens with their ids.")
    shapes: bool = setting(False, VIEW, "Print the shape of every step.", modes=("layer", "record"))
    timings: bool = setting(False, VIEW, "Print the time of every step.", modes=("layer", "record"))
    verbose: bool = setting(False, VIEW, "Print every table, column and detail.")
    brief: bool = setting(
        False, VIEW, "Print the table of heads and the self-check only.", excludes=_DETAILS
    )
    words: bool = setting(
        False,
        VIEW,
        "Merge subword tokens into words: sum over keys, mean over queries.",
        modes=("model",),
        idle=("layers", "heads", "rows", "html", "svg", "png"),
    )
    rows: Rows | None = setting(
        None, VIEW, _ROWS, "--from", parse=row_choice, metavar="ROWS", modes=("model",)
    )
    maps: tuple[int, ...] = _indices(
        (), VIEW, "Draw a map of these heads, such as 3 or 0-3.", "--map", common=True
    )
    sort: str = setting("head", VIEW, _SORT, parse=_order, metavar="NAME[:up]", words=SORTS)
    layers: LayerChoices = setting(
        None, CHECKPOINT, LAYERS, "--layer --layers", parse=layer_list, metavar="LIST", common=True
    )
    figure: Figure | None = setting(
        None, PICTURES, "What --svg and --png show.", default=_BY_HEAD, needs=("svg", "png")
    )
    map_scale: Scale | None = setting(
        None, PICTURES, "Colour scale of attention weights.", default=BY_LENGTH
    )
    hide_sinks: bool = setting(False, PICTURES, _HIDE_SINKS, needs=("html", "svg", "png"))
    full: bool = setting(
        False,
        PICTURES,
        "Store every attention weight in the page, whatever its size.",
        needs=("html",),
    )

    @property
    def is_mean(self) -> bool:
        """Whether the mean of all heads was chosen."""
        return self.heads == (MEAN_OF_HEADS,)

    def shows_head(self, head: int) -> bool:
        """Whether a head is chosen, as all are unless some are named."""
        return self.heads is None or head in self.heads


@dataclass(frozen=True)
class Screen:
    """The width in columns, whether colour is supported, and whether all details are shown."""

    width: int
    colour: bool
    verbose: bool = False


@dataclass(frozen=True)
class Selection:
    """Indices to draw in order, and the number hidden after the first `before`."""

    shown: tuple[int, ...]
    hidden: int

    @property
    def before(self) -> int:
        """The number of indices before the gap."""
        return (len(self.shown) + 1) // 2 if self.hidden else len(self.shown)


MAX_SEQUENCES = 4
"""The most sequences that are drawn without a choice."""


def balanced(count: int, room: int) -> Selection:
    """All of `count` indices, or the first and last ones if only `room` fit.

    >>> balanced(9, 4)
    Selection(shown=(0, 1, 7, 8), hidden=5)
    """
    if count <= room:
        return Selection(tuple(range(count)), 0)
    head, tail = (room + 1) // 2, room // 2
    return Selection((*range(head), *range(count - tail, count)), count - room)


def chosen(
    request: Sequence[int] | None, count: int, room: int, everything: bool, name: str
) -> Selection:
    """The requested indices, or all, or a balanced few. Raises `UsageError` for an index out of
    range.
    """
    for index in request or ():
        if not 0 <= index < count:
            raise UsageError(out_of_range(f"--{name}", index, count))
    if request is not None:
        return Selection(tuple(dict.fromkeys(request)), 0)
    return balanced(count, count if everything else room)


def sequences_to_draw(options: ViewOptions, count: int) -> Selection:
    """The sequences of a record to draw. Raises `UsageError` for an index out of range."""
    return chosen(options.sequences, count, MAX_SEQUENCES, options.everything, "sequence")


def require_choices(record_heads: int, n_sequences: int, options: ViewOptions) -> None:
    """Raises `UsageError` for a head or sequence out of range, before any computation."""
    chosen(options.heads, record_heads, 1, False, "head")
    chosen(options.sequences, n_sequences, 1, False, "sequence")
