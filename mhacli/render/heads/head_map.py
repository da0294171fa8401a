"""The rows of a head's pattern, and its map of cells or blocks.

A map has the cells of the pattern if the record has them, else blocks. Both are the mean weight from the queries of a
row to the keys of a column. So pooling cells and hiding sinks use the same arithmetic for both, and a head looks the
same in the terminal, the viewer, pages and pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mhacli.record.arrays import Array
from mhacli.record.heads import HeadStatistics
from mhacli.record.record import Record
from mhacli.render.base.cells import FORBIDDEN
from mhacli.render.base.format import token_text
from mhacli.render.heads.drawable import DrawableHead
from mhacli.text.tokens import TokenSequence

if TYPE_CHECKING:  # imported only for records with arrays
    from mhacli.record.record import InspectedLayer

# ----------------------------------------------------------------------------------------------------- rows of a pattern


@dataclass(frozen=True)
class HeadPattern:
    """The pattern of one head of one sequence: real queries × padded keys.

    `place` is its index on the head axis. `rows` are the requested queries, None for all. From the query `produced` on,
    the next token was generated. `layer` is None for mha's own layer.
    """

    record: Record
    sequence: int
    place: int
    site: str = "pattern"
    rows: tuple[int, ...] | None = None
    produced: int | None = None
    layer: InspectedLayer | None = None

    @property
    def statistics(self) -> HeadStatistics:
        """The head's statistics, in a record with statistics for every head."""
        return self.record.heads[self.place]

    @property
    def has_learned_sink(self) -> bool:
        """Whether a sink logit takes part of each row."""
        return self.layer is not None and self.layer.sinks

    @property
    def queries(self) -> slice | Array:
        """The rows of the array for the sequence's own requested tokens."""
        first = self.record.first_query(self.sequence)
        if self.rows is not None:
            return first + np.array(self.rows, dtype=int)
        return slice(first, first + len(self.record.sequences[self.sequence].tokens))

    @property
    def weights(self) -> Array:
        """The pattern `[query, key]`, with padded keys and without padded queries."""
        return self._rows(self.record.arrays[self.site][self.sequence, self.place])

    @property
    def allowed(self) -> Array:
        """The visible cells, `[query, key]`."""
        allowed = self.record.arrays["allowed"]
        return self._rows(allowed[self.sequence, min(self.place, allowed.shape[1] - 1)])

    @property
    def entropy(self) -> Array:
        """The entropy of each row in nats."""
        return self._rows(self.record.arrays["entropy"][self.sequence, self.place])

    def _rows(self, array: Array) -> Array:
        rows: Array = array[self.queries]
        return rows

    def learned_weight(self, row: int) -> float:
        """The weight of a row's sink logit."""
        return max(0.0, 1 - float(self.weights[row].sum(dtype=np.float64)))

    def query_index(self, row: int) -> int:
        """The index of a row's token in its sequence."""
        return row if self.rows is None else self.rows[row]

    def query_name(self, row: int) -> str:
        """The query token of a row, or `is → Paris` if its next token was generated."""
        index, sequence = self.query_index(row), self.record.sequences[self.sequence]
        name = token_text(sequence, index)
        return f"{name} → {token_text(sequence, index + 1)}" if self.is_followed(row) else name

    def is_followed(self, row: int) -> bool:
        """Whether the next token of a row was generated."""
        last = len(self.record.sequences[self.sequence].tokens) - 1
        return self.produced is not None and self.produced <= self.query_index(row) < last

    def row_label(self, row: int) -> str:
        """The name of a row, with its index unless all rows are drawn."""
        return self.query_name(row) if self.rows is None else f"{self.query_index(row)} {self.query_name(row)}"

    def key_index(self, column: int) -> int:
        """The index of a column's token in its sequence; out of range for padding."""
        return column - self.record.first_key(self.sequence)

    def key_name(self, column: int) -> str:
        """The key token of a column, or the sign for padding."""
        return token_text(self.record.keys[self.sequence], self.key_index(column))

    def is_padding(self, column: int) -> bool:
        """Whether a column is padding."""
        return not 0 <= self.key_index(column) < len(self.record.keys[self.sequence].tokens)


