"""Spans: named stretches of a text, as `--span` names them, and the tokens that lie in them.

A word of `--span` is `name=start:end`, characters of the text with the end left out; `name=/regex/`, every match; or a list such
as `system,user,user2` of what a chat is made of: a role is all its turns.
"""

from __future__ import annotations

import re
import warnings
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import process_time
from typing import TYPE_CHECKING, Final, NamedTuple

from mhacli.errors import MhaError, UsageError
from mhacli.spec.tokens import TokenSequence
from mhacli.text.chat import Turn

if TYPE_CHECKING:
    import regex

_NAME = re.compile(r"[^\W\d][\w.-]{0,39}")
_RANGE = re.compile(r"([0-9]{0,12}):([0-9]{0,12})")
_MAX_LISTED = 20
LIMIT_S: Final = 5.0
"""For all expressions of a command together: half of the ten seconds in which a command must have refused bad input."""
MAX_MATCHES: Final = 100_000
MAX_CHARACTERS: Final = 500
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Span:
    """A name and the stretches of the text that it is for: characters, end exclusive, none of them empty."""

    name: str
    ranges: Ranges


def find_spans(words: Sequence[str], text: str, turns: Sequence[Turn]) -> tuple[Span, ...]:
    """The spans that the words of a command name, in their order; `turns` are those of a chat, else empty.

    Regular expressions are searched for in bounded time (`search`). Raises `UsageError` for what names nothing, lies outside
    of the text or is named twice, and `MhaError` where nothing is found or a turn says nothing.
    """
    chat = _chat(turns)
    found: dict[str, Ranges] = {}
    expressions: list[Expression] = []
    for name, value in (pair for word in words for pair in _pairs(word)):
        if name in found:
            raise UsageError(f"spans must have different names, got {name!r} twice")
        if value is None:
            found[name] = _of_chat(name, chat)
        elif len(value) > 1 and value.startswith("/") and value.endswith("/"):
            expressions.append(Expression(name, value[1:-1]))
            found[name] = ()  # searched together, after all that can be refused without a search
        else:
            found[name] = (_range(name, value, len(text)),)
    searched = dict(zip((name for name, _ in expressions), search(expressions, text), strict=True))
    return tuple(Span(name, ranges or searched[name]) for name, ranges in found.items())


def _pairs(word: str) -> list[tuple[str, str | None]]:
    """What a word names, and what it says of it: nothing, where it is a list of names of the chat."""
    name, is_said, value = word.partition("=")
    if not is_said:
        return [(part.strip(), None) for part in word.split(",")]
    if not _NAME.fullmatch(name.strip()):
        raise UsageError(
            f"the name of a span must be at most 40 letters, digits, _, - and ., a letter first, got {name[:60]!r}"
        )
    return [(name.strip(), value.strip())]


def _range(name: str, value: str, length: int) -> tuple[int, int]:
    match = _RANGE.fullmatch(value)
    if match is None:
        raise UsageError(
            f"span {name!r} must be START:END such as 4:17, or /REGEX/, got {value[:60]!r}",
            hint="characters of the text, counted from 0, the end left out",
        )
    start, end = int(match[1] or 0), int(match[2] or length)
    if not start < end <= length:
        raise UsageError(f"span {name!r} must lie within 0:{length} and hold one character at least, got {value!r}")
    return start, end


def _chat(turns: Sequence[Turn]) -> Mapping[str, list[Turn]]:
    """The turns of each role and, by its own name, each turn."""
    chat: dict[str, list[Turn]] = {}
    for turn in turns:
        for name in dict.fromkeys((turn.role, turn.name)):
            chat.setdefault(name, []).append(turn)
    return chat


