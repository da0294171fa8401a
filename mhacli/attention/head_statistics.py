"""What a record holds of heads, from the sums of a pass: means, extremes and a type, beside those
of uniform attention; arrays; and the checks that all of them are right. The table of all statistics
is `mhacli.record.heads.STATISTICS`.

A layer is measured while its queries, keys and values are there; what a record holds is made of all
layers of a pass together, when their device was waited for once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from math import isfinite, prod
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from mhacli.io.data import Array, finite
from mhacli.io.long_work import Progress, no_progress
from mhacli.record.checks import HEAD_OUTPUTS, ROW_SUMS, TOLERANCES, Check, growth
from mhacli.record.heads import (
    COPY_TYPES,
    HEAD_TYPES,
    MAX_LARGEST,
    MAX_SINKS,
    NEAR,
    Averages,
    HeadsSummary,
    HeadStatistics,
    Kind,
    Sink,
    StrongCell,
    is_sink,
    where_possible,
    with_kind,
)
from mhacli.run import MAX_ALIVE, Run

from .again import Care, care_of, cells_again, is_usual, may_be_sinks
from .axes import Axes, StatisticsRequest
from .core import PerQuery, dtype_name
from .devices import one_thread, sent, shared_out, wait_for
from .reduction import reduce_heads, reducer_of
from .scores import Attention, head_groups, joined, of_some
from .statistics import PassResults, Reduced
from .taps import not_finite, to_array

_NOTHING = 1e-6
"""Weight that may be rounding."""
_WEIGHTS = {"distance": "distance", "sink": "first", "leading": "leading"}
"""The means of sums that are 0 for queries without keys."""
_COPIES = ("duplicate", "induction")
_SAME = 0.9
"""The fraction of the weights of a type that one distance has to explain."""
_ELSEWHERE = 1.5
"""A head keeps a distance elsewhere too if it has so many times the weight that copies allow."""
_WINDOWS = {"window_50": 0.5, "window_90": 0.9, "window_99": 0.99}
_INDISTINCT_SCORE = 1e4
"""A score from which on others may not be distinguished from it."""
_MAX_SUM_TOLERANCE = 1e-2
"""The largest tolerance of a row's sum: beyond it a row is no row of weights."""
SMALL_CELLS = 1 << 18
"""Queries × keys up to which one thread is as quick as several."""
_QUERIES_AT_ONCE = 1 << 17
"""The queries of all heads whose results are made together, in fewer operators; there are about a
dozen float64 numbers of each, which wait until then.
"""


# ---------------------------------------------------------------------------------------- measuring


class Place(NamedTuple):
    """Where heads are: the number of the layer, and the name of its attention."""

    layer: int = 0
    attention: str = ""


_OF_ALL = Place()


class Measured(NamedTuple):
    """What a pass made of the chosen heads of an attention: the `sums`, by name, each `[batch,
    head, …]`, on its device or on the CPU.

    `baseline` is that of all heads. The `survey` lacks its checks. `has_finite` says that no query,
    key or value is NaN or infinite.
    """

    place: Place
    request: StatisticsRequest
    baseline: PassResults
    run: Run
    survey: HeadsSummary
    heads: tuple[int, ...]
    sums: PassResults
    dtype: torch.dtype
    n_keys: int
    has_finite: bool


