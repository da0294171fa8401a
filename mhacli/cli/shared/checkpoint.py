"""The options of `--model` and the request that they describe, for `run`, `heads`, `view`, `trace`, `decode` and `effect`."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from mhacli.cli.numbers import Integer
from mhacli.cli.options import (
    DeviceOptions,
    LayerOptions,
    ModelPath,
    Revision,
    SourceOptions,
    TextOptions,
    number,
    option,
    option_group,
)
from mhacli.cli.output import Output
from mhacli.cli.values import index_list
from mhacli.errors import MhaError, UsageError, out_of_range
from mhacli.render.base.options import Rows

if TYPE_CHECKING:  # loaded when a checkpoint is read: help must come quickly
    from mhacli.models.folder import Checkpoint
    from mhacli.record.heads import HeadsRequest
    from mhacli.record.record import LayerChoice
    from mhacli.requests.checkpoint import ModelRequest
    from mhacli.requests.device_map import DeviceMap
    from mhacli.text.reading import Decoding
    from mhacli.text.spans import Message

_MODEL, _VIEW = "Checkpoint", "View"


@option_group
class LayerChoiceOptions:
    """The layers of a checkpoint to inspect."""

    layer: Annotated[
        str | None,
        option(
            _MODEL,
            "Inspect only these layers, such as 5 or 0,8-10; in an encoder-decoder also decoder.5 or cross.5.",
            "--layer",
            "--layers",
            metavar="LIST",
            common=True,
        ),
    ] = None


DeviceMapWord = Annotated[
    str | None,
    option(
        _MODEL,
        "Spread the layers: auto (GPUs, CPU, disk), or a JSON file of devices. (needs the extra device-map)",
        metavar="MAP",
    ),
]


@option_group
class ModelOptions(LayerChoiceOptions):
    """The checkpoint to inspect instead of a layer of mha."""

    model: ModelPath = None
    revision: Revision = None
    device_map: DeviceMapWord = None


@option_group
class GenerateOptions:
    """The tokens that a checkpoint generates."""

    generate: Annotated[
        int | None,
        number(
            _MODEL,
            Integer(1, 100_000),
            "Generate N tokens greedily, then inspect prompt and continuation together.",
            "--generate",
            "--max-new-tokens",
        ),
    ] = None


Spans = Annotated[
    list[str] | None,
    option(
        _MODEL,
        "Report the attention between parts of the text: name=START:END, name=/REGEX/, or roles of a chat, a,b; repeatable.",
        metavar="SPAN",
    ),
]


@option_group
class ModelTextOptions(GenerateOptions):
    """The chat, spans and generated tokens of a checkpoint."""

    chat: Annotated[
        str | None,
        option(
            _MODEL, "Read the messages of a chat instead of a text: a JSON list of role and content.", metavar="FILE"
        ),
    ] = None
    span: Spans = None


@option_group
class LayerDrawing:
    """How the patterns of a checkpoint are drawn."""

    words: Annotated[
        bool, option(_VIEW, "Merge subword tokens into words: sum over keys, mean over queries.", "--words")
    ] = False
    queries: Annotated[
        str | None,
        option(
            _VIEW,
            "Show only these queries: generated, last, or positions such as 3,7-9.",
            "--from",
            metavar="ROWS",
        ),
    ] = None


@dataclass(frozen=True)
class ComputeRequest:
    """The option groups of a computation, of a layer of mha or of a checkpoint."""

    source: SourceOptions
    text: TextOptions
    layer: LayerOptions
    device: DeviceOptions
    model: ModelOptions
    reading: ModelTextOptions
    save: Output


def layer_list(word: str | None) -> tuple[LayerChoice, ...] | None:
    """Layers from `5`, `0,8-10` or `decoder.0-3,cross.5`. Raises `UsageError` with the form."""
    if word is None:
        return None
    from mhacli.text.tokens import AttentionKind

    layers: list[LayerChoice] = []
    for part in word.split(","):
        match = re.fullmatch(rf"(?:({'|'.join(get_args(AttentionKind))})\.)?([0-9-]+)", part.strip())
        if match is None:
            raise UsageError(
                f"--layer {shlex.quote(word[:80])} is not a list such as 5, 0,8-10 or decoder.5,cross.5",
                hint=f"kinds of attention: {', '.join(get_args(AttentionKind))}",
            )
        kind: Any = match[1]
        layers += [(kind, n) for n in index_list(match[2], "layer") or ()]
    return tuple(layers)


def row_choice(word: str | None) -> Rows | None:
    """The queries that `--from` names. Raises `UsageError` for any other word."""
    names: tuple[Literal["generated", "last"], ...] = ("generated", "last")
    if word in names:
        return names[names.index(word)]
    try:
        return index_list(word, "from")
    except UsageError as fault:
        raise UsageError(
            f"--from {shlex.quote(str(word)[:80])} is not generated, last or a list such as 0,2 or 0,4-6"
        ) from fault


def require_one_layer(request: ModelRequest, command: str) -> None:
    """Raises `UsageError` if several layers are chosen; `command` is the one that takes one."""
    if request.layers is not None and len(request.layers) != 1:
        raise UsageError(f"{command} takes one layer, but --layer names {len(request.layers)}", hint="try --layer 0")


def require_without_model(**options: object) -> None:
    """Raises `UsageError` for an option that works only with `--model`."""
    for name, value in options.items():
        if value:
            option_name = f"--{name.rstrip('_').replace('_', '-')}"
            raise UsageError(f"{option_name} needs --model", hint="add --model DIR")


_ALLOWED_LAYER = ("allow_nonfinite", "padding", "heads")


def _require_layer_left_open(layer: LayerOptions, source: SourceOptions, text: TextOptions, save: Output) -> None:
    """Raises `UsageError` for options of a layer of mha: a checkpoint has its own settings."""
    options = {
        f"--{f.name.replace('_', '-')}": getattr(layer, f.name) for f in fields(layer) if f.name not in _ALLOWED_LAYER
    }
    options |= {
        "--random": text.random, "--documents": text.documents, "--vocab": text.vocab, "--keep-case": source.keep_case,
        "--distribution": text.distribution, "--punctuation": source.punctuation, "--save-weights": save.save_weights,
    }  # fmt: skip
    if layer.heads is not None:
        raise UsageError(
            "--heads does not work with --model, which has its own number of heads",
            hint="--head LIST chooses which heads to show",
        )
    for name, value in options.items():
        if value is not None and value is not False:
            raise UsageError(f"{name} does not work with --model, which brings its own", hint=f"leave out {name}")


def _chat_or_texts(
    reading: ModelTextOptions, source: SourceOptions, decoding: Decoding
) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """The messages of a chat, and the texts; one of the two is empty. Raises `UsageError` if both are given, `MhaError` for a
    blank text."""
    from mhacli.cli.shared.request import has_text, read_texts
    from mhacli.text.spans import read_chat

    chat = () if reading.chat is None else read_chat(reading.chat)
    if chat and has_text(source):
        raise UsageError(
            "--chat takes the place of a text, but a text is given too", hint="leave out the text or --chat"
        )
    texts = () if chat else tuple(read_texts(source, decoding))
    for text_idx, text in enumerate(texts):
        if not text.strip():
            raise MhaError(f"text {text_idx} is only white space", code="no-tokens")
    return chat, texts


def model_request(options: ComputeRequest, heads: HeadsRequest) -> ModelRequest:
    """The request that the options describe. Raises `MhaError` before anything slow begins."""
    from mhacli.cli.shared.request import leave_deleted_folder, make_decoding, read_context, record_command
    from mhacli.requests.checkpoint import ModelRequest

    model, reading, source, text = options.model, options.reading, options.source, options.text
    layer, device, save = options.layer, options.device, options.save
    assert model.model is not None
    _require_layer_left_open(layer, source, text, save)
    if device.repeat is not None:
        raise UsageError("--repeat does not work with --model, which runs once", hint="leave out --repeat")
    device_map = device_map_of(model.device_map, device.device)
    checkpoint = local_checkpoint(model)
    layers = layer_list(model.layer)
    if checkpoint is not None and layers is not None:
        require_layers(layers, checkpoint)
    decoding = make_decoding(source)
    chat, texts = _chat_or_texts(reading, source, decoding)
    keep = None if save.keep is None else tuple(word.strip() for word in save.keep.split(",") if word.strip())
    _require_matrices(keep or ())
    leave_deleted_folder()
    return ModelRequest(
        source=model.model,
        checkpoint=checkpoint,
        texts=texts,
        wanted=replace(heads, command=record_command()),
        revision=model.revision,
        context=tuple(read_context(text, decoding)),
        chat=chat,
        spans=tuple(reading.span or ()),
        layers=layers,
        n_generated=reading.generate or 0,
        tokenizer=source.tokenizer,
        device=device.device or "auto",
        device_map=device_map,
        dtype=device.dtype,
        threads=device.threads,
        padding=layer.padding,
        max_tokens=text.max_tokens,
        keep=keep,
        keep_limit=save.keep_limit,
    )


def device_map_of(word: str | None, device: str | None) -> DeviceMap | None:
    """The device map of `--device-map`. Raises `UsageError` if `--device` is given too."""
    from mhacli.requests.device_map import read_device_map

    if word is None:
        return None
    if device is not None:
        raise UsageError("--device and --device-map exclude each other", hint="leave --device out")
    return read_device_map(word)


MATRICES = ("pattern", "scores", "qk", "z")


def _require_matrices(keep: tuple[str, ...]) -> None:
    for name in keep:
        if name not in MATRICES:
            raise UsageError(f"--keep: {name!r} is not one of {', '.join(MATRICES)}")


def local_checkpoint(model: ModelOptions) -> Checkpoint | None:
    """The checkpoint in a folder, read and checked; None for the id of one on a hub."""
    from mhacli.models.folder import read_checkpoint
    from mhacli.requests.checkpoint import is_hub_id

    path = model.model or ""
    if is_hub_id(path):
        return None
    if model.revision is not None:
        raise UsageError(
            f"--revision is for checkpoints on a hub, and {path} is not the id of one", hint="leave out --revision"
        )
    try:
        return read_checkpoint(path)
    except MhaError as fault:
        if os.path.lexists(path):
            raise
        raise MhaError(
            fault.message,
            hint="the id of a checkpoint on a hub looks like org/name",
            code=fault.code,
            exit_code=fault.exit_code,
            path=path,
        ) from None


def require_layers(layers: tuple[LayerChoice, ...], checkpoint: Checkpoint) -> None:
    """Raises `UsageError` for layers that the config does not have."""
    from mhacli.models.sizes import head_counts

    for kind, n in layers:
        count = head_counts(checkpoint.config, kind if kind != "self" else None).n_layers
        if count is not None and n >= count:
            raise UsageError(
                out_of_range("--layer", n, count),
                hint=f"mha weights info {shlex.quote(checkpoint.path)} lists the layers",
            )


def require_configured_heads(heads: tuple[int, ...] | None, request: ModelRequest, name: str = "head") -> None:
    """Raises `UsageError` for a head that no layer of a local checkpoint has, according to its config."""
    from mhacli.models.sizes import head_counts

    config = {} if request.checkpoint is None else request.checkpoint.config
    counts = [head_counts(config, stack).n_heads for stack in (None, "encoder", "decoder")]
    count = max((n for n in counts if n is not None), default=None)
    for head in heads or ():
        if count is not None and head >= count:
            raise UsageError(out_of_range(f"--{name}", head, count))
