"""A worker: it loads a model once and computes the files of units."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from io import BytesIO

import torch

import mhacli
from mhacli.attention.statistics import is_compiled
from mhacli.commands.effect.settings import EffectSettings
from mhacli.commands.effect.study import run_of, study_of, verified
from mhacli.commands.scan.command import Scan
from mhacli.commands.scan.folder import UNIT_SIZE, Settings, Unit, UnitFiles, differences
from mhacli.commands.scan.totals import EFFECTS, Totals, totals_to_bytes
from mhacli.errors import MhaError
from mhacli.io.data import json_checksum, plain
from mhacli.models.load import LanguageHead, Loaded, checkpoint_digest, load_model
from mhacli.models.prepare import find, make_texts, spans_of_pair
from mhacli.record.corpus import BadEntry, CorpusSummary, named
from mhacli.record.record import Record, SpanTokens
from mhacli.record.tables import Columns, EffectTable, HeadTable, arrow_of, dicts_of
from mhacli.text.corpus import Document
from mhacli.text.spans import find_spans, tokens_of

FORMAT = 4
"""The version of the files of units."""
EXAMPLE_LEN = 64
"""The number of tokens up to which a longer document is a better example; of longer ones, the shortest is."""
N_VERIFIED = 4
"""The number of removals of a document that are repeated by a second method."""
_BAD_CODES = ("no-tokens", "too-large", "not-finite", "unknown-token")
"""Codes of errors that are faults of a document, not of the model or the machine."""


class Worker:
    """Computes units in this process. It gives the same bytes for the same unit, in any order.

    Relative paths are those of a process that runs in `folder`.
    """

    def __init__(self, scan: Scan, folder: str = ".") -> None:
        with suppress(OSError):
            os.chdir(folder)
        self._scan = scan

    @cached_property
    def _unloaded(self) -> Loaded:
        """The config and tokenizer of the model."""
        return find(self._scan.run.model, self._scan.run.checkpoint)

    @cached_property
    def _loaded(self) -> Loaded:
        """The model. Not loaded before the first unit, so that Ray counts processes that end meanwhile as attempts at this."""
        run = self._scan.run
        head: LanguageHead | None = "predict" if self._scan.effect else None
        return load_model(self._unloaded, run.model, head, allow_nonfinite=run.allow_nonfinite)

    def settings(self) -> Settings:
        """The settings of this process: the kind of its device with its name or instruction set, and the libraries that decide
        numbers. The weights of the model are hashed, not loaded. Raises `MhaError` for scans that the model does not support."""
        run, device, config = self._scan.run, self._unloaded.target, self._unloaded.config
        if self._scan.span and config.is_encoder_decoder:
            raise spans_of_pair()
        dtype = run.model.dtype or str(getattr(config, "dtype", None) or torch.float32).removeprefix("torch.")
        on_cuda = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if on_cuda else torch.backends.cpu.get_cpu_capability()
        return dict(plain({
            "model": run.path,
            "model_digest": checkpoint_digest(self._unloaded.checkpoint, run.model.tokenizer),
            "mha": mhacli.__version__,
            "torch": torch.__version__.partition("+")[0],
            "build": torch.__version__,
            "transformers": version("transformers"),
            "dtype": dtype,
            "reducer": "c" if is_compiled(device, getattr(torch, dtype)) else "torch",
            "device": f"{device.type} {name}",
            "threads": torch.get_num_threads(),
            "rows": f"parquet of pyarrow {version('pyarrow')}" if find_spec("pyarrow") else "jsonl",
            "unit_size": UNIT_SIZE,
            "max_tokens": run.max_tokens,
            "layers": run.model.layers,
            "conditions": [condition.text for condition in run.statistics.conditions],
            **{name: getattr(run.statistics, name) for name in ("heads", "first_tokens", "sink_weight")},
            "spans": self._scan.span,
            "allow_nonfinite": run.allow_nonfinite,
            "effect": self._scan.effect,
            "format": FORMAT,
        }))  # fmt: skip

    def compute(self, unit: Unit, settings: Settings) -> tuple[UnitFiles, str]:
        """The files of a unit, and the name of this process. Each document is computed separately, as by `mha heads`.

        For the first good document, the outputs are compared with those without inspection, and some removals are repeated by a
        second method. Raises `MhaError` for errors that are not faults of a document, and if the device, the model or versions
        differ from the `settings` of the scan.
        """
        if changed := differences(settings, self.settings()):
            raise MhaError(f"a worker differs from its scan: {', '.join(changed.values())}", code="other-worker")
        totals = Totals(devices=(settings["device"],), documents=(json_checksum(unit.documents),))
        good, best = list[tuple[Document, Record]](), None
        for document in unit.documents:
            try:
                record = self._inspected(document, is_compared=not good)
            except MhaError as fault:
                if self._scan.strict or fault.code not in _BAD_CODES:
                    fault.message = f"{named(document.file, document.place)}: {fault.message}"
                    raise
                reason = fault.message.removeprefix("text 0 ").removeprefix("the text ")
                totals.merge(Totals(n_bad=1, bad=(BadEntry(document.file, document.place, reason),)))
                continue
            totals.add(document, record, spans=self._scan.span_names)
            good.append((document, replace(record, arrays={})))
            if best is None or _rank(record) > _rank(best[1]):
                best = document, record
        columns = _rows(good)
        rows = _rows_to_bytes(columns, settings["rows"])
        totals.rows = hashlib.sha256(rows).hexdigest()
        example = b"" if best is None else _example(*best, settings["device"]).to_bytes()
        return (rows, example, totals_to_bytes(totals, columns)), f"{platform.node()}, process {os.getpid()}"

    @torch.no_grad()
    def _inspected(self, document: Document, *, is_compared: bool) -> Record:
        """The record of a document, with the effects of removing each head. Raises `MhaError` with one of `_BAD_CODES` for a
        document that has none."""
        if document.reason or not document.text.strip():
            raise MhaError(document.reason or "only white space", code="no-tokens")
        request = replace(self._scan.run, texts=(document.text,))
        texts = make_texts(request, self._unloaded)
        (sequence,) = texts.sequences
        found = find_spans(self._scan.span, sequence.text, {}, may_lack=True)
        tokens = {name: tokens_of(ranges, sequence) for name, ranges in found.items()}
        spans = tuple(SpanTokens(name, (of_span,)) for name, of_span in tokens.items() if of_span)
        run = run_of(self._loaded, replace(texts, spans=spans), request)
        run.run(verify=is_compared)
        record = run.record()
        if not self._scan.effect:
            return record
        settings = EffectSettings(verify=N_VERIFIED * is_compared)
        study = study_of(self._loaded, run, settings, record, request)
        return replace(record, effects=verified(study.run()).effects)


def _rank(record: Record) -> tuple[bool, int]:
    """The key by which the example is chosen."""
    n_tokens = len(record.keys[0].ids)
    return (True, n_tokens) if n_tokens <= EXAMPLE_LEN else (False, -n_tokens)


def _example(document: Document, record: Record, device: str) -> Record:
    """The record as that of a corpus of one document, without timings, details of the machine and text behind the tokens."""
    n_tokens = len(record.keys[0].ids)
    return replace(
        record,
        sequences=tuple(sequence.covered for sequence in record.sequences),
        context=record.context and tuple(sequence.covered for sequence in record.context),
        timings={},
        environment=replace(record.environment, device=device.partition(" ")[0], device_name=device),
        effects=EffectTable(),
        corpus=CorpusSummary(1, n_tokens, 0, n_tokens, document.file, document.place, (device,), ()),
    )


def _rows(good: Sequence[tuple[Document, Record]]) -> Columns:
    """A row for each document, layer and head. The columns are `file`, `place` (line or row from 1, 0 for a whole file),
    `n_documents` (1) and `n_tokens`, those of `HeadTable`, and the effects of removing the heads, if there are any."""
    of_heads = [(document, record) for document, record in good for _ in record.heads]
    heads = HeadTable(head for _, record in good for head in record.heads)
    effects = EffectTable(effect for _, record in good for effect in record.effects)
    return {
        "file": (str, [document.file for document, _ in of_heads]),
        "place": (int, [document.place for document, _ in of_heads]),
        "n_documents": (int, [1 for _ in of_heads]),
        "n_tokens": (int, [len(record.keys[0].ids) for _, record in of_heads]),
        **heads.columns(),
        **({name: column for name, column in effects.columns().items() if name in EFFECTS} if effects else {}),
    }


def _rows_to_bytes(columns: Columns, row_format: str) -> bytes:
    """The contents of the file of rows, JSON lines or Parquet; equal rows give equal bytes."""
    if row_format == "jsonl":
        encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
        return "".join(f"{encode(row)}\n" for row in dicts_of(columns)).encode()
    from pyarrow import parquet

    file = BytesIO()
    parquet.write_table(arrow_of(columns), file, compression="zstd")
    return file.getvalue()
