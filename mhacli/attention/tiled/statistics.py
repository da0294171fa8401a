"""All statistics of a pattern in one pass over its tiles, each a reducer that sees the tiles one by one.

A new statistic is a reducer of a few lines. Results have the axes `batch head …`, in the dtype of the maths; no reducer
knows a mask, for a forbidden weight is 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mhacli.attention.tiled.conditions import Matches
from mhacli.attention.tiled.tiles import (
    PENALTY,
    Grid,
    OfTiles,
    PatternRows,
    PatternTiles,
    Reducer,
    Tile,
    TileMemory,
    indices,
    rectangles,
    reduce_tiles,
    tile_shape,
)

PerQuery = Float[Tensor, "batch head query"]


@dataclass(frozen=True)
class StatisticsRequest:
    """What the statistics of a pattern depend on: the blocks of its map, tokens, marked keys, matching cells.

    `block` queries and keys make a cell of the map. `q_tokens` and `k_tokens` are ids, below 0 where there is no token;
    `before_k` is the token before each key in its text. With `is_self` a key is no duplicate of itself. `first` marks the
    first key of every text, `leading` the first few. `matches` has, for each further pattern, one predicate per sequence.
    `q_spans` and `k_spans` mark the tokens of named parts of the texts, between which mass is counted.
    """

    block: int
    q_tokens: Int[Tensor, "batch query"]
    k_tokens: Int[Tensor, "batch key"]
    before_k: Int[Tensor, "batch key"]
    first: Bool[Tensor, "batch key"]
    leading: Bool[Tensor, "batch key"]
    is_self: bool = True
    matches: tuple[tuple[Matches, ...], ...] = ()
    q_spans: Bool[Tensor, "batch span query"] | None = None
    k_spans: Bool[Tensor, "batch span key"] | None = None

    def on(self, device: torch.device | str) -> StatisticsRequest:
        """The same with its tensors on a device."""
        return self._with(lambda tensor: tensor.to(device))

    def beginning(self, n: int) -> StatisticsRequest:
        """The same of the first `n` tokens of the first sequence, without the further patterns and the spans."""
        return replace(self._with(lambda tensor: tensor[:1, :n]), matches=(), q_spans=None, k_spans=None)

    def _with(self, change: Callable[[Tensor], Tensor]) -> StatisticsRequest:
        names = ("q_tokens", "k_tokens", "before_k", "first", "leading")
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in names}
        return replace(self, **changed)


@dataclass(frozen=True)
class Statistics:
    """The results of one pass.

    Per query: `mass`, nats of `entropy`, `squares`, `distance` in tokens, the weights of the `first` and the `leading` keys, all
    sums over keys; and `peak`, the largest `ln p`. `received` are sums over queries per key, `map` per block, `profile` per
    signed distance, of which index `n_queries − 1` is 0. Per head: the mass on `duplicate` tokens, on those after one
    (`induction`), on each further pattern (`matched`), and `between` spans, from queries to keys.
    """

    mass: PerQuery
    entropy: PerQuery
    squares: PerQuery
    peak: PerQuery
    distance: PerQuery
    first: PerQuery
    leading: PerQuery
    received: Float[Tensor, "batch head key"]
    map: Float[Tensor, "batch head query_block key_block"]
    profile: Float[Tensor, "batch head distance"]
    duplicate: Float[Tensor, "batch head"]
    induction: Float[Tensor, "batch head"]
    matched: Float[Tensor, "batch head n_patterns"]
    between: Float[Tensor, "batch head span span"]

    def of_heads(self, heads: slice) -> Statistics:
        """Those of some heads."""
        return Statistics(*(getattr(self, f.name)[:, heads] for f in fields(self)))


def summarise(
    pattern: PatternTiles | PatternRows,
    request: StatisticsRequest,
    report_progress: Callable[[int], None] = lambda cells: None,
) -> Statistics:
    """Every statistic of a pattern, in one pass over its tiles and O(T) memory. `report_progress` receives numbers of reduced
    cells.
    """
    mass, entropy, squares = RowSums(pattern), Entropy(pattern), RowSquareSums(pattern)
    peak = Peak(pattern)
    distance, received, profile = Distance(pattern), ColumnSums(pattern, request.block), Profile(pattern)
    first, leading = Marked(pattern, request.first), Marked(pattern, request.leading)
    duplicate, induction = (
        SameLabel(pattern, request.q_tokens, labels, shift=shift if request.is_self else None)
        for shift, labels in enumerate((request.k_tokens, request.before_k))
    )
    peaks = [] if isinstance(pattern, PatternRows) else [peak]  # which has them when its pass is over
    per_query: list[Reducer] = [mass, *peaks, entropy, squares, distance, first, leading]
    chosen = ChosenCells(pattern, request)
    reduce_tiles(pattern, [*per_query, received, profile, duplicate, induction, *chosen.reducers], report_progress)
    return Statistics(
        mass=mass.per_query,
        entropy=entropy.per_query,
        squares=squares.per_query,
        peak=pattern.peak if isinstance(pattern, PatternRows) else peak.per_query,
        distance=distance.per_query,
        first=first.per_query,
        leading=leading.per_query,
        received=received.per_key,
        map=received.map,
        profile=profile.mass,
        duplicate=duplicate.mass,
        induction=induction.mass,
        matched=chosen.matched,
        between=chosen.between,
    )


def with_sink(statistics: Statistics, sink_mass: PerQuery) -> Statistics:
    """The statistics of queries that give `sink_mass` to a sink logit, which is no key, and the rest to keys.

    The sink is one more outcome of entropy and squares; the distance is the mean over what keys get. The other masses stay
    what was computed: with the sink's they add up to 1. Source: Xiao et al. 2023; the sink logits of gpt-oss.
    """
    keys = torch.where(statistics.mass > 0, statistics.mass, 1.0)
    return replace(
        statistics,
        entropy=statistics.entropy + torch.special.entr(sink_mass),
        squares=statistics.squares + sink_mass.square(),
        distance=statistics.distance / keys,
    )


def strongest_key(pattern: Float[Tensor, "batch head query key"]) -> Int[Tensor, "batch head query"]:
    """The key with the largest weight, the first of equals; −1 for a row of zeros."""
    weight, key = pattern.max(dim=-1)
    return torch.where(weight > 0, key, -1)


def entropy_share(entropy: PerQuery, visible: Shaped[Tensor, "#batch #head query"]) -> PerQuery:
    """Entropy divided by its largest possible value, `ln(visible keys)`: 1 is uniform. Rows with one key or none: 0."""
    largest = visible.double().log()
    return torch.where(visible > 1, entropy / largest, 0.0)


def mean_over(per_query: PerQuery, queries: Bool[Tensor, "#batch #head query"]) -> Float[Tensor, " head"]:
    """The mean over the queries marked True, per head; NaN where there is none."""
    weight = queries.double().expand(per_query.shape)
    return (per_query * weight).sum(dim=(0, 2)) / weight.sum(dim=(0, 2))


def distances_folded(profile: Float[Tensor, "head distance"], zero: int) -> Float[Tensor, "head absolute"]:
    """The mass at each distance |i − j|, from that at each signed one, of which index `zero` is 0."""
    before, after = profile[:, : zero + 1].flip(1), profile[:, zero:]
    longest = max(before.shape[1], after.shape[1])
    both = [torch.nn.functional.pad(side, (0, longest - side.shape[1])) for side in (before, after)]
    folded = both[0] + both[1]
    folded[:, 0] = profile[:, zero]
    return folded


def window_of(folded: Float[Tensor, "head absolute"], weight: float) -> Int[Tensor, " head"]:
    """The least distance within which at least `weight` of the mass lies; rounding of a millionth is forgiven."""
    within = folded.double().cumsum(dim=1)
    wanted = (weight - 1e-6) * within[:, -1:]
    return torch.searchsorted(within, wanted).squeeze(1)


def in_steps(folded: Float[Tensor, "head absolute"], steps: Sequence[int]) -> Float[Tensor, "head step"]:
    """The mass of distances up to each of the steps, and beyond the step before: a profile in bins that double."""
    within = torch.nn.functional.pad(folded.double().cumsum(dim=1), (1, 0))
    ends = torch.tensor([min(step + 1, folded.shape[1]) for step in steps], device=folded.device)
    return within[:, ends].diff(dim=1, prepend=within[:, :1])


def doubling_steps(longest: int) -> tuple[int, ...]:
    """The upper ends of the bins 0, 1, 2, 3–4, 5–8, … up to the longest distance.

    >>> doubling_steps(5)
    (0, 1, 2, 4, 5)
    """
    powers = (1 << power for power in range((longest - 1).bit_length())) if longest else ()
    return (0, *powers, longest) if longest else (0,)


def weights_of(
    pattern: PatternTiles, batch_head: tuple[int, int], queries: range, keys: range
) -> Float[Tensor, "query key"]:
    """Any corner of a pattern, cell by cell: exact, in time and memory of that corner alone."""
    weights = pattern.like.new_zeros(len(queries), len(keys))
    for rectangle in rectangles(queries, keys, pattern.allowed, tile_shape(weights.device, len(keys)), weights):
        rows, columns, _ = rectangle
        top, left = rows.start - queries.start, columns.start - keys.start
        own = weights[top : top + len(rows), left : left + len(columns)]
        pattern.tile_into(torch.empty_like(own), own, batch_head, rectangle)
    return weights


# ------------------------------------------------------------------------------------------------------------- reducers


class RowSums:
    """`Σ_k p` of each query: 1, or 0 where no key is allowed. What every other number rests on."""

    def __init__(self, pattern: Grid) -> None:
        self.per_query: PerQuery = pattern.like.new_zeros(pattern.shape[:3])

    def add(self, tile: Tile) -> None:
        """Adds the sums of the rows."""
        self.per_query[tile.at_rows].add_(tile.mass)


class Entropy:
    """`−Σ_k p ln p` of each query, in nats. Source: Shannon 1948, theorem 2."""

    def __init__(self, pattern: Grid) -> None:
        self._bits = pattern.like.new_zeros(pattern.shape[:3])

    def add(self, tile: Tile) -> None:
        """One product of the weights with their logarithms, whose memory it takes."""
        own = self._bits[tile.at_rows]
        own.sub_(torch.mul(tile.weights, tile.log2, out=tile.scratch).sum(dim=1))
        if tile.bits is not None:
            own.addcmul_(tile.mass, tile.bits)

    @property
    def per_query(self) -> PerQuery:
        """0 where one key takes all; rounding never makes it less."""
        return (self._bits * math.log(2)).clamp(min=0)


class RowSquareSums:
    """`Σ_k p²` of each query, the inverse of an effective number of keys. Source: Hill 1973 (order 2)."""

    def __init__(self, pattern: Grid) -> None:
        self.per_query: PerQuery = pattern.like.new_zeros(pattern.shape[:3])

    def add(self, tile: Tile) -> None:
        """Adds the squared lengths of the rows."""
        length = torch.linalg.vector_norm(tile.weights, dim=1)
        self.per_query[tile.at_rows].addcmul_(length, length)


class Peak:
    """The largest `ln p` of each query; far below any weight of a float where no key is allowed."""

    def __init__(self, pattern: Grid) -> None:
        self._log2 = pattern.like.new_full(pattern.shape[:3], PENALTY)

    def add(self, tile: Tile) -> None:
        """The larger of the rows' largest and what was before."""
        largest = self._log2[tile.at_rows]
        torch.maximum(largest, tile.log2.amax(dim=1), out=largest)

    @property
    def per_query(self) -> PerQuery:
        """In nats, at most 0."""
        return self._log2 * math.log(2)