def largest_weight(record: Record, site: str) -> float:
    """The top of the common scale of all heads: the largest attention weight of a query that sees several keys."""
    return _largest(record.arrays[site], record.arrays["allowed"]) or 1.0


def largest_of(heads: Sequence[HeadPattern]) -> float:
    """The top of the common scale of some heads, as `largest_weight`."""
    return max((_largest(head.weights, head.allowed) for head in heads), default=0.0) or 1.0


def _largest(weights: Array, allowed: Array) -> float:
    choice = allowed.sum(axis=-1) > 1
    rows = weights.max(axis=-1, where=np.isfinite(weights), initial=0.0)
    return float(np.where(np.broadcast_to(choice, rows.shape), rows, 0.0).max(initial=0.0))


def where(record: Record, sequence: int, layer: str, head: int | None = None) -> str:
    """The title of a picture: its layer, head, and sequence if there are several."""
    text = f"sequence {sequence}" if not layer or len(record.sequences) > 1 else ""
    name = "" if head is None else f"head {head}"
    return " · ".join(part for part in ((layer, name, text) if layer else (text, name)) if part)


def kv_head_of(record: Record, head: int) -> str:
    """The kv head of a query head, if it is shared."""
    group = record.config.heads_per_kv_head
    return f" · kv head {head // group}" if group > 1 else ""


# ------------------------------------------------------------------------------------------------------------------ maps

_NOTHING = 1e-6
"""Rows with a smaller remaining weight are not renormalised, because it consists of rounding errors."""


