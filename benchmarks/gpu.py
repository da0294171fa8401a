"""What a GPU has to show of the statistics of heads, in one command of at most nine minutes: a line
of JSON for each result, as soon as it is known.

    python benchmarks/gpu.py            # on a GPU, with triton and transformers
    python benchmarks/gpu.py dry        # on a CPU: every step with tiny sizes, without times

In the order of its worth: the machine; the numbers of the kernels beside torch's in float64, and
the same bits twice; their time and memory beside fused attention; a pass of GPT-2-small's shape
within `inspecting` beside the plain one, with its launches and waits; where the time goes; other
tiles; and some commands. With `dry`, kernels run in Triton's interpreter where triton is, else
torch takes over. The exit code is 1 where a step failed. The lines are also in the file gpu.jsonl
in the folder `$OUT`, if there is one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import mhacli
from mhacli.attention import masks, on_device
from mhacli.attention.axes import Axes, Axis, StatisticsRequest, make_statistics_request
from mhacli.attention.reduction import reduce_heads, reducer_of
from mhacli.attention.scores import ScoredAttention
from mhacli.attention.statistics import Reduced

DRY = "dry" in sys.argv
DEVICE = torch.device("cpu" if DRY else "cuda")
BEGAN, LIMIT_S = time.perf_counter(), 540.0
DTYPES = (torch.float32,) if DRY else (torch.float32, torch.bfloat16)
LENGTHS = (40,) if DRY else (1024, 4096, 8192, 32_768)
SIZES = ((2, 16),) if DRY else ((12, 64), (16, 128))
USUAL = 40 if DRY else 8192
BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
)
OTHER_TILES = (
    on_device.Tiles(32, 4, 3),
    on_device.Tiles(64, 4, 2),
    on_device.Tiles(64, 4, 3),
    on_device.Tiles(64, 8, 2),
    on_device.Tiles(64, 8, 3),
    on_device.Tiles(128, 8, 2),
)
SMALL = on_device.Tiles(16, 4, 1)
failed: list[str] = []


def say(step: str, **found: Any) -> None:
    """Prints a result."""
    line = json.dumps({"at_s": round(time.perf_counter() - BEGAN, 1), "step": step} | found)
    print(line, flush=True)
    if folder := os.environ.get("OUT"):
        with Path(folder, "gpu.jsonl").open("a") as file:
            file.write(line + "\n")


def left_s() -> float:
    """Seconds that are left."""
    return LIMIT_S - (time.perf_counter() - BEGAN)


def take(step: Callable[[], None]) -> None:
    """Takes a step, which does not stop the others where it fails."""
    if left_s() < 0:
        say(step.__name__, skipped="no time is left")
        return
    try:
        step()
    except Exception as fault:
        failed.append(step.__name__)
        where = traceback.format_exc().splitlines()[-3].strip()
        say(step.__name__, failed=f"{type(fault).__name__}: {fault!s:.300}", where=where)
    if not DRY:
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Waits for the device."""
    if not DRY:
        torch.cuda.synchronize()


def milliseconds(function: Callable[[], object]) -> float | None:
    """The median time of a call."""
    if DRY:
        function()
        return None
    from triton.testing import do_bench

    return round(float(do_bench(function, warmup=20, rep=150, return_mode="median")), 4)