def measure(
    attention: Attention,
    request: StatisticsRequest,
    *,
    baseline: PassResults,
    run: Run,
    place: Place = _OF_ALL,
    peak_bytes: int = 0,
    is_careful: bool = False,
    report_progress: Progress = no_progress,
) -> Measured:
    """The chosen heads of an attention, measured. Threads of a CPU share them. Another device is
    waited for only where the measurement `is_careful`. The `baseline` is that of all heads.
    """
    n_heads, n_kv_heads = attention.shape[1], attention.n_kv_heads
    chosen, is_cpu = run.statistics.heads, attention.like.device.type == "cpu"
    is_careful |= is_cpu

    def of_part(part: range) -> tuple[PassResults, Care, Attention]:
        def report(what: str, fraction: float) -> None:
            completed[part.start] = fraction
            report_progress(what, sum(completed.values()) / len(parts))

        reduced = reduce_heads(attention, request, part, report, is_careful=is_careful)
        given = (reduced, _of_heads(baseline, part), run.kept)
        sums, care, least = _sums_of(reduced), Care(), run.statistics.sink_weight
        sums |= cells_again(*given, care, least=least)
        if is_careful and not is_usual(sums, attention.kernel):
            care = care_of(reduced, sums)
            sums |= cells_again(*given, care, least=least)
        return sums, care, reduced.attention

    is_small = prod(attention.shape[2:]) <= SMALL_CELLS or not is_cpu
    with one_thread() if is_small else nullcontext():
        n_jobs = torch.get_num_threads() if is_cpu else 1
        most = -(-n_kv_heads // n_jobs) * (n_heads // n_kv_heads)
        parts = [*head_groups(range(n_heads), 1, most=most)]
        if chosen is not None:
            parts = [range(n, n + 1) for n in chosen]
        completed = dict.fromkeys((part.start for part in parts), 0.0)
        jobs = [partial(of_part, part) for part in parts]
        # a device's stream is that of this thread
        results = shared_out(jobs) if is_cpu else [job() for job in jobs]
    heads = tuple(head for part in parts for head in part)
    reducers = [reducer_of(reduced, request) for _, _, reduced in results]
    reducer = next((each for each in reducers if each.torch_because), reducers[0])
    n_cells = attention.shape[0] * len(heads) * prod(attention.shape[2:])
    survey = HeadsSummary(
        block=request.block,
        steps=_steps(request.axes),
        patterns=tuple(pattern.text for pattern in run.statistics.conditions),
        sink_tokens=run.statistics.first_tokens,
        sink_share=run.statistics.sink_weight,
        kernel=attention.kernel,
        reducer=reducer.name,
        torch_because=reducer.torch_because,
        checks=(),
        peak_bytes=peak_bytes,
        full_bytes=n_cells * attention.dtype.itemsize,
        kept=run.kept,
    )
    return Measured(
        place=place,
        request=request.host,
        baseline=baseline,
        run=run,
        survey=survey,
        heads=heads,
        sums=joined([sums for sums, _, _ in results]),
        dtype=attention.dtype,
        n_keys=attention.shape[3],
        has_finite=attention.v is None
        or all(care.is_finite for _, care, _ in results)
        or attention.is_finite,
    )


def _of_heads(sums: PassResults, heads: Sequence[int]) -> PassResults:
    """The numbers of some heads; with a head axis of 1 they hold for all."""
    return {name: of_some(row, heads) for name, row in sums.items()}


def _sums_of(reduced: Reduced) -> PassResults:
    """The statistics, in which a sink logit is one more outcome of entropy and squares, and the
    distance the mean over what keys get; with the log-sum-exp and the largest score of each query,
    and as `doubt` the size of the largest log-sum-exp of each head.
    Source: Xiao et al. 2023; the sink logits of gpt-oss.
    """
    statistics, sink_mass = reduced.statistics, reduced.sink_mass
    doubt = torch.linalg.vector_norm(reduced.lse, torch.inf, dim=(0, 2))[None]
    sums = statistics | {"lse": reduced.lse, "top_score": reduced.top_score, "doubt": doubt}
    if sink_mass is None:
        return sums
    sink = sink_mass.to(statistics["mass"].dtype)
    mass = torch.where(statistics["mass"] > 0, statistics["mass"], 1.0)
    return sums | {
        "entropy": statistics["entropy"] + torch.special.entr(sink),
        "squares": statistics["squares"] + sink.square(),
        "distance": statistics["distance"] / mass,
        "sink_mass": sink_mass,
    }


class _Waiting(NamedTuple):
    """The place of a measurement whose numbers are on their way from a device, and how to make it
    again, which keeps the attention.
    """

    place: int
    device: torch.device
    again: Callable[[], Measured]


class Measurements:
    """The measured attentions of a pass. A device is waited for once for all of them, except where
    that would keep more than `MAX_ALIVE` bytes of them.
    """

    def __init__(self) -> None:
        self._results = list[HeadResults]()
        self._measured = list[Measured]()  # those after the results
        self._waiting = list[_Waiting]()
        self._baselines = dict[int, tuple[PassResults, PassResults]]()
        self._n_bytes = 0

    def add(self, attention: Attention, request: StatisticsRequest, **given: Any) -> int:
        """Measures one more, as `measure` does, and returns its number. Raises `MhaError` where
        scores of those before overflow.
        """
        place, device = len(self._measured), attention.like.device
        number = len(self._results) + place
        self._measured.append(self._sent(measure(attention, request, **given)))
        if device.type != "cpu":
            again = partial(measure, attention, request, is_careful=True, **given)
            self._waiting.append(_Waiting(place, device, again))
            tensors = (each for each in vars(attention).values() if isinstance(each, Tensor))
            self._n_bytes += sum(each.nbytes for each in tensors)
        if self._n_bytes > MAX_ALIVE:
            self.wait()
        if not self._waiting and _n_queries(self._measured) > _QUERIES_AT_ONCE:
            self._finish()
        return number

    def _sent(self, measured: Measured) -> Measured:
        """A measured attention whose numbers are on their way to the CPU."""
        baseline = measured.baseline
        if id(baseline) not in self._baselines:
            self._baselines[id(baseline)] = baseline, sent(baseline)
        of_uniform = self._baselines[id(baseline)][1]
        return measured._replace(sums=sent(measured.sums), baseline=of_uniform)

    def wait(self) -> None:
        """Waits for what is on its way, and measures again what needed care."""
        for device in dict.fromkeys(each.device for each in self._waiting):
            wait_for(device)
        for place, device, again in self._waiting:
            measured = self._measured[place]
            if not is_usual(measured.sums, measured.survey.kernel):
                self._measured[place] = self._sent(again())
                wait_for(device)
        self._waiting, self._n_bytes = [], 0

    def results(self) -> list[HeadResults]:
        """What a record holds of each, in order. Raises `MhaError` where scores overflow."""
        self.wait()
        self._finish()
        return self._results

    def _finish(self) -> None:
        self._results += results_of(self._measured)
        self._measured = []


class HeadResults(NamedTuple):
    """What a record holds of the heads of an attention: their statistics, the arrays `[batch, head,
    …]` that are kept and those of uniform attention, and how they were computed. `visible` is how
    many keys the queries of all heads see.
    """

    heads: tuple[HeadStatistics, ...]
    arrays: dict[str, Array]
    survey: HeadsSummary
    visible: Array


def statistics_of(attention: Attention, request: StatisticsRequest, **given: Any) -> HeadResults:
    """What a record holds of the chosen heads of an attention, measured as `measure` does. Raises
    `MhaError` where scores overflow.
    """
    measurements = Measurements()
    measurements.add(attention, request, **given)
    return measurements.results()[0]


def _n_queries(measured: Iterable[Measured]) -> int:
    """The number of queries of all heads."""
    return sum(each.sums["lse"].numel() for each in measured)


def results_of(measured: Sequence[Measured]) -> list[HeadResults]:
    """What a record holds of measured attentions, whose numbers can be read. Those of one text and
    mask are finished together. Raises `MhaError` where scores overflow.
    """
    together = defaultdict[object, list[int]](list)
    for number, each in enumerate(measured):
        shapes = tuple((name, row.dtype, *row.shape[2:]) for name, row in each.sums.items())
        at_once = max(1, _QUERIES_AT_ONCE // max(1, _n_queries([each])))
        key = (id(each.request), id(each.baseline), each.dtype, shapes, number // at_once)
        together[key].append(number)
    results: dict[int, HeadResults] = {}
    for numbers in together.values():
        finished = _finished([measured[number] for number in numbers])
        results |= zip(numbers, finished, strict=True)
    return [results[number] for number in range(len(measured))]


def _finished(layers: Sequence[Measured]) -> Iterator[HeadResults]:
    """The results of layers with the same request and baseline, whose heads are those of one."""
    first = layers[0]
    request, run = first.request, first.run
    heads = [(layer.place, head) for layer in layers for head in layer.heads]
    sums = joined([layer.sums for layer in layers])
    baseline = first.baseline
    uniform = _of_heads(baseline, [head for _, head in heads])
    made = head_statistics(sums, uniform, request, heads, run.statistics.sink_weight)
    arrays = _numpy(_arrays(sums, first.dtype) | _means(sums, request))
    means = _means(baseline, request)
    of_uniform = {
        "visible": baseline["visible"].long(),
        "uniform_map": means.pop("map"),
        "uniform_received": baseline["received"],
        **{f"uniform_{name}": array for name, array in means.items()},
    }
    of_all = _numpy(of_uniform)
    of_sums = _numpy(_errors_of_sums(sums))
    of_z = _numpy({name: sums[name] for name in ("z_error", "z_moved", "z_size") if name in sums})
    largest = sums["top_score"].where(sums["mass"] > 0, 0.0).abs().amax(dim=-1).numpy()
    if not run.allow_nonfinite:
        _require_known(sums, uniform["visible"], first, heads)
    start = 0
    for layer in layers:
        span = slice(start, start + len(layer.heads))
        start = span.stop
        own, errors, of_output = (
            {name: np.ascontiguousarray(array[:, span]) for name, array in of_heads.items()}
            for of_heads in (arrays, of_sums, of_z)
        )
        own |= {name: of_some(array, layer.heads) for name, array in of_all.items()}
        checks = _checks(layer, float(largest[:, span].max()), errors, of_output)
        survey = replace(layer.survey, checks=checks)
        yield HeadResults(tuple(made[span]), own, survey, of_all["visible"])


def _numpy(tensors: PassResults) -> dict[str, Array]:
    return {name: to_array(tensor) for name, tensor in tensors.items()}


def _require_known(
    sums: PassResults,
    visible: Float[Tensor, "batch _head query"],
    layer: Measured,
    heads: Sequence[tuple[Place, int]],
) -> None:
    """Raises `MhaError` for the first place whose heads have a query that sees keys, but whose
    scores overflow.
    """
    lse = sums["lse"]
    is_known = (lse.abs() < _INDISTINCT_SCORE) | (
        (sums["mass"] > 0) & lse.to(layer.dtype).isfinite()
    )
    are_lost = ((visible > 0) & ~is_known).any(dim=(0, 2)).tolist()
    lost = [each for each, is_lost in zip(heads, are_lost, strict=True) if is_lost]
    if lost:
        dtype, place = layer.request.axes.dtype, lost[0][0]
        names = ", ".join(str(head) for of, head in lost if of == place)
        of_layer = f" of {place.attention}" if place.attention else ""
        message = (
            f"the scores of head {names}{of_layer} are too large for {dtype}: some rows of weights"
            " do not sum to 1"
        )
        raise not_finite(message, dtype)


# ---------------------------------------------------------------------------------------- each head


def head_statistics(
    sums: PassResults,
    uniform: PassResults,
    request: StatisticsRequest,
    heads: Sequence[tuple[Place, int]],
    sink_share: float,
) -> list[HeadStatistics]:
    """What a record holds of heads, by place and number, their type among it. The numbers of
    `uniform` attention are those of these heads.
    """
    axes, seen = request.axes, sums["mass"] > 0
    zero = axes.queries.length - 1
    profile = sums["profile"].double().sum(dim=0)
    excess = profile - uniform["profile"].double().sum(dim=0)  # at each signed distance
    excess[:, max(0, zero - 1) : zero + 1] = 0.0  # that of neither 0 nor −1 counts
    most, offsets = excess.max(dim=1)
    offsets = torch.where(most > _NOTHING, offsets, -1)
    outcomes, visible = uniform["visible"], uniform["visible"].expand(seen.shape)
    if "sink_mass" in sums:
        outcomes = outcomes + (outcomes > 0)
    n_copies = {name: uniform[f"n_{name}_queries"].sum(dim=0).double() for name in _COPIES}
    n_cells = cache(_copy_counter(request))
    means = _averages(sums, outcomes, n_copies, zero, offsets)
    of_uniform = _averages(uniform, uniform["visible"], n_copies, zero, offsets)
    n_queries = seen.sum(dim=(0, 2)).tolist()
    tops, sinks = _tops(sums, axes), _sinks(sums, uniform, axes, sink_share)
    largest = _largest(sums, visible, axes)
    made = []
    for number, (place, head) in enumerate(heads):
        positional, repeated = _explained(means[number], n_queries[number], n_cells)
        of_head = HeadStatistics(
            layer=place.layer,
            attention=place.attention,
            head=head,
            positional=positional,
            **means[number],
            **tops[number],
            sinks=sinks[number],
            largest=largest[number],
            uniform=Averages(**of_uniform[number]),
        )
        made.append(with_kind(of_head, repeated))
    return made


def _explained(
    means: Mapping[str, Any], n_queries: int, n_cells: Callable[[Kind, int], int]
) -> tuple[tuple[Kind, ...], set[Kind]]:
    """The types whose weights lie at a distance that the head also keeps elsewhere, and the other
    types that a distance explains. `n_cells` counts the cells of a type at a distance: where they
    can hold the weights of the type, and the head has as much at the distance, the one explains the
    other. If it has much more there, it keeps the distance also elsewhere. Distances 0 and −1 have
    types of their own.
    """
    positional, repeated = set[Kind](), set[Kind]()
    for kind in COPY_TYPES:
        total = n_queries * (means[HEAD_TYPES[kind]] or 0.0)
        at = ((0, "diagonal"), (-1, "previous"), (means["offset"], "at_offset"))
        for distance, name in at:
            weight = n_queries * (means[name] or 0.0)
            if distance is None or not total or not weight >= _SAME * total:
                continue
            if (n := n_cells(kind, distance)) >= _SAME * total:
                is_kept = distance in (0, -1) or weight > _ELSEWHERE * n
                (positional if is_kept else repeated).add(kind)
    return tuple(kind for kind in COPY_TYPES if kind in positional), repeated - positional


def _copy_counter(request: StatisticsRequest) -> Callable[[Kind, int], int]:
    """Counts the cells at a signed distance that are on copies of the query's token, or after them;
    0 between different texts.
    """
    tokens, k_tokens, before_k = (
        each.numpy() for each in (request.q_tokens, request.k_tokens, request.before_k)
    )
    n = tokens.shape[1]

    def counted(kind: Kind, distance: int) -> int:
        labels, own = (before_k, 1) if kind == "induction" else (k_tokens, 0)
        if not request.axes.is_self or distance == own:
            return 0
        queries = tokens[:, max(0, -distance) : n - max(0, distance)]
        keys = labels[:, max(0, distance) : n - max(0, -distance)]
        return int(np.count_nonzero((queries == keys) & (queries >= 0)))

    return counted


def _averages(
    sums: PassResults,
    visible: Tensor,
    n_copies: Mapping[str, Float[Tensor, " #head"]],
    zero: int,
    offsets: Int[Tensor, " head"],
) -> list[dict[str, Any]]:
    """The means of every head, in float64, by the fields of `Averages`. Where one head stands for
    all, there is one for each of the `offsets`. `n_copies` are the numbers of queries that see
    copies, or tokens after them.
    """
    seen = sums["mass"] > 0
    n = seen.sum(dim=(0, 2)).double()
    profile, entropy = sums["profile"].double().sum(dim=0), sums["entropy"].double()
    folded = distances_folded(profile, zero)
    places = offsets.clamp(min=0)[:, None]
    at_offset = profile.expand(len(offsets), -1).gather(1, places).squeeze(1) / n
    largest_entropy = visible.double().log().masked_fill(visible <= 1, 1.0)
    rows = {
        "entropy": entropy.sum(dim=(0, 2)) / n,
        "entropy_share": _mean(entropy / largest_entropy, seen & (visible > 1)),
        "effective_keys": _mean(entropy.exp(), seen),
        "participation": torch.where(seen, 1 / sums["squares"].double(), 0.0).sum(dim=(0, 2)) / n,
        **{
            name: sums[of].sum(dim=(0, 2), dtype=torch.float64) / n for name, of in _WEIGHTS.items()
        },
        "diagonal": profile[:, zero] / n,
        "previous": (profile[:, zero - 1] if zero else torch.zeros_like(n)) / n,
        "near": folded[:, : NEAR + 1].sum(dim=1) / n,
        "at_offset": torch.where(offsets < 0, torch.nan, at_offset),
        **{name: sums[name].sum(dim=0) / n for name in _COPIES},
        **{where_possible(name): sums[name].sum(dim=0) / n_copies[name] for name in _COPIES},
    }
    if "sink_mass" in sums:
        rows["learned_sink"] = _mean(sums["sink_mass"].double(), seen)
    matched = (sums["matched"].sum(dim=0) / n[:, None]).expand(len(offsets), -1)
    within = folded.cumsum(dim=1)
    windows = {}
    for name, weight in _WINDOWS.items():  # rounding of a millionth is forgiven
        windows[name] = torch.searchsorted(within, (weight - 1e-6) * within[:, -1:]).squeeze(1)
    are_known = (n > 0) & folded.isfinite().all(dim=1)
    counts = {f"n_{name}_queries": number.long() for name, number in n_copies.items()}

    def of_each(row: Tensor) -> list[Any]:
        return row.expand(len(offsets)).tolist()

    fields: dict[str, list[Any]]
    fields = {name: [*map(finite, of_each(row))] for name, row in rows.items()}
    for name, row in windows.items():
        known = zip(of_each(row), of_each(are_known), strict=True)
        fields[name] = [window if is_known else None for window, is_known in known]
    fields |= {name: of_each(row) for name, row in counts.items()}
    fields["offset"] = [None if offset < 0 else offset - zero for offset in offsets.tolist()]
    fields["patterns"] = [tuple(map(finite, of_head)) for of_head in matched.tolist()]
    return [dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=True)]


def _mean(
    per_query: PerQuery, queries: Bool[Tensor, "#batch #head query"]
) -> Float[Tensor, " head"]:
    """The mean over the queries marked True, per head; NaN where there is none."""
    weight = queries.double().expand(per_query.shape)
    return (per_query * weight).sum(dim=(0, 2)) / weight.sum(dim=(0, 2))


def distances_folded(
    profile: Float[Tensor, "... distance"], zero: int
) -> Float[Tensor, "... absolute"]:
    """The mass at each distance |i − j|, from that at each signed one, of which index `zero` is
    0.
    """
    before, after = profile[..., : zero + 1].flip(-1), profile[..., zero:]
    n_before, n_after = before.shape[-1], after.shape[-1]
    folded = profile.new_zeros(*profile.shape[:-1], max(n_before, n_after))
    folded[..., :n_before] += before
    folded[..., :n_after] += after
    folded[..., 0] = profile[..., zero]
    return folded


def _cell(axes: Axes, batch: int, query: int, key: int) -> tuple[int, int, int]:
    """A cell with its query and key counted from the first token of the text."""
    return batch, query - axes.queries.first(batch), key - axes.keys.first(batch)


def _tops(sums: PassResults, axes: Axes) -> list[dict[str, Any]]:
    """The largest score of each head, and its cell, as fields of `HeadStatistics`."""
    queries = sums["top_query"]
    scores = sums["top_score"].take_along_dim(queries[..., None], dim=-1).squeeze(-1)
    best = scores.nan_to_num(nan=-torch.inf).argmax(dim=0, keepdim=True)
    of_best = (each.gather(0, best)[0].tolist() for each in (queries, sums["top_key"], scores))
    tops = []
    for batch, query, key, score in zip(best[0].tolist(), *of_best, strict=True):
        at = _cell(axes, batch, query, key) if isfinite(score) else None
        tops.append({"max_score": finite(score), "max_score_at": at})
    return tops


def _sinks(
    sums: PassResults, uniform: PassResults, axes: Axes, least: float
) -> list[tuple[Sink, ...]]:
    """The sinks of each head that get the `least` share of all attention of their sequence, the
    strongest first.
    """
    received, keys = sums["received"], sums["sink_key"]
    may_be = may_be_sinks(received, keys, uniform["received"], least)
    totals = received.sum(dim=-1).tolist()
    names = ("sink_share", "sink_key", "n_sees", "n_often")
    share, key, n_sees, n_often = (sums[name].numpy() for name in names)
    uniform_received = uniform["received"].expand(received.shape).numpy()
    sinks = [list[Sink]() for _ in range(received.shape[1])]
    for place in may_be.nonzero().tolist():
        batch, head, _ = at = tuple(place)
        total, n_queries = totals[batch][head], int(n_sees[at])
        sink = Sink(
            batch,
            int(key[at]) - axes.keys.first(batch),
            float(share[at]) / total,
            float(uniform_received[batch, head, key[at]]) / total,
            often=int(n_often[at]) / max(1, n_queries),
            n_queries=n_queries,
        )
        if is_sink(sink, least):
            sinks[head].append(sink)
    return [tuple(sorted(some, key=lambda sink: -sink.share)[:MAX_SINKS]) for some in sinks]


def _largest(sums: PassResults, visible: PerQuery, axes: Axes) -> list[tuple[StrongCell, ...]]:
    """The cells of each head with the greatest weight relative to their query's uniform row."""
    queries, share = sums["best_query"], sums["best_weight"]
    size = share * visible.take_along_dim(queries, dim=-1)[..., None]
    size = size.where((share > 0) & (sums["best_lift"][..., None] > 0), 0.0)
    batches = torch.arange(len(queries))[:, None, None, None]
    numbers = (batches, queries[..., None], sums["best_key"], share, size)
    of_heads = [each.expand_as(size).movedim(0, 1).flatten(1) for each in numbers]
    order = of_heads[-1].argsort(dim=1, descending=True, stable=True)[:, :MAX_LARGEST]
    rows = (each.take_along_dim(order, dim=1).tolist() for each in of_heads)
    return [
        tuple(
            StrongCell(*_cell(axes, batch, query, key), share, size)
            for batch, query, key, share, size in zip(*of_head, strict=True)
            if size > 0
        )
        for of_head in zip(*rows, strict=True)
    ]


# ------------------------------------------------------------------------------------------- arrays


def _arrays(sums: PassResults, dtype: torch.dtype) -> dict[str, Tensor]:
    """The vectors and the cells as records keep them; NaN for queries without keys."""
    per_query = {
        "lse": sums["lse"],
        "max_score": sums["top_score"],
        "entropy": sums["entropy"],
        "participation": 1 / sums["squares"],
        "distance": sums["distance"],
        "sink": sums["first"],
    }
    kept = ("received", "corner", "top_shares", "top_keys", "z")
    return {
        **{
            name: torch.where(sums["mass"] > 0, row, torch.nan).to(dtype)
            for name, row in per_query.items()
        },
        **{name: sums[name] for name in kept if name in sums},
    }


def _means(statistics: PassResults, request: StatisticsRequest) -> dict[str, Tensor]:
    """The map: the mean weight that the queries of a block give a block of keys; the profile: the
    share of all weight at the distances up to each step, in bins that double; and between spans the
    mean weight. Queries without keys do not count.
    """
    has_keys, block = statistics["mass"] > 0, request.block
    seen = has_keys.to(statistics["map"].dtype)
    padded = pad(seen, (0, -seen.shape[-1] % block))
    n_seen = padded.unflatten(-1, (-1, block)).sum(dim=-1)
    zero = request.axes.queries.length - 1
    folded = distances_folded(statistics["profile"], zero)
    within = pad(folded.double().cumsum(dim=-1), (1, 0))
    n_distances = folded.shape[-1]
    ends = [min(step + 1, n_distances) for step in _steps(request.axes)]
    steps = within[..., ends].diff(dim=-1, prepend=within[..., :1])
    totals = statistics["mass"].double().sum(dim=-1)[..., None].clamp(min=1)
    means = {"map": statistics["map"] / n_seen.clamp(min=1)[..., None], "profile": steps / totals}
    if request.q_spans is not None:
        n_queries = (has_keys[:, :, None] & request.q_spans[:, None]).sum(dim=-1)
        means["span_mass"] = statistics["between"] / n_queries.clamp(min=1)[..., None]
    return means


def _steps(axes: Axes) -> tuple[int, ...]:
    """The upper ends of the bins 0, 1, 2, 3–4, 5–8, … of distances, up to the longest."""
    longest = max(axes.queries.length, axes.keys.length) - 1
    if not longest:
        return (0,)
    powers = (1 << power for power in range((longest - 1).bit_length()))
    return (0, *powers, longest)


# ------------------------------------------------------------------------------------------- checks


def _errors_of_sums(sums: PassResults) -> dict[str, Tensor]:
    """How far what must hold of any statistics is off in each head: it notices a wrong base of the
    logarithm, head or mask.

    Every query gives 1 in all, a sink logit's weight among it, so that what the keys receive and
    the maps add up to the rest.
    """
    given = (sums["mass"] > 0).double()
    if "sink_mass" in sums:
        given = torch.where(sums["mass"] > 0, 1 - sums["sink_mass"].double(), 0.0)
    n_given = given.sum(dim=-1)
    totals = {
        "column": sums["received"].double().sum(dim=-1),
        # numpy widens as it adds, torch before
        "map": torch.from_numpy(sums["map"].numpy().sum(axis=(-1, -2), dtype=np.float64)),
    }
    errors = {ROW_SUMS: (sums["mass"] - given).abs().amax(dim=-1).double()}
    for name, total in totals.items():
        errors[f"row and {name} totals agree"] = (total - n_given).abs() / n_given.clamp(min=1)
    return errors


def _checks(
    layer: Measured, largest: float, of_sums: Mapping[str, Array], of_z: Mapping[str, Array]
) -> tuple[Check, ...]:
    """The checks of a layer, whose largest score has this size, by the errors of its sums and its
    z in each head. The tolerance is that of weights whose scores are rounded in the dtype of the
    maths. Where q, k or v are not finite, what is not finite in sums is passed over.
    """
    rounding = _rounding(layer.dtype, largest, layer.n_keys)
    if not layer.has_finite:
        of_sums = {name: np.nan_to_num(error, nan=0.0) for name, error in of_sums.items()}
    checks = tuple(
        Check.of(float(error.max()), rounding, name=name, rounding=0.0)
        for name, error in of_sums.items()
    )
    return (*checks, _check_of_z(layer, largest, **of_z)) if of_z else checks


def _rounding(dtype: torch.dtype, largest: float, n_keys: int) -> float:
    """How far weights of so many keys may be off in a dtype whose scores, the largest of this size,
    are rounded in it.
    """
    of_weights = TOLERANCES[dtype_name(dtype)].output * growth(n_keys)
    return min(_MAX_SUM_TOLERANCE, of_weights + 16 * torch.finfo(dtype).eps * largest)


def _check_of_z(
    layer: Measured, largest: float, z_error: Array, z_moved: Array, z_size: Array
) -> Check:
    """The check of z of some queries from the values and their weights, which are computed again
    cell by cell, in float64 where the device has it: by the query that came nearest to its
    tolerance, or passed it most.

    Where a kernel's scores are large, a query may be as far off besides as their rounding in
    float32 can move it; where that was needed, the check says how much of the tolerance it is.
    """
    dtype = layer.request.axes.dtype
    # eager attention has its softmax in float32 whatever the dtype
    is_single = dtype != "float64" or layer.survey.kernel == "eager"
    dtypes = (layer.dtype, torch.float32 if is_single else torch.float64)
    of_weights = max(_rounding(each, largest, layer.n_keys) for each in dtypes)
    usual = (of_weights + TOLERANCES[dtype].output) * float(z_size.max())
    error = np.nan_to_num(z_error, nan=np.inf, posinf=np.inf).ravel()
    tolerance = usual + z_moved.ravel()
    worst = int((error / np.maximum(tolerance, np.finfo(tolerance.dtype).tiny)).argmax())
    of_scores = (tolerance - usual)[error > usual]
    rounding = 0.0
    if len(of_scores) and error[worst] <= tolerance[worst]:
        rounding = float(of_scores.max())
    return Check.of(
        float(error[worst]), float(tolerance[worst]), name=HEAD_OUTPUTS, rounding=rounding
    )
