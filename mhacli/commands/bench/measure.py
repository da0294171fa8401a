"""`mha bench`: attention backends at many sizes, timed in turns, with the error and the memory of
each.
"""

import math
import os
import random
import re
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from functools import cache, partial
from itertools import accumulate
from operator import truediv
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mhacli.attention import masks
from mhacli.attention.core import attend
from mhacli.attention.devices import choose_device, free_bytes
from mhacli.attention.environment import driver, environment
from mhacli.commands.bench import view  # noqa: F401 - it registers the view of a benchmark
from mhacli.errors import UsageError
from mhacli.io.data import finite
from mhacli.io.long_work import Progress, no_progress
from mhacli.io.memory import cpu_name, fits, gc_paused, n_cpus
from mhacli.numbers import shown
from mhacli.settings import ITEM_BYTES

from .foreign import kernel_among, observed
from .result import (
    LAYERS,
    BackendStatus,
    Benchmark,
    BenchRow,
    Direction,
    Sweep,
)


class Interval(NamedTuple):
    """A median, or a ratio of two medians, and the ends of its 95 % interval."""

    median: float
    low: float
    high: float


Leaves = tuple[Tensor, ...]
"""The tensors that get gradients: q, k and v split into heads, or the rows that a layer reads."""
Clock = Callable[[], float | None]
"""Gives the seconds of a call, the mean of some in succession, or None if a call fails."""
_COMPILED = ("flex", "compiled")
_HOLDS_SCORES = ("explicit", "math", "compiled", *LAYERS)
_EXACT_BYTES = 1 << 30
"""The most memory for the answers in float64 beyond which they take too long; on CUDA 32 times as
much."""
_NO_MEMORY = re.compile("can't allocate|out of memory")
_REFUSED = re.compile(
    "No available kernel|No viable backend|not implemented for|No working C|Cannot find a working"
    " triton"
)
KERNELS: Mapping[str, SDPBackend] = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""torch's kernels by name; `math` is the one that is not fused."""
MIN_ROUNDS = 6
"""The fewest samples whose range contains the true median with a probability of 95 %."""
MAX_ROUNDS = 384
CHECKPOINTS = (6, 12, 24, 48, 96, 192)
"""The numbers of rounds after which intervals are checked, since checking after each would stop at
a lucky moment."""
CLOSE_ENOUGH = 0.01
"""The rounds are enough if the interval of every median lies within this fraction of it."""
MIN_SAMPLE_S = 2e-3
"""Shorter calls are repeated within a sample, so that the overhead of clock and loop does not
count."""
MAX_CALLS = 1000
"""The largest number of calls in a sample."""
L2_BYTES = 256 << 20
"""More than the level-2 cache of any GPU, so that clearing so many bytes evicts the inputs.

Source: `triton.testing.do_bench`.
"""


def bench(lengths: Sequence[int] = (), **settings: Any) -> Benchmark:
    """The time of each attention backend at each size, as `mha bench` prints it.

    `settings` are those of the command: the list `backends`, the lists of one `batch`, `n_heads`,
    `n_kv_heads`, `d_head`, `dtypes` and `directions`, and `causal`, `decode`, `device`, `threads`,
    `repeat`, `budget_s`, `call_limit_s` and `seed`. An empty list takes what suits the device.
    `lengths` are numbers of tokens, or of keys with `decode`. Rounds of one size continue
    until medians are precise to 1 %, `repeat` rounds are done, or `budget_s` (3) seconds have
    passed. A backend whose single call is predicted to take longer than `call_limit_s` (5) is
    skipped. Raises `MhaError` for a missing device and for invalid sizes.
    """
    given: dict[str, Any] = {
        name.removesuffix("_s"): tuple(value) if isinstance(value, list | range) else value
        for name, value in {"lengths": lengths, **settings}.items()
    }
    if unknown := given.keys() - {each.name for each in fields(Sweep)}:
        raise UsageError(
            f"bench has no setting {min(unknown)}", hint="help(mhacli.bench) lists them"
        )
    return measure(Sweep(**given).checked())


