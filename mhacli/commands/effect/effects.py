"""`mhacli.effects`: the measurements of `mha effect` on a model in memory."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mhacli.commands.effect.metric import GivenMetric
from mhacli.commands.effect.removed import place_of
from mhacli.commands.effect.settings import EffectSettings
from mhacli.commands.effect.study import EffectStudy
from mhacli.errors import MhaError, UsageError
from mhacli.models.inputs import run_model
from mhacli.models.inspecting import inspecting
from mhacli.models.load import device_of
from mhacli.models.passes import noted, require_open
from mhacli.models.tokenizer import own_tokenizer
from mhacli.record.effect import REPLACEMENTS
from mhacli.record.record import Record
from mhacli.run import Run
from mhacli.settings import ModelSettings, options_of
from mhacli.text.tokens import LayerChoice

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
        heads=None if heads is None else tuple(place_of(head)[:3] for head in heads),
        edges=edges,
        replace=None if replace == "zero" else replace,
        at=None if at is None else index(at),
        position=None if position is None else index(position),
        target=target if target is None or isinstance(target, str) else index(target),
        versus=versus if versus is None or isinstance(versus, str) else index(versus),
        target_first=target_first,
        verify=index(n_verified),
        screen=None if screen is None else index(screen),
        from_python=True,
    )
    named = None if layers is None else tuple(x if isinstance(x, tuple) else (None, x) for x in layers)
    try:
        require_open(model, _NAME)
        _require_possible(settings, model)
        run = Run(model=ModelSettings(path=type(model).__name__, layers=named, device=str(device_of(model))))
        return _record(model, _inputs(model, inputs, tokenizer), tokenizer, settings, run=run, metric=metric)
    except MhaError as fault:
        if fault.code == "out-of-memory":  # the hint of the command names an option
            fault.hint = "a smaller model or a shorter text needs less"
        noted(fault)
        raise


@torch.no_grad()
def _record(
    model: nn.Module,
    inputs: Mapping[str, Any],
    tokenizer: Any,
    settings: EffectSettings,
    *,
    run: Run,
    metric: GivenMetric | None,
) -> Record:
    with inspecting(model, tokenizer) as seen:
        run_model(model, lambda: model(**inputs))
    names, has_batches = (
        None if tokenizer is None else own_tokenizer(tokenizer),
        hasattr(model, "config") and metric is None,
    )
    study = EffectStudy(model, inputs, settings, run, seen.record, names, metric, has_batches)
    record = study.completed()
    if not study.effects.verified.ok:
        is_coarse = record.config.dtype in ("bfloat16", "float16")
        raise MhaError(
            "the removals are not verified: a second computation disagrees",
            hint="in 16 bits rounding can hide such changes; model.float() shows whether it does"
            if is_coarse
            else "please report the family of this model: its attention does something that mha does not know",
            code="not-verified",
        )
    return record


def _inputs(model: nn.Module, given: Any, tokenizer: Any) -> dict[str, Any]:
    """The arguments of a pass over one text, by name. A mask without padding is left out, as the command does."""
    if isinstance(given, str):
        if tokenizer is None:
            raise UsageError(f"{given!r} is a text, and no tokenizer is given", hint=f"{_NAME}(model, text, tokenizer)")
        given = tokenizer(given, return_tensors="pt")
    accepted = inspect.signature(model.forward).parameters
    if not isinstance(given, Mapping):
        given = {"input_ids" if "input_ids" in accepted else next(iter(accepted)): given}
    inputs = dict[str, Any]()
    for name, value in given.items():
        if name not in accepted and "input_ids" in accepted:  # others take any
            raise UsageError(f"{type(model).__name__} takes no {name}", hint=f"leave {name} out")
        x = inputs[name] = torch.as_tensor(value).to(device_of(model)) if isinstance(value, (list, Tensor)) else value
        is_of_tokens = name.endswith(("input_ids", "attention_mask", "token_type_ids"))
        if is_of_tokens and x.ndim == 1:
            x = inputs[name] = x[None]
        if is_of_tokens and (x.ndim != 2 or x.shape[0] != 1 or not x.shape[1] or x.is_floating_point()):
            shape = f"{x.dtype} of shape {tuple(x.shape)}"
            raise UsageError(f"{_NAME} takes the ids of one text, not {shape}", hint="shape (1, n) or (n,)")
        if name.endswith("attention_mask") and not bool(inputs.pop(name).all()):
            raise UsageError(f"{_NAME} cannot take {name} as it is given", hint="one text without padding has no mask")
        if name == "token_type_ids" and not bool(x.any()):
            del inputs[name]
    return inputs


def _require_possible(settings: EffectSettings, model: nn.Module) -> None:
    """Raises `UsageError` for arguments that exclude each other, and for a model in training."""
    if model.training:
        raise UsageError(f"{type(model).__name__} is in training mode", hint="call model.eval()")
    if settings.replace not in (None, *REPLACEMENTS):
        raise UsageError(f"replace {settings.replace!r} is not known", hint=", ".join(REPLACEMENTS))
    values = {name: (option, getattr(settings, name)) for name, option in options_of(EffectSettings)}
    given = {name: value for name, value in values.items() if value[1] not in (None, False)}
    for name, (option, value) in given.items():
        for other in option.excludes:
            if other in given:
                raise UsageError(f"{name} and {other} exclude each other", hint=f"leave {other} out")
        if name != "verify" and option.low is not None and value < option.low:
            raise UsageError(f"{name} {value} is below {option.low}")
