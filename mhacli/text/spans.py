"""Named spans of a text: the messages of a chat and the spans of `--span`, with their tokens.

An argument of `--span` is `name=start:end` (characters, end exclusive), `name=/regex/` for every match, or a list of
roles and turns of a chat such as `system,user,user2`. A role means all its turns.
"""

from __future__ import annotations

import re
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from time import process_time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mhacli.errors import EXIT_USAGE, MhaError, UsageError
from mhacli.io.data import load_json
from mhacli.io.files import read_whole
from mhacli.text.tokens import TokenSequence

if TYPE_CHECKING:
    import regex

MAX_FILE_BYTES: Final = 16 << 20
_ROLE = re.compile(r"[A-Za-z_-]{1,40}")
_MAX_CANDIDATES: Final = 64
_MAX_HEADER: Final = 200
"""Characters before a content that are searched for the name of its role. Templates put a few words there."""
_OTHER_NAMES: Final = {"assistant": "model"}
"""Names of roles in templates that differ from the role. Source: the chat template of Gemma."""


@dataclass(frozen=True)
class Message:
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class Turn:
    """The position of a message's content in the text (characters, end exclusive), without surrounding white space.

    `name` is the role if it occurs once, else the role with a number: `user1`, `user2`.
    """

    name: str
    role: str
    start: int
    end: int


def read_chat(path: str) -> tuple[Message, ...]:
    """The messages of a JSON file: a list of `{"role", "content"}`, or an object with such a list as its only field
    `messages`.

    Raises `MhaError` for any other content: a field left out silently could have mattered to the template.
    """
    document = load_json(read_whole(path, MAX_FILE_BYTES), path)
    place = path + ": messages"
    if isinstance(document, dict):
        others = sorted(set(document) - {"messages"})
        if "messages" not in document or others:
            raise _bad_chat(f"{path} holds an object with {_fields(document)}, not with messages only", path)
        document = document["messages"]
    if not isinstance(document, list):
        raise _bad_chat(f"{path} holds {_kind(document)}, not a list of messages", path)
    if not document:
        raise _bad_chat(f"{path} has no message", path)
    return tuple(_message(entry, f"{place}[{i}]", path) for i, entry in enumerate(document))


def _message(entry: Any, place: str, path: str) -> Message:
    if not isinstance(entry, dict):
        raise _bad_chat(f"{place} is {_kind(entry)}, not an object with role and content", path)
    if set(entry) != {"role", "content"}:
        raise _bad_chat(f"{place} has {_fields(entry)} instead of role and content", path)
    role, content = entry["role"], entry["content"]
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        got = repr(role)[:80] if isinstance(role, str) else _kind(role)
        raise _bad_chat(f"{place}.role is {got}, not a name of at most 40 letters, _ and - such as user", path)
    if not isinstance(content, str):
        raise _bad_chat(f"{place}.content is {_kind(content)}, not text", path)
    lone = re.search(r"[\ud800-\udfff]", content)
    if lone:
        shown = f"the lone surrogate {lone[0]!r} at character {lone.start()}"
        raise _bad_chat(f"{place}.content has {shown}, which no tokenizer reads", path)
    return Message(role, content)


def _bad_chat(fault: str, path: str) -> MhaError:
    return MhaError(fault, code="bad-file", path=path)


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _fields(value: dict[str, Any]) -> str:
    names = ", ".join(repr(name)[:40] for name in sorted(value)[:8])
    return f"the fields {names}" if names else "no fields"


# -------------------------------------------------------------------------------------------------------------- turns


def turns_of(messages: Sequence[Message], rendered: str) -> tuple[Turn, ...]:
    """The positions of the messages, in order, in the text that a chat template rendered.

    A content may also occur by chance in the template's own text, as `user` does in `<|im_start|>user`. So candidates
    must leave room for the later messages, and the best one has the role's name before it and marks or white space
    around it; the first of equals wins. Raises `MhaError` with the first message that is missing.
    """
    contents = [message.content.strip() for message in messages]
    latest = _latest_places(messages, contents, rendered)
    names = _names([message.role for message in messages])
    turns: list[Turn] = []
    cursor = 0
    for message, content, last, name in zip(messages, contents, latest, names, strict=True):
        places = islice(_places(content, rendered, cursor, last), _MAX_CANDIDATES)
        start = min(places, key=lambda place: _faults(message.role, rendered, cursor, place, place + len(content)))
        cursor = start + len(content)
        turns.append(Turn(name, message.role, start, cursor))
    return tuple(turns)


