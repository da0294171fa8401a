"""Corpora for scans, and what a scan wrote."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TEXT = "the cat sat on the mat and the dog saw it sit there while rain fell on a red roof"
WORDS = TEXT.split()


def sentences(n: int) -> list[str]:
    """Texts of 3 to 7 words, each another."""
    return [
        " ".join(WORDS[(7 * i + j * (1 + i % 3)) % len(WORDS)] for j in range(3 + i % 5))
        for i in range(n)
    ]


def corpus_file(path: Path, texts: Sequence[Any]) -> Path:
    """A file of JSON lines, one for each text; what is no string is written as it is."""
    lines = (json.dumps({"text": text} if isinstance(text, str) else text) for text in texts)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def rows_of(out: Path) -> list[dict[str, Any]]:
    """The rows of a result: one for each document, layer and head."""
    rows: list[dict[str, Any]] = []
    for path in sorted((out / "rows").iterdir()):
        if path.suffix == ".parquet":
            import pyarrow.parquet

            rows += pyarrow.parquet.read_table(path).to_pylist()
        else:
            rows += [json.loads(line) for line in path.read_text().splitlines()]
    return rows


def digests(out: Path) -> dict[str, str]:
    """The sha256 of every file of a result."""
    files = (path for path in out.rglob("*") if path.is_file())
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def has(module: str) -> bool:
    """Whether a module is installed, without importing it."""
    return importlib.util.find_spec(module) is not None
