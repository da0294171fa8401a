"""The requests of `run`, `trace` and `decode` for a layer of mha, made without torch, and the files they write."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mhacli.attention.weights_file import LayerFile, read_bias_file, read_layer_file
from mhacli.cli.console import note, show_activity
from mhacli.cli.options import DeviceOptions, LayerOptions, SourceOptions, TextOptions
from mhacli.cli.output import Output, save_record
from mhacli.cli.values import reach, require_words, shape
from mhacli.errors import MhaError, UsageError
from mhacli.io.files import describe, write_whole
from mhacli.record.record import Record
from mhacli.requests.layer import LayerRequest, RecordingOptions, layer_request, require_memory
from mhacli.settings import DEFAULT_MAX_BYTES, ROPE, Config
from mhacli.text import vocabulary as vocabularies
from mhacli.text.encode import Limits, encode
from mhacli.text.escape import without_surrogates
from mhacli.text.reading import Decoding, argument_text, lines_of, read_text
from mhacli.text.vocabulary import Vocabulary

OFF = "none"
"""The value of `--window` that removes a window saved with the weights."""


def make_request(
    source: SourceOptions,
    text: TextOptions,
    layer: LayerOptions,
    device: DeviceOptions,
    save: Output,
    *,
    also: tuple[str, ...] = (),
) -> LayerRequest:
    """The request that the options describe, with the encoded text; `also` names further arrays to keep. Raises `MhaError`
    before anything slow begins."""
    config, weights, unused = _settings(source, text, layer, device, save)
    texts, context = _read(source, text, config)
    vocabulary, origin = _given_vocabulary(text, weights)
    if vocabulary is not None and vocabulary.inner_marks is not None:
        config = replace(config, inner_marks=vocabulary.inner_marks)
    limits = Limits(text.max_tokens, source.max_token_len)
    with show_activity("reading the text"):
        encoded = encode(texts, config, context=context, vocabulary=vocabulary, vocabulary_source=origin, limits=limits)
    request = layer_request(
        encoded, config, source=weights, options=_options(layer, device, save, also), notes=(*encoded.notes, *unused)
    )
    if config.score_bias is not None:
        read_bias_file(config.score_bias, request.facts)
    leave_deleted_folder()
    return request


def _settings(
    source: SourceOptions, text: TextOptions, layer: LayerOptions, device: DeviceOptions, save: Output
) -> tuple[Config, LayerFile | None, tuple[str, ...]]:
    """The resolved config, the file of the weights, and notes about options without effect."""
    choices = given_choices(source, layer, device, text)
    if layer.weights is not None and layer.init is not None:
        raise UsageError("--init does not work with --weights, which sets all numbers", hint="leave out --init")
    _require_files(layer, source)
    weights = None if layer.weights is None else read_layer_file(layer.weights, choices)
    config = Config(**choices).resolved() if weights is None else weights.config
    _require_used(choices, config)
    if config.random is not None:
        _require_no_text(source, text)
    return config, weights, (*_converted_layer_note(weights, config), *_without_effect(choices, config, source))


def _converted_layer_note(weights: LayerFile | None, config: Config) -> tuple[str, ...]:
    """A note that a layer converted from a model reads token embeddings here, not the states inside the model."""
    if weights is None or weights.layer is None or config.random is not None:
        return ()
    return (
        f"{weights.path} is layer {weights.layer} of a model and reads token embeddings here, not what the model computes "
        "before this layer; --model DIR shows its attention inside the model",
    )


def _read(source: SourceOptions, text: TextOptions, config: Config) -> tuple[list[str], list[str]]:
    """The texts, none with `--random`, and the contexts."""
    decoding = make_decoding(source)
    texts = [] if config.random is not None and not has_text(source) else read_texts(source, decoding)
    return texts, read_context(text, decoding)


def _options(layer: LayerOptions, device: DeviceOptions, save: Output, also: tuple[str, ...]) -> RecordingOptions:
    """The options of recording."""
    keep = None if save.keep is None else tuple(word.strip() for word in save.keep.split(",") if word.strip())
    return RecordingOptions(keep, save.keep_limit, device.repeat, layer.allow_nonfinite, record_command(), also)


def _require_files(layer: LayerOptions, source: SourceOptions) -> None:
    """Raises `MhaError` for a folder in place of a file, with the option to use instead."""
    if layer.weights is not None and os.path.isdir(layer.weights):
        quoted = shlex.quote(layer.weights)
        hint = f"--model {quoted} inspects a checkpoint"
        raise MhaError(f"{layer.weights} is a directory, not a file", hint=hint, code="unreadable", path=layer.weights)
    if source.tokenizer is not None and os.path.isdir(source.tokenizer):
        hint = f"--tokenizer {shlex.quote(os.path.join(source.tokenizer, 'tokenizer.json'))} is the file in it"
        raise MhaError(
            f"{source.tokenizer} is a directory, not a file", hint=hint, code="unreadable", path=source.tokenizer
        )


def require_heads(heads: Sequence[int] | None, request: LayerRequest, layer: LayerOptions) -> None:
    """Raises `UsageError` for a head of `--head` that does not exist. The hint suggests `--heads` if the layer could have that
    many heads."""
    count = request.config.n_heads
    for head in heads or ():
        if head >= count:
            is_open = layer.heads is None and layer.kv_heads is None and layer.weights is None
            is_count = is_open and len(heads or ()) == 1 and request.config.d_model % head == 0
            hint = f"did you mean --heads {head}, a layer with {head} heads?" if is_count else None
            raise UsageError(f"--head {head}: the layer has {count} heads, 0 to {count - 1}", hint=hint)


def require_cpu_memory(request: LayerRequest) -> None:
    """Raises `MhaError`, before torch is loaded, for a run that does not fit into the CPU's memory."""
    if request.config.device in ("auto", "cpu"):
        require_memory(request)


