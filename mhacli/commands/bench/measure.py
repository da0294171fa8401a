"""`mha bench`: attention backends at many sizes, timed in turns, with the error and the memory of each."""

from __future__ import annotations

import math
import os
import random
import re
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate
from operator import truediv
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.autograd.profiler import profile
from torch.nn.attention import sdpa_kernel

from mhacli.attention import masks
from mhacli.attention.core import attend
from mhacli.attention.devices import choose_device, driver, environment, free_bytes
from mhacli.attention.fused import KERNELS, fused_attend, kernel_among
from mhacli.commands.bench.result import Benchmark
from mhacli.commands.bench.workload import LAYERS, MIN_ROUNDS, RETURNS_PATTERN, BenchRow, Direction, Interval, Sweep
from mhacli.io.data import finite
from mhacli.io.files import format_size
from mhacli.io.memory import cpu_name, fits, n_cpus, uncollected
from mhacli.io.progress import Progress, no_progress
from mhacli.settings import Dtype

Leaves = tuple[Tensor, ...]
"""The tensors to which gradients go: q, k and v split into heads, or the rows that a layer reads."""
Problem = tuple[Leaves, list[Tensor] | None]
"""The leaves, and the answers in float64, or None where these need too much memory."""
Clock = Callable[[int], float]
"""Takes a number of calls, and gives the seconds of one."""
Around = Callable[[str], AbstractContextManager[Any]]
"""Gives the context for a call of a backend."""
COMPILED = ("flex", "compiled")
_EXACT_BYTES = 1 << 30
"""The most memory for the answers in float64 beyond which they take too long; on CUDA 32 times as much."""


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
    given: dict[str, Any] = {
        name.removesuffix("_s"): tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else value
        for name, value in locals().items()
    }
    return measure(Sweep(**given).checked())


def measure(sweep: Sweep, report_progress: Progress = no_progress) -> Benchmark:
    """The benchmark of every backend at every size of the sweep. A backend that cannot run has a row with the reason.

    Raises `MhaError` if the device is missing, and `UsageError` for invalid sizes.
    """
    device = choose_device(sweep.device)
    sizes = sweep.sizes(device.type)
    if sweep.threads is not None:
        torch.set_num_threads(sweep.threads)
    where = asdict(environment(device, sweep.device)) | {
        "cpu_name": cpu_name(),
        "n_cpus": n_cpus(),
        "driver": driver() if device.type == "cuda" else None,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }
    rows: list[BenchRow] = []
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        rate = _product_rate({size[0].dtype for size in sizes}, device)
        for place, planned in enumerate(sizes):
            report_progress(place / len(sizes), f"{planned[0].k_len} tokens")
            rows += _measured(planned, rate, device, sweep)
    return Benchmark((), sweep.seed, where, sweep.on(device.type), tuple(rows))


def _measured(planned: Sequence[BenchRow], rate: float, device: torch.device, sweep: Sweep) -> list[BenchRow]:
    """The rows of one size: first calls one by one, then all backends in turns."""
    rows = {plan.backend: _admitted(plan, rate * sweep.call_limit, free_bytes(str(device))) for plan in planned}
    clocks: dict[str, Clock] = {}
    problems: dict[bool, Problem] = {}
    for name, row in rows.items():
        if row.status == "ok":
            with _running(rows, name):
                problem = problems.get(name in LAYERS) or _problem(row, device, sweep.seed)
                problems[name in LAYERS] = problem
                rows[name], clocks[name] = _first_calls(row, problem, device, sweep.seed)
    is_single = device.type == "cuda" or planned[0].direction == "backward"
    samples, n_calls = time_in_turns(clocks, sweep, partial(_running, rows), most_calls=1 if is_single else 1000)
    rows |= _ranked(rows, samples, n_calls) if samples else {}
    if not rows.keys().isdisjoint(COMPILED):
        torch.compiler.reset()  # compiled code must not affect the next size
    return [*rows.values()]


def _admitted(row: BenchRow, most_flops: float, available: int) -> BenchRow:
    """The row with the work to do, and the reason if the backend needs too much memory or time."""
    flops, moved, needed = row.cost
    row = replace(row, flops=flops, bytes=moved, flops_per_byte=flops / moved)
    if not fits(needed, available):
        reason = f"needs {format_size(needed)}, and {format_size(available)} is available"
        return replace(row, status="too-large", reason=reason)
    if flops > most_flops:
        reason = f"a call would take {flops / most_flops:.3g} × --call-limit or more, at the rate of a matrix product"
        return replace(row, status="too-slow", reason=reason)
    return row


