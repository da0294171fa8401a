"""Corpora and scans for tests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mhacli.compute.scan.engines.single import SingleEngine
from mhacli.compute.scan.run import ScanStudy
from mhacli.compute.scan.worker import WorkerStart
from mhacli.requests.scan import ScanRequest
from mhacli.results.record.record import Record
from mhacli.results.scan.settings import ScanSettings
from mhacli.results.scan.unit import Unit, units
from mhacli.text.corpus import CorpusFormat, documents

SETTINGS = ScanSettings(
    model="gpt2", model_digest="5e" * 32, mha="1", torch="2", transformers="5", dtype="float32", reducer="torch",
    device="cpu AVX2", threads=1, rows="jsonl", unit_size=16, max_tokens=None, pack=False, layers=None, heads=None, conditions=(),
    spans=(), first_tokens=4, sink_weight=0.1, allow_nonfinite=False, effect=False,
)  # fmt: skip
TEXT = "the cat sat on the mat and the dog saw it sit there while rain fell on a red roof"
WORDS = TEXT.split()


def sentences(n: int) -> list[str]:
    """Texts of 3 to 13 words, each another."""
    return [" ".join(WORDS[(7 * i + j * (1 + i % 3)) % len(WORDS)] for j in range(3 + i % 11)) for i in range(n)]


def corpus_file(path: Path, texts: Sequence[Any]) -> str:
    """A file of JSON lines, a line for each text; what is no string is written as it is."""
    lines = (json.dumps({"text": text} if isinstance(text, str) else text) for text in texts)
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def units_of(file: str, request: ScanRequest, size: int = 4) -> Iterator[Unit]:
    """The units of a file, small ones."""
    return units(documents([file], CorpusFormat()), SingleEngine().settings(request).digest, size)


def start_of(request: ScanRequest) -> WorkerStart:
    """What a worker is made from."""
    return WorkerStart(request, SingleEngine().settings(request))


def study(model: str, corpus: str, out: Path, **choices: Any) -> ScanStudy:
    """A scan in this process."""
    request = ScanRequest(model, **choices.pop("request", {}))
    form = choices.pop("form", CorpusFormat())
    return ScanStudy(request, [corpus], form, str(out), SingleEngine(), **choices)


def found(model: str, corpus: str, out: Path, **choices: Any) -> Record:
    """The record of a scan in this process."""
    record = study(model, corpus, out, **choices).run()
    assert record is not None
    return record


def digests(out: Path) -> dict[str, str]:
    """The sha256 of every file of a result."""
    files = (path for path in out.rglob("*") if path.is_file())
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