class Distance:
    """`Σ_k p |i − j|` of each query i and its keys j, in tokens: the mean distance that it looks.

    Keys before all queries of a tile, and those behind them, need one product with their places, counted from a corner of
    their own, where they are small enough to be exact; those among the queries are looked at cell by cell. Source: Vig and
    Belinkov 2019, "Analyzing the Structure of Attention", equation 2.
    """

    def __init__(self, pattern: Grid) -> None:
        self.per_query: PerQuery = pattern.like.new_zeros(pattern.shape[:3])
        self._steps = OfTiles(lambda tile: list(_steps(tile)))

    def add(self, tile: Tile) -> None:
        """Adds the distances of the rows."""
        own, all_steps = self.per_query[tile.at_rows], self._steps.of(tile)
        for columns, of_keys, of_queries in all_steps:
            weights = tile.weights[:, columns]
            if of_queries is None:
                own.add_(torch.mul(weights, of_keys, out=tile.scratch[:, columns]).sum(dim=1))
            else:
                mass = tile.mass if len(all_steps) == 1 else weights.sum(dim=1)
                own.addmv_(weights, of_keys).addcmul_(mass, of_queries)


class _Steps(NamedTuple):
    """|i − j| of some columns of a tile: the steps from each key to a corner and on to each query; or cell by cell, and None."""

    columns: slice
    of_keys: Tensor
    of_queries: Tensor | None


