"""What one head gives to which keys, as numbers to draw: the map that pages, pictures, the viewer and the terminal share.

Where a record holds the pattern, a map has its cells; where it holds sums of blocks alone, the blocks. Both are the same thing:
the mean share that the queries of a row give to the keys of a column. So cells can be put together to blocks, and sinks taken out
of either, by the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from mhacli.render.base.cells import FORBIDDEN
from mhacli.render.base.format import token_text
from mhacli.render.heads.drawable import DrawableHead
from mhacli.render.heads.matrix import Head
from mhacli.results.record.arrays import Array
from mhacli.results.record.heads import HeadStatistics
from mhacli.results.record.record import Record
from mhacli.spec.tokens import TokenSequence

_NOTHING = 1e-6
"""Where less than this is left of a row, it is not blown up: it would be rounding."""


@dataclass(frozen=True)
class HeadMap:
    """`shares` `[row, column]`: the mean share that the queries of a row give to the keys of a column, `FORBIDDEN` where no cell
    may be attended, NaN for what is no number. A cell stands for `block` × `block` tokens, the first from the places `first`
    on, which are negative for padding.

    `of_sinks` is the part of it that the keys at the places `sinks` get, `learned` `[row]` what a learned sink takes and no
    key gets, None where there is none; `n_queries` `[row]` are those that see a key. `taken` `[row]` is what was taken out of
    rows that were renormalised, None where nothing was.
    """

    queries: TokenSequence
    keys: TokenSequence
    shares: Array
    of_sinks: Array
    learned: Array | None
    n_queries: Array
    sinks: tuple[int, ...]
    block: int = 1
    first: tuple[int, int] = (0, 0)
    taken: Array | None = None

    @property
    def is_open(self) -> Array:
        """Where a row's queries may attend to a column's keys."""
        is_open: Array = self.shares != FORBIDDEN
        return is_open

    @property
    def largest(self) -> float:
        """The top of its scale: the largest share of a row that had a choice of columns, 0 where there is none. Of cells whose
        sinks were taken out, those are no choice."""
        choices = self.is_open
        if self.taken is not None and self.block == 1:
            choices[:, [place - self.first[1] for place in self.sinks]] = False
        with_choice = choices.sum(axis=1, keepdims=True) > 1
        return float(np.where(with_choice & np.isfinite(self.shares), self.shares, 0.0).max(initial=0.0))

    @property
    def sink_shares(self) -> Array:
        """What sinks get of each row, `[row]`, taken out or not."""
        shares: Array = self.of_sinks.sum(axis=1) if self.taken is None else self.taken
        return shares

    @property
    def sink_mass(self) -> float:
        """The mean share that sinks get, of all queries that see a key; those that were taken out too."""
        return self._mean(self.sink_shares)

    @property
    def learned_mass(self) -> float | None:
        """The mean share that a learned sink takes; None where there is none."""
        return None if self.learned is None else self._mean(self.learned)

    def _mean(self, rows: Array) -> float:
        """Over all queries that see a key, without those whose shares are not numbers."""
        n_queries = np.where(np.isnan(rows), 0.0, self.n_queries)
        return float((np.nan_to_num(rows) * n_queries).sum() / max(1.0, float(n_queries.sum())))

    def pooled(self, factor: int) -> HeadMap:
        """Blocks of `factor` × `factor` cells: means over the queries that see a key, of sums over keys. One NaN makes NaN."""
        if factor == 1:
            return self
        n_queries = sums(self.n_queries, factor)
        per_query = np.maximum(n_queries, 1)
        learned = None if self.learned is None else sums(self.learned * self.n_queries, factor) / per_query
        taken = None if self.taken is None else sums(self.taken * self.n_queries, factor) / per_query

        def means(cells: Array) -> Array:
            rows = sums(cells * self.n_queries[:, None], factor)
            return sums(rows, factor, axis=1) / per_query[:, None]

        is_open = sums(sums(self.is_open.astype(int), factor), factor, axis=1) > 0
        shares = np.where(is_open, means(np.where(self.is_open, self.shares, 0.0)), FORBIDDEN)
        return replace(
            self,
            shares=shares,
            of_sinks=means(self.of_sinks),
            learned=learned,
            n_queries=n_queries,
            block=self.block * factor,
            taken=taken,
        )

    def without_sinks(self) -> HeadMap:
        """The rest of each row beside sinks, learned ones too, renormalised: what was taken out stands in `taken`. The rest is
        divided by its own sum: where little is left, one less what was taken is rounded too much."""
        rest = np.clip(self.shares - self.of_sinks, 0, None)
        left = rest.sum(axis=1, keepdims=True)
        drawn = np.where(left > _NOTHING, rest / np.maximum(left, _NOTHING), np.where(np.isnan(left), np.nan, 0.0))
        return replace(
            self,
            shares=np.where(self.is_open, drawn, FORBIDDEN),
            of_sinks=np.zeros_like(rest),
            taken=self.of_sinks.sum(axis=1),
        )

    def part(self, rows: slice | Array, columns: slice = slice(None)) -> HeadMap:
        """The map of some rows and columns alone; rows may be named one by one, in any order and several times. `first` stays."""
        learned, taken = (None if rows_of is None else rows_of[rows] for rows_of in (self.learned, self.taken))
        return replace(
            self,
            shares=self.shares[rows, columns],
            of_sinks=self.of_sinks[rows, columns],
            learned=learned,
            n_queries=self.n_queries[rows],
            taken=taken,
        )

    def of_tokens(self) -> HeadMap:
        """The map without rows and columns that are padding alone."""
        texts = zip(self.first, (len(self.queries.tokens), len(self.keys.tokens)), strict=True)
        rows, columns = (slice(-first // self.block, -((first - n) // self.block)) for first, n in texts)
        begins = (first + part.start * self.block for first, part in zip(self.first, (rows, columns), strict=True))
        return replace(self.part(rows, columns), first=(next(begins), next(begins)))

    def fitting(self, rows: int, columns: int) -> HeadMap:
        """The map in blocks large enough that no more than `rows` × `columns` are needed."""
        return self.pooled(max(1, -(-self.shares.shape[0] // rows), -(-self.shares.shape[1] // columns)))

    def query_places(self, row: int) -> tuple[int, int]:
        """The first and the last place of the text that a row stands for."""
        return self._places(self.queries, row, self.first[0])

    def key_places(self, column: int) -> tuple[int, int]:
        """The first and the last place that a column stands for."""
        return self._places(self.keys, column, self.first[1])

    def _places(self, text: TokenSequence, cell: int, first: int) -> tuple[int, int]:
        begin = cell * self.block + first
        return max(0, begin), max(0, min(len(text.tokens), begin + self.block) - 1)

    def query_name(self, row: int) -> str:
        """The token of a row, or the places that it stands for, such as `16–31`."""
        return self._name(self.queries, row, self.first[0])

    def key_name(self, column: int) -> str:
        """The token of a column, or its places."""
        return self._name(self.keys, column, self.first[1])

    def _name(self, text: TokenSequence, cell: int, first: int) -> str:
        begin = cell * self.block + first
        if self.block == 1 or not -self.block < begin < len(text.tokens):
            return token_text(text, begin)
        begin, last = self._places(text, cell, first)
        return f"{begin}–{last}"


def head_map(drawn: DrawableHead, sequence: int) -> HeadMap:
    """The map of a head of a sequence: its cells where the record holds them, else blocks; without what is padding alone."""
    if "pattern" in drawn.view.arrays:
        return _cells(drawn, sequence)
    return block_map(drawn.view, drawn.place, sequence).of_tokens()


def _cells(drawn: DrawableHead, sequence: int) -> HeadMap:
    record = drawn.view
    queries, keys = record.sequences[sequence], record.keys[sequence]
    head, first = Head(record, sequence, drawn.place, "pattern"), record.first_key(sequence)
    columns = slice(first, first + len(keys.tokens))
    allowed, shares = head.allowed[:, columns], head.shares[:, columns].astype(np.float64)
    n_queries = np.asarray(allowed.any(axis=1), dtype=np.float64)
    has_learned = drawn.said is not None and drawn.said.learned_sink is not None
    sinks = sink_places(drawn.said, sequence, keys)
    of_sinks = np.zeros_like(shares)
    of_sinks[:, sinks] = np.where(allowed, shares, 0.0)[:, sinks]
    return HeadMap(
        queries=queries,
        keys=keys,
        shares=np.where(allowed, shares, FORBIDDEN),
        of_sinks=of_sinks,
        learned=np.where(n_queries, np.clip(1 - shares.sum(axis=1), 0, None), 0.0) if has_learned else None,
        n_queries=n_queries,
        sinks=sinks,
    )


def sink_places(said: HeadStatistics | None, sequence: int, keys: TokenSequence) -> tuple[int, ...]:
    """The sinks of a head, by their place in the text; none where nothing is said of the head."""
    found = {sink.key for sink in (() if said is None else said.sink_keys) if sink.sequence == sequence}
    return tuple(sorted(place for place in found if 0 <= place < len(keys.tokens)))


def block_map(record: Record, place: int, sequence: int) -> HeadMap:
    """The map that a look at heads kept, padding included. Of sinks it knows those that begin a text or document: what each query
    gave to others is not kept."""
    assert record.survey is not None, "a map is of a record of heads"
    block, arrays = record.survey.block, record.arrays
    sink = np.nan_to_num(arrays["sink"][sequence, place].astype(np.float64))
    seen = np.broadcast_to(arrays["visible"][sequence], arrays["sink"].shape[1:])[place] > 0
    n_queries = sums(seen.astype(np.float64), block)
    shares = arrays["map"][sequence, place].astype(np.float64)
    uniform = arrays["uniform_map"][sequence]
    is_open = uniform[min(place, uniform.shape[0] - 1)] > 0
    keys = record.keys[sequence]
    sinks = tuple(key for key in sink_places(record.heads[place], sequence, keys) if keys.places[key] == 0)
    of_sinks = _first_tokens(record, sequence, sink, sinks, shares.shape) / np.maximum(n_queries, 1)[:, None]
    has_learned = record.heads[place].learned_sink is not None
    return HeadMap(
        queries=record.sequences[sequence],
        keys=keys,
        shares=np.where(is_open, shares, FORBIDDEN),
        of_sinks=of_sinks,
        learned=np.where(n_queries > 0, np.clip(1 - shares.sum(axis=1), 0, None), 0.0) if has_learned else None,
        n_queries=n_queries,
        sinks=sinks,
        block=block,
        first=(-record.first_query(sequence), -record.first_key(sequence)),
    )


def _first_tokens(record: Record, sequence: int, sink: Array, sinks: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """What the first token of each query's text or document got where it is one of `sinks`, in the cells of the map: sums over
    queries."""
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


def sums(numbers: Array, size: int, axis: int = 0) -> Array:
    """Sums of `size` neighbours along an axis; the last may be of fewer."""
    return np.add.reduceat(numbers, np.arange(0, numbers.shape[axis], size), axis=axis)


def largest_of_maps(maps: Iterable[HeadMap]) -> float:
    """The top of the common scale of some maps."""
    return max((drawn.largest for drawn in maps), default=0.0) or 1.0
