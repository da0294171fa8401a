"""The cost of observing: `attend` beside the same formula in four lines of torch, and memory beside its prediction.

    python benchmarks/attend.py

Times alternate A B A B … in one process with two threads; memory is the largest resident size of a whole `mha run`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import torch
from peak import peak_mib

from mhacli.attention import attend, masks
from mhacli.config import Config
from mhacli.facts import Facts
from mhacli.plan import make_plan

MHA = str(Path(sys.executable).with_name("mha"))
ROUNDS = 15


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention as people write it."""
    allowed = torch.arange(k.shape[-2])[None, :] <= torch.arange(q.shape[-2])[:, None]
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(dim=-1) @ v


def compare_time(length: int) -> None:
    """Prints the median ratio of `attend` to the four lines, 8 heads, d_head 64."""
    q, k, v = torch.randn(3, 1, 8, length, 64).unbind()
    rounds = []
    with torch.no_grad():
        for _ in range(ROUNDS + 2):
            began = perf_counter()
            attend(q, k, v, allowed=masks.causal())
            middle = perf_counter()
            plain(q, k, v)
            rounds.append((middle - began, perf_counter() - middle))
    ours, theirs = (statistics.median(column) for column in zip(*rounds[2:], strict=True))
    ratio = statistics.median(a / b for a, b in rounds[2:])
    print(f"T={length:>5}: attend {ours * 1e3:8.2f} ms, four lines {theirs * 1e3:8.2f} ms, ratio {ratio:.2f}")


def compare_memory(length: int, n_heads: int) -> None:
    """Prints the largest memory of a run beside what was predicted for it."""
    facts = Facts(Config(n_heads=n_heads, causal=True).resolved(), batch=1, q_len=length, k_len=length)
    predicted = make_plan(facts, None).peak_bytes / 2**20
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as text:
        text.write("a b c d " * (length // 4))
        text.flush()
        words = [MHA, "run", "--file", text.name, "--causal", "--heads", str(n_heads), "--view", "none"]
        peak = peak_mib(words)
    print(f"T={length:>5}, {n_heads} heads: largest memory {peak:6.0f} MiB, predicted {predicted:6.0f} MiB")


def main() -> None:
    """Prints both comparisons."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, causal, {ROUNDS} rounds")
    for length in (128, 512, 1024, 2048):
        compare_time(length)
    for length, n_heads in ((1024, 4), (2048, 4), (4096, 4), (4096, 8)):
        compare_memory(length, n_heads)


if __name__ == "__main__":
    main()
