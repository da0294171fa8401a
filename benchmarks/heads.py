"""What the statistics of heads cost, beside fused attention.

    python benchmarks/heads.py [ROUNDS]

1. Time: z and every statistic, with the baseline of uniform attention, over
   `scaled_dot_product_attention`: by the compiled block and by torch, of words and of characters.
   Medians of the ratios of each round in an interleaved run, A B C D A B C D …
2. All of `mha heads`, from the text's ids to the record, of 16,384 words, causal, in turns with
   fused attention.
3. Memory beyond q, k, v and z, at several lengths, each in a fresh process that reports by how much
   it grew.
4. Accuracy against float64 explicit matrices.

12 heads of width 64, float32, batch 1. Words have Zipf's frequencies, characters those of
sample_texts/story.txt.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch.nn.functional import scaled_dot_product_attention

from mhacli.attention import masks
from mhacli.attention.axes import Axes, Axis, StatisticsRequest, make_statistics_request
from mhacli.attention.devices import shared_out
from mhacli.attention.reduction import make_baseline, reduce_heads
from mhacli.attention.scores import ScoredAttention, head_groups
from mhacli.attention.statistics import Reduced
from mhacli.layer.run import inspect_heads
from mhacli.record.record import dims_of
from mhacli.run import Run
from mhacli.settings import Config
from mhacli.text.tokenizers import encode

N_HEADS, D_HEAD = 12, 64
LENGTHS = (2048, 4096, 8192)
COMMAND_LENGTH = 16_384
MEMORY_LENGTHS = (4096, 8192, 16384, 32768)
TEXT = Path(__file__).parents[1] / "sample_texts" / "story.txt"


def made(n: int, *, causal: bool, spread: float = 1.0) -> ScoredAttention:
    """An attention of random queries, keys and values, whose scores have a standard deviation of
    `spread`.
    """
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(1, N_HEADS, n, D_HEAD, generator=generator) for _ in range(3))
    return ScoredAttention(
        q=q * spread, k=k, v=v, scale=D_HEAD**-0.5, allowed=masks.causal() if causal else None
    )


def request_of(n: int, *, of_characters: bool = False) -> StatisticsRequest:
    """The tokens of a text of `n` words or characters."""
    weights = (
        torch.bincount(torch.tensor(list(TEXT.read_bytes())))
        if of_characters
        else 1 / torch.arange(1, 8001)
    )
    tokens = torch.multinomial(
        weights.float(), n, replacement=True, generator=torch.Generator().manual_seed(1)
    )
    axis = Axis((tuple(tokens.tolist()),), ((),), n, "right", torch.device("cpu"))
    return make_statistics_request(
        Axes(axis, axis, is_self=True, id_of=lambda word: -1, dtype="float32")
    )


def overview(block: str, attention: ScoredAttention, request: StatisticsRequest) -> list[Reduced]:
    """Everything that `mha heads` computes of queries, keys and values, by `c` or `torch`."""
    os.environ["MHA_BLOCK"] = block
    make_baseline(attention, request)
    parts = head_groups(range(N_HEADS), 1, most=-(-N_HEADS // torch.get_num_threads()))
    return shared_out([partial(reduce_heads, attention, request, heads) for heads in parts])


def in_turns(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """The seconds of each call in each round, the first of which does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            began = perf_counter()
            call()
            seconds[name].append(perf_counter() - began)
    return {name: samples[1:] for name, samples in seconds.items()}


def ratios(seconds: Mapping[str, list[float]]) -> str:
    """The median of fused attention, and of each other call's ratio to it."""
    fused = seconds["fused"]
    rows = {
        name: statistics.median(a / b for a, b in zip(own, fused, strict=True))
        for name, own in seconds.items()
    }
    return f"fused {statistics.median(fused) * 1e3:.0f} ms  " + "  ".join(
        f"{name} {row:.2f}" for name, row in rows.items()
    )


def time_all(rounds: int) -> None:
    """Prints the ratios at every length."""
    for n in LENGTHS:
        for causal in (False, True):
            attention = made(n, causal=causal)
            q, k, v = attention.q, attention.k, attention.v
            assert v is not None
            words, characters = request_of(n), request_of(n, of_characters=True)
            calls: dict[str, Callable[[], object]] = {
                "fused": partial(scaled_dot_product_attention, q, k, v, is_causal=causal),
                "c": partial(overview, "c", attention, words),
                "characters": partial(overview, "c", attention, characters),
                "torch": partial(overview, "torch", attention, words),
            }
            print(
                f"{n:,}{' causal' if causal else ''}: {ratios(in_turns(calls, rounds))}", flush=True
            )


def time_command(rounds: int) -> None:
    """Prints the ratio of a whole study."""
    os.environ["MHA_BLOCK"] = "c"
    config = Config(d_model=N_HEADS * D_HEAD, n_heads=N_HEADS, causal=True).resolved()
    words = " ".join(f"w{token}" for token in request_of(COMMAND_LENGTH).q_tokens[0].tolist())
    texts, vocabulary, _ = encode([words], config)
    run = Run(dims=dims_of(config, texts, n_tokens=len(vocabulary)), vocabulary=vocabulary)
    attention = made(COMMAND_LENGTH, causal=True)
    assert attention.v is not None

    fused = partial(
        scaled_dot_product_attention, attention.q, attention.k, attention.v, is_causal=True
    )
    seconds = in_turns({"fused": fused, "command": partial(inspect_heads, run, texts)}, rounds)
    print(f"mha heads, {COMMAND_LENGTH:,} causal: {ratios(seconds)}", flush=True)


def peak_mib() -> float:
    """The largest resident size of this process."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) / 1024


def measure_memory(n: int) -> None:
    """Prints by how much the statistics of a text make this process grow, beyond z."""
    overview("c", made(256, causal=True), request_of(256))
    attention, request = made(n, causal=True), request_of(n)
    before = peak_mib()
    overview("c", attention, request)
    print(f"{peak_mib() - before - N_HEADS * n * D_HEAD * 4 / (1 << 20):.0f}")


def accuracy(block: str, spread: float, *, causal: bool) -> str:
    """The largest errors against explicit matrices in float64."""
    n = 2048
    attention = made(n, causal=causal, spread=spread)
    parts = overview(block, attention, request_of(n))
    scores = (attention.q.double() @ attention.k.double().mT) * attention.scale
    if causal:
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    pattern = scores.softmax(dim=-1)
    far = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    right = {
        "entropy": torch.special.entr(pattern).sum(-1),
        "received": pattern.sum(2),
        "distance": (pattern * far).sum(-1),
    }
    errors = []
    for name, numbers in right.items():
        found = torch.cat([part.statistics[name] for part in parts], dim=1)
        size = 1.0 if name == "entropy" else numbers.abs().clamp(min=1e-9)
        errors.append(f"{name} {((found - numbers).abs() / size).max():.1e}")
    return ", ".join(errors)


def main() -> None:
    """Prints all figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rounds", type=int, nargs="?", default=3)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    if arguments.memory:
        measure_memory(arguments.memory)
        return
    time_all(arguments.rounds)
    time_command(arguments.rounds)
    for n in MEMORY_LENGTHS:
        grown = subprocess.run(
            [sys.executable, __file__, "--memory", str(n)],
            capture_output=True,
            text=True,
            check=True,
        )
        print(f"memory at {n:,}: {grown.stdout.strip()} MiB", flush=True)
    for block in ("c", "torch"):
        for spread in (1.0, 8.0):
            print(
                f"errors of {block}, spread {spread:g}: {accuracy(block, spread, causal=True)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
