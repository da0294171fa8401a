"""The result of `mha bench` as data (`mha.bench/1`) and as a summary."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from mhacli.commands.bench.workload import Sweep, Workload, expected_flops, expected_moved_bytes
from mhacli.errors import MhaError
from mhacli.io.files import read_whole
from mhacli.io.json_schema import decode, load_json
from mhacli.record.display import Shown
from mhacli.record.intervals import MIN_ROUNDS, Interval, is_sufficient, paired_ratio, ratio_text
from mhacli.record.record import Environment
from mhacli.settings import Dtype

SCHEMA = "mha.bench/1"
MAX_FILE_BYTES = 256 << 20
_LEAST, _MOST = 1e-12, 1e12
"""Bounds of times and rates in a file, within which all ratios are finite."""

BackendStatus = Literal["ok", "unsupported", "out-of-memory", "too-large", "too-slow", "failed"]
"""`too-large` and `too-slow` were predicted and not tried; `out-of-memory` was tried; `unsupported` cannot run;
`failed` should have run."""
Limit = Literal["compute", "memory"]


@dataclass(frozen=True)
class MachinePeak:
    """The machine's best rates in this run: of a matrix product, and of a copy (bytes read and written)."""

    dtype: Dtype
    matmul_tflops: float
    copy_gb_per_s: float

    def floor_s(self, flops: int, moved_bytes: int) -> tuple[float, Limit]:
        """The least time for this work, and which rate limits it."""
        compute, memory = flops / (self.matmul_tflops * 1e12), moved_bytes / (self.copy_gb_per_s * 1e9)
        return (compute, "compute") if compute >= memory else (memory, "memory")

    def or_higher(self, other: MachinePeak) -> MachinePeak:
        """The better of two measurements, rate by rate."""
        matmul, copy = max(self.matmul_tflops, other.matmul_tflops), max(self.copy_gb_per_s, other.copy_gb_per_s)
        return MachinePeak(self.dtype, matmul, copy)


@dataclass(frozen=True)
class BenchEnvironment(Environment):
    """The environment of the run, and the load of the machine at its beginning."""

    cpu_name: str
    n_cpus: int
    driver: str | None
    load_average: float | None