def measure(sweep: Sweep, report_progress: Progress = no_progress) -> Benchmark:
    """The benchmark of every backend at every size of the sweep. A backend that cannot run has a
    row with the reason.

    Raises `MhaError` if the device is missing, and `UsageError` for invalid sizes.
    """
    device = choose_device(sweep.device)
    full, sizes = sweep.plan(device.type)
    if sweep.threads is not None:
        torch.set_num_threads(sweep.threads)
    where = {
        **asdict(environment(device, sweep.device)),
        "cpu_name": cpu_name(),
        "n_cpus": n_cpus(),
        "driver": driver() if device.type == "cuda" else None,
        "load_average": os.getloadavg()[0],
    }
    rows: list[BenchRow] = []
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        most_flops = sweep.call_limit * _flops_per_s(full.dtypes, device)
        for place, planned in enumerate(sizes):
            part = f"{planned[0].k_len} tokens, size {place + 1} of {len(sizes)}"
            report_progress(part, place / len(sizes))
            available = free_bytes(device)
            admitted = {row.backend: _admitted(row, most_flops, available) for row in planned}
            rows += _measured(admitted, device, sweep)
    return Benchmark((), sweep.seed, where, full, tuple(rows))


def _flops_per_s(dtypes: Iterable[str], device: torch.device) -> float:
    """The rate of a square matrix product in the fastest of some dtypes and float32, since a kernel
    may widen its inputs.
    """
    n = 512 if device.type == "cpu" else 4096
    rate = 0.0
    for dtype in {"float32", *dtypes}:
        numbers = torch.ones(n, n, dtype=getattr(torch, dtype), device=device)
        product = partial(torch.mm, numbers, numbers)
        fastest = min(seconds_of(product, 1, device) for _ in range(4))
        rate = max(rate, 2 * n**3 / fastest)
    return rate


class _Work(NamedTuple):
    """The matrix products of a direction, the times that it moves q, k, v and z, and those that a
    layer moves its inputs and weights.
    """

    n_products: int
    n_passes: int
    n_layer_passes: int


_WORK: Mapping[Direction, _Work] = {
    "forward": _Work(2, 1, 1),
    "both": _Work(7, 3, 2),
}


def _admitted(row: BenchRow, most_flops: float, available: int) -> BenchRow:
    """The row with the operations of the products and the least bytes to move, and the reason if a
    call, with its test, needs too much memory or time.

    Forward has two products of visible cells and backward five, recomputed scores included. A layer
    has four projections too; backward computes only the gradients of their inputs. Source:
    Dao 2023, "FlashAttention-2", section 4.1.
    """
    item_bytes = ITEM_BYTES[row.dtype]
    width = row.n_heads * row.d_head
    n_tokens = row.batch * row.q_len
    cells = n_tokens * row.n_heads * row.k_len
    n_masked = n_tokens * row.n_heads * (row.q_len - 1) // 2 if row.is_masked else 0
    tensors = 2 * n_tokens * width + 2 * row.batch * row.n_kv_heads * row.k_len * row.d_head
    work = _WORK[row.direction]
    flops = 2 * (cells - n_masked) * row.d_head * work.n_products
    moved = tensors * work.n_passes
    needed = tensors * (2 * item_bytes + 24)
    if row.backend in LAYERS:
        flops += 8 * n_tokens * width * width * work.n_layer_passes
        moved = (2 * n_tokens * width + 4 * width * width) * work.n_layer_passes
    if row.backend in _HOLDS_SCORES:
        needed += (work.n_layer_passes + 1) * cells * max(item_bytes, 4)
    n_bytes = moved * item_bytes
    row = replace(row, flops=flops, bytes=n_bytes, flops_per_byte=flops / n_bytes)
    if not fits(needed, available):
        reason = f"needs {shown(needed, 'bytes')}, and {shown(available, 'bytes')} is available"
        return replace(row, status="too-large", reason=reason)
    if flops > most_flops:
        reason = (
            f"a call would take {flops / most_flops:.3g} × --call-limit or more, at the rate of a"
            " matrix product"
        )
        return replace(row, status="too-slow", reason=reason)
    return row


