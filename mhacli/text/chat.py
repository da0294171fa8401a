"""Chats: messages from a JSON file, and where each message stands in the text that a chat template makes of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NoReturn

from mhacli.errors import MhaError
from mhacli.io.files import read_whole
from mhacli.io.json_schema import load_json

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
            _refuse(path, "must hold a list of messages, or an object with messages only", _fields(document))
        document = document["messages"]
    if not isinstance(document, list):
        _refuse(path, "must hold a list of messages, or an object with messages only", _kind(document))
    if not document:
        _refuse(path, "must hold one message at least", "an empty list")
    return tuple(_message(entry, f"{place}[{i}]", path) for i, entry in enumerate(document))


def _message(entry: Any, place: str, path: str) -> Message:
    if not isinstance(entry, dict):
        _refuse(place, "must be an object with role and content", _kind(entry), path)
    if set(entry) != {"role", "content"}:
        _refuse(place, "must have the fields role and content, and no others", _fields(entry), path)
    role, content = entry["role"], entry["content"]
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        got = repr(role)[:80] if isinstance(role, str) else _kind(role)
        _refuse(f"{place}.role", "must be a name of at most 40 letters, _ and - such as user", got, path)
    if not isinstance(content, str):
        _refuse(f"{place}.content", "must be text", _kind(content), path)
    lone = re.search(r"[\ud800-\udfff]", content)
    if lone:
        got = f"{lone[0]!r} at character {lone.start()}"
        _refuse(f"{place}.content", "must be text without lone surrogates, which no tokenizer takes", got, path)
    return Message(role, content)


def _refuse(subject: str, rule: str, got: str, path: str | None = None) -> NoReturn:
    raise MhaError(f"{subject} {rule}, got {got}", code="bad-file", path=path or subject)


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
                f"messages[{i}] ({messages[i].role}) must stand in the text that the chat template makes, after those "
                f"before it, got a text without it: {content[:60]!r}",
                hint="the template changes what this message says or leaves it out; "
                "--span NAME=START:END marks it by characters",
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