@dataclass(frozen=True)
class BenchRow(Workload):
    """One backend at one size. Without status `ok` the times are None, and `reason` says why.

    `ran` is the observed kernel; `is_fallback`: it is unfused although a fused kernel was expected. One sample has
    `n_calls` calls. `ratio` is the median ÷ that of the fastest row of the size. `low` and `high` are the 95 % interval
    of a median or ratio. `is_similar`: the interval of the ratio overlaps the control's `noise`. Without `is_sure`, too
    few rounds, or other processes on the same CPUs, prevent the row from being marked as the fastest.
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
        """The operations of the backend, with any projections."""
        return expected_flops(self.backend, self)

    @property
    def moved_bytes(self) -> int:
        """The least bytes that the backend must move."""
        return expected_moved_bytes(self.backend, self)

    @property
    def tflops(self) -> float | None:
        """Operations in 1e12 per second, at the median."""
        return None if self.median_s is None else self.flops / self.median_s / 1e12

    @property
    def interval(self) -> Interval | None:
        """The median seconds with their interval."""
        return _interval(self.median_s, self.median_low_s, self.median_high_s)

    @property
    def ratio_interval(self) -> Interval | None:
        """The ratio to the fastest row with its interval."""
        return _interval(self.ratio, self.ratio_low, self.ratio_high)

    @property
    def key(self) -> tuple[object, ...]:
        """The fields that must be equal for rows of two runs to be compared."""
        return (self.backend, *workload_of(self).__dict__.values())

    def under(self, ceiling: MachinePeak) -> BenchRow:
        """The row with its fraction of the machine's peak, and which peak limits it."""
        if self.median_s is None:
            return self
        floor_s, limit = ceiling.floor_s(self.flops, self.moved_bytes)
        return dataclasses.replace(self, limit=limit, share_of_peak=floor_s / self.median_s)

    def document(self) -> dict[str, Any]:
        """The row as JSON values, with derived numbers."""
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
    """One backend timed against itself in the same rounds: the noise that a ratio must exceed.

    `foreign_load` is the number of CPUs that other processes kept busy; None if the system does not report it.
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

    @property
    def noise(self) -> float:
        """The largest ratio within the noise, whichever of the two timings was slower."""
        return max(1.0, self.ratio_high, 1 / max(self.ratio_low, _LEAST))

    def document(self) -> dict[str, Any]:
        """The control as JSON values, with derived numbers."""
        return dataclasses.asdict(self) | {"noise": self.noise}


@dataclass(frozen=True, repr=False)
class Benchmark(Shown):
    """A complete run of `mha bench`."""

    command: tuple[str, ...]
    seed: int
    environment: BenchEnvironment
    sweep: Sweep
    ceilings: tuple[MachinePeak, ...]
    rows: tuple[BenchRow, ...]
    controls: tuple[NoiseBaseline, ...]

    def views(self, screen: Any) -> Iterator[Any]:
        """What `mha bench` prints on a screen."""
        from mhacli.commands.bench.view import bench_view

        yield bench_view(self, None, screen)

    def __repr__(self) -> str:
        """One line that names the fastest backend."""
        return f"<Benchmark: {'; '.join(self.summary)}>"

    def control(self, workload: Workload) -> NoiseBaseline | None:
        """The control of a size; None if nothing could be timed."""
        return next((c for c in self.controls if workload_of(c) == workload_of(workload)), None)

    @property
    def summary(self) -> tuple[str, ...]:
        """One sentence per family of sizes: the fastest backend, its margin, and whether that is certain."""
        families: dict[str, list[_Ranked]] = {}
        for row in self.rows:
            if row.ratio_interval is not None:
                families.setdefault(row.family, []).append(_Ranked(row, row.ratio_interval))
        sentences = {family: self._sentence(_longest(rows)) for family, rows in families.items()}
        if len(sentences) < 2:
            return tuple(sentences.values()) or ("nothing could be timed",)
        return tuple(f"{family}: {sentence}" for family, sentence in sentences.items())

    def _sentence(self, rows: Sequence[_Ranked]) -> str:
        """The fastest backend of a size against `explicit`, the plain formula, or else against the slowest."""
        (first, _), *others = sorted(rows, key=lambda ranked: ranked.row.median_s or 0.0)
        size = first.length_text
        if not others:
            return f"{first.backend} takes {_time_text(first)} at {size}; no other backend was timed"
        other = next((ranked.row for ranked in others if ranked.row.backend == "explicit"), others[-1].row)
        ratio, noise = _pair_ratio(other, first), self._noise(first)
        times = f"{_time_text(other)} against {_time_text(first)}"
        is_enough = is_sufficient(len(first.samples_s))
        interval = f"95 % interval {ratio_text(ratio.low)} to {ratio_text(ratio.high)} ×"
        evidence = f"{times}, {interval}" if is_enough else times
        if ratio.median <= noise:
            return (
                f"{first.backend} and {other.backend} differ by no more than the noise at {size}: ratio "
                f"{ratio_text(ratio.median)} ({evidence}), noise up to {ratio_text(noise)} ×"
            )
        faster = f"{ratio_text(ratio.median)} × faster than {other.backend} at {size}"
        if not is_enough:
            return f"{first.backend} was {faster} ({evidence}), but that is not certain: {self.doubt(first)}"
        if ratio.low <= noise:
            reach = f"the interval reaches into the noise, which goes up to {ratio_text(noise)} ×"
            return f"{first.backend} was {faster} ({evidence}), but that is not certain: {reach}"
        if not first.is_sure:
            return (
                f"{first.backend} was {faster}, beyond noise ({evidence}); the times are uncertain: {self.doubt(first)}"
            )
        return f"{first.backend} is {faster}, beyond noise ({evidence})"

    def _noise(self, row: BenchRow) -> float:
        """The largest ratio within the noise at a row's size."""
        control = self.control(row)
        return 1.0 if control is None else control.noise

    def doubt(self, row: BenchRow) -> str:
        """Why a row is not `is_sure`."""
        if not is_sufficient(len(row.samples_s)):
            return f"it needs {MIN_ROUNDS} rounds or more, and this run has {len(row.samples_s)}"
        control = self.control(row)
        n_cpus = 0.0 if control is None else control.foreign_load or 0.0
        return f"the machine was busy, other processes used {n_cpus:.1f} of its CPUs"

    def to_dict(self) -> dict[str, Any]:
        """The run as JSON values. All numbers are finite."""
        fields = dataclasses.asdict(dataclasses.replace(self, rows=(), controls=()))
        measured = {
            "rows": [row.document() for row in self.rows],
            "controls": [control.document() for control in self.controls],
        }
        return {"schema": SCHEMA, "summary": list(self.summary)} | fields | measured

    def to_json(self) -> str:
        """The JSON document, with one row per line."""
        lines = []
        for name, value in self.to_dict().items():
            if name in ("rows", "controls"):
                inner = ",\n".join(_dump(item) for item in value)
                lines.append(f"{json.dumps(name)}:[\n{inner}]" if value else f"{json.dumps(name)}:[]")
            else:
                lines.append(f"{json.dumps(name)}:{_dump(value)}")
        return "{" + ",\n".join(lines) + "}\n"


