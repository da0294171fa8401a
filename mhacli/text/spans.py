"""Named spans of a text: the messages of a chat and the spans of `--span`, with their tokens.

An argument of `--span` is `name=start:end` (characters, end exclusive), `name=/regex/` for every
match, or a list of roles and turns of a chat such as `system,user,user2`. A role means all its
turns.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from time import process_time
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from mhacli.errors import EXIT_USAGE, MhaError, UsageError, bad_file
from mhacli.io.files import read_whole

from .tokens import TokenSequence

if TYPE_CHECKING:
    import regex

MAX_FILE_BYTES: Final = 16 << 20
LIMIT_S: Final = 5.0
"""Seconds of processor time for all expressions of a command together: half of the ten seconds
within which a command must refuse bad input."""
MAX_CHARACTERS: Final = 502
"""The longest expression, with its slashes."""

_NAME = re.compile(r"[^\W\d][\w.-]{0,39}")
Ranges = tuple[tuple[int, int], ...]
"""Ranges of a text: characters, end exclusive, none empty."""


# -------------------------------------------------------------------------------------------- chats


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A part of a message."""

    text: str


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a chat."""

    role: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_-]{1,40}\Z")]
    content: str | tuple[Part, ...]

    @property
    def text(self) -> str:
        """The content, whose parts are joined."""
        return (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content)
        )


_Messages = Annotated[tuple[Message, ...], msgspec.Meta(min_length=1)]
_Chat = Annotated[dict[Literal["messages"], _Messages], msgspec.Meta(min_length=1)]


def read_chat(path: str) -> tuple[Message, ...]:
    """The messages of a JSON file: a list of `{"role", "content"}`, or an object with such a list
    as its only field `messages`. A content may be a list of parts `{"type": "text", "text"}`, whose
    texts are joined.

    Raises `MhaError` for any other content: a field left out silently could have mattered to the
    template.
    """
    data = read_whole(path, MAX_FILE_BYTES).removeprefix(b"\xef\xbb\xbf")
    try:
        chat = msgspec.json.decode(data, type=_Messages | _Chat)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise bad_file(path, f"{path} is no chat: {fault}") from None
    return chat["messages"] if isinstance(chat, dict) else chat


def marked(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with marks in place of their contents, for `spans_of_chat`. Blank ones stay
    blank, because templates ask for it.
    """
    return tuple(
        Message(each.role, _mark(i) if each.text.strip() else each.text)
        for i, each in enumerate(messages)
    )


def _mark(i: int) -> str:
    return f"\ue000{i}\ue001"


def spans_of_chat(messages: Sequence[Message], text: str, marks: str) -> dict[str, Ranges]:
    """The ranges of the messages, without surrounding white space, in the text that a chat template
    made of them: of each role, and, if a role occurs several times, of each of its messages as
    `user1`, `user2`.

    `marks` is what the template makes of the marked messages: what stands before a mark there
    stands before the content in the text. Raises `MhaError` with the first message that is missing.
    """
    totals, seen = Counter(message.role for message in messages), Counter[str]()
    spans: dict[str, Ranges] = {}
    at = end = 0
    for i, message in enumerate(messages):
        content, role = message.text.strip(), message.role
        start = end
        if content:
            mark = marks.find(_mark(i), at)
            start = text.find(content, end + mark - at) if mark >= 0 else -1
            at = mark + len(_mark(i))
        if start < 0:
            missing = (
                f"messages[{i}] ({role}) is missing from the text that the chat template makes:"
                f" {content[:60]!r}"
            )
            raise MhaError(
                missing, hint="--span NAME=START:END marks a message by characters", code="no-turn"
            )
        end = start + len(content)
        seen[role] += 1
        names = [role] if totals[role] == 1 else [role, f"{role}{seen[role]}"]
        for name in names:
            ranges = spans.get(name, ())
            spans[name] = (*ranges, (start, end)) if content else ranges
    return spans


# -------------------------------------------------------------------------------------------- spans


