"""`mhacli.heads`, `mhacli.effects` and `mhacli.removed`: the measurements of `mha heads` and `mha
effect` on a model in memory, and its removals in calls of a user.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from operator import index
from statistics import fmean
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from mhacli.commands.effect.command import EffectSettings
from mhacli.commands.effect.metric import GivenMetric
from mhacli.commands.effect.removal import Removal, joins, without
from mhacli.commands.effect.study import EffectStudy, effects_of_heads, study_of, verified
from mhacli.errors import MhaError, UsageError, out_of_range
from mhacli.io.long_work import Progress, no_progress
from mhacli.models.capture import Call
from mhacli.models.inspecting import inspecting, layer_choices
from mhacli.models.layer_names import LayerKey, is_pair, n_vocabulary_of
from mhacli.models.layers import ModelInputs
from mhacli.models.load import Loaded, device_of, tokenizer_in_memory
from mhacli.models.passes import ModelPass, followed, require_open
from mhacli.models.run import CheckpointRun, make_texts, prepare_checkpoint, run_model, run_of
from mhacli.record.effect import REPLACEMENTS, Effect
from mhacli.record.exports import HeadTable
from mhacli.record.heads import Kept
from mhacli.record.record import Record
from mhacli.run import Run
from mhacli.settings import ModelSettings, options_of
from mhacli.text.reading import given_texts
from mhacli.text.tokens import AttentionKind, LayerChoice, TokenSequence

_EFFECTS, _REMOVED = "mhacli.effects", "mhacli.removed"


# ------------------------------------------------------------------------------------------ effects


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
    numbers: dict[str, Any] = {
        "at": at,
        "position": position,
        "target": target,
        "versus": versus,
        "screen": screen,
    }
    for name, x in (numbers | {"n_verified": n_verified}).items():
        is_free = (
            name != "n_verified"
            if x is None
            else isinstance(x, str) and name in ("target", "versus")
        )
        try:
            numbers[name] = x if is_free else index(x)  # a whole number may be a tensor
        except TypeError:
            raise UsageError(f"{name} cannot be {x!r:.60}, which is no whole number") from None
    settings = EffectSettings(
        heads=(
            None
            if heads is None
            else tuple(map(_place_of, heads if isinstance(heads, Iterable) else [heads]))
        ),
        edges=edges,
        replace=None if replace == "zero" else replace,
        target_first=target_first,
        from_python=True,
        verify=numbers.pop("n_verified"),
        **numbers,
    )
    if model.training:
        raise UsageError(f"{type(model).__name__} is in training mode", hint="call model.eval()")
    _require_replacement(replace)
    for name, option in options_of(EffectSettings):
        value = getattr(settings, name)
        if isinstance(value, int) and option.is_number and not option.contains(value):
            raise UsageError(
                f"{settings.name_of(name)} {value} is not in the range {option.range_text}"
            )
        for other in option.excludes:
            if value and getattr(settings, other):
                raise UsageError(
                    f"{name} and {other} exclude each other", hint=f"leave {other} out"
                )
    try:
        chosen = None if layers is None else layer_choices(layers)
    except (TypeError, ValueError):
        message = f"layers {layers!r} is no list of layers that exist"
        raise UsageError(message, hint='[5, 6], or [("cross", 5)]') from None
    run = Run(
        model=ModelSettings(path=type(model).__name__, layers=chosen, device=str(device_of(model)))
    )
    keywords = _inputs(model, inputs, tokenizer)
    with torch.no_grad(), inspecting(model, tokenizer) as seen:
        run_model(model, lambda: model(**keywords))
    names = None if tokenizer is None else tokenizer_in_memory(tokenizer)
    study = EffectStudy(model, keywords, settings, run, seen.record, metric=metric, tokenizer=names)
    return verified(study.run(), "not-verified")


def _require_replacement(replace: str) -> None:
    if replace not in REPLACEMENTS:
        raise UsageError(f"replace {replace!r} is not known", hint=", ".join(REPLACEMENTS))


def _inputs(model: nn.Module, given: Any, tokenizer: Any) -> dict[str, Any]:
    """The arguments of a pass over one text, by name. A mask without padding is left out, as the
    command does.
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
    inputs = dict[str, Any]()
    for name, value in given.items():
        if name not in accepted and "input_ids" in accepted:  # others take any
            raise UsageError(f"{type(model).__name__} takes no {name}", hint=f"leave {name} out")
        is_of_ids = name.endswith(("input_ids", "attention_mask", "token_type_ids"))
        try:
            x = (
                torch.as_tensor(value).to(device_of(model))
                if is_of_ids or isinstance(value, (list, Tensor))
                else value
            )
        except (TypeError, ValueError, RuntimeError):
            message = f"{_EFFECTS} takes the {name} of one text, not {value!r:.60}"
            raise UsageError(message, hint=f"{_EFFECTS}(model, text, tokenizer)") from None
        if is_of_ids:
            x = x[None] if x.ndim == 1 else x
            if x.ndim != 2 or x.shape[0] != 1 or not x.shape[1] or x.is_floating_point():
                shape = f"{x.dtype} of shape {tuple(x.shape)}"
                raise UsageError(
                    f"{_EFFECTS} takes the ids of one text, not {shape}",
                    hint="shape (1, n) or (n,)",
                )
        if not name.endswith("attention_mask"):
            inputs[name] = x
        elif not bool(x.all()):
            raise UsageError(
                f"{_EFFECTS} takes no {name} with zeros",
                hint="one text without padding has no mask",
            )
    return inputs


