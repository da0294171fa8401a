"""What `mha bench` found, as data (`mha.bench/1`), and its comparison with an earlier result."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from mhacli.errors import MhaError, UsageError
from mhacli.io.files import read_whole
from mhacli.io.json_schema import decode, load_json
from mhacli.results.bench.workload import Sweep, Workload, expected_flops, expected_moved_bytes
from mhacli.results.record.record import Environment
from mhacli.spec.config import Dtype

SCHEMA = "mha.bench/1"
MAX_FILE_BYTES = 256 << 20
_LEAST, _MOST = 1e-12, 1e12
"""Of times and rates in a file: ratios of what lies between are finite."""

BackendStatus = Literal["ok", "unsupported", "out-of-memory", "too-large", "too-slow", "failed"]
"""`too-large` and `too-slow` were predicted and not tried, `out-of-memory` was tried; `unsupported` cannot run, `failed`
should have."""
Limit = Literal["compute", "memory"]


@dataclass(frozen=True)
class MachinePeak:
    """What the machine reached in this run, the best of several: a matrix product and a copy (read and written bytes)."""

    dtype: Dtype
    matmul_tflops: float
    copy_gb_per_s: float

    def floor_s(self, flops: int, moved_bytes: int) -> tuple[float, Limit]:
        """The least time for so much work, and what sets it."""
        compute, memory = flops / (self.matmul_tflops * 1e12), moved_bytes / (self.copy_gb_per_s * 1e9)
        return (compute, "compute") if compute >= memory else (memory, "memory")

    def or_higher(self, other: MachinePeak) -> MachinePeak:
        """The better rate of two measurements, one by one."""
        matmul, copy = max(self.matmul_tflops, other.matmul_tflops), max(self.copy_gb_per_s, other.copy_gb_per_s)
        return MachinePeak(self.dtype, matmul, copy)


@dataclass(frozen=True)
class BenchEnvironment(Environment):
    """Where it ran, and how busy the machine was when it began."""

    cpu_name: str
    n_cpus: int
    driver: str | None
    load_average: float | None


@dataclass(frozen=True)
class BenchRow(Workload):
    """One backend at one size. Times are None where `status` is not ok, and `reason` says why.

    `ran` is the kernel that was seen to run; `is_fallback`: it is an unfused one where a fused one was hoped for.
    `n_calls` calls make one sample. `low` and `high` are the 95 % interval of a median, or of the ratio to the control.
    Without `is_sure`, too few rounds or others on the same CPUs keep the row from being ranked.
    """

    backend: str
    status: BackendStatus
    predicted_bytes: int
    reason: str | None = None
    ran: str | None = None
    is_fallback: bool = False
    first_s: float | None = None
    n_calls: int = 0
    samples_s: tuple[float, ...] = ()
    median_s: float | None = None
    median_low_s: float | None = None
    median_high_s: float | None = None
    p25_s: float | None = None
    p75_s: float | None = None
    min_s: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    is_sure: bool = True
    is_similar: bool = False
    is_fastest: bool = False
    limit: Limit | None = None
    share_of_peak: float | None = None
    extra_bytes: int | None = None
    max_error: float | None = None
    mean_error: float | None = None
    n_error_queries: int = 0

    @property
    def flops(self) -> int:
        """Operations that the backend has to do, projections included where it has them."""
        return expected_flops(self.backend, self)

    @property
    def moved_bytes(self) -> int:
        """Bytes that it has to move at least."""
        return expected_moved_bytes(self.backend, self)

    @property
    def tflops(self) -> float | None:
        """Operations in 1e12 per second, at the median."""
        return None if self.median_s is None else self.flops / self.median_s / 1e12

    @property
    def interval(self) -> Interval | None:
        """The median of seconds with its interval."""
        return _interval(self.median_s, self.median_low_s, self.median_high_s)

    @property
    def ratio_interval(self) -> Interval | None:
        """The ratio to the control's backend with its interval."""
        return _interval(self.ratio, self.ratio_low, self.ratio_high)

    @property
    def key(self) -> tuple[object, ...]:
        """What two runs must share for their rows to be compared."""
        return (self.backend, *workload_of(self).__dict__.values())

    def under(self, ceiling: MachinePeak) -> BenchRow:
        """The row with the share of the machine that it reached, and which of the two limits binds it."""
        if self.median_s is None:
            return self
        floor_s, limit = ceiling.floor_s(self.flops, self.moved_bytes)
        return dataclasses.replace(self, limit=limit, share_of_peak=floor_s / self.median_s)

    def document(self) -> dict[str, Any]:
        """The row as JSON values, with what follows from it."""
        derived = {
            "n_samples": len(self.samples_s),
            "flops": self.flops,
            "bytes": self.moved_bytes,
            "flops_per_byte": self.flops / self.moved_bytes,
            "tflops": self.tflops,
        }
        return dataclasses.asdict(self) | derived


