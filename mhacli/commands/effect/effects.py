"""`mhacli.effects`: the measurements of `mha effect` on a model in memory."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from mhacli.commands.effect.metric import GivenMetric
from mhacli.commands.effect.removed import place_of
from mhacli.commands.effect.settings import EffectSettings
from mhacli.commands.effect.study import EffectStudy, heads_of
from mhacli.compute.checkpoint.inspecting import inspecting
from mhacli.errors import MhaError, UsageError
from mhacli.models.device_map import device_of
from mhacli.models.inputs import run_model
from mhacli.models.passes import noted, require_open
from mhacli.models.tokenizer import own_tokenizer
from mhacli.record.effect import REPLACEMENTS
from mhacli.record.record import Record
from mhacli.run import Run
from mhacli.settings import ModelSettings, options_of
from mhacli.text.tokens import AttentionKind, LayerChoice

_NAME = "mhacli.effects"


def effects(
    model: Any,
    inputs: Any,
    tokenizer: Any = None,
    *,
    heads: Sequence[tuple[Any, ...]] | None = None,
    edges: bool = False,
    layers: Sequence[int | LayerChoice] | None = None,
    replace: Literal["zero", "mean"] = "zero",
    at: int | None = None,
    position: int | None = None,
    target: str | int | None = None,
    versus: str | int | None = None,
    target_first: bool = False,
    n_verified: int = 4,
    screen: int | None = None,
    metric: GivenMetric | None = None,
) -> Record:
    """The record of what changes when heads or attention weights are removed for one text; `record.effects` is a table.

    It measures as `mha effect` does; docs/EFFECT.md explains the options. `model` is any module in evaluation mode in which
    `mhacli.inspecting` sees attention. `inputs` is the output of its tokenizer for one text, or other arguments by name; or ids;
    or the tensor that the module takes; or a text if `tokenizer` is given. Without a tokenizer, tokens are named by their ids.
    `heads` are `(layer, head)` or `("cross", 2, 1)`; None removes each head in turn. With `edges`, single attention weights of
    the query at `position` are removed.

    The output decides what is measured: the logit of a token, of a class, of a tag at `position`, of the start and end of an
    answer, a single score, or a vector; `metric` is a function of the output that gives the number to measure instead.
    `target` and `versus` are tokens, or names of classes, or their ids. Raises `MhaError` for options that do not fit together,
    and if the verification fails.
    """
    settings = EffectSettings(
        heads=None if heads is None else tuple(place_of(head)[:3] for head in _some("heads", heads)),
        edges=edges,
        replace=None if replace == "zero" else replace,
        at=_whole("at", at, 0),
        position=_whole("position", position),
        target=target if isinstance(target, str) else _whole("target", target),
        versus=versus if isinstance(versus, str) else _whole("versus", versus),
        target_first=target_first,
        verify=_whole("n_verified", n_verified, 0) or 0,
        screen=_whole("screen", screen, 1),
        from_python=True,
    )
    try:
        require_open(model, _NAME)
        _require_possible(settings, model)
        return _record(model, inputs, tokenizer, settings, layers=_layers(layers), metric=metric)
    except MhaError as fault:
        if fault.code == "out-of-memory":  # the hint of the command names an option
            fault.hint = "a smaller model or a shorter text needs less"
        noted(fault)
        raise


@torch.no_grad()
def _record(
    model: nn.Module,
    given: Any,
    tokenizer: Any,
    settings: EffectSettings,
    *,
    layers: tuple[LayerChoice, ...] | None,
    metric: GivenMetric | None,
) -> Record:
    inputs = _inputs(model, given, tokenizer)
    with inspecting(model, tokenizer) as seen:
        run_model(model, lambda: model(**inputs))
    record = seen.record
    study = EffectStudy(
        model,
        inputs,
        settings,
        Run(model=ModelSettings(path=type(model).__name__, layers=layers, device=str(device_of(model)))),
        heads_of(record.layers),
        record.sequences[0],
        record.context[0] if record.context else None,
        None if tokenizer is None else own_tokenizer(tokenizer),
        metric=metric,
        has_batches=hasattr(model, "config") and metric is None,
    )
    study.foresee()
    study.effects.run()
    if not study.effects.verified.ok:
        raise MhaError(
            "the removals are not verified: a second computation disagrees",
            hint="in 16 bits rounding can hide such changes; model.float() shows whether it does"
            if record.config.dtype in ("bfloat16", "float16")
            else "please report the family of this model: its attention does something that mha does not know",
            code="not-verified",
        )
    return study.added_to(record)


def _inputs(model: nn.Module, given: Any, tokenizer: Any) -> dict[str, Any]:
    """The arguments of a pass over one text, by name. A mask without padding is left out, as the command does."""
    accepted = inspect.signature(model.forward).parameters
    first = "input_ids" if "input_ids" in accepted else next(iter(accepted), "input")
    if isinstance(given, str):
        if tokenizer is None:
            raise UsageError(
                f"{given!r} is a text, and no tokenizer is given", hint=f"{_NAME}(model, inputs, tokenizer)"
            )
        given = tokenizer(given, return_tensors="pt")
    if not isinstance(given, Mapping):
        ids = torch.as_tensor(given)
        given = {first: ids[None] if ids.ndim == 1 else ids}
    if not given:
        raise UsageError(f"{_NAME} needs {first}", hint="what the tokenizer of the model gives for one text")
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    unknown = next(
        (name for name in given if name not in accepted and not (takes_any and name != "pixel_values")), None
    )
    if unknown is not None:
        raise UsageError(f"{_NAME} cannot take {unknown} for a {type(model).__name__}", hint=f"leave {unknown} out")
    inputs = {name: _one_text(name, value) for name, value in given.items()}
    for name in [name for name in inputs if name.endswith("attention_mask")]:
        if not bool(inputs.pop(name).all()):
            raise UsageError(f"{_NAME} cannot take {name} as it is given", hint="one text without padding has no mask")
    if "token_type_ids" in inputs and not bool(inputs["token_type_ids"].any()):
        del inputs["token_type_ids"]
    return {name: x.to(device_of(model)) if isinstance(x, Tensor) else x for name, x in inputs.items()}


def _one_text(name: str, value: Any) -> Any:
    """The tensor of an argument. Raises `UsageError` for several texts."""
    if not name.endswith(("input_ids", "attention_mask", "token_type_ids")):
        return value
    ids: Tensor = torch.as_tensor(value)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[0] != 1 or not ids.shape[1] or ids.is_floating_point():
        raise UsageError(
            f"{_NAME} takes the ids of one text, not {ids.dtype} of shape {tuple(ids.shape)}",
            hint="shape (1, n) or (n,)",
        )
    return ids


def _require_possible(settings: EffectSettings, model: nn.Module) -> None:
    """Raises `UsageError` for arguments that exclude each other, and for a model in training."""
    if model.training:
        raise UsageError(f"{type(model).__name__} is in training mode", hint="call model.eval()")
    if settings.replace not in (None, *REPLACEMENTS):
        raise UsageError(f"replace {settings.replace!r} is not known", hint=", ".join(REPLACEMENTS))
    given = {
        name: option for name, option in options_of(EffectSettings) if getattr(settings, name) not in (None, False)
    }
    for name, option in given.items():
        other = next((other for other in option.excludes if other in given), None)
        if other is not None:
            raise UsageError(f"{name} and {other} exclude each other", hint=f"leave {other} out")


def _whole(name: str, number: Any, minimum: int | None = None) -> int | None:
    """A number as an integer. Raises `UsageError` for a value that is not an integer, or is below `minimum`."""
    if number is None:
        return None
    try:
        whole = index(number)
    except TypeError:
        raise noted(UsageError(f"{name} {number!r} is not a whole number")) from None
    if minimum is not None and whole < minimum:
        raise noted(UsageError(f"{name} {whole} is below {minimum}"))
    return whole


def _layers(layers: Any) -> tuple[LayerChoice, ...] | None:
    """Layers as numbers, or with their kind. Raises `UsageError` with the form."""
    if layers is None:
        return None
    chosen: list[LayerChoice] = []
    for layer in _some("layers", layers):
        kind, number = layer if isinstance(layer, tuple) and len(layer) == 2 else (None, layer)
        if kind not in (None, *get_args(AttentionKind)) or not isinstance(number, int):
            raise noted(UsageError(f"layers: {layer!r} is not a layer", hint='5, or ("cross", 5)'))
        chosen.append((kind, number))
    return tuple(chosen)


def _some(name: str, given: Any) -> Sequence[Any]:
    """A non-empty list. Raises `UsageError` for anything else."""
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise noted(UsageError(f"{name} {given!r} is not a list of {name}", hint=f"leave {name} out to take all"))
    return given
