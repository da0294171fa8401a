"""From the groups of a command to a `Run`: the texts are read, the settings resolved, and every
rule is checked without torch.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Literal

from mhacli.errors import MhaError, UsageError, out_of_range
from mhacli.io.files import describe
from mhacli.io.memory import gc_paused
from mhacli.io.safetensors import is_of_arrays, is_of_mha
from mhacli.record.record import Record, dims_of
from mhacli.record.storage import load
from mhacli.record.weights_file import read_bias_file, read_layer_file
from mhacli.render.base.options import ViewOptions, require_choices
from mhacli.run import KEPT, Run, require_memory
from mhacli.settings import (
    ROPE,
    AttentionKind,
    Computation,
    Config,
    ModelSettings,
    Reading,
    Source,
    as_option,
)
from mhacli.text.escape import without_surrogates
from mhacli.text.reading import decoded, stream_text
from mhacli.text.spans import read_chat
from mhacli.text.tokenizers import Vocabulary, encode, read_vocabulary
from mhacli.text.tokens import Texts

from .console import loading_torch, note, show_activity
from .parameters import are_literal

if TYPE_CHECKING:
    from mhacli.models.folder import Checkpoint
    from mhacli.models.load import LanguageHead
    from mhacli.models.run import CheckpointRun
_LIKE_A_PATH = re.compile(
    r"[\w./~-]*\w\.(txt|md|csv|jsonl?|py(:[\w.]+)?|safetensors|np[yz]|gguf|html)"
)
"""A word that hardly anybody means as a text."""


def make_run(what: Computation, reading: Reading = Reading(), **more: Any) -> tuple[Run, Texts]:
    """The run that the command line describes, with `more` of the fields of `Run`, of a layer of
    mha with its texts, or of a checkpoint, which reads them later. Raises `MhaError` before
    anything slow begins.
    """
    run = Run(
        max_tokens=what.max_tokens, repeat=what.repeat, allow_nonfinite=what.allow_nonfinite, **more
    )
    if what.model.path is None:
        return _of_layer(run, what)
    return _of_checkpoint(run, what, reading), Texts()


# ----------------------------------------------------------------------------------- a layer of mha


def _of_layer(run: Run, what: Computation) -> tuple[Run, Texts]:
    given = dict(what.given)
    weights = None
    words: tuple[str, ...] = ()
    if "random" in given:
        given.setdefault("positions", "none")
    if what.weights is None:
        config = Config(**given).resolved()
    else:
        weights, config, words = read_layer_file(what.weights, given)
    for name, positions in (("rope_theta", ROPE), ("max_positions", ("learned",))):
        if name in given and config.positions not in positions:
            raise UsageError(
                f"{as_option(name, given[name])} changes nothing without --positions {positions[0]}"
            )
    texts = [] if config.random is not None else read_texts(what)
    vocabulary = None if what.vocab is None else read_vocabulary(what.vocab)
    if vocabulary is None and words and what.weights is not None:
        vocabulary = Vocabulary(words, source=what.weights)
    if vocabulary is not None and vocabulary.inner_marks is not None:
        config = replace(config, inner_marks=vocabulary.inner_marks)
    with show_activity("reading the text"):
        encoded, tokens, notes = encode(
            texts,
            config,
            context=argument_texts(what.context, what, option="--context"),
            vocabulary=vocabulary,
            max_tokens=what.max_tokens,
            max_token_len=what.max_token_len,
        )
    dims = dims_of(config, encoded, n_tokens=len(tokens))
    if config.score_bias is not None:
        read_bias_file(config.score_bias, dims)
    return replace(run, dims=dims, weights=weights, vocabulary=tokens, notes=notes), encoded


def require_heads(heads: Sequence[int] | None, run: Run, option: str = "--head") -> None:
    """Raises `UsageError` for a head that a layer of mha does not have."""
    for head in heads or ():
        if run.model.path is None and head >= run.config.n_heads:
            raise UsageError(out_of_range(option, head, run.config.n_heads))


# ------------------------------------------------------------------------------------- a checkpoint


def _of_checkpoint(run: Run, what: Computation, reading: Reading) -> Run:
    for name in run.keep or ():
        if name not in KEPT:
            raise UsageError(f"--keep: {name!r} is not one of {', '.join(KEPT)}")
    model = replace(what.model, **what.given)
    require_layers(model)
    texts = () if reading.chat is not None else tuple(read_texts(what))
    require_not_blank(texts)
    checkpoint = local_checkpoint(model)
    if "seed" in what.given and checkpoint is not None and not checkpoint.is_random:
        raise UsageError(f"--seed changes nothing with --model: {checkpoint.path} has weights")
    return replace(
        run,
        model=model,
        checkpoint=checkpoint,
        texts=texts,
        pair=tuple(argument_texts(reading.pair, what, option="--pair")),
        chat=() if reading.chat is None else read_chat(reading.chat),
        context=tuple(argument_texts(what.context, what, option="--context")),
        spans=reading.span,
        n_generated=reading.generate or 0,
    )


def require_in_config(
    model: ModelSettings,
    subject: str,
    indices: Iterable[int] | None,
    *,
    size: Literal["n_heads", "n_layers"] = "n_heads",
    kind: AttentionKind | None = None,
) -> None:
    """Raises `UsageError`, before weights are looked at, for heads or layers that no layer of a
    local checkpoint has according to its config. `subject` says what names them.
    """
    from mhacli.models.folder import read_config, size_of

    config = {} if model.path is None else read_config(model.path)
    stacks = ("self", "encoder", "decoder") if kind is None else (kind,)
    count = max(size_of(config, size, stack) or 0 for stack in stacks)
    for index in indices or ():
        if count and index >= count:
            raise UsageError(out_of_range(subject, index, count))


def require_layers(model: ModelSettings) -> None:
    """Raises `UsageError` for layers that a local checkpoint does not have according to its
    config.
    """
    for kind, n in model.layers or ():
        if n < 0:
            raise UsageError("--layer all, last and a kind alone are for mha run and mha show")
        require_in_config(model, "--layer", (n,), size="n_layers", kind=kind)


def local_checkpoint(model: ModelSettings) -> Checkpoint | None:
    """The checkpoint in a folder, read and checked; None for the id of one on a hub. Raises
    `UsageError` for layers that its config does not have.
    """
    from mhacli.models.folder import is_hub_id, read_checkpoint

    path = model.path or ""
    require_layers(model)
    if is_hub_id(path):
        return None
    if model.revision is not None:
        raise UsageError(f"--revision is for checkpoints on a hub, and {path} is not the id of one")
    return read_checkpoint(path)


def start(
    run: Run, options: ViewOptions, *, head: LanguageHead | None = None, has_matrices: bool = True
) -> tuple[CheckpointRun | None, tuple[str, ...]]:
    """The checkpoint of a run in memory with its inputs, and a language `head` if requested; None
    for a layer of mha, whose code is loaded; and notes for the user.

    Raises `MhaError`, before torch is loaded, for options that do not fit the run, and for too
    little memory, of a layer with matrices or without.
    """
    require_heads(options.heads, run)
    if run.model.path is not None:
        with loading_torch():
            from mhacli.models.run import prepare_checkpoint
        with show_activity("loading the checkpoint"), gc_paused():
            return prepare_checkpoint(run, head)
    require_memory(run, has_matrices=has_matrices)
    require_choices(run.config.n_heads, run.dims.batch, options)
    with loading_torch():
        import mhacli.layer.run  # noqa: F401 - what computes is loaded while the terminal says so
    return None, run.notes


def require_one_layer(model: ModelSettings, command: str) -> None:
    """Raises `UsageError` if several layers are chosen; `command` is the one that takes one."""
    if model.layers is not None and len(model.layers) != 1:
        raise UsageError(
            f"{command} takes one layer, but --layer names {len(model.layers)}",
            hint="try --layer 0",
        )


# -------------------------------------------------------------------------------------------- texts


def argument_texts(words: Iterable[str], source: Source, *, option: str = "") -> list[str]:
    """The texts given as arguments, or of an option. Their undecodable bytes (surrogates in Python)
    are treated by `source.errors`. Raises `UsageError` for an empty one, and for a path that
    exists, unless of `--text` or behind `--`.
    """
    texts = []
    for word in words:
        if not word:
            raise UsageError("the text is empty", hint='try "the cat sat on the mat"')
        if option != "--text" and os.path.lexists(word) and not are_literal():
            hint = (
                "--file FILE reads a text, --model DIR a checkpoint, mha show FILE a record; after"
                " --text or -- it is a text"
            )
            raise UsageError(
                f"{option} {word!r} is a path, not a text".strip(), hint=hint, path=word
            )
        path = None if option == "--text" or are_literal() else _LIKE_A_PATH.fullmatch(word)
        if path is not None:
            reason = "there is no such file"
            if path[2]:
                reason = "mha check, trace and diff take code, and --model a folder or an id"
            note(f"{word} is read as a text: {reason}")
        raw = word.encode("utf-8", "surrogateescape")
        texts.append("".join(decoded([raw], Source(errors=source.errors), "the text argument")))
    return texts


def texts_of(source: Source) -> list[tuple[str, Iterable[str]]]:
    """Each text in pieces, with the name of its file, `stdin`, or, for those of the command line,
    which come first, no name. Raises `UsageError` for an argument that is an existing path, if
    stdin is named twice, or if no text is given.
    """
    if not (source.typed or source.text or source.file):
        raise UsageError(
            "no text is given", hint='try "the cat sat on the mat", --file PATH, or - for stdin'
        )
    paths = [*(word for word in source.typed if word == "-"), *source.file]
    if paths.count("-") > 1:
        raise UsageError("stdin (-) is named twice")
    typed = argument_texts((word for word in source.typed if word != "-"), source)
    if len(typed) > 1 and not any(map(str.isspace, "".join(typed))):
        one = shlex.quote(shorten(" ".join(typed), 60, placeholder=" …"))
        note(f"{len(typed)} texts of one word are read; in quotes they are one: {one}")
    typed += argument_texts(source.text, source, option="--text")
    return [
        *(("", [text]) for text in typed),
        *((describe(path), stream_text(path, source)) for path in paths),
    ]


def read_texts(source: Source) -> list[str]:
    """One text per sequence, arguments first. Raises `MhaError` for a text that cannot be read or
    is empty.
    """
    texts = []
    for name, pieces in texts_of(source):
        with show_activity(f"reading {name or 'the text'}"):
            text = "".join(pieces)
        if name.endswith((".json", ".jsonl", ".ndjson")):
            note(f"{name} is read as text, its JSON too; mha scan --field NAME takes JSON lines")
        lines: list[str] = []
        if source.lines and name:  # only LF ends a line
            lines = [line for line in text.split("\n") if line.strip()]
        texts.extend(lines or [text])
    return texts


def require_not_blank(texts: Sequence[str]) -> None:
    """Raises `MhaError` for a text of white space, which a tokenizer of a checkpoint may read as no
    token.
    """
    for place, text in enumerate(texts):
        if not text.strip():
            raise MhaError(f"text {place} is empty or white space", code="no-tokens")


def recorded(record: Record) -> Record:
    """The record of a computation with the command that made it."""
    return replace(record, command=record_command())


def record_command() -> tuple[str, ...]:
    """The command line for the record, with undecodable bytes as escapes."""
    return ("mha", *map(without_surrogates, sys.argv[1:]))


# ------------------------------------------------------------------------------------------ records


def read_record(
    path: str, axes: str | None, labels: str | None = None, *, is_raw: bool = False
) -> Record:
    """The record in a file, or that of arrays of another program. Raises `UsageError` for what
    describes arrays if mha wrote the file.
    """
    is_described = bool(axes or labels or is_raw)
    if is_of_mha(path) or not (is_described or is_of_arrays(path)):
        record = load(path)
        if is_described:
            raise UsageError(
                f"--axes, --labels and --raw are for arrays of another program, and {path} is a"
                " record of mha, which has its tokens"
            )
        return record
    from mhacli.record.given import read_labels, read_stack, record_of_stack

    tokens = None if labels is None else read_labels(labels)
    record = record_of_stack(read_stack(path, axes), tokens, source=path, name=path, is_raw=is_raw)
    if is_raw:
        return record
    try:
        with loading_torch():
            from mhacli.models.given import with_statistics
    except ModuleNotFoundError as fault:
        note(f"{fault.name} is missing, so the table of heads has no numbers")
        return record
    return with_statistics(record)
