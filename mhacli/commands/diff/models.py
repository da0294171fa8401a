"""Compares two models over the same inputs: loads or builds each, runs it, and says where they
first differ.
"""

import gc
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace as changed
from torch import Tensor, nn

from mhacli.errors import MhaError, UsageError, out_of_range
from mhacli.io import memory
from mhacli.io.data import decode
from mhacli.models import foreign
from mhacli.models.folder import Checkpoint
from mhacli.models.layer_names import most_positions, n_vocabulary_of
from mhacli.models.load import Loaded, device_of, find, load_model, load_tokenizer
from mhacli.models.passes import require_open
from mhacli.models.run import forward_of, make_texts, run_model
from mhacli.numbers import shown
from mhacli.record.record import words_of_random
from mhacli.run import Run, require_room
from mhacli.settings import pairs
from mhacli.usercode.build import load_built
from mhacli.usercode.example_call import example_of
from mhacli.usercode.process import Stage
from mhacli.usercode.target import TargetRequest

from .comparison import compare
from .computed import Computed, compute, load_places, save_places
from .outputs import asked_for, outputs_of
from .places import OF_CALLS, Forward, ModelPlace
from .request import DiffRequest, MapForm, Side, map_forms
from .result import ModelDiff, ModelDocument
from .words import summary_of

Inputs = dict[str, Any]
"""The ids that a model reads, by keyword: lists of lists."""
_KEYWORDS = ("input_ids", "decoder_input_ids")


class _Subject(NamedTuple):
    """One of the two things, and its checkpoint without weights, if it is one."""

    side: Side
    loaded: Loaded | None


def diff_modules(a: nn.Module, b: Any, inputs: Any, words: Sequence[str]) -> ModelDiff:
    """The differences of a model in memory and `b` over `inputs`: keywords, positional arguments,
    or one tensor. `b` is another model, or the path of a file of outputs, under names that `words`
    turn into those of `a` as `--map` does.
    """
    is_model = isinstance(b, nn.Module)
    for model in (a, b) if is_model else (a,):
        require_open(model, "mhacli.diff")
    forms = map_forms(words)
    name = type(b).__name__ if is_model else os.fspath(b)
    mapped = _mapped(a, forms, None) if is_model else asked_for(a, name, forms)
    of_a = compute(a, forward_of(a, inputs), mapped)
    if is_model:
        of_b = compute(b, forward_of(b, inputs), _mapped(b, forms, of_a))
    else:
        of_b = outputs_of(name, forms, of_a, None)
    return _with_verdict(compare(of_a, of_b), type(a).__name__, name)