# ------------------------------------------------------------------------------------------ removed


@contextmanager
def removed(
    model: nn.Module,
    heads: Sequence[tuple[Any, ...]] = (),
    edges: Sequence[tuple[Any, ...]] = (),
    *,
    replace: Literal["zero", "mean"] = "zero",
) -> Iterator[None]:
    """A context in which `model` runs without some heads and edges: `with removed(model, heads=[(5,
    1)]): model(**inputs)`.

    A head is `(layer, head)`: zeros replace its output before the output projection, at all
    positions of all sequences. With `replace` mean, its mean over the positions of each sequence,
    padding excluded, replaces it. An edge is `(layer, head, query, key)`: this attention weight is
    masked, and the rest of its row is renormalised; the head None means all heads. In an
    encoder-decoder, `(layer, head)` is a head of the decoder's self-attention, and `("cross", 2,
    1)` one of another kind. Positions count the columns of the batch, cached tokens included.
    Gradients flow through the remaining model.

    Removals of nested contexts of one model add up; if two remove the same head, the inner one
    decides its replacement. Leaving the context restores the model. Raises `MhaError` if not
    everything could be removed: for a model that hides its parts (compiled, scripted, DataParallel)
    or is called in another thread, for heads that do not exist, for a mean in a call without all
    positions, and on leaving a context in which the model was not called or never computed the
    named heads or edges.
    """
    require_open(model, _REMOVED)
    _require_replacement(replace)
    if not (heads or edges):
        raise UsageError(
            f"{_REMOVED} is given nothing to remove", hint="heads=[(5, 1)] is head 1 of layer 5"
        )
    if not heads and replace != "zero":
        raise UsageError(
            "replace applies to heads only: an edge is masked", hint="leave replace out"
        )
    usual: AttentionKind = "decoder" if is_pair(model) else "self"
    places = map(_place_of, heads)
    removals = [
        Removal((kind or usual, layer), (head,), replace=replace) for kind, layer, head in places
    ]
    for kind, layer, head, query, key in (_place_of(edge, is_edge=True) for edge in edges):
        chosen = () if head is None else (head,)
        removals.append(Removal((kind or usual, layer), chosen, (query,), (key,), "renormalise"))
    removing = _Removing(model, removals)
    with followed(model, removing, by=_REMOVED, edits=True), ExitStack() as stack:
        for other in (each.model for each in _OPEN):
            if other is not model and not set(model.modules()).isdisjoint(other.modules()):
                names = f"{type(model).__name__} and {type(other).__name__}"
                hint = f"give {_REMOVED} the same model each time"
                raise MhaError(
                    f"{names} share modules, and {_REMOVED} is open for both",
                    hint=hint,
                    code="shared",
                )
        stack.callback(_OPEN.remove, removing)
        _OPEN.append(removing)
        yield
    removing.require_done()


