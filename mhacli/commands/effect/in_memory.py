"""`mhacli.effects` and `mhacli.heads`: the measurements of `mha effect` and `mha heads` on a model
in memory.
"""

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import index
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mhacli.errors import UsageError
from mhacli.io.long_work import Progress, no_progress
from mhacli.models.inspecting import inspecting, layer_choices
from mhacli.models.layer_names import config_of, n_vocabulary_of
from mhacli.models.layers import ModelInputs
from mhacli.models.load import Loaded, device_of, tokenizer_in_memory
from mhacli.models.passes import require_open
from mhacli.models.run import CheckpointRun, make_texts, prepare_checkpoint, run_model, run_of
from mhacli.record.effect import Effect, HeadReplacement
from mhacli.record.exports import HeadTable
from mhacli.record.heads import HeadStatistics, Kept
from mhacli.record.record import Record
from mhacli.run import Run
from mhacli.settings import LayerChoice, ModelSettings, options_of
from mhacli.text.reading import given_texts
from mhacli.text.tokens import TokenSequence

from .metric import GivenMetric
from .settings import EffectSettings, given_head, require_replacement
from .study import EffectStudy, effects_of_heads, study_of, verified

_EFFECTS = "mhacli.effects"
_HEADS = "mhacli.heads"
_SEED = 0
"""The seed of the random tokens that types of heads are compared with."""


# ------------------------------------------------------------------------------------------ effects


def effects(
    model: Any,
    inputs: Any,
    tokenizer: Any = None,
    *,
    heads: Sequence[tuple[Any, ...]] | None = None,
    edges: bool = False,
    layers: Sequence[int | LayerChoice] | None = None,
    replace: HeadReplacement = "zero",
    at: int | None = None,
    position: int | None = None,
    target: str | int | None = None,
    versus: str | int | None = None,
    target_first: bool = False,
    n_verified: int = 4,
    screen: int | None = None,
    metric: GivenMetric | None = None,
) -> Record:
    """The record of what changes when heads or attention weights are removed for one text;
    `record.effects` is a table.

    It measures as `mha effect` does; docs/EFFECT.md explains the options. `model` is any module in
    evaluation mode in which `mhacli.inspecting` sees attention. `inputs` is the output of its
    tokenizer for one text, or other arguments by name; or ids; or the tensor that the module takes;
    or a text if `tokenizer` is given. Without a tokenizer, tokens are named by their ids. `heads`
    are `(layer, head)` or `("cross", 2, 1)`; None removes each head in turn. With `edges`, single
    attention weights of the query at `position` are removed.

    The output decides what is measured: the logit of a token, of a class, of a tag at `position`,
    of the start and end of an answer, a single score, or a vector; `metric` is a function of the
    output that gives the number to measure instead. `target` and `versus` are tokens, or names of
    classes, or their ids. Raises `MhaError` for options that do not fit together, and if the
    verification fails.
    """
    require_open(model, _EFFECTS)
    # what is no list is refused like a wrong head
    listed = heads if isinstance(heads, Iterable) else [heads]
    settings = EffectSettings(
        at=_optional_number("at", at),
        position=_optional_number("position", position),
        target=target if isinstance(target, str) else _optional_number("target", target),
        versus=versus if isinstance(versus, str) else _optional_number("versus", versus),
        screen=_optional_number("screen", screen),
        verify=_whole_number("n_verified", n_verified),
        heads=None if heads is None else tuple(map(given_head, listed)),
        edges=edges,
        replace=None if replace == "zero" else replace,
        target_first=target_first,
    )
    if not (metric is None or callable(metric)):
        raise UsageError(f"metric {metric!r:.60} is no function of the output")
    _require_evaluation(model)
    require_replacement(replace)
    _require_rules(settings)
    try:
        chosen = None if layers is None else layer_choices(layers)
    except (TypeError, ValueError):
        raise UsageError(
            f"layers {layers!r} is no list of layers that exist", hint='[5, 6], or [("cross", 5)]'
        ) from None
    path, device = type(model).__name__, str(device_of(model))
    run = Run(model=ModelSettings(path=path, layers=chosen, device=device))
    keywords = _inputs(model, inputs, tokenizer, metric)
    with torch.no_grad(), inspecting(model, tokenizer) as inspection:
        run_model(model, lambda: model(**keywords))
    names = None if tokenizer is None else tokenizer_in_memory(tokenizer)
    record = inspection.record
    if metric is None:
        keywords = _without_labels(model, keywords, record)
    study = EffectStudy(model, keywords, settings, run, record, metric=metric, tokenizer=names)
    return verified(study.run(), "not-verified")


