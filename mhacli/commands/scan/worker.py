"""A worker: it loads a model once and computes the files of units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec

import torch

import mhacli
from mhacli.attention.statistics import is_compiled
from mhacli.commands.scan.effects import N_VERIFIED, effects_of_heads
from mhacli.commands.scan.gather import Gathered
from mhacli.commands.scan.request import ScanRequest, ScanSettings
from mhacli.commands.scan.units import UNIT_SIZE, Unit, UnitFiles
from mhacli.compute.checkpoint.prepare import (
    ReadCheckpoint,
    UnloadedCheckpoint,
    find,
    inputs_of,
    make_texts,
    spans_of_pair,
)
from mhacli.compute.checkpoint.run import CheckpointRun
from mhacli.errors import MhaError
from mhacli.models.digest import checkpoint_digest
from mhacli.models.inputs import ModelInputs
from mhacli.record.corpus import named
from mhacli.record.effect import Effect
from mhacli.record.record import SpanTokens
from mhacli.text.corpus import Document
from mhacli.text.spans import find_spans, tokens_of
from mhacli.text.tokens import TokenSequence

_BAD_CODES = ("no-tokens", "too-large", "not-finite", "unknown-token")
"""Codes of errors that are faults of a document, not of the model or the machine."""


def settings_here(request: ScanRequest) -> ScanSettings:
    """The settings of this process. Only the config and tokenizer of the model are loaded; its weights are hashed.

    Raises `MhaError` for requests that the model does not support.
    """
    unloaded = find(request.run)
    if request.span and unloaded.config.is_encoder_decoder:
        raise spans_of_pair()
    return _settings(request, unloaded)


def _settings(request: ScanRequest, unloaded: UnloadedCheckpoint) -> ScanSettings:
    run, device = request.run, unloaded.device
    dtype = run.model.dtype or str(getattr(unloaded.config, "dtype", None) or torch.float32).removeprefix("torch.")
    return ScanSettings(
        model=run.path,
        model_digest=checkpoint_digest(unloaded.checkpoint, run.model.tokenizer),
        mha=mhacli.__version__,
        torch=torch.__version__,
        transformers=version("transformers"),
        dtype=dtype,
        reducer="c" if is_compiled(device, getattr(torch, dtype)) else "torch",
        device=_device_text(device),
        threads=torch.get_num_threads(),
        rows=f"parquet of pyarrow {version('pyarrow')}" if find_spec("pyarrow") else "jsonl",
        unit_size=UNIT_SIZE,
        max_tokens=run.max_tokens,
        pack=False,
        layers=run.model.layers,
        heads=run.statistics.heads,
        conditions=tuple(condition.text for condition in run.statistics.conditions),
        spans=request.span,
        first_tokens=run.statistics.first_tokens,
        sink_weight=run.statistics.sink_weight,
        allow_nonfinite=run.allow_nonfinite,
        effect=request.effect,
    )


def _device_text(device: torch.device) -> str:
    """The kind of a device, with the name of the GPU or the instruction set that torch uses on the CPU."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    return f"cpu {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else device.type


class Worker:
    """The model of a scan. `compute` gives the same bytes for the same unit, in any order.

    Raises `MhaError` if the device, the model or versions differ from those of the scan.
    """

    def __init__(self, request: ScanRequest, settings: ScanSettings) -> None:
        unloaded = find(request.run)
        differences = settings.differences(_settings(request, unloaded))
        if differences:
            raise MhaError(f"a worker differs from its scan: {differences}", code="other-worker")
        self._request, self._settings, self._unloaded = request, settings, unloaded
        self._loaded = unloaded.load(request.run, "predict" if request.effect else None)

    def compute(self, unit: Unit) -> UnitFiles:
        """The files of a unit. Each document is computed separately, as by `mha heads`.

        For the first good document, the outputs are compared with those without inspection, and some removals are repeated by a
        second method. Raises `MhaError` for errors that are not faults of a document.
        """
        gathered = Gathered(unit, self._settings)
        for document in unit.documents:
            if not document.reason:
                try:
                    results = self._inspected(document, is_compared=not gathered.documents)
                except MhaError as fault:
                    if fault.code not in _BAD_CODES:
                        raise _of_document(document, fault) from fault
                    gathered.leave_out(document, fault.message.removeprefix("text 0 ").removeprefix("the text "))
                else:
                    gathered.add(document, *results)
            else:
                gathered.leave_out(document, document.reason)
        return gathered.files()

    @torch.no_grad()
    def _inspected(self, document: Document, *, is_compared: bool) -> tuple[CheckpointRun, tuple[Effect, ...]]:
        request = replace(self._request.run, texts=(document.text,))
        if not document.text.strip():
            raise MhaError("only white space", code="no-tokens")
        texts = make_texts(request, self._unloaded.tokenizer, self._unloaded.config)
        texts = texts._replace(spans=tuple(self._spans_in(texts.sequences[0])))
        inputs: ModelInputs = inputs_of(self._loaded, texts, self._unloaded.tokenizer, request)
        base = replace(self._loaded, model=self._loaded.model.base_model)
        run = CheckpointRun(base, inputs, request, texts.spans)
        if self._request.effect:
            checkpoint = ReadCheckpoint(self._loaded, inputs, texts, self._unloaded.tokenizer)
            return run, effects_of_heads(request, checkpoint, run, n_verified=N_VERIFIED if is_compared else 0)
        run.run(verify=is_compared)
        return run, ()

    def _spans_in(self, sequence: TokenSequence) -> Iterator[SpanTokens]:
        """The spans of which the document has tokens."""
        for word in self._request.span:
            try:
                ((name, ranges),) = find_spans((word,), sequence.text, {}).items()
            except MhaError as fault:
                if fault.code != "no-span":
                    raise
                continue
            if tokens := tokens_of(ranges, sequence):
                yield SpanTokens(name, (tokens,))


def _of_document(document: Document, fault: MhaError) -> MhaError:
    """The error with the name of the document in which it occurred."""
    message = f"{named(document.file, document.place)}: {fault.message}"
    return MhaError(message, hint=fault.hint, code=fault.code, exit_code=fault.exit_code, path=fault.path)
