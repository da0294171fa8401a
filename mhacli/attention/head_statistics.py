"""What a record holds of heads, from the sums of a pass: means, extremes and a type, beside those
of uniform attention; arrays; and the checks that all of them are right. The table of all statistics
is `mhacli.record.heads.STATISTICS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import cache, partial
from math import prod
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mhacli.io.data import finite
from mhacli.io.long_work import Progress, no_progress
from mhacli.record.checks import HEAD_OUTPUTS, ROW_SUMS, TOLERANCES, Check, growth, worst_check
from mhacli.record.heads import (
    COPY_TYPES,
    HEAD_TYPES,
    MAX_LARGEST,
    MAX_SINKS,
    NEAR,
    SINK_LIFT,
    Averages,
    HeadsSummary,
    HeadStatistics,
    Kept,
    Kind,
    Sink,
    StrongCell,
    is_sink,
    where_possible,
    with_kind,
)
from mhacli.run import Run
from mhacli.settings import SINK_SHARE

from .axes import Axes, StatisticsRequest
from .core import dtype_name
from .devices import one_thread, shared_out
from .scores import BLOCKS, Attention, ScoredAttention, plane_of
from .statistics import (
    PassResults,
    PerQuery,
    Reduced,
    head_groups,
    reduce_heads,
    reducer_of,
)
from .taps import not_finite

_NOTHING = 1e-6
"""Weight that may be rounding."""
_PER_QUERY = ("entropy", "squares", "distance", "first", "leading")
_COPIES = ("duplicate", "induction")
_SAME = 0.9
"""The fraction of the weights of a type that one distance has to explain."""
_ELSEWHERE = 1.5
"""A head keeps a distance elsewhere too if it has so many times the weight that copies allow."""
_WINDOWS = {"window_50": 0.5, "window_90": 0.9, "window_99": 0.99}
CHECKED_WHOLE = 128
"""Up to so many queries z is computed again from the weights of all of them."""
CHECKED_ROWS = 16
"""Of more queries, so many are checked, which are evenly spread."""
_INDISTINCT_SCORE = 1e4
"""A score from which on others may not be distinguished from it."""
_ROUNDED_SCORE = 64.0
"""A score whose rounding in a kernel's float32 shows in z."""
_MAX_SUM_TOLERANCE = 1e-2
"""The largest tolerance of a row's sum: beyond it a row is no row of weights."""
SMALL_CELLS = 1 << 18
"""Queries × keys up to which one thread is as quick as several."""
_MAX_EXPONENT = 300.0
"""An exponent beyond which nothing is known of a weight; e to its power is still a number."""


# ---------------------------------------------------------------------------------------- each head