def _measured(rows: dict[str, BenchRow], device: torch.device, sweep: Sweep) -> list[BenchRow]:
    """The rows of one size by backend, measured: first calls one by one, then all backends in
    turns.
    """
    problem = cache(partial(_problem, next(iter(rows.values())), device, sweep.seed))
    clocks = dict[str, Clock]()
    for name, row in rows.items():
        if row.status == "ok":
            first = _attempt(rows, name, partial(_first_calls, row, problem, device))
            if first is not None:
                rows[name], clock = first
                clocks[name] = partial(_attempt, rows, name, clock)
    samples = time_in_turns(clocks, sweep)
    if not rows.keys().isdisjoint(_COMPILED):
        torch.compiler.reset()  # compiled code must not affect the next size
    measured = [replace(row, samples_s=tuple(samples.get(name, ()))) for name, row in rows.items()]
    timed = [row for row in measured if row.samples_s]
    first = min(timed, key=lambda row: statistics.median(row.samples_s), default=measured[0])
    return [_timed(row, first) if row.samples_s else row for row in measured]


def _attempt(rows: dict[str, BenchRow], name: str, action: Callable[[], Any]) -> Any:
    """What an action of a backend gives; if it fails, None, and the row says why. torch gives the
    reasons for refusing a kernel as warnings.
    """
    kernel = sdpa_kernel(KERNELS[name]) if name in KERNELS else nullcontext()
    is_graded = rows[name].direction != "forward"
    with warnings.catch_warnings(record=True) as warned, kernel, torch.set_grad_enabled(is_graded):
        warnings.simplefilter("always")
        try:
            return action()
        except Exception as fault:
            status: BackendStatus = "failed"
            reason = " ".join(str(fault).split())[:300] or type(fault).__name__
            if isinstance(fault, MemoryError) or _NO_MEMORY.search(reason):
                status = "out-of-memory"
            elif isinstance(fault, NotImplementedError) or _REFUSED.search(reason):
                status = "unsupported"
            if status == "unsupported" and name in KERNELS:
                why = [str(each.message).partition(" (Triggered")[0] for each in warned]
                reason = ": ".join(
                    [f"torch has no {name} kernel for this device and these inputs", *why]
                )
            rows[name] = replace(rows[name], status=status, reason=reason)
            return None


def _first_calls(
    row: BenchRow, problem: Callable[[bool], tuple[Leaves, Leaves | None]], device: torch.device
) -> tuple[BenchRow, Clock]:
    """The row with the time of the first call, compilation included, the kernel, the memory and the
    error; and its clock.
    """
    leaves, exact = problem(row.backend in LAYERS)
    call = _call(row, leaves)
    whole = partial(_results, call, leaves, row.direction)
    first_s = seconds_of(whole, 1, device)
    results, operators, peak = observed(whole, device)
    ran = row.backend
    if ran not in ("explicit", *_COMPILED):
        ran = kernel_among(operators) or "unknown"
    is_fallback = row.backend in ("sdpa", "torch-mha") and ran in ("math", "unfused")
    row = replace(row, first_s=first_s, ran=ran, is_fallback=is_fallback, extra_bytes=peak)
    if exact is not None:
        pairs = zip(results, exact, strict=True)
        errors = torch.cat(
            [(ours.detach().to(of.device).double() - of).abs().flatten() for ours, of in pairs]
        )
        largest, mean = finite(float(errors.max())), finite(float(errors.mean()))
        reason = "results are not finite" if mean is None else None
        row = replace(
            row, max_error=largest, mean_error=mean, n_error_queries=row.q_len, reason=reason
        )
    n_calls = 1
    if device.type != "cuda":
        second_s = seconds_of(whole, 1, device)
        n_calls = min(MAX_CALLS, math.ceil(MIN_SAMPLE_S / max(second_s, 1e-9)))
    return replace(row, n_calls=n_calls), partial(seconds_of, whole, n_calls, device)


