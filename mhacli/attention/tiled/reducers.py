"""Statistics of a pattern, each a reducer that sees its tiles one by one: a new one is a class of a few lines.

Results have the axes `batch head …`, in the dtype of the maths; nothing here knows a mask, for a forbidden share is 0.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mhacli.attention.tiled.conditions import Matches
from mhacli.attention.tiled.rectangles import PENALTY, indices
from mhacli.attention.tiled.scores import Shares
from mhacli.attention.tiled.tiles import Tile

PerQuery = Float[Tensor, "batch head query"]


class Mass:
    """`Σ_k p` of each query: 1, or 0 where no key is allowed. What every other number rests on."""

    def __init__(self, pattern: Shares) -> None:
        self.per_query: PerQuery = pattern.like.new_zeros(pattern.shape[:3])

    def add(self, tile: Tile) -> None:
        """Adds the sums of the rows."""
        self.per_query[tile.place][tile.rows] += tile.mass


class Entropy:
    """`−Σ_k p ln p` of each query, in nats. Source: Shannon 1948, theorem 2."""

    def __init__(self, pattern: Shares) -> None:
        self._bits = pattern.like.new_zeros(pattern.shape[:3])

    def add(self, tile: Tile) -> None:
        """One product of the shares with their logarithms."""
        self._bits[tile.place][tile.rows] -= torch.mul(tile.shares, tile.log2, out=tile.scratch).sum(dim=1)

    @property
    def per_query(self) -> PerQuery:
        """0 where one key takes all; rounding never makes it less."""
        return (self._bits * math.log(2)).clamp(min=0)


class Squares:
    """`Σ_k p²` of each query, the inverse of an effective number of keys. Source: Hill 1973 (order 2)."""

    def __init__(self, pattern: Shares) -> None:
        self.per_query: PerQuery = pattern.like.new_zeros(pattern.shape[:3])

    def add(self, tile: Tile) -> None:
        """Adds the squared lengths of the rows."""
        self.per_query[tile.place][tile.rows] += torch.linalg.vector_norm(tile.shares, dim=1).square_()


class Peak:
    """The largest `ln p` of each query; far below any share of a float where no key is allowed."""

    def __init__(self, pattern: Shares) -> None:
        self._log2 = pattern.like.new_full(pattern.shape[:3], PENALTY)

    def add(self, tile: Tile) -> None:
        """The larger of the rows' largest and what was before."""
        largest = self._log2[tile.place][tile.rows]
        torch.maximum(largest, tile.log2.amax(dim=1), out=largest)

    @property
    def per_query(self) -> PerQuery:
        """In nats, at most 0."""
        return self._log2 * math.log(2)


class Distance:
    """`Σ_k p |i − j|` of each query i and its keys j, in tokens: the mean distance that it looks.

    A tile on one side of the diagonal needs one product with the keys' places, counted from the tile's own corner, where
    they are small enough to be exact. Source: Vig and Belinkov 2019, "Analyzing the Structure of Attention", equation 2.
    """

    def __init__(self, pattern: Shares) -> None:
        self.per_query: PerQuery = pattern.like.new_zeros(pattern.shape[:3])
        self._known: tuple[range, range, Tensor, Tensor | None] | None = None

    def add(self, tile: Tile) -> None:
        """Adds the distances of the rows."""
        if self._known is None or self._known[:2] != (tile.queries, tile.keys):
            self._known = (tile.queries, tile.keys, *_steps(tile))
        of_keys, of_queries = self._known[2:]
        own = self.per_query[tile.place][tile.rows]
        if of_queries is None:
            own += torch.mul(tile.shares, of_keys, out=tile.scratch).sum(dim=1)
        else:
            own += torch.mv(tile.shares, of_keys).addcmul_(tile.mass, of_queries)


def _steps(tile: Tile) -> tuple[Tensor, Tensor | None]:
    """|i − j| as the steps from each key to the tile's corner and on to each query; on the diagonal cell by cell, and None."""
    queries, keys = _numbers(tile.queries, tile.mass), _numbers(tile.keys, tile.mass)
    if tile.keys.start < tile.queries.stop and tile.queries.start < tile.keys.stop:
        return (queries[:, None] - keys).abs_(), None
    corner = tile.keys.stop if tile.keys.stop <= tile.queries.start else tile.keys.start
    return keys.sub_(corner).abs_(), queries.sub_(corner).abs_()


