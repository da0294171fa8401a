"""Every statistic of an attention in one pass: blocks of queries with all the keys that they may
see, from the scores to z.

A block is `[head, query, key]`: one head on a CPU, where threads share the heads, and as many as
fit on a device, by the same code. `BLOCK_STATISTICS` is the table of what is computed of a block: a
new statistic is one more row. No statistic knows a mask, because a hidden weight is 0.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from mhacli.io.long_work import Progress, no_progress
from mhacli.run import heads_at_once, rows_of_block

from .axes import StatisticsRequest
from .block import IN_C, CompiledHeads, c_block
from .core import HeadOutputs, KeyIdx, PerQuery, QueryIdx, dtype_name
from .masks import keys_seen
from .scores import (
    HIDDEN,
    LOG2_E,
    Attention,
    BlockPlace,
    Chosen,
    GivenAttention,
    ScoredAttention,
    exact_dtype,
    head_groups,
    indices,
    of_heads,
    of_some,
    product,
)

PassResults = dict[str, Tensor]
"""The results of a pass by the names in `BLOCK_STATISTICS`, each `[batch, head, …]`."""


@dataclass(frozen=True)
class Cells:
    """Some queries of a sequence with the keys that they may see. What is the same for every head
    is made once, when it is needed.
    """

    attention: Attention
    request: StatisticsRequest
    batch: int
    queries: range
    keys: range

    @property
    def rows(self) -> slice:
        """Where the queries are among all."""
        return slice(self.queries.start, self.queries.stop)

    @property
    def columns(self) -> slice:
        """Where the keys are among all."""
        return slice(self.keys.start, self.keys.stop)

    @cached_property
    def steps(self) -> Float[Tensor, "query key"]:
        """|query − key| of each cell."""
        queries, keys = self._indices()
        steps = queries[:, None] - keys - self.request.axes.ahead(self.batch)
        return steps.abs().to(self.attention.dtype)

    @cached_property
    def duplicate(self) -> Float[Tensor, "query key"]:
        """1 at keys with the query's token."""
        return self.equal_to(self.request.k_tokens, 0).to(self.attention.dtype)

    @cached_property
    def induction(self) -> Float[Tensor, "query key"]:
        """1 at keys after the query's token."""
        return self.equal_to(self.request.before_k, 1).to(self.attention.dtype)

    @cached_property
    def matched(self) -> list[Float[Tensor, "query key"]]:
        """1 at the cells of each condition."""
        return [
            of_texts[self.batch](*self._indices()).to(self.attention.dtype)
            for of_texts in self.request.matches
        ]

    def _indices(self) -> tuple[QueryIdx, KeyIdx]:
        return indices(self.queries, self.request.first), indices(self.keys, self.request.first)

    def equal_to(self, labels: Int[Tensor, "batch key"], shift: int) -> Bool[Tensor, "query key"]:
        """Where a key's label is the query's token, except at the key `query + shift`. Padding
        equals nothing.
        """
        tokens = self.request.q_tokens[self.batch, self.rows]
        tokens = torch.where(tokens < 0, -2, tokens)
        same: Tensor = tokens[:, None] == labels[self.batch, self.columns]
        offset = self.queries.start + shift - self.keys.start
        if self.request.axes.is_self and -len(self.queries) < offset < len(self.keys):
            same.diagonal(offset).zero_()
        return same


@dataclass(frozen=True)
class Block:
    """The weights of some heads in cells. They come from scores to base 2: `weights = 2^(log2 −
    bits)`, with `bits` for each query. The compiled block keeps neither of both.
    """

    cells: Cells
    heads: range
    weights: Float[Tensor, "head query key"]
    log2: Float[Tensor, "head query key"] | None = None
    bits: Float[Tensor, "head query"] | None = None

    @property
    def request(self) -> StatisticsRequest:
        """The texts, and what is asked of them."""
        return self.cells.request

    @property
    def of_rows(self) -> Float[Tensor, "head group key"]:
        """The sums of the queries that make a row of the map."""
        return _summed(self.weights, 1, min(self.request.block, len(self.cells.queries)))

    def marked(self, marks: Bool[Tensor, "batch key"]) -> Float[Tensor, "head query"]:
        """The sum of each query's weights of marked keys."""
        return self.weights @ marks[self.cells.batch, self.cells.columns].to(self.weights.dtype)

    def on(self, plane: Float[Tensor, "query key"]) -> Float[Tensor, " head"]:
        """The sum of the weights on the cells where a plane is 1."""
        return self.weights.flatten(1) @ plane.flatten()