def _results(call: Callable[[], Tensor], leaves: Leaves, direction: Direction) -> Leaves:
    """The output of a call, or the gradients of half the sum of its squares."""
    out = call()
    return (out,) if direction == "forward" else grad(out, leaves, out.detach())


def median_interval(samples: Iterable[float]) -> Interval:
    """The median and its 95 % interval, for any distribution: from the k-th smallest to the k-th
    largest sample.

    With fewer than six samples, the smallest and the largest. Source: David and Nagaraja
    2003, "Order Statistics", section 7.1.

    >>> median_interval([4.0, 1.0, 3.0, 2.0, 9.0, 5.0])
    Interval(median=3.5, low=1.0, high=9.0)
    """
    ordered = sorted(samples)
    n = len(ordered)
    below = accumulate(
        math.comb(n, k) for k in range(n // 2)
    )  # outcomes with at most k samples below the median
    k = max(0, sum(40 * outcomes <= 2**n for outcomes in below) - 1)
    return Interval(statistics.median(ordered), ordered[k], ordered[-1 - k])


def _timed(row: BenchRow, first: BenchRow) -> BenchRow:
    """The row with what its samples give, beside the first, the fastest. Effects on a whole round
    cancel out in the interval of the ratio: it is that of the ratios per round, widened to include
    the ratio of the medians.
    """
    median, low, high = median_interval(row.samples_s)
    ratio = median / statistics.median(first.samples_s)
    _, ratio_low, ratio_high = median_interval(map(truediv, row.samples_s, first.samples_s))
    p25, p75 = np.quantile(row.samples_s, (0.25, 0.75)).tolist()
    is_sure = len(row.samples_s) >= MIN_ROUNDS
    is_similar = row is not first and min(ratio_low, ratio) <= 1
    return replace(
        row,
        n_samples=len(row.samples_s),
        median_s=median,
        median_low_s=low,
        median_high_s=high,
        p25_s=p25,
        p75_s=p75,
        min_s=min(row.samples_s),
        tflops=row.flops / median / 1e12,
        ratio=ratio,
        ratio_low=min(ratio_low, ratio),
        ratio_high=max(ratio_high, ratio),
        is_sure=is_sure,
        is_similar=is_similar,
        is_fastest=is_sure and (row is first or is_similar),
    )


# ----------------------------------------------------------------------------------------- backends


def _problem(
    row: BenchRow, device: torch.device, seed: int, is_layer: bool
) -> tuple[Leaves, Leaves | None]:
    """Normal numbers for this size, since zeros would be computed too fast, and what float64 makes
    of them.
    """
    exact = replace(row, backend="torch-mha" if is_layer else "explicit")
    shapes: list[tuple[int, ...]] = [(row.batch, row.q_len, row.n_heads * row.d_head)]
    if not is_layer:
        of_keys = (row.batch, row.n_kv_heads, row.k_len, row.d_head)
        shapes = [(row.batch, row.n_heads, row.q_len, row.d_head), of_keys, of_keys]
    generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, row.dtype)
    has_gradient = row.direction != "forward"
    leaves = tuple(
        torch.randn(
            shape, generator=generator, dtype=dtype, device=device, requires_grad=has_gradient
        )
        for shape in shapes
    )
    exact_device = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
    needed = (
        32 * row.batch * row.n_heads * row.q_len * row.k_len
    )  # scores, weights, and their gradients
    if needed > _EXACT_BYTES * (32 if device.type == "cuda" else 1) or not fits(
        needed, free_bytes(exact_device)
    ):
        return leaves, None
    wide = tuple(
        leaf.detach().to(exact_device).double().requires_grad_(has_gradient) for leaf in leaves
    )
    return leaves, _results(_call(exact, wide), wide, row.direction)