@dataclass(frozen=True)
class NoiseBaseline(Workload):
    """One backend against itself, timed in the same rounds: the noise that a ratio must rise above.

    `foreign_load` is how many CPUs others kept busy meanwhile; None where the system does not tell.
    """

    backend: str
    samples_s: tuple[float, ...]
    median_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    foreign_load: float | None = None

    @property
    def interval(self) -> Interval:
        """The ratio with its interval."""
        return Interval(self.ratio, self.ratio_low, self.ratio_high)


@dataclass(frozen=True)
class Benchmark:
    """A whole run of `mha bench`."""

    command: tuple[str, ...]
    seed: int
    environment: BenchEnvironment
    sweep: Sweep
    ceilings: tuple[MachinePeak, ...]
    rows: tuple[BenchRow, ...]
    controls: tuple[NoiseBaseline, ...]

    def control(self, workload: Workload) -> NoiseBaseline | None:
        """The control of a size; None where nothing could be timed."""
        return next((c for c in self.controls if workload_of(c) == workload_of(workload)), None)

    def document(self) -> dict[str, Any]:
        """The run as JSON values; non-finite numbers do not occur."""
        rows = [row.document() for row in self.rows]
        return {"schema": SCHEMA} | dataclasses.asdict(dataclasses.replace(self, rows=())) | {"rows": rows}

    def to_json(self) -> str:
        """The document, a row per line."""
        lines = []
        for name, value in self.document().items():
            if name in ("rows", "controls"):
                inner = ",\n".join(_dump(item) for item in value)
                lines.append(f"{json.dumps(name)}:[\n{inner}]" if value else f"{json.dumps(name)}:[]")
            else:
                lines.append(f"{json.dumps(name)}:{_dump(value)}")
        return "{" + ",\n".join(lines) + "}\n"


def read_benchmark(path: str) -> Benchmark:
    """The run in a JSON file. Raises `MhaError` for a file that cannot be read, or is of another schema."""
    document = load_json(read_whole(path, MAX_FILE_BYTES), path)
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise MhaError(
            f"{path} must be a benchmark (schema {SCHEMA}), got {'no schema' if schema is None else repr(schema)[:80]}",
            hint="mha bench --save-baseline FILE writes one",
            code="bad-file",
            path=path,
        )
    benchmark = decode(Benchmark, document, path)
    for place, row in enumerate(benchmark.rows):
        times = (row.median_s, row.median_low_s, row.median_high_s)
        is_timed = row.status == "ok" or row.interval is not None
        if is_timed and not all(time is not None and _LEAST <= time <= _MOST for time in times):
            raise _refusal(path, f"rows[{place}] must have times from {_LEAST:g} to {_MOST:g} s", times)
        if row.samples_s and not _LEAST <= min(row.samples_s) <= max(row.samples_s) <= _MOST:
            extremes = min(row.samples_s), max(row.samples_s)
            raise _refusal(path, f"rows[{place}] must have samples from {_LEAST:g} to {_MOST:g} s", extremes)
    for place, ceiling in enumerate(benchmark.ceilings):
        rates = (ceiling.matmul_tflops, ceiling.copy_gb_per_s)
        if not all(_LEAST <= rate <= _MOST for rate in rates):
            raise _refusal(path, f"ceilings[{place}] must have rates from {_LEAST:g} to {_MOST:g}", rates)
    return benchmark