def _summed(cells: Tensor, axis: int, size: int) -> Tensor:
    """The sums of `size` neighbours along an axis of cells `[head, query, key]`."""
    n_more = -cells.shape[axis] % size
    if n_more:
        cells = pad(cells, (0, n_more) if axis == 2 else (0, 0, 0, n_more))
    sums: Tensor = cells.unflatten(axis, (-1, size)).sum(dim=axis + 1)
    return sums


# ----------------------------------------------------------------------------------- the statistics


class BlockStatistic(NamedTuple):
    """A statistic of a block: its name, what it is made for (each query, key, distance or cell of
    the map; or each head, as a sum over all queries), and its function.
    """

    name: str
    per: Literal["query", "key", "distance", "map", "head", "condition", "spans"]
    of: Callable[[Block], Tensor]


def _entropy(block: Block) -> Tensor:
    """`−Σ p ln p` in nats, never less than 0. Source: Shannon 1948, theorem 2."""
    assert block.log2 is not None
    assert block.bits is not None
    of_keys = torch.linalg.vecdot(block.log2, block.weights)
    bits: Tensor = block.bits * block.weights.sum(dim=-1) - of_keys
    return bits.mul_(math.log(2)).clamp_(min=0)


def _profile(block: Block) -> Tensor:
    """The sums of the diagonals: with the last query first and a zero more behind each row than
    there are queries, less one, a row begins one number later than the row before. Source: Huang et
    al. 2018, "Music Transformer", section 3.4; the statistic: Clark et al. 2019, "What Does BERT
    Look At?", section 3.1 (attention to the relative positions).
    """
    n_rows = block.weights.shape[1]
    rows = pad(block.weights.flip(1), (0, n_rows)).flatten(1)
    diagonals: Tensor = rows[:, :-n_rows].unflatten(1, (n_rows, -1)).sum(dim=1)
    return diagonals


def _between(block: Block) -> Tensor:
    """From each span to each, summed over the queries of the first."""
    q_spans, k_spans = block.request.q_spans, block.request.k_spans
    assert q_spans is not None
    assert k_spans is not None
    cells, dtype = block.cells, block.weights.dtype
    of_keys = k_spans[cells.batch][:, cells.columns].to(dtype)
    return q_spans[cells.batch][:, cells.rows].to(dtype) @ (block.weights @ of_keys.mT)


BLOCK_STATISTICS = (
    BlockStatistic("mass", "query", lambda block: block.weights.sum(dim=-1)),
    BlockStatistic("entropy", "query", _entropy),
    BlockStatistic(
        "squares", "query", lambda block: torch.linalg.vector_norm(block.weights, dim=-1).square()
    ),
    BlockStatistic("peak", "query", lambda block: block.weights.amax(dim=-1).log()),
    BlockStatistic(
        "distance", "query", lambda block: torch.linalg.vecdot(block.weights, block.cells.steps)
    ),
    BlockStatistic("first", "query", lambda block: block.marked(block.request.first)),
    BlockStatistic("leading", "query", lambda block: block.marked(block.request.leading)),
    BlockStatistic("received", "key", lambda block: block.of_rows.sum(dim=1)),
    BlockStatistic("map", "map", lambda block: _summed(block.of_rows, 2, block.request.block)),
    BlockStatistic("profile", "distance", _profile),
    BlockStatistic("duplicate", "head", lambda block: block.on(block.cells.duplicate)),
    BlockStatistic("induction", "head", lambda block: block.on(block.cells.induction)),
    BlockStatistic(
        "matched",
        "condition",
        lambda block: torch.stack([*map(block.on, block.cells.matched)], dim=1),
    ),
    BlockStatistic("between", "spans", _between),
)
"""Everything that is computed of the weights p, in this order.

Per query: the sum of its weights (1, or 0 without a key), entropy, `Σ p²` (the inverse of an
effective number of keys, Hill 1973), the largest `ln p`, the mean distance, and the weights of the
first and the leading keys. Per key what it receives (Zhang et al. 2023, "H2O: Heavy-Hitter Oracle",
section 3), `map` the same over blocks, `profile` per signed distance `key − query`, of which index
`n_queries − 1` is 0. The mean distance, `Σ p |i − j|`: Vig and Belinkov 2019, "Analyzing the
Structure of Attention", equation 2. Per head, summed over all queries: the weights on equal tokens
(Wang et al. 2022, "Interpretability in the Wild", section 3.1), on those after them (Olsson et al.
2022, "In-context Learning and Induction Heads"), on each condition and between spans.
"""


