"""What inspecting a checkpoint costs, beside the plain forward pass and beside
`output_attentions=True`.

    python benchmarks/models.py [LENGTH] [ROUNDS]
    python benchmarks/models.py memory [LENGTH ...]
    python benchmarks/models.py short

A model of GPT-2-small's shape (12 layers, 12 heads, width 768) with random weights, without a
language head, float32.

1. Time: the plain pass of the default implementation, and the same call within `mhacli.inspecting`,
   which computes every statistic of every head; in turns, medians of the ratios of each round, of
   wall time and of processor time, which other work on the machine changes less.
2. `memory`: the largest resident size of a fresh process for each, and for `output_attentions=True`
   with eager attention up to 4,096 tokens, whose matrices are what a notebook holds.
3. `short`: `mha run --model` on a sentence as a process, beside a process that loads the model and
   runs it plainly.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from transformers import AutoModel, GPT2Config

import mhacli

VOCABULARY, MOST_POSITIONS, EAGER_MOST = 4000, 16_384, 4096
SENTENCE = "The quick brown fox jumps over the lazy dog"
PLAIN = """
import sys, torch
from transformers import AutoModel
model = AutoModel.from_pretrained(sys.argv[1]).eval()
with torch.no_grad():
    model(torch.tensor([list(range(2, 12))]))
"""


def small(implementation: str | None = None) -> Any:
    """GPT-2-small's shape, random weights."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=MOST_POSITIONS, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    return AutoModel.from_config(config, attn_implementation=implementation).eval()


def tokens(length: int) -> torch.Tensor:
    """Ids whose n-th has a frequency of 1/n."""
    frequencies = 1 / torch.arange(1, float(VOCABULARY))
    return torch.multinomial(
        frequencies, length, replacement=True, generator=torch.Generator().manual_seed(1)
    )[None]


@torch.no_grad()
def plain(model: Any, length: int) -> None:
    """The pass alone."""
    model(tokens(length), use_cache=False)


@torch.no_grad()
def eager(model: Any, length: int) -> None:
    """All matrices at once, and of each head the entropy and the attention that keys receive."""
    patterns = model(tokens(length), use_cache=False, output_attentions=True).attentions
    [(-(p * p.clamp(min=1e-30).log()).sum(-1).mean(-1), p.sum(dim=-2)) for p in patterns]


@torch.no_grad()
def inspected(model: Any, length: int) -> None:
    """The pass with the statistics of every head of every layer."""
    with mhacli.inspecting(model) as seen:
        model(tokens(length), use_cache=False)
    assert len(seen.record.layers) == model.config.n_layer


WAYS = {"plain": plain, "inspected": inspected, "eager": eager}


def times(length: int, rounds: int) -> None:
    """Prints the time of both, in turns."""
    clocks = {"wall": perf_counter, "processor": process_time}
    model, seconds = (
        small(),
        {clock: {"plain": list[float](), "inspected": list[float]()} for clock in clocks},
    )
    plain(model, 256)
    for _ in range(rounds):
        for name in ("plain", "inspected"):
            began = {clock: now() for clock, now in clocks.items()}
            WAYS[name](model, length)
            for clock, now in clocks.items():
                seconds[clock][name].append(now() - began[clock])
    for clock, found in seconds.items():
        ratios = [
            ours / plain for plain, ours in zip(found["plain"], found["inspected"], strict=True)
        ]
        middle = {name: statistics.median(of_rounds) for name, of_rounds in found.items()}
        print(
            f"{length} tokens, {clock} time: plain {middle['plain']:.2f} s, inspected"
            f" {middle['inspected']:.2f} s",
            end=", ",
        )
        print(
            f"ratio median {statistics.median(ratios):.2f}, best {min(ratios):.2f} of {rounds}"
            " rounds"
        )


def memory(lengths: list[int]) -> None:
    """Prints the memory of each way, in a process of its own."""
    for length in lengths:
        ways = ["plain", "inspected", *(["eager"] if length <= EAGER_MOST else [])]
        found = {}
        for way in ways:
            done = subprocess.run(
                [sys.executable, __file__, "one", way, str(length)], capture_output=True, check=True
            )
            found[way] = [float(word) for word in done.stdout.split()]
        said = ", ".join(f"{way} {mib:.0f} MiB {s:.1f} s" for way, (mib, s) in found.items())
        print(
            f"{length} tokens: {said}; inspected / plain"
            f" {found['inspected'][0] / found['plain'][0]:.2f}",
            flush=True,
        )


def one(way: str, length: int) -> None:
    """One way in this process."""
    model = small("eager" if way == "eager" else None)
    began = perf_counter()
    WAYS[way](model, length)
    seconds = perf_counter() - began
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, seconds)


def short(rounds: int = 5) -> None:
    """Prints the time of whole processes, in turns after one warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        small().save_pretrained(folder)
        mha = [
            str(Path(sys.executable).parent / "mha"),
            "run",
            SENTENCE,
            "--tokenizer",
            "byte",
            "--model",
            folder,
        ]
        ways = {"plain": [sys.executable, "-c", PLAIN, folder], "mha run": mha}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds + 1):
            for name, command in ways.items():
                began = perf_counter()
                subprocess.run(command, capture_output=True, check=True)
                found[name].append(perf_counter() - began)
    found = {name: seconds[1:] for name, seconds in found.items()}
    ratios = [ours / plain for plain, ours in zip(found["plain"], found["mha run"], strict=True)]
    said = ", ".join(f"{name} {statistics.median(s):.2f} s" for name, s in found.items())
    print(f"a sentence: {said}, ratio median {statistics.median(ratios):.2f}")


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["one"]:
        one(words[1], int(words[2]))
    elif words[:1] == ["memory"]:
        memory([int(word) for word in words[1:]] or [1024, 2048, 4096, 8192])
    elif words[:1] == ["short"]:
        short()
    else:
        times(int(words[0]) if words else 4096, int(words[1]) if len(words) > 1 else 5)


if __name__ == "__main__":
    main()
