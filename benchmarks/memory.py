"""The largest memory of a whole `mha run` beside its prediction.

python benchmarks/memory.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from peak import peak_mib

from mhacli.record.record import dims_of
from mhacli.run import Run, require_memory
from mhacli.settings import Config
from mhacli.text.tokenizers import encode

MHA = str(Path(sys.executable).with_name("mha"))


def compare_memory(length: int, n_heads: int) -> None:
    """Prints the largest memory of a run beside what was predicted for it."""
    config = Config(n_heads=n_heads, causal=True).resolved()
    words_of_text = "a b c d " * (length // 4)
    texts, vocabulary, _ = encode([words_of_text], config)
    run = Run(dims=dims_of(config, texts, n_tokens=len(vocabulary)), vocabulary=vocabulary)
    predicted = require_memory(run, 1 << 60) / 2**20
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as text:
        text.write(words_of_text)
        text.flush()
        words = [
            MHA,
            "run",
            "--file",
            text.name,
            "--causal",
            "--heads",
            str(n_heads),
            "--view",
            "none",
        ]
        peak = peak_mib(words)
    print(
        f"T={length:>5}, {n_heads} heads: largest memory {peak:6.0f} MiB, predicted"
        f" {predicted:6.0f} MiB"
    )


def main() -> None:
    """Prints a line per size."""
    for length, n_heads in ((1024, 4), (2048, 4), (4096, 4), (4096, 8)):
        compare_memory(length, n_heads)


if __name__ == "__main__":
    main()
