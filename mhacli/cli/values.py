"""Strict parsers for the words of a command line: numbers, sizes, lists and texts."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence

from mhacli.errors import UsageError
from mhacli.io.files import parse_size


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


_FILE_NAME = re.compile(
    r"\S+\.(txt|md|rst|text|log|csv|tsv|json|jsonl|html|py|safetensors|pt|pth|bin|npz)", re.IGNORECASE
)
"""A word that is most likely the name of a file and not a text."""


def are_literal() -> bool:
    """Whether `--` is on the command line, so that words are always texts and never paths."""
    return "--" in sys.argv[1:]


def require_words(word: str, *, option: str = "") -> None:
    """Raises `UsageError` for a text, of an option if one is named, that is an existing path or looks like the name of a file,
    unless `are_literal`."""
    if are_literal() or not (os.path.lexists(word) or (not option and _FILE_NAME.fullmatch(word))):
        return
    message = f"{word!r} is a path, not a text" if os.path.lexists(word) else f"{word} does not exist"
    hint = (
        "with -- behind it texts are taken as they are" if option else "--file FILE reads a text; --text takes a word"
    )
    raise UsageError(f"{option}: {message}" if option else message, hint=hint, path=word)
