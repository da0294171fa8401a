"""Words where a text is expected: refused where they name something that is there, unless they are to be taken as they are."""

from __future__ import annotations

import os
import shlex
import stat
import sys

from mhacli.errors import MhaError, UsageError
from mhacli.io.safetensors import PICKLE_ENDINGS

_HEADER_BYTES = 4096
_OF_CHECKPOINT = ("config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


def are_literal() -> bool:
    """Whether texts are taken as they are: `--` stands on the command line."""
    return "--" in sys.argv[1:]


def holds_record(path: str) -> bool:
    """Whether a path is that of a file with a record, by its header. False where it cannot be read."""
    if "\0" in path or not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            return b"mha.record/" in file.read(_HEADER_BYTES)
    except OSError:
        return False


def require_words(word: str, *, has_file: bool = True, has_model: bool = True) -> None:
    """Raises `UsageError` for a text that is the path of something, unless texts are taken as they are.

    `has_file` and `has_model` say whether the command has the options `--file` and `--model`, of which the hint names the one
    that was meant.
    """
    if are_literal() or not os.path.lexists(word):
        return
    shown = shlex.quote(word)
    meant = _meant(word, shown, has_file=has_file, has_model=has_model)
    raise UsageError(
        f"{word!r} is a {_kind(word)}, not a text", hint=f"{meant}--text {shown} takes the word itself", path=word
    )


def require_context(word: str) -> None:
    """The same of the text of `--context`, which has no option for a file."""
    if are_literal() or not os.path.lexists(word):
        return
    passed = "" if os.path.isdir(word) else f'--context "$(cat {shlex.quote(word)})" passes what it holds; '
    raise UsageError(
        f"--context: {word!r} is a {_kind(word)}, not a text",
        hint=f"{passed}with -- behind it texts are taken as they are",
        path=word,
    )


def require_record(path: str) -> None:
    """Raises `MhaError` for what is no record at all, with what to type; what claims to be one is read and judged later."""
    if not path:
        hint = 'mha run "the cat sat on the mat" --save cat.safetensors makes one, mha show cat.safetensors draws it'
        raise UsageError("a record must be given, the file that --save wrote", hint=hint)
    shown = shlex.quote(path)
    if os.path.isdir(path):
        hint = f"mha weights info {shown} says what a checkpoint holds, mha run TEXT --model {shown} looks into it"
        raise MhaError(f"{path} is a directory, not a record", hint=hint, code="unreadable", path=path)
    if _is_text(path):
        hint = f"mha run --file {shown} shows the attention of a text, and --save makes a record of it"
        raise MhaError(f"{path} is a text, not a record", hint=hint, code="bad-file", path=path)


def _is_text(path: str) -> bool:
    """Whether a file is text, as no safetensors file is; a name that says pickle is believed. False where it cannot be read."""
    if "\0" in path or path.lower().endswith(PICKLE_ENDINGS) or not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            head = file.read(_HEADER_BYTES)
    except OSError:
        return False
    return bool(head) and b"\0" not in head and head[8:9] != b"{"


def _kind(path: str) -> str:
    """What a path leads to."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return "link to nothing"
    kinds = ((stat.S_ISDIR, "folder"), (stat.S_ISREG, "file"), (stat.S_ISFIFO, "pipe"))
    return next((name for is_kind, name in kinds if is_kind(mode)), "device")


def _meant(word: str, shown: str, *, has_file: bool, has_model: bool) -> str:
    """What to type instead, and a semicolon; nothing for what holds no text."""
    kind = _kind(word)
    if kind == "folder":
        is_checkpoint = any(os.path.lexists(os.path.join(word, name)) for name in _OF_CHECKPOINT)
        if has_model and (is_checkpoint or not has_file):
            return f"--model {shown} reads a checkpoint there; "
        return "--file FILE reads a text file in it; "
    if holds_record(word):
        return f"mha show {shown} draws this record; "
    if word.endswith(".safetensors"):
        return f"mha weights info {shown} says what it holds; "
    if kind not in ("file", "pipe"):
        return ""
    return f"--file {shown} reads it; " if has_file else f'"$(cat {shown})" passes what it holds; '
