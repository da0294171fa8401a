"""`mha bench` as a Python function."""

from __future__ import annotations

from collections.abc import Sequence

from mhacli.commands.bench.result import Benchmark
from mhacli.commands.bench.run import BenchOptions
from mhacli.commands.bench.run import bench as measured
from mhacli.commands.bench.workload import Direction, Sweep
from mhacli.settings import Dtype


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
    """The time of each attention backend at each size, as `mha bench` prints it.

    All lists are crossed; an empty list takes what suits the device. `lengths` are numbers of tokens, or of keys with
    `decode`. Rounds of one size continue until medians are precise to 1 %, `repeat` rounds are done, or `budget_s`
    seconds have passed. A backend whose single call is predicted to take longer than `call_limit_s` is skipped. Raises
    `MhaError` for a missing device and for invalid sizes.
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
