"""The table of heads: the statistics of each head over one text or many, what its removal changes, and its statistics on random
tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from time import perf_counter
from typing import Any

import numpy as np
import torch

from mhacli.commands.effect.settings import EffectSettings
from mhacli.commands.effect.study import EffectStudy, verified
from mhacli.errors import UsageError
from mhacli.io.progress import Progress, no_progress
from mhacli.models.folder import Checkpoint
from mhacli.models.inputs import ModelInputs, n_vocabulary_of
from mhacli.models.load import Loaded, device_of
from mhacli.models.passes import require_open
from mhacli.models.prepare import inputs_of, make_texts, read
from mhacli.models.runs.run import CheckpointRun
from mhacli.models.tokenizer import own_tokenizer
from mhacli.record.heads import HeadStatistics, Kept
from mhacli.record.record import Record
from mhacli.record.tables import HeadTable
from mhacli.run import Run
from mhacli.settings import ModelSettings
from mhacli.text.tokens import TokenSequence

_NAME, _SEED = "mhacli.heads", 0
_CHANGES = ("d_logit", "d_output")


def heads(
    model: Any, texts: str | Sequence[str], tokenizer: Any = None, *, effect: bool = False, control: bool = False
) -> Record:
    """The record of a table of heads, `record.heads`: the type and the statistics of every head of every layer over the texts.

    With `effect`, `d_logit` and `d_output` are the means over the texts of what the removal of a head changes, measured as
    `mhacli.effects` does, with the noise `floor`; with `control`, `control_kind` and others are the statistics on random tokens
    of the same number, so that a type which only positions make is seen as such. `model` is the folder or the id of a checkpoint,
    or a model of transformers in evaluation mode with its `tokenizer`. Raises `MhaError`, also if the verification of a removal
    fails.
    """
    given = (texts,) if isinstance(texts, str) else tuple(texts)
    if not given:
        raise UsageError("no text is given", hint=f'{_NAME}(model, "the cat sat on the mat")')
    if isinstance(model, str | os.PathLike):
        request = Run(model=ModelSettings(path=os.fspath(model)), texts=given, keep=())
        study, _ = head_study(request, effect=effect, control=control)
    else:
        require_open(model, _NAME)
        if not hasattr(model, "base_model") or tokenizer is None:
            hint = "mhacli.inspecting and mhacli.effects take other modules"
            raise UsageError(f"{_NAME} takes a folder, or a model of transformers and its tokenizer", hint=hint)
        if model.training:
            raise UsageError(f"{type(model).__name__} is in training mode", hint="call model.eval()")
        name, own = type(model).__name__, own_tokenizer(tokenizer)
        request = Run(model=ModelSettings(path=name, device=str(device_of(model))), texts=given, keep=())
        loaded = Loaded(
            source=name,
            checkpoint=Checkpoint(name),
            config=model.config,
            target=device_of(model),
            tokenizer=own,
            model=model,
        )
        inputs = inputs_of(loaded, make_texts(request, loaded), request.model)
        study = HeadStudy(loaded, inputs, request, effect=effect, control=control)
    study.run()
    return study.record()


@torch.no_grad()
def head_study(request: Run, *, effect: bool, control: bool) -> tuple[HeadStudy, tuple[str, ...]]:
    """The table of a checkpoint that is loaded here, ready to run, and notes for the user. Raises `MhaError`."""
    began = perf_counter()
    loaded, inputs = read(request, "predict" if effect else None)
    study = HeadStudy(loaded, inputs, request, effect=effect, control=control)
    study.inspected.seconds["loading"] = perf_counter() - began
    return study, (*loaded.notes, *inputs.notes)


@dataclass
class HeadStudy:
    """A table of heads, computed by `run`. `inspected` is the run over all texts together."""

    loaded: Loaded
    inputs: ModelInputs
    request: Run
    effect: bool
    control: bool

    def __post_init__(self) -> None:
        """Prepares the run over all texts."""
        base = replace(self.loaded, model=self.loaded.model.base_model)
        self.inspected = CheckpointRun(base, self.inputs, self.request)
        self._controls: HeadTable | None = None
        self._effects: list[Record] = []

    @torch.no_grad()
    def run(self, report_progress: Progress = no_progress) -> None:
        """Computes all numbers. Raises `MhaError` if a second computation of removals disagrees."""
        texts = [*self._each_text()] if self.effect else []
        n_parts, base = 1 + self.control + len(texts), self.inspected.loaded

        def part(number: int) -> Progress:
            return lambda fraction, step: report_progress((number + fraction) / n_parts, step)

        self.inspected.run(part(0))
        record = self.inspected.record()
        if self.control:
            run = CheckpointRun(base, self._inputs(self._random_texts()), replace(self.request, kept=Kept()))
            run.run(part(1))
            self._controls = run.record().heads
        for number, text in enumerate(texts, 1 + self.control):
            inputs, of_text = self._inputs(text), replace(record, sequences=text.sequences, context=text.context)
            run = CheckpointRun(base, inputs, self.request)
            study = EffectStudy(self.loaded.model, inputs.keywords, EffectSettings(), self.request, of_text, None, run)
            self._effects.append(verified(study.run(part(number))))

    def record(self) -> Record:
        """The record of all texts, whose heads have the numbers that were asked for."""
        record = self.inspected.record()
        kinds = {(layer.layer, layer.name): layer.kind for layer in record.layers if layer.call == 1}
        floor = max((own.effect.floor for own in self._effects if own.effect is not None), default=None)
        found = [{(own.kind, own.layer, own.head): own for own in each.effects} for each in self._effects]

        def completed(number: int, head: HeadStatistics) -> HeadStatistics:
            key = kinds.get((head.layer, head.attention)), head.layer, head.head
            own = [effects[key] for effects in found if key in effects]
            changes = {name: [getattr(each, name) for each in own] for name in _CHANGES if own}
            means: dict[str, Any] = {name: fmean(values) for name, values in changes.items() if None not in values}
            control = None if self._controls is None else self._controls[number]
            return replace(head, **means, floor=floor if own else None, control=control)

        return replace(record, heads=HeadTable(completed(*each) for each in enumerate(record.heads)))

    def _inputs(self, texts: ModelInputs) -> ModelInputs:
        return inputs_of(self.loaded, texts, self.request.model)

    def _each_text(self) -> Iterator[ModelInputs]:
        context = self.inputs.context
        for number, sequence in enumerate(self.inputs.sequences):
            yield ModelInputs((sequence,), None if context is None else (context[number],))

    def _random_texts(self) -> ModelInputs:
        """The texts with a random token in place of each that is not special."""
        random, context, tokenizer = np.random.default_rng(_SEED), self.inputs.context, self.loaded.tokenizer
        assert tokenizer is not None
        known = sorted({*range(n_vocabulary_of(self.loaded.config))} - tokenizer.special)

        def drawn(text: TokenSequence) -> TokenSequence:
            ids = random.choice(known, len(text.ids)).tolist()
            ids = [own if piece.special else new for own, piece, new in zip(text.ids, text.pieces, ids, strict=True)]
            return replace(tokenizer.of_ids(ids), token_type_ids=text.token_type_ids)

        sequences = tuple(map(drawn, self.inputs.sequences))
        return ModelInputs(sequences, None if context is None else tuple(map(drawn, context)))
