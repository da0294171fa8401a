"""How fast `mha run` prints the attention weights of a long text as numbers, and in how much memory.

    python benchmarks/tables.py [ROUNDS]

Whole processes on random words out of 700, 4 heads. Each view runs in turn with `--view none`, which computes the same and
draws no head; what a view adds to that is the cost of its tables. Processor time, so that other work on the machine says
little. Limits: 20,000 cells a second with `--all`, in the memory that `--view none` takes.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

MHA = str(Path(sys.executable).with_name("mha"))
N_HEADS, N_WORDS = 4, 700
LENGTHS = (1024, 1500)
VIEWS = {"default": [], "--all": ["--all", "--view", "matrix"]}


class Cost(NamedTuple):
    """What a process took: processor seconds, and MiB at its largest."""

    cpu_s: float
    peak_mib: float


def cost(command: list[str]) -> Cost:
    """That of one run of a command. Fails if the command does."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)}: exit code {os.waitstatus_to_exitcode(status)}")
    return Cost(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def median(costs: list[Cost]) -> Cost:
    """The median of each number."""
    return Cost(*(statistics.median(column) for column in zip(*costs, strict=True)))


def main() -> None:
    """Prints a line per length and view."""
    n_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    words = random.Random(0)
    print(f"{'tokens':>6}  {'view':<8}{'processor s':>12}{'none':>7}{'cells / s':>11}{'MiB':>7}{'none':>6}")
    for length in LENGTHS:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as text:
            text.write(" ".join(f"w{words.randrange(N_WORDS)}" for _ in range(length)))
            text.flush()
            run = [MHA, "run", "--file", text.name, "--heads", str(N_HEADS)]
            for name, options in VIEWS.items():
                pairs = [(cost([*run, *options]), cost([*run, "--view", "none"])) for _ in range(n_rounds)]
                drawn, none = (median([*column]) for column in zip(*pairs, strict=True))
                speed = f"{N_HEADS * length**2 / (drawn.cpu_s - none.cpu_s):,.0f}" if options else "–"
                print(f"{length:>6}  {name:<8}{drawn.cpu_s:>12.1f}{none.cpu_s:>7.1f}{speed:>11}", end="")
                print(f"{drawn.peak_mib:>7.0f}{none.peak_mib:>6.0f}", flush=True)


if __name__ == "__main__":
    main()