def head_statistics(
    reduced: Reduced,
    *,
    baseline: PassResults,
    sink_share: float = SINK_SHARE,
    check_z: CheckOfZ | None = None,
) -> tuple[HeadStatistics, ...]:
    """What a record holds of each head that was reduced, its type among it. The `baseline` is that
    of these heads. The rows of weights that are computed again for it are checked by `check_z`.
    """
    axes = reduced.request.axes
    statistics, sink_mass = with_sink(reduced), reduced.sink_mass
    zero = axes.queries.length - 1
    profile = statistics["profile"].double().sum(dim=0)
    excess = profile - baseline["profile"].double().sum(dim=0)  # at each signed distance
    excess[:, max(0, zero - 1) : zero + 1] = 0.0  # that of neither 0 nor −1 counts
    most, offsets = excess.max(dim=1)
    offsets = torch.where(most > _NOTHING, offsets, -1)
    outcomes = baseline["visible"]
    if sink_mass is not None:
        outcomes = outcomes + (outcomes > 0)
    n_copies = {name: baseline[f"n_{name}_queries"].sum(dim=0).double() for name in _COPIES}
    of_heads = _averages(statistics, outcomes, n_copies, zero, offsets)
    uniformly = _averages(baseline, baseline["visible"], n_copies, zero, offsets)
    n_cells = cache(partial(_n_copy_cells, reduced.request))
    heads = []
    for index, head in enumerate(reduced.heads):
        top_scores = reduced.top_score[:, index]
        top = divmod(int(top_scores.nan_to_num(nan=-torch.inf).argmax()), top_scores.shape[1])
        score = finite(top_scores[top].item())
        visible = baseline["visible"][:, min(index, baseline["visible"].shape[1] - 1)]
        # the best of all cells relative to uniform stand in the rows with the best cells
        peak = statistics["peak"][:, index].exp()
        lift = torch.where(visible > 1, peak * visible, 0.0).nan_to_num(nan=0.0)
        best = lift.flatten().topk(min(MAX_LARGEST, int(lift.count_nonzero()))).indices.tolist()
        lifted = [divmod(place, lift.shape[1]) for place in best]
        rows = _rows_again(reduced, index, [*lifted, top], check_z)
        averages = of_heads[index]
        if sink_mass is not None:
            learned = sink_mass[:, index].double()[reduced.has_keys[:, index]].mean().item()
            averages = replace(averages, learned_sink=finite(learned))
        of_head = HeadStatistics(
            head=head,
            **asdict(averages),
            max_score=score,
            max_score_at=None if score is None else _cell(axes, top, int(rows[top].argmax())),
            sinks=_sinks(reduced, baseline, index, sink_share),
            largest=_largest({place: rows[place] for place in lifted}, visible, axes),
            uniform=uniformly[index],
        )
        n_queries = int(reduced.has_keys[:, index].sum())
        heads.append(_with_kind(of_head, n_queries, n_cells))
    return tuple(heads)


def _with_kind(
    head: HeadStatistics, n_queries: int, n_cells: Callable[[Kind, int], int]
) -> HeadStatistics:
    """The head with its type. `n_cells` counts the cells of a type at a distance. Where they can
    hold the weights of the type, and the head has as much at the distance, the one explains the
    other. If it has much more there, it keeps the distance also elsewhere. Distances 0 and −1 have
    types of their own.
    """
    positional, repeated = set[Kind](), set[Kind]()
    for kind in COPY_TYPES:
        total = n_queries * (getattr(head, HEAD_TYPES[kind]) or 0.0)
        distances = ((0, head.diagonal), (-1, head.previous), (head.offset, head.at_offset))
        for distance, mean in distances:
            if distance is None or not mean or not total:
                continue
            weight, n = n_queries * mean, n_cells(kind, distance)
            if min(weight, n) >= _SAME * total:
                is_kept = distance in (0, -1) or weight > _ELSEWHERE * n
                (positional if is_kept else repeated).add(kind)
    kinds = tuple(kind for kind in COPY_TYPES if kind in positional)
    return with_kind(replace(head, positional=kinds), repeated - positional)


def _n_copy_cells(request: StatisticsRequest, kind: Kind, distance: int) -> int:
    """How many cells at a signed distance are on copies of the query's token, or after them; 0
    between different texts.
    """
    labels, own = (request.before_k, 1) if kind == "induction" else (request.k_tokens, 0)
    if not request.axes.is_self or distance == own:
        return 0
    n = request.q_tokens.shape[1]
    queries = request.q_tokens[:, max(0, -distance) : n - max(0, distance)]
    keys = labels[:, max(0, distance) : n - max(0, -distance)]
    return int(((queries == keys) & (queries >= 0)).sum())


def with_sink(reduced: Reduced) -> PassResults:
    """The statistics, in which a sink logit is one more outcome of entropy and squares, and the
    distance the mean over what keys get. Source: Xiao et al. 2023; the sink logits of gpt-oss.
    """
    statistics, sink_mass = reduced.statistics, reduced.sink_mass
    if sink_mass is None:
        return statistics
    sink = sink_mass.to(statistics["mass"].dtype)
    mass = torch.where(statistics["mass"] > 0, statistics["mass"], 1.0)
    return statistics | {
        "entropy": statistics["entropy"] + torch.special.entr(sink),
        "squares": statistics["squares"] + sink.square(),
        "distance": statistics["distance"] / mass,
    }


