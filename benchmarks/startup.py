"""How long commands take to answer, beside the imports that they cannot do without.

    python benchmarks/startup.py

Each pair runs in turn, A B A B …, as whole processes; the ratio is the median of the ratios pair by pair. Limits: `--help`
1.6 × its baseline; the smallest run 1.15 × its baseline plus 0.1 s.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter

MHA = str(Path(sys.executable).with_name("mha"))
SCREEN = [sys.executable, "-c", "import typer, rich.console, rich.table"]
TENSORS = [sys.executable, "-c", "import torch, numpy"]
PAIRS = (
    ("mha --help", [MHA, "--help"], SCREEN),
    ("mha --version", [MHA, "--version"], SCREEN),
    ("a usage error", [MHA, "run", "a", "--heads", "5"], SCREEN),
    ('mha run "a"', [MHA, "run", "a"], TENSORS),
)
ROUNDS = 21


def seconds(command: list[str]) -> float:
    """Wall time of one run of a process."""
    began = perf_counter()
    subprocess.run(command, capture_output=True, check=False)
    return perf_counter() - began


def main() -> None:
    """Prints one line per pair."""
    print(f"{platform.platform()}, Python {platform.python_version()}, {ROUNDS} rounds after one warm-up")
    print(f"{'command':<16}{'median s':>10}{'baseline s':>12}{'ratio':>8}")
    for name, command, baseline in PAIRS:
        rounds = [(seconds(command), seconds(baseline)) for _ in range(ROUNDS + 1)][1:]
        ours, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratio = statistics.median(a / b for a, b in rounds)
        print(f"{name:<16}{ours:>10.3f}{theirs:>12.3f}{ratio:>8.2f}")


if __name__ == "__main__":
    main()