def made(
    length: int, dtype: torch.dtype, n_heads: int, width: int
) -> tuple[ScoredAttention, StatisticsRequest]:
    """A causal attention of random numbers and tokens, whose z is there."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(1, n_heads, length, width, generator=generator).to(DEVICE, dtype)
        for _ in range(3)
    )
    ids = tuple(torch.randint(500, (length,), generator=generator).tolist())
    axis = Axis((ids,), ((),), length, "right", DEVICE)
    request = make_statistics_request(Axes(axis, axis, True, lambda word: -1, "float32"))
    attention = ScoredAttention(q=q, k=k, v=v, z=v, scale=width**-0.5, allowed=masks.causal())
    return attention, request


def reduced(attention: ScoredAttention, request: StatisticsRequest, choice: str = "1") -> Reduced:
    """All heads, by the chosen reducer."""
    os.environ["MHA_KERNELS"] = choice
    return reduce_heads(attention, request, range(attention.shape[1]))


def differences(sums: Mapping[str, torch.Tensor], right: Reduced) -> dict[str, str]:
    """The largest difference of each sum, relative to numbers above 1."""
    errors = {}
    for name, numbers in sums.items():
        exact = right.statistics[name].double().cpu()
        if exact.numel():
            error = (numbers.double().cpu() - exact).abs() / exact.abs().clamp(min=1)
            errors[name] = f"{float(error.amax()):.1e}"
    return errors


def machine() -> None:
    """The machine and its libraries."""
    say(
        "machine",
        torch=torch.__version__,
        cuda=torch.version.cuda,
        gpu=None if DRY else torch.cuda.get_device_name(),
        reducer=on_device.reducer_on(DEVICE),
    )


def numbers() -> None:
    """The kernels beside torch in float64, and two runs of them."""
    for dtype, (n_heads, width) in product(DTYPES, SIZES):
        attention, request = made(40 if DRY else 1000, dtype, n_heads, width)
        wide = replace(attention, q=attention.q.double(), k=attention.k.double())
        right = reduced(wide, request)
        for choice in ("1", "ieee") if dtype == torch.float32 else ("1",):
            began = time.perf_counter()
            first = reduced(attention, request, choice)
            synchronize()
            seconds = time.perf_counter() - began
            again = reduced(attention, request, choice)
            reducer = reducer_of(attention, request)
            if reducer.name == "torch" and not DRY:
                failed.append(f"numbers: {reducer.torch_because}")
            say(
                "numbers",
                dtype=str(dtype),
                width=width,
                products={"1": "tf32x3"}.get(choice, choice),
                reducer=reducer,
                first_call_s=round(seconds, 1),
                errors=differences(first.statistics, right),
                lse=f"{float((first.lse - right.lse).abs().max()):.1e}",
                same_bits=all(
                    torch.equal(sums, again.statistics[name])
                    for name, sums in first.statistics.items()
                ),
            )


def times() -> None:
    """The statistics beside fused attention, with their memory; those of torch once."""
    for dtype, length, (n_heads, width) in product(DTYPES, LENGTHS, SIZES):
        if length * width > 32_768 * 64 or left_s() < 60:
            continue
        attention, request = made(length, dtype, n_heads, width)
        assert attention.v is not None
        fused = {}
        for backend in BACKENDS:
            call = partial(
                scaled_dot_product_attention, attention.q, attention.k, attention.v, is_causal=True
            )
            try:
                with sdpa_kernel(backend):
                    fused[backend.name] = milliseconds(call)
            except RuntimeError:
                continue
        took = {"statistics": milliseconds(partial(reduced, attention, request))}
        if length == USUAL:
            with_z = replace(attention, z=None)
            took["and z by torch"] = milliseconds(partial(reduced, with_z, request))
            took["by torch"] = milliseconds(partial(reduced, attention, request, "0"))
            took["by ieee"] = milliseconds(partial(reduced, attention, request, "ieee"))
        best = min((t for t in fused.values() if t), default=None)
        say(
            "times",
            dtype=str(dtype),
            length=length,
            heads=n_heads,
            width=width,
            fused_ms=fused,
            ms=took,
            ratios={name: round(t / best, 2) for name, t in took.items() if t and best},
            mib=temporary_mib(attention, request),
        )


def temporary_mib(attention: ScoredAttention, request: StatisticsRequest) -> float | None:
    """The memory of a reduction beside its input."""
    if DRY:
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    reduced(attention, request)
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def passes() -> None:
    """A pass of GPT-2-small's shape within `inspecting`, beside the plain one."""
    from transformers import GPT2Config, GPT2Model

    n_layers = 1 if DRY else 12
    for dtype, length in product(DTYPES, (32,) if DRY else (1024, 8192)):
        config = GPT2Config(n_layer=n_layers, n_positions=length)
        if DRY:
            config.update({"n_embd": 48, "n_head": 2})
        model: Any = GPT2Model(config).eval()
        model.to(DEVICE, dtype)
        ids = torch.randint(0, 50_000, (1, length), device=DEVICE)

        def plain(model: Any = model, ids: torch.Tensor = ids) -> None:
            model(ids, use_cache=False)

        def inspected(model: Any = model, ids: torch.Tensor = ids) -> None:
            with mhacli.inspecting(model):
                model(ids, use_cache=False)

        with torch.no_grad():
            took = {}
            for name, function, choice in (
                ("plain", plain, "1"),
                ("by kernels", inspected, "1"),
                ("by torch", inspected, "0"),
            ):
                os.environ["MHA_KERNELS"] = choice
                took[name] = of_a_pass(function)
            os.environ["MHA_KERNELS"] = "1"
            say(
                "passes",
                dtype=str(dtype),
                length=length,
                ms=took,
                ratios={name: round(t / took["plain"], 2) for name, t in took.items() if t},
                a_layer=calls_of(inspected, n_layers),
            )