@contextmanager
def _running(rows: dict[str, BenchRow], name: str) -> Iterator[None]:
    """What surrounds a call of a backend: the choice of a kernel, and gradients where the direction needs them. If the call
    fails, the row of the backend says why. torch gives the reasons for refusing a kernel as warnings."""
    row = rows[name]
    kernel = sdpa_kernel(KERNELS[name]) if name in KERNELS else nullcontext()
    with warnings.catch_warnings(record=True) as warned, kernel, torch.set_grad_enabled(row.direction != "forward"):
        warnings.simplefilter("always")
        try:
            yield
        except Exception as fault:
            reason = " ".join(str(fault).split())[:300] or type(fault).__name__
            said = f"{type(fault).__name__}: {reason}"
            status: Any = next((status for status, words in _FAULTS.items() if re.search(words, said)), "failed")
            if status == "unsupported" and name in KERNELS:
                why = [str(each.message).partition(" (Triggered")[0] for each in warned]
                reason = ": ".join([f"torch has no {name} kernel for this device and these inputs", *why])
            rows[name] = replace(row, status=status, reason=reason)


def _first_calls(row: BenchRow, problem: Problem, device: torch.device, seed: int) -> tuple[BenchRow, Clock]:
    """The row with the time of the first call, compilation included, the kernel, the memory and the error; and its clock."""
    leaves, exact = problem
    call, direction = _call(row, leaves, seed), row.direction

    def whole() -> object:
        out = call()
        return out if direction == "forward" else grad(out, leaves, out.detach())

    first_s = seconds_of(whole, 1, device)
    ran, peak = _watched(row, whole, device)
    is_fallback = row.backend in ("sdpa", "torch-mha") and ran in ("math", "unfused")
    row = replace(row, first_s=first_s, ran=ran, is_fallback=is_fallback, extra_bytes=peak)
    if exact is not None:
        pairs = zip(_answers(call(), leaves, direction), exact, strict=True)
        errors = torch.cat([(ours.detach().to(of.device).double() - of).abs().flatten() for ours, of in pairs])
        largest, mean = finite(float(errors.max())), finite(float(errors.mean()))
        reason = "results are not finite" if mean is None else None
        row = replace(row, max_error=largest, mean_error=mean, n_error_queries=row.q_len, reason=reason)

    def clock(n_calls: int) -> float:
        if direction != "backward":
            return seconds_of(whole, n_calls, device)
        out = call()
        return seconds_of(lambda: grad(out, leaves, out.detach()), 1, device)

    return row, clock


