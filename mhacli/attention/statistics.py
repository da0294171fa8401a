"""Every statistic of an attention in one pass: blocks of queries with all the keys that they may see, from the scores to z.

A block is `[head, query, key]`: one head on a CPU, where threads share the heads, and as many as fit on a device, by the same
code. `STATISTICS` is the table of what is computed of a block: a new statistic is one more row. No statistic knows a mask, for
a hidden weight is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mhacli.attention.block import CompiledBlock, CompiledSums, c_block, compiled_block
from mhacli.attention.conditions import Matches
from mhacli.attention.core import Allowed, is_finite
from mhacli.attention.masks import Band, Mask, keys_seen, mixed_keys
from mhacli.attention.memory import heads_at_once, rows_of_block
from mhacli.attention.scores import (
    HIDDEN,
    LOG2_E,
    Attention,
    GivenAttention,
    ScoredAttention,
    exact_dtype,
    indices,
    large,
    of_heads,
    own_cells,
    product,
)

PerQuery = Float[Tensor, "batch head query"]
Statistics = dict[str, Tensor]
"""The results of a pass by the names in `STATISTICS`, each `[batch, head, …]`."""

_SHARP = 16.0
"""Scores from which they are taken relative to the largest of their query. Without, 2^score is far from overflow, and as
exact."""
_MOST = 1e25
"""A score beyond which nothing is told apart: then weights are NaN."""
_MOST_BITS = 100.0
"""By which a sink may be above all scores of a query, to base 2: its weight is then still far from overflow."""


@dataclass(frozen=True)
class StatisticsRequest:
    """What the statistics depend on: the blocks of the map, tokens, marked keys, matching cells.

    `block` queries and keys, a power of two, make a cell of the map. `q_tokens` and `k_tokens` are ids, below 0 where there is no
    token; `before_k` is the token before each key in its text. With `is_self` a key is no duplicate of itself. `first` marks the
    first key of every text, `leading` the first few. `matches` has, for each condition, one predicate per sequence. `q_spans` and
    `k_spans` mark the tokens of named parts of the texts, between which weights are added up.
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
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in found.items() if isinstance(value, Tensor)}
        return replace(self, **moved)


class Places:
    """Some queries of a sequence with the keys that they may see: all that is the same for every head, made once when it is
    needed.

    Planes are 1 where cells are chosen and 0 elsewhere. They lie in memory as the weights do, so that a sum over their cells is a
    product of two vectors.
    """

    def __init__(self, request: StatisticsRequest, batch: int, queries: range, keys: range, memory: _Memory) -> None:
        self.request, self.batch, self.queries, self.keys, self.memory = request, batch, queries, keys, memory
        self.rows, self.columns = slice(queries.start, queries.stop), slice(keys.start, keys.stop)

    def marked(self, marks: Bool[Tensor, "batch key"]) -> tuple[slice, Tensor]:
        """The keys from the first marked one to the last, and 1 at those that are marked."""
        own = marks[self.batch, self.columns]
        places = own.nonzero().flatten()
        span = slice(int(places[0]), int(places[-1]) + 1) if len(places) else slice(0, 0)
        return span, own[span].to(self.memory.dtype)

    @cached_property
    def first(self) -> tuple[slice, Tensor]:
        """The first key of every text."""
        return self.marked(self.request.first)

    @cached_property
    def leading(self) -> tuple[slice, Tensor]:
        """The first few keys of every text."""
        return self.marked(self.request.leading)

    @cached_property
    def steps(self) -> Float[Tensor, "query key"]:
        """|query − key| of each cell."""
        queries, keys = (indices(span, self.request.first) for span in (self.queries, self.keys))
        return (queries[:, None] - keys).abs().to(self.memory.dtype)

    @cached_property
    def groups(self) -> Float[Tensor, "group query"]:
        """1 where a query belongs to a group of those that make one row of the map."""
        rows = indices(self.queries, self.request.first) // self.request.block
        own = torch.arange(int(rows[0]), int(rows[-1]) + 1, device=rows.device)
        return (own[:, None] == rows).to(self.memory.dtype)

    @cached_property
    def duplicate(self) -> list[Float[Tensor, " cell"]]:
        """The plane of keys with the query's token."""
        return [self._plane("duplicate", self._equal_to(self.request.k_tokens, 0))]

    @cached_property
    def induction(self) -> list[Float[Tensor, " cell"]]:
        """The plane of keys after the query's token."""
        return [self._plane("induction", self._equal_to(self.request.before_k, 1))]

    @cached_property
    def matched(self) -> list[Float[Tensor, " cell"]]:
        """The plane of each condition."""
        q_idx, k_idx = (indices(span, self.request.first) for span in (self.queries, self.keys))
        matches = [of_texts[self.batch] for of_texts in self.request.matches]
        return [self._plane(f"matched {n}", cells(q_idx, k_idx)) for n, cells in enumerate(matches)]

    def _equal_to(self, labels: Int[Tensor, "batch key"], shift: int) -> Bool[Tensor, "query key"]:
        """Where a key's label is the query's token, but for the key at `query + shift`. Padding equals nothing."""
        tokens, own = self.request.q_tokens[self.batch, self.rows], labels[self.batch, self.columns]
        same: Tensor = torch.where(tokens < 0, -2, tokens)[:, None] == own
        offset = self.queries.start + shift - self.keys.start
        if self.request.is_self and -len(self.queries) < offset < len(self.keys):
            same.diagonal(offset).zero_()
        return same

    def _plane(self, name: str, cells: Bool[Tensor, "query key"]) -> Float[Tensor, " cell"]:
        flat, own = self.memory.among_zeros(name, (1, *cells.shape))
        own.copy_(cells)
        return flat