class Received:
    """What each key receives, `Σ_i p`, and the map: the same sums over blocks of `block` queries and keys.

    `per_key` has the axes `batch head key`, `map` `batch head block_of_queries block_of_keys`. `block` is a power of two, so
    that the edges of blocks and tiles meet. Source: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle", section 3.
    """

    def __init__(self, pattern: Shares, block: int) -> None:
        batch, n_heads, n_queries, n_keys = pattern.shape
        self.per_key = pattern.like.new_zeros(batch, n_heads, n_keys)
        self._block = block
        self.map = pattern.like.new_zeros(batch, n_heads, -(-n_queries // block), -(-n_keys // block))

    def add(self, tile: Tile) -> None:
        """Adds the sums of the columns, block by block of queries, and those of the blocks of keys."""
        sums = _sums_of_blocks(tile.shares, self._block, 0)
        self.per_key[tile.place][tile.columns] += sums.sum(dim=0)
        first, lead = divmod(tile.keys.start, self._block)
        cells = _sums_of_blocks(sums.mT, self._block, lead).mT
        top = tile.queries.start // self._block
        self.map[tile.place][top : top + cells.shape[0], first : first + cells.shape[1]] += cells


class Lifted:
    """How many queries give each key at least a share of their own, `floor` `[batch, head or 1, query]`: `batch head key`.

    A floor of some times 1 / visible keys counts the queries that give a key so many times its uniform share.
    """

    def __init__(self, pattern: Shares, floor: Float[Tensor, "batch _head query"]) -> None:
        batch, n_heads, _, n_keys = pattern.shape
        self.per_key = pattern.like.new_zeros(batch, n_heads, n_keys)
        self._floor = floor.to(pattern.like.dtype).expand(-1, n_heads, -1)

    def add(self, tile: Tile) -> None:
        """Adds the cells that reach the floor of their row."""
        floor = self._floor[tile.place][tile.rows, None]
        self.per_key[tile.place][tile.columns] += torch.ge(tile.shares, floor, out=tile.scratch).sum(dim=0)


class Profile:
    """The mass at each signed distance `key − query`, `batch head distance`; the distance 0 stands at index `n_queries − 1`.

    The sums of the columns of the sheared tile. Source: Clark et al. 2019, "What Does BERT Look At?", section 3.1
    (attention to the relative positions).
    """

    def __init__(self, pattern: Shares) -> None:
        batch, n_heads, n_queries, n_keys = pattern.shape
        self.zero = n_queries - 1
        self.mass = pattern.like.new_zeros(batch, n_heads, n_queries + n_keys - 1)

    def add(self, tile: Tile) -> None:
        """Adds the diagonals; the first column of the sheared tile holds nothing."""
        first = self.zero + tile.keys.start - tile.queries.start - len(tile.queries) + 1
        sums = tile.diagonals.sum(dim=0)[1:]
        self.mass[tile.place][first : first + len(sums)] += sums


class Marked:
    """The share of each query that goes to marked keys, such as the first of each text. `marks` is `[batch, key]`."""

    def __init__(self, pattern: Shares, marks: Bool[Tensor, "batch key"]) -> None:
        self.per_query: PerQuery = pattern.like.new_zeros(pattern.shape[:3])
        self._marked = [row.nonzero().flatten().tolist() for row in marks]

    def add(self, tile: Tile) -> None:
        """Adds the marked columns, of which most tiles have none."""
        marked = self._marked[tile.place[0]]
        low, high = (bisect_left(marked, edge) for edge in (tile.keys.start, tile.keys.stop))
        columns = [key - tile.keys.start for key in marked[low:high]]
        if columns:
            self.per_query[tile.place][tile.rows] += tile.shares[:, columns].sum(dim=1)


class SameLabel:
    """The mass on keys whose label is the query's, `batch head`: a sum over all queries. Labels below 0 equal nothing.

    `labels` of queries and keys are `[batch, query]` and `[batch, key]`; the key at `query + shift` does not count. Only the few
    cells that match are read: they are joined through the keys in the order of their labels, tile by tile. With tokens
    as labels these are duplicate-token heads (Wang et al. 2022, "Interpretability in the Wild", section 3.1), with each
    key's label that of the token before it, and `shift` 1, induction heads (Olsson et al. 2022, "In-context Learning and
    Induction Heads").
    """

    def __init__(
        self,
        pattern: Shares,
        q_labels: Int[Tensor, "batch query"],
        k_labels: Int[Tensor, "batch key"],
        *,
        shift: int | None,
    ) -> None:
        self.mass = pattern.like.new_zeros(pattern.shape[:2], dtype=torch.float64)
        self._n_keys, self._shift = pattern.shape[3], shift
        self._queries = q_labels.long().clamp(min=-1) * self._n_keys
        self._keys = [_by_label(row) for row in k_labels]
        self._known: dict[int, tuple[range, range, Tensor]] = {}

    def add(self, tile: Tile) -> None:
        """Adds the shares of the cells whose labels match, which are the same for every head."""
        batch = tile.place[0]
        known = self._known.get(batch)
        if known is None or known[:2] != (tile.queries, tile.keys):
            known = self._known[batch] = (tile.queries, tile.keys, self._joined(batch, tile))
        if len(known[2]):
            self.mass[tile.place] += tile.flat.index_select(0, known[2]).sum()

    def _joined(self, batch: int, tile: Tile) -> Int[Tensor, " cell"]:
        """Where in the tile the cells are: each query's run among the keys sorted by label and place, written out."""
        labels, (codes, places) = self._queries[batch, tile.rows], self._keys[batch]
        low, high = (torch.searchsorted(codes, labels + edge) for edge in (tile.keys.start, tile.keys.stop))
        counts = torch.where(labels >= 0, high - low, 0)
        rows = torch.repeat_interleave(counts)
        first = low - (counts.cumsum(0) - counts)  # of each run, less the cells before it
        keys = places.index_select(0, torch.arange(len(rows), device=rows.device) + first.index_select(0, rows))
        if self._shift is not None:
            counted = keys != rows + (tile.queries.start + self._shift)
            rows, keys = rows[counted], keys[counted]
        return tile.flat_places(rows, keys - tile.keys.start)


def _by_label(labels: Int[Tensor, " key"]) -> tuple[Int[Tensor, " labelled"], Int[Tensor, " labelled"]]:
    """The keys with a label in the order of labels and then places: both as one number, and the places alone."""
    places = (labels >= 0).nonzero().flatten()
    codes = (labels[places].long() * len(labels) + places).sort().values
    return codes, codes % len(labels)


class Matched:
    """The mass on cells that match an expression, `batch head`: a sum over all queries. `matches` has one per sequence."""

    def __init__(self, pattern: Shares, matches: Sequence[Matches]) -> None:
        self.mass = pattern.like.new_zeros(pattern.shape[:2], dtype=torch.float64)
        self._matches = matches
        self._asked: dict[int, tuple[range, range, Tensor]] = {}

    def add(self, tile: Tile) -> None:
        """Adds the shares of the cells that match."""
        self.mass[tile.place] += torch.mul(tile.shares, self._cells(tile), out=tile.scratch).sum()

    def _cells(self, tile: Tile) -> Tensor:
        """1 where the expression holds, else 0, kept for the next head."""
        batch = tile.place[0]
        asked = self._asked.get(batch)
        if asked is None or asked[:2] != (tile.queries, tile.keys):
            cells = self._matches[batch](indices(tile.queries, tile.mass), indices(tile.keys, tile.mass))
            asked = self._asked[batch] = (tile.queries, tile.keys, cells.to(tile.mass.dtype))
        return asked[2]


class Between:
    """The mass that the queries of each span give the keys of each span, `batch head span span`: sums over the queries.

    `q_spans` and `k_spans` mark the tokens of every span, which may overlap.
    """

    def __init__(
        self, pattern: Shares, q_spans: Bool[Tensor, "batch span query"], k_spans: Bool[Tensor, "batch span key"]
    ) -> None:
        n_spans, dtype = q_spans.shape[1], pattern.like.dtype
        self.mass = pattern.like.new_zeros((*pattern.shape[:2], n_spans, n_spans), dtype=torch.float64)
        self._q_spans, self._k_spans = q_spans.to(dtype), k_spans.to(dtype)

    def add(self, tile: Tile) -> None:
        """Adds the shares of the keys of each span, query by query, and those of the queries of each span."""
        batch = tile.place[0]
        of_queries = tile.shares @ self._k_spans[batch][:, tile.columns].mT
        self.mass[tile.place] += self._q_spans[batch][:, tile.rows] @ of_queries


def _sums_of_blocks(rows: Float[Tensor, "row column"], block: int, lead: int) -> Float[Tensor, "block column"]:
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


def _numbers(span: range, like: Tensor) -> Tensor:
    return torch.arange(span.start, span.stop, dtype=like.dtype, device=like.device)