def find_spans(
    words: Sequence[str], text: str, chat: Mapping[str, Ranges], *, may_lack: bool = False
) -> dict[str, Ranges]:
    """The ranges of each span of the arguments of `--span`, in order. `chat` has the spans of a
    chat by name, else is empty.

    Regular expressions are searched in bounded time. Raises `UsageError` for unknown names, ranges
    outside of the text and duplicates, and `MhaError` for an expression without a match or a turn
    without text, unless the text `may_lack` spans.
    """
    ends = process_time() + LIMIT_S
    spans: dict[str, Ranges] = {}
    for name, value in _named(words).items():
        if value is None and name not in chat:
            known = ", ".join([*chat][:20]) or "none without --chat"
            hint = f"--span {name[:60]}=0:10 and --span {name[:60]}=/REGEX/ are spans of any text"
            raise UsageError(
                f"--span {name[:60]} is not a role or turn of the chat: {known}", hint=hint
            )
        if value is None:
            spans[name] = chat[name]
        elif _is_expression(value):
            try:
                matches = _compiled(name, value).finditer(
                    text, timeout=max(1e-3, ends - process_time())
                )
                spans[name] = tuple(m.span() for m in matches if m.end() > m.start())
            except TimeoutError:
                message = f"--span {name}={value} takes longer than {LIMIT_S:g} seconds to search"
                hint = "nested repetitions such as (a+)+ can take forever"
                raise MhaError(message, hint=hint, code="too-slow") from None
        else:
            part = part_of(value, len(text))
            if not part:
                known = (
                    f"START:END within the characters 0:{len(text)}, with END above START, nor"
                    " /REGEX/"
                )
                raise UsageError(f"--span {name}={value[:60]} is neither {known}")
            spans[name] = ((part.start, part.stop),)
        if not (spans[name] or may_lack):
            shown = name if value is None else f"{name}={value}"
            raise MhaError(
                f"--span {shown} has no characters of the text",
                code="no-span",
                exit_code=EXIT_USAGE,
            )
    return spans


def part_of(word: str, count: int) -> range:
    """The places of `100:140`, `:40` or `100:`, without the end, among `count`; none for any other
    word.
    """
    match = re.fullmatch(r"([0-9]{0,12}):([0-9]{0,12})", word)
    part = range(int(match[1] or 0), int(match[2] or count)) if match else range(0)
    return part if part.stop <= count else range(0)


def require_expressions(words: Sequence[str]) -> None:
    """Raises `UsageError` unless the arguments are regular expressions with different names, the
    only spans for any text.
    """
    for name, value in _named(words).items():
        if value is None or not _is_expression(value):
            raise UsageError(
                f"--span {name}: a corpus has spans by regular expressions only, {name}=/REGEX/"
            )
        _compiled(name, value)


def _named(words: Sequence[str]) -> dict[str, str | None]:
    """The value of each name, None for a role or turn."""
    named: dict[str, str | None] = {}
    for word in words:
        first, equals, value = (part.strip() for part in word.partition("="))
        if equals and not _NAME.fullmatch(first):
            rule = "a letter, then letters, digits, _, - and ., at most 40 in all"
            raise UsageError(f"--span: {first[:60]!r} is not a name: {rule}")
        names = [first] if equals else [part.strip() for part in word.split(",")]
        for name in names:
            if name in named:
                raise UsageError(f"--span {name} is given twice")
            named[name] = value if equals else None
    return named


def _is_expression(value: str) -> bool:
    return len(value) > 2 and value[0] == value[-1] == "/"


def _compiled(name: str, value: str) -> regex.Pattern[str]:
    """The expression for the library `regex`, because Python's `re` has no time limit."""
    import regex

    if len(value) > MAX_CHARACTERS:
        raise UsageError(
            f"--span {name}: the expression has {len(value)} characters, more than {MAX_CHARACTERS}"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # warnings about later versions of Python are no fault of the text
            return regex.compile(value[1:-1], regex.VERSION0)
    except (regex.error, OverflowError, RecursionError, MemoryError) as fault:
        raise UsageError(f"--span {name}={value} is not a regular expression: {fault}") from None


def tokens_of(ranges: Ranges, sequence: TokenSequence) -> tuple[int, ...]:
    """The indices of the tokens that overlap the ranges, if only by a leading space.

    All tokens of a cut character count. Special tokens that the tokenizer added never count;
    special tokens in the text, such as the markers of a chat, count like any other text.
    """
    is_inside = bytearray(len(sequence.text))
    for start, end in ranges:
        is_inside[start:end] = b"\1" * (end - start)
    return tuple(i for i, (begin, end) in enumerate(sequence.offsets) if 1 in is_inside[begin:end])