def workload_of(row: Workload) -> Workload:
    """The size of a row, without what was measured."""
    return Workload(**{f.name: getattr(row, f.name) for f in dataclasses.fields(Workload)})


def _interval(median: float | None, low: float | None, high: float | None) -> Interval | None:
    return None if median is None or low is None or high is None else Interval(median, low, high)


def _refusal(path: str, rule: str, got: tuple[float | None, ...]) -> MhaError:
    return MhaError(f"{path}: {rule}, got {', '.join(map(str, got))}", code="bad-file", path=path)


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


# ------------------------------------------------------------------------------------ how far a median can be believed


CONFIDENCE = 0.95
"""The probability that an interval holds the true median; fewer than six samples cannot reach it."""


class Interval(NamedTuple):
    """A median, and between which numbers it lies."""

    median: float
    low: float
    high: float

    def overlaps(self, other: Interval) -> bool:
        """Whether both may mean the same number."""
        return self.low <= other.high and other.low <= self.high

    @property
    def relative_width(self) -> float:
        """The larger of the two distances from the median to the ends, as a share of the median."""
        return max(self.high - self.median, self.median - self.low) / self.median if self.median else 0.0


def median_interval(samples: Sequence[float]) -> Interval:
    """The median and its interval of 95 %, whatever the distribution: from the k-th smallest to the k-th largest sample.

    With fewer than six samples, the smallest and the largest (`reached_confidence` says what that is worth). Source:
    David and Nagaraja 2003, "Order Statistics", section 7.1.

    >>> median_interval([4.0, 1.0, 3.0, 2.0, 9.0, 5.0])
    Interval(median=3.5, low=1.0, high=9.0)
    """
    ordered = sorted(samples)
    k, _ = _rank(len(ordered))
    return Interval(statistics.median(ordered), ordered[k], ordered[-1 - k])


def reached_confidence(n_samples: int) -> float:
    """The probability that the interval of so many samples holds the true median: at most `CONFIDENCE` is asked for."""
    return _rank(n_samples)[1]


def is_known(n_samples: int) -> bool:
    """Whether so many samples are enough to tell two medians apart with the confidence that intervals promise."""
    return reached_confidence(n_samples) >= CONFIDENCE


def paired_ratio(samples: Sequence[float], reference: Sequence[float]) -> Interval:
    """The median of the ratios, round by round, and its interval: what slows a whole round down cancels."""
    return median_interval([ours / theirs for ours, theirs in zip(samples, reference, strict=True)])


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """The 25th and 75th percentile, inclusive; the sample itself where there is one."""
    if len(samples) == 1:
        return samples[0], samples[0]
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high


@cache
def _rank(n: int) -> tuple[int, float]:
    """How many samples to leave out at each end, the most that keep the confidence, and the confidence that is left."""
    k, half = 0, 2 ** (n - 1)
    exactly = at_most = 1  # ways in which so many samples fall below the median: k of them, and k or fewer
    while k + 1 <= (n - 1) // 2:
        exactly = exactly * (n - k) // (k + 1)
        if 1 - (at_most + exactly) / half < CONFIDENCE:
            break
        k, at_most = k + 1, at_most + exactly
    return k, 1 - at_most / half


# ------------------------------------------------------------------------------------------- against an earlier result