def _latest_places(messages: Sequence[Message], contents: Sequence[str], rendered: str) -> list[int]:
    """For each content, the last position that leaves room for all later contents. Raises `MhaError` for a missing one."""
    cursor = 0
    for i, content in enumerate(contents):  # forwards first, so that the error names the first missing message
        place = rendered.find(content, cursor)
        if place < 0:
            raise MhaError(
                f"messages[{i}] ({messages[i].role}) is missing from the text that the chat template makes: {content[:60]!r}",
                hint="the template changes or leaves out this message; --span NAME=START:END marks it by characters",
                code="no-turn",
            )
        cursor = place + len(content)
    latest: list[int] = []
    end = len(rendered)
    for content in reversed(contents):
        end = rendered.rfind(content, 0, end)
        latest.append(end)
    return latest[::-1]


def _places(content: str, rendered: str, start: int, last: int) -> Iterator[int]:
    place = rendered.find(content, start, last + len(content))
    while 0 <= place <= last:
        yield place
        place = rendered.find(content, place + 1, last + len(content))


def _faults(role: str, rendered: str, cursor: int, start: int, end: int) -> int:
    """The number of signs against a position: no role name before the content, or other text right beside it."""
    header = rendered[max(cursor, start - _MAX_HEADER) : start].casefold()
    is_named = role.casefold() in header or _OTHER_NAMES.get(role, role) in header
    before, after = rendered[start - 1 : start] if start else "", rendered[end : end + 1]
    is_loose = (not before or before.isspace() or before in ">]}:") and (not after or after.isspace() or after in "<[{")
    return (not is_named) + (not is_loose)


def _names(roles: Sequence[str]) -> list[str]:
    """The names of turns. They are unique, because a role has no digits."""
    totals, seen = Counter(roles), Counter[str]()
    names = []
    for role in roles:
        seen[role] += 1
        names.append(role if totals[role] == 1 else f"{role}{seen[role]}")
    return names


# --------------------------------------------------------------------------------------------------------------- spans


_NAME = re.compile(r"[^\W\d][\w.-]{0,39}")
_RANGE = re.compile(r"([0-9]{0,12}):([0-9]{0,12})")
_MAX_LISTED = 20
LIMIT_S: Final = 5.0
"""Seconds for all expressions of a command together: half of the ten seconds within which a command must refuse bad
input."""
MAX_MATCHES: Final = 100_000
MAX_CHARACTERS: Final = 500
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Span:
    """A name and its ranges of the text: characters, end exclusive, none empty."""

    name: str
    ranges: Ranges


def find_spans(words: Sequence[str], text: str, turns: Sequence[Turn]) -> tuple[Span, ...]:
    """The spans of the arguments of `--span`, in order. `turns` are those of a chat, else empty.

    Regular expressions are searched in bounded time (`search`). Raises `UsageError` for unknown names, ranges outside
    of the text and duplicates, and `MhaError` for an expression without a match or a turn without text.
    """
    chat = _chat(turns)
    ranges_of: dict[str, Ranges] = {}
    expressions: list[Expression] = []
    for name, value in (pair for word in words for pair in _pairs(word)):
        if name in ranges_of:
            raise UsageError(f"--span {name} is given twice")
        if value is None:
            ranges_of[name] = _of_chat(name, chat)
        elif len(value) > 1 and value.startswith("/") and value.endswith("/"):
            expressions.append(Expression(name, value[1:-1]))
            ranges_of[name] = ()  # searched below, when all other arguments have been checked
        else:
            ranges_of[name] = (_range(name, value, len(text)),)
    searched = dict(zip((name for name, _ in expressions), search(expressions, text), strict=True))
    return tuple(Span(name, ranges or searched[name]) for name, ranges in ranges_of.items())


def require_expressions(words: Sequence[str]) -> None:
    """Raises `UsageError` unless the arguments are regular expressions with different names, the only spans for any
    text."""
    names = []
    for name, value in (pair for word in words for pair in _pairs(word)):
        if value is None or len(value) < 3 or not (value.startswith("/") and value.endswith("/")):
            raise UsageError(
                f"--span {name}: a corpus has spans by regular expressions only", hint=f"try --span {name}=/REGEX/"
            )
        if name in names:
            raise UsageError(f"--span {name} is given twice")
        _compiled(Expression(name, value[1:-1]))
        names.append(name)


def _pairs(word: str) -> list[tuple[str, str | None]]:
    """The names in an argument, each with its value, or with None in a list of roles and turns."""
    name, equals, value = word.partition("=")
    if not equals:
        return [(part.strip(), None) for part in word.split(",")]
    if not _NAME.fullmatch(name.strip()):
        raise UsageError(
            f"--span: {name[:60]!r} is not a name: a letter, then letters, digits, _, - and ., at most 40 in all"
        )
    return [(name.strip(), value.strip())]