@dataclass(frozen=True)
class HeadMap:
    """`weights` `[row, column]` are mean attention weights from the queries of a row to the keys of a column.

    They are `FORBIDDEN` in cells that are masked entirely, and NaN if not a number. A cell stands for `block` × `block`
    tokens, starting at the positions `first`, which are negative for padding. `of_sinks` is the part of the weights
    that goes to the keys at `sinks`. `learned` `[row]` is the weight of a sink logit, None without one. `n_queries`
    `[row]` counts queries with a visible key. `taken` `[row]` is the weight removed from renormalised rows, None if
    nothing was removed.
    """

    queries: TokenSequence
    keys: TokenSequence
    weights: Array
    of_sinks: Array
    learned: Array | None
    n_queries: Array
    sinks: tuple[int, ...]
    block: int = 1
    first: tuple[int, int] = (0, 0)
    taken: Array | None = None

    @property
    def is_open(self) -> Array:
        """Whether any cell is visible from a row's queries to a column's keys."""
        is_open: Array = self.weights != FORBIDDEN
        return is_open

    @property
    def largest(self) -> float:
        """The top of the scale: the largest weight of a row with several visible columns; 0 without such a row. Removed
        sinks do not count."""
        choices = self.is_open
        if self.taken is not None and self.block == 1:
            choices[:, [place - self.first[1] for place in self.sinks]] = False
        with_choice = choices.sum(axis=1, keepdims=True) > 1
        return float(np.where(with_choice & np.isfinite(self.weights), self.weights, 0.0).max(initial=0.0))

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

    def pooled(self, factor: int) -> HeadMap:
        """Blocks of `factor` × `factor` cells: sums over keys, averaged over queries with a visible key. NaN
        propagates."""
        if factor == 1:
            return self
        n_queries = sums(self.n_queries, factor)
        per_query = np.maximum(n_queries, 1)
        learned = None if self.learned is None else sums(self.learned * self.n_queries, factor) / per_query
        taken = None if self.taken is None else sums(self.taken * self.n_queries, factor) / per_query

        is_open = sums(sums(self.is_open.astype(int), factor), factor, axis=1) > 0
        means = pooled_means(np.where(self.is_open, self.weights, 0.0), self.n_queries, factor)
        return replace(
            self,
            weights=np.where(is_open, means, FORBIDDEN),
            of_sinks=pooled_means(self.of_sinks, self.n_queries, factor),
            learned=learned,
            n_queries=n_queries,
            block=self.block * factor,
            taken=taken,
        )

    def without_sinks(self) -> HeadMap:
        """The map without sinks and sink logit, renormalised, with the removed weight in `taken`.

        Rows are divided by the sum of the rest, which is more precise than one less the removed weight.
        """
        rest = np.clip(self.weights - self.of_sinks, 0, None)
        left = rest.sum(axis=1, keepdims=True)
        weights = np.where(left > _NOTHING, rest / np.maximum(left, _NOTHING), np.where(np.isnan(left), np.nan, 0.0))
        return replace(
            self,
            weights=np.where(self.is_open, weights, FORBIDDEN),
            of_sinks=np.zeros_like(rest),
            taken=self.of_sinks.sum(axis=1),
        )

    def part(self, rows: slice | Array, columns: slice | Array = slice(None)) -> HeadMap:
        """The map of some rows and columns. Rows may be listed in any order and repeatedly. `first` stays."""
        learned, taken = (None if rows_of is None else rows_of[rows] for rows_of in (self.learned, self.taken))
        return replace(
            self,
            weights=self.weights[rows, columns],
            of_sinks=self.of_sinks[rows, columns],
            learned=learned,
            n_queries=self.n_queries[rows],
            taken=taken,
        )

    def of_rows(self, rows: Sequence[int], factor: int) -> HeadMap:
        """The map of some rows, each on its own, with `factor` columns per cell."""
        return self.part(np.repeat(np.array(rows, dtype=int), factor)).pooled(factor)

    def of_tokens(self) -> HeadMap:
        """The map without rows and columns of padding alone."""
        texts = zip(self.first, (len(self.queries.tokens), len(self.keys.tokens)), strict=True)
        rows, columns = (slice(-first // self.block, -((first - n) // self.block)) for first, n in texts)
        begins = (first + part.start * self.block for first, part in zip(self.first, (rows, columns), strict=True))
        return replace(self.part(rows, columns), first=(next(begins), next(begins)))

    def fitting(self, rows: int, columns: int) -> HeadMap:
        """The map in blocks, so that at most `rows` × `columns` cells are needed."""
        return self.pooled(max(1, -(-self.weights.shape[0] // rows), -(-self.weights.shape[1] // columns)))

    def query_places(self, row: int) -> tuple[int, int]:
        """The first and last position of a row's tokens."""
        return self._places(self.queries, row, self.first[0])

    def key_places(self, column: int) -> tuple[int, int]:
        """The first and last position of a column's tokens."""
        return self._places(self.keys, column, self.first[1])

    def _places(self, text: TokenSequence, cell: int, first: int) -> tuple[int, int]:
        begin = cell * self.block + first
        return max(0, begin), max(0, min(len(text.tokens), begin + self.block) - 1)

    def query_name(self, row: int) -> str:
        """The token of a row, or its positions, such as `16–31`."""
        return self._name(self.queries, row, self.first[0])

    def key_name(self, column: int) -> str:
        """The token of a column, or its positions."""
        return self._name(self.keys, column, self.first[1])

    def _name(self, text: TokenSequence, cell: int, first: int) -> str:
        begin = cell * self.block + first
        if self.block == 1 or not -self.block < begin < len(text.tokens):
            return token_text(text, begin)
        begin, last = self._places(text, cell, first)
        return f"{begin}–{last}"


def head_map(head: DrawableHead, sequence: int) -> HeadMap:
    """The map of a head of a sequence, without padding: its cells if the record has them, else blocks."""
    if "pattern" in head.record.arrays:
        return pattern_map(HeadPattern(head.record, sequence, head.place), head.statistics)
    return block_map(head.record, head.place, sequence).of_tokens()


def pattern_map(head: HeadPattern, statistics: HeadStatistics | None = None) -> HeadMap:
    """The cells of a pattern as a map without padding. Its sinks come from the statistics."""
    record, sequence = head.record, head.sequence
    queries, keys = record.sequences[sequence], record.keys[sequence]
    first = record.first_key(sequence)
    columns = slice(first, first + len(keys.tokens))
    allowed, weights = head.allowed[:, columns], head.weights[:, columns].astype(np.float64)
    n_queries = np.asarray(allowed.any(axis=1), dtype=np.float64)
    has_learned = statistics is not None and statistics.learned_sink is not None
    sinks = sink_places(statistics, sequence, keys)
    of_sinks = np.zeros_like(weights)
    of_sinks[:, sinks] = np.where(allowed, weights, 0.0)[:, sinks]
    return HeadMap(
        queries=queries,
        keys=keys,
        weights=np.where(allowed, weights, FORBIDDEN),
        of_sinks=of_sinks,
        learned=np.where(n_queries, np.clip(1 - weights.sum(axis=1), 0, None), 0.0) if has_learned else None,
        n_queries=n_queries,
        sinks=sinks,
    )


def sink_places(statistics: HeadStatistics | None, sequence: int, keys: TokenSequence) -> tuple[int, ...]:
    """The positions of a head's sink keys; none without statistics."""
    sinks = {sink.key for sink in (() if statistics is None else statistics.sink_keys) if sink.sequence == sequence}
    return tuple(sorted(place for place in sinks if 0 <= place < len(keys.tokens)))


def block_map(record: Record, place: int, sequence: int) -> HeadMap:
    """The map of blocks from head statistics, with padding. Of sinks it has only those that begin a text or document,
    because the weights of others per query are not kept."""
    assert record.survey is not None, "a map is of a record of heads"
    block, arrays = record.survey.block, record.arrays
    sink = np.nan_to_num(arrays["sink"][sequence, place].astype(np.float64))
    seen = np.broadcast_to(arrays["visible"][sequence], arrays["sink"].shape[1:])[place] > 0
    n_queries = sums(seen.astype(np.float64), block)
    weights = arrays["map"][sequence, place].astype(np.float64)
    uniform = arrays["uniform_map"][sequence]
    is_open = uniform[min(place, uniform.shape[0] - 1)] > 0
    keys = record.keys[sequence]
    sinks = tuple(key for key in sink_places(record.heads[place], sequence, keys) if keys.places[key] == 0)
    of_sinks = _first_tokens(record, sequence, sink, sinks, weights.shape) / np.maximum(n_queries, 1)[:, None]
    has_learned = record.heads[place].learned_sink is not None
    return HeadMap(
        queries=record.sequences[sequence],
        keys=keys,
        weights=np.where(is_open, weights, FORBIDDEN),
        of_sinks=of_sinks,
        learned=np.where(n_queries > 0, np.clip(1 - weights.sum(axis=1), 0, None), 0.0) if has_learned else None,
        n_queries=n_queries,
        sinks=sinks,
        block=block,
        first=(-record.first_query(sequence), -record.first_key(sequence)),
    )


def _first_tokens(record: Record, sequence: int, sink: Array, sinks: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """The weight of the first token of each query's text or document, if it is one of `sinks`, summed over queries into
    the cells."""
    assert record.survey is not None
    queries, keys = record.sequences[sequence], record.keys[sequence]
    documents = keys.documents or (0,) * len(keys.tokens)
    begins = {document: index for index, document in reversed(list(enumerate(documents)))}
    of_query = queries.documents or (0,) * len(queries.tokens)
    firsts = np.array([begins.get(document, 0) for document in of_query], dtype=int)
    columns = record.first_query(sequence) + np.arange(len(of_query))
    is_taken, block = np.isin(firsts, sinks), record.survey.block
    taken = np.zeros(shape)
    rows, cells = columns[is_taken], firsts[is_taken] + record.first_key(sequence)
    np.add.at(taken, (rows // block, cells // block), sink[rows])
    return taken


def pooled_means(cells: Array, n_queries: Array, factor: int) -> Array:
    """Blocks of `factor` × `factor` cells: means over queries of sums over keys. `n_queries` `[row]` counts the queries
    of a row."""
    rows = sums(cells * n_queries[:, None], factor)
    return sums(rows, factor, axis=1) / np.maximum(sums(n_queries, factor), 1)[:, None]


def sums(numbers: Array, size: int, axis: int = 0) -> Array:
    """Sums of `size` neighbours along an axis. The last may have fewer."""
    return np.add.reduceat(numbers, np.arange(0, numbers.shape[axis], size), axis=axis)


def largest_of_maps(maps: Iterable[HeadMap]) -> float:
    """The top of the common scale of some maps."""
    return max((each.largest for each in maps), default=0.0) or 1.0