SpeedVerdict = Literal["slower", "faster", "similar"]
FailIfOutcome = Literal["slower", "inconclusive", "passed"]
_SAME = ("device_name", "cpu_name", "n_cpus", "threads", "driver", "torch", "python", "platform", "mha")
_SAME_RATE = 1.1
"""Machines whose matrix products or copies differ by more than this factor are told apart."""


@dataclass(frozen=True)
class TimeChange(Workload):
    """The time of a row as a ratio to the baseline's, above 1 = slower, between the ends of both medians' intervals. Ratios up to
    `noise_high` are what the machine's own noise makes of 1."""

    backend: str
    baseline_s: float
    median_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    verdict: SpeedVerdict
    noise_high: float = 1.0

    def shows_from(self, limit: float) -> float:
        """The smallest true ratio at which an interval as wide as this one would lie above a limit, and above the noise."""
        return max(limit, self.noise_high if limit >= 1 else 0.0) * self.ratio / self.ratio_low


@dataclass(frozen=True)
class UndecidedRow:
    """A row whose interval holds the limit: it may be slower, and may be not. `shows_from` as of `TimeChange`."""

    backend: str
    name: str
    ratio: float
    ratio_low: float
    ratio_high: float
    shows_from: float


@dataclass(frozen=True)
class FailIfResult:
    """What the rule `slower:LIMIT` says: `slower` where a time is surely above it, `passed` where each is surely at most that,
    else `inconclusive`."""

    limit: float
    outcome: FailIfOutcome
    undecided: tuple[UndecidedRow, ...]


@dataclass(frozen=True)
class BaselineComparison:
    """What changed, what cannot be compared, and what to beware of; and what the rule says, where there is one."""

    baseline: str
    changes: tuple[TimeChange, ...]
    broken: tuple[str, ...]
    unmatched: tuple[str, ...]
    warnings: tuple[str, ...]
    rule: FailIfResult | None = None

    def ruled(self, limit: float) -> BaselineComparison:
        """The same with what the rule `slower:LIMIT` says of it."""
        slow = too_slow(self, limit)
        undecided = tuple(
            UndecidedRow(c.backend, c.name, c.ratio, c.ratio_low, c.ratio_high, c.shows_from(limit))
            for c in self.changes
            if c not in slow and c.ratio_high > limit
        )
        outcome: FailIfOutcome = "slower" if slow or self.broken else "inconclusive" if undecided else "passed"
        return dataclasses.replace(self, rule=FailIfResult(limit, outcome, undecided))

    def milder(self, again: BaselineComparison) -> BaselineComparison:
        """The same, with each change that was measured again replaced by the smaller ratio of the two."""
        seconds = {(change.backend, workload_of(change)): change for change in again.changes}
        both = [(change, seconds.get((change.backend, workload_of(change)), change)) for change in self.changes]
        return dataclasses.replace(self, changes=tuple(min(pair, key=lambda change: change.ratio) for pair in both))

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)


def compare(now: Benchmark, baseline: Benchmark, path: str) -> BaselineComparison:
    """Every row of `now` beside the same row of the baseline.

    The interval runs from the quickest that is likely now by the slowest that was likely then to the reverse. It holds the
    noise within each run; that between them is in the verdict: a change is `similar` where it overlaps what the controls of
    both runs, and the rates of the machine's own matrix product and copy then and now, show to be noise.
    """
    then = {row.key: row for row in baseline.rows}
    changes, broken, unmatched = [], [], []
    for row in now.rows:
        before = then.pop(row.key, None)
        if before is None:
            unmatched.append(f"{row.backend}, {row.name}: not in {path}")
        elif row.interval is not None and before.interval is not None:
            changes.append(_change(row, row.interval, _timed(before), _noise(row, now, baseline)))
        elif before.interval is not None:
            broken.append(f"{row.backend}, {row.name}: {row.status} now ({row.reason})")
    unmatched += [f"{row.backend}, {row.name}: not measured now" for row in then.values()]
    return BaselineComparison(path, tuple(changes), tuple(broken), tuple(unmatched), tuple(_warnings(now, baseline)))