def _steps(tile: Tile) -> Iterator[_Steps]:
    """Those of the keys before the queries of a tile, behind them and among them; most tiles have one of the three."""
    first, last = (min(max(edge, tile.keys.start), tile.keys.stop) for edge in (tile.queries.start, tile.queries.stop))
    queries, keys = _numbers(tile.queries, tile.mass), _numbers(tile.keys, tile.mass)
    before, among, behind = (
        slice(start - tile.keys.start, stop - tile.keys.start)
        for start, stop in ((tile.keys.start, first), (first, last), (last, tile.keys.stop))
    )
    for columns, corner in ((before, first), (behind, last)):
        if columns.start < columns.stop:
            yield _Steps(columns, (keys[columns] - corner).abs_(), (queries - corner).abs_())
    if first < last:
        yield _Steps(among, (queries[:, None] - keys[among]).abs_(), None)


class ColumnSums:
    """What each key receives, `Σ_i p`, and the map: the same sums over blocks of `block` queries and keys.

    `per_key` has the axes `batch head key`, `map` `batch head block_of_queries block_of_keys`. `block` is a power of two, so
    that the edges of blocks and tiles meet. Source: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle", section 3.
    """

    def __init__(self, pattern: Grid, block: int) -> None:
        batch, n_heads, n_queries, n_keys = pattern.shape
        self.per_key = pattern.like.new_zeros(batch, n_heads, n_keys)
        self._block = block
        self.map = pattern.like.new_zeros(batch, n_heads, -(-n_queries // block), -(-n_keys // block))

    def add(self, tile: Tile) -> None:
        """Adds the sums of the columns, block by block of queries, and those of the blocks of keys."""
        sums = sums_of_blocks(tile.weights, self._block, 0)
        self.per_key[tile.at_columns].add_(sums.sum(dim=0))
        first, lead = divmod(tile.keys.start, self._block)
        cells = sums_of_blocks(sums.mT, self._block, lead).mT
        top = tile.queries.start // self._block
        self.map[(*tile.batch_head, slice(top, top + cells.shape[0]), slice(first, first + cells.shape[1]))].add_(cells)


class Profile:
    """The mass at each signed distance `key − query`, `batch head distance`; the distance 0 stands at index `n_queries − 1`.

    The sums of the columns of the sheared tile. Source: Clark et al. 2019, "What Does BERT Look At?", section 3.1
    (attention to the relative positions).
    """

    def __init__(self, pattern: Grid) -> None:
        batch, n_heads, n_queries, n_keys = pattern.shape
        self.zero = n_queries - 1
        self.mass = pattern.like.new_zeros(batch, n_heads, n_queries + n_keys - 1)

    def add(self, tile: Tile) -> None:
        """Adds the diagonals; the first column of the sheared tile holds nothing."""
        first = self.zero + tile.keys.start - tile.queries.start - len(tile.queries) + 1
        sums = _column_sums(tile.diagonals)[1:]
        self.mass[(*tile.batch_head, slice(first, first + len(sums)))].add_(sums)


class Marked:
    """The weight that each query gives to marked keys, such as the first of each text. `marks` is `[batch, key]`."""

    def __init__(self, pattern: Grid, marks: Bool[Tensor, "batch key"]) -> None:
        self.per_query: PerQuery = pattern.like.new_zeros(pattern.shape[:3])
        self._marks = marks.to(pattern.like.dtype)
        self._marked = [row.nonzero().flatten().tolist() for row in marks]

    def add(self, tile: Tile) -> None:
        """Adds the columns from the first marked one to the last, of which most tiles have none."""
        batch = tile.batch_head[0]
        marked = self._marked[batch]
        low, high = (bisect_left(marked, edge) for edge in (tile.keys.start, tile.keys.stop))
        if low < high:
            first, stop = marked[low], marked[high - 1] + 1
            weights = tile.weights[:, first - tile.keys.start : stop - tile.keys.start]
            self.per_query[tile.at_rows].addmv_(weights, self._marks[batch, first:stop])


class SharedCells(ABC):
    """The mass on chosen cells, `batch head`: a sum over all queries. The cells are the same for every head.

    A few cells are read one by one. Many are 1 among zeros in a tile of their own, which lies in memory as the weights do, so
    that their mass is a product of two vectors, whose time does not depend on how many they are.
    """

    def __init__(self, pattern: Grid) -> None:
        self.mass = pattern.like.new_zeros(pattern.shape[:2], dtype=torch.float64)
        self._chosen = OfTiles(self._choose)
        self._planes = TileMemory(pattern.like)

    def add(self, tile: Tile) -> None:
        """Adds the weights of the chosen cells, which are found once for all heads. It takes the memory of the logarithms."""
        chosen = self._chosen.of(tile)
        if chosen.is_floating_point():
            self.mass[tile.batch_head].add_(torch.dot(tile.flat, chosen))
        else:
            weights = tile.scratch.view(-1)[: len(chosen)]
            self.mass[tile.batch_head].add_(torch.index_select(tile.flat, 0, chosen, out=weights).sum())

    @abstractmethod
    def _choose(self, tile: Tile) -> Shaped[Tensor, " cell"]:
        """Where the cells are in `tile.flat`, as integers; or numbers for all of it, 1 where they are and 0 elsewhere."""

    def _cells_among_zeros(self, tile: Tile) -> tuple[Float[Tensor, " cell"], Float[Tensor, "query key"]]:
        """Memory like `tile.flat`, 0 beside the cells, and the cells in it, to be written."""
        return self._planes.among_zeros(tile.number, (len(tile.queries), len(tile.keys)))


_DENSE = 1 / 8
"""The part of a tile's cells from which on a product with all of them takes less time than to find and read those few."""


class SameLabel(SharedCells):
    """The mass on keys whose label is the query's, `batch head`: a sum over all queries. Labels below 0 equal nothing.

    `labels` of queries and keys are `[batch, query]` and `[batch, key]`; the key at `query + shift` does not count. Few cells are
    joined through the keys in the order of their labels, tile by tile. With tokens as labels these are duplicate-token heads
    (Wang et al. 2022, "Interpretability in the Wild", section 3.1), with each key's label that of the token before it,
    and `shift` 1, induction heads (Olsson et al. 2022, "In-context Learning and Induction Heads").
    """

    def __init__(
        self,
        pattern: Grid,
        q_labels: Int[Tensor, "batch query"],
        k_labels: Int[Tensor, "batch key"],
        *,
        shift: int | None,
    ) -> None:
        super().__init__(pattern)
        self._shift = shift
        labels, ranks = torch.unique(torch.cat([q_labels, k_labels], dim=1), return_inverse=True)
        ranks = torch.where(labels[ranks] < 0, -1, ranks)  # so small that floats hold them, which compare fastest
        self._queries, self._keys = ranks.split([q_labels.shape[1], k_labels.shape[1]], dim=1)
        self._by_label = [_by_label(row) for row in self._keys]

    def _choose(self, tile: Tile) -> Shaped[Tensor, " cell"]:
        batch = tile.batch_head[0]
        labels, (codes, places) = self._queries[batch, tile.rows], self._by_label[batch]
        edges = torch.tensor([[tile.keys.start], [tile.keys.stop]], device=labels.device)
        codes_of_edges = labels * self._keys.shape[1] + edges  # a label of −1 is before all codes
        low, high = torch.searchsorted(codes, codes_of_edges, out_int32=True)
        counts = high - low
        n = int(counts.sum())
        if n > _DENSE * tile.weights.numel():
            return self._compared(tile, labels, self._keys[batch, tile.columns])
        rows = torch.repeat_interleave(counts, output_size=n)
        first = low - (counts.cumsum(0, dtype=torch.int32) - counts)  # of each run, less the cells before it
        keys = places.index_select(0, first.index_select(0, rows).add_(indices(range(n), rows)))
        start = len(tile.queries) - tile.keys.start  # as many zeros stand before each row
        cells = torch.add(keys, rows, alpha=tile.weights.stride(0)).add_(start)
        if self._shift is None:
            return cells
        none = 0  # the first number in memory is none of the cells
        return cells.masked_fill_(keys.sub_(rows) == tile.queries.start + self._shift, none)

    def _compared(self, tile: Tile, q_labels: Int[Tensor, " query"], k_labels: Int[Tensor, " key"]) -> Tensor:
        """Every cell by itself."""
        plane, cells = self._cells_among_zeros(tile)
        q, k = q_labels.to(cells.dtype), torch.where(k_labels < 0, -2, k_labels).to(cells.dtype)
        torch.eq(q.unsqueeze(1), k, out=cells)
        if self._shift is not None:
            offset = tile.queries.start + self._shift - tile.keys.start
            if -len(tile.queries) < offset < len(tile.keys):
                cells.diagonal(offset).zero_()
        return plane


def _by_label(labels: Int[Tensor, " key"]) -> tuple[Int[Tensor, " labelled"], Int[Tensor, " labelled"]]:
    """The keys with a label in the order of labels and then places: both as one number, and the places alone."""
    places = (labels >= 0).nonzero().flatten()
    codes = (labels[places] * len(labels) + places).sort().values
    return codes, (codes % len(labels)).int()


class Matched(SharedCells):
    """The mass on cells that match an expression, `batch head`: a sum over all queries. `matches` has one per sequence."""

    def __init__(self, pattern: Grid, matches: Sequence[Matches]) -> None:
        super().__init__(pattern)
        self._matches = matches

    def _choose(self, tile: Tile) -> Shaped[Tensor, " cell"]:
        plane, cells = self._cells_among_zeros(tile)
        matches = self._matches[tile.batch_head[0]]
        cells.copy_(matches(indices(tile.queries, tile.mass), indices(tile.keys, tile.mass)))
        return plane


class Between:
    """The mass that the queries of each span give the keys of each span, `batch head span span`: sums over the queries.

    `q_spans` and `k_spans` mark the tokens of every span, which may overlap.
    """

    def __init__(
        self, pattern: Grid, q_spans: Bool[Tensor, "batch span query"], k_spans: Bool[Tensor, "batch span key"]
    ) -> None:
        n_spans, dtype = q_spans.shape[1], pattern.like.dtype
        self.mass = pattern.like.new_zeros((*pattern.shape[:2], n_spans, n_spans), dtype=torch.float64)
        self._q_spans, self._k_spans = q_spans.to(dtype), k_spans.to(dtype)

    def add(self, tile: Tile) -> None:
        """Adds the weights of the keys of each span, query by query, and those of the queries of each span."""
        batch = tile.batch_head[0]
        of_queries = tile.weights @ self._k_spans[batch][:, tile.columns].mT
        self.mass[tile.batch_head] += self._q_spans[batch][:, tile.rows] @ of_queries


class ChosenCells:
    """The reducers of the cells that a request chooses itself, by conditions and by spans: none in most requests."""

    def __init__(self, pattern: Grid, request: StatisticsRequest) -> None:
        self._none = pattern.like.new_zeros((*pattern.shape[:2], 0), dtype=torch.float64)
        self._matched = [Matched(pattern, matches) for matches in request.matches]
        self._between = (
            None
            if request.q_spans is None or request.k_spans is None
            else Between(pattern, request.q_spans, request.k_spans)
        )

    @property
    def reducers(self) -> list[Reducer]:
        """Those that have to see the tiles."""
        return [*self._matched, *([] if self._between is None else [self._between])]

    @property
    def matched(self) -> Float[Tensor, "batch head n_patterns"]:
        """The mass on the cells of each condition."""
        return torch.stack([m.mass for m in self._matched], dim=-1) if self._matched else self._none

    @property
    def between(self) -> Float[Tensor, "batch head span span"]:
        """The mass from each span to each."""
        return self._none.unsqueeze(-1)[..., :0] if self._between is None else self._between.mass


def sums_of_blocks(rows: Float[Tensor, "row column"], block: int, lead: int) -> Float[Tensor, "block column"]:
    """Sums over `block` rows each, of which the first block lacks `lead` and the last may lack some."""
    n = rows.shape[0]
    if block == 1:
        return rows
    if lead == 0 and n % block == 0:
        whole: Tensor = rows.unflatten(0, (-1, block)).sum(dim=1)
        return whole
    if lead + n <= block:
        return rows.sum(dim=0, keepdim=True)
    padded: Tensor = (
        torch.nn.functional.pad(rows, (0, 0, lead, -(lead + n) % block)).unflatten(0, (-1, block)).sum(dim=1)
    )
    return padded


def _column_sums(rows: Float[Tensor, "row column"]) -> Float[Tensor, " column"]:
    """The sum of each column as a product, which takes less time than `sum`."""
    return rows.new_ones(rows.shape[0]) @ rows


def _numbers(span: range, like: Tensor) -> Tensor:
    return torch.arange(span.start, span.stop, dtype=like.dtype, device=like.device)
