"""What `mha scan` costs beside a plain loop, how it scales with Ray's workers, and its memory over a large corpus.

    python benchmarks/scan.py MODEL CORPUS.jsonl [N_DOCUMENTS]
    python benchmarks/scan.py memory CORPUS.jsonl

MODEL is the folder of a checkpoint, CORPUS.jsonl a file of `python benchmarks/corpus.py`; documents are cut to 64 tokens, with
one thread of torch for each worker.

1. Throughput: units as a scan computes and writes them, beside a loop that only makes tokens of each document, runs the model
   and reduces its attention to statistics. Both in this process and in turns; ratios are of processor time, medians of units.
2. Ray: the time of a unit that computes nothing and gives as many bytes as a real one; and units per second of 2 workers beside
   1, in turns, from the moment at which all are at work.
3. `memory`: the largest resident size of `mha scan` over 1,000 and 10,000 short documents, a tiny model with random weights.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from time import perf_counter, process_time

import torch
from peak import peak_mib

from mhacli.commands.scan.folder import open_folder
from mhacli.commands.scan.request import ScanRequest, ScanSettings
from mhacli.commands.scan.units import UNIT_SIZE, Unit, UnitFiles, units
from mhacli.commands.scan.worker import Worker
from mhacli.compute.checkpoint.run import CheckpointRun
from mhacli.errors import MhaError
from mhacli.models.prepare import find, inputs_of, make_texts
from mhacli.render.base.options import ViewOptions
from mhacli.settings import ModelSettings
from mhacli.text.corpus import CorpusFormat, documents

MAX_TOKENS = 64


def good_units(corpus: str, digest: str, n_documents: int) -> list[Unit]:
    """Units of documents that have a text."""
    good = (one for one in documents([corpus], CorpusFormat()) if one.text.strip())
    return [*units(islice(good, n_documents), digest)]


class Loop:
    """What people write by hand: no rows, no files."""

    def __init__(self, request: ScanRequest) -> None:
        self.request, self.unloaded = request, find(request.run)
        self.loaded = self.unloaded.load(request.run, None)

    @torch.no_grad()
    def compute(self, unit: Unit) -> None:
        for document in unit.documents:
            request = replace(self.request.run, texts=(document[2],))
            try:
                texts = make_texts(request, self.unloaded.tokenizer, self.unloaded.config)
            except MhaError:
                continue
            inputs = inputs_of(self.loaded, texts, self.unloaded.tokenizer, request)
            CheckpointRun(self.loaded, inputs, request).run()


def throughput(request: ScanRequest, settings: ScanSettings, made: list[Unit], folder: str) -> float:
    """Prints the ratio of the loop to the scan; gives the seconds of a unit."""
    loop, worker = Loop(request), Worker(request)
    target = open_folder(folder, settings)

    def scanned(unit: Unit) -> None:
        target.write(unit, worker.compute(unit, settings)[0])

    for way in (loop.compute, scanned):
        way(made[0])
    rounds = []
    for number, unit in enumerate(made):
        times = {}
        for way in (loop.compute, scanned) if number % 2 else (scanned, loop.compute):
            began = process_time()
            way(unit)
            times[way] = process_time() - began
        rounds.append((times[loop.compute], times[scanned]))
    n_documents, seconds = len(made) * UNIT_SIZE, sum(scan for _, scan in rounds)
    ratio = statistics.median(plain / scan for plain, scan in rounds)
    print(
        f"{n_documents / seconds:.1f} documents per processor second; loop / scan {ratio:.3f}, medians of {len(made)} units"
    )
    return statistics.median(scan for _, scan in rounds)


class NoWork(Worker):
    """A worker that only answers, with so many bytes."""

    n_bytes = 0

    def compute(self, unit: Unit, settings: ScanSettings) -> tuple[UnitFiles, str]:
        return (bytes(self.n_bytes), None, b""), ""


def done_at(kind: type[Worker], request: ScanRequest, settings: ScanSettings, *, made: list[Unit]) -> list[float]:
    """When each unit was done."""
    from mhacli.commands.scan import engines

    engines.Worker = kind  # type: ignore[misc]
    return [perf_counter() for _ in engines.RayEngine(request).computed(iter(made), settings)]


def with_ray(
    request: ScanRequest, settings: ScanSettings, *, made: list[Unit], unit_s: float, n_rounds: int = 3
) -> None:
    """Prints what Ray takes of a unit, and how two workers scale."""
    import ray

    ray.init("local", num_cpus=2, log_to_driver=False, logging_level="ERROR")
    files, _ = Worker(request).compute(made[0], settings)
    NoWork.n_bytes = sum(len(file or b"") for file in files)
    times = done_at(NoWork, replace(request, workers=1), settings, made=made * 5)
    own_s = statistics.median(later - earlier for earlier, later in pairwise(times))
    print(f"Ray's part of a unit: {1000 * own_s:.1f} ms, {own_s / unit_s:.2%} of {1000 * unit_s:.0f} ms", flush=True)
    rounds = []
    for _ in range(n_rounds):
        rates = []
        for n_workers in (1, 2):
            times = done_at(Worker, replace(request, workers=n_workers), settings, made=made)
            rates.append((len(made) - n_workers) / (times[-1] - times[n_workers - 1]))
        rounds.append(rates[1] / rates[0])
    print(
        f"2 workers beside 1: {statistics.median(rounds):.2f}, rounds {', '.join(f'{ratio:.2f}' for ratio in rounds)}"
    )
    ray.shutdown()


def memory(corpus: str) -> None:
    """Prints the largest size of a scan of few and of many documents."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"vocab_size": 300, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64}
        GPT2Model(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
        texts = Path(folder, "texts.txt")
        with texts.open("w", encoding="utf-8") as out:
            out.writelines(f"{line}\n" for line in islice(_short_lines(corpus), 10_000))
        for n_documents in (1_000, 10_000):
            out_folder = Path(folder, f"{n_documents}.mha")
            words = [
                "--model",
                folder,
                "--tokenizer",
                "byte",
                "--max-tokens",
                "16",
                "--lines",
                "--max-docs",
                str(n_documents),
            ]
            mib = peak_mib(
                [str(Path(sys.executable).with_name("mha")), "scan", *words, str(texts), "--out", str(out_folder)]
            )
            print(f"{n_documents:,} documents: {mib:.0f} MiB", flush=True)


def _short_lines(corpus: str) -> Iterator[str]:
    """The begins of documents, over and over, each with its number."""
    texts = [one.text[:40] for one in documents([corpus], CorpusFormat()) if one.text]
    number = 0
    while True:
        for text in texts:
            number += 1
            yield f"{number} " + " ".join(text.split())


def loop_and_ray(model: str, corpus: str, n_documents: int) -> None:
    """Prints throughput and what Ray does."""
    request = ScanRequest(
        model=ModelSettings(path=model),
        given={"device": "cpu"},
        max_tokens=MAX_TOKENS,
        sources=(corpus,),
        form=CorpusFormat(),
        view=ViewOptions(),
    )
    settings = Worker(request).settings()
    made = good_units(corpus, settings.digest, n_documents)
    with tempfile.TemporaryDirectory() as folder:
        unit_s = throughput(request, settings, made, str(Path(folder, "heads.mha")))
    with_ray(request, settings, made=made, unit_s=unit_s)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the folder of a checkpoint, or memory")
    parser.add_argument("corpus", help="a file of python benchmarks/corpus.py")
    parser.add_argument("n_documents", nargs="?", type=int, default=320, help="documents of 1 and 2 (default: 320)")
    given = parser.parse_args()
    if given.model == "memory":
        memory(given.corpus)
    else:
        loop_and_ray(given.model, given.corpus, given.n_documents)


if __name__ == "__main__":
    main()
