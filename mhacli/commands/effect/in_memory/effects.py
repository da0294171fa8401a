"""`mhacli.effects`: the measurements of `mha effect` on a transformers model in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from types import SimpleNamespace
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from mhacli.commands.effect.in_memory.removed import head_place
from mhacli.commands.effect.settings import EffectSettings, HeadChoice
from mhacli.commands.effect.study import EffectStudy, of_all_layers
from mhacli.compute.checkpoint.prepare import ReadCheckpoint, Texts
from mhacli.compute.checkpoint.run import CheckpointRun
from mhacli.errors import MhaError, UsageError
from mhacli.models.device_map import device_of
from mhacli.models.folder import Checkpoint
from mhacli.models.inputs import ModelInputs, make_inputs
from mhacli.models.load import Loaded
from mhacli.models.passes import noted, require_open
from mhacli.models.tokenizer import ModelTokenizer, own_tokenizer
from mhacli.record.effect import REPLACEMENTS
from mhacli.record.record import Record
from mhacli.run import Run
from mhacli.settings import ModelSettings, options_of
from mhacli.text.tokens import AttentionKind, LayerChoice, TokenSequence, named_by_ids

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
) -> Record:
    """The record of what changes when heads or attention weights are removed for one text; `record.effects` is a table.

    It measures as `mha effect` does; docs/EFFECT.md explains the options. `model` is a transformers model in evaluation mode.
    `inputs` is the output of its tokenizer for one text, or ids, or a text if `tokenizer` is given; without a tokenizer, tokens
    are named by their ids. `heads` are `(layer, head)` or `("cross", 2, 1)`; None removes each head in turn. With `edges`, single
    attention weights of the query at `position` are removed.
    `target` and `versus` are tokens or their ids. For verification, weights are changed for a moment and restored. Raises
    `MhaError` for options that do not fit together, and if the verification fails.
    """
    settings = EffectSettings(
        heads=_heads(heads),
        edges=edges,
        replace=None if replace == "zero" else replace,
        at=_whole("at", at, 0),
        position=_whole("position", position),
        target=_token("target", target),
        versus=_token("versus", versus),
        target_first=target_first,
        verify=_whole("n_verified", n_verified, 0) or 0,
        screen=_whole("screen", screen, 1),
        from_python=True,
    )
    try:
        require_open(model, _NAME)
        _require_transformers(model)
        _require_replacement(replace)
        _require_one_removal(settings)
        run = _run(model, _layers(layers))
        return _record(model, inputs, tokenizer, run, settings=settings)
    except MhaError as fault:
        if fault.code == "out-of-memory":  # the hint of the command names an option
            fault.hint = "a smaller model or a shorter text needs less"
        noted(fault)
        raise


def _run(model: Any, layers: tuple[LayerChoice, ...] | None) -> Run:
    device = str(device_of(model)) if isinstance(model, nn.Module) else "cpu"
    return Run(model=ModelSettings(path=type(model).__name__, layers=layers, device=device), allow_nonfinite=True)


def _record(model: Any, inputs: Any, tokenizer: Any, run: Run, *, settings: EffectSettings) -> Record:
    """The record of effects in a model whose parts can be followed."""
    names = _IdNames() if tokenizer is None else own_tokenizer(tokenizer)
    text_inputs = _inputs(model, inputs, names)
    source = getattr(model, "name_or_path", "") or type(model).__name__
    loaded = Loaded(model, Checkpoint(source), source, None)
    base = Loaded(model.base_model, loaded.checkpoint, source, None)
    inspected = CheckpointRun(base, text_inputs, of_all_layers(run))
    texts = Texts(text_inputs.sequences, text_inputs.context, (), ())
    study = EffectStudy(run, settings, ReadCheckpoint(loaded, text_inputs, texts, names), inspected)
    with torch.no_grad():
        study.inspect()
        study.run()
    record = study.record()
    if record.effect is None or not record.effect.verified.ok:
        raise MhaError(
            "the removals are not verified: a second computation disagrees",
            hint="in 16 bits rounding can hide such changes; model.float() shows whether it does"
            if record.config.dtype in ("bfloat16", "float16")
            else "please report the family of this model: its attention does something that mha does not know",
            code="not-verified",
        )
    return record


class _IdNames(ModelTokenizer):
    """Names tokens by their ids if no tokenizer is given."""

    def __init__(self) -> None:
        self.side, self.bos_id, self.pad_id = "right", None, None
        self.path, self.library = "ids", SimpleNamespace(token_to_id=lambda name: None)

    def sequence(self, text: str, *, special: bool = True) -> TokenSequence:
        """The ids that a text is made of."""
        if not all(word.isdecimal() for word in text.split()):
            raise UsageError(
                f"{text!r} is a text, and no tokenizer is given", hint=f"{_NAME}(model, inputs, tokenizer)"
            )
        return named_by_ids([int(word) for word in text.split()])

    def continued(self, sequence: TokenSequence, ids: Sequence[int]) -> TokenSequence:
        """The sequence with more tokens."""
        return named_by_ids([*sequence.ids, *ids])


def _require_transformers(model: Any) -> None:
    if not hasattr(getattr(model, "config", None), "get_text_config") or not hasattr(model, "base_model"):
        raise UsageError(
            f"{_NAME} needs a model of transformers, not a {type(model).__name__}",
            hint="mhacli.removed works with any module; measure with your own calls",
        )
    if model.training:
        raise UsageError(f"{type(model).__name__} is in training mode", hint="call model.eval()")


def _inputs(model: Any, given: Any, names: ModelTokenizer) -> ModelInputs:
    """The inputs of a pass over one text."""
    if isinstance(given, str):
        given = {"input_ids": names.sequence(given).ids}
    if not isinstance(given, Mapping):
        given = {"input_ids": given}
    is_pair = bool(model.config.is_encoder_decoder)
    known = {"input_ids", "attention_mask", "token_type_ids"} | ({"decoder_input_ids"} if is_pair else set())
    for name, value in given.items():
        is_plain = name.endswith("input_ids") or bool((torch.as_tensor(value) == (name == "attention_mask")).all())
        if name not in known or not is_plain:
            hint = (
                "one text without padding has no mask and one type of tokens" if name in known else f"leave {name} out"
            )
            raise UsageError(f"{_NAME} cannot take {name} as it is given", hint=hint)
    missing = next(
        (name for name in (["input_ids", "decoder_input_ids"] if is_pair else ["input_ids"]) if name not in given), None
    )
    if missing is not None:
        raise UsageError(f"{_NAME} needs {missing}", hint="what the tokenizer of the model gives for one text")
    sequence = _text(given["decoder_input_ids" if is_pair else "input_ids"], names)
    context = (_text(given["input_ids"], names),) if is_pair else None
    return make_inputs(model, (sequence,), context, names.side, names.pad_id or 0)


def _text(given: Any, names: ModelTokenizer) -> TokenSequence:
    ids: Tensor = torch.as_tensor(given)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[0] != 1 or not ids.shape[1] or ids.is_floating_point():
        raise UsageError(
            f"{_NAME} takes the ids of one text, not {ids.dtype} of shape {tuple(ids.shape)}",
            hint="shape (1, n) or (n,)",
        )
    row = [int(i) for i in ids[0]]
    return (
        names.continued(TokenSequence("", (), (), ()), row)
        if isinstance(names, _IdNames)
        else names.spelled(row) or named_by_ids(row)
    )


def _require_one_removal(settings: EffectSettings) -> None:
    """Raises `UsageError` for arguments that exclude each other."""
    given = {
        name: option for name, option in options_of(EffectSettings) if getattr(settings, name) not in (None, False)
    }
    for name, option in given.items():
        other = next((other for other in option.excludes if other in given), None)
        if other is not None:
            raise UsageError(f"{name} and {other} exclude each other", hint=f"leave {other} out")


def _require_replacement(replace: str) -> None:
    if replace not in REPLACEMENTS:
        raise UsageError(f"replace {replace!r} is not known", hint=", ".join(REPLACEMENTS))


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


def _token(name: str, token: Any) -> str | int | None:
    return token if isinstance(token, str) else _whole(name, token)


def _heads(heads: Any) -> tuple[HeadChoice, ...] | None:
    return None if heads is None else tuple(cast("HeadChoice", head_place(head)[:3]) for head in _some("heads", heads))


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
