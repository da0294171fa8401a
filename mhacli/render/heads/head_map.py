"""A head's attention weights as a map of cells or blocks, and as a grid with the names of its
tokens.

A map has the cells of the pattern if the record has them, else blocks. Both are the mean weight
from the queries of a row to the keys of a column. So pooling cells and hiding sinks use the same
arithmetic for both, and a head looks the same in the terminal, the viewer, pages and pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, assert_never

import numpy as np
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.io.data import Array
from mhacli.numbers import shown
from mhacli.record.exports import MEAN_OF_HEADS
from mhacli.record.heads import HeadStatistics, words_of_type
from mhacli.record.record import LayerView, Record
from mhacli.render.base.doc import Column, Grid, Table
from mhacli.render.base.format import fitted, flowing, token_at, token_text
from mhacli.render.base.grids import MASKED, Form, grids
from mhacli.render.base.options import Scale, Screen, ViewOptions
from mhacli.render.base.selection import DrawableHead, usual_scale
from mhacli.render.base.terminal import table
from mhacli.render.base.tokens import MAX_TOKEN_ROWS


def where(record: Record, sequence: int, layer: str, *parts: str) -> str:
    """The title of a picture: its layer, its sequence if there are several, and more parts."""
    text = f"sequence {sequence}" if len(record.sequences) > 1 else ""
    return " · ".join(filter(None, (layer, text, *parts)))


def kv_head_of(head: DrawableHead) -> str:
    """The kv head of a query head, if it is shared."""
    group, number = head.record.config.heads_per_kv_head, head.statistics.head
    is_shared = group > 1 and number != MEAN_OF_HEADS
    return f" · kv head {number // group}" if is_shared else ""


# --------------------------------------------------------------------------------------------- maps

QUERY = 0
"""The axis of a map that runs downward."""
KEY = 1
"""The axis of a map that runs from left to right."""
NOTHING = 1e-6
"""Rows with a smaller remaining weight are not renormalised, because it consists of rounding
errors."""


@dataclass(frozen=True)
class HeadMap:
    """`weights` `[row, column]` are mean attention weights from the `queries` of a row to the
    `keys` of a column, two texts as the names of their tokens.

    They are `MASKED` in cells that are masked entirely, and NaN if not a number. A cell stands for
    `block` × `block` tokens, starting at the positions `first`, which are negative for padding.
    `of_sinks` is the part of the weights that goes to the keys at `sinks`. `learned` `[row]` is the
    weight of a sink logit, None without one. `n_queries` `[row]` counts queries with a visible key.
    `taken` `[row]` is the weight removed from renormalised rows, None if nothing was removed.
    `rows` are the positions of requested queries, None for all. From the query `produced` on, the
    next token was generated. `entropy` `[row]` is the mean of its queries' in nats, with sinks;
    None if it is not known.
    """

    queries: tuple[str, ...]
    keys: tuple[str, ...]
    weights: Array
    of_sinks: Array
    n_queries: Array
    sinks: tuple[int, ...]
    block: int = 1
    first: tuple[int, int] = (0, 0)
    learned: Array | None = None
    taken: Array | None = None
    rows: tuple[int, ...] | None = None
    produced: int | None = None
    entropy: Array | None = None

    @cached_property
    def is_open(self) -> Array:
        """Whether any cell is visible from a row's queries to a column's keys."""
        is_open: Array = self.weights != MASKED
        return is_open

    @cached_property
    def is_taken(self) -> Array:
        """Whether a cell is that of a sink which was removed. No block is of sinks alone."""
        sinks = self.sinks if self.taken is not None and self.block == 1 else ()
        return self.is_open & np.isin(np.arange(self.weights.shape[1]) + self.first[KEY], sinks)

    @property
    def largest(self) -> float:
        """The top of the scale: the largest weight of a row with several visible columns; 0 without
        such a row. Removed sinks do not count.
        """
        choices = self.is_open & ~self.is_taken
        with_choice = choices.sum(axis=1, keepdims=True) > 1
        return float(
            np.where(with_choice & np.isfinite(self.weights), self.weights, 0.0).max(initial=0.0)
        )

    @property
    def sums(self) -> Array:
        """The sum of each row, `[row]`."""
        sums: Array = np.where(self.is_open, self.weights, 0.0).sum(axis=1)
        return sums

    @property
    def sink_weights(self) -> Array:
        """The weight of sinks in each row, `[row]`, removed or not."""
        weights: Array = self.of_sinks.sum(axis=1) if self.taken is None else self.taken
        return weights

    @property
    def sink_mass(self) -> float:
        """The mean weight of sinks, removed or not, over all queries with a visible key."""
        return self._mean(self.sink_weights)

    @property
    def learned_mass(self) -> float | None:
        """The mean weight of a sink logit; None without one."""
        return None if self.learned is None else self._mean(self.learned)

    def _mean(self, rows: Array) -> float:
        """The mean over all queries with a visible key and finite weights."""
        n_queries = np.where(np.isnan(rows), 0.0, self.n_queries)
        return float((np.nan_to_num(rows) * n_queries).sum() / max(1.0, float(n_queries.sum())))

    def strongest(self, row: int) -> list[tuple[int, float]]:
        """The visible columns of a row that were not removed, with their weights in descending
        order, NaN last.
        """
        order = np.argsort(-self.weights[row], kind="stable")
        columns = order[self.is_open[row, order] & ~self.is_taken[row, order]]
        return [*zip(columns.tolist(), self.weights[row, columns].tolist(), strict=True)]

    def pooled(self, factor: int) -> HeadMap:
        """Blocks of `factor` × `factor` cells: sums over keys, averaged over queries with a visible
        key. NaN propagates.
        """
        if factor == 1:
            return self
        n_queries = sums(self.n_queries, factor)

        def mean(numbers: Array) -> Array:
            """Numbers `[row]`, or cells `[row, column]` summed over keys, averaged over the queries
            of the rows.
            """
            total = sums((numbers.T * self.n_queries).T, factor)
            total = sums(total, factor, axis=1) if total.ndim == 2 else total
            means: Array = (total.T / np.maximum(n_queries, 1)).T
            return means

        is_open = sums(sums(self.is_open.astype(int), factor), factor, axis=1) > 0
        return replace(
            self,
            weights=np.where(is_open, mean(np.where(self.is_open, self.weights, 0.0)), MASKED),
            of_sinks=mean(self.of_sinks),
            n_queries=n_queries,
            block=self.block * factor,
            **self._of_rows(mean),
        )

    def without_sinks(self) -> HeadMap:
        """The map without sinks and sink logit, renormalised, with the removed weight in `taken`.

        Rows are divided by the sum of the rest, which is more precise than one less the removed
        weight.
        """
        rest = np.clip(self.weights - self.of_sinks, 0, None)
        sums = rest.sum(axis=1, keepdims=True)
        weights = np.where(
            sums > NOTHING, rest / np.maximum(sums, NOTHING), np.where(np.isnan(sums), np.nan, 0.0)
        )
        return replace(
            self,
            weights=np.where(self.is_open, weights, MASKED),
            of_sinks=np.zeros_like(rest),
            taken=self.of_sinks.sum(axis=1),
        )

    def part(self, rows: slice | Array, columns: slice | Array = slice(None)) -> HeadMap:
        """The map of some rows and columns. Rows may be listed in any order and repeatedly. `first`
        stays.
        """
        return replace(
            self,
            weights=self.weights[rows, columns],
            of_sinks=self.of_sinks[rows, columns],
            n_queries=self.n_queries[rows],
            **self._of_rows(lambda numbers: numbers[rows]),
        )

    def _of_rows(self, change: Callable[[Array], Array]) -> dict[str, Any]:
        """The known numbers of rows after a change."""
        numbers = {name: getattr(self, name) for name in ("learned", "taken", "entropy")}
        return {name: change(of_rows) for name, of_rows in numbers.items() if of_rows is not None}

    def of_rows(self, rows: Sequence[int], factor: int = 1) -> HeadMap:
        """The map of requested queries, each on its own, with `factor` columns per cell."""
        repeated = self.part(np.repeat(np.array(rows, dtype=int), factor))
        return replace(repeated.pooled(factor), rows=tuple(rows))

    def of_tokens(self) -> HeadMap:
        """The map without rows and columns of padding alone."""
        rows, columns = (
            slice(-first // self.block, -((first - len(text)) // self.block))
            for first, text in zip(self.first, self.texts, strict=True)
        )
        first = (
            self.first[QUERY] + rows.start * self.block,
            self.first[KEY] + columns.start * self.block,
        )
        return replace(self.part(rows, columns), first=first)

    def fitting(self, rows: int, columns: int) -> HeadMap:
        """The map in blocks, so that at most `rows` × `columns` cells are needed, or one row and
        column.
        """
        n_rows, n_columns = self.weights.shape
        return self.pooled(max(1, -(-n_rows // max(1, rows)), -(-n_columns // max(1, columns))))

    @property
    def texts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The texts by axis."""
        return self.queries, self.keys

    def place(self, axis: int, cell: int) -> int:
        """The position of the first token of a row or column; out of range for padding."""
        if self.rows is not None and axis == QUERY:
            return self.rows[cell]
        return cell * self.block + self.first[axis]

    def places(self, axis: int, cell: int) -> range:
        """The positions of the tokens of a row or column, without padding."""
        begin = self.place(axis, cell)
        size = self.block if self.rows is None or axis == KEY else 1
        return range(max(0, begin), min(len(self.texts[axis]), begin + size))

    def token(self, axis: int, cell: int) -> str:
        """The first token of a row or column, or `is → Paris` for a query whose next token was
        generated.
        """
        text = self.texts[axis]
        place = self.place(axis, cell)
        token = token_text(text, place)
        if axis == QUERY and self.is_followed(cell):
            return f"{token} → {token_text(text, place + 1)}"
        return token

    def is_followed(self, row: int) -> bool:
        """Whether the next token of a row was generated."""
        return (
            self.produced is not None
            and self.produced <= self.place(QUERY, row) < len(self.queries) - 1
        )

    def name(self, axis: int, cell: int) -> str:
        """The token of a row or column, of a requested query with its position; or positions, such
        as `16–31`.
        """
        places = self.places(axis, cell)
        if axis == QUERY and self.rows is not None:
            return f"{places[0]} {self.token(axis, cell)}"
        return f"{places[0]}–{places[-1]}" if self.block > 1 and places else self.token(axis, cell)