def _averages(
    sums: PassResults,
    visible: Tensor,
    n_copies: Mapping[str, Float[Tensor, " #head"]],
    zero: int,
    offsets: Int[Tensor, " head"],
) -> list[Averages]:
    """The means of every head, in float64. Where one head stands for all, there is one for each of
    the `offsets`. `n_copies` are the numbers of queries that see copies, or tokens after them.
    """
    seen = sums["mass"] > 0
    n = seen.sum(dim=(0, 2)).double()
    wide = {name: sums[name].double() for name in _PER_QUERY}
    profile, entropy = sums["profile"].double().sum(dim=0), wide["entropy"]
    folded = distances_folded(profile, zero)
    places = offsets.clamp(min=0)[:, None]
    at_offset = profile.expand(len(offsets), -1).gather(1, places).squeeze(1) / n
    largest_entropy = visible.double().log().masked_fill(visible <= 1, 1.0)
    rows = {
        "entropy": _mean(entropy, seen),
        "entropy_share": _mean(entropy / largest_entropy, seen & (visible > 1)),
        "effective_keys": _mean(entropy.exp(), seen),
        "participation": _mean(torch.where(seen, 1 / wide["squares"], 0.0), seen),
        "distance": _mean(wide["distance"], seen),
        "sink": _mean(wide["first"], seen),
        "leading": _mean(wide["leading"], seen),
        "diagonal": profile[:, zero] / n,
        "previous": (profile[:, zero - 1] if zero else torch.zeros_like(n)) / n,
        "near": folded[:, : NEAR + 1].sum(dim=1) / n,
        "at_offset": torch.where(offsets < 0, torch.nan, at_offset),
        **{name: sums[name].sum(dim=0) / n for name in _COPIES},
        **{where_possible(name): sums[name].sum(dim=0) / n_copies[name] for name in _COPIES},
    }
    matched = (sums["matched"].sum(dim=0) / n[:, None]).expand(len(offsets), -1)
    numbers = {name: row.expand(len(offsets)).tolist() for name, row in rows.items()}
    is_known = ((n > 0) & folded.isfinite().all(dim=1)).expand(len(offsets))
    within = folded.cumsum(dim=1)
    windows = {}
    for name, weight in _WINDOWS.items():  # rounding of a millionth is forgiven
        window = torch.searchsorted(within, (weight - 1e-6) * within[:, -1:]).squeeze(1)
        windows[name] = window.expand(len(offsets)).tolist()
    counts = {
        f"n_{name}_queries": number.long().expand(len(offsets)).tolist()
        for name, number in n_copies.items()
    }
    return [
        Averages(
            **{name: finite(row[head]) for name, row in numbers.items()},  # type: ignore[arg-type]
            **{name: row[head] if is_known[head] else None for name, row in windows.items()},
            **{name: row[head] for name, row in counts.items()},
            offset=None if offsets[head] < 0 else int(offsets[head]) - zero,
            patterns=tuple(map(finite, matched[head].tolist())),
        )
        for head in range(len(offsets))
    ]


def _mean(
    per_query: PerQuery, queries: Bool[Tensor, "#batch #head query"]
) -> Float[Tensor, " head"]:
    """The mean over the queries marked True, per head; NaN where there is none."""
    weight = queries.double().expand(per_query.shape)
    return (per_query * weight).sum(dim=(0, 2)) / weight.sum(dim=(0, 2))


def distances_folded(
    profile: Float[Tensor, "head distance"], zero: int
) -> Float[Tensor, "head absolute"]:
    """The mass at each distance |i − j|, from that at each signed one, of which index `zero` is
    0.
    """
    before, after = profile[:, : zero + 1].flip(1), profile[:, zero:]
    folded = profile.new_zeros(len(profile), max(before.shape[1], after.shape[1]))
    folded[:, : before.shape[1]] += before
    folded[:, : after.shape[1]] += after
    folded[:, 0] = profile[:, zero]
    return folded


