"""The cost of `mha vocab`, beside `collections.Counter(text.split())` and the normalising that it
needs besides.

    python benchmarks/vocab.py [FILE]

Repeats a text to 50 MB. `mha vocab` and a script that reads it, makes it lower-case without
punctuation, and counts run as whole processes, A B A B …; processor time. Then the largest memory
of `mha vocab` on texts of 10 and 100 MB. Limit: 1.3 ×.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from peak import peak_mib

STORY = Path(__file__).parent.parent / "sample_texts" / "story.txt"
MHA = str(Path(sys.executable).with_name("mha"))
COUNTER = """
import collections, string, sys
text = open(sys.argv[1], encoding="utf-8").read().lower()
text = text.translate(str.maketrans("", "", string.punctuation))
collections.Counter(text.split())
"""
ROUNDS = 5


def seconds(command: list[str]) -> float:
    """The processor time of one run of a command."""
    before = os.times()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def main() -> None:
    """Prints the times, the ratio, and the memory at two sizes."""
    file = Path(sys.argv[1] if len(sys.argv) > 1 else STORY)
    source = file.read_bytes()
    if not source:
        sys.exit(f"{file} must hold some text to repeat, got an empty file")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        path.write_bytes(source * (50_000_000 // len(source) + 1))
        ways = ([MHA, "vocab", "--file", str(path)], [sys.executable, "-c", COUNTER, str(path)])
        rounds = [[seconds(way) for way in ways] for _ in range(ROUNDS + 1)][1:]
        ours, counter = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratio = statistics.median(a / b for a, b in rounds)
        print(
            f"50 MB: mha vocab {ours:.2f} s, Counter and normalising {counter:.2f} s, ratio"
            f" {ratio:.2f}",
            flush=True,
        )
        for n_bytes in (10_000_000, 100_000_000):
            path.write_bytes(source * (n_bytes // len(source) + 1))
            print(
                f"{n_bytes / 1e6:.0f} MB: largest memory"
                f" {peak_mib([MHA, 'vocab', '--file', str(path)]):.0f} MiB"
            )


if __name__ == "__main__":
    main()