def of_a_pass(function: Callable[[], None]) -> float:
    """The median of five calls in milliseconds, after one; 0 in a dry run."""
    if DRY:
        function()
        return 0.0
    taken = []
    for _ in range(6):
        began = time.perf_counter()
        function()
        synchronize()
        taken.append(time.perf_counter() - began)
    return round(statistics.median(taken[1:]) * 1e3, 2)


def calls_of(function: Callable[[], None], n_layers: int) -> dict[str, float]:
    """Launches, copies and waits of a call, divided by the layers."""
    if DRY:
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        function()
        torch.cuda.synchronize()
    wanted = ("cudaLaunch", "cuLaunch", "cudaMemcpyAsync", "cudaStreamSync", "cudaEventSync")
    return {
        event.key: round(event.count / n_layers, 1)
        for event in seen.key_averages()
        if event.key.startswith(wanted)
    }


def shares() -> None:
    """Which kernels take the time of a layer."""
    if DRY:
        return
    from torch.profiler import ProfilerActivity, profile

    for dtype in DTYPES:
        attention, request = made(USUAL, dtype, *SIZES[0])
        reduced(attention, request)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            reduced(attention, request)
            torch.cuda.synchronize()
        most = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)[:6]
        say(
            "shares",
            dtype=str(dtype),
            us={event.key[:40]: round(event.self_device_time_total) for event in most},
        )


def tiles() -> None:
    """The time with other tiles than those of the table."""
    for dtype, (n_heads, width) in product(DTYPES, SIZES):
        attention, request = made(USUAL, dtype, n_heads, width)
        for other in OTHER_TILES[:1] if DRY else OTHER_TILES:
            if left_s() < 90:
                return
            try:
                took: Any = milliseconds(partial(with_tiles, other, attention, request))
            except Exception as fault:
                took = type(fault).__name__
            say("tiles", dtype=str(dtype), width=width, tiles=other, ms=took)


def with_tiles(
    other: on_device.Tiles, attention: ScoredAttention, request: StatisticsRequest
) -> Reduced:
    """All heads with other tiles."""
    usual = dict(on_device.TILES)
    on_device.TILES.update(dict.fromkeys(usual, SMALL if DRY else other))
    try:
        return reduced(attention, request)
    finally:
        on_device.TILES.update(usual)


def commands() -> None:
    """That the commands work on the device with the kernels."""
    device = ("--device", DEVICE.type)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text("the cat sat on the mat and " * (8 if DRY else 300))
        for words in (
            ("doctor", *device, "--dtype", "float32"),
            ("run", "the cat sat", "--heads", "2", *device),
            ("heads", "--file", str(text), "--heads", "4", *device),
        ):
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "mhacli", *words],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                failed.append(" ".join(words))
            say(
                "commands",
                words=words,
                code=done.returncode,
                s=round(time.perf_counter() - began, 1),
                said=done.stderr[-300:],
                last=done.stdout.splitlines()[-1:],
            )


def main() -> None:
    """Takes all steps."""
    os.environ["MHA_KERNELS"] = "1"
    if DRY:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
        on_device.TILES.update(dict.fromkeys(on_device.TILES, SMALL))
        on_device.runs_kernels = lambda device: True
        on_device.MIN_TOKENS = 1
    for step in (machine, numbers, times, passes, shares, tiles, commands):
        take(step)
    say("done", failed=failed)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
