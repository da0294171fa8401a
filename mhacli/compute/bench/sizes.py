"""`mha bench` as a function: sizes and limits in, the benchmark out."""

from __future__ import annotations

from collections.abc import Sequence

from mhacli.compute.bench.run import BenchOptions
from mhacli.compute.bench.run import bench as measured
from mhacli.results.bench.result import Benchmark
from mhacli.results.bench.workload import Direction, Sweep
from mhacli.spec.config import Dtype


def bench(
    lengths: Sequence[int] = (),
    *,
    backends: Sequence[str] = (),
    batch: Sequence[int] = (),
    n_heads: Sequence[int] = (),
    n_kv_heads: Sequence[int] = (),
    d_head: Sequence[int] = (),
    dtypes: Sequence[Dtype] = (),
    directions: Sequence[Direction] = ("forward",),
    causal: bool = False,
    decode: bool = False,
    device: str = "auto",
    threads: int | None = None,
    repeat: int | None = None,
    budget_s: float = 3.0,
    call_limit_s: float = 5.0,
    seed: int = 0,
) -> Benchmark:
    """How long each attention backend takes at each size: what `mha bench` prints.

    All lists are crossed; an empty one takes what suits the device. `lengths` are numbers of tokens, with `decode` of keys.
    Rounds of one size go on until medians are known to 1 %, `repeat` rounds are done or `budget_s` seconds are spent; a backend
    whose single call is predicted to take longer than `call_limit_s` is left out. Raises `MhaError` where the device is not
    there, and for sizes that cannot be.
    """
    sweep = Sweep(
        backends=tuple(backends),
        batch=tuple(batch),
        n_heads=tuple(n_heads),
        n_kv_heads=tuple(n_kv_heads),
        d_head=tuple(d_head),
        lengths=tuple(lengths),
        dtypes=tuple(dtypes),
        causal=causal,
        directions=tuple(directions),
        decode=decode,
    ).checked()
    return measured(sweep, device, BenchOptions(repeat, budget_s, call_limit_s, seed, threads))