def parse_rule(word: str) -> float:
    """The ratio of `slower:RATIO`. Raises `UsageError` with the form."""
    match = re.fullmatch(r"slower:([0-9]{1,6}(?:\.[0-9]{1,9})?)", word.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"fail-if must be slower:RATIO such as slower:1.10, got {word[:40]!r}")
    return float(match[1])


def too_slow(comparison: BaselineComparison, ratio: float) -> tuple[TimeChange, ...]:
    """The changes whose whole interval lies above a ratio, less those that are like the noise where the ratio is not below 1."""
    above = (change for change in comparison.changes if change.ratio_low > ratio)
    return tuple(change for change in above if ratio < 1 or change.verdict == "slower")


def _change(row: BenchRow, now: Interval, then: Interval, noise: Interval) -> TimeChange:
    ratio = Interval(now.median / then.median, now.low / then.high, now.high / then.low)
    verdict: SpeedVerdict = "similar" if ratio.overlaps(noise) else "slower" if ratio.median > 1 else "faster"
    return TimeChange(
        **dataclasses.asdict(workload_of(row)), backend=row.backend, baseline_s=then.median, median_s=now.median,
        ratio=ratio.median, ratio_low=ratio.low, ratio_high=ratio.high, verdict=verdict,
        noise_high=noise.high,
    )  # fmt: skip


def _timed(row: BenchRow) -> Interval:
    """The median that a file states, with the relative width that its samples have."""
    stated = row.interval
    assert stated is not None  # the caller asked
    if not row.samples_s:
        return stated
    recomputed = median_interval(row.samples_s)
    factor = stated.median / recomputed.median
    return Interval(stated.median, recomputed.low * factor, recomputed.high * factor)


def _noise(row: BenchRow, now: Benchmark, baseline: Benchmark) -> Interval:
    """What a ratio of 1 looks like: in the controls of both runs, and in how the machine's own rates have moved."""
    ratios = [1.0]
    for control in (now.control(row), baseline.control(row)):
        ratios += [] if control is None else [control.interval.low, control.interval.high]
    ours, theirs = ({c.dtype: c for c in run.ceilings}.get(row.dtype) for run in (now, baseline))
    if ours is not None and theirs is not None:
        ratios += [theirs.matmul_tflops / ours.matmul_tflops, theirs.copy_gb_per_s / ours.copy_gb_per_s]
    return Interval(1.0, min(ratios), max(ratios))


def _warnings(now: Benchmark, baseline: Benchmark) -> list[str]:
    warnings = []
    for name in _SAME:
        ours, theirs = getattr(now.environment, name), getattr(baseline.environment, name)
        if ours != theirs:
            warnings.append(f"{name} differs: {theirs} then, {ours} now")
    if now.seed != baseline.seed:
        warnings.append(f"seed differs: {baseline.seed} then, {now.seed} now")
    fewest = min((len(row.samples_s) for run in (now, baseline) for row in run.rows if row.samples_s), default=0)
    if fewest and not is_known(fewest):
        warnings.append(
            f"intervals of {CONFIDENCE * 100:.0f} % need more than {fewest} rounds: these are the whole range"
        )
    then = {ceiling.dtype: ceiling for ceiling in baseline.ceilings}
    for ceiling in now.ceilings:
        if ceiling.dtype in then:
            other = then[ceiling.dtype]
            warnings += _rate("matrix product", ceiling.matmul_tflops / other.matmul_tflops, ceiling.dtype)
            warnings += _rate("copy", ceiling.copy_gb_per_s / other.copy_gb_per_s, ceiling.dtype)
    return warnings


def _rate(what: str, ratio: float, dtype: str) -> list[str]:
    if 1 / _SAME_RATE <= ratio <= _SAME_RATE:
        return []
    return [f"the machine's own {dtype} {what} runs {ratio:.2f} times as fast as then: a busier or other machine"]
