"""What looking at a checkpoint costs, beside the plain forward pass and beside `output_attentions=True`.

    python benchmarks/models.py [LENGTH] [ROUNDS]
    python benchmarks/models.py memory [LENGTH ...]
    python benchmarks/models.py short

A model of GPT-2-small's shape (12 layers, 12 heads, width 768) with random weights, without a language head, float32.

1. Time: the plain pass of the default implementation, and the look at all layers and heads with every statistic of
   `mha heads`, the comparison with a pass without inspection included; in turns, medians of the ratios of each round, of wall
   time and of processor time, which other work on the machine changes less.
2. `memory`: the largest resident size of a fresh process for each, and for `output_attentions=True` with eager attention up
   to 4,096 tokens, whose matrices are what a notebook holds.
3. `short`: `mha run --model` on a sentence as a process, beside a process that loads the model and runs it plainly.
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

from mhacli.compute.checkpoint.run import CheckpointRun
from mhacli.models.folder import Checkpoint
from mhacli.models.inputs import ModelInputs
from mhacli.models.layers import CheckpointRunRequest
from mhacli.models.load import Loaded
from mhacli.record.heads import HeadsRequest
from mhacli.text.tokens import TokenSequence

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
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=MOST_POSITIONS, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    return AutoModel.from_config(config, attn_implementation=implementation).eval()


def tokens(length: int) -> tuple[int, ...]:
    """Ids whose n-th has a frequency of 1/n."""
    generator = torch.Generator().manual_seed(1)
    found: list[int] = torch.multinomial(
        1 / torch.arange(1, float(VOCABULARY)), length, replacement=True, generator=generator
    ).tolist()
    return tuple(found)


def plain(model: Any, length: int) -> None:
    """The pass that always runs."""
    with torch.no_grad():
        model(torch.tensor([tokens(length)]), use_cache=False)


def eager(model: Any, length: int) -> None:
    """All matrices at once, and of each head the entropy and what keys receive."""
    with torch.no_grad():
        found = model(torch.tensor([tokens(length)]), use_cache=False, output_attentions=True).attentions
        [(-(p * p.clamp(min=1e-30).log()).sum(-1).mean(-1), p.sum(dim=-2)) for p in found]


def look(model: Any, length: int) -> None:
    """The look at every head of every layer."""
    ids = tokens(length)
    text = TokenSequence("", tuple(map(str, ids)), ids, ((0, 0),) * length)
    inputs = ModelInputs((text,), None, "right", {"input_ids": torch.tensor([ids])})
    run = CheckpointRun(
        Loaded(model, Checkpoint("gpt2", {}, {}, ()), "gpt2", None), inputs, CheckpointRunRequest(HeadsRequest())
    )
    run.run()
    record = run.record()
    assert record.self_check.ok
    assert record.model is not None
    assert record.model.identical_outputs


WAYS = {"plain": plain, "look": look, "eager": eager}


def times(length: int, rounds: int) -> None:
    """Both in turns."""
    clocks = {"wall": perf_counter, "processor": process_time}
    model, seconds = small(), {clock: {"plain": list[float](), "look": list[float]()} for clock in clocks}
    plain(model, 256)
    for _ in range(rounds):
        for name in ("plain", "look"):
            began = {clock: now() for clock, now in clocks.items()}
            WAYS[name](model, length)
            for clock, now in clocks.items():
                seconds[clock][name].append(now() - began[clock])
    for clock, found in seconds.items():
        ratios = [look / plain for plain, look in zip(found["plain"], found["look"], strict=True)]
        middle = {name: statistics.median(of_rounds) for name, of_rounds in found.items()}
        print(f"{length} tokens, {clock} time: plain {middle['plain']:.2f} s, look {middle['look']:.2f} s", end=", ")
        print(f"ratio median {statistics.median(ratios):.2f}, best {min(ratios):.2f} of {rounds} rounds")


def memory(lengths: list[int]) -> None:
    """Each way in a process of its own, beside one that only loads."""
    for length in lengths:
        ways = ["plain", "look", *(["eager"] if length <= EAGER_MOST else [])]
        found = {}
        for way in ways:
            done = subprocess.run([sys.executable, __file__, "one", way, str(length)], capture_output=True, check=True)
            found[way] = [float(word) for word in done.stdout.split()]
        said = ", ".join(f"{way} {mib:.0f} MiB {s:.1f} s" for way, (mib, s) in found.items())
        print(f"{length} tokens: {said}; look / plain {found['look'][0] / found['plain'][0]:.2f}")


def one(way: str, length: int) -> None:
    """One way in this process."""
    model = small("eager" if way == "eager" else None)
    began = perf_counter()
    WAYS[way](model, length)
    seconds = perf_counter() - began
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, seconds)


def short(rounds: int = 5) -> None:
    """Whole processes, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        small().save_pretrained(folder)
        mha = [str(Path(sys.executable).parent / "mha"), "run", SENTENCE, "--tokenizer", "byte", "--model", folder]
        ways = {"plain": [sys.executable, "-c", PLAIN, folder], "look": mha}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, command in ways.items():
                began = perf_counter()
                subprocess.run(command, capture_output=True, check=True)
                found[name].append(perf_counter() - began)
    ratios = [look / plain for plain, look in zip(found["plain"], found["look"], strict=True)]
    said = ", ".join(f"{name} {statistics.median(s):.2f} s" for name, s in found.items())
    print(f"a short text: {said}, ratio median {statistics.median(ratios):.2f}")


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
