"""Regular expressions over a text in bounded time and memory.

Python's `re` cannot be told to stop: `(a+)+$` looks at thirty letters for hours, and holds the interpreter while it does. So a
process of its own searches, which the system can end at any moment whatever it is doing, and which may take only so much
memory. It needs nothing but the standard library and starts in some hundredths of a second.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from mhacli.errors import MhaError, UsageError

LIMIT_S: Final = 5.0
"""For all expressions of a command together: half of the ten seconds in which a command must have refused bad input."""
MAX_BYTES: Final = 1 << 30
MAX_MATCHES: Final = 100_000
MAX_CHARACTERS: Final = 500
_PROCESS = Path(__file__).with_name("search_process.py")
Ranges = tuple[tuple[int, int], ...]


class Expression(NamedTuple):
    """A regular expression of Python's `re`, and the name of what it is to find."""

    name: str
    pattern: str


def search(expressions: Sequence[Expression], text: str, limit_s: float = LIMIT_S) -> list[Ranges]:
    """Where all matches of each expression stand in the text, those of no character left out.

    Raises `UsageError` for what is no regular expression, and `MhaError` for one that matches nothing, too often, or is not
    done when `limit_s` seconds are over.
    """
    if not expressions:
        return []
    for expression in expressions:
        if len(expression.pattern) > MAX_CHARACTERS:
            got = f"one of {len(expression.pattern)}"
            raise UsageError(f"span {expression.name!r} must have at most {MAX_CHARACTERS} characters, got {got}")
    asked = {"patterns": [pattern for _, pattern in expressions], "most": MAX_MATCHES, "max_bytes": MAX_BYTES}
    lines = _answers(json.dumps(asked).encode() + b"\n" + text.encode("utf-8", "surrogatepass"), limit_s)
    found = [_ranges(expression, json.loads(line)) for expression, line in zip(expressions, lines, strict=False)]
    if len(found) < len(expressions):
        late = expressions[len(found)]
        raise MhaError(
            f"span {late.name!r} must be found within {limit_s:g} seconds, got no end of the search for /{late.pattern}/",
            hint="repetitions inside repetitions, as in (a+)+, can take for ever; NAME=START:END needs no search",
            code="too-slow",
        )
    return found


def _answers(message: bytes, limit_s: float) -> list[bytes]:
    """The whole lines that the process has written when it ends, or when its time is over."""
    words = [sys.executable, "-I", "-S", str(_PROCESS)]  # neither folders of the user nor installed packages
    try:
        done = subprocess.run(
            words, input=message, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as late:
        return _whole_lines(late.stdout or b"")
    except OSError as fault:
        reason = fault.strerror or "unknown error"
        raise MhaError(f"a process must start that searches the text, got: {reason}", code="failed") from None
    if done.returncode:
        raise MhaError(
            f"the search must end by itself, got exit status {done.returncode}",
            hint="a simpler expression, or NAME=START:END, may do",
            code="failed",
        )
    return _whole_lines(done.stdout)


def _whole_lines(written: bytes) -> list[bytes]:
    return written.split(b"\n")[:-1]


def _ranges(expression: Expression, answer: dict[str, Any]) -> Ranges:
    name, shown = expression.name, f"/{expression.pattern}/"
    if "fault" in answer:
        raise UsageError(f"span {name!r} must be a regular expression of Python's re, got {shown}: {answer['fault']}")
    if "count" in answer:
        raise MhaError(f"span {name!r} must match at most {MAX_MATCHES} times, got more for {shown}", code="too-large")
    if not answer["ranges"]:
        raise MhaError(
            f"span {name!r} must match one character of the text at least, got none for {shown}", code="no-span"
        )
    return tuple((start, end) for start, end in answer["ranges"])
