"""What `mha scan` costs beside a plain loop, how it scales with Ray's workers, and its memory over
a large corpus.

    python benchmarks/scan.py MODEL [N_DOCUMENTS]
    python benchmarks/scan.py memory

MODEL is the folder of a checkpoint; documents are passages of sample_texts, cut to 64 tokens, with
one thread of torch for each worker. All are whole processes, in turns.

1. Loop: a script that loads the model, makes tokens of each document, and calls the model within
   `mhacli.inspecting`, which computes the statistics of all heads; it writes nothing. The ratio is
   of processor time.
2. Ray: `mha scan --workers 1` and `--workers 2`, wall time, from which that of a scan of 16
   documents, which is mostly start-up, is taken off.
3. `memory`: the largest resident size of `mha scan` over 1,000 and 10,000 short documents, a tiny
   model with random weights.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from peak import peak_mib

MHA = str(Path(sys.executable).with_name("mha"))
SAMPLES = Path(__file__).parents[1] / "sample_texts"
MAX_TOKENS, UNIT, ROUNDS = 64, 16, 3
LOOP = """
import sys, torch, transformers, mhacli
torch.set_num_threads(1)
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
model = transformers.AutoModel.from_pretrained(sys.argv[1])
with mhacli.inspecting(model.eval(), tokenizer, keep_passes=False) as seen, torch.no_grad():
    for line in open(sys.argv[2], encoding="utf-8"):
        model(**tokenizer(line, return_tensors="pt", truncation=True, max_length=int(sys.argv[3])))
seen.statistics()
"""


class Seconds(NamedTuple):
    """Wall time and processor time of a process, its children's included."""

    wall: float
    processor: float


def seconds(command: list[str]) -> Seconds:
    """What one run of a command takes. Fails if the command does."""
    before, began = os.times(), perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    wall, after = perf_counter() - began, os.times()
    return Seconds(wall, sum(after[2:4]) - sum(before[2:4]))


def passages(n: int) -> list[str]:
    """Passages of the sample texts in one line each, often a sentence and seldom some pages, each
    beginning at a word.
    """
    drawn, found = random.Random(0), list[str]()
    texts = [
        " ".join(path.read_text(encoding="utf-8").split()) for path in sorted(SAMPLES.glob("*.txt"))
    ]
    while len(found) < n:
        text = drawn.choice(texts)
        start = text.find(" ", drawn.randrange(len(text))) + 1
        found.append(text[start : start + round(drawn.lognormvariate(5, 1.2))].strip() or ".")
    return found


def scan(model: str, file: Path, folder: str, workers: int = 0) -> Seconds:
    """What a scan takes, in this process of its own or with Ray's workers."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        words = f"--model {model} --lines --max-tokens {MAX_TOKENS} --threads 1".split()
        words += ["--out", f"{out}/scan.mha"]
        if workers:
            words += ["--workers", str(workers)]
        return seconds([MHA, "scan", str(file), *words])


def throughput(model: str, n_documents: int) -> None:
    """Prints the ratio of the loop to the scan, and of two workers to one."""
    with tempfile.TemporaryDirectory() as folder:
        few, many = Path(folder, "few.txt"), Path(folder, "many.txt")
        good = passages(n_documents)
        few.write_text("\n".join(good[:UNIT]), encoding="utf-8")
        many.write_text("\n".join(good), encoding="utf-8")
        loop = [sys.executable, "-c", LOOP, model, str(many), str(MAX_TOKENS)]
        rounds = [
            (seconds(loop).processor, scan(model, many, folder).processor) for _ in range(ROUNDS)
        ]
        ratio = statistics.median(plain / ours for plain, ours in rounds)
        print(
            f"{len(good)} documents: loop / scan {ratio:.2f}, medians of {ROUNDS} rounds",
            flush=True,
        )
        gains = []
        for _ in range(ROUNDS):
            one, two = (
                scan(model, many, folder, n).wall - scan(model, few, folder, n).wall for n in (1, 2)
            )
            gains.append(one / two)
        print(
            f"2 workers beside 1: {statistics.median(gains):.2f}, rounds"
            f" {', '.join(f'{gain:.2f}' for gain in gains)}"
        )


def memory() -> None:
    """Prints the largest size of a scan of few and of many documents."""
    import torch
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=300,
        n_embd=24,
        n_layer=2,
        n_head=3,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    begins = [text[:40] for text in passages(100)]
    with tempfile.TemporaryDirectory() as folder:
        GPT2Model(config).save_pretrained(folder)
        lines = Path(folder, "texts.txt")
        lines.write_text(
            "".join(f"{n} {begins[n % len(begins)]}\n" for n in range(10_000)), encoding="utf-8"
        )
        for n_documents in (1_000, 10_000):
            words = ["--model", folder, "--tokenizer", "byte", "--max-tokens", "16", "--lines"]
            words += ["--max-docs", str(n_documents), "--out", f"{folder}/{n_documents}.mha"]
            mib = peak_mib([MHA, "scan", str(lines), *words])
            print(f"{n_documents:,} documents: {mib:.0f} MiB", flush=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="the folder of a checkpoint, or memory")
    parser.add_argument(
        "n_documents", nargs="?", type=int, default=320, help="documents of 1 and 2 (default: 320)"
    )
    given = parser.parse_args()
    if given.model == "memory":
        memory()
    else:
        throughput(given.model, given.n_documents)


if __name__ == "__main__":
    main()
