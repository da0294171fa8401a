"""What a record holds of each head: means, extremes and its type, from the sums of a pass, beside those of uniform attention.
The table of all statistics is `mhacli.record.heads.STATISTICS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mhacli.attention.conditions import Matches, matcher
from mhacli.attention.scores import own_cells
from mhacli.attention.statistics import PerQuery, Reduced, Statistics, StatisticsRequest
from mhacli.attention.uniform import Baseline
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
from mhacli.settings import SINK_SHARE, SINK_TOKENS, PaddingSide
from mhacli.text.conditions import Condition
from mhacli.text.tokens import TokenSequence

MAP_CELLS = 192
"""Cells of a map along its longer side, at most."""
_NOTHING = 1e-6
"""Weight that may be rounding."""
_PER_QUERY = ("entropy", "squares", "distance", "first", "leading")
_WINDOWS = {"window_50": 0.5, "window_90": 0.9, "window_99": 0.99}


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


def block_of(longest: int) -> int:
    """How many queries and keys make a cell of a map: the least power of two that leaves at most `MAP_CELLS`."""
    return 1 << (-(-longest // MAP_CELLS) - 1).bit_length()


def make_statistics_request(
    axes: Axes, patterns: Sequence[Condition] = (), *, sink_tokens: int = SINK_TOKENS, spans: Sequence[SpanTokens] = ()
) -> StatisticsRequest:
    """The request for the statistics of heads over these tokens.

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


# ------------------------------------------------------------------------------------------------------------ each head


def head_statistics(
    reduced: Reduced,
    *,
    top_score: Float[Tensor, "batch head query"],
    baseline: Baseline,
    axes: Axes,
    sink_share: float = SINK_SHARE,
) -> tuple[HeadStatistics, ...]:
    """What a record holds of each head that was reduced, its type among it. The `baseline` is that of these heads, `top_score`
    the largest score of each query."""
    statistics, sink_mass, zero = with_sink(reduced), reduced.sink_mass, axes.q_len - 1
    offsets = _offsets(statistics, baseline.statistics, zero)
    outcomes = baseline.visible if sink_mass is None else baseline.visible + (baseline.visible > 0)
    own = _averages(statistics, outcomes, zero, offsets)
    uniformly = _averages(baseline.statistics, baseline.visible, zero, offsets)
    found = []
    for index, head in enumerate(reduced.heads):
        score, where = _top(reduced, top_score, index)
        learned = None if sink_mass is None else sink_mass[:, index].double()[reduced.has_keys[:, index]].mean().item()
        of_head = HeadStatistics(
            head=head,
            **asdict(own[index]) | {"learned_sink": None if learned is None else finite(learned)},
            max_score=score,
            max_score_at=None if where is None else _own_place(where, axes),
            sinks=_sinks(reduced, baseline, index, sink_share, axes),
            largest=_largest(reduced, baseline, index, axes),
            uniform=uniformly[index],
        )
        found.append(with_kind(of_head))
    return tuple(found)


def with_sink(reduced: Reduced) -> Statistics:
    """The statistics, in which a sink logit is one more outcome of entropy and squares, and the distance the mean over what keys
    get. Source: Xiao et al. 2023; the sink logits of gpt-oss."""
    statistics, sink_mass = reduced.statistics, reduced.sink_mass
    if sink_mass is None:
        return statistics
    own = sink_mass.to(statistics["mass"].dtype)
    return statistics | {
        "entropy": statistics["entropy"] + torch.special.entr(own),
        "squares": statistics["squares"] + own.square(),
        "distance": statistics["distance"] / torch.where(statistics["mass"] > 0, statistics["mass"], 1.0),
    }


def _offsets(own: Statistics, uniformly: Statistics, zero: int) -> Int[Tensor, " head"]:
    """For each head the signed distance with the most mass beyond uniform attention, neither 0 nor −1, as an index; −1 where
    none has more."""
    excess = own["profile"].double().sum(dim=0) - uniformly["profile"].double().sum(dim=0)
    excess[:, max(0, zero - 1) : zero + 1] = 0.0
    most, offsets = excess.max(dim=1)
    return torch.where(most > _NOTHING, offsets, -1)