# ----------------------------------------------------------------------------------------- the pass


@dataclass(frozen=True)
class Reduced:
    """Some neighbouring heads of an attention after the pass: their statistics, z, and the
    log-sum-exp of each query's scores, 0 without keys, on the device of the attention. `z` is None
    where values were not captured.
    """

    attention: Attention
    request: StatisticsRequest
    heads: range
    statistics: PassResults
    lse: PerQuery
    z: HeadOutputs | None

    def span(self, heads: range) -> slice:
        """Where some of the heads are among them."""
        return slice(heads.start - self.heads.start, heads.stop - self.heads.start)

    @cached_property
    def keys(self) -> KeyIdx:
        """All keys, by number."""
        return torch.arange(self.attention.shape[3], device=self.attention.like.device)

    @property
    def sink_mass(self) -> PerQuery | None:
        """The weight that a sink logit takes of each query, which no key gets."""
        sinks = self._sinks
        if sinks is None:
            return None
        return torch.where(self.has_keys, torch.sigmoid(sinks - self.lse), 1.0)

    @cached_property
    def top_score(self) -> PerQuery:
        """The largest score of each query, −∞ without keys."""
        attention, sinks = self.attention, self._sinks
        if isinstance(attention, GivenAttention):
            scores, tops = of_some(attention.scores, self.heads), list[Tensor]()
            keys = indices(range(scores.shape[-1]), scores)
            for queries, _ in blocks_of(attention, self.request):
                visible = attention.visible_to(self.heads, indices(queries, scores), keys)
                rows = scores[:, :, queries.start : queries.stop]
                tops.append(rows.masked_fill(~visible, -torch.inf).amax(dim=-1))
            return torch.cat(tops, dim=-1).to(attention.dtype)
        # by its weight, in which a sink logit takes part
        lse = self.lse if sinks is None else torch.logaddexp(self.lse, sinks)
        return self.statistics["peak"] + lse

    @property
    def _sinks(self) -> Float[Tensor, "_batch head _query"] | None:
        logits = self.attention.sink_logits
        if logits is None:
            return None
        return of_some(logits, self.heads).to(self.lse)

    @property
    def has_keys(self) -> Bool[Tensor, "batch head query"]:
        """Which queries see a key at all: the weights of the others are all 0."""
        return self.statistics["mass"] > 0

    def weights_of(
        self, heads: range, queries: Chosen, keys: Chosen, *, is_coarse: bool
    ) -> tuple[Float[Tensor, "batch head chosen_query chosen_key"], Tensor]:
        """Any cells of some of the heads, computed again, and which of them the mask leaves, with
        axes of 1 for what holds for all. `is_coarse` says that the scores are so large that they
        do not give weights by their log-sum-exp.
        """
        lse = None if is_coarse else self.lse[:, self.span(heads)]
        visible = self.attention.visible_to(heads, queries, keys)
        return self.attention.weights_of(heads, queries, keys, visible, lse), visible


def reduce_blocks(
    attention: Attention,
    request: StatisticsRequest,
    heads: range,
    made: PassResults,
    report_progress: Progress = no_progress,
) -> Reduced:
    """Every statistic of some neighbouring heads that is not `made` already, in one pass over
    blocks of queries and memory that grows with the length of the text. `report_progress` receives
    the completed fraction of the queries.
    """
    reduced = _no_sums(attention, request, heads, made)
    lacking = [
        row
        for row in BLOCK_STATISTICS
        if row.name not in made and reduced.statistics[row.name].numel()
    ]
    if lacking or (attention.z is None and reduced.z is not None):
        _add_blocks(reduced, lacking, report_progress, is_made=bool(made))
    return reduced