class Block:
    """The weights of a block of some heads, and the scores (to base 2) that they come from: `weights = 2^(log2 − bits)`.

    `bits` and `lse` are the logarithms to base 2 of what each query's weights were divided by, and of the sum over its keys
    alone.
    """

    def __init__(self, places: Places, n_heads: int) -> None:
        self.places, self.shape = places, (n_heads, len(places.queries), len(places.keys))
        self._flat, self.weights = places.memory.among_zeros("weights", self.shape)
        self.log2 = self.bits = self.lse = self.weights

    def soften(self, log2: Tensor, reference: Tensor | None, sink: Float[Tensor, "head query 1"] | None) -> None:
        """Makes the weights of scores, which are relative to a `reference` of each query."""
        self.log2 = log2
        of_keys = torch.exp2(log2, out=self.weights).sum(dim=-1, keepdim=True)
        total = of_keys
        if sink is not None:
            total = of_keys + torch.exp2(sink if reference is None else sink - reference).to(of_keys.dtype)
        total = total.clamp(min=torch.finfo(total.dtype).tiny)  # of a query without keys
        self.weights.div_(total)
        self.bits = total.log2().squeeze(-1)
        self.lse = of_keys.to(exact_dtype(total.device)).log2().squeeze(-1)
        if reference is not None:
            self.lse = self.lse + reference.squeeze(-1)

    @property
    def diagonals(self) -> Float[Tensor, "head query diagonal"]:
        """The weights, sheared: column c holds those with `key − query = keys.start − queries.start + c − row count`, and
        zeros, because each row begins one number later than the row before and there are zeros between rows.

        Source of the trick: strides, as in the relative attention of Huang et al. 2018, "Music Transformer", section 3.4.
        """
        n_heads, n_rows, n_keys = self.shape
        width = n_keys + n_rows
        return self._flat.as_strided((n_heads, n_rows, width), (n_rows * width, width + 1, 1))

    @property
    def of_rows(self) -> Float[Tensor, "head group key"]:
        """The sums of the queries that make a row of the map."""
        if self.places.request.block == 1:
            return self.weights
        return torch.stack([self.places.groups @ rows for rows in self.weights])

    def on(self, planes: list[Float[Tensor, " cell"]]) -> Float[Tensor, "head plane"]:
        """The sums of the weights on the cells of each plane."""
        rows = self._flat[self.shape[1] :].view(self.shape[0], -1)
        sums = [rows @ plane[self.shape[1] :] for plane in planes]
        return torch.stack(sums, dim=1) if sums else rows.new_zeros(self.shape[0], 0)


# ------------------------------------------------------------------------------------------------------ the statistics