def _range(name: str, value: str, length: int) -> tuple[int, int]:
    match = _RANGE.fullmatch(value)
    if match is None:
        raise UsageError(
            f"--span {name}={value[:60]} is neither START:END such as {name}=4:17 nor /REGEX/",
            hint="START and END count the characters of the text from 0; END is excluded",
        )
    start, end = int(match[1] or 0), int(match[2] or length)
    if start >= end:
        raise UsageError(f"--span {name}={value} is empty")
    if end > length:
        raise UsageError(f"--span {name}={value} is outside of the text, which has the characters 0:{length}")
    return start, end


def _chat(turns: Sequence[Turn]) -> Mapping[str, list[Turn]]:
    """The turns of each role, and each turn by its name."""
    chat: dict[str, list[Turn]] = {}
    for turn in turns:
        for name in dict.fromkeys((turn.role, turn.name)):
            chat.setdefault(name, []).append(turn)
    return chat


def _of_chat(name: str, chat: Mapping[str, list[Turn]]) -> Ranges:
    if not chat:
        raise UsageError(
            f"--span {name[:60]} has no range, which a text that is not a chat needs",
            hint=f"try --span {name[:60]}=0:10 or --span {name[:60]}=/REGEX/; with --chat the roles are spans",
        )
    if name not in chat:
        more = ", …" if len(chat) > _MAX_LISTED else ""
        choices = ", ".join(list(chat)[:_MAX_LISTED]) + more
        raise UsageError(f"--span {name[:60]} is not a role or turn of the chat: {choices}")
    ranges = tuple((turn.start, turn.end) for turn in chat[name] if turn.start < turn.end)
    if not ranges:
        raise MhaError(
            f"span {name!r} is empty: every matching chat turn has no text", code="no-span", exit_code=EXIT_USAGE
        )
    return ranges


# ----------------------------------------------------------------------------------------------- regular expressions


class Expression(NamedTuple):
    """A named regular expression of Python's `re`."""

    name: str
    pattern: str


def search(expressions: Sequence[Expression], text: str, limit_s: float = LIMIT_S) -> list[Ranges]:
    """The ranges of all non-empty matches of each expression.

    The library `regex` searches, because Python's `re` has no time limit. Raises `UsageError` for an invalid
    expression, and `MhaError` for one without a match, with too many matches, or unfinished after `limit_s` seconds of
    CPU time.
    """
    ends = process_time() + limit_s
    return [_matches(expression, text, ends, limit_s) for expression in expressions]


def _matches(expression: Expression, text: str, ends: float, limit_s: float) -> Ranges:
    shown = f"--span {expression.name}=/{expression.pattern}/"
    pattern = _compiled(expression)
    ranges: list[tuple[int, int]] = []
    try:
        for match in pattern.finditer(text, timeout=max(1e-3, ends - process_time())):
            if match.end() > match.start():
                ranges.append(match.span())
            if len(ranges) > MAX_MATCHES:
                raise MhaError(f"{shown} matches more than {MAX_MATCHES} times", code="too-large")
    except TimeoutError:
        raise MhaError(
            f"{shown} takes longer than {limit_s:g} seconds to search",
            hint="nested repetitions such as (a+)+ can take forever; NAME=START:END needs no search",
            code="too-slow",
        ) from None
    if not ranges:
        raise MhaError(f"{shown} matches no characters of the text", code="no-span", exit_code=EXIT_USAGE)
    return tuple(ranges)


def _compiled(expression: Expression) -> regex.Pattern[str]:
    """The expression compiled by `regex` after a check by Python's `re`, whose reading both share."""
    import regex

    name, pattern = expression
    if len(pattern) > MAX_CHARACTERS:
        raise UsageError(f"--span {name}: the expression has {len(pattern)} characters, more than {MAX_CHARACTERS}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about later versions of Python are no fault of the text
            re.compile(pattern)
            return regex.compile(pattern, regex.VERSION0)
    except (re.error, regex.error, OverflowError, RecursionError, MemoryError) as fault:
        raise UsageError(f"--span {name}=/{pattern}/ is not a regular expression of Python's re: {fault}") from None


# ------------------------------------------------------------------------------------------------------------ tokens


def tokens_of(span: Span, sequence: TokenSequence) -> tuple[int, ...]:
    """The indices of the tokens that overlap the span, if only by a leading space.

    All tokens of a cut character count. Special tokens that the tokenizer added never count; special tokens in the
    text, such as the markers of a chat, count like any other text.
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