def _call(row: BenchRow, leaves: Leaves) -> Callable[[], Tensor]:
    """The call to time. Raises `NotImplementedError` for what the backend cannot do."""
    device, is_grouped = leaves[0].device, row.n_kv_heads != row.n_heads
    compiled = partial[Any](torch.compile, fullgraph=True, dynamic=False)
    if row.backend in LAYERS:  # whose weights keep the size of normal rows
        if is_grouped or row.q_len != row.k_len:
            lacks = "shared kv heads" if is_grouped else "cache to decode with"
            raise NotImplementedError(f"nn.MultiheadAttention has no {lacks}")
        x, generator = leaves[0], torch.Generator().manual_seed(0)
        width = x.shape[-1]
        layer = nn.MultiheadAttention(
            width, row.n_heads, batch_first=True, device="cpu", dtype=torch.float32
        ).eval()
        for parameter in layer.parameters():
            parameter.data.normal_(std=width**-0.5, generator=generator)
        layer = layer.to(getattr(torch, row.dtype)).to(x)
        mask = (
            nn.Transformer.generate_square_subsequent_mask(row.q_len, x.device, x.dtype)
            if row.is_masked
            else None
        )
        call = partial(
            layer, x, x, x, attn_mask=mask, is_causal=row.is_masked, average_attn_weights=False
        )
        return lambda: call(need_weights=row.backend == "torch-mha-weights")[0]
    if row.backend in ("explicit", "compiled"):
        function = attend if row.backend == "explicit" else compiled(attend)
        return partial(function, *leaves, allowed=masks.causal() if row.is_masked else None)
    if row.backend != "flex":
        q, k, v = leaves
        return partial(
            scaled_dot_product_attention, q, k, v, is_causal=row.is_masked, enable_gqa=is_grouped
        )
    if device.type != "cuda":
        raise NotImplementedError(
            f"FlexAttention is measured on CUDA, where it is one kernel, not on {device.type}"
        )
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = None
    if row.is_masked:
        create: Any = torch.compile(create_block_mask)  # uncompiled it would ask every cell at once
        blocks = create(
            lambda b, h, q_idx, k_idx: q_idx >= k_idx,
            None,
            None,
            row.q_len,
            row.k_len,
            device=device,
        )
    return partial(compiled(flex_attention), *leaves, block_mask=blocks, enable_gqa=is_grouped)


# ------------------------------------------------------------------------------------------- timing


def seconds_of(call: Callable[[], object], n_calls: int, device: torch.device) -> float:
    """The seconds of a call. On CUDA events time a single one, behind a level-2 cache that is
    cleared: while the device does this the host queues the call, so its own time does not count.
    Elsewhere the wall clock times all calls together.
    """
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


def time_in_turns(clocks: Mapping[str, Clock], sweep: Sweep) -> dict[str, list[float]]:
    """The seconds of each backend by round. A backend whose clock gives None drops out.

    In each round all backends take their turn, in a new random order, until there are enough
    rounds: `sweep.repeat` of them, or as many as put the interval of every median within 1 % of it,
    or fill its budget; at least six.
    """
    samples, order = {name: list[float]() for name in clocks}, random.Random(sweep.seed)
    began = perf_counter()
    with gc_paused():  # a collection would disturb single samples
        for n_rounds in range(1, (sweep.repeat or MAX_ROUNDS) + 1):
            for name in order.sample([*samples], len(samples)):
                seconds = clocks[name]()
                if seconds is None:
                    del samples[name]
                else:
                    samples[name].append(seconds)
            is_over = perf_counter() - began > sweep.budget
            if n_rounds in CHECKPOINTS:
                intervals = map(median_interval, samples.values())
                is_over |= all(
                    max(high - mid, mid - low) <= CLOSE_ENOUGH * mid for mid, low, high in intervals
                )
            if sweep.repeat is None and n_rounds >= MIN_ROUNDS and is_over:
                break
    return samples