def read_benchmark(path: str) -> Benchmark:
    """The benchmark in a JSON file. Raises `MhaError` for an unreadable file or another schema."""
    data = read_whole(path, MAX_FILE_BYTES)
    try:
        document = load_json(data, "it")
    except MhaError as fault:
        raise _not_a_benchmark(path, fault.message) from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        has = "no schema" if schema is None else f"the schema {repr(schema)[:80]}"
        raise _not_a_benchmark(path, f"it has {has}, not {SCHEMA!r}")
    benchmark = decode(Benchmark, document, path)
    for place, row in enumerate(benchmark.rows):
        times = (row.median_s, row.median_low_s, row.median_high_s)
        is_timed = row.status == "ok" or row.interval is not None
        if is_timed and not all(time is not None and _LEAST <= time <= _MOST for time in times):
            raise _out_of_range(path, f"a time of rows[{place}]", f"{_MOST:g} s", times)
        if row.samples_s and not _LEAST <= min(row.samples_s) <= max(row.samples_s) <= _MOST:
            extremes = min(row.samples_s), max(row.samples_s)
            raise _out_of_range(path, f"a sample of rows[{place}]", f"{_MOST:g} s", extremes)
    for place, ceiling in enumerate(benchmark.ceilings):
        rates = (ceiling.matmul_tflops, ceiling.copy_gb_per_s)
        if not all(_LEAST <= rate <= _MOST for rate in rates):
            raise _out_of_range(path, f"a rate of ceilings[{place}]", f"{_MOST:g}", rates)
    return benchmark


def _not_a_benchmark(path: str, why: str) -> MhaError:
    hint = "mha bench --save-baseline FILE writes one"
    return MhaError(f"{path} is not a benchmark: {why}", hint=hint, code="bad-file", path=path)


def workload_of(row: Workload) -> Workload:
    """The size of a row, without measurements."""
    return Workload(**{f.name: getattr(row, f.name) for f in dataclasses.fields(Workload)})


class _Ranked(NamedTuple):
    """A timed row with its ratio to the fastest of its size."""

    row: BenchRow
    ratio: Interval


def _longest(rows: Sequence[_Ranked]) -> list[_Ranked]:
    """The timed rows of the longest size with at least two of them, else of the longest size."""
    by_size: dict[Workload, list[_Ranked]] = {}
    for ranked in rows:
        by_size.setdefault(workload_of(ranked.row), []).append(ranked)
    size = max(by_size, key=lambda size: (len(by_size[size]) > 1, size.k_len, size.batch))
    return by_size[size]


def _pair_ratio(slow: BenchRow, fast: BenchRow) -> Interval:
    """The ratio of two rows' medians with its interval, from their own intervals if a file lacks the samples."""
    if slow.samples_s and len(slow.samples_s) == len(fast.samples_s):
        return paired_ratio(slow.samples_s, fast.samples_s)
    ours, theirs = slow.interval, fast.interval
    assert ours is not None
    assert theirs is not None
    return Interval(ours.median / theirs.median, ours.low / theirs.high, ours.high / theirs.low)


def _time_text(row: BenchRow) -> str:
    seconds = row.median_s or 0.0
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _interval(median: float | None, low: float | None, high: float | None) -> Interval | None:
    return None if median is None or low is None or high is None else Interval(median, low, high)


def _out_of_range(path: str, name: str, most: str, values: tuple[float | None, ...]) -> MhaError:
    message = f"{path}: {name} is not between {_LEAST:g} and {most}: {', '.join(map(str, values))}"
    return MhaError(message, code="bad-file", path=path)


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
