"""How long commands take to answer, beside the imports that they cannot do without.

    python benchmarks/startup.py [ROUNDS]

Each pair runs in turn, A B A B …, as whole processes; the ratio is the median of the ratios pair by
pair, of wall time and of processor time, which other work on the machine changes less. Limits:
`--help` 1.6 × its baseline; the smallest run 1.15 × its baseline plus 0.1 s; `mha check` of a
module that is right 1.5 × its baseline plus 1 s. Modules are compiled beforehand, as `pip install`
does.
"""

from __future__ import annotations

import compileall
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import mhacli

MHA = str(Path(sys.executable).with_name("mha"))
SCREEN = [sys.executable, "-c", "import typer, rich.console, rich.table"]
TENSORS = [sys.executable, "-c", "import torch, numpy"]
TORCH = [sys.executable, "-c", "import torch"]
RIGHT = str(Path(__file__).parents[1] / "tests/golden/files/attention.py") + ":Right"
PAIRS = (
    ("mha --help", [MHA, "--help"], SCREEN),
    ("mha --version", [MHA, "--version"], SCREEN),
    ("a usage error", [MHA, "run", "a", "--heads", "5"], SCREEN),
    ('mha run "a"', [MHA, "run", "a"], TENSORS),
    ("mha check", [MHA, "check", RIGHT], TORCH),
    ("mha doctor", [MHA, "doctor"], TORCH),
)
ROUNDS = 21


class Seconds(NamedTuple):
    """Wall time and processor time of one run of a process, its children's included."""

    wall: float
    processor: float


def seconds(command: list[str]) -> Seconds:
    """What one run of a command takes."""
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    before, began = os.times(), perf_counter()
    subprocess.run(command, capture_output=True, check=False, env=environment)
    wall, after = perf_counter() - began, os.times()
    return Seconds(wall, sum(after[2:4]) - sum(before[2:4]))


def main() -> None:
    """Prints a line per pair and kind of time."""
    n_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    compileall.compile_dir(Path(mhacli.__file__).parent, quiet=1)
    print(
        f"{platform.platform()}, Python {platform.python_version()}, {n_rounds} rounds after one"
        " warm-up"
    )
    print(f"{'command':<16}{'time':<11}{'median s':>10}{'baseline s':>12}{'ratio':>8}")
    for name, command, baseline in PAIRS:
        rounds = [(seconds(command), seconds(baseline)) for _ in range(n_rounds + 1)][1:]
        for kind, pairs in zip(
            Seconds._fields, zip(*(zip(*r, strict=True) for r in rounds), strict=True), strict=True
        ):
            ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(a / b for a, b in pairs)
            print(f"{name:<16}{kind:<11}{ours:>10.3f}{theirs:>12.3f}{ratio:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