def head_map(head: DrawableHead, sequence: int) -> HeadMap:
    """The map of a head of a sequence, without padding: its cells if the record has them, else
    blocks.
    """
    if head.layer.has_pattern:
        return pattern_map(head, sequence)
    return block_map(head.layer, head.place, sequence).of_tokens()


def pattern_map(head: DrawableHead, sequence: int, *, site: str = "pattern") -> HeadMap:
    """The cells of a head of the pattern, without padding."""
    record, place, statistics = head.record, head.place, head.statistics
    arrays = record.arrays
    queries = record.sequences[sequence].tokens
    keys = record.keys[sequence].tokens
    rows, columns = record.inside(sequence)
    allowed = arrays["allowed"]
    cells = cell_map(
        queries,
        keys,
        arrays[site][sequence, place, rows, columns],
        allowed[sequence, min(place, allowed.shape[1] - 1), rows, columns],
        sinks=sink_places(statistics, sequence),
    )
    if site == "pattern" and "entropy" in arrays:  # after dropout a row is no distribution
        cells = replace(cells, entropy=arrays["entropy"][sequence, place, rows])
    return _with_learned(cells, statistics)


def cell_map(
    queries: tuple[str, ...],
    keys: tuple[str, ...],
    weights: Array,
    allowed: Array,
    sinks: tuple[int, ...] = (),
) -> HeadMap:
    """Attention weights `[query, key]` as a map."""
    weights = np.where(allowed, weights.astype(np.float64), MASKED)
    of_sinks = np.zeros_like(weights)
    of_sinks[:, sinks] = np.where(allowed, weights, 0.0)[:, sinks]
    return HeadMap(
        queries=queries,
        keys=keys,
        weights=weights,
        of_sinks=of_sinks,
        n_queries=np.asarray(allowed.any(axis=1), dtype=np.float64),
        sinks=sinks,
    )


