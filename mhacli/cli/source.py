"""From the groups of a command to a `Run`: the texts are read, the settings resolved, and every rule is checked without torch."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mhacli.attention.weights_file import LayerFile, read_bias_file, read_layer_file
from mhacli.cli.console import loading_torch, note, show_activity
from mhacli.cli.values import require_words
from mhacli.errors import MhaError, UsageError, out_of_range
from mhacli.io.files import describe
from mhacli.io.memory import uncollected
from mhacli.run import Run, require_memory
from mhacli.settings import (
    DEFAULT_KEEP_LIMIT,
    DEFAULT_MAX_BYTES,
    MAX_HEADS,
    ROPE,
    Computation,
    Config,
    ModelSettings,
    Reading,
    Source,
    Statistics,
    is_hub_id,
)
from mhacli.text import vocabulary as vocabularies
from mhacli.text.encode import encode
from mhacli.text.escape import without_surrogates
from mhacli.text.reading import Decoding, argument_text, lines_of, read_text
from mhacli.text.spans import read_chat
from mhacli.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from mhacli.compute.checkpoint.run import CheckpointRun
    from mhacli.models.folder import Checkpoint
    from mhacli.text.spans import Message

MATRICES = ("pattern", "scores", "qk", "z")
"""The arrays of a checkpoint that can be kept."""


def make_run(
    what: Computation,
    *,
    reading: Reading = Reading(),
    statistics: Statistics = Statistics(),
    keep: tuple[str, ...] | None = None,
    keep_limit: int = DEFAULT_KEEP_LIMIT,
    also: tuple[str, ...] = (),
) -> Run:
    """The run that the command line describes, of a layer of mha or of a checkpoint. Raises `MhaError` before anything slow
    begins."""
    run = Run(
        command=record_command(),
        statistics=statistics,
        keep=keep,
        keep_limit=keep_limit,
        also=also,
        max_tokens=what.inputs.max_tokens,
        repeat=what.layer.repeat,
        allow_nonfinite=what.layer.allow_nonfinite,
    )
    made = _of_layer(run, what) if what.model.path is None else _of_checkpoint(run, what, reading)
    leave_deleted_folder()
    return made


# ------------------------------------------------------------------------------------------------------ a layer of mha


def _of_layer(run: Run, what: Computation) -> Run:
    source, given = what.source, what.given
    config, weights = _config(what)
    if config.random is not None:
        _require_no_text(source, what)
    decoding = decoding_of(source)
    texts = [] if config.random is not None and not has_text(source) else read_texts(source, decoding)
    vocabulary, origin = _vocabulary(what, weights)
    if vocabulary is not None and vocabulary.inner_marks is not None:
        config = replace(config, inner_marks=vocabulary.inner_marks)
    with show_activity("reading the text"):
        encoded = encode(
            texts,
            config,
            context=_context(what, decoding),
            vocabulary=vocabulary,
            vocabulary_source=origin,
            max_tokens=what.inputs.max_tokens,
            max_token_len=source.max_token_len,
        )
    notes = (*encoded.notes, *_without_effect(given, config, source))
    made = replace(run, config=config, weights=weights, encoded=encoded, notes=notes)
    if config.score_bias is not None:
        read_bias_file(config.score_bias, made.facts)
    made.plan  # noqa: B018  raises for arrays that cannot be kept
    return made


def _config(what: Computation) -> tuple[Config, LayerFile | None]:
    """The resolved config, and the file of the weights."""
    path, given = what.layer.weights, dict(what.given)
    if path is not None and "init" in given:
        raise UsageError("--init does not work with --weights, which sets all numbers", hint="leave out --init")
    _require_file(path, "--model {} inspects a checkpoint")
    _require_file(given.get("tokenizer"), "--tokenizer {}/tokenizer.json is the file in it")
    if "random" in given:
        given.setdefault("positions", "none")
    weights = None if path is None else read_layer_file(path, given)
    config = Config(**given).resolved() if weights is None else weights.config
    _require_used(given, config)
    return config, weights


def _require_file(path: str | None, hint: str) -> None:
    """Raises `MhaError` for a folder in place of a file, with the option to use instead."""
    if path is not None and os.path.isdir(path):
        raise MhaError(
            f"{path} is a directory, not a file", hint=hint.format(shlex.quote(path)), code="unreadable", path=path
        )


def _require_used(given: Mapping[str, Any], config: Config) -> None:
    """Raises `UsageError` for an option without effect, naming the option that it needs."""
    requirements = {
        "rope_theta": ("--rope-theta", "--positions rope", config.positions in ROPE),
        "max_positions": ("--max-positions", "--positions learned", config.positions == "learned"),
        "distribution": ("--distribution", "--random", config.random is not None),
    }
    for name, (option, partner, is_used) in requirements.items():
        if name in given and not is_used:
            raise UsageError(f"{option} changes nothing without {partner}", hint=f"add {partner}")


def require_alone(option: str, excluded: Mapping[str, Any], why: str) -> None:
    """Raises `UsageError` for the first option in `excluded` that is given together with `option`; `why` is the reason."""
    for other, value in excluded.items():
        if value:
            raise UsageError(f"{option} and {other} exclude each other: {why}", hint=f"leave out {option} or {other}")


def _require_no_text(source: Source, what: Computation) -> None:
    """Raises `UsageError` for options of a text together with `--random`."""
    text_options = {
        "--tokenizer": "tokenizer" in what.given, "--vocab": what.inputs.vocab, "--max-tokens": what.inputs.max_tokens,
        "--lines": source.lines, "--context": what.inputs.context,
    }  # fmt: skip
    require_alone("--random", text_options, "random vectors take the place of text")


def _without_effect(given: Mapping[str, Any], config: Config, source: Source) -> Iterator[str]:
    """Notes about options that the run accepts but does not use."""
    if given.get("dropout") and not config.train:
        yield "--dropout acts only with --train"
    if source.lines and not (source.file or "-" in source.typed):
        yield "--lines splits files; a text argument is one sequence"


def _vocabulary(what: Computation, weights: LayerFile | None) -> tuple[Vocabulary | None, str]:
    """The vocabulary of `--vocab` or of the weights, and its name in messages."""
    if what.inputs.vocab is not None:
        return vocabularies.load(what.inputs.vocab), what.inputs.vocab
    if weights is not None and weights.metadata is not None and weights.metadata.vocabulary:
        return Vocabulary(tuple(weights.metadata.vocabulary)), weights.path
    return None, "the vocabulary"


def require_heads(heads: Sequence[int] | None, run: Run, name: str = "head") -> None:
    """Raises `UsageError` for a head that the layer does not have, or no layer of a local checkpoint according to its config."""
    from mhacli.models.sizes import head_counts

    count, hint = run.config.n_heads, "--heads N gives the layer N heads"
    if run.model.path is not None:
        config = {} if run.checkpoint is None else run.checkpoint.config
        counts = [head_counts(config, stack).n_heads or 0 for stack in (None, "encoder", "decoder")]
        count, hint = max(counts) or MAX_HEADS, ""
    for head in heads or ():
        if head >= count:
            raise UsageError(out_of_range(f"--{name}", head, count), hint=hint or None)


def require_cpu_memory(run: Run) -> None:
    """Raises `MhaError`, before torch is loaded, for a run that does not fit into the CPU's memory."""
    if run.config.device in ("auto", "cpu"):
        require_memory(run)


