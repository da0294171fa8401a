"""Compares two models over the same inputs: loads or builds each, runs it, measures rounding, and says where the two part."""

from __future__ import annotations

import gc
import inspect
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from mhacli.commands.diff.result import DiffRequest, ModelDiff, Side, model_diff, other_ids
from mhacli.errors import MhaError, UsageError, out_of_range
from mhacli.io import memory
from mhacli.io.data import decode
from mhacli.io.safetensors import read_tensor_header
from mhacli.models.compare import Computed, coarser, compare, compute, load_places, measure_rounding, save_places
from mhacli.models.layer_names import dtype_of, most_positions
from mhacli.models.load import Loaded, device_of, find, load_model
from mhacli.models.passes import require_open
from mhacli.models.places import OF_CALLS, Forward, Place
from mhacli.models.run import make_texts, run_model
from mhacli.run import Run, require_room
from mhacli.settings import ModelSettings, pairs
from mhacli.text.numbers import shown
from mhacli.text.tokens import TokenSequence, named_by_ids
from mhacli.usercode.build import build
from mhacli.usercode.find_call import example_of
from mhacli.usercode.process import Stage
from mhacli.usercode.target import TargetRequest, find_target

Inputs = dict[str, Any]
"""The ids that a model reads, by keyword: lists of lists."""


def diff_modules(a: nn.Module, b: nn.Module, inputs: Any) -> ModelDiff:
    """The differences of two models in memory over `inputs`: keywords, positional arguments, or one tensor."""
    for model in (a, b):
        require_open(model, "mhacli.diff")
    runs = forward_of(a, inputs), forward_of(b, inputs)
    with TemporaryFile() as file_a, TemporaryFile() as file_b:
        of_a, of_b = compute(a, runs[0], type(a).__name__, file_a), compute(b, runs[1], type(b).__name__, file_b)
        return _compared((of_a, (a, runs[0])), (of_b, (b, runs[1])))


_Ran = tuple[Computed, tuple[nn.Module, Forward] | None]
"""What a model computed; and the model with its call, unless its rounding is known."""


def _compared(a: _Ran, b: _Ran, names: tuple[str, str] | None = None) -> ModelDiff:
    """The differences of two models, with the rounding of the coarser one."""
    rounds = coarser(a[0], b[0])
    again = next(run for found, run in (a, b) if found is rounds)
    if again is not None:
        measure_rounding(*again, rounds)
    return model_diff(compare(a[0], b[0]), names or (a[0].name, b[0].name))


def diff_request(request: Mapping[str, Any], stage: Stage) -> bytes:
    """The document of two models that are named, as JSON; with `save`, the first model alone is saved. Raises `MhaError`."""
    wanted = decode(DiffRequest, request, "the request")
    sides = [side for side in (wanted.a, wanted.b) if side is not None]
    found = [
        find(_settings(side, wanted), needs_tokenizer=False) if side.kind == "checkpoint" else None for side in sides
    ]
    inputs = [_inputs(side, loaded, found, wanted) for side, loaded in zip(sides, found, strict=True)]
    known = [of_side for of_side in inputs if of_side is not None]
    if not known:
        hint = "--tokenizer byte reads the bytes of the text as ids, --tokenizer FILE another tokenizer; --ids 3,7,5 gives ids"
        raise UsageError("neither side has a tokenizer", hint=hint)
    if known[0] != known[-1]:
        return json.dumps(other_ids(known[0], known[-1], wanted)).encode()
    with ExitStack() as files:
        ran = list[_Ran]()
        for side, loaded in zip(sides, found, strict=True):
            first = ran[0][0] if ran else None
            ran.append(_ran(side, loaded, known[0], wanted, stage, files.enter_context(_file(side)), first))
        if len(ran) == 1:
            assert wanted.save is not None
            save_places(ran[0][0], known[0], wanted.command, wanted.save, force=wanted.force)
            return json.dumps({"n_places": len(ran[0][0].entries)}).encode()
        stage("comparing", limited=False)
        document = _compared(ran[0], ran[1], (sides[0].word, sides[1].word))
        for name in ("attn", "device", "revision"):
            of_a, of_b = (getattr(side, name) or "default" for side in sides)
            document["notes"] += [f"--{name}: {of_a} in A, {of_b} in B"] if of_a != of_b else []
        return json.dumps(document).encode()


# -------------------------------------------------------------------------------------------------------------- the inputs