def _with_learned(cells: HeadMap, statistics: HeadStatistics) -> HeadMap:
    """The map with the weight of the sink logit that a head has: what rows lack to 1."""
    if statistics.learned_sink is None:
        return cells
    return replace(
        cells, learned=np.where(cells.n_queries > 0, np.clip(1 - cells.sums, 0, None), 0.0)
    )


def sink_places(statistics: HeadStatistics, sequence: int) -> tuple[int, ...]:
    """The positions of a head's sink keys."""
    return tuple(sorted({sink.key for sink in statistics.sink_keys if sink.sequence == sequence}))


def block_map(layer: LayerView, place: int, sequence: int) -> HeadMap:
    """The map of blocks of the head at a `place`, with padding. Of sinks it has only those that
    begin a text or document, because the weights of others per query are not kept.
    """
    record, block = layer.record, layer.inspected.survey.block
    arrays = record.arrays
    statistics = record.heads[place]
    queries, keys = record.sequences[sequence], record.keys[sequence]
    first_query, first_key = (tokens.start for tokens in record.inside(sequence))
    has_keys = np.broadcast_to(arrays["visible"][sequence], arrays["sink"].shape[1:])[place] > 0
    n_queries = sums(has_keys.astype(np.float64), block)
    uniform = arrays["uniform_map"][sequence]
    is_open = uniform[min(place, uniform.shape[0] - 1)] > 0
    begins: dict[int, int] = {}
    for key, document in enumerate(keys.documents or [0] * len(keys.ids)):
        begins.setdefault(document, key)
    sinks = tuple(key for key in sink_places(statistics, sequence) if key in begins.values())
    documents = queries.documents or [0] * len(queries.ids)
    begin_of_query = np.array([begins.get(document, 0) for document in documents], dtype=int)
    is_to_sink = np.isin(begin_of_query, sinks)
    rows = first_query + np.flatnonzero(is_to_sink)
    columns = first_key + begin_of_query[is_to_sink]
    of_sinks = np.zeros(is_open.shape)
    sink = np.nan_to_num(arrays["sink"][sequence, place].astype(np.float64))
    np.add.at(of_sinks, (rows // block, columns // block), sink[rows])
    entropy = sums(np.where(has_keys, arrays["entropy"][sequence, place], 0.0), block)
    n_of_row = np.maximum(n_queries, 1)
    cells = HeadMap(
        queries=queries.tokens,
        keys=keys.tokens,
        weights=np.where(is_open, arrays["map"][sequence, place].astype(np.float64), MASKED),
        of_sinks=of_sinks / n_of_row[:, None],
        n_queries=n_queries,
        sinks=sinks,
        block=block,
        first=(-first_query, -first_key),
        entropy=np.where(n_queries > 0, entropy / n_of_row, np.nan),
    )
    return _with_learned(cells, statistics)


def sums(numbers: Array, size: int, axis: int = 0) -> Array:
    """Sums of `size` neighbours along an axis. The last may have fewer."""
    return np.add.reduceat(numbers, np.arange(0, numbers.shape[axis], size), axis=axis)


def largest_of_maps(maps: Iterable[HeadMap]) -> float:
    """The top of the common scale of some maps."""
    return max((cells.largest for cells in maps), default=0.0) or 1.0


# ----------------------------------------------------------------------------------------- as grids

_NAME = 12
"""The widest name of a query with its position."""
_WIDEST = 22
"""The widest name of a query without position, behind which the generated token may stand."""
_LONGEST = 28
"""The widest token in a list of keys."""
_LEAST_KEYS = 30
"""The least width of a list of keys."""


class TitledMap(NamedTuple):
    """A map with the title of its picture."""

    title: str
    cells: HeadMap


def cell_meaning(block: int, *, of_queries: bool = False) -> str:
    """What a cell of a picture means, which stands for `block` keys, and for as many queries or,
    `of_queries`, for one.
    """
    if block == 1:
        return "attention weights query → key"
    queries = "a query (row) gives" if of_queries else f"{block} queries (a row) give on average"
    return f"a cell is the attention weight that {queries} to {block} keys (a column) together"


def grid_of(
    cells: HeadMap, title: str, *, scale: Scale, top: float | None = None, digits: int | None = None
) -> Grid:
    """The cells or blocks of a head with the names of its queries and keys, up to `top` (None: its
    largest weight).
    """
    n_rows, n_columns = cells.weights.shape
    return Grid(
        title=title,
        values=np.where(cells.is_open, cells.weights, 0.0),
        allowed=cells.is_open,
        rows=[cells.name(QUERY, row) for row in range(n_rows)],
        columns=[cells.name(KEY, key) for key in range(n_columns)],
        places=[cells.place(KEY, key) for key in range(n_columns)],
        top=top or cells.largest or 1.0,
        scale=scale,
        digits=digits,
        meaning=cell_meaning(cells.block, of_queries=cells.rows is not None),
        taken=cells.is_taken,
    )


def patterns(
    maps: Sequence[TitledMap],
    options: ViewOptions,
    screen: Screen,
    *,
    most: int | None = None,
    n_more: int = 0,
) -> Iterator[RenderableType]:
    """Patterns with their titles in the chosen view on a common scale: as matrices, as shades, or
    as each query's top keys. Of more than `most` lines the first are drawn; `n_more` are left out
    before.
    """
    for title, cells in maps:
        if len(cells.weights) == 0:
            yield Text(f"{title}: none of the chosen rows is in this text", "yellow")
    maps = [titled for titled in maps if len(titled.cells.weights)]
    form: Form
    match options.view:
        case "top":
            tables = (table(_top_keys(*titled, options), screen.width) for titled in maps)
            yield Columns([Group(*lines) for lines in tables], padding=(0, 2))
            return
        case "matrix":
            form = "numbers"
        case "heatmap":
            form = "shades"
        case "auto" | "none":
            form = "auto"
        case _:
            assert_never(options.view)
    scale = options.map_scale or usual_scale(cells.keys for _, cells in maps)
    top = largest_of_maps(cells for _, cells in maps)
    panels = [_pattern_grid(*titled, options, scale=scale, top=top) for titled in maps]
    everything = options.everything
    yield from grids(panels, screen, form=form, everything=everything, most=most, n_more=n_more)


def _pattern_grid(
    title: str, cells: HeadMap, options: ViewOptions, *, scale: Scale, top: float
) -> Grid:
    """The cells of a pattern; beside them the sum of each row, if one is not 1, and the entropy."""
    whole = grid_of(cells, title, scale=scale, top=top, digits=options.precision)
    strongest = np.where(whole.allowed, whole.values, -1).argmax(axis=1)
    n_rows, n_columns = whole.values.shape
    names = [fitted(name, _WIDEST) for name in whole.rows]

    def smaller(n_lines: int, n_cells: int) -> Grid:
        if cells.rows is None:
            return _map_grid(cells.fitting(n_lines, n_cells), title, scale, options)
        blocks = cells.of_rows(range(n_rows), max(1, -(-n_columns // n_cells)))  # never pooled
        return replace(_map_grid(blocks, title, scale, options), rows=names)

    return replace(
        whole,
        rows=names,
        numbered=_numbered(cells) if cells.rows is None else names,
        corner="query",
        marked=(strongest[:, None] == range(n_columns)) & whole.allowed & np.isfinite(whole.values),
        beside=[*_beside(cells, options.precision)],
        has_all_rows=options.everything or cells.rows is not None,
        smaller=smaller,
    )


def _beside(cells: HeadMap, digits: int) -> Iterator[Column[int]]:
    """The sum of each row, if one is not 1, what a sink logit takes, and the entropy."""
    sums = cells.sums
    weight = partial(Column[int], unit="weight", digits=digits)
    if {shown(float(total), "weight", digits) for total in sums} != {shown(1.0, "weight", digits)}:
        yield weight("Σ", sums.__getitem__, meaning="sum of the row")
    if cells.learned is not None:
        yield weight(
            "s_aux",
            cells.learned.__getitem__,
            style=lambda row: "magenta",
            meaning="weight of the sink logit, which is no key",
        )
    if cells.entropy is not None:
        yield Column("H", cells.entropy.__getitem__, unit="nats", drop=1, meaning="entropy in nats")


def _map_grid(cells: HeadMap, title: str, scale: Scale, options: ViewOptions) -> Grid:
    """The cells or blocks of a map."""
    whole = grid_of(cells, title, scale=scale, digits=options.precision)
    columns = whole.columns if cells.block == 1 else [""] * len(whole.columns)
    return replace(whole, rows=_numbered(cells), columns=columns, corner="query")


def _numbered(cells: HeadMap) -> list[str]:
    """The position and the name of the first query of each row."""
    places = [cells.places(QUERY, row).start for row in range(len(cells.weights))]
    digits = len(str(max(places, default=0)))
    room = _NAME - 1 - digits
    return [
        f"{place:>{digits}} {fitted(token_text(cells.queries, place), room)}" for place in places
    ]


def _top_keys(title: str, cells: HeadMap, options: ViewOptions) -> Table[int]:
    """Each query's top keys with their weights in descending order, and the weight of any sink
    logit.
    """
    learned = cells.learned
    digits = options.precision

    def query(row: int) -> str:
        return f"{token_at(cells.token(QUERY, row), cells.place(QUERY, row), _LONGEST)} →"

    def keys_of(row: int) -> str:
        words = [
            f"{token_at(cells.name(KEY, key), cells.place(KEY, key), _LONGEST)}"
            f" {shown(weight, 'weight', digits)}"
            for key, weight in cells.strongest(row)[: options.top]
        ]
        if learned is not None and words:
            words.append(f"s_aux {shown(learned[row], 'weight', digits)}")
        return ", ".join(words) or "no visible key"

    return Table(
        [
            Column("query", query, style=lambda row: "bold"),
            Column("strongest weights", keys_of, least=_LEAST_KEYS, wraps=True),
        ],
        range(len(cells.weights)),
        title=title,
        most=None if options.everything or cells.rows is not None else MAX_TOKEN_ROWS,
        has_ends=True,
    )


def maps_view(
    layers: Sequence[LayerView], sequence: int, options: ViewOptions, screen: Screen
) -> RenderableType:
    """The requested maps of layers, of a sequence on a common scale, without their sinks, which
    stand beside them.
    """
    panels: list[Grid] = []
    notes: list[str | Text] = []
    for layer in layers:
        for place, head in enumerate(layer.record.heads):
            if head.head in options.maps:
                whole = block_map(layer, place, sequence)
                name = f"head {head.head}"
                kind = words_of_type(head.kind).name
                title = where(layer.record, sequence, layer.label, name, kind)
                panels.append(_without_sinks(whole, title, options))
                name = f"{layer.label} {name}".lstrip()
                notes += _sinks(whole.without_sinks(), name, options.precision)
    lines = [*grids(panels, screen, form="shades", everything=options.everything)]
    if notes:
        rest = "the rest of each row is renormalised"
        if any(panel.beside for panel in panels):
            rest = f"the first token stands at the right; {rest}"
        lines.append(flowing([*notes, rest], screen.width))
    return Group(*lines)


def _without_sinks(whole: HeadMap, title: str, options: ViewOptions) -> Grid:
    """A map without its sinks, which stand beside it."""
    cells = whole.without_sinks()
    sink: Column[int] = Column(
        "sink",
        lambda row: cells.sink_weights[row] if cells.n_queries[row] else None,
        unit="fraction",
        style=lambda row: "magenta",
    )
    return replace(
        _map_grid(cells, title, options.map_scale or "log", options),
        beside=[sink] if cells.sinks else [],
        smaller=lambda rows, columns: _without_sinks(whole.fitting(rows, columns), title, options),
    )


def _sinks(cells: HeadMap, name: str, digits: int) -> Iterator[Text]:
    """What was removed from the map of a head, with its share of all attention; nothing if nothing
    was.
    """
    parts = []
    if cells.sinks:
        parts.append(f"sink {shown(cells.sink_mass, 'weight', digits)}")
    if cells.learned_mass is not None:
        parts.append(f"sink logit {shown(cells.learned_mass, 'weight', digits)}")
    if parts:
        rest = 1 - cells.sink_mass - (cells.learned_mass or 0.0)
        parts.append(f"shown {shown(rest, 'weight', digits)} of all attention")
        yield Text(f"{name}: {', '.join(parts)}", "bold")
