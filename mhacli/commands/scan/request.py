"""What a scan computes: the options of the command, and the settings that decide its numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Any

from mhacli.cli.parameters import offers
from mhacli.io.data import plain
from mhacli.record.totals import CONDITION, MEANS
from mhacli.render.base.options import HEADS_SHOWN, ViewOptions
from mhacli.run import Run
from mhacli.settings import (
    CHECKPOINT,
    HEADS,
    MAX_LENGTH,
    MAX_TOKENS,
    OUTPUT,
    TOKENIZER,
    Config,
    ModelSettings,
    Statistics,
    setting,
)
from mhacli.text.corpus import CORPUS, CorpusFormat
from mhacli.text.tokens import LayerChoice

_WORKERS = "Workers"
_SOURCES = "Text files, JSON lines, Parquet, CSV or globs; - reads stdin."
_FIRST = "Use only the first N tokens of each sequence. (default: all; sequences too long for the model are left out)"
_SPANS = "Report the attention between parts of the documents that have them: name=/REGEX/; repeatable."
_EFFECT = "Also remove each head in turn, and report what changes at the first [MASK], else the last token."
_DTYPE = "Number format of the computation. (default: that of the checkpoint)"
_THREADS = "Number of CPU threads. (default: 1; another number changes the rounding)"
_N_WORKERS = (
    "Number of workers, each with the model in its memory (needs the extra scan). "
    "(default: this process alone; with --ray, as many as there is room for)"
)
_RAY = (
    "Compute on the Ray cluster at this address; auto: the cluster that this machine belongs to; local: a new one here."
)
_CPUS = "CPUs that Ray reserves for each worker. (default: as many as --threads)"
_OUT = "Folder of the result. An interrupted scan resumes from it."
_MIXED = "Allow results from different kinds of devices in one folder; the result records this."


@dataclass(frozen=True, kw_only=True)
class ScanRequest:
    """The corpus, what to compute of each document, the workers and the folder of the result, as the command line gives them.

    A document may lack spans. The workers do not change the result; each loads the model by the request, which can be pickled.
    """

    # fmt: off
    sources: tuple[str, ...] = setting((), CORPUS, _SOURCES, metavar="CORPUS...", argument=True)
    form: CorpusFormat
    max_tokens: int | None = setting(None, CORPUS, _FIRST, MAX_TOKENS, low=1, high=MAX_LENGTH, common=True)
    strict: bool = setting(False, CORPUS, "Stop at a bad document instead of leaving it out.")
    model: ModelSettings = ModelSettings()
    tokenizer: str | None = setting(None, CHECKPOINT, TOKENIZER, default="the checkpoint's own")
    span: tuple[str, ...] = setting((), HEADS, _SPANS, metavar="SPAN")
    effect: bool = setting(False, HEADS, _EFFECT, common=True)
    allow_nonfinite: bool = setting(False, CHECKPOINT, "Continue even if numbers are NaN or Inf.")
    statistics: Statistics = Statistics()
    given: Annotated[Mapping[str, Any], Config, offers("device", dtype=_DTYPE, threads=_THREADS)]
    workers: int | None = setting(None, _WORKERS, _N_WORKERS, low=1, high=100_000, common=True)
    ray: str | None = setting(None, _WORKERS, _RAY, metavar="ADDRESS")
    cpus_per_worker: int | None = setting(None, _WORKERS, _CPUS, low=1, high=100_000, needs=("workers", "ray"))
    out: str = setting("", OUTPUT, _OUT, metavar="DIR", common=True)
    mixed: bool = setting(False, OUTPUT, _MIXED)
    view: Annotated[ViewOptions, offers("everything", heads=f"{HEADS_SHOWN} (default: all)")]
    # fmt: on

    @cached_property
    def run(self) -> Run:
        """The run that `mha heads` would make for a document, without its text and spans."""
        heads = None if self.view.heads is None else tuple(sorted(set(self.view.heads)))
        return Run(
            model=replace(self.model, tokenizer=self.tokenizer, **{"threads": 1, **self.given}),
            statistics=replace(self.statistics, heads=heads),
            max_tokens=self.max_tokens,
            keep=(),
            allow_nonfinite=self.allow_nonfinite,
        )

    @property
    def n_cpus(self) -> int:
        """The processors of a worker of Ray."""
        return self.cpus_per_worker or self.run.model.threads or 1


@dataclass(frozen=True)
class ScanSettings:
    """The settings that, with the documents, determine the results: equal settings give equal bytes.

    `model_digest` is that of weights, config and tokenizer. `device` is the kind of device with its name or instruction set,
    `rows` the format of rows with the library that writes it, `format` the version of the files of units.
    """

    model: str
    model_digest: str
    mha: str
    torch: str
    transformers: str
    dtype: str
    reducer: str
    device: str
    threads: int
    rows: str
    unit_size: int
    max_tokens: int | None
    layers: tuple[LayerChoice, ...] | None
    heads: tuple[int, ...] | None
    conditions: tuple[str, ...]
    spans: tuple[str, ...]
    first_tokens: int
    sink_weight: float
    allow_nonfinite: bool
    effect: bool
    format: int = 1

    @property
    def row_format(self) -> str:
        """`parquet` or `jsonl`, also the ending of files of rows."""
        return self.rows.split()[0]

    @property
    def span_names(self) -> tuple[str, ...]:
        """The names of the spans."""
        return tuple(word.partition("=")[0].strip() for word in self.spans)

    @property
    def mean_names(self) -> tuple[str, ...]:
        """The statistics of which a scan makes means."""
        return (*MEANS, *(f"{CONDITION}{number}" for number in range(1, len(self.conditions) + 1)))

    @property
    def digest(self) -> str:
        """The sha256 of all settings except the name of the model, which is only its location."""
        text = json.dumps(plain(replace(self, model="")), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self, now: ScanSettings) -> str:
        """The settings that differ from those of another scan and affect the results, with both values; empty if none do."""
        values = {field.name: (getattr(self, field.name), getattr(now, field.name)) for field in fields(self)}
        changed = ((name, *both) for name, both in values.items() if both[0] != both[1] and name != "model")
        return ", ".join(f"{name} was {old} and is {new}" for name, old, new in changed)

    def on_any_device(self) -> ScanSettings:
        """The settings without the device and what follows it: its reducer, and the build of torch, behind its version."""
        return replace(self, model="", device="", reducer="", torch=self.torch.partition("+")[0])