class Statistic(NamedTuple):
    """A statistic of a block: its name, what it is made for (each query, key, distance or cell of the map; or each head, as a sum
    over all queries), and its function."""

    name: str
    per: Literal["query", "key", "distance", "map", "head", "condition", "spans"]
    of: Callable[[Block], Tensor]


def _entropy(block: Block) -> Tensor:
    """`−Σ p ln p` in nats, never less than 0. It takes the memory of `log2`. Source: Shannon 1948, theorem 2."""
    bits = block.bits * block.weights.sum(dim=-1) - block.log2.mul_(block.weights).sum(dim=-1)
    return bits.mul_(math.log(2)).clamp_(min=0)


def _distance(block: Block) -> Tensor:
    """`Σ p |i − j|` of each query i and its keys j, in tokens. Source: Vig and Belinkov 2019, "Analyzing the Structure of
    Attention", equation 2."""
    return (block.weights * block.places.steps).sum(dim=-1)


def _marked(block: Block, marked: tuple[slice, Tensor]) -> Tensor:
    span, marks = marked
    return block.weights[..., span] @ marks


def _map(block: Block) -> Tensor:
    """Sums over blocks of queries and keys."""
    rows, width = block.of_rows, block.places.request.block
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % width))
    cells: Tensor = padded.unflatten(-1, (-1, width)).sum(dim=-1)
    return cells


def _profile(block: Block) -> Tensor:
    """The sums of the diagonals, but for the first column, which holds none. Source: Clark et al. 2019, "What Does BERT Look
    At?", section 3.1 (attention to the relative positions)."""
    ones = block.weights.new_ones(block.weights.shape[1])
    return torch.stack([(ones @ rows)[1:] for rows in block.diagonals])


def _between(block: Block) -> Tensor:
    """From each span to each, summed over the queries of the first."""
    request, places = block.places.request, block.places
    if request.q_spans is None or request.k_spans is None:
        return block.weights.new_zeros(len(block.weights), 0, 0)
    of_keys, of_queries = (
        spans[places.batch][:, span].to(block.weights.dtype)
        for spans, span in ((request.k_spans, places.columns), (request.q_spans, places.rows))
    )
    return of_queries @ (block.weights @ of_keys.mT)


STATISTICS = (
    Statistic("mass", "query", lambda block: block.weights.sum(dim=-1)),
    Statistic("entropy", "query", _entropy),
    Statistic("squares", "query", lambda block: torch.linalg.vector_norm(block.weights, dim=-1).square()),
    Statistic("peak", "query", lambda block: block.weights.amax(dim=-1).log()),
    Statistic("distance", "query", _distance),
    Statistic("first", "query", lambda block: _marked(block, block.places.first)),
    Statistic("leading", "query", lambda block: _marked(block, block.places.leading)),
    Statistic("received", "key", lambda block: block.of_rows.sum(dim=1)),
    Statistic("map", "map", _map),
    Statistic("profile", "distance", _profile),
    Statistic("duplicate", "head", lambda block: block.on(block.places.duplicate)[:, 0]),
    Statistic("induction", "head", lambda block: block.on(block.places.induction)[:, 0]),
    Statistic("matched", "condition", lambda block: block.on(block.places.matched)),
    Statistic("between", "spans", _between),
)
"""Everything that is computed of the weights p, in this order.

Per query: the sum of its weights (1, or 0 without a key), entropy, `Σ p²` (the inverse of an effective number of keys, Hill
1973), the largest `ln p`, the mean distance, and the weights of the first and the leading keys. Per key what it receives
(Zhang et al. 2023, "H2O: Heavy-Hitter Oracle", section 3), `map` the same over blocks, `profile` per signed distance `key −
query`, of which index `n_queries − 1` is 0. Per head, summed over all queries: the weights on equal tokens (Wang et al. 2022,
"Interpretability in the Wild", section 3.1), on those after them (Olsson et al. 2022, "In-context Learning and Induction
Heads"), on each condition and between spans.
"""


# ------------------------------------------------------------------------------------------------------------ the pass


