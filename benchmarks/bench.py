"""Whether the numbers of `mha bench` can be believed, beside other clocks and beside the code
itself.

    python benchmarks/bench.py [cpu|cuda]

1. Its clock beside torch's own: `torch.utils.benchmark` on the CPU, `triton.testing.do_bench` on
   CUDA; within 5 %.
2. `attend` beside the same formula in four lines (at most 1.05 ×).
3. Two whole runs of `mha bench`, one after the other: no two backends in another order whose
   intervals lie apart in both.

Everything alternates, A B A B …, in one process; medians of ratios.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from mhacli.attention import attend, masks
from mhacli.commands.bench.measure import seconds_of, time_in_turns
from mhacli.commands.bench.result import Sweep

MHA = str(Path(sys.executable).with_name("mha"))
LENGTHS = (256, 512, 1024, 2048)
ROUNDS = 25


def heads(length: int, device: str) -> tuple[torch.Tensor, ...]:
    return torch.randn(3, max(1, 1024 // length), 8, length, 64, device=device).unbind()


def beside_torch(length: int, device: str) -> None:
    """Prints the median of our clock over that of torch's, for the fused kernel."""
    q, k, v = heads(length, device)
    call = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v)
    clock = partial(seconds_of, call, device=torch.device(device))
    n_calls = 1 if device == "cuda" else max(1, round(0.02 / clock(n_calls=5)))
    ratios = []
    for _ in range(ROUNDS):
        ours = statistics.median(clock(n_calls=n_calls) for _ in range(3))
        ratios.append(ours / theirs(call, device, n_calls))
    print(f"T={length:>5}: our clock / torch's {statistics.median(ratios):.3f}")


def theirs(call: Callable[[], object], device: str, n_calls: int) -> float:
    """Seconds of a call by torch's own clock, with as many threads."""
    if device == "cuda":
        from triton.testing import do_bench

        return float(do_bench(call, return_mode="median")) / 1e3
    from torch.utils.benchmark import Timer

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return statistics.median(timer.timeit(n_calls).median for _ in range(3))


def four_lines(length: int, device: str) -> None:
    """Prints `attend` beside the plain formula, masked and not."""
    q, k, v = heads(length, device)
    pairs = {
        "attend / four lines": (
            partial(attend, q, k, v, allowed=masks.causal()),
            partial(masked, q, k, v),
        ),
        "attend / two lines, no mask": (partial(attend, q, k, v), partial(unmasked, q, k, v)),
    }
    said = []
    for name, (ours, direct) in pairs.items():
        calls, place = {"ours": ours, "direct": direct}, torch.device(device)
        with torch.no_grad():
            n_calls = 1 if device == "cuda" else max(1, round(0.02 / seconds_of(direct, 5, place)))
            clocks = {
                name: partial(seconds_of, call, n_calls, place) for name, call in calls.items()
            }
            samples = time_in_turns(clocks, Sweep(repeat=60))
        ratios = [a / b for a, b in zip(samples["ours"], samples["direct"], strict=True)]
        said.append(f"{name} {statistics.median(ratios):.3f}")
    print(f"T={length:>5}: {', '.join(said)}")


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention as people write it."""
    allowed = (
        torch.arange(k.shape[-2], device=k.device)[None, :]
        <= torch.arange(q.shape[-2], device=q.device)[:, None]
    )
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~allowed, -torch.inf)
    z: torch.Tensor = scores.softmax(dim=-1) @ v
    return z


def unmasked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same without a mask."""
    z: torch.Tensor = (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1) @ v
    return z


def agree_twice(device: str) -> None:
    """Prints the pairs of backends whose order changed beyond what the intervals of both runs
    allow.
    """
    words = [MHA, "bench", "--device", device, "--json"]
    runs = [
        json.loads(subprocess.run(words, check=True, capture_output=True).stdout)["rows"]
        for _ in range(2)
    ]
    orders = [order(run) for run in runs]
    turned = [pair for pair, sign in orders[0].items() if sign * orders[1].get(pair, 0) < 0]
    print(
        f"two runs: {len(orders[0])} pairs surely apart in the first, {len(orders[1])} in the"
        f" second, {len(turned)} turned"
    )


def order(rows: list[dict[str, Any]]) -> dict[tuple[object, ...], int]:
    """Which of two backends at one length is the faster one, for those whose intervals lie
    apart.
    """
    found: dict[tuple[object, ...], int] = {}
    timed = [row for row in rows if row["median_s"] is not None]
    for a, b in combinations(timed, 2):
        if a["k_len"] == b["k_len"]:
            pair = a["k_len"], a["backend"], b["backend"]
            if a["ratio_low"] > b["ratio_high"]:
                found[pair] = 1
            elif b["ratio_low"] > a["ratio_high"]:
                found[pair] = -1
    return found


def main() -> None:
    """Prints all three."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    torch.set_num_threads(2)
    torch.manual_seed(0)
    print(
        f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads, float32, {ROUNDS}"
        " rounds"
    )
    for length in LENGTHS:
        beside_torch(length, device)
    for length in (128, *LENGTHS):
        four_lines(length, device)
    agree_twice(device)


if __name__ == "__main__":
    main()
