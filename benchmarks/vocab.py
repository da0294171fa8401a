"""The cost of a vocabulary, beside `collections.Counter(text.split())` and the normalising that it needs besides.

    python benchmarks/vocab.py [FILE]

Repeats a text to 50 MB and times counting it in pieces, A B C A B C …, in one process; then runs `mha vocab` on texts of
10 and 100 MB as whole processes and prints their largest memory. Limit: 1.3 × Counter plus normalising.
"""

from __future__ import annotations

import statistics
import string
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from peak import peak_mib

from mhacli.text.reading import Decoding, stream_text
from mhacli.text.tokenizers import WordTokenizer

STORY = Path(__file__).parent.parent / "sample_texts" / "story.txt"
MHA = str(Path(sys.executable).with_name("mha"))
ROUNDS = 5


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    began = perf_counter()
    work()
    return perf_counter() - began


def main() -> None:
    """Prints the times, the ratio, and the memory at two sizes."""
    file = Path(sys.argv[1] if len(sys.argv) > 1 else STORY)
    source = file.read_bytes()
    if not source:
        sys.exit(f"{file} must hold some text to repeat, got an empty file")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        path.write_bytes(source * (50_000_000 // len(source) + 1))
        text = path.read_text()
        drop = str.maketrans("", "", string.punctuation)
        rounds = [
            (
                seconds(lambda: WordTokenizer().count(stream_text(str(path), Decoding()))),
                seconds(lambda: Counter(text.split())),
                seconds(lambda: text.lower().translate(drop)),
            )
            for _ in range(ROUNDS + 1)
        ][1:]
        ours, counter, normalising = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratio = statistics.median(a / (b + c) for a, b, c in rounds)
        print(
            f"{len(text) / 1e6:.0f} MB: vocabulary {ours:.2f} s, Counter {counter:.2f} s, normalising {normalising:.2f} s"
        )
        print(f"ratio to Counter + normalising: {ratio:.2f}")
        for n_bytes in (10_000_000, 100_000_000):
            path.write_bytes(source * (n_bytes // len(source) + 1))
            print(f"{n_bytes / 1e6:.0f} MB: largest memory {peak_mib([MHA, 'vocab', '--file', str(path)]):.0f} MiB")


if __name__ == "__main__":
    main()
