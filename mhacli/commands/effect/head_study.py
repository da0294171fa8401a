"""The table of heads: the statistics of each head over one text or many, what its removal changes, and its statistics on random
tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import torch

from mhacli.commands.effect.settings import EffectSettings
from mhacli.commands.effect.study import run_of, study_of, verified
from mhacli.errors import UsageError
from mhacli.io.long_work import Progress, no_progress
from mhacli.models.folder import Checkpoint
from mhacli.models.inputs import ModelInputs
from mhacli.models.layer_names import n_vocabulary_of
from mhacli.models.load import Loaded, device_of, own_tokenizer
from mhacli.models.passes import require_open
from mhacli.models.run import CheckpointRun, make_texts, prepare_checkpoint
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
        loaded, run, _ = prepare_checkpoint(request, "predict" if effect else None)
    else:
        require_open(model, _NAME)
        if not hasattr(model, "base_model") or tokenizer is None:
            hint = "mhacli.inspecting and mhacli.effects take other modules"
            raise UsageError(f"{_NAME} takes a folder, or a model of transformers and its tokenizer", hint=hint)
        if model.training:
            raise UsageError(f"{type(model).__name__} is in training mode", hint="call model.eval()")
        name, own, device = type(model).__name__, own_tokenizer(tokenizer), device_of(model)
        request = Run(model=ModelSettings(path=name, device=str(device)), texts=given, keep=())
        loaded = Loaded(
            source=name, checkpoint=Checkpoint(name), config=model.config, target=device, tokenizer=own, model=model
        )
        run = run_of(loaded, make_texts(request, loaded), request)
    return head_table(loaded, run, effect=effect, control=control)


@torch.no_grad()
def head_table(
    loaded: Loaded, run: CheckpointRun, *, effect: bool, control: bool, report_progress: Progress = no_progress
) -> Record:
    """The record of a run over all texts, whose heads have the requested numbers. `loaded` has the language head. Raises
    `MhaError` if a second computation of removals disagrees."""
    request, texts = replace(run.request, kept=Kept()), run.inputs
    each_text = [*_each_text(texts)] if effect else []
    n_parts, controls, found = 1 + control + len(each_text), None, list[Record]()

    def part(number: int) -> Progress:
        return lambda fraction, step: report_progress((number + fraction) / n_parts, step)

    run.run(part(0))
    record = run.record()
    if control:
        of_random = run_of(loaded, _random_texts(loaded, texts), request)
        of_random.run(part(1))
        controls = of_random.record().heads
    for number, text in enumerate(each_text, 1 + control):
        of_text = replace(record, sequences=text.sequences, context=text.context)
        alone = run_of(loaded, text, request)
        study = study_of(loaded, alone, EffectSettings(), of_text)
        found.append(verified(study.run(part(number))))
    return replace(record, heads=_completed(record, found, controls))


def _completed(record: Record, found: Sequence[Record], controls: HeadTable | None) -> HeadTable:
    """The heads of a record with the means of the effects of each text, and the statistics on random tokens."""
    kinds = {(layer.layer, layer.name): layer.kind for layer in record.layers if layer.call == 1}
    floor = max((own.effect.floor for own in found if own.effect is not None), default=None)
    of_texts = [{(own.kind, own.layer, own.head): own for own in each.effects} for each in found]

    def completed(number: int, head: HeadStatistics) -> HeadStatistics:
        key = kinds.get((head.layer, head.attention)), head.layer, head.head
        own = [effects[key] for effects in of_texts if key in effects]
        changes = {name: [getattr(each, name) for each in own] for name in _CHANGES if own}
        means: dict[str, Any] = {name: fmean(values) for name, values in changes.items() if None not in values}
        control = None if controls is None else controls[number]
        return replace(head, **means, floor=floor if own else None, control=control)

    return HeadTable(completed(*each) for each in enumerate(record.heads))


def _each_text(texts: ModelInputs) -> Iterator[ModelInputs]:
    for number, sequence in enumerate(texts.sequences):
        yield ModelInputs((sequence,), None if texts.context is None else (texts.context[number],))


def _random_texts(loaded: Loaded, texts: ModelInputs) -> ModelInputs:
    """The texts with a random token in place of each that is not special."""
    random, tokenizer = np.random.default_rng(_SEED), loaded.tokenizer
    assert tokenizer is not None
    known = sorted({*range(n_vocabulary_of(loaded.config))} - tokenizer.special)

    def drawn(text: TokenSequence) -> TokenSequence:
        ids = random.choice(known, len(text.ids)).tolist()
        ids = [old if piece.special else new for old, piece, new in zip(text.ids, text.pieces, ids, strict=True)]
        return replace(tokenizer.of_ids(ids), token_type_ids=text.token_type_ids)

    sequences = tuple(map(drawn, texts.sequences))
    return ModelInputs(sequences, None if texts.context is None else tuple(map(drawn, texts.context)))
