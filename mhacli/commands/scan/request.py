"""What a scan computes: the request that its workers get, and the settings that decide its numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

from mhacli.io.data import plain
from mhacli.run import Run
from mhacli.settings import Reducer
from mhacli.text.corpus import CorpusFormat
from mhacli.text.tokens import LayerChoice

RowFormat = Literal["parquet", "jsonl"]


@dataclass(frozen=True)
class ScanRequest:
    """The corpus, the folder of the result `out`, and what to compute of each document: `run` has no texts.

    A document may lack spans of `run`. With `effect`, each head is also removed. `strict` refuses bad documents, `mixed`
    accepts units of other devices, and `command` is the command line for the record. The request can be pickled: each worker
    loads the model by it.
    """

    run: Run
    sources: tuple[str, ...]
    form: CorpusFormat
    out: str
    effect: bool = False
    rows: RowFormat = "jsonl"
    strict: bool = False
    mixed: bool = False
    command: tuple[str, ...] = ()

    def of_document(self, text: str) -> Run:
        """The run that `mha heads` would make for one document, without spans."""
        return replace(self.run, texts=(text,), spans=())


@dataclass(frozen=True)
class ScanSettings:
    """The settings that, with the documents, determine the results: equal settings give equal bytes.

    `model_digest` is that of weights, config and tokenizer. `device` is the kind of device with its name or instruction set,
    `rows` the format of rows with the library that writes it. `pack` is False; folders of earlier versions may have True.
    """

    model: str
    model_digest: str
    mha: str
    torch: str
    transformers: str
    dtype: str
    reducer: Reducer
    device: str
    threads: int
    rows: str
    unit_size: int
    max_tokens: int | None
    pack: bool
    layers: tuple[LayerChoice, ...] | None
    heads: tuple[int, ...] | None
    conditions: tuple[str, ...]
    spans: tuple[str, ...]
    first_tokens: int
    sink_weight: float
    allow_nonfinite: bool
    effect: bool

    @property
    def row_format(self) -> str:
        """`parquet` or `jsonl`, also the ending of files of rows."""
        return self.rows.split()[0]

    @property
    def span_names(self) -> tuple[str, ...]:
        """The names of the spans."""
        return tuple(word.partition("=")[0].strip() for word in self.spans)

    @property
    def digest(self) -> str:
        """The sha256 of all settings except the name of the model, which is only its location."""
        text = json.dumps(plain(replace(self, model="")), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self, other: ScanSettings) -> Iterator[tuple[str, str, str]]:
        """The settings of another scan that differ and affect the results: name, value here and value there as text."""
        for field in fields(self):
            values = getattr(self, field.name), getattr(other, field.name)
            if values[0] != values[1] and field.name != "model":
                here, there = (value if isinstance(value, str) else json.dumps(plain(value)) for value in values)
                is_digest = field.name == "model_digest"
                yield field.name, here[:12] if is_digest else here, there[:12] if is_digest else there