def _place_of(given: Any, *, is_edge: bool = False) -> tuple[Any, ...]:
    """The kind of a head that a user named, None if not given, its layer and number; and of an edge
    its query and key, where the head may be None for all. Raises `UsageError` with the form.
    """
    values: tuple[Any, ...] = tuple(given) if isinstance(given, (tuple, list)) else ()
    kind, numbers = (
        (values[0], values[1:])
        if values and values[0] in get_args(AttentionKind)
        else (None, values)
    )
    are_right = [
        (type(n) is int and n >= 0) or (n is None and is_edge and i == 1)
        for i, n in enumerate(numbers)
    ]
    if not all(are_right) or len(numbers) != (4 if is_edge else 2):
        forms = ("(layer, head, query, key)", "(5, 1, 8, 2), or (5, None, 8, 2) of all heads")
        form, example = forms if is_edge else ("(layer, head)", '(5, 1), or ("cross", 5, 1)')
        raise UsageError(
            f"{'edges' if is_edge else 'heads'}: {given!r} is not {form}", hint=example
        )
    return kind, *numbers


class _Removing:
    """Removes heads and edges in the attentions of a model. Of several that are open for a model,
    the outermost removes what all are to remove.
    """

    def __init__(self, model: nn.Module, removals: Sequence[Removal]) -> None:
        self.model, self._removals = model, removals
        self._pass: ModelPass | None = None
        self._done, self._layers, self._heads = set[Removal](), dict[LayerKey, None](), list[Call]()

    def require_done(self) -> None:
        """Raises `MhaError` if not everything was removed."""
        name = type(self.model).__name__
        if self._pass is None:
            hint = (
                "call this object inside the with block; copies and wrappers are different objects"
            )
            message = f"{name} was not called within {_REMOVED}, so nothing was removed"
            raise MhaError(message, hint=hint, code="not-called")
        for removal in self._removals:
            if removal not in self._done:
                known = ", ".join(f"{kind}.{n}" for kind, n in self._layers) or "none"
                cell = (
                    f"query {removal.queries[0]} and key {removal.keys[0]} of "
                    if removal.keys
                    else ""
                )
                message = (
                    f"{cell}layer {removal.layer[1]} did not occur in the calls of {name}: not all"
                    " was removed"
                )
                raise MhaError(message, hint=f"layers with attention: {known}", code="not-removed")

    def begin(self, began: ModelPass) -> None:
        """A pass begins."""
        self._pass = began

    def end(self, *, is_whole: bool) -> None:
        """A pass is over."""

    def stray(self, name: str) -> None:
        """Handles a part of the model that was called by itself, so that the positions of its
        tokens are unknown.
        """
        message = f"{name} was called by itself within {_REMOVED}, outside of a call of the model"
        raise MhaError(
            message, hint=f"give {_REMOVED} the module that is called", code="not-called"
        )

    def take(self, call: Call) -> Tensor | None:
        """`z` after the removals in this attention. Raises `MhaError` for a head that does not
        exist, and if nothing can be removed.
        """
        together = [each for each in _OPEN if each.model is self.model]
        if self._pass is None or together[0] is not self or not joins(call, self._heads):
            return None
        key: LayerKey = (call.kind, call.layer)
        first, here, (_, n_heads, n_queries, n_keys) = (
            self._pass.n_past,
            list[Removal](),
            call.shape,
        )
        last_key = n_keys if call.kind == "cross" else max(n_keys, first + n_queries)
        for removal in (
            removal for each in together for removal in each._removals if removal.layer == key
        ):
            if any(head >= n_heads for head in removal.heads):
                raise UsageError(
                    f"layer {call.layer}: {out_of_range('head', removal.heads[0], n_heads)}"
                )
            if call.z is None or ("dropout" in call.unknown and removal.keys):
                reason = (
                    "gives no head outputs that could be replaced"
                    if call.z is None
                    else "drops weights by chance"
                )
                raise MhaError(f"{call.name} {reason}: nothing can be removed", code="no-attention")
            is_here = not removal.keys or first <= removal.queries[0] < first + n_queries
            if is_here and (not removal.keys or removal.keys[0] < last_key):
                here.append(removal)
        for each in together:
            each._layers.setdefault(key)
            each._done.update(here)
        if not here:
            return None
        real = (
            self._real(call, self._pass)
            if any(removal.replace == "mean" for removal in here)
            else None
        )
        with torch.autocast(call.device.type, enabled=False):
            return without(call, dict.fromkeys(range(call.shape[0]), here), start=first, real=real)[
                0
            ]

    def _real(self, call: Call, of: ModelPass) -> Tensor | None:
        """The positions of each sequence that are not padding; None if all are. Raises `MhaError`
        if the call does not have all of them, or if it does not show which are padding.
        """
        read = of.halves.get("encoder" if call.kind == "encoder" else "decoder")
        if of.n_past and call.kind != "encoder":
            message = (
                f"{call.name} runs behind tokens in a cache: a mean over all positions is not known"
            )
            raise MhaError(message, hint="call the model with the whole text", code="not-removed")
        if not (hasattr(self.model, "config") if read is None else not bool(read.real.all())):
            return None
        if read is None or tuple(read.real.shape) != (call.shape[0], call.shape[2]):
            message = (
                f"{call.name} reads no ids at its positions, and which of them are padding is not"
                " known"
            )
            raise MhaError(
                message,
                hint="call the model with input_ids, or without padding",
                code="not-removed",
            )
        return read.real.to(call.device)


