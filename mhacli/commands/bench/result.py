"""The result of `mha bench` as data (`mha.bench/1`) and as a summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec

from mhacli.commands.bench.intervals import Interval, ratio_text
from mhacli.commands.bench.workload import Sweep, Workload
from mhacli.io.data import decode, load_json
from mhacli.io.files import read_whole
from mhacli.record.display import Shown

MAX_FILE_BYTES = 256 << 20
Seconds = Annotated[float, msgspec.Meta(ge=1e-12, le=1e12)]
"""A time of a call, within bounds in which all ratios are finite."""

BackendStatus = Literal["ok", "unsupported", "out-of-memory", "too-large", "too-slow", "failed"]
"""`too-large` and `too-slow` were predicted and not tried; `out-of-memory` was tried; `unsupported` cannot run;
`failed` should have run."""


@dataclass(frozen=True)
class BenchRow(Workload):
    """One backend at one size. Without status `ok` the times are None, and `reason` says why.

    `ran` is the observed kernel; `is_fallback`: it is unfused although a fused kernel was expected. One sample has
    `n_calls` calls. `ratio` is the median ÷ that of the fastest row of the size. `low` and `high` are the 95 % interval
    of a median or ratio. `is_similar`: the interval of the ratio contains 1, so the row is not certainly slower.
    Without `is_sure` there were too few rounds to mark a row as the fastest. `predicted_bytes`, `limit` and
    `share_of_peak` are always None now.
    """

    backend: str
    status: BackendStatus
    predicted_bytes: int | None = None
    reason: str | None = None
    ran: str | None = None
    is_fallback: bool = False
    first_s: float | None = None
    n_calls: int = 0
    samples_s: tuple[Seconds, ...] = ()
    median_s: Seconds | None = None
    median_low_s: Seconds | None = None
    median_high_s: Seconds | None = None
    p25_s: float | None = None
    p75_s: float | None = None
    min_s: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    is_sure: bool = True
    is_similar: bool = False
    is_fastest: bool = False
    limit: str | None = None
    share_of_peak: float | None = None
    extra_bytes: int | None = None
    max_error: float | None = None
    mean_error: float | None = None
    n_error_queries: int = 0
    n_samples: int = 0
    flops: int = 0
    bytes: int = 0
    flops_per_byte: float = 0.0
    tflops: float | None = None

    @property
    def interval(self) -> Interval | None:
        """The median seconds with their interval."""
        if self.median_s is None or self.median_low_s is None or self.median_high_s is None:
            return None
        return self.median_s, self.median_low_s, self.median_high_s

    @property
    def size(self) -> Workload:
        """The size alone, without measurements."""
        return Workload(*(getattr(self, field.name) for field in fields(Workload)))


@dataclass(frozen=True, repr=False)
class Benchmark(Shown):
    """A complete run of `mha bench`. `environment` is that of a record, with the processor, its number of cores, the driver of
    a GPU, and the load of the machine at the beginning."""

    command: tuple[str, ...]
    seed: int
    environment: Mapping[str, Any]
    sweep: Sweep
    rows: tuple[BenchRow, ...]
    schema: Literal["mha.bench/1"] = "mha.bench/1"

    def views(self, screen: Any) -> Iterator[Any]:
        """What `mha bench` prints on a screen."""
        from mhacli.commands.bench.view import bench_view

        yield bench_view(self, None, screen)

    def __repr__(self) -> str:
        """One line that names the fastest backend."""
        return f"<Benchmark: {'; '.join(self.summary)}>"

    @property
    def summary(self) -> tuple[str, ...]:
        """One sentence per family of sizes: the fastest backend, its margin, and whether that is certain."""
        timed = families([row for row in self.rows if row.interval is not None])
        sentences = {family: _sentence(_longest(rows)) for family, rows in timed}
        if len(sentences) < 2:
            return tuple(sentences.values()) or ("nothing could be timed",)
        return tuple(f"{family}: {sentence}" for family, sentence in sentences.items())

    def to_dict(self) -> dict[str, Any]:
        """The run as JSON values. All numbers are finite. `ceilings` and `controls` are always empty now."""
        run: dict[str, Any] = msgspec.to_builtins(self)
        return {"schema": self.schema, "summary": list(self.summary)} | run | {"ceilings": [], "controls": []}

    def to_json(self, **added: object) -> str:
        """The JSON document, with fields added to it."""
        return msgspec.json.encode(self.to_dict() | added).decode() + "\n"


def read_benchmark(path: str) -> Benchmark:
    """The benchmark in a JSON file, which `--save-baseline` writes. Raises `MhaError` for an unreadable file or another
    schema."""
    document = load_json(read_whole(path, MAX_FILE_BYTES), path)
    return decode(Benchmark, document, f"{path} is not a benchmark (mha.bench/1)", path=path)


def families(rows: Sequence[BenchRow]) -> list[tuple[str, list[BenchRow]]]:
    """Rows that differ only in batch, length and backend, by their common properties, in the order of measurement."""
    by_family: dict[str, list[BenchRow]] = {}
    for row in rows:
        by_family.setdefault(row.family, []).append(row)
    return list(by_family.items())


def _longest(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The timed rows of the longest size with at least two of them, else of the longest size."""
    sizes = [list(of_size) for _, of_size in groupby(rows, key=lambda row: row.size)]
    return max(sizes, key=lambda of_size: (len(of_size) > 1, of_size[0].k_len, of_size[0].batch))


def _sentence(rows: Sequence[BenchRow]) -> str:
    """The fastest backend of a size against `explicit`, the plain formula, or else against the slowest."""
    from mhacli.render.base.format import seconds_text

    first, *others = sorted(rows, key=lambda row: row.median_s or 0.0)
    time = seconds_text(first.median_s)
    if not others:
        return f"{first.backend} takes {time} at {first.length_text}; no other backend was timed"
    other = next((row for row in others if row.backend == "explicit"), others[-1])
    low, high = other.ratio_low or 0.0, other.ratio_high or 0.0
    is_certain = first.is_sure and low > 1
    faster = f"{ratio_text(other.ratio or 1.0)} × faster than {other.backend} at {first.length_text}"
    evidence = f"{seconds_text(other.median_s)} against {time}, 95 % interval {ratio_text(low)} to {ratio_text(high)} ×"
    return f"{first.backend} {'is' if is_certain else 'was'} {faster} ({evidence}){', which may be chance' * (not is_certain)}"
