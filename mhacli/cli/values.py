"""Strict parsers for the words of a command line: numbers, sizes, lists and texts."""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
from collections.abc import Callable, Sequence

from mhacli.errors import MhaError, UsageError
from mhacli.io.files import parse_size
from mhacli.io.safetensors import PICKLE_ENDINGS
from mhacli.io.scan_folder import is_scan


def _option(name: str) -> str:
    """The option of a field of `Config`, or of any other name."""
    return {"n_heads": "--heads", "n_kv_heads": "--kv-heads"}.get(name, f"--{name.replace('_', '-')}")


def size(name: str) -> Callable[[object], int]:
    """A parser of sizes: `65536`, `64M`, `1.5G`."""
    return lambda word: word if isinstance(word, int) else parse_size(str(word), f"--{name}")


def reach(word: str | None, name: str) -> tuple[int, int] | None:
    """Numbers of keys from `LEFT[,RIGHT]`; RIGHT is 0 if left out. Raises `UsageError`."""
    if word is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9})(?:,([0-9]{1,9}))?", word.replace(" ", ""))
    if match is None:
        raise UsageError(f"{_option(name)} {word[:40]!r} is not LEFT or LEFT,RIGHT, numbers of keys such as 4 or 2,2")
    return int(match[1]), int(match[2] or 0)


def shape(word: str | None, name: str) -> tuple[int, int] | None:
    """Two numbers from `BATCH,LENGTH`. Raises `UsageError`."""
    if word is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9}),([0-9]{1,9})", word.replace(" ", ""))
    if match is None or not int(match[1]) or not int(match[2]):
        raise UsageError(f"{_option(name)} {word[:40]!r} is not BATCH,LENGTH, two numbers from 1 up such as 2,5")
    return int(match[1]), int(match[2])


_MAX_LISTED = 100_000


def index_list(word: str | None, name: str) -> tuple[int, ...] | None:
    """Positions from `0,2` or `0,4-6`. Raises `UsageError` with the form."""
    if word is None:
        return None
    indices: list[int] = []
    for part in word.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())
        low = int(match[1]) if match else 0
        high = int(match[2] or match[1]) if match else -1
        if not low <= high < low + _MAX_LISTED - len(indices):
            raise UsageError(f"{_option(name)} {word[:80]!r} is not a list such as 0,2 or 0,4-6")
        indices.extend(range(low, high + 1))
    return tuple(indices)


def span(word: str | None, count: int, name: str) -> range:
    """Positions from `100:140`, `:40` or `100:`, without the end; all `count` positions for None. Raises `UsageError`."""
    match = re.fullmatch(r"([0-9]{0,9}):([0-9]{0,9})", ":" if word is None else word.replace(" ", ""))
    if match is None:
        raise UsageError(f"{_option(name)} {str(word)[:40]!r} is not A:B such as 100:140, from A to B−1")
    positions = range(int(match[1] or 0), int(match[2] or count))
    if not positions or positions.stop > count:
        raise UsageError(f"{_option(name)} {str(word)[:40]!r} is empty or not within 0:{count}")
    return positions


_COUNT = r"[0-9]{1,7}k?"


def counts(word: str | None, name: str, example: str = "64,256,1k") -> tuple[int, ...]:
    """Positive numbers from `64,256,1k` or `512..4k`, where k is 1024 and `..` doubles. Raises `UsageError` with the form."""
    numbers: list[int] = []
    for part in word.split(",") if word is not None else ():
        match = re.fullmatch(rf"({_COUNT})(?:\.\.({_COUNT}))?", part.strip())
        low = _count(match[1]) if match else 0
        high = _count(match[2] or match[1]) if match else -1
        if match and 1 <= high < low:
            raise UsageError(
                f"{_option(name)} {part[:40]!r}: the range runs backwards, it must be {match[2]}..{match[1]}"
            )
        if not 1 <= low <= high:
            raise UsageError(
                f"{_option(name)} {str(word)[:80]!r} is not a list such as {example}, or a doubling range such as 1..8"
            )
        while low <= high:
            numbers.append(low)
            low *= 2
    return tuple(dict.fromkeys(numbers))