# -------------------------------------------------------------------------------------------------------- a checkpoint


def _of_checkpoint(run: Run, what: Computation, reading: Reading) -> Run:
    if what.model.device_map is not None and "device" in what.given:
        raise UsageError("--device and --device-map exclude each other", hint="leave --device out")
    for name in run.keep or ():
        if name not in MATRICES:
            raise UsageError(f"--keep: {name!r} is not one of {', '.join(MATRICES)}")
    names = ("device", "dtype", "threads", "padding", "tokenizer")
    model = replace(what.model, **{name: what.given[name] for name in names if name in what.given})
    checkpoint = local_checkpoint(model)
    if checkpoint is not None:
        require_layers(model, checkpoint)
    decoding = decoding_of(what.source)
    chat, texts = _chat_or_texts(reading, what.source, decoding)
    return replace(
        run,
        model=model,
        checkpoint=checkpoint,
        texts=texts,
        chat=chat,
        context=tuple(_context(what, decoding)),
        spans=reading.span,
        n_generated=reading.generate or 0,
    )


def _chat_or_texts(reading: Reading, source: Source, decoding: Decoding) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """The messages of a chat, and the texts; one of the two is empty. Raises `UsageError` if both are given, `MhaError` for a
    blank text."""
    if reading.chat is not None:
        if has_text(source):
            raise UsageError(
                "--chat takes the place of a text, but a text is given too", hint="leave out the text or --chat"
            )
        return read_chat(reading.chat), ()
    texts = tuple(read_texts(source, decoding))
    for text_idx, text in enumerate(texts):
        if not text.strip():
            raise MhaError(f"text {text_idx} is only white space", code="no-tokens")
    return (), texts


