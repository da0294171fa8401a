"""Makes the `HeadStatistics` of a record from the sums of a pass over the tiles: means, extremes, and the same for uniform
attention. The table of all statistics is `mhacli.record.heads.STATISTICS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mhacli.attention.core import visible_cells
from mhacli.attention.tiled.conditions import Matches, matcher
from mhacli.attention.tiled.reducer import summarise_by
from mhacli.attention.tiled.scores import uniform
from mhacli.attention.tiled.statistics import (
    Statistics,
    StatisticsRequest,
    distances_folded,
    entropy_share,
    mean_over,
    weights_of,
    window_of,
)
from mhacli.attention.tiled.tiles import Grid, PatternTiles, indices, visible_keys
from mhacli.io.data import finite
from mhacli.record.heads import (
    MAX_LARGEST,
    MAX_SINKS,
    NEAR,
    SINK_LIFT,
    Averages,
    HeadStatistics,
    Sink,
    StrongCell,
    is_sink,
    with_kind,
)
from mhacli.record.record import SpanTokens
from mhacli.settings import SINK_SHARE, SINK_TOKENS, PaddingSide, Reducer
from mhacli.text.conditions import Condition
from mhacli.text.tokens import TokenSequence

MAP_CELLS = 192
"""Cells of a map along its longer side, at most."""


@dataclass(frozen=True)
class Baseline:
    """Uniform attention over the visible keys: how many each query sees, and its statistics. Head axes of 1 hold for all."""

    visible: Float[Tensor, "batch _head query"]
    statistics: Statistics

    def of_heads(self, heads: range) -> Baseline:
        """The baseline of some heads."""
        if self.visible.shape[1] == 1:
            return self
        span = slice(heads.start, heads.stop)
        return Baseline(self.visible[:, span], self.statistics.of_heads(span))


def block_of(longest: int) -> int:
    """How many queries and keys make a cell of a map: the least power of two that leaves at most `MAP_CELLS`."""
    return 1 << (-(-longest // MAP_CELLS) - 1).bit_length()


def make_statistics_request(
    axes: Axes, patterns: Sequence[Condition] = (), *, sink_tokens: int = SINK_TOKENS, spans: Sequence[SpanTokens] = ()
) -> StatisticsRequest:
    """The request for the statistics of the heads of these tokens.

    Patterns count places from the beginning of a text, through its documents. `spans` are the tokens of named parts, which are
    parts of the queries' texts and of the keys'.
    """
    places = axes.on_keys([text.places for text in axes.keys], -1)
    k_tokens = axes.on_keys([text.ids for text in axes.keys], -1)
    return StatisticsRequest(
        block=block_of(max(axes.q_len, axes.k_len)),
        q_tokens=axes.on_queries([text.ids for text in axes.queries], -1),
        k_tokens=k_tokens,
        before_k=torch.where(places > 0, k_tokens.roll(1, dims=1), -1),
        first=places == 0,
        leading=(places >= 0) & (places < sink_tokens),
        is_self=axes.is_self,
        matches=tuple(_matches(pattern, axes) for pattern in patterns),
        q_spans=_marked(spans, [len(t.ids) for t in axes.queries], axes.on_queries) if spans else None,
        k_spans=_marked(spans, [len(t.ids) for t in axes.keys], axes.on_keys) if spans else None,
    )


def _marked(
    spans: Sequence[SpanTokens], lengths: Sequence[int], placed: Callable[[list[list[int]], int], Tensor]
) -> Bool[Tensor, "batch span idx"]:
    """Which columns belong to each span."""
    rows = []
    for span in spans:
        own = [set(tokens) for tokens in span.tokens]
        rows.append(placed([[int(i in of) for i in range(n)] for of, n in zip(own, lengths, strict=True)], 0) > 0)
    return torch.stack(rows, dim=1)


def _matches(pattern: Condition, axes: Axes) -> tuple[Matches, ...]:
    """The pattern as a predicate of columns, for each sequence: places are counted from the first token of its text."""

    def of_sequence(b: int, queries: TokenSequence, keys: TokenSequence) -> Matches:
        q_tokens, k_tokens = (torch.tensor(s.ids, dtype=torch.int32, device=axes.device) for s in (queries, keys))
        return matcher(pattern, q_tokens, k_tokens, axes.id_of, first=(axes.first_query(b), axes.first_key(b)))

    pairs = zip(axes.queries, axes.keys, strict=True)
    return tuple(of_sequence(b, *pair) for b, pair in enumerate(pairs))


def make_baseline(pattern: Grid, statistics_request: StatisticsRequest, reducer: Reducer = "torch") -> Baseline:
    """The same statistics of uniform attention over the same visible keys."""
    visible = visible_keys(pattern)
    visible = visible.expand(pattern.shape[0], -1, -1)
    weights = uniform(visible, pattern.shape[3], pattern.allowed)
    return Baseline(visible, summarise_by(reducer, weights, statistics_request))


def head_statistics(
    pattern: PatternTiles,
    statistics: Statistics,
    *,
    heads: range,
    top_score: Float[Tensor, "batch head query"],
    baseline: Baseline,
    axes: Axes,
    sink_mass: Float[Tensor, "batch head query"] | None = None,
    sink_share: float = SINK_SHARE,
) -> tuple[HeadStatistics, ...]:
    """What a record holds of each of the heads, its type among it.

    The `baseline` is that of these heads, `top_score` the largest score of each query, and `sink_mass` the weight that a
    sink logit takes of it, where there is one.
    """
    zero = axes.q_len - 1
    offsets = _offsets(statistics, baseline.statistics, zero)
    outcomes = baseline.visible if sink_mass is None else baseline.visible + (baseline.visible > 0)
    own = _averages(statistics, outcomes, zero, offsets)
    uniformly = _averages(baseline.statistics, baseline.visible, zero, offsets)
    said = []
    for index, head in enumerate(heads):
        score, where = _top(pattern, top_score, index)
        of_head = HeadStatistics(
            head=head,
            **vars(own[index]) | {"learned_sink": _learned_sink(sink_mass, statistics, index)},
            max_score=score,
            max_score_at=None if where is None else _own_place(where, axes),
            sinks=_sinks(pattern, statistics, baseline, index, sink_share, axes),
            largest=_largest(pattern, statistics, baseline, index, axes),
            uniform=uniformly[index],
        )
        said.append(with_kind(of_head))
    return tuple(said)


def _learned_sink(sink_mass: Tensor | None, statistics: Statistics, index: int) -> float | None:
    """The mean weight of a sink logit, over the queries that see a key."""
    if sink_mass is None:
        return None
    return finite(sink_mass[:, index].double()[has_keys(statistics)[:, index]].mean().item())


def has_keys(statistics: Statistics) -> Bool[Tensor, "batch head query"]:
    """Which queries see a key at all: the weights of the others are all 0."""
    return statistics.mass > 0


def _offsets(own: Statistics, uniformly: Statistics, zero: int) -> Int[Tensor, " head"]:
    """For each head the signed distance with the most mass beyond uniform attention, neither 0 nor −1, as an index; −1 where
    none has more."""
    excess = own.profile.double().sum(dim=0) - uniformly.profile.double().sum(dim=0)
    excess[:, max(0, zero - 1) : zero + 1] = 0.0
    most, offsets = excess.max(dim=1)
    return torch.where(most > _NOTHING, offsets, -1)


_NOTHING = 1e-6
"""Mass that may be rounding."""


def _averages(sums: Statistics, visible: Tensor, zero: int, offsets: Int[Tensor, " head"]) -> list[Averages]:
    """The means of every head, in float64. Where one head stands for all, there is one for each of the `offsets`."""
    seen = has_keys(sums).expand(-1, len(offsets), -1)
    n = seen.sum(dim=(0, 2)).double()
    wide = {name: getattr(sums, name).double().expand(-1, len(offsets), -1) for name in _PER_QUERY}
    profile = sums.profile.double().sum(dim=0).expand(len(offsets), -1)
    folded = distances_folded(profile, zero)
    entropy = wide["entropy"]
    rows = {
        "entropy": mean_over(entropy, seen),
        "entropy_share": mean_over(entropy_share(entropy, visible), seen & (visible > 1)),
        "effective_keys": mean_over(entropy.exp(), seen),
        "participation": mean_over(torch.where(seen, 1 / wide["squares"], 0.0), seen),
        "distance": mean_over(wide["distance"], seen),
        "sink": mean_over(wide["first"], seen),
        "leading": mean_over(wide["leading"], seen),
        "diagonal": profile[:, zero] / n,
        "previous": (profile[:, zero - 1] if zero else torch.zeros_like(n)) / n,
        "near": folded[:, : NEAR + 1].sum(dim=1) / n,
        "at_offset": torch.where(
            offsets < 0, torch.nan, profile.gather(1, offsets.clamp(min=0)[:, None]).squeeze(1) / n
        ),
    }
    rows |= {name: getattr(sums, name).sum(dim=0).expand(len(offsets)) / n for name in ("duplicate", "induction")}
    matched = sums.matched.sum(dim=0).expand(len(offsets), -1) / n[:, None]
    numbers = {name: row.tolist() for name, row in rows.items()}
    windows = {name: window_of(folded, share).tolist() for name, share in _WINDOWS.items()}
    is_known = (n > 0) & folded.isfinite().all(dim=1)
    return [
        Averages(
            **{name: finite(row[head]) for name, row in numbers.items()},  # type: ignore[arg-type]
            **{name: row[head] if is_known[head] else None for name, row in windows.items()},
            offset=None if offsets[head] < 0 else int(offsets[head]) - zero,
            patterns=tuple(map(finite, matched[head].tolist())),
        )
        for head in range(len(offsets))
    ]


_PER_QUERY = ("entropy", "squares", "distance", "first", "leading")
_WINDOWS = {"window_50": 0.5, "window_90": 0.9, "window_99": 0.99}


def _top(pattern: PatternTiles, top_score: Tensor, index: int) -> tuple[float | None, tuple[int, int, int] | None]:
    """The largest score of a head, and its sequence, query and key, counted with padding."""
    scores = top_score[:, index]
    place = int(scores.nan_to_num(nan=-torch.inf).argmax())
    batch, query = divmod(place, scores.shape[1])
    row = weights_of(pattern, (batch, index), range(query, query + 1), range(pattern.shape[3]))
    score = finite(scores[batch, query].item())
    return score, None if score is None else (batch, query, int(row.argmax()))


def _own_place(place: tuple[int, int, int], axes: Axes) -> tuple[int, int, int]:
    """A place counted from the first token of its own text."""
    batch, query, key = place
    return batch, query - axes.first_query(batch), key - axes.first_key(batch)


def _sinks(
    pattern: PatternTiles, statistics: Statistics, baseline: Baseline, index: int, least: float, axes: Axes
) -> tuple[Sink, ...]:
    """The sinks that get the `least` share of all attention of their sequence, the strongest first.

    Few keys get so much that their columns are computed again, to count the queries that attend to them.
    """
    sinks = []
    uniform_received = baseline.statistics.received[:, min(index, baseline.statistics.received.shape[1] - 1)]
    for batch, received in enumerate(statistics.received[:, index]):
        total = received.sum().item()
        for key in received.topk(min(MAX_SINKS, len(received))).indices.tolist() if total else ():
            share, uniform_share = received[key].item() / total, uniform_received[batch, key].item() / total
            sink = Sink(batch, key - axes.first_key(batch), share, uniform_share)
            if is_sink(sink, least):
                often, n_queries = _attending(pattern, baseline, (batch, index), key)
                sink = replace(sink, often=often, n_queries=n_queries)
                sinks += [sink] if is_sink(sink, least) else []
    return tuple(sorted(sinks, key=lambda sink: -sink.share)[:MAX_SINKS])


def _attending(pattern: PatternTiles, baseline: Baseline, batch_head: tuple[int, int], key: int) -> tuple[float, int]:
    """The fraction of the queries that see a key which give it at least `SINK_LIFT` times their uniform weight, and the number
    of queries that see it."""
    (batch, head), n = batch_head, pattern.shape[2]
    weights = weights_of(pattern, batch_head, range(n), range(key, key + 1)).squeeze(1)
    q_idx, k_idx = indices(range(n), weights), indices(range(key, key + 1), weights)
    keep = visible_cells(pattern.allowed, q_idx, k_idx)
    sees = weights.new_ones(n, dtype=torch.bool)
    if keep is not None:
        sees = keep[min(batch, len(keep) - 1), min(head, keep.shape[1] - 1)].expand(n, 1).squeeze(1)
    visible = baseline.visible[batch, min(head, baseline.visible.shape[1] - 1)]
    n_queries = int(sees.sum())
    return int((sees & (weights * visible >= SINK_LIFT)).sum()) / max(1, n_queries), n_queries


def _largest(
    pattern: PatternTiles, statistics: Statistics, baseline: Baseline, index: int, axes: Axes
) -> tuple[StrongCell, ...]:
    """The cells with the greatest share relative to their query's uniform row.

    The best of all cells stand in the rows whose own best is best: only those rows are computed again.
    """
    visible = baseline.visible[:, min(index, baseline.visible.shape[1] - 1)]
    lift = torch.where(visible > 1, statistics.peak[:, index].exp() * visible, 0.0).nan_to_num(nan=0.0)
    best = lift.flatten().topk(min(MAX_LARGEST, lift.numel())).indices
    places = [divmod(place, lift.shape[1]) for place in best.tolist()]
    rows = pattern.of_queries(best % lift.shape[1])
    of_all = (range(len(places)), range(pattern.shape[3]))
    tops = {
        batch: weights_of(rows, (batch, index), *of_all).topk(min(MAX_LARGEST, pattern.shape[3]))
        for batch in {batch for batch, _ in places}
    }
    cells = []
    for row, (batch, query) in enumerate(places):
        n_keys = visible[batch, query].item()
        if n_keys <= 1:
            continue
        weights, keys = tops[batch]
        for share, key in zip(weights[row].tolist(), keys[row].tolist(), strict=True):
            _, own_query, own_key = _own_place((batch, query, key), axes)
            cells.append(StrongCell(batch, own_query, own_key, share, share * n_keys))
    return tuple(sorted((cell for cell in cells if cell.share > 0), key=lambda cell: -cell.lift)[:MAX_LARGEST])


# ----------------------------------------------------------------------------------------------- the tokens on the axes


@dataclass(frozen=True)
class Axes:
    """The texts on the query axis, of length `q_len`, and on the key axis, with padding on a `side` of the shorter ones.

    `is_self` where both are the same tokens; `id_of` gives the id of a word, or a number below 0; `dtype` is that of the
    computation, which says how far two ways of doing it may be apart.
    """

    queries: tuple[TokenSequence, ...]
    keys: tuple[TokenSequence, ...]
    q_len: int
    k_len: int
    side: PaddingSide
    is_self: bool
    id_of: Callable[[str], int]
    dtype: str
    device: torch.device

    def first_query(self, sequence: int) -> int:
        """The column in which a sequence's queries begin."""
        return self._first(len(self.queries[sequence].ids), self.q_len)

    def first_key(self, sequence: int) -> int:
        """The column in which its keys begin."""
        return self._first(len(self.keys[sequence].ids), self.k_len)

    def on_queries(self, rows: Sequence[Sequence[int]], fill: int) -> Int[Tensor, "batch query"]:
        """A number for every query of every text, and `fill` for padding."""
        return self._filled(rows, fill, self.q_len)

    def on_keys(self, rows: Sequence[Sequence[int]], fill: int) -> Int[Tensor, "batch key"]:
        """The same for the keys."""
        return self._filled(rows, fill, self.k_len)

    def real_queries(self) -> Bool[Tensor, "batch query"]:
        """Which columns of the query axis hold a token."""
        return self.on_queries([[1] * len(text.ids) for text in self.queries], 0) > 0

    def _first(self, n_tokens: int, length: int) -> int:
        return length - n_tokens if self.side == "left" else 0

    def _filled(self, rows: Sequence[Sequence[int]], fill: int, length: int) -> Int[Tensor, "batch length"]:
        full = []
        for row in rows:
            first = self._first(len(row), length)
            full.append([fill] * first + list(row) + [fill] * (length - len(row) - first))
        return torch.tensor(full, dtype=torch.int64, device=self.device)