def _count(word: str) -> int:
    return int(word.removesuffix("k")) * (1024 if word.endswith("k") else 1)


def words_of(word: str | None, name: str, choices: Sequence[str]) -> tuple[str, ...]:
    """Words from `forward,both`, each among the choices. Raises `UsageError` that lists them."""
    chosen = [] if word is None else [part.strip() for part in word.split(",")]
    for part in chosen:
        if part not in choices:
            raise UsageError(f"{_option(name)} {part[:40]!r} is not among {', '.join(choices)}")
    return tuple(dict.fromkeys(chosen))


def pairs(words: Sequence[str] | None, name: str) -> tuple[tuple[str, str], ...]:
    """Names and values from `d_model=64`. Raises `UsageError` for any other form and for a repeated name.

    >>> pairs(["d_model=64", "config.name=a=b"], "arg")
    (('d_model', '64'), ('config.name', 'a=b'))
    """
    values: dict[str, str] = {}
    for word in words or ():
        key, equals, value = word.partition("=")
        key = key.strip()
        if not equals or not all(part.isidentifier() for part in key.split(".")):
            raise UsageError(f"{_option(name)} {word[:200]!r} is not NAME=VALUE such as d_model=64")
        if key in values:
            raise UsageError(f"{_option(name)} gives {key} twice")
        values[key] = value
    return tuple(values.items())


def triple(word: str | None, name: str) -> tuple[int, int, int] | None:
    """Three positions from `0,5,1`. Raises `UsageError` with the form."""
    if word is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9}),([0-9]{1,9}),([0-9]{1,9})", word.replace(" ", ""))
    if match is None:
        raise UsageError(f"{_option(name)} {word[:80]!r} is not HEAD,QUERY,KEY such as 0,5,1")
    return int(match[1]), int(match[2]), int(match[3])


# ------------------------------------------------------------------------------------------- texts, which are no paths


