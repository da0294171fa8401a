"""Named stretches of a text: the messages of a chat, and the spans that `--span` names, with the tokens that lie in them.

A word of `--span` is `name=start:end`, characters of the text with the end left out; `name=/regex/`, every match; or a list such
as `system,user,user2` of what a chat is made of: a role is all its turns.
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
from mhacli.io.files import read_whole
from mhacli.io.json_schema import load_json
from mhacli.spec.tokens import TokenSequence

if TYPE_CHECKING:
    import regex

MAX_FILE_BYTES: Final = 16 << 20
_ROLE = re.compile(r"[A-Za-z_-]{1,40}")
_MAX_CANDIDATES: Final = 64
_MAX_HEADER: Final = 200
"""How many characters before a content are looked through for the name of its role; templates put a few words there."""
_OTHER_NAMES: Final = {"assistant": "model"}
"""What templates call a role besides its own name. Source: the chat template of Gemma."""


@dataclass(frozen=True)
class Message:
    """What one side says in one turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class Turn:
    """Where a message's content stands in the text (characters, end exclusive), without the white space around it.

    `name` is the role where it comes once, else the role with its number: `user1`, `user2`.
    """

    name: str
    role: str
    start: int
    end: int


def read_chat(path: str) -> tuple[Message, ...]:
    """The messages of a JSON file: a list of `{"role", "content"}`, by itself or as the only field `messages`.

    Raises `MhaError` for anything else; nothing is left out silently, because a template could have used it.
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
    """Where the messages stand in what a chat template made of them, in their order.

    A content may also stand by chance in what the template writes around it: `user` in `<|im_start|>user`. So of all places
    that leave room for the messages after it, the first is taken that has the role's name before it and marks or white
    space around it; else the first that has most of this. Raises `MhaError` that names the message that is not there.
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
    """The last place for each content at which it and all that follow it still fit. Raises `MhaError` where one cannot."""
    cursor = 0
    for i, content in enumerate(
        contents
    ):  # from the front first: the message that is told is the first that is missing
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
    """How much speaks against a content standing at a place: no name of its role before it, or other text at its sides."""
    header = rendered[max(cursor, start - _MAX_HEADER) : start].casefold()
    is_named = role.casefold() in header or _OTHER_NAMES.get(role, role) in header
    before, after = rendered[start - 1 : start] if start else "", rendered[end : end + 1]
    is_loose = (not before or before.isspace() or before in ">]}:") and (not after or after.isspace() or after in "<[{")
    return (not is_named) + (not is_loose)


def _names(roles: Sequence[str]) -> list[str]:
    """The names of turns. A role has no digit in it, so no name is given twice."""
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
            raise UsageError(f"--span {name} is given twice")
        if value is None:
            found[name] = _of_chat(name, chat)
        elif len(value) > 1 and value.startswith("/") and value.endswith("/"):
            expressions.append(Expression(name, value[1:-1]))
            found[name] = ()  # searched together, after all that can be refused without a search
        else:
            found[name] = (_range(name, value, len(text)),)
    searched = dict(zip((name for name, _ in expressions), search(expressions, text), strict=True))
    return tuple(Span(name, ranges or searched[name]) for name, ranges in found.items())


def require_expressions(words: Sequence[str]) -> None:
    """Raises `UsageError` for words that are not the names of different regular expressions, the only spans of any text."""
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
    """What a word names, and what it says of it: nothing, where it is a list of names of the chat."""
    name, is_said, value = word.partition("=")
    if not is_said:
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
    """The turns of each role and, by its own name, each turn."""
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
    """The expression for `regex`, after Python's `re` has taken it: what both read is read as `re` does."""
    import regex

    name, pattern = expression
    if len(pattern) > MAX_CHARACTERS:
        raise UsageError(f"--span {name}: the expression has {len(pattern)} characters, more than {MAX_CHARACTERS}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a later Python will read differently is no fault of the text
            re.compile(pattern)
            return regex.compile(pattern, regex.VERSION0)
    except (re.error, regex.error, OverflowError, RecursionError, MemoryError) as fault:
        raise UsageError(f"--span {name}=/{pattern}/ is not a regular expression of Python's re: {fault}") from None


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