def _averages(sums: Statistics, visible: Tensor, zero: int, offsets: Int[Tensor, " head"]) -> list[Averages]:
    """The means of every head, in float64. Where one head stands for all, there is one for each of the `offsets`."""
    n_heads = len(offsets)
    seen = (sums["mass"] > 0).expand(-1, n_heads, -1)
    n = seen.sum(dim=(0, 2)).double()
    wide = {name: sums[name].double().expand(-1, n_heads, -1) for name in _PER_QUERY}
    profile = sums["profile"].double().sum(dim=0).expand(n_heads, -1)
    folded, entropy = distances_folded(profile, zero), wide["entropy"]
    at_offset = profile.gather(1, offsets.clamp(min=0)[:, None]).squeeze(1) / n
    rows = {
        "entropy": _mean(entropy, seen),
        "entropy_share": _mean(_entropy_share(entropy, visible), seen & (visible > 1)),
        "effective_keys": _mean(entropy.exp(), seen),
        "participation": _mean(torch.where(seen, 1 / wide["squares"], 0.0), seen),
        "distance": _mean(wide["distance"], seen),
        "sink": _mean(wide["first"], seen),
        "leading": _mean(wide["leading"], seen),
        "diagonal": profile[:, zero] / n,
        "previous": (profile[:, zero - 1] if zero else torch.zeros_like(n)) / n,
        "near": folded[:, : NEAR + 1].sum(dim=1) / n,
        "at_offset": torch.where(offsets < 0, torch.nan, at_offset),
    }
    rows |= {name: sums[name].sum(dim=0).expand(n_heads) / n for name in ("duplicate", "induction")}
    matched = sums["matched"].sum(dim=0).expand(n_heads, -1) / n[:, None]
    numbers = {name: row.tolist() for name, row in rows.items()}
    windows = {name: _window_of(folded, weight).tolist() for name, weight in _WINDOWS.items()}
    is_known = (n > 0) & folded.isfinite().all(dim=1)
    return [
        Averages(
            **{name: finite(row[head]) for name, row in numbers.items()},  # type: ignore[arg-type]
            **{name: row[head] if is_known[head] else None for name, row in windows.items()},
            offset=None if offsets[head] < 0 else int(offsets[head]) - zero,
            patterns=tuple(map(finite, matched[head].tolist())),
        )
        for head in range(n_heads)
    ]


def _entropy_share(entropy: PerQuery, visible: Shaped[Tensor, "#batch #head query"]) -> PerQuery:
    """Entropy divided by its largest possible value, `ln(visible keys)`: 1 is uniform. Rows with one key or none: 0."""
    return torch.where(visible > 1, entropy / visible.double().log(), 0.0)


def _mean(per_query: PerQuery, queries: Bool[Tensor, "#batch #head query"]) -> Float[Tensor, " head"]:
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


def _window_of(folded: Float[Tensor, "head absolute"], weight: float) -> Int[Tensor, " head"]:
    """The least distance within which at least `weight` of the mass lies; rounding of a millionth is forgiven."""
    within = folded.cumsum(dim=1)
    return torch.searchsorted(within, (weight - 1e-6) * within[:, -1:]).squeeze(1)


def _top(reduced: Reduced, top_score: Tensor, index: int) -> tuple[float | None, tuple[int, int, int] | None]:
    """The largest score of a head, and its sequence, query and key, counted with padding."""
    scores = top_score[:, index]
    batch, query = divmod(int(scores.nan_to_num(nan=-torch.inf).argmax()), scores.shape[1])
    score = finite(scores[batch, query].item())
    if score is None:
        return None, None
    row = reduced.weights_of(batch, index, torch.tensor([query], device=scores.device), reduced.keys)
    return score, (batch, query, int(row.argmax()))