def median_interval(samples: Iterable[float]) -> Interval:
    """The median and its 95 % interval, for any distribution: from the k-th smallest to the k-th largest sample.

    With fewer than six samples, the smallest and the largest. Source: David and Nagaraja
    2003, "Order Statistics", section 7.1.

    >>> median_interval([4.0, 1.0, 3.0, 2.0, 9.0, 5.0])
    (3.5, 1.0, 9.0)
    """
    ordered = sorted(samples)
    n = len(ordered)
    below = accumulate(math.comb(n, k) for k in range(n // 2))  # outcomes with at most k samples below the median
    k = max(0, sum(40 * outcomes <= 2**n for outcomes in below) - 1)
    return statistics.median(ordered), ordered[k], ordered[-1 - k]


def _ranked(
    rows: Mapping[str, BenchRow], samples: Mapping[str, list[float]], n_calls: Mapping[str, int]
) -> dict[str, BenchRow]:
    """The rows with times, and ratios to the fastest. Effects on a whole round cancel out in the interval of a ratio: it is
    that of the ratios per round, widened to include the ratio of the medians. The fastest are certain if all others are
    certainly slower, and if they ran one kernel."""
    first = min(samples, key=lambda name: statistics.median(samples[name]))
    ranked = {}
    for name, column in samples.items():
        median, low, high = median_interval(column)
        _, ratio_low, ratio_high = median_interval(map(truediv, column, samples[first]))
        ratio = median / statistics.median(samples[first])
        ratio_low, ratio_high = min(ratio_low, ratio), max(ratio_high, ratio)
        p25, p75 = np.quantile(column, (0.25, 0.75)).tolist()
        ranked[name] = replace(
            rows[name], samples_s=tuple(column), n_samples=len(column), n_calls=n_calls[name], median_s=median,
            median_low_s=low, median_high_s=high, p25_s=p25, p75_s=p75, min_s=min(column),
            ratio=ratio, ratio_low=ratio_low, ratio_high=ratio_high, tflops=rows[name].flops / median / 1e12,
            is_sure=len(column) >= MIN_ROUNDS, is_similar=name != first and ratio_low <= 1,
        )  # fmt: skip
    near = [name for name, row in ranked.items() if name == first or row.is_similar]
    is_certain = ranked[first].is_sure and len(near) < len(ranked) and len({rows[name].ran for name in near}) == 1
    return ranked | {name: replace(ranked[name], is_fastest=is_certain) for name in near}


# ------------------------------------------------------------------------------------------------------------ backends


def _call(row: BenchRow, leaves: Leaves, seed: int) -> Callable[[], Tensor]:
    """The call to time. Raises `NotImplementedError` for what the backend cannot do."""
    name, compiled = row.backend, partial[Any](torch.compile, fullgraph=True, dynamic=False)
    if name in LAYERS:
        layer, mask = _layer(row, leaves[0], seed)
        how = {"need_weights": name == RETURNS_PATTERN, "average_attn_weights": False, "is_causal": row.is_masked}
        return lambda: layer(*leaves * 3, attn_mask=mask, **how)[0]
    if name in ("explicit", "compiled"):
        function = attend if name == "explicit" else compiled(attend)
        return partial(function, *leaves, allowed=masks.causal() if row.is_masked else None)
    if name != "flex":
        return partial(fused_attend, *leaves, causal=row.is_masked)
    device = leaves[0].device.type
    if device != "cuda":
        raise NotImplementedError(
            f"FlexAttention is measured on CUDA, where it compiles to one kernel, not on {device}"
        )
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = None
    if row.is_masked:
        create: Any = torch.compile(create_block_mask)  # uncompiled it would ask every cell at once
        blocks = create(lambda b, h, q_idx, k_idx: q_idx >= k_idx, None, None, row.q_len, row.k_len, device=device)
    return partial(compiled(flex_attention), *leaves, block_mask=blocks, enable_gqa=row.n_kv_heads != row.n_heads)


def _layer(row: BenchRow, x: Tensor, seed: int) -> tuple[nn.Module, Tensor | None]:
    """`nn.MultiheadAttention` for rows like x, with weights that keep the size of normal rows, and its mask."""
    if row.n_kv_heads != row.n_heads or row.q_len != row.k_len:
        raise NotImplementedError("nn.MultiheadAttention has no shared kv heads, and no cache to decode with")
    width, generator = x.shape[-1], torch.Generator().manual_seed(seed)
    layer = nn.MultiheadAttention(width, row.n_heads, batch_first=True, device="cpu", dtype=torch.float32).eval()
    for parameter in layer.parameters():
        parameter.data.normal_(std=width**-0.5, generator=generator)
    mask = nn.Transformer.generate_square_subsequent_mask(row.q_len, x.device, x.dtype) if row.is_masked else None
    return layer.to(getattr(torch, row.dtype)).to(x), mask


def _problem(row: BenchRow, device: torch.device, seed: int) -> Problem:
    """Normal numbers for this size, since zeros would be computed too fast, and what float64 makes of them."""
    shapes: list[tuple[int, ...]] = [(row.batch, row.q_len, row.n_heads * row.d_head)]
    if row.backend not in LAYERS:
        of_keys = (row.batch, row.n_kv_heads, row.k_len, row.d_head)
        shapes = [(row.batch, row.n_heads, row.q_len, row.d_head), of_keys, of_keys]
    kind: Any = {"generator": torch.Generator(device).manual_seed(seed), "dtype": getattr(torch, row.dtype)}
    has_gradient, home = row.direction != "forward", "cpu" if device.type == "mps" else device  # MPS has no float64
    leaves = tuple(torch.randn(shape, device=device, **kind).requires_grad_(has_gradient) for shape in shapes)
    needed = 32 * row.batch * row.n_heads * row.q_len * row.k_len  # scores, weights, and their gradients
    if needed > _EXACT_BYTES * (32 if device.type == "cuda" else 1) or not fits(needed, free_bytes(str(home))):
        return leaves, None
    wide = tuple(leaf.detach().to(home).double().requires_grad_(has_gradient) for leaf in leaves)
    exact = row if row.backend in LAYERS else replace(row, backend="explicit")
    return leaves, _answers(_call(exact, wide, seed)(), wide, row.direction)


def _answers(out: Tensor, leaves: Leaves, direction: Direction) -> list[Tensor]:
    """The output, unless only backward is measured, and the gradients."""
    if direction == "forward":
        return [out]
    signs = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).sign().to(out)
    gradients = grad(out, leaves, signs)
    return [*gradients] if direction == "backward" else [out.detach(), *gradients]


def _watched(row: BenchRow, call: Callable[[], object], device: torch.device) -> tuple[str, int | None]:
    """The kernel that a call runs, and the most bytes that torch's allocator held for it at a time, results included;
    None where the allocator does not say."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes to stderr
    with profile(use_kineto=False, profile_memory=device.type == "cpu") as seen:
        call()
    assert seen.kineto_results is not None  # it has been stopped
    events = sorted(seen.kineto_results.events(), key=lambda event: int(event.start_ns()))
    operators = frozenset(event.name() for event in events)
    kernel = row.backend if row.backend in ("explicit", *COMPILED) else kernel_among(operators) or "unknown"
    if device.type == "cuda":
        return kernel, torch.cuda.max_memory_allocated(device) - before
    held = accumulate((event.nbytes() for event in events if event.name() == "[memory]"), initial=0)
    return kernel, max(held) if device.type == "cpu" else None


_FAULTS: Mapping[str, str] = {
    "out-of-memory": "MemoryError|can't allocate|out of memory",
    "unsupported": "No available kernel|No viable backend|NotImplementedError|not implemented for"
    "|No working C.. compiler|Cannot find a working triton",
}
"""What errors of torch say, by the status of the row."""


# -------------------------------------------------------------------------------------------------------------- timing


CLOSE_ENOUGH = 0.01
"""The rounds are enough if the interval of every median lies within this fraction of it."""
MAX_ROUNDS = 384
CHECKPOINTS = (6, 12, 24, 48, 96, 192)
"""The numbers of rounds after which intervals are checked, since checking after each would stop at a lucky moment."""
MIN_SAMPLE_S = 2e-3
"""Shorter calls are repeated within a sample, so that the overhead of clock and loop does not count."""
L2_BYTES = 256 << 20
"""More than the level-2 cache of any GPU, so that clearing so many bytes evicts the inputs.

Source: `triton.testing.do_bench`.
"""


def seconds_of(call: Callable[[], object], n_calls: int, device: torch.device) -> float:
    """The seconds of a call. On CUDA events time a single one, behind a level-2 cache that is cleared: while the device does
    this the host queues the call, so its own time does not count. Elsewhere the wall clock times all calls together."""
    if device.type == "cuda":
        torch.empty(L2_BYTES, dtype=torch.int8, device=device).zero_()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        call()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3
    start = perf_counter()
    for _ in range(n_calls):
        call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return (perf_counter() - start) / n_calls


def time_in_turns(
    clocks: Mapping[str, Clock], sweep: Sweep, around: Around = nullcontext, *, most_calls: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """The seconds of each backend by round, and the calls of each per sample, at most `most_calls`. A backend has no seconds
    if the context `around` its calls keeps an error.

    In each round all backends take their turn, in a new random order, until there are enough rounds: `sweep.repeat` of them,
    or as many as put the interval of every median within 1 % of it, or fill its budget; at least six.
    """
    samples: dict[str, list[float]] = {name: [] for name in clocks}
    n_calls, order = dict.fromkeys(clocks, 1), random.Random(sweep.seed)

    def turn(name: str) -> None:
        column = samples.pop(name)
        with around(name):
            column.append(clocks[name](n_calls[name]))
            samples[name] = column

    with uncollected():  # a collection would disturb single samples
        for name in [*clocks] * 2:  # the first calls warm up
            if name in samples:
                turn(name)
        for name, column in samples.items():
            n_calls[name] = max(1, min(most_calls, math.ceil(MIN_SAMPLE_S / max(column[1], 1e-9))))
            column.clear()
        began = perf_counter()
        for n_rounds in range(1, (sweep.repeat or MAX_ROUNDS) + 1):
            for name in order.sample([*samples], len(samples)):
                turn(name)
            is_over = perf_counter() - began > sweep.budget or (n_rounds in CHECKPOINTS and _is_precise(samples))
            if sweep.repeat is None and n_rounds >= MIN_ROUNDS and is_over:
                break
    return samples, n_calls


def _is_precise(samples: Mapping[str, Sequence[float]]) -> bool:
    intervals = map(median_interval, samples.values())
    return all(max(high - mid, mid - low) <= CLOSE_ENOUGH * mid for mid, low, high in intervals)


def _product_rate(dtypes: set[Dtype], device: torch.device) -> float:
    """Operations per second of a square matrix product in the fastest of the dtypes and float32, to which a kernel may widen."""
    n, seconds = 512 if device.type == "cpu" else 4096, []
    for name in (*dtypes, "float32"):
        numbers = torch.ones(n, n, dtype=getattr(torch, name), device=device)
        seconds += [seconds_of(partial(torch.mm, numbers, numbers), 1, device) for _ in range(4)]
    return 2 * n**3 / min(seconds)