def _settings(side: Side, wanted: DiffRequest) -> ModelSettings:
    dtype: Any = side.dtype
    return ModelSettings(
        path=side.word, device=side.device, dtype=dtype, revision=side.revision, tokenizer=wanted.tokenizer
    )


def _inputs(side: Side, loaded: Loaded | None, found: Sequence[Loaded | None], wanted: DiffRequest) -> Inputs | None:
    """What a side reads: the ids of a file of places, those that are given, or those of its tokenizer. None for code, which reads
    the same as the other side, and for a checkpoint without a tokenizer."""
    if side.kind == "places":
        with open(side.word, "rb") as file:
            return load_places(read_tensor_header(side.word), file)[1]
    is_pair = any(each is not None and each.config.is_encoder_decoder for each in found)
    if wanted.ids is not None:
        rows = named_by_ids(wanted.ids)
        n = 0 if loaded is None else int(loaded.text_config.vocab_size)
        if loaded is not None and max(wanted.ids) >= n:
            raise UsageError(out_of_range("--ids", max(wanted.ids), n))
        return _keywords(rows, rows if is_pair else None)
    if loaded is None and wanted.tokenizer is not None and wanted.texts and not any(found):
        from mhacli.models.load import load_tokenizer

        return _keywords(load_tokenizer(None, wanted.tokenizer).sequence(wanted.texts[0]), None)  # type: ignore[arg-type]
    if loaded is None or loaded.tokenizer is None or not wanted.texts:
        return None
    run = Run(model=_settings(side, wanted), texts=wanted.texts, max_tokens=wanted.max_tokens)
    texts = make_texts(run, loaded)
    if texts.context is not None:
        return _keywords(texts.context[0], texts.sequences[0])
    return _keywords(texts.sequences[0], None)


def _keywords(text: TokenSequence, decoder: TokenSequence | None) -> Inputs:
    return {"input_ids": [[*text.ids]]} | ({} if decoder is None else {"decoder_input_ids": [[*decoder.ids]]})


# --------------------------------------------------------------------------------------------------------------- the runs


def _file(side: Side) -> Any:
    """The file of what a side computes."""
    return open(side.word, "rb") if side.kind == "places" else TemporaryFile()


def _ran(
    side: Side,
    found: Loaded | None,
    inputs: Inputs,
    wanted: DiffRequest,
    stage: Stage,
    file: BinaryIO,
    first: Computed | None,
) -> _Ran:
    """What a side computes. With one model at a time, and to be saved, its rounding is measured at once, and it is freed."""
    if side.kind == "places":
        return load_places(read_tensor_header(side.word), file)[0], None
    tensors = {name: torch.tensor(rows) for name, rows in inputs.items()}
    if found is not None:
        length, most = max(len(rows[0]) for rows in inputs.values()), most_positions(found.config)
        if most is not None and length > most:
            message = f"{length} ids are more than the {most} positions of {side.word}"
            raise MhaError(message, hint=f"--max-tokens {most} takes the first {most} of a text", code="too-large")
        _require_room(found, length)
        stage(f"loading {side.word}", limited=False)
        model = load_model(found, _settings(side, wanted), "predict", allow_nonfinite=True).model
        if side.attn is not None:
            _choose_attention(model, side.attn)
        forward = forward_of(model, tensors)
    else:
        model, forward = _built(side, tensors, stage)
    stage(f"running {side.word}", limited=False)
    computed = compute(model, forward, side.word, file, _mapped(model, wanted.map, first))
    if not (wanted.one_at_a_time or wanted.save):
        return computed, (model, forward)
    measure_rounding(model, forward, computed)
    del model, forward
    gc.collect()
    return computed, None


def _mapped(model: nn.Module, words: Sequence[str], first: Computed | None) -> dict[str, Place | None]:
    """The modules of a model that `--map LEFT=RIGHT` names: of the first model on the left, with any place; of the second on the
    right, with the place of their partner. Raises `UsageError` if there is none."""
    modules, mapped = dict(model.named_modules()), dict[str, Place | None]()
    places = {} if first is None else {place.name: place for place in first.entries if place.site not in OF_CALLS}
    for word in words:
        names = word.split("=")
        if len(names) != 2:
            raise UsageError(f"--map {word[:100]!r} is not of the form 'model.layers.{{i}}=transformer.h.{{i}}'")
        form, n_before = names[first is not None], len(mapped)
        for n in range(len(modules)):
            own, left = form.replace("{i}", str(n)), names[0].replace("{i}", str(n))
            if own not in modules or (first is not None and left not in places) or own in mapped:
                break
            mapped[own] = places.get(left)
        if len(mapped) == n_before:
            raise UsageError(f"--map {word[:100]}: no module is named {form.replace('{i}', '0')}")
    return mapped