def diff_request(fields: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
    """The document of two models that are named; with `save`, the first model alone is saved.
    Raises `MhaError`.
    """
    request = decode(DiffRequest, fields, "the request")
    names = request.a, request.b or ""
    subjects = [
        _Subject(side, find(side, needs_tokenizer=False) if side.kind == "checkpoint" else None)
        for side in request.sides
    ]
    if request.save is not None and subjects[0].loaded and subjects[0].loaded.checkpoint.is_random:
        raise UsageError("--save does not work with random weights: they can be drawn again")
    known = (_inputs(subject, subjects, request) for subject in subjects)
    inputs = [each for each in known if each is not None]
    if not inputs:
        hint = (
            "--ids 3,7,5 gives ids; --tokenizer FILE reads the text, and --tokenizer byte too, for"
            " models of 256 ids or more"
        )
        raise UsageError("neither side has a tokenizer", hint=hint)
    if [*inputs[0]] != [*inputs[-1]]:
        message = (
            "only one of the two is an encoder-decoder, which also reads the text of its decoder"
        )
        raise MhaError(message, code="cannot-compare")
    if inputs[0] != inputs[-1]:
        ids = next(iter(inputs[0].values()))[0], next(iter(inputs[-1].values()))[0]
        return _with_verdict(_with_random(ModelDocument(ids=ids), subjects), *names)
    computed = list[Computed]()
    for subject in subjects:
        first = computed[0] if computed else None
        computed.append(_computed(subject, inputs[0], request, stage, first))
    if request.save is not None:
        save_places(computed[0], inputs[0], request.command, request.save, force=request.force)
        return {"n_places": len(computed[0].entries)}
    stage("comparing", limited=None)
    document = compare(computed[0], computed[1])
    if all(subject.loaded for subject in subjects):  # otherwise they are not known
        for name in ("attn", "device", "revision"):
            x, y = (getattr(side, name) or "default" for side in request.sides)
            if x != y:
                document.notes.append(f"--{name}: {x} in A, {y} in B")
    return _with_verdict(_with_random(document, subjects), *names)


def _with_random(document: ModelDocument, subjects: Sequence[_Subject]) -> ModelDocument:
    """The differences, with what is said of models with random weights."""
    seeds = {
        name: subject.loaded.random_weights
        for name, subject in zip("ab", subjects, strict=False)
        if subject.loaded is not None and subject.loaded.random_weights is not None
    }
    notes = [
        f"{name.upper()} has {words_of_random(seed)}: nothing was learned"
        for name, seed in seeds.items()
    ]
    return changed(document, notes=[*notes, *document.notes], random_weights=seeds)


def _with_verdict(document: ModelDocument, a: str, b: str) -> ModelDiff:
    """The differences of two named models, with the first one and the result in a sentence."""
    departures = (place for place in document.places if place.beyond and not place.healed)
    first = next(departures, None)
    verdict = "agree" if first is None and document.ids is None else "differ"
    document = changed(document, a=a, b=b, first=first, verdict=verdict)
    return ModelDiff(changed(document, summary=summary_of(document)))


# --------------------------------------------------------------------------------------- the inputs


def _inputs(subject: _Subject, subjects: Sequence[_Subject], request: DiffRequest) -> Inputs | None:
    """What a side reads: the ids of a file of places, those that are given, or those of its
    tokenizer. None for code, which reads the same as the other side, and for a checkpoint without a
    tokenizer.
    """
    side, loaded = subject
    checkpoints = [each.loaded for each in subjects if each.loaded is not None]
    if side.kind == "places":
        return load_places(side.word).inputs
    if request.ids is not None:
        n = None if loaded is None else n_vocabulary_of(loaded.config)
        if n is not None and max(request.ids) >= n:
            raise UsageError(out_of_range("--ids", max(request.ids), n))
        is_pair = any(checkpoint.config.is_encoder_decoder for checkpoint in checkpoints)
        keywords = _KEYWORDS if is_pair else _KEYWORDS[:1]
        return {name: ([*request.ids],) for name in keywords}
    if not request.text:
        return None
    if loaded is not None and loaded.tokenizer is not None:
        run = Run(model=side, texts=(request.text,), max_tokens=request.max_tokens)
        texts = make_texts(run, loaded)
        rows = [*(texts.context or ()), *texts.sequences]
    elif request.tokenizer is not None and not checkpoints:
        tokenizer = load_tokenizer(Checkpoint(""), request.tokenizer)
        rows = [tokenizer.beginning(request.text, request.max_tokens)[0]]
    else:
        return None
    return {name: ([*row.ids],) for name, row in zip(_KEYWORDS, rows, strict=False)}


# ----------------------------------------------------------------------------------------- the runs


def _computed(
    subject: _Subject, inputs: Inputs, request: DiffRequest, stage: Stage, first: Computed | None
) -> Computed:
    """What a side computes. With one model at a time, and to be saved, its rounding is measured at
    once, and it is freed.
    """
    side, loaded = subject
    if side.kind == "places":
        return load_places(side.word).computed
    if side.kind == "tensors":
        assert first is not None  # the command takes such a file as the second
        return outputs_of(side.word, map_forms(request.map), first, side.dtype)
    tensors = {name: torch.tensor(rows) for name, rows in inputs.items()}
    if loaded is None:
        model, forward = _built(side, tensors, stage, "a" if side is request.sides[0] else "b")
    else:
        _require_room(loaded, max(len(rows[0]) for rows in inputs.values()))
        stage(f"loading {side.word}", limited=None)
        model = load_model(loaded, side, "predict", allow_nonfinite=True).model
        _choose_attention(model, side.attn)
        forward = forward_of(model, tensors)
    stage(f"running {side.word}", limited=None)
    forms, b = map_forms(request.map), request.sides[-1]
    mapped = (
        asked_for(model, b.word, forms) if b.kind == "tensors" else _mapped(model, forms, first)
    )
    try:
        computed = compute(model, forward, mapped)
    except MhaError as fault:
        if loaded is not None or fault.typed_hint is not None:
            raise
        hint = "mha diff gives code ids; mhacli.diff(model_a, model_b, x) in Python takes vectors x"
        raise MhaError(**fault.typed() | {"hint": hint}) from fault
    if request.one_at_a_time or request.save:
        computed.measure_rounding()
        del model, forward
        gc.collect()
    return computed


def _choose_attention(model: Any, name: str | None) -> None:
    """Sets the implementation of attention of a model, if one is named. Raises `UsageError`."""
    if name is None:
        return
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as fault:
        line = str(fault).partition("\n")[0]
        message = f"attention {name} does not work with {type(model).__name__}: {line:.200}"
        raise UsageError(message) from fault


def _require_room(loaded: Loaded, length: int) -> None:
    """Raises `MhaError` if a checkpoint has no positions for so many ids, or if what it computes of
    them fits neither into memory nor into the temporary folder.
    """
    most = most_positions(loaded.config)
    if most is not None and length > most:
        message = f"{length} ids are more than the {most} positions of {loaded.source}"
        raise MhaError(
            message, hint=f"--max-tokens {most} takes the first {most} of a text", code="too-large"
        )

    def size(name: str) -> int:
        return int(getattr(loaded.text_config, name, None) or 0)

    width, n_layers, n_words = size("hidden_size"), size("num_hidden_layers"), size("vocab_size")
    d_inner = size("intermediate_size") or 4 * width
    is_eager = foreign.attn_implementation(loaded.text_config) == "eager"
    cell_numbers = 2 + 3 * size("num_attention_heads") if is_eager else 2

    def needed(n: int) -> int:
        return 4 * n * (24 * width + 3 * n_words) + 4 * n * n * cell_numbers

    what = f"{length} tokens through {loaded.source}"
    require_room(needed, length, memory.available_bytes(), what=what)
    folder = tempfile.gettempdir()
    stored = 4 * length * (n_layers * (16 * width + 2 * d_inner) + n_words)
    if stored > shutil.disk_usage(folder).free:
        message = (
            f"{folder} has no room for the {shown(stored, 'bytes')} that {loaded.source} computes"
            f" of {length} tokens"
        )
        hint = "TMPDIR names another folder; a shorter text needs less"
        raise MhaError(message, hint=hint, code="too-large")


def _built(
    side: Side, tensors: Mapping[str, Tensor], stage: Stage, letter: str
) -> tuple[nn.Module, Forward]:
    """A model that code builds, and its call. An error of its arguments names the option of the
    side with this letter.
    """
    device = "cpu" if side.device == "auto" else side.device
    target = TargetRequest(side.word, arguments=pairs(side.arg, "arg"), device=device)
    try:
        built = load_built(target, stage)
    except MhaError as fault:
        typed = fault.typed()
        for name in ("message", "hint"):
            typed[name] = re.sub(r"--arg(?![-\w])", f"--arg-{letter}", typed[name] or "") or None
        raise MhaError(**typed) from fault
    module = built.module
    if module is None:
        raise MhaError(f"{side.word} gives no torch.nn.Module", code="no-target")
    if side.dtype is not None:
        module = module.to(getattr(torch, side.dtype))
    require_open(module, "mha diff")
    if side.example is None:
        return module, forward_of(module, tensors)
    example = example_of(side.example, built)
    ids = tensors["input_ids"].to(device_of(module))
    return module, lambda: run_model(module, lambda: example(module, ids))


def _mapped(
    model: nn.Module, forms: Sequence[MapForm], first: Computed | None
) -> dict[str, ModelPlace | None]:
    """The modules of a model that `--map LEFT=RIGHT` names: of the first model on the left, with
    any place; of the second on the right, with the place of their partner. Raises `UsageError` if
    there is none.
    """
    modules = {name for name, _ in model.named_modules()}
    mapped = dict[str, ModelPlace | None]()
    places = dict[str, ModelPlace]()
    if first is not None:
        places = {place.name: place for place in first.entries if place.site not in OF_CALLS}
    for form in forms:
        for n in itertools.count():
            left, right = (name.replace("{i}", str(n)) for name in form[:2])
            name = left if first is None else right
            if name not in modules or name in mapped or (first is not None and left not in places):
                break
            mapped[name] = places.get(left)
        if n == 0:
            raise UsageError(f"--map {form.word}: no module is named {name}")
    return mapped