@dataclass(frozen=True)
class Reduced:
    """Some neighbouring heads of an attention after the pass: their statistics, z, and the log-sum-exp of each query's scores, 0
    without keys. `z` is None where values were not captured."""

    attention: Attention
    heads: range
    statistics: Statistics
    lse: Float[Tensor, "batch head query"]
    z: Float[Tensor, "batch head query d_v"] | None

    @property
    def queries(self) -> Int[Tensor, " query"]:
        """All queries, by number."""
        return torch.arange(self.lse.shape[2], device=self.lse.device)

    @property
    def keys(self) -> Int[Tensor, " key"]:
        """All keys, by number."""
        return torch.arange(self.attention.shape[3], device=self.lse.device)

    @property
    def sink_mass(self) -> PerQuery | None:
        """The weight that a sink logit takes of each query, which no key gets."""
        logits = self.attention.sink_logits
        if logits is None:
            return None
        own = logits[:, self.heads.start : self.heads.stop].to(self.lse.dtype)
        return torch.where(self.has_keys, torch.sigmoid(own - self.lse), 1.0)

    @property
    def has_keys(self) -> Bool[Tensor, "batch head query"]:
        """Which queries see a key at all: the weights of the others are all 0."""
        return self.statistics["mass"] > 0

    def weights_of(
        self, batch: int, index: int, queries: Int[Tensor, " query"], keys: Int[Tensor, " key"]
    ) -> Float[Tensor, "query key"]:
        """Any cells of one of the heads, computed again."""
        lse = self.lse[batch, index, queries]
        return self.attention.weights_of((batch, self.heads[index]), queries, keys, lse)