def _add_blocks(
    reduced: Reduced,
    of_torch: Sequence[BlockStatistic],
    report_progress: Progress,
    *,
    is_made: bool,
) -> None:
    """Adds some statistics of all blocks, and writes z where no kernel made it. `is_made` says that
    kernels made others.
    """
    attention, request, heads = reduced.attention, reduced.request, reduced.heads
    batch, n_heads, n_queries, _ = attention.shape
    lacking = [row for row in of_torch if row.name not in IN_C]
    compiled = None
    # the compiled block adds to all of its sums, also to those that kernels made
    is_of_c = not is_made and no_block_because(attention, request) is None
    if isinstance(attention, ScoredAttention) and is_of_c:
        sums = reduced.statistics | {"lse": reduced.lse}
        compiled = CompiledHeads(attention, request, heads, sums)
    for queries, keys in blocks_of(attention, request):
        is_cpu = attention.like.device.type == "cpu"
        most = heads_at_once(len(queries) * len(keys), is_cpu=is_cpu)
        hidden = cache(partial(_hidden, attention, queries, keys))
        for b in range(batch):
            cells = Cells(attention, request, b, queries, keys)
            for some in head_groups(heads, n_heads // attention.n_kv_heads, most=most):
                place = (b, reduced.span(some), cells.rows)
                weights = None
                if compiled is not None:
                    weights = compiled.weights_of(BlockPlace(b, some, queries, keys), hidden)
                if weights is None:
                    block = _block_of_torch(cells, some, hidden(), reduced.lse[place])
                    _add(block, reduced, of_torch)
                else:
                    block = Block(cells, some, weights)
                    _add(block, reduced, lacking)
                if reduced.z is not None and attention.z is None:
                    _add_z(block, reduced.z[place])
                del block  # the next one takes its memory
        report_progress(f"query {queries.stop:,} of {n_queries:,}", queries.stop / n_queries)
    for b, profile in enumerate(reduced.statistics["profile"]):
        if ahead := request.axes.ahead(b):
            profile.copy_(profile.roll(ahead, dims=1))
    reduced.lse.masked_fill_(reduced.lse.isneginf(), 0.0).mul_(math.log(2))


def _no_sums(
    attention: Attention, request: StatisticsRequest, heads: range, made: PassResults
) -> Reduced:
    """The statistics of some heads before the first block, or those that kernels made."""
    batch, _, n_queries, n_keys = attention.shape
    exact = exact_dtype(attention.like.device)
    n_spans = 0 if request.q_spans is None else request.q_spans.shape[1]
    shapes: dict[str, tuple[int, ...]] = {
        "query": (n_queries,),
        "key": (n_keys,),
        "distance": (n_queries + n_keys - 1,),
        "map": (-(-n_queries // request.block), -(-n_keys // request.block)),
        "head": (),
        "condition": (len(request.matches),),
        "spans": (n_spans, n_spans),
    }
    statistics = made | {
        row.name: attention.like.new_zeros(
            (batch, len(heads), *shapes[row.per]),
            dtype=exact if row.per in ("head", "condition", "spans") else attention.dtype,
        )
        for row in BLOCK_STATISTICS
        if row.name not in made
    }
    lse = statistics.pop("lse", None)
    if lse is None:
        lse = attention.like.new_zeros((batch, len(heads), n_queries), dtype=exact)
    z = None if attention.z is None else of_some(attention.z, heads)
    if z is None and attention.v is not None:
        z = attention.v.new_empty(*lse.shape, attention.v.shape[3])
    return Reduced(attention, request, heads, statistics, lse, z)


def blocks_of(attention: Attention, request: StatisticsRequest) -> Iterator[tuple[range, range]]:
    """The blocks of queries, with the keys that they may see, from the beginning of a column of the
    map on.
    """
    _, _, n_queries, n_keys = attention.shape
    is_of_c = no_block_because(attention, request) is None
    rows = rows_of_block(n_keys, "c" if is_of_c else attention.like.device.type)
    for start in range(0, n_queries, rows):
        queries = range(start, min(start + rows, n_queries))
        seen = keys_seen(attention.allowed, queries, n_keys)
        yield queries, range(seen.start // request.block * request.block, seen.stop)


def _hidden(
    attention: Attention, queries: range, keys: range
) -> Bool[Tensor, "_batch _head query key"] | None:
    """The cells of a block that the mask hides; None where there is no mask, or weights show it."""
    if isinstance(attention, GivenAttention) or attention.allowed is None:
        return None
    return ~visible_in(attention, queries, keys)


def visible_in(
    attention: Attention, queries: range, keys: range
) -> Bool[Tensor, "_batch _head query key"]:
    """The cells of a block that the mask leaves."""
    cells = attention.visible(indices(queries, attention.like), indices(keys, attention.like))
    return cells.expand(-1, -1, len(queries), len(keys))


def _block_of_torch(
    cells: Cells, heads: range, hidden: Tensor | None, lse: Float[Tensor, "head query"]
) -> Block:
    """The weights of some heads by torch. The log-sum-exp of their queries goes to `lse`, to base
    2.
    """
    attention = cells.attention
    index = (cells.batch, slice(heads.start, heads.stop), cells.rows)
    if isinstance(attention, GivenAttention):
        weights = attention.weights[(*index, cells.columns)].to(attention.dtype)
        lse.copy_(attention.lse(*index) * LOG2_E)
        log2 = weights.log2().clamp_(min=HIDDEN)
        return Block(cells, heads, weights, log2, weights.new_zeros(weights.shape[:2]))
    shape = len(heads), len(cells.queries), len(cells.keys)
    log2 = attention.like.new_empty(shape, dtype=attention.dtype)
    sink = None
    if attention.sink_logits is not None:
        logits = attention.sink_logits.expand(attention.shape[:3])[index]
        sink = logits.unsqueeze(-1).to(log2.dtype) * LOG2_E
    place = BlockPlace(cells.batch, heads, cells.queries, cells.keys)
    reference = attention.masked_scores_into(log2, place, hidden=hidden, sink=sink)
    weights = torch.exp2(log2)
    of_keys = total = weights.sum(dim=-1, keepdim=True)
    if sink is not None:
        relative = sink if reference is None else sink - reference
        total = of_keys + torch.exp2(relative).to(of_keys.dtype)
    total = total.clamp(min=torch.finfo(total.dtype).tiny)  # of a query without keys
    weights.div_(total)
    lse.copy_(of_keys.to(lse.dtype).log2().squeeze(-1))
    if reference is not None:
        lse.add_(reference.squeeze(-1))
    return Block(cells, heads, weights, log2, total.log2().squeeze(-1))


def _add(block: Block, reduced: Reduced, rows: Sequence[BlockStatistic]) -> None:
    """Adds some statistics of a block."""
    cells, width = block.cells, block.request.block
    n_rows, n_keys = len(cells.queries), len(cells.keys)
    start = reduced.lse.shape[2] + cells.keys.start - cells.queries.start - n_rows
    row, column = cells.queries.start // width, cells.keys.start // width
    every = slice(None)
    places: dict[str, tuple[slice, ...]] = {
        "query": (every, cells.rows),
        "key": (every, cells.columns),
        "distance": (every, slice(start, start + n_rows + n_keys - 1)),
        "map": (
            every,
            slice(row, row - (-n_rows // width)),
            slice(column, column - (-n_keys // width)),
        ),
    }
    for statistic in rows:
        of_heads = reduced.statistics[statistic.name][cells.batch, reduced.span(block.heads)]
        sums = of_heads[places.get(statistic.per, ())]
        if statistic.per == "query":
            sums.copy_(statistic.of(block))
        else:
            sums.add_(statistic.of(block))


def _add_z(block: Block, z: Float[Tensor, "head query d_v"]) -> None:
    """Writes the product of the weights with the values."""
    cells, attention = block.cells, block.cells.attention
    assert attention.v is not None
    values = of_heads(attention.v, cells.batch, block.heads, attention.shape[1], cells.keys)
    values = values.to(block.weights.dtype)
    if not attention.has_finite_values:  # 0 · NaN is NaN, and a hidden key may hold anything
        values = values.masked_fill((block.weights == 0).all(dim=1).unsqueeze(-1), 0.0)
    if z.dtype == values.dtype:
        product(block.weights, values, z)
    else:
        z.copy_(block.weights @ values)


def is_compiled(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the compiled block is there, for scores of numbers of this dtype."""
    return (
        c_block() is not None
        and device.type == "cpu"
        and torch.promote_types(dtype, torch.float32) == torch.float32
    )


PADDED_APART = "texts of other lengths than their contexts are padded on the left"


def no_block_because(attention: Attention, request: StatisticsRequest) -> str | None:
    """Why the compiled block does not compute the statistics of an attention; None where it
    does.
    """
    if not isinstance(attention, ScoredAttention):
        return "the model computes its weights whole"
    sinks, device = attention.sink_logits, attention.q.device.type
    if c_block() is None:
        return "the compiled block was not built, or MHA_BLOCK=torch"
    if not is_compiled(attention.q.device, attention.dtype):
        dtype = dtype_name(attention.dtype)
        return f"the compiled block computes in float32 on a CPU, not in {dtype} on {device}"
    if any(map(request.axes.ahead, range(attention.shape[0]))):
        return PADDED_APART
    if sinks is not None and sinks.shape[2] != 1:
        return "every query has a sink logit of its own"
    return None


# -------------------------------------------------------------------------------- uniform attention


def copies_of(request: StatisticsRequest) -> tuple[tuple[str, Tensor, int], ...]:
    """The statistics of copies, the label of each key that has to be the query's token, and how far
    behind the query the key stands that does not count.
    """
    return ("duplicate", request.k_tokens, 0), ("induction", request.before_k, 1)


def of_first_keys(
    newest: int, request: StatisticsRequest, shape: tuple[int, int, int]
) -> PassResults:
    """The statistics of queries that see the keys up to `query + newest`, of which each gets
    `weight`.
    """
    (batch, n_queries, n_keys), device = shape, request.first.device
    i = torch.arange(n_queries, device=device)
    n_seen = (i + newest + 1).clamp(0, n_keys)
    weight = torch.where(n_seen > 0, 1 / n_seen.double(), 0.0)

    def counted(marks: Tensor) -> Tensor:
        """How many marked keys each query sees."""
        n_before: Tensor = pad(marks.double().cumsum(dim=-1), (1, 0))
        return n_before[..., n_seen]

    def before(numbers: Tensor) -> Tensor:
        """The sum of the numbers of earlier queries."""
        return pad(numbers.cumsum(dim=0), (1, 0))

    # A query sees as many keys before an edge of the map's columns as both allow: all that it sees,
    # up to the query `enough`.
    edges = torch.arange(0, n_keys + request.block, request.block, device=device).clamp(max=n_keys)
    rows = torch.arange(0, n_queries + request.block, request.block, device=device).clamp(
        max=n_queries
    )[:, None]
    enough = torch.maximum(torch.minimum(edges - newest, rows[1:]), rows[:-1])
    mass_before, seen_before = before(weight), before((n_seen > 0).double())
    keys_before = (
        seen_before[enough]
        - seen_before[rows[:-1]]
        + edges * (mass_before[rows[1:]] - mass_before[enough])
    )

    behind = n_seen - 1 - i
    distances = torch.arange(1 - n_queries, n_keys, device=device)
    profile = (
        mass_before[(n_keys - distances).clamp(0, n_queries)]
        - mass_before[(-distances).clamp(0, n_queries)]
    )
    of_last = weight.new_zeros(n_keys + 1).index_add_(0, n_seen, weight)
    for_all = {
        "visible": n_seen.double(),
        "mass": (n_seen > 0).double(),
        "entropy": n_seen.clamp(min=1).double().log(),
        "squares": weight,
        "distance": weight * (i * (i + 1) + behind.sign() * behind * (behind + 1)) / 2,
        "received": of_last.flip(0).cumsum(dim=0).flip(0)[1:],
        "map": keys_before.diff(dim=1),
        "profile": torch.where(distances <= newest, profile, 0.0),
    }
    statistics = {name: numbers.expand(batch, *numbers.shape) for name, numbers in for_all.items()}
    statistics |= {
        "first": weight * counted(request.first),
        "leading": weight * counted(request.leading),
    }
    for name, labels, shift in copies_of(request):
        texts = zip(request.q_tokens, labels, strict=True)
        equal = [_equal(*text, n_seen, shift if request.axes.is_self else None) for text in texts]
        counts = torch.stack(equal)
        statistics[name] = counts.double() @ weight
        statistics[f"n_{name}_queries"] = (counts > 0).sum(dim=-1)
    statistics |= {"matched": weight.new_zeros(batch, 0), "between": weight.new_zeros(batch, 0, 0)}
    if request.q_spans is not None and request.k_spans is not None:
        statistics["between"] = request.q_spans.double() @ (weight * counted(request.k_spans)).mT
    return statistics


def _equal(tokens: QueryIdx, labels: KeyIdx, n_seen: Tensor, shift: int | None) -> QueryIdx:
    """How many of the keys that a query sees have its token for a label, except the key at `query +
    shift`.
    """
    n_keys = len(labels)
    codes = (labels * n_keys + torch.arange(n_keys, device=labels.device)).sort().values
    codes_of_queries = torch.where(tokens < 0, -2, tokens) * n_keys
    before_last = torch.searchsorted(codes, codes_of_queries + n_seen)
    counts = before_last - torch.searchsorted(codes, codes_of_queries)
    if shift is not None:
        key = torch.arange(len(tokens), device=tokens.device) + shift
        is_same = (labels[key.clamp(max=n_keys - 1)] == tokens) & (tokens >= 0)
        counts = counts - ((key < n_seen) & is_same).long()
    return counts