def leave_deleted_folder() -> None:
    """Leaves a deleted working folder, in which torch's matrix library would end the process. No file could be saved in it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")


def _require_used(choices: Mapping[str, Any], config: Config) -> None:
    """Raises `UsageError` for an option without effect, naming the option that it needs."""
    requirements = {
        "rope_theta": ("--rope-theta", "--positions rope", config.positions in ROPE),
        "max_positions": ("--max-positions", "--positions learned", config.positions == "learned"),
        "distribution": ("--distribution", "--random", config.random is not None),
    }
    for name, (option, partner, is_used) in requirements.items():
        if name in choices and not is_used:
            raise UsageError(f"{option} changes nothing without {partner}", hint=f"add {partner}")


def require_alone(option: str, excluded: Mapping[str, Any], why: str) -> None:
    """Raises `UsageError` for the first option in `excluded` that is given together with `option`; `why` is the reason."""
    for other, value in excluded.items():
        if value:
            raise UsageError(f"{option} and {other} exclude each other: {why}", hint=f"leave out {option} or {other}")


def _require_no_text(source: SourceOptions, text: TextOptions) -> None:
    """Raises `UsageError` for options of a text together with `--random`."""
    text_options = {
        "--tokenizer": source.tokenizer, "--vocab": text.vocab, "--max-tokens": text.max_tokens, "--lines": source.lines,
        "--context": text.context,
    }  # fmt: skip
    require_alone("--random", text_options, "random vectors take the place of text")


def _without_effect(choices: Mapping[str, Any], config: Config, source: SourceOptions) -> tuple[str, ...]:
    """Notes about options that the run accepts but does not use."""
    notes = []
    if choices.get("dropout") and not config.train:
        notes.append("--dropout acts only with --train")
    if source.lines and not (source.file or "-" in (source.typed or ())):
        notes.append("--lines splits files; a text argument is one sequence")
    return tuple(notes)


def given_choices(
    source: SourceOptions, layer: LayerOptions, device: DeviceOptions, text: TextOptions
) -> dict[str, Any]:
    """The fields of `Config` that the command line sets."""
    choices = {
        "d_model": layer.d_model,
        "n_heads": layer.heads,
        "n_kv_heads": layer.kv_heads,
        "positions": layer.positions or (None if text.random is None else "none"),
        "out_proj": False if layer.no_out_proj else None,
        "train": layer.train or None,
        "window": None if layer.window == OFF else reach(layer.window, "window"),
        "random": shape(text.random, "random"),
    }
    same_names = (
        (layer, "d_model d_head d_v d_input bias dropout init seed rope_theta max_positions"),
        (layer, "causal prefix sink padding scale softcap score_bias"),
        (text, "documents distribution"),
        (device, "device dtype threads"),
        (source, "tokenizer keep_case punctuation"),
    )
    for group, names in same_names:
        choices |= {name: getattr(group, name) for name in names.split()}
    is_removed = {"window": layer.window == OFF, "prefix": layer.prefix == 0, "sink": layer.sink == 0}
    return {name: value for name, value in choices.items() if value is not None and not is_removed.get(name)} | {
        name: None for name, is_none in is_removed.items() if is_none
    }


def make_decoding(source: SourceOptions, max_bytes: int = DEFAULT_MAX_BYTES) -> Decoding:
    """The decoding of the options; `max_bytes` is the default of the command."""
    return Decoding(source.encoding, source.errors, source.max_bytes or max_bytes)


def source_paths(source: SourceOptions) -> list[str]:
    """The files to read, `-` for stdin. Raises `UsageError` if stdin is named twice or no text is given."""
    paths = [*(word for word in source.typed or () if word == "-"), *(source.file or ())]
    if paths.count("-") > 1:
        raise UsageError("stdin (-) is named twice")
    if not has_text(source):
        raise UsageError("no text is given", hint='try "the cat sat on the mat", --file PATH, or - for stdin')
    return paths


def has_text(source: SourceOptions) -> bool:
    """Whether any text is given."""
    return bool(source.typed or source.text or source.file)


def typed_texts(source: SourceOptions, decoding: Decoding) -> list[str]:
    """The texts given as arguments. Raises `UsageError` for one that is an existing path."""
    words = [word for word in source.typed or () if word != "-"]
    for word in words:
        require_words(word)
    if (
        len(words) > 1
        and all(len(word.split()) == 1 for word in words)
        and sys.stderr is not None
        and sys.stderr.isatty()
    ):
        note(f'{len(words)} texts of one word each; for one text quote it: "{" ".join(words)}"')
    return [argument_text(word, decoding) for word in (*words, *(source.text or ()))]


def read_context(text: TextOptions, decoding: Decoding) -> list[str]:
    """The texts of `--context`. Raises `UsageError` for one that is an existing path."""
    for word in text.context or ():
        require_words(word, option="--context")
    return [argument_text(word, decoding) for word in text.context or ()]


def read_texts(source: SourceOptions, decoding: Decoding) -> list[str]:
    """One text per sequence, arguments first. Raises `MhaError` for a text that cannot be read or is empty."""
    paths = source_paths(source)
    texts = typed_texts(source, decoding)
    for path in paths:
        if path == "-" and sys.stdin is not None and sys.stdin.isatty():
            note("reading text from the terminal; end it with Ctrl-D")
        with show_activity(f"reading {describe(path)}"):
            texts.extend(_sequences(read_text(path, decoding), source.lines))
    return texts


def _sequences(text: str, by_line: bool) -> Iterator[str]:
    lines = lines_of(text) if by_line else []
    yield from lines or [text]


def _given_vocabulary(text: TextOptions, weights: LayerFile | None) -> tuple[Vocabulary | None, str]:
    """The vocabulary of `--vocab` or of the weights, and its name in messages."""
    if text.vocab is not None:
        return vocabularies.load(text.vocab), text.vocab
    if weights is not None and weights.metadata is not None and weights.metadata.vocabulary:
        return vocabularies.as_stored(weights.metadata.vocabulary), weights.path
    return None, "the vocabulary"


def save_files(record: Record, request: LayerRequest, save: Output) -> None:
    """Saves the requested record and weights. Raises `MhaError` if a file cannot be written."""
    if save.save_weights is not None:
        from mhacli.compute.layer.run import weights_content

        content = weights_content(request)
        write_whole(save.save_weights, content, force=save.force)
    save_record(record, save)


def record_command() -> tuple[str, ...]:
    """The command line for the record."""
    return ("mha", *map(without_surrogates, sys.argv[1:]))