def _of_chat(name: str, chat: Mapping[str, list[Turn]]) -> Ranges:
    if not chat:
        raise UsageError(
            f"span must be NAME=START:END or NAME=/REGEX/ where the text is no chat, got {name[:60]!r}",
            hint="the roles of a chat are there with --chat",
        )
    if name not in chat:
        more = ", …" if len(chat) > _MAX_LISTED else ""
        choices = ", ".join(list(chat)[:_MAX_LISTED]) + more
        raise UsageError(f"span must be a role or turn of the chat, {choices}, got {name[:60]!r}")
    ranges = tuple((turn.start, turn.end) for turn in chat[name] if turn.start < turn.end)
    if not ranges:
        raise MhaError(f"span {name!r} must hold one character at least, got nothing but empty turns", code="no-span")
    return ranges


# ----------------------------------------------------------------------------------------------- regular expressions


class Expression(NamedTuple):
    """A regular expression of Python's `re`, and the name of what it is to find."""

    name: str
    pattern: str


def search(expressions: Sequence[Expression], text: str, limit_s: float = LIMIT_S) -> list[Ranges]:
    """Where all matches of each expression stand in the text, those of no character left out.

    The library `regex` searches, which can be told to stop; Python's `re` cannot. Raises `UsageError` for what is no regular
    expression, and `MhaError` for one that matches nothing, too often, or is not done after `limit_s` seconds of computing.
    """
    ends = process_time() + limit_s
    return [_matches(expression, text, ends, limit_s) for expression in expressions]


def _matches(expression: Expression, text: str, ends: float, limit_s: float) -> Ranges:
    name, shown = expression.name, f"/{expression.pattern}/"
    pattern = _compiled(expression)
    ranges: list[tuple[int, int]] = []
    try:
        for match in pattern.finditer(text, timeout=max(1e-3, ends - process_time())):
            if match.end() > match.start():
                ranges.append(match.span())
            if len(ranges) > MAX_MATCHES:
                raise MhaError(
                    f"span {name!r} must match at most {MAX_MATCHES} times, got more for {shown}", code="too-large"
                )
    except TimeoutError:
        raise MhaError(
            f"span {name!r} must be found within {limit_s:g} seconds, got no end of the search for {shown}",
            hint="repetitions inside repetitions, as in (a+)+, can take for ever; NAME=START:END needs no search",
            code="too-slow",
        ) from None
    if not ranges:
        raise MhaError(
            f"span {name!r} must match one character of the text at least, got none for {shown}", code="no-span"
        )
    return tuple(ranges)


def _compiled(expression: Expression) -> regex.Pattern[str]:
    """The expression for `regex`, after Python's `re` has taken it: what both read is read as `re` does."""
    import regex

    name, pattern = expression
    if len(pattern) > MAX_CHARACTERS:
        raise UsageError(f"span {name!r} must have at most {MAX_CHARACTERS} characters, got one of {len(pattern)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a later Python will read differently is no fault of the text
            re.compile(pattern)
            return regex.compile(pattern, regex.VERSION0)
    except (re.error, regex.error, OverflowError, RecursionError, MemoryError) as fault:
        raise UsageError(
            f"span {name!r} must be a regular expression of Python's re, got /{pattern}/: {fault}"
        ) from None


# ------------------------------------------------------------------------------------------------------------ tokens


def tokens_of(span: Span, sequence: TokenSequence) -> tuple[int, ...]:
    """The tokens, by their place in the sequence, that overlap the span, if only by the space that they begin with.

    All tokens of a character that is cut count. Tokens that stand for nothing in the text never do: special tokens that the
    tokenizer added. Special tokens that the text brings, such as the markers of a chat, are text like any other.
    """
    merged: list[list[int]] = []
    for start, end in sorted(span.ranges):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, end])
    starts = [start for start, _ in merged]

    def overlaps(begin: int, end: int) -> bool:
        last = bisect_right(starts, end - 1) - 1  # the last range that begins before the token ends
        return begin < end and last >= 0 and merged[last][1] > begin

    return tuple(i for i, (begin, end) in enumerate(sequence.offsets) if overlaps(begin, end))