def _rows_again(
    reduced: Reduced, index: int, places: Sequence[tuple[int, int]], check_z: CheckOfZ | None
) -> dict[tuple[int, int], Float[Tensor, " key"]]:
    """The weights of some sequences and queries of a head, computed again, with those that are
    checked.
    """
    rows: dict[tuple[int, int], Tensor] = {}
    for batch in range(reduced.lse.shape[0]):
        shown_queries = [query for other, query in places if other == batch]
        checked_queries = [] if check_z is None else check_z.queries(batch)
        queries = sorted({*shown_queries, *checked_queries})
        if queries:
            chosen = torch.tensor(queries, device=reduced.keys.device)
            weights = reduced.weights_of(batch, index, chosen, reduced.keys)
            if check_z is not None:
                check_z.add((batch, index), chosen, weights)
            shown = weights[[queries.index(query) for query in shown_queries]].cpu()
            rows |= {(batch, query): row for query, row in zip(shown_queries, shown, strict=True)}
    return rows


def _cell(axes: Axes, place: tuple[int, int], key: int) -> tuple[int, int, int]:
    """The sequence, query and key of a cell, counted from the first token of the text."""
    batch, query = place
    return batch, query - axes.queries.first(batch), key - axes.keys.first(batch)


def _sinks(reduced: Reduced, baseline: PassResults, index: int, least: float) -> tuple[Sink, ...]:
    """The sinks that get the `least` share of all attention of their sequence, the strongest first.

    Few keys get so much that their columns are computed again, to count the queries that attend to
    them.
    """
    sinks = []
    uniform_received = baseline["received"][:, min(index, baseline["received"].shape[1] - 1)]
    for batch, received in enumerate(reduced.statistics["received"][:, index]):
        total = received.sum().item()
        if not total:
            continue
        first_key = reduced.request.axes.keys.first(batch)
        for key in received.topk(min(MAX_SINKS, len(received))).indices.tolist():
            uniform_share = uniform_received[batch, key].item() / total
            sink = Sink(batch, key - first_key, received[key].item() / total, uniform_share)
            if is_sink(sink, least):
                sink = _counted(
                    sink, key, reduced, plane_of(baseline["visible"], batch, index), index
                )
                if is_sink(sink, least):
                    sinks.append(sink)
    return tuple(sorted(sinks, key=lambda sink: -sink.share)[:MAX_SINKS])


def _counted(
    sink: Sink, key: int, reduced: Reduced, visible: Float[Tensor, " query"], index: int
) -> Sink:
    """A sink with the number of queries that see it, and how often they attend to it. `visible` is
    the number of keys of each query.
    """
    column = reduced.keys[key : key + 1]
    queries = torch.arange(reduced.lse.shape[2], device=column.device)
    weights = reduced.weights_of(sink.sequence, index, queries, column).squeeze(1).cpu()
    cells = reduced.attention.visible(queries, column)
    cells = plane_of(cells, sink.sequence, reduced.heads[index]).cpu()
    sees = cells.expand(len(queries), 1).squeeze(1)
    n_queries = int(sees.sum())
    n_often = int((sees & (weights * visible >= SINK_LIFT)).sum())
    return replace(sink, often=n_often / max(1, n_queries), n_queries=n_queries)


def _largest(
    rows: Mapping[tuple[int, int], Float[Tensor, " key"]],
    visible: Float[Tensor, "batch query"],
    axes: Axes,
) -> tuple[StrongCell, ...]:
    """The cells of some rows with the greatest weight relative to their query's uniform row."""
    cells = []
    for place, row in rows.items():
        n_keys = visible[place].item()
        if n_keys <= 1:
            continue
        weights, keys = row.topk(min(MAX_LARGEST, len(row)))
        for weight, key in zip(weights.tolist(), keys.tolist(), strict=True):
            if weight > 0:
                cells.append(StrongCell(*_cell(axes, place, key), weight, weight * n_keys))
    return tuple(sorted(cells, key=lambda cell: -cell.lift)[:MAX_LARGEST])


# ------------------------------------------------------------------------------------------ results


class _SomeHeads(NamedTuple):
    """The statistics of some heads, the arrays that are kept of them, the checks, and the attention
    as it was reduced.
    """

    heads: tuple[HeadStatistics, ...]
    arrays: dict[str, Tensor]
    checks: tuple[Check, ...]
    attention: Attention