def _choose_attention(model: Any, name: str) -> None:
    """Has a model use an implementation of attention. Raises `UsageError` if it cannot."""
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as fault:
        line = str(fault).partition("\n")[0]
        raise UsageError(f"--attn {name} does not work with {type(model).__name__}: {line:.200}") from fault


def _built(side: Side, tensors: Mapping[str, Tensor], stage: Stage) -> tuple[nn.Module, Forward]:
    """A model that code builds, and its call."""
    stage(f"importing {side.word}")
    thing = find_target(side.word)
    stage(f"building {side.word}")
    device = "cpu" if side.device == "auto" else side.device
    made = build(thing, TargetRequest(side.word, arguments=pairs(side.arg, "arg"), device=device))
    if made.module is None:
        raise MhaError(f"{side.word} gives no torch.nn.Module", code="no-target")
    module = made.module if side.dtype is None else made.module.to(getattr(torch, side.dtype))
    require_open(module, "mha diff")
    if side.example is None:
        return module, forward_of(module, tensors)
    example, ids = example_of(side.example, made), tensors["input_ids"].to(device_of(module))
    return module, lambda: run_model(module, lambda: example(module, ids))


def forward_of(model: nn.Module, inputs: Any) -> Forward:
    """A call of a model with inputs, on its device, without a cache. Keywords that it does not take are those of another library:
    then it gets the ids alone. Raises `UsageError` if it cannot take them."""
    device, taken = device_of(model), inspect.signature(model.forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    args = () if isinstance(inputs, Mapping) else tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    given: dict[str, Any] = dict(inputs) if isinstance(inputs, Mapping) else {}
    if not (takes_any or given.keys() <= taken.keys()):
        others = [name for name, value in given.items() if name != "input_ids" and _matters(name, value)]
        if "input_ids" not in given or others:
            names = ", ".join(others or sorted(given.keys() - taken.keys()))
            raise UsageError(f"{type(model).__name__} does not take {names}", hint=f"it takes {', '.join(taken)}")
        args, given = (given["input_ids"],), {}
    if "use_cache" in taken and hasattr(getattr(model, "config", None), "use_cache"):
        given.setdefault("use_cache", False)

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype_of(model)) if value.is_floating_point() else value.to(device)

    def forward() -> Any:
        return run_model(model, lambda: model(*map(moved, args), **{name: moved(v) for name, v in given.items()}))

    return forward


def _matters(name: str, value: Any) -> bool:
    """Whether a keyword changes what is computed: not a mask without padding, nor a choice of what is returned."""
    if isinstance(value, Tensor):
        return not (name == "attention_mask" and bool(value.all()))
    return name not in ("use_cache", "return_dict") and value is not None


def _require_room(found: Loaded, length: int) -> None:
    """Raises `MhaError` if what a checkpoint computes of a text fits neither into memory nor into the temporary folder."""
    config = found.text_config
    width, n_layers = int(getattr(config, "hidden_size", 0)), int(getattr(config, "num_hidden_layers", 0))
    n_heads, words = int(getattr(config, "num_attention_heads", 0)), int(getattr(config, "vocab_size", 0))
    inner = getattr(config, "intermediate_size", None) or 4 * width
    is_eager = getattr(config, "_attn_implementation", None) == "eager"

    def needed(n: int) -> int:
        return 4 * n * (24 * width + 3 * words) + 4 * n * n * (2 + 3 * n_heads * is_eager)

    def stored(n: int) -> int:
        return 4 * n * (n_layers * (16 * width + 2 * inner) + words)

    require_room(needed, length, memory.available_bytes(), what=f"{length} tokens through {found.source}")
    folder = tempfile.gettempdir()
    if stored(length) > shutil.disk_usage(folder).free:
        message = f"{folder} has no room for the {shown(stored(length), 'bytes')} that {found.source} computes of {length} tokens"
        raise MhaError(message, hint="TMPDIR names another folder; a shorter text needs less", code="too-large")