_HEADER_BYTES = 4096
_FILE_NAME = re.compile(
    r"\S+\.(txt|md|rst|text|log|csv|tsv|json|jsonl|html|py|safetensors|pt|pth|bin|npz)", re.IGNORECASE
)
"""A word that is most likely the name of a file and not a text."""
_OF_CHECKPOINT = ("config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


def are_literal() -> bool:
    """Whether `--` is on the command line, so that words are always texts and never paths."""
    return "--" in sys.argv[1:]


def holds_record(path: str) -> bool:
    """Whether a path is the folder of a scan, or a file whose header is that of a record. False if it cannot be read."""
    if is_scan(path):
        return True
    if "\0" in path or not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            return b"mha.record/" in file.read(_HEADER_BYTES)
    except OSError:
        return False


def is_checkpoint(path: str) -> bool:
    """Whether a path is a folder with a checkpoint, judged by the names of its files."""
    return any(os.path.lexists(os.path.join(path, name)) for name in _OF_CHECKPOINT)


def require_words(word: str, *, has_file: bool = True, has_model: bool = True) -> None:
    """Raises `UsageError` for a text that is an existing path or looks like the name of a file, unless `are_literal`.

    `has_file` and `has_model` say whether the command has the options `--file` and `--model`, which the hint may name.
    """
    if are_literal():
        return
    quoted = shlex.quote(word)
    if not os.path.lexists(word):
        if _FILE_NAME.fullmatch(word):
            raise UsageError(f"{word} does not exist", hint=f"--text {quoted} inspects the word itself", path=word)
        return
    alternative = _alternative(word, quoted, has_file=has_file, has_model=has_model)
    raise UsageError(
        f"{word!r} is a {_kind(word)}, not a text",
        hint=f"{alternative}--text {quoted} inspects the word itself",
        path=word,
    )


def require_no_target(word: str) -> None:
    """Raises `UsageError` for a file name after `--csv` or `--json`, which take none, unless `are_literal`."""
    flag = sys.argv[sys.argv.index(word) - 1] if word in sys.argv else ""
    if flag in ("--csv", "--json") and _FILE_NAME.fullmatch(word) and not are_literal():
        hint = f"{flag} > {shlex.quote(word)} writes a file"
        raise UsageError(f"{flag} takes no file name: it prints to stdout", hint=hint, path=word)


def require_context(word: str) -> None:
    """Raises `UsageError` for a text of `--context` that is an existing path, unless `are_literal`."""
    if are_literal() or not os.path.lexists(word):
        return
    passed = "" if os.path.isdir(word) else f'--context "$(cat {shlex.quote(word)})" passes what it holds; '
    raise UsageError(
        f"--context: {word!r} is a {_kind(word)}, not a text",
        hint=f"{passed}with -- behind it texts are taken as they are",
        path=word,
    )


def require_record(path: str) -> None:
    """Raises `MhaError` with a command to type for a folder or a text file. The contents of a record are checked later."""
    if not path:
        raise UsageError("mha show needs a record, a file that --save wrote", hint=saved_here("mha show", 1))
    quoted = shlex.quote(path)
    if os.path.isdir(path) and not is_scan(path):
        hint = f"mha weights info {quoted} lists what a checkpoint holds, mha run TEXT --model {quoted} shows its attention"
        raise MhaError(f"{path} is a directory, not a record", hint=hint, code="unreadable", path=path)
    if _is_text(path):
        hint = f"mha run --file {quoted} shows the attention of a text, and --save makes a record of it"
        raise MhaError(f"{path} is a text, not a record", hint=hint, code="bad-file", path=path)


def saved_here(command: str, count: int, *, given: str = "") -> str:
    """The command to type if the paths of records are missing: with the newest records in this folder after the `given` one, or
    commands that save a record."""
    count -= bool(given)
    try:
        entries = [entry for entry in os.scandir() if entry.name.endswith(".safetensors") and holds_record(entry.name)]
        records = [entry for entry in entries if entry.name != os.path.normpath(given)]
        newest = sorted(records, key=lambda entry: entry.stat().st_mtime)[-count:]
    except OSError:
        newest = []
    if len(newest) < count:
        example = "another.safetensors" if given else "cat.safetensors"
        usage = f"{command} {shlex.quote(given)} {example} compares both" if given else f"mha show {example} shows it"
        return f'mha run "the cat sat on the mat" --save {example} makes one, and {usage}'
    names = " ".join(shlex.quote(name) for name in [*filter(None, [given]), *(entry.name for entry in newest)])
    return f"{command} {names} takes the newest of {len(records)}{' others' if given else ''} in this folder"


def _is_text(path: str) -> bool:
    """Whether a file is text: it has no NUL byte, no safetensors header and no ending of a pickle. False if it cannot be read."""
    if "\0" in path or path.lower().endswith(PICKLE_ENDINGS) or not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            head = file.read(_HEADER_BYTES)
    except OSError:
        return False
    return bool(head) and b"\0" not in head and head[8:9] != b"{"


def _kind(path: str) -> str:
    """The kind of file at a path, in a word."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return "link to nothing"
    kinds = ((stat.S_ISDIR, "folder"), (stat.S_ISREG, "file"), (stat.S_ISFIFO, "pipe"))
    return next((name for is_kind, name in kinds if is_kind(mode)), "device")


def _alternative(word: str, quoted: str, *, has_file: bool, has_model: bool) -> str:
    """The command or option to type instead, and a semicolon; empty for a path without text."""
    kind = _kind(word)
    if kind == "folder":
        if has_model and (is_checkpoint(word) or not has_file):
            return f"--model {quoted} reads a checkpoint there; "
        return "--file FILE reads a text file in it; "
    if holds_record(word):
        return f"mha show {quoted} draws this record; "
    if word.endswith(".safetensors"):
        return f"mha weights info {quoted} says what it holds; "
    if kind not in ("file", "pipe"):
        return ""
    return f"--file {quoted} reads it; " if has_file else f'"$(cat {quoted})" passes what it holds; '