def _whole_number(name: str, value: Any) -> int:
    """A whole number, which may be a tensor. Raises `UsageError` for anything else."""
    try:
        return index(value)
    except TypeError:
        raise UsageError(f"{name} cannot be {value!r:.60}, which is no whole number") from None


def _optional_number(name: str, value: Any) -> int | None:
    return None if value is None else _whole_number(name, value)


def _require_evaluation(model: Any) -> None:
    """Raises `UsageError` for a model in training mode."""
    if model.training:
        raise UsageError(f"{type(model).__name__} is in training mode", hint="call model.eval()")


def _require_rules(settings: EffectSettings) -> None:
    """Raises `UsageError` for numbers out of range, and for settings that exclude each other."""
    for name, option in options_of(EffectSettings):
        value = getattr(settings, name)
        if isinstance(value, int) and option.is_number and not option.contains(value):
            raise UsageError(f"{option.name(name)} {value} is not in the range {option.range_text}")
        for other in option.excludes:
            if value and getattr(settings, other):
                raise UsageError(
                    f"{name} and {other} exclude each other", hint=f"leave {other} out"
                )


_OF_OUTPUT = (
    "end_positions",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "start_positions",
    "use_cache",
)
"""Keywords of transformers that change what a model returns, and no number, as labels do."""


def _inputs(
    model: nn.Module, given: Any, tokenizer: Any, metric: GivenMetric | None
) -> dict[str, Any]:
    """The arguments of a pass over one text, by name. A mask without padding is left out, as the
    command does; so is what only a metric could read.
    """
    if isinstance(given, str):
        if tokenizer is None:
            raise UsageError(
                f"{given!r} is a text and needs a tokenizer",
                hint=f"{_EFFECTS}(model, text, tokenizer)",
            )
        given = tokenizer(given, return_tensors="pt")
    accepted = inspect.signature(model.forward).parameters
    if not isinstance(given, Mapping):
        given = {"input_ids" if "input_ids" in accepted else next(iter(accepted)): given}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
    inputs: dict[str, Any] = {}
    for name, value in given.items():
        is_of_output = name in _OF_OUTPUT and config_of(model) is not None
        if is_of_output and metric is None:
            continue
        # others take any
        if name not in accepted and "input_ids" in accepted and not is_of_output:
            fault = "may ignore" if takes_any else "takes no"
            raise UsageError(f"{type(model).__name__} {fault} {name}", hint=f"leave {name} out")
        x = _input(name, value, device_of(model))
        if not name.endswith("attention_mask"):
            inputs[name] = x
        elif not bool(x.all()):
            raise UsageError(
                f"{_EFFECTS} takes no {name} with zeros",
                hint="one text without padding has no mask",
            )
    return inputs


def _without_labels(model: nn.Module, inputs: Mapping[str, Any], record: Record) -> dict[str, Any]:
    """The inputs without labels, which a model of transformers compares with all its outputs. Its
    decoder has the ids that it made of them in the inspected pass.
    """
    labels = {name for name in inputs if "label" in name and config_of(model) is not None}
    kept = {name: value for name, value in inputs.items() if name not in labels}
    if labels and record.context is not None and not any("decoder_input" in name for name in kept):
        ids = [record.sequences[0].ids]
        kept["decoder_input_ids"] = torch.tensor(ids, device=device_of(model))
    return kept


def _input(name: str, value: Any, device: torch.device) -> Any:
    """An argument of a model, a tensor if it can be one. Raises `UsageError` for ids of other than
    one text.
    """
    is_of_ids = name.endswith(("input_ids", "attention_mask", "token_type_ids"))
    if not is_of_ids and not isinstance(value, (list, Tensor)):
        return value
    try:
        x = torch.as_tensor(value).to(device)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(
            f"{_EFFECTS} takes the {name} of one text, not {value!r:.60}",
            hint=f"{_EFFECTS}(model, text, tokenizer)",
        ) from None
    if not is_of_ids:
        return x
    ids = x[None] if x.ndim == 1 else x
    if ids.ndim != 2 or ids.shape[0] != 1 or not ids.shape[1] or ids.is_floating_point():
        message = f"{_EFFECTS} takes the ids of one text, not {ids.dtype} of shape"
        raise UsageError(f"{message} {tuple(ids.shape)}", hint="shape (1, n) or (n,)")
    return ids


# ----------------------------------------------------------------------------------- table of heads