def statistics_of(
    attention: Attention,
    request: StatisticsRequest,
    *,
    baseline: PassResults,
    run: Run,
    peak_bytes: int,
    report_progress: Progress = no_progress,
) -> tuple[tuple[HeadStatistics, ...], dict[str, Tensor], HeadsSummary]:
    """The statistics of the chosen heads, the arrays `[batch, head, …]` that are kept and those of
    uniform attention, on the CPU, and how they were computed: of each check the result that came
    nearest to its tolerance, or passed it most.

    Threads of a CPU share the heads. The `baseline` is that of all heads. Raises `MhaError` where
    scores overflow."""
    n_heads, n_kv_heads = attention.shape[1], attention.n_kv_heads
    chosen = run.statistics.heads

    def of_part(part: range) -> _SomeHeads:
        return _of_some(reduce_heads(attention, request, part, report_progress), baseline, run)

    is_small = prod(attention.shape[2:]) <= SMALL_CELLS or attention.like.device.type != "cpu"
    with one_thread() if is_small else nullcontext():
        most = -(-n_kv_heads // torch.get_num_threads()) * (n_heads // n_kv_heads)
        parts = [*head_groups(range(n_heads), 1, most=most)]
        if chosen is not None:
            parts = [range(n, n + 1) for n in chosen]
        results = shared_out([partial(of_part, part) for part in parts])
    heads = tuple(head for some in results for head in some.heads)
    arrays = {
        name: torch.cat([some.arrays[name] for some in results], dim=1)
        for name in results[0].arrays
    }
    means = _means(baseline, request)
    uniform = {
        "visible": baseline["visible"].long(),
        "uniform_map": means.pop("map"),
        "uniform_received": baseline["received"],
        **{f"uniform_{name}": array for name, array in means.items()},
    }
    for name, array in uniform.items():
        arrays[name] = array if array.shape[1] == 1 else array[:, [head.head for head in heads]]
    reducers = [reducer_of(some.attention, request) for some in results]
    reducer = next((each for each in reducers if each.torch_because), reducers[0])
    n_cells = attention.shape[0] * len(heads) * prod(attention.shape[2:])
    same_checks = zip(*(some.checks for some in results), strict=True)
    summary = HeadsSummary(
        block=request.block,
        steps=_steps(request.axes),
        patterns=tuple(pattern.text for pattern in run.statistics.conditions),
        sink_tokens=run.statistics.first_tokens,
        sink_share=run.statistics.sink_weight,
        kernel=attention.kernel,
        reducer=reducer.name,
        torch_because=reducer.torch_because,
        checks=tuple(map(worst_check, same_checks)),
        peak_bytes=peak_bytes,
        full_bytes=n_cells * attention.dtype.itemsize,
        kept=run.kept,
    )
    return heads, arrays, summary


def _of_some(reduced: Reduced, baseline: PassResults, run: Run) -> _SomeHeads:
    """What is computed of some heads."""
    attention, heads = reduced.attention, reduced.heads
    seen, lse = reduced.has_keys, reduced.lse
    dtype, span = reduced.request.axes.dtype, slice(heads.start, heads.stop)
    uniform = {
        name: sums if sums.shape[1] == 1 else sums[:, span] for name, sums in baseline.items()
    }
    is_known = (lse.abs() < _INDISTINCT_SCORE) | (seen & lse.to(attention.dtype).isfinite())
    is_lost = (uniform["visible"] > 0) & ~is_known
    if not run.allow_nonfinite and bool(is_lost.any()):
        are_lost = is_lost.any(dim=-1).any(dim=0).expand(len(heads)).tolist()
        named = ", ".join(str(head) for head, is_bad in zip(heads, are_lost, strict=True) if is_bad)
        raise not_finite(
            (
                f"the scores of head {named} are too large for {dtype}: some rows of weights do"
                " not sum to 1"
            ),
            dtype,
        )
    arrays = _arrays(reduced) | _cells(reduced, run.kept)
    if run.kept.z and reduced.z is not None:
        arrays["z"] = reduced.z
    largest = reduced.top_score.masked_fill(~seen, 0.0).abs().amax().item()
    check_z = None if attention.v is None else CheckOfZ(reduced, largest)
    of_heads = head_statistics(
        reduced, baseline=uniform, sink_share=run.statistics.sink_weight, check_z=check_z
    )
    checks = check_sums(reduced, largest)
    if check_z is not None:
        checks = (*checks, check_z.check())
    on_cpu = {name: array.cpu() for name, array in arrays.items()}
    return _SomeHeads(of_heads, on_cpu, checks, attention)


# ------------------------------------------------------------------------------------------- arrays


def _arrays(reduced: Reduced) -> dict[str, Tensor]:
    """The vectors, the map and the weights between spans as records keep them; NaN for queries
    without keys.
    """
    statistics, dtype = with_sink(reduced), reduced.attention.dtype
    per_query = {
        "lse": reduced.lse,
        "max_score": reduced.top_score,
        "entropy": statistics["entropy"],
        "participation": 1 / statistics["squares"],
        "distance": statistics["distance"],
        "sink": statistics["first"],
    }
    return {
        **{
            name: torch.where(reduced.has_keys, row, torch.nan).to(dtype)
            for name, row in per_query.items()
        },
        "received": statistics["received"],
        **_means(statistics, reduced.request),
    }


def _means(statistics: PassResults, request: StatisticsRequest) -> dict[str, Tensor]:
    """The map: the mean weight that the queries of a block give a block of keys; the profile: the
    share of all weight at the distances up to each step, in bins that double; and between spans the
    mean weight. Queries without keys do not count.
    """
    has_keys, block = statistics["mass"] > 0, request.block
    seen = has_keys.to(statistics["map"].dtype)
    padded = torch.nn.functional.pad(seen, (0, -seen.shape[-1] % block))
    n_seen = padded.unflatten(-1, (-1, block)).sum(dim=-1)
    zero = request.axes.queries.length - 1
    folded = torch.stack([distances_folded(profile, zero) for profile in statistics["profile"]])
    within = torch.nn.functional.pad(folded.double().cumsum(dim=-1), (1, 0))
    n_distances = folded.shape[-1]
    ends = [min(step + 1, n_distances) for step in _steps(request.axes)]
    steps = within[..., ends].diff(dim=-1, prepend=within[..., :1])
    totals = statistics["mass"].double().sum(dim=-1)[..., None].clamp(min=1)
    means = {"map": statistics["map"] / n_seen.clamp(min=1)[..., None], "profile": steps / totals}
    if request.q_spans is not None:
        n_queries = (has_keys[:, :, None] & request.q_spans[:, None].cpu()).sum(dim=-1)
        means["span_mass"] = statistics["between"] / n_queries.clamp(min=1)[..., None]
    return means


def _steps(axes: Axes) -> tuple[int, ...]:
    """The upper ends of the bins 0, 1, 2, 3–4, 5–8, … of distances, up to the longest."""
    longest = max(axes.queries.length, axes.keys.length) - 1
    if not longest:
        return (0,)
    powers = (1 << power for power in range((longest - 1).bit_length()))
    return (0, *powers, longest)


def _cells(reduced: Reduced, kept: Kept) -> dict[str, Tensor]:
    """The requested cells, by sequence and head: a corner, and the strongest keys of queries, −1
    where a weight is 0.
    """
    arrays: dict[str, Tensor] = {}
    batch, n_heads, _ = reduced.lse.shape
    device, like = reduced.keys.device, reduced.statistics["mass"]

    def of_all(queries: Tensor, keys: Tensor) -> Float[Tensor, "batch head query key"]:
        rows = [
            [reduced.weights_of(b, h, queries, keys).to(like) for h in range(n_heads)]
            for b in range(batch)
        ]
        return torch.stack([torch.stack(row) for row in rows])

    if kept.corner is not None:
        c = kept.corner
        queries = torch.arange(c.first_query, c.first_query + c.n_queries, device=device)
        keys = torch.arange(c.first_key, c.first_key + c.n_keys, device=device)
        seen = reduced.attention.visible(queries, keys)
        if seen.shape[1] > 1:
            seen = seen[:, reduced.heads.start : reduced.heads.stop]
        arrays["corner"] = torch.where(seen.cpu(), of_all(queries, keys), torch.nan)
    if kept.queries:
        rows = of_all(torch.tensor(kept.queries, device=device), reduced.keys)
        weights, keys = rows.topk(min(kept.top, rows.shape[-1]), dim=-1)
        arrays["top_shares"] = weights
        arrays["top_keys"] = torch.where(weights > 0, keys, -1)
    return arrays


# ------------------------------------------------------------------------------------------- checks


def check_sums(reduced: Reduced, largest: float) -> tuple[Check, ...]:
    """What must hold of any statistics: it notices a wrong base of the logarithm, head or mask.

    Every query gives 1 in all, a sink logit's weight among it, so that what the keys receive and
    the maps add up to the rest. The tolerance is that of weights whose scores, the `largest` of
    this size, are rounded in the dtype of the maths. Where q, k or v are not finite, what is not
    finite is passed over.
    """
    attention, statistics = reduced.attention, reduced.statistics
    given = reduced.has_keys.double()
    if reduced.sink_mass is not None:
        given = torch.where(reduced.has_keys, 1 - reduced.sink_mass.double(), 0.0)
    n_given = given.sum(dim=-1)
    totals = {
        "column": statistics["received"].double().sum(dim=-1),
        "map": statistics["map"].double().sum(dim=(-1, -2)),
    }
    sums = {ROW_SUMS: (statistics["mass"] - given).abs().amax(dim=-1).double()}
    for name, total in totals.items():
        sums[f"row and {name} totals agree"] = (total - n_given).abs() / n_given.clamp(min=1)
    if attention.v is not None and not attention.is_finite:
        sums = {name: error.nan_to_num(nan=0.0) for name, error in sums.items()}
    rounding = _rounding(attention.dtype, largest, attention.shape[3])
    return tuple(
        Check.of(error.max().item(), rounding, name=name, rounding=0.0)
        for name, error in sums.items()
    )


def _rounding(dtype: torch.dtype, largest: float, n_keys: int) -> float:
    """How far weights of so many keys may be off in a dtype whose scores, the largest of this size,
    are rounded in it.
    """
    of_weights = TOLERANCES[dtype_name(dtype)].output * growth(n_keys)
    return min(_MAX_SUM_TOLERANCE, of_weights + 16 * torch.finfo(dtype).eps * largest)


class CheckOfZ:
    """z of some queries from the values and their weights, which are computed again cell by cell,
    in float64 where the device has it.

    Where a kernel's scores are large, a query may be as far off besides as their rounding in
    float32 can move it; where that was needed, the check says how much of the tolerance it is.
    """

    def __init__(self, reduced: Reduced, largest: float) -> None:
        """`largest` is the size of the largest score."""
        attention, axes = reduced.attention, reduced.request.axes
        # eager attention has its softmax in float32 whatever the dtype
        is_single = axes.dtype != "float64" or attention.kernel == "eager"
        dtypes = (attention.dtype, torch.float32 if is_single else torch.float64)
        of_weights = max(_rounding(dtype, largest, attention.shape[3]) for dtype in dtypes)
        self._rounding = of_weights + TOLERANCES[axes.dtype].output
        self._reduced = reduced
        self._axis = axes.queries
        self._errors: list[Tensor] = []
        self._moved: list[Tensor] = []
        self._magnitudes: list[Tensor] = []

    def queries(self, batch: int) -> list[int]:
        """The queries of a sequence whose z is to be checked: all of a short text, else some that
        are evenly spread.
        """
        n = len(self._axis.ids[batch])
        n_checked = n if n <= CHECKED_WHOLE else CHECKED_ROWS
        spread = torch.linspace(0, n - 1, n_checked, dtype=torch.float64).round().long()
        chosen: list[int] = (self._axis.first(batch) + spread).tolist()
        return chosen

    def add(
        self,
        place: tuple[int, int],
        queries: Int[Tensor, " query"],
        weights: Float[Tensor, "query key"],
    ) -> None:
        """Compares z of some queries of a sequence and head with their weights."""
        reduced, attention = self._reduced, self._reduced.attention
        b, h = place
        assert attention.v is not None
        assert reduced.z is not None
        kv_head = reduced.heads[h] * attention.v.shape[1] // attention.shape[1]
        v = attention.v[b, kv_head].to(attention.dtype)
        if not attention.has_finite_values:  # 0 · NaN is NaN, and a hidden key may hold anything
            v = v.masked_fill((weights == 0).all(dim=0)[:, None], 0.0)
        values = v.to(weights.dtype)
        z, again = reduced.z[b, h, queries].to(weights.dtype), weights @ values
        error = torch.where(z.isfinite() & again.isfinite(), (again - z).abs(), 0.0)
        error = torch.where(z.isfinite() != again.isfinite(), torch.inf, error)
        magnitudes = (weights.to(v.dtype) @ v.abs()).nan_to_num(nan=0.0, posinf=0.0)
        self._errors.append(error.amax(dim=1))
        self._moved.append(_moved(reduced, place, queries, weights, values))
        self._magnitudes.append(magnitudes.amax())

    def check(self) -> Check:
        """The check of all that were compared, by the query that came nearest to its tolerance, or
        passed it most.
        """
        usual = self._rounding * torch.stack(self._magnitudes).amax().item()
        error, tolerance = torch.cat(self._errors).cpu(), usual + torch.cat(self._moved).cpu()
        worst = int((error / tolerance.clamp(min=torch.finfo(tolerance.dtype).tiny)).argmax())
        of_scores = (tolerance - usual)[error > usual]
        rounding = 0.0
        if len(of_scores) and error[worst] <= tolerance[worst]:
            rounding = of_scores.amax().item()
        return Check.of(
            error[worst].item(), tolerance[worst].item(), name=HEAD_OUTPUTS, rounding=rounding
        )


def _moved(
    reduced: Reduced, place: tuple[int, int], queries: Tensor, weights: Tensor, values: Tensor
) -> Float[Tensor, " query"]:
    """How far z of some queries may move when a kernel rounds their scores in float32, where these
    are large; else 0.

    A dot product of n numbers is off by E = n u Σ|q||k| at most, whatever the order of summing,
    with u = 2⁻²⁴. So a weight is off by a factor between e^−E and e^E, and z by Σ p (e^E − 1) |v −
    z| / Σ p e^−E. Source: Higham 2002, "Accuracy and Stability of Numerical Algorithms", section
    3.1. Two more roundings are those of the scale and of the score itself.
    """
    attention, (b, h) = reduced.attention, place
    is_large = bool(reduced.lse[b, h].abs().amax() > _ROUNDED_SCORE)
    is_of_kernel = isinstance(attention, ScoredAttention) and attention.kernel != BLOCKS
    if not (is_large and is_of_kernel):
        return weights.new_zeros(len(weights))
    assert isinstance(attention, ScoredAttention)
    head, wide = reduced.heads[h], weights.dtype
    q = attention.q[b, head, queries]
    k = attention.k[b, head // (attention.shape[1] // attention.n_kv_heads)]
    products = q.to(wide).abs() @ k.to(wide).abs().mT
    of_product = (q.shape[1] + 2) * torch.finfo(torch.float32).eps / 2 * abs(attention.scale)
    off = (of_product * products).clamp(max=_MAX_EXPONENT)
    least = (weights * (-off).exp()).sum(dim=1)
    distances = [(values - z).abs().amax(dim=1) for z in weights @ values]
    sums = torch.stack(
        [(p * e.expm1() * far).sum() for p, e, far in zip(weights, off, distances, strict=True)]
    )
    farthest = torch.stack([far.amax() for far in distances])
    return torch.minimum(sums / least.clamp(min=torch.finfo(wide).tiny), farthest)