def local_checkpoint(model: ModelSettings) -> Checkpoint | None:
    """The checkpoint in a folder, read and checked; None for the id of one on a hub."""
    from mhacli.models.folder import read_checkpoint

    path = model.path or ""
    if is_hub_id(path):
        return None
    if model.revision is not None:
        raise UsageError(
            f"--revision is for checkpoints on a hub, and {path} is not the id of one", hint="leave out --revision"
        )
    try:
        return read_checkpoint(path)
    except MhaError as fault:
        if not os.path.lexists(path):
            fault.hint, fault.path = "the id of a checkpoint on a hub looks like org/name", path
        raise


def require_layers(model: ModelSettings, checkpoint: Checkpoint) -> None:
    """Raises `UsageError` for layers that the config does not have."""
    from mhacli.models.sizes import head_counts

    for kind, n in model.layers or ():
        count = head_counts(checkpoint.config, kind if kind != "self" else None).n_layers
        if count is not None and n >= count:
            raise UsageError(
                out_of_range("--layer", n, count),
                hint=f"mha weights info {shlex.quote(checkpoint.path)} lists the layers",
            )


def load_checkpoint(run: Run) -> tuple[CheckpointRun, tuple[str, ...]]:
    """The checkpoint of a run in memory with its inputs, and notes for the user. Raises `MhaError`."""
    with loading_torch():
        from mhacli.compute.checkpoint.prepare import prepare_checkpoint
    with show_activity("loading the checkpoint"), uncollected():
        prepared, notes = prepare_checkpoint(run)
    return prepared, tuple(notes)


def require_one_layer(model: ModelSettings, command: str) -> None:
    """Raises `UsageError` if several layers are chosen; `command` is the one that takes one."""
    if model.layers is not None and len(model.layers) != 1:
        raise UsageError(f"{command} takes one layer, but --layer names {len(model.layers)}", hint="try --layer 0")


# --------------------------------------------------------------------------------------------------------------- texts


def decoding_of(source: Source, max_bytes: int = DEFAULT_MAX_BYTES) -> Decoding:
    """The decoding of texts; `max_bytes` is the default of the command."""
    return Decoding(source.encoding, source.errors, source.max_bytes or max_bytes)


def has_text(source: Source) -> bool:
    """Whether any text is given."""
    return bool(source.typed or source.text or source.file)


def source_paths(source: Source) -> list[str]:
    """The files to read, `-` for stdin. Raises `UsageError` if stdin is named twice or no text is given."""
    paths = [*(word for word in source.typed if word == "-"), *source.file]
    if paths.count("-") > 1:
        raise UsageError("stdin (-) is named twice")
    if not has_text(source):
        raise UsageError("no text is given", hint='try "the cat sat on the mat", --file PATH, or - for stdin')
    return paths


def typed_texts(source: Source, decoding: Decoding) -> list[str]:
    """The texts given as arguments. Raises `UsageError` for one that is an existing path."""
    words = [word for word in source.typed if word != "-"]
    for word in words:
        require_words(word)
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    if len(words) > 1 and all(len(word.split()) == 1 for word in words) and is_terminal:
        note(f'{len(words)} texts of one word each; for one text quote it: "{" ".join(words)}"')
    return [argument_text(word, decoding) for word in (*words, *source.text)]


def read_texts(source: Source, decoding: Decoding) -> list[str]:
    """One text per sequence, arguments first. Raises `MhaError` for a text that cannot be read or is empty."""
    paths = source_paths(source)
    texts = typed_texts(source, decoding)
    for path in paths:
        if path == "-" and sys.stdin is not None and sys.stdin.isatty():
            note("reading text from the terminal; end it with Ctrl-D")
        with show_activity(f"reading {describe(path)}"):
            text = read_text(path, decoding)
        texts.extend((source.lines and lines_of(text)) or [text])
    return texts


def _context(what: Computation, decoding: Decoding) -> list[str]:
    """The texts of `--context`. Raises `UsageError` for one that is an existing path."""
    for word in what.inputs.context:
        require_words(word, option="--context")
    return [argument_text(word, decoding) for word in what.inputs.context]


def leave_deleted_folder() -> None:
    """Leaves a deleted working folder, in which torch's matrix library would end the process. No file could be saved in it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")


def record_command() -> tuple[str, ...]:
    """The command line for the record."""
    return ("mha", *map(without_surrogates, sys.argv[1:]))
