"""`mha doctor --model`: the behaviour of a checkpoint as checks with their meaning and advice."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from torch import nn

from mhacli.commands.check.behaviour import BehaviourTester
from mhacli.commands.check.checkpoint import TEXTS, admitted, checkpoint_behaviour
from mhacli.commands.check.passes import LEAST
from mhacli.commands.check.result import CODES, Behaviour, CheckRequest, words_of_code
from mhacli.io.long_work import Progress
from mhacli.models.layer_names import LayerNumbers, entry_of
from mhacli.models.run import TIMES_SHAKEN
from mhacli.record.record import words_of_random
from mhacli.settings import ModelSettings

from .result import ExaminedModel, HealthCheck

CHECKS = (
    "finite",
    "repeat",
    "causality",
    "left-padding",
    "right-padding",
    "batch",
    "cache",
    "eager",
    "row-sums",
    "bos",
)
"""The checks of `mha doctor`, in its order."""


def examine_checkpoint(
    model: ModelSettings | nn.Module,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    seed: int,
    report_progress: Progress,
) -> tuple[ExaminedModel, tuple[HealthCheck, ...], tuple[str, ...]]:
    """The examination of a checkpoint, or of a model of transformers, with texts, or with texts of
    ours. Raises `MhaError` as `admitted` and `checkpoint_behaviour`.
    """
    steps = count()

    def stage(stage: str, **_: object) -> None:
        report_progress(stage, 1 - 0.97 ** next(steps))

    stage("loading")
    loaded = admitted(model, tokenizer, needs_tokenizer=bool(texts))
    entry = entry_of(loaded.model, loaded.source, loaded.revision)
    tester, notes = checkpoint_behaviour(
        loaded, CheckRequest(seed=seed), stage, texts or TEXTS, CHECKS
    )
    report_progress("done", 1.0)
    step = "float32" if loaded.dtype == "float64" else loaded.dtype
    rule = (
        f"{TIMES_SHAKEN[loaded.dtype]:g} × the change of the outputs when each part of the model is"
        f" changed by one rounding step of {step}, at least {LEAST[loaded.dtype]:g}"
    )
    if (in_own := tester.results.get("dtype")) is not None:
        rule += f"; {entry.dtype} is judged in {loaded.dtype}, where faults stand out"
        notes = (*notes, in_own.reason)
    stored = Counter(tensor.dtype for tensor in loaded.checkpoint.tensors.values())
    shared = (
        "path",
        "revision",
        "family",
        "architecture",
        "n_parameters",
        "implementation",
        "dtype",
    )
    examined = ExaminedModel(
        **{name: getattr(entry, name) for name in shared},
        stored=tuple(name for name, _ in stored.most_common()),
        device=str(loaded.model.device),
        lengths=tuple(len(text) for text in tester.passes.texts),
        n_passes=tester.passes.n_passes,
        tolerance=rule,
        random_weights=loaded.random_weights,
    )
    if words := words_of_random(loaded.random_weights):
        notes = (words, *notes)
    return examined, tuple(_health(tester, tester.results[name]) for name in CHECKS), notes


def _layer_name(model: nn.Module, attention: str) -> str:
    """The name of an attention's layer: `layer 3`, `cross layer 3`."""
    kind = LayerNumbers(model).kind_of(attention)
    numbers = re.findall(r"\.(\d+)(?=\.|$)", attention)
    name = " ".join(["layer", *numbers[:1]])
    return name if kind == "self" else f"{kind} {name}"


def _health(tester: BehaviourTester, answer: Behaviour) -> HealthCheck:
    """A behaviour as a check, with the layer of the first attention whose outputs differ."""
    at = answer.at
    layer: str | None = None
    message = answer.why_untried or answer.reason
    if at is not None and at.attention is not None and tester.passes.module is not None:
        layer = _layer_name(tester.passes.module, at.attention)
        message += f"; first in {layer} ({at.attention})"
    elif at is not None and at.module is not None:
        message += f"; first in {at.module}"
    check = HealthCheck(
        name=answer.name,
        ok=answer.ok,
        message=message,
        value=answer.largest,
        tolerance=None if answer.largest is None else answer.tolerance,
        layer=layer,
        is_caution=answer.name in tester.cautions,
        advice=tester.cautions.get(answer.name, ""),
    )
    if answer.ok is not False:
        return check
    words = words_of_code(CODES[answer.name])
    return replace(
        check, meaning=f"{words.effect[0].upper()}{words.effect[1:]}.", advice=words.advice
    )
