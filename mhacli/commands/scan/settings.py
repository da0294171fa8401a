"""The settings that, with the documents, determine the results of a scan: equal settings give equal bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from mhacli.io.json_schema import plain
from mhacli.record.record import LayerChoice
from mhacli.settings import Reducer

RowFormat = Literal["parquet", "jsonl"]


@dataclass(frozen=True)
class ScanSettings:
    """The model, the versions of libraries, the device, and the request for every document.

    `model_digest` is that of weights, config and tokenizer. `device` is the kind of device with its name or instruction set,
    `rows` the format of rows with the library that writes it.
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
    pack: bool = field(default=False, kw_only=True)
    layers: tuple[LayerChoice, ...] | None
    heads: tuple[int, ...] | None
    conditions: tuple[str, ...]
    spans: tuple[str, ...]
    first_tokens: int
    sink_weight: float
    allow_nonfinite: bool
    effect: bool

    @property
    def span_names(self) -> tuple[str, ...]:
        """The names of the spans."""
        return tuple(word.partition("=")[0].strip() for word in self.spans)

    @property
    def digest(self) -> str:
        """The sha256 of all settings except the name of the model, which is only its location."""
        text = json.dumps(plain(replace(self, model="")), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def differences(old: ScanSettings, new: ScanSettings) -> Iterator[tuple[str, str, str]]:
    """The settings that differ and affect the results: name, old value and new value as text."""
    for setting in fields(ScanSettings):
        before, after = getattr(old, setting.name), getattr(new, setting.name)
        if before != after and setting.name != "model":
            yield setting.name, _value_text(before), _value_text(after)


def _value_text(value: object) -> str:
    """A value as text for messages, digests shortened."""
    text = value if isinstance(value, str) else json.dumps(plain(value))
    return text[:12] if len(text) == hashlib.sha256().digest_size * 2 else text