def reduce_heads(
    attention: Attention,
    request: StatisticsRequest,
    heads: range,
    report_progress: Callable[[int], None] = lambda cells: None,
) -> Reduced:
    """Every statistic of some neighbouring heads, in one pass over blocks of queries and memory that grows with the length of the
    text. `report_progress` receives numbers of reduced cells.
    """
    batch, n_heads, _, _ = attention.shape
    device, values = attention.like.device, attention.v if attention.z is None else None
    memory, sums = _Memory(attention.dtype, device), _Sums(attention, request, heads)
    are_finite = values is None or is_finite(values)
    compiled = None
    if isinstance(attention, ScoredAttention) and torch_because(attention) is None:
        compiled = _Compiled(attention, request, sums)
    for queries, keys in blocks_of(attention, request.block):
        n_cells, strips = len(queries) * len(keys), cache(partial(_strips, attention, queries, keys))
        most = heads_at_once(n_cells, is_cpu=device.type == "cpu") if compiled is None else 1
        groups = list(head_groups(heads, n_heads // attention.n_kv_heads, most=most))
        for b in range(batch):
            places = Places(request, b, queries, keys, memory)
            block = Block(places, len(groups[0]))
            for some in groups:
                block = block if len(block.weights) == len(some) else Block(places, len(some))
                done = () if compiled is None else compiled.reduce(block, some, strips)
                if not done:
                    _fill(attention, block, some, strips())
                sums.add(block, some, done)
                if values is not None:
                    sums.add_z(block, some, values, are_finite=are_finite)
        report_progress(batch * len(heads) * n_cells)
    bits = sums.lse if compiled is None else sums.lse + compiled.lse
    lse = torch.where(bits.isneginf(), 0.0, bits * math.log(2))
    given = None if attention.z is None else attention.z[:, heads.start : heads.stop]
    return Reduced(attention, heads, sums.statistics, lse, given if values is None else sums.z)


def blocks_of(attention: Attention, block: int) -> Iterator[tuple[range, range]]:
    """The blocks of queries, with the keys that they may see, from the beginning of a column of the map on."""
    _, _, n_queries, n_keys = attention.shape
    rows = rows_of_block(n_keys, is_cpu=attention.like.device.type == "cpu")
    for start in range(0, n_queries, rows):
        queries = range(start, min(start + rows, n_queries))
        seen = keys_seen(attention.allowed, queries, n_keys)
        yield queries, range(seen.start // block * block, seen.stop)


def head_groups(heads: Sequence[int], group: int, *, most: int) -> Iterator[range]:
    """The heads in ascending order, neighbours together, `most` at a time; where `group` query heads share a kv head, whole
    groups or a part of one.

    >>> list(head_groups((0, 1, 2, 5), 1, most=2))
    [range(0, 2), range(2, 3), range(5, 6)]
    """
    waiting = range(0)
    for head in sorted(set(heads)):
        is_next = waiting and head == waiting.stop and len(waiting) < max(1, most)
        if is_next and (group == 1 or head // group == waiting.start // group):
            waiting = range(waiting.start, head + 1)
            continue
        if waiting:
            yield waiting
        waiting = range(head, head + 1)
    if waiting:
        yield waiting


_Strips = list[tuple[slice, Bool[Tensor, "_batch _head query key"]]]


def _strips(attention: Attention, queries: range, keys: range) -> _Strips:
    """The columns of a block in which the mask may hide cells, and which cells it allows."""
    if isinstance(attention, GivenAttention):
        return []
    q_idx = indices(queries, attention.like)
    return [
        (
            slice(run.start - keys.start, run.stop - keys.start),
            attention.visible(q_idx, indices(run, attention.like)),
        )
        for run in mixed_keys(attention.allowed, queries, keys)
    ]


def _fill(attention: Attention, block: Block, heads: range, strips: _Strips) -> None:
    """Makes the weights of a block by torch."""
    places, own = block.places, slice(heads.start, heads.stop)
    log2 = places.memory.of("log2", math.prod(block.shape)).view(block.shape)
    if isinstance(attention, GivenAttention):
        block.weights.copy_(attention.weights[places.batch, own, places.rows, places.columns])
        block.log2 = torch.log2(block.weights, out=log2).clamp_(min=HIDDEN)
        block.bits = log2.new_zeros(block.shape[:2])
        block.lse = attention.lse(places.batch, own, places.rows) * LOG2_E
        return
    assert isinstance(attention, ScoredAttention)
    sink = None
    if attention.sink_logits is not None:
        of_all = attention.sink_logits.expand(attention.shape[:3])
        sink = of_all[places.batch, own, places.rows, None].to(log2.dtype) * LOG2_E
    block.soften(log2, _write_scores(attention, places, heads, strips, log2, sink), sink)


def _write_scores(
    attention: ScoredAttention, places: Places, heads: range, strips: _Strips, out: Tensor, sink: Tensor | None
) -> Float[Tensor, "head query 1"] | None:
    """Writes the scores of a block to base 2, `HIDDEN` where masked. Where they are large, they are written relative to a
    reference of each query, which is returned, and computed in float64 where float32 cannot hold them."""

    def largest_in(scores: Tensor) -> Tensor:
        attention.scores_into(scores, places.batch, heads, places.queries, places.keys)
        for columns, cells in strips:
            own = cells[min(places.batch, cells.shape[0] - 1)]
            own = own if own.shape[0] == 1 else own[heads.start : heads.stop]
            scores[..., columns].masked_fill_(~own, HIDDEN)
        largest = scores.amax(dim=-1, keepdim=True)
        return torch.where(largest > HIDDEN / 10, largest, 0.0)

    known = largest_in(out)
    outcomes = known if sink is None else torch.maximum(known, sink)
    size = float(outcomes.abs().amax()) / LOG2_E
    if not size > _SHARP:
        return None
    wide, exact = out, exact_dtype(out.device)
    if size > large(out.device) and out.dtype != exact:
        wide = torch.empty_like(out, dtype=exact)
        known = largest_in(wide)
    reference = torch.where(known.abs() < _MOST, known, torch.nan).to(exact)
    if sink is not None:
        reference = torch.maximum(reference, sink - _MOST_BITS)
    out.copy_(wide.sub_(reference.to(wide.dtype)))
    return reference


def _is_band(allowed: Allowed) -> bool:
    """Whether a mask allows all keys within its band."""
    return isinstance(allowed, Mask) and allowed.cells is None


def is_compiled(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the compiled block is there, for scores of numbers of this dtype."""
    return c_block() is not None and device.type == "cpu" and torch.promote_types(dtype, torch.float32) == torch.float32


def torch_because(attention: Attention) -> str | None:
    """Why torch computes the statistics of an attention; None where the compiled block does."""
    sinks, device = attention.sink_logits, attention.like.device.type
    if not isinstance(attention, ScoredAttention):
        return "the model computes its weights whole"
    if c_block() is None:
        return "the compiled block was not built, or MHA_BLOCK=torch"
    if not is_compiled(attention.like.device, attention.dtype):
        return f"the compiled block computes in float32 on a CPU, not in {str(attention.dtype)[6:]} on {device}"
    if sinks is not None and sinks.shape[2] != 1:
        return "every query has a sink logit of its own"
    return None


class _Compiled:
    """The compiled block for some heads of an attention in float32, which adds to their sums. Few calls of torch are made for
    each block, since every one of them costs as much as a row."""

    def __init__(self, attention: ScoredAttention, request: StatisticsRequest, sums: _Sums) -> None:
        self._attention, self._request, self._sums = attention, request, sums
        of_queries = torch.where(request.q_tokens < 0, -2, request.q_tokens)
        self._tokens = [t.to(torch.int32).contiguous() for t in (of_queries, request.k_tokens, request.before_k)]
        batch, _, n_queries, n_keys = attention.shape
        self._unused, self._columns = torch.zeros(n_queries), torch.zeros(n_keys)
        self.lse = torch.zeros(sums.lse.shape)
        self._texts = [_only_text(*row) for row in zip(request.first, request.leading, strict=True)]
        self._pointers = [[self._pointers_of(b, index) for index in range(len(sums.heads))] for b in range(batch)]

    def reduce(self, block: Block, head: range, strips: Callable[[], _Strips]) -> tuple[str, ...]:
        """Makes the weights of a block of one head, adds their statistics and returns the names of these: none where scores are
        not finite, or so large beside a sink that torch has to do it."""
        attention, places, (scores,), sinks = self._attention, block.places, block.weights, self._attention.sink_logits
        index, described = head.start - self._sums.heads.start, self._described(places, scores)
        if attention.allowed is not None and not _is_band(attention.allowed) and strips():
            cells = own_cells(strips()[0][1], places.batch, head.start).expand(scores.shape)
            cells = cells if cells.stride(1) in (0, 1) else cells.contiguous()
            described.cells, described.cell_row, described.cell_key = cells.data_ptr(), *cells.stride()
        if sinks is not None:
            described.sink = float(own_cells(sinks, places.batch, head.start)[0]) * LOG2_E
        attention.scores_into(block.weights, places.batch, head, places.queries, places.keys)
        of_block = scores.data_ptr(), described, self._pointers[places.batch][index]
        if not compiled_block(*of_block):
            reference = _write_scores(attention, places, head, strips(), block.weights, None)
            described.limit = math.inf
            if reference is None or sinks is not None or not compiled_block(*of_block):
                return ()
            self._sums.lse[places.batch, index, places.rows] = reference[0, :, 0]
        return _BY_C if self._texts[places.batch] is None else _IN_C

    def _described(self, places: Places, scores: Float[Tensor, "query key"]) -> CompiledBlock:
        """A block for C: its place and tokens, and a mask that is a band."""
        request, allowed = self._request, self._attention.allowed
        band = allowed.band if isinstance(allowed, Mask) and _is_band(allowed) else Band()
        of_tokens = (tokens[places.batch].data_ptr() for tokens in self._tokens)
        return CompiledBlock(
            *scores.shape, scores.stride(0), places.queries.start, places.keys.start, *band, None, 0, 0,
            -math.inf, large(scores.device) * LOG2_E, *(self._texts[places.batch] or (0, 0)), *of_tokens,
            request.is_self, request.block, self._sums.statistics["map"].shape[3], len(self._unused) - 1,
        )  # fmt: skip

    def _pointers_of(self, batch: int, index: int) -> CompiledSums:
        """Where the sums of a head are."""
        sums = {name: numbers[batch, index] for name, numbers in self._sums.statistics.items() if name in _IN_C}
        sums |= {"lse": self.lse[batch, index], "columns": self._columns}
        if self._texts[batch] is None:
            sums |= {"first": self._unused, "leading": self._unused}
        return CompiledSums(**{name: numbers.data_ptr() for name, numbers in sums.items()})


_BY_C = ("mass", "entropy", "squares", "peak", "distance", "received", "map", "profile", "duplicate", "induction")
_IN_C = (*_BY_C, "first", "leading")


def _only_text(first: Bool[Tensor, " key"], leading: Bool[Tensor, " key"]) -> tuple[int, int] | None:
    """The first key of a text and the number of its leading keys; None where there are several texts."""
    starts = first.nonzero().flatten().tolist()
    return (starts[0], int(leading.sum())) if len(starts) == 1 else None


class _Memory:
    """Memory that the blocks of a thread use in turn: writing to new memory takes longer."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self._device = dtype, device
        self._kept: dict[str, Tensor] = {}

    def of(self, name: str, n: int) -> Float[Tensor, " cell"]:
        """Room for `n` numbers; what the earlier ones of this name held is gone."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < n:
            kept = self._kept[name] = torch.empty(n, dtype=self.dtype, device=self._device)
        return kept[:n]

    def among_zeros(
        self, name: str, shape: tuple[int, ...]
    ) -> tuple[Float[Tensor, " cell"], Float[Tensor, "head query key"]]:
        """Memory with as many zeros before and after each row of cells as there are rows; and the cells, not initialised."""
        n_heads, n_rows, n_keys = shape
        flat = self.of(name, n_rows + n_heads * n_rows * (n_keys + n_rows))
        flat[:n_rows].zero_()
        padded = flat[n_rows:].view(n_heads, n_rows, n_keys + n_rows)
        padded[..., n_keys:].zero_()
        return flat, padded[..., :n_keys]


class _Sums:
    """The statistics of some heads, as far as their blocks were added."""

    def __init__(self, attention: Attention, request: StatisticsRequest, heads: range) -> None:
        batch, n_all, n_queries, n_keys = attention.shape
        exact, n_spans = exact_dtype(attention.like.device), 0 if request.q_spans is None else request.q_spans.shape[1]
        shapes: dict[str, tuple[int, ...]] = {
            "query": (n_queries,),
            "key": (n_keys,),
            "distance": (n_queries + n_keys - 1,),
            "map": (-(-n_queries // request.block), -(-n_keys // request.block)),
            "head": (),
            "condition": (len(request.matches),),
            "spans": (n_spans, n_spans),
        }
        self._n_all, self.heads = n_all, heads
        self._rows = [row for row in STATISTICS if math.prod(shapes[row.per])]
        self.statistics: Statistics = {
            row.name: attention.like.new_zeros(
                (batch, len(heads), *shapes[row.per]),
                dtype=exact if row.per in ("head", "condition", "spans") else attention.dtype,
            )
            for row in STATISTICS
        }
        self.lse = attention.like.new_zeros((batch, len(heads), n_queries), dtype=exact)
        self.z = None if attention.v is None else attention.v.new_zeros(*self.lse.shape, attention.v.shape[3])

    def add(self, block: Block, heads: range, done: Container[str] = ()) -> None:
        """Adds every statistic of a block of some of the heads but for those that are done."""
        rows = [row for row in self._rows if row.name not in done]
        if not done:
            self.lse[block.places.batch, self._own(heads), block.places.rows] = block.lse
        if not rows:
            return
        places, own = block.places, self._own(heads)
        width, n_rows, n_keys = places.request.block, len(places.queries), len(places.keys)
        start = self.lse.shape[2] + places.keys.start - places.queries.start - n_rows
        row, column = places.queries.start // width, places.keys.start // width
        at: dict[str, tuple[slice, ...]] = {
            "query": (slice(None), places.rows),
            "key": (slice(None), places.columns),
            "distance": (slice(None), slice(start, start + n_rows + n_keys - 1)),
            "map": (slice(None), slice(row, row - (-n_rows // width)), slice(column, column - (-n_keys // width))),
        }
        for statistic in rows:
            sums = self.statistics[statistic.name][places.batch, own]
            sums[at.get(statistic.per, ())].add_(statistic.of(block))

    def add_z(self, block: Block, heads: range, values: Tensor, *, are_finite: bool) -> None:
        """The product of the weights with the values."""
        places = block.places
        assert self.z is not None
        values = of_heads(values[places.batch], heads, self._n_all)[:, places.columns].to(block.weights.dtype)
        if not are_finite:  # 0 · NaN is NaN, and a hidden key may hold anything
            values = values.masked_fill((block.weights == 0).all(dim=1).unsqueeze(-1), 0.0)
        own = self.z[places.batch, self._own(heads), places.rows]
        if own.dtype == values.dtype and len(own) == 1:
            product(block.weights, values, out=own)
        else:
            own.copy_(product(block.weights, values))

    def _own(self, heads: range) -> slice:
        return slice(heads.start - self.heads.start, heads.stop - self.heads.start)