_OPEN: list[_Removing] = []
"""What removes now, the outermost first, in one thread: another one waits until all are closed."""


# ----------------------------------------------------------------------------------- table of heads

_NAME, _SEED = "mhacli.heads", 0


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
    given = given_texts(texts, _NAME)
    if not given:
        raise UsageError("no text is given", hint=f'{_NAME}(model, "the cat sat on the mat")')
    if isinstance(model, str | os.PathLike):
        request = Run(model=ModelSettings(path=os.fspath(model)), texts=given, keep=())
        run, _ = prepare_checkpoint(request, "predict" if effect else None)
    else:
        require_open(model, _NAME)
        if not hasattr(model, "base_model") or tokenizer is None:
            hint = "mhacli.inspecting and mhacli.effects take other modules"
            raise UsageError(
                f"{_NAME} takes a folder, or a model of transformers and its tokenizer", hint=hint
            )
        if model.training:
            raise UsageError(
                f"{type(model).__name__} is in training mode", hint="call model.eval()"
            )
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
    n_parts = 1 + control + (len(texts.sequences) if effect else 0)
    floors, controls, effects = list[float](), None, list[list[Effect | None]]()

    def part(number: int) -> Progress:
        return lambda fraction, step: report_progress((number + fraction) / n_parts, step)

    record = run.run(part(0))
    if control:
        controls = run_of(run.loaded, _random_texts(run.loaded, texts), request).run(part(1)).heads
    for number, sequence in enumerate(texts.sequences if effect else ()):
        text = ModelInputs((sequence,), None if texts.context is None else (texts.context[number],))
        of_text = replace(record, sequences=text.sequences, context=text.context)
        study = study_of(run_of(run.loaded, text, request), EffectSettings(), of_text)
        studied = verified(study.run(part(1 + control + number)))
        floors += [] if studied.effect is None else [studied.effect.floor]
        effects.append(effects_of_heads(studied))
    heads = []
    for number, head in enumerate(record.heads):
        measured = [each for of_text in effects if (each := of_text[number]) is not None]
        changes = {
            name: [getattr(each, name) for each in measured]
            for name in ("d_logit", "d_output")
            if measured
        }
        means: dict[str, Any] = {
            name: fmean(values) for name, values in changes.items() if None not in values
        }
        of_control = None if controls is None else controls[number]
        heads.append(
            replace(head, **means, floor=max(floors) if measured else None, control=of_control)
        )
    return replace(record, heads=HeadTable(heads))


def _random_texts(loaded: Loaded, texts: ModelInputs) -> ModelInputs:
    """The texts with a random token in place of each that is not special."""
    random, tokenizer = np.random.default_rng(_SEED), loaded.tokenizer
    assert tokenizer is not None
    known = sorted({*range(n_vocabulary_of(loaded.config))} - tokenizer.special)

    def drawn(text: TokenSequence) -> TokenSequence:
        ids = random.choice(known, len(text.ids)).tolist()
        ids = [
            old if piece.special else new
            for old, piece, new in zip(text.ids, text.pieces, ids, strict=True)
        ]
        return replace(tokenizer.of_ids(ids), token_type_ids=text.token_type_ids)

    sequences = tuple(map(drawn, texts.sequences))
    return ModelInputs(
        sequences, None if texts.context is None else tuple(map(drawn, texts.context))
    )
