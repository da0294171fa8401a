"""Every head of a long text: exact statistics at the cost of fused attention, and no matrix of queries × keys.

A few heads at a time go through one pass: the scores of some queries become weights, z and statistics. On a GPU a fused kernel
makes z and the log-sum-exp before. What is finished can be shown at any moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from threading import Lock
from time import perf_counter
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mhacli.attention.core import is_finite, visible_cells
from mhacli.attention.devices import choose_device, free_bytes, one_thread, shared_out
from mhacli.attention.memory import require_memory
from mhacli.attention.taps import Capture, stage_timings, to_array
from mhacli.attention.tiled.reducer import ReducerChoice, choice, choice_for, summarise_by
from mhacli.attention.tiled.scores import Scores, VirtualPattern
from mhacli.attention.tiled.softmax import TILES, AttentionResult, attention_of
from mhacli.attention.tiled.statistics import (
    Statistics,
    StatisticsRequest,
    distances_folded,
    doubling_steps,
    in_steps,
    weights_of,
    with_sink,
)
from mhacli.attention.tiled.tiles import PatternTiles, indices, n_cells
from mhacli.compute.base.head_statistics import (
    Axes,
    Baseline,
    has_keys,
    head_statistics,
    make_baseline,
    make_statistics_request,
)
from mhacli.errors import MhaError
from mhacli.io.progress import Progress, no_progress
from mhacli.layer.setup import Setup, make_setup
from mhacli.record.checks import (
    COLUMN_TOTALS,
    HEAD_OUTPUTS,
    MAP_TOTALS,
    MEASURED_KEYS,
    ROW_SUMS,
    TOLERANCES,
    Check,
    SelfCheck,
    worst_check,
)
from mhacli.record.heads import HeadsSummary, HeadStatistics, Kept
from mhacli.record.record import Record, Step
from mhacli.record.tables import HeadTable
from mhacli.run import Run

_CELLS_AT_ONCE = 1 << 31
"""Of the heads that one thread inspects together: some seconds. Masks and matches are evaluated once for all of them."""
SMALL_CELLS = 1 << 18
"""Queries × keys up to which one thread is as quick as several."""
_MOST_OF_SUMS = 1e-2
"""The largest tolerance of row sums, however large the scores."""
_SAMPLE_LEN, _SAMPLE_HEADS, _SAMPLING_S, _MIN_SAMPLES = 1024, 4, 0.2, 4


class Prediction(NamedTuple):
    """What a run will take: bytes at its largest, seconds, and the bytes of the matrices that it does not build."""

    peak_bytes: int
    seconds: float
    full_bytes: int


@dataclass
class HeadsRun:
    """The statistics of every head, prepared by `prepare_heads`. `run` computes them; `record` returns what is finished."""

    setup: Setup
    wanted: Run
    statistics_request: StatisticsRequest
    scores: Scores
    v: Float[Tensor, "batch kv_head key d_v"]
    steps: tuple[Step, ...]
    peak_bytes: int
    results: list[HeadResults] = field(default_factory=list)
    baseline: Baseline | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def heads(self) -> tuple[int, ...]:
        """The heads that are looked at."""
        return (
            tuple(range(self.setup.config.n_heads))
            if self.wanted.statistics.heads is None
            else self.wanted.statistics.heads
        )

    @property
    def full_bytes(self) -> int:
        """What the patterns of these heads would take."""
        batch, _, q_len, k_len = self.scores.shape
        return batch * len(self.heads) * q_len * k_len * self.scores.like.element_size()

    @torch.no_grad()
    def predict(self) -> Prediction:
        """What the run will take, by the time of the first tokens of a few heads together in one thread."""
        n, group = min(_SAMPLE_LEN, *self.scores.shape[2:]), self.scores.shape[1] // self.v.shape[1]
        heads = next(head_groups(self.heads, group, most=_SAMPLE_HEADS))
        small = replace(self.scores, q=self.scores.q[:1, :, :n], k=self.scores.k[:1, :, :n])
        statistics_request = self.statistics_request.beginning(n)
        seconds, until = math.inf, perf_counter() + _SAMPLING_S
        with one_thread():
            for attempt in count():  # the first ones take longer, and others are on the machine
                began = perf_counter()
                if attempt >= _MIN_SAMPLES and began > until:
                    break
                sample = attention_of(small, self.v[:1, :, :n], heads).pattern
                summarise_by(self.wanted.statistics.reducer, sample, statistics_request)
                seconds = min(seconds, perf_counter() - began)
        heads_in_turn = 1 + len(self.heads) / min(self._n_threads, len(self._parts()))
        ratio = heads_in_turn * self._cells_per_head / max(1, n_cells(small.of_heads(heads)))
        return Prediction(self.peak_bytes, seconds * ratio, self.full_bytes)

    @torch.no_grad()
    def run(self, report_progress: Progress = no_progress) -> None:
        """Inspects all heads, on a CPU some in each thread; `report_progress` receives the completed fraction."""
        began = perf_counter()
        report_progress(0.0, "uniform attention")
        baseline = self.baseline = make_baseline(self.scores, self.statistics_request, self.wanted.statistics.reducer)
        progress = _HeadsProgress(self._cells_per_head, len(self.heads), report_progress)

        def inspect(heads: range) -> None:
            attention = attention_of(self.scores, self.v, heads)
            self.results.append(
                reduce_heads(
                    self.setup.axes,
                    attention,
                    statistics_request=self.statistics_request,
                    wanted=self.wanted,
                    baseline=baseline,
                    report_progress=progress.add,
                )
            )
            self.seconds["statistics"] = perf_counter() - began

        jobs = [partial(inspect, heads) for heads in self._parts()]
        if self._n_threads > 1:
            shared_out(jobs)
        else:
            for job in jobs:
                job()

    @property
    def _cells_per_head(self) -> int:
        return n_cells(self.scores) // self.scores.shape[1]

    @property
    def _n_threads(self) -> int:
        """How many threads inspect heads: those of torch on a CPU, if the text is not so short that they only wait."""
        is_small = math.prod(self.scores.shape[2:]) <= SMALL_CELLS
        return 1 if is_small or self.v.device.type != "cpu" else torch.get_num_threads()

    def _parts(self) -> list[range]:
        """The heads that are inspected together: so few that every thread has some, and that each part is soon finished."""
        most = min(_CELLS_AT_ONCE // max(1, self._cells_per_head), -(-len(self.heads) // self._n_threads))
        return list(head_groups(self.heads, self.scores.shape[1] // self.v.shape[1], most=most))

    def record(self) -> Record:
        """The record of the heads that are finished, of which there must be one at least."""
        assert self.baseline is not None, "nothing is told before something is done"
        setup, wanted = self.setup, self.wanted
        finished = sorted(self.results, key=lambda part: part.heads[0].head)
        results = joined(finished, self.baseline, setup.axes, self.statistics_request)
        return Record(
            command=wanted.command,
            config=setup.config,
            sequences=setup.encoded.sequences,
            context=setup.encoded.context,
            vocabulary=setup.encoded.vocabulary.tokens,
            trace=self.steps,
            heads=HeadTable(results.heads),
            timings=stage_timings(self.seconds),
            self_check=SelfCheck.of_layers([results.checks]),
            environment=setup.environment,
            weights=setup.weights,
            survey=make_summary(
                results,
                wanted,
                axes=setup.axes,
                statistics_request=self.statistics_request,
                peak_bytes=self.peak_bytes,
                full_bytes=self.full_bytes,
            ),
            arrays={name: to_array(array) for name, array in results.arrays.items()},
        )


@torch.no_grad()
def prepare_heads(request: Run) -> HeadsRun:
    """An inspection of every head, prepared: queries, keys and values are computed.

    Raises `MhaError` where it cannot fit, before the first large tensor; where the device is missing; for numbers that
    overflow; where the requested reducer cannot run; and `UsageError` in training, for dropout differs each time.
    """
    device = request.config.device
    on_gpu = choose_device(device).type != "cpu"
    peak_bytes = require_memory(request, free_bytes(device), has_matrices=False, on_gpu=on_gpu)
    setup = make_setup(request, allow_nonfinite=request.allow_nonfinite)
    began = perf_counter()
    shapes = {name: tuple(tensor.shape) for name, tensor in setup.layer.tensors().items()}
    capture = Capture(request.facts, shapes, keep=())
    q, k, v = setup.heads(capture)
    if not request.allow_nonfinite:
        _require_finite((q, k, v), request.config.dtype)
    statistics_request = make_statistics_request(
        setup.axes, request.statistics.conditions, sink_tokens=request.statistics.first_tokens
    )
    seconds = {"projections": perf_counter() - began}
    choice(request.statistics.reducer, q.device, q.dtype)
    return HeadsRun(
        setup, request, statistics_request, setup.scores(q, k), v, tuple(capture.steps), peak_bytes, seconds=seconds
    )


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


class _HeadsProgress:
    """Which part of the cells of all heads is reduced, by several threads."""

    def __init__(self, cells_per_head: int, n_heads: int, report_progress: Progress) -> None:
        self._report_progress = report_progress
        self._doing = "1 head" if n_heads == 1 else f"{n_heads} heads"
        self._whole, self._done, self._lock = max(1, cells_per_head * n_heads), 0, Lock()

    def add(self, cells: int) -> None:
        """More cells were reduced."""
        with self._lock:
            self._done += cells
            self._report_progress(min(1.0, self._done / self._whole), self._doing)


def _require_finite(tensors: Sequence[Tensor], dtype: str) -> None:
    """Raises `MhaError` where queries, keys or values hold NaN or Inf."""
    n_bad = sum(int((~tensor.isfinite()).sum()) for tensor in tensors if not is_finite(tensor))
    if n_bad:
        raise MhaError(
            f"queries, keys and values have {n_bad} NaN or Inf in {dtype}",
            hint="--dtype bfloat16 and --dtype float32 have a wider range; --allow-nonfinite continues anyway",
            code="not-finite",
        )


# ------------------------------------------------------------------------------------------ the pass over a few heads


CHECKED_WHOLE, CHECKED_ROWS = 128, 16
"""Up to so many queries z is computed again from their weights for all of them, of more for some that are evenly spread."""
_HUGE = 1e4
"""Scores that may be too large to be told apart."""


class HeadResults(NamedTuple):
    """What was found of some heads: their statistics, arrays `[batch, head, …]` on the CPU, the checks, and what reduced them."""

    heads: tuple[HeadStatistics, ...]
    arrays: Mapping[str, Tensor]
    kernel: str
    checks: tuple[Check, ...]
    reducers: tuple[ReducerChoice, ...]


def reduce_heads(
    axes: Axes,
    attention: AttentionResult,
    *,
    statistics_request: StatisticsRequest,
    wanted: Run,
    baseline: Baseline,
    report_progress: Callable[[int], None] = lambda cells: None,
) -> HeadResults:
    """The statistics of some heads, the arrays that are kept of them, and the checks.

    The `baseline` is that of all heads; `report_progress` receives numbers of reduced cells. Raises `MhaError` where scores
    overflow.
    """
    heads, head_baseline = attention.heads, baseline.of_heads(attention.heads)
    statistics = summarise_by(wanted.statistics.reducer, attention.pattern, statistics_request, report_progress)
    attention = attention.finished()
    pattern, lse, sink_mass = attention.known_pattern, attention.lse, attention.sink_mass
    if sink_mass is not None:
        statistics = with_sink(statistics, sink_mass)
    seen = has_keys(statistics)
    is_lost = (head_baseline.visible > 0) & ~(lse.abs() < _HUGE) & ~(seen & lse.isfinite())
    if not wanted.allow_nonfinite and bool(is_lost.any()):
        raise _overflow(heads, is_lost, axes)
    of_all = lse if sink_mass is None else lse - torch.log1p(-sink_mass)  # the sink logit among them
    top_score = torch.where(seen, statistics.peak + of_all, -torch.inf)
    arrays = {
        "lse": torch.where(seen, lse, torch.nan),
        "max_score": torch.where(seen, top_score, torch.nan),
        **_arrays(statistics, axes, statistics_request),
        **_cells(pattern, wanted.kept),
    }
    if wanted.kept.z:
        arrays["z"] = attention.z
    statistics_of_heads = head_statistics(
        pattern, statistics, heads=heads, top_score=top_score, baseline=head_baseline, axes=axes, sink_mass=sink_mass,
        sink_share=wanted.statistics.sink_weight,
    )  # fmt: skip
    checks = check_statistics(attention, statistics, top_score, axes)
    kept = {name: array.cpu() for name, array in arrays.items()}
    return HeadResults(
        statistics_of_heads, kept, attention.kernel, checks, (choice_for(wanted.statistics.reducer, pattern),)
    )


def joined(
    parts: Sequence[HeadResults], baseline: Baseline, axes: Axes, statistics_request: StatisticsRequest
) -> HeadResults:
    """The results of several groups of heads as one: the arrays side by side, with those of uniform attention of the same
    heads, and of each check the one that came nearest to its tolerance, or passed it most."""
    heads = tuple(head for part in parts for head in part.heads)
    arrays = {name: torch.cat([part.arrays[name] for part in parts], dim=1) for name in parts[0].arrays}
    for name, array in uniform_arrays(baseline, axes, statistics_request).items():
        arrays[name] = array if array.shape[1] == 1 else array[:, [head.head for head in heads]]
    checks = tuple(worst_check(same) for same in zip(*(part.checks for part in parts), strict=True))
    reducers = tuple(dict.fromkeys(reducer for part in parts for reducer in part.reducers))
    return HeadResults(heads, arrays, parts[0].kernel, checks, reducers)


def make_summary(
    results: HeadResults,
    wanted: Run,
    *,
    axes: Axes,
    statistics_request: StatisticsRequest,
    peak_bytes: int,
    full_bytes: int,
) -> HeadsSummary:
    """How the heads were reduced, and whether it holds, as a record tells it."""
    return HeadsSummary(
        block=statistics_request.block,
        steps=profile_steps(axes),
        patterns=tuple(pattern.text for pattern in wanted.statistics.conditions),
        sink_tokens=wanted.statistics.first_tokens,
        sink_share=wanted.statistics.sink_weight,
        kernel=results.kernel,
        reducer=" and ".join(dict.fromkeys(chosen.reducer for chosen in results.reducers)),
        torch_because="; ".join(chosen.reason for chosen in results.reducers if chosen.reason) or None,
        checks=results.checks,
        peak_bytes=peak_bytes,
        full_bytes=full_bytes,
        kept=wanted.kept,
    )


def _overflow(heads: range, is_lost: Bool[Tensor, "batch head query"], axes: Axes) -> MhaError:
    """What to say of scores so large that the weights of a query do not add up, and in which heads."""
    of_heads = is_lost.any(dim=-1).any(dim=0).expand(len(heads)).tolist()
    named = ", ".join(str(head) for head, is_bad in zip(heads, of_heads, strict=True) if is_bad)
    return MhaError(
        f"the scores of head {named} are too large for {axes.dtype}: some rows of weights do not sum to 1",
        hint="--dtype float64 or a smaller --scale may help; --allow-nonfinite continues anyway",
        code="not-finite",
    )


def _arrays(statistics: Statistics, axes: Axes, statistics_request: StatisticsRequest) -> dict[str, Tensor]:
    """The vectors, the map and the masses between spans as records keep them; NaN for queries without keys."""
    seen = has_keys(statistics)
    per_query = {
        "entropy": statistics.entropy,
        "participation": 1 / statistics.squares,
        "distance": statistics.distance,
        "sink": statistics.first,
    }
    return {
        **{name: torch.where(seen, row, torch.nan) for name, row in per_query.items()},
        "received": statistics.received,
        "map": map_of(statistics, statistics_request.block),
        "profile": profile_of(statistics, axes),
        **between_of(statistics, statistics_request, "span_mass"),
    }


def between_of(statistics: Statistics, statistics_request: StatisticsRequest, name: str) -> dict[str, Tensor]:
    """The mean share that a query of each span gives each span, by name; nothing where there are no spans."""
    if statistics_request.q_spans is None:
        return {}
    seen = has_keys(statistics)[:, :, None] & statistics_request.q_spans[:, None]
    return {name: statistics.between / seen.sum(dim=-1).clamp(min=1)[..., None]}


def uniform_arrays(baseline: Baseline, axes: Axes, statistics_request: StatisticsRequest) -> dict[str, Tensor]:
    """What a record keeps of uniform attention, with a head axis of 1 where it holds for all."""
    arrays = {
        "visible": baseline.visible.to(torch.int64),
        "uniform_map": map_of(baseline.statistics, statistics_request.block),
        "uniform_received": baseline.statistics.received,
        "uniform_profile": profile_of(baseline.statistics, axes),
        **between_of(baseline.statistics, statistics_request, "uniform_span_mass"),
    }
    return {name: array.cpu() for name, array in arrays.items()}


def map_of(statistics: Statistics, block: int) -> Float[Tensor, "batch head query_block key_block"]:
    """The mean share that the queries of a block give a block of keys; queries without keys do not count."""
    seen = has_keys(statistics).to(statistics.map.dtype)
    n_seen = torch.nn.functional.pad(seen, (0, -seen.shape[-1] % block)).unflatten(-1, (-1, block)).sum(dim=-1)
    means: Tensor = statistics.map / n_seen.clamp(min=1)[..., None]
    return means


def profile_of(statistics: Statistics, axes: Axes) -> Float[Tensor, "batch head step"]:
    """The share of all mass at each distance, in the bins of `profile_steps`."""
    zero, steps = axes.q_len - 1, profile_steps(axes)
    rows = [in_steps(distances_folded(profile, zero), steps) for profile in statistics.profile]
    masses: Tensor = statistics.mass.double().sum(dim=-1)[..., None].clamp(min=1)
    return torch.stack(rows) / masses


def profile_steps(axes: Axes) -> tuple[int, ...]:
    """The upper ends of the distances in a profile."""
    return doubling_steps(max(axes.q_len, axes.k_len) - 1)


def _cells(pattern: PatternTiles, kept: Kept) -> dict[str, Tensor]:
    """The requested cells, by sequence and head: a corner, and the strongest keys of queries."""
    arrays = {}
    places = [[(b, h) for h in range(pattern.shape[1])] for b in range(pattern.shape[0])]
    if kept.corner is not None:
        c = kept.corner
        spans = (range(c.first_query, c.first_query + c.n_queries), range(c.first_key, c.first_key + c.n_keys))
        weights = torch.stack([torch.stack([weights_of(pattern, p, *spans) for p in row]) for row in places])
        seen = visible_cells(pattern.allowed, *(indices(span, weights) for span in spans))
        arrays["corner"] = weights if seen is None else torch.where(seen, weights, torch.nan)
    if kept.queries:
        tops = [[_top_keys(pattern, p, kept) for p in row] for row in places]
        arrays["top_shares"], arrays["top_keys"] = (
            torch.stack([torch.stack([top[part] for top in row]) for row in tops]) for part in (0, 1)
        )
    return arrays


def _top_keys(pattern: PatternTiles, batch_head: tuple[int, int], kept: Kept) -> tuple[Tensor, Tensor]:
    """The largest weights of each requested query and their keys, −1 where a share is 0."""
    keys = range(pattern.shape[3])
    n_keys = min(kept.top, len(keys))
    rows = pattern.of_queries(torch.tensor(kept.queries, device=pattern.like.device))
    weights, found = weights_of(rows, batch_head, range(len(kept.queries)), keys).topk(n_keys, dim=1)
    return weights, torch.where(weights > 0, found, -1)


def check_statistics(
    attention: AttentionResult, statistics: Statistics, top_score: Tensor, axes: Axes
) -> tuple[Check, ...]:
    """What must hold of any statistics: it notices a wrong base of the logarithm, head or mask.

    Every query gives 1 in all, a sink logit's weight among it, so that what the keys receive and the maps add up to the
    rest; and z of some queries, from their weights, is what was computed. The tolerance is that of weights whose scores are
    rounded in the dtype of the maths, and for z that of the dtype. Where q, k or v are not finite, what is not finite is
    passed over.
    """
    sink_mass, seen = attention.sink_mass, has_keys(statistics)
    given = seen.double() if sink_mass is None else torch.where(seen, 1 - sink_mass.double(), 0.0)
    n_given = given.sum(dim=-1)
    largest = top_score.masked_fill(~seen, 0.0).abs().amax().item()
    rounding = _rounding(statistics.mass.dtype, largest, of_scores=attention.pattern.like.dtype)
    sums = {
        ROW_SUMS: (statistics.mass - given).abs().amax(dim=-1).double(),
        COLUMN_TOTALS: (statistics.received.double().sum(dim=-1) - n_given).abs() / n_given.clamp(min=1),
        MAP_TOTALS: (statistics.map.double().sum(dim=(-1, -2)) - n_given).abs() / n_given.clamp(min=1),
    }
    if not attention.is_finite:
        sums = {name: error.nan_to_num(nan=0.0) for name, error in sums.items()}
    checks = [Check.of(error.max().item(), rounding, name=name, rounding=0.0) for name, error in sums.items()]
    if attention.v is None:
        return tuple(checks)
    is_single = axes.dtype != "float64" or attention.kernel == "eager"  # whose softmax is in float32 whatever the dtype
    kernel_dtype = torch.float32 if is_single else torch.float64
    of_kernel = _rounding(kernel_dtype, largest, of_scores=kernel_dtype)
    return (*checks, _check_z(attention, attention.v, axes, max(rounding, of_kernel) + TOLERANCES[axes.dtype].output))


def _rounding(dtype: torch.dtype, largest: float, *, of_scores: torch.dtype) -> float:
    """How far weights in a dtype may be off whose scores, the largest of this size, are rounded in one of their own."""
    of_weights = TOLERANCES[str(dtype).removeprefix("torch.")].output
    return min(_MOST_OF_SUMS, of_weights + 16 * torch.finfo(of_scores).eps * largest)


def _check_z(attention: AttentionResult, v: Tensor, axes: Axes, rounding: float) -> Check:
    """z of spread queries from their weights and the values. The rounding of a sum grows with the square root of its length.
    Source: Higham and Mary 2019, "A new approach to probabilistic rounding error analysis", theorem 3.1.

    Where scores are so large that weights are made in float64, a query may be as far off besides as the rounding of the kernel's
    own scores can move it, and the check says by how much.
    """
    errors, magnitude, moved = _z_again(attention, v, axes)
    usual = rounding * magnitude * max(1.0, (attention.pattern.shape[3] / MEASURED_KEYS) ** 0.5)
    allowed = usual + torch.where(errors > usual, moved, 0.0)
    worst = int((errors / allowed.clamp(min=torch.finfo(torch.float64).tiny)).argmax())
    error, tolerance = errors[worst].item(), allowed[worst].item()
    of_scores = allowed.amax().item() - usual if error <= tolerance else 0.0
    return Check.of(error, tolerance, name=HEAD_OUTPUTS, rounding=of_scores)


def _z_again(attention: AttentionResult, v: Tensor, axes: Axes) -> tuple[Tensor, float, Tensor]:
    """The largest distance of z from the sums of weights and values for each of some spread queries, the largest magnitude of
    all, and how far the rounding of scores may move each. z that was made with the weights is compared with `attend` too."""
    pattern = attention.known_pattern
    batch, n_heads, _, n_keys = pattern.shape
    group, errors, moved, magnitude = n_heads // v.shape[1], [], [], 0.0
    for b in range(batch):
        queries = _checked(axes.first_query(b), len(axes.queries[b].ids))
        rows = pattern.of_queries(torch.tensor(queries, device=v.device))
        for batch_head in ((b, h) for h in range(n_heads)):
            weights = weights_of(rows, batch_head, range(len(queries)), range(n_keys)).double()
            values = v[b, batch_head[1] // group].double()
            kernel_z = attention.z[batch_head][queries].double()
            apart = _apart(kernel_z, weights @ values)
            if attention.kernel == TILES:
                assert isinstance(rows, VirtualPattern)  # of scores
                apart = torch.maximum(apart, _apart(kernel_z, rows.scores.defined_z(batch_head, v)))
            errors.append(apart.cpu())
            moved.append(_moved(pattern, batch_head, queries, weights, values).cpu())
            magnitude = max(magnitude, (weights @ values.abs()).nan_to_num(nan=0.0, posinf=0.0).amax().item())
    return torch.cat(errors), magnitude, torch.cat(moved)


def _apart(z: Tensor, other: Tensor) -> Float[Tensor, " query"]:
    """How far z of some queries is from another computation of it; ∞ where only one of both is finite."""
    both = z.isfinite() & other.isfinite()
    apart = torch.where(both, (other - z).abs(), 0.0)
    return torch.where(z.isfinite() != other.isfinite(), torch.inf, apart).amax(dim=1)


def _moved(
    pattern: PatternTiles, batch_head: tuple[int, int], queries: list[int], weights: Tensor, values: Tensor
) -> Float[Tensor, " query"]:
    """How far z of some queries may move when their scores are rounded in float32, where these are large; else 0.

    A dot product of n numbers is off by E = n u Σ|q||k| at most, whatever the order of summing, with u = 2⁻²⁴. So a share is
    off by a factor between e^−E and e^E, and z by Σ p (e^E − 1) |v − z| / Σ p e^−E. Source: Higham 2002, "Accuracy and
    Stability of Numerical Algorithms", section 3.1. Two more roundings are those of the scale and of the score itself.
    """
    scores = pattern.scores if isinstance(pattern, VirtualPattern) else None
    if scores is None or not scores.is_wide:
        return weights.new_zeros(len(weights))
    (b, h), group = batch_head, scores.q.shape[1] // scores.k.shape[1]
    products = scores.q[b, h, queries].double().abs() @ scores.k[b, h // group].double().abs().mT
    off = ((scores.q.shape[3] + 2) * torch.finfo(torch.float32).eps / 2 * abs(scores.scale) * products).clamp(
        max=_MOST_OFF
    )
    least = (weights * (-off).exp()).sum(dim=1)
    apart = [(values - z).abs().amax(dim=1) for z in weights @ values]
    sums = torch.stack([(p * e.expm1() * away).sum() for p, e, away in zip(weights, off, apart, strict=True)])
    farthest = torch.stack([away.amax() for away in apart])
    return torch.minimum(sums / least.clamp(min=torch.finfo(torch.float64).tiny), farthest)


_MOST_OFF = 300.0
"""An exponent beyond which nothing is known of a share; e to its power is still a number."""


def _checked(first: int, n: int) -> list[int]:
    """Of `n` columns from the first one on all of a few, or some, evenly spread."""
    if n <= CHECKED_WHOLE:
        return list(range(first, first + n))
    positions: list[int] = torch.linspace(0, n - 1, CHECKED_ROWS, dtype=torch.float64).round().long().tolist()
    return [first + position for position in positions]
