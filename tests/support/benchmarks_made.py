"""Benchmarks with given numbers, for whoever reads, compares or draws them. None of it was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mhacli.results.bench.intervals import median_interval, quartiles
from mhacli.results.bench.result import BenchEnvironment, Benchmark, BenchRow, MachinePeak, NoiseBaseline
from mhacli.results.bench.workload import Sweep, Workload

SIZE = Workload(2, 9, 3, 11, 5, 5, "float32", False, "forward")
"""Sizes that are pairwise different, but for the tokens."""
ENVIRONMENT = BenchEnvironment(
    mha="0.1.0", torch="2.9.1", numpy="2.1.3", python="3.12.1", platform="Linux x86_64", device="cpu",
    device_name="Some CPU", device_asked="auto", threads=3, cpu_name="Some CPU", n_cpus=7, driver=None, load_average=0.5,
)  # fmt: skip
CEILING = MachinePeak("float32", matmul_tflops=0.5, copy_gb_per_s=20.0)


def size(**changes: Any) -> Workload:
    """`SIZE` with some fields changed."""
    return dataclasses.replace(SIZE, **changes)


def made_row(
    backend: str,
    times_s: Sequence[float] = (),
    *,
    workload: Workload = SIZE,
    ceiling: MachinePeak = CEILING,
    **fields: Any,
) -> BenchRow:
    """The row of a backend that took these times, or, without times, of one that has the `status` among `fields`."""
    bare = BenchRow(**dataclasses.asdict(workload), backend=backend, status="ok", predicted_bytes=4096)
    if not times_s:
        return dataclasses.replace(bare, **{"status": "unsupported", "reason": "there is no such kernel"} | fields)
    middle, (p25, p75) = median_interval(times_s), quartiles(times_s)
    measured: dict[str, Any] = {
        "ran": backend, "first_s": 2 * max(times_s), "n_calls": 1, "samples_s": tuple(times_s),
        "median_s": middle.median, "median_low_s": middle.low, "median_high_s": middle.high, "p25_s": p25, "p75_s": p75,
        "min_s": min(times_s), "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0, "extra_bytes": 2048,
        "max_error": 1e-6, "mean_error": 1e-7, "n_error_queries": workload.q_len,
    }  # fmt: skip
    return dataclasses.replace(bare, **measured | fields).under(ceiling)


def made_control(
    low: float = 1.0,
    high: float = 1.0,
    *,
    workload: Workload = SIZE,
    backend: str = "sdpa",
    ratio: float = 1.0,
    samples_s: Sequence[float] = (0.5,),
) -> NoiseBaseline:
    """A control whose ratio of a backend to itself lies between `low` and `high`."""
    return NoiseBaseline(**dataclasses.asdict(workload), backend=backend, samples_s=tuple(samples_s),
                   median_s=median_interval(samples_s).median, ratio=ratio,
                   ratio_low=low, ratio_high=high)  # fmt: skip


def made_benchmark(
    *rows: BenchRow,
    controls: Sequence[NoiseBaseline] = (),
    ceilings: Sequence[MachinePeak] = (CEILING,),
    environment: Mapping[str, Any] | None = None,
    sweep: Sweep | None = None,
) -> Benchmark:
    """A run with these rows and controls. `environment` changes fields of `ENVIRONMENT`."""
    about = dataclasses.replace(ENVIRONMENT, **(environment or {}))
    asked = Sweep(backends=tuple(dict.fromkeys(row.backend for row in rows))) if sweep is None else sweep
    return Benchmark(("mha", "bench"), 0, about, asked, tuple(ceilings), rows, tuple(controls))