def heads(
    model: Any,
    texts: str | Sequence[str],
    tokenizer: Any = None,
    *,
    effect: bool = False,
    control: bool = False,
) -> Record:
    """The record of a table of heads, `record.heads`: the type and the statistics of every head of
    every layer over the texts.

    With `effect`, `d_logit` and `d_output` are the means over the texts of what the removal of a
    head changes, measured as `mhacli.effects` does, with the noise `floor`; with `control`,
    `control_kind` and others are the statistics on random tokens of the same number, so that a type
    which only positions make is seen as such. `model` is the folder or the id of a checkpoint, or a
    model of transformers in evaluation mode with its `tokenizer`. Raises `MhaError`, also if the
    verification of a removal fails.
    """
    given = given_texts(texts, _HEADS)
    if not given:
        raise UsageError("no text is given", hint=f'{_HEADS}(model, "the cat sat on the mat")')
    if isinstance(model, str | os.PathLike):
        request = Run(model=ModelSettings(path=os.fspath(model)), texts=given, keep=())
        run, _ = prepare_checkpoint(request, "predict" if effect else None)
    else:
        require_open(model, _HEADS)
        if not hasattr(model, "base_model") or tokenizer is None:
            raise UsageError(
                f"{_HEADS} takes a folder, or a model of transformers and its tokenizer",
                hint="mhacli.inspecting and mhacli.effects take other modules",
            )
        _require_evaluation(model)
        loaded = Loaded.in_memory(model, tokenizer)
        settings = ModelSettings(path=loaded.source, device=str(loaded.target))
        request = Run(model=settings, texts=given, keep=())
        run = run_of(loaded, make_texts(request, loaded), request)
    return head_table(run, effect=effect, control=control)


@torch.no_grad()
def head_table(
    run: CheckpointRun, *, effect: bool, control: bool, report_progress: Progress = no_progress
) -> Record:
    """The record of a run over all texts, whose heads have the requested numbers. For `effect` its
    checkpoint has the language head. Raises `MhaError` if a second computation of removals
    disagrees.
    """
    request, texts = replace(run.request, kept=Kept()), run.inputs
    n_effects = len(texts.sequences) if effect else 0
    n_before = 2 if control else 1  # the passes over all texts, which come before the effects

    def pass_of(number: int) -> Progress:
        n_passes = n_before + n_effects
        return lambda part, fraction: report_progress(part, (number + fraction) / n_passes)

    record = run.run(pass_of(0))
    controls: Sequence[HeadStatistics] | None = None
    if control:
        random_texts = _random_texts(run.loaded, texts)
        controls = run_of(run.loaded, random_texts, request).run(pass_of(1)).heads
    records: list[Record] = []
    for number in range(n_effects):
        context = None if texts.context is None else (texts.context[number],)
        text = ModelInputs((texts.sequences[number],), context)
        of_text = replace(record, sequences=text.sequences, context=text.context)
        study = study_of(run_of(run.loaded, text, request), EffectSettings(), of_text)
        records.append(verified(study.run(pass_of(n_before + number))))
    effects = [effects_of_heads(of_text) for of_text in records]
    floor = max((each.effect.floor for each in records if each.effect is not None), default=None)
    heads = []
    for number, head in enumerate(record.heads):
        measured = [each[number] for each in effects]
        head = _with_means(head, [each for each in measured if each is not None], floor)
        heads.append(replace(head, control=None if controls is None else controls[number]))
    return replace(record, heads=HeadTable(heads))


def _with_means(
    head: HeadStatistics, effects: Sequence[Effect], floor: float | None
) -> HeadStatistics:
    """A head with the means of the effects of its removal, over the texts."""
    means: dict[str, Any] = {}
    for name in ("d_logit", "d_output"):
        changes = [getattr(effect, name) for effect in effects]
        if changes and None not in changes:
            means[name] = fmean(changes)
    return replace(head, **means, floor=floor if effects else None)


def _random_texts(loaded: Loaded, texts: ModelInputs) -> ModelInputs:
    """The texts with a random token in place of each that is not special."""
    random, tokenizer = np.random.default_rng(_SEED), loaded.reader
    known = sorted({*range(n_vocabulary_of(loaded.config))} - tokenizer.special)

    def random_text(text: TokenSequence) -> TokenSequence:
        tokens = zip(
            text.ids, text.pieces, random.choice(known, len(text.ids)).tolist(), strict=True
        )
        ids = [old if piece.special else new for old, piece, new in tokens]
        return replace(tokenizer.of_ids(ids), token_type_ids=text.token_type_ids)

    sequences = tuple(map(random_text, texts.sequences))
    if texts.context is None:
        return ModelInputs(sequences)
    return ModelInputs(sequences, tuple(map(random_text, texts.context)))