def _own_place(place: tuple[int, int, int], axes: Axes) -> tuple[int, int, int]:
    """A place counted from the first token of its own text."""
    batch, query, key = place
    return batch, query - axes.first_query(batch), key - axes.first_key(batch)


def _sinks(reduced: Reduced, baseline: Baseline, index: int, least: float, axes: Axes) -> tuple[Sink, ...]:
    """The sinks that get the `least` share of all attention of their sequence, the strongest first.

    Few keys get so much that their columns are computed again, to count the queries that attend to them.
    """
    sinks = []
    uniform_received = baseline.statistics["received"][:, min(index, baseline.visible.shape[1] - 1)]
    for batch, received in enumerate(reduced.statistics["received"][:, index]):
        total = received.sum().item()
        for key in received.topk(min(MAX_SINKS, len(received))).indices.tolist() if total else ():
            share, uniform_share = received[key].item() / total, uniform_received[batch, key].item() / total
            sink = Sink(batch, key - axes.first_key(batch), share, uniform_share)
            if is_sink(sink, least):
                often, n_queries = _attending(reduced, baseline, (batch, index), key)
                sink = replace(sink, often=often, n_queries=n_queries)
                sinks += [sink] if is_sink(sink, least) else []
    return tuple(sorted(sinks, key=lambda sink: -sink.share)[:MAX_SINKS])


def _attending(reduced: Reduced, baseline: Baseline, place: tuple[int, int], key: int) -> tuple[float, int]:
    """The fraction of the queries that see a key which give it at least `SINK_LIFT` times their uniform weight, and the number
    of queries that see it."""
    batch, index = place
    queries, column = reduced.queries, torch.tensor([key], device=reduced.lse.device)
    weights = reduced.weights_of(batch, index, queries, column).squeeze(1)
    cells = reduced.attention.visible(queries, column)
    sees = own_cells(cells, batch, reduced.heads[index]).expand(len(queries), 1).squeeze(1)
    n_queries = int(sees.sum())
    visible = own_cells(baseline.visible, batch, index)
    return int((sees & (weights * visible >= SINK_LIFT)).sum()) / max(1, n_queries), n_queries


def _largest(reduced: Reduced, baseline: Baseline, index: int, axes: Axes) -> tuple[StrongCell, ...]:
    """The cells with the greatest weight relative to their query's uniform row.

    The best of all cells stand in the rows whose own best is best: only those rows are computed again.
    """
    visible = baseline.visible[:, min(index, baseline.visible.shape[1] - 1)]
    peak = reduced.statistics["peak"][:, index].exp()
    lift = torch.where(visible > 1, peak * visible, 0.0).nan_to_num(nan=0.0)
    best = [
        divmod(place, lift.shape[1]) for place in lift.flatten().topk(min(MAX_LARGEST, lift.numel())).indices.tolist()
    ]
    rows: dict[tuple[int, int], list[list[float]]] = {}
    for batch in dict.fromkeys(batch for batch, _ in best):
        queries = [query for other, query in best if other == batch]
        of_queries = reduced.weights_of(batch, index, torch.tensor(queries, device=lift.device), reduced.keys)
        weights, keys = of_queries.topk(min(MAX_LARGEST, of_queries.shape[1]))
        rows |= {(batch, query): row for query, *row in zip(queries, weights.tolist(), keys.tolist(), strict=True)}
    cells = []
    for batch, query in best:
        n_keys = visible[batch, query].item()
        for weight, key in zip(*rows[batch, query], strict=True) if n_keys > 1 else ():
            _, own_query, own_key = _own_place((batch, query, key), axes)
            cells.append(StrongCell(batch, own_query, own_key, weight, weight * n_keys))
    return tuple(sorted((cell for cell in cells if cell.share > 0), key=lambda cell: -cell.lift)[:MAX_LARGEST])
