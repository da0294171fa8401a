"""What is found as annotations of GitHub, which shows them beside the lines of a pull request.

Source: github.com/actions/toolkit, packages/core/src/command.ts.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from mhacli.cli.console import stderr_line
from mhacli.text.escape import visible

from .result import Examination

_MOST = 10
"""The most annotations of a level that GitHub shows of a step."""


def print_annotations(lines: Iterable[str]) -> None:
    """Prints annotations on stderr where a workflow of GitHub runs, no more than it shows."""
    printed = Counter[str]()
    for line in dict.fromkeys(lines) if os.environ.get("GITHUB_ACTIONS") else ():
        level = line.split()[0]
        printed[level] += 1
        if printed[level] <= _MOST:
            stderr_line(line)


def annotations(examination: Examination) -> Iterator[str]:
    """A line for each mistake, or one for a verdict that is not decided."""
    reasons = {each.code: f"; accepted: {each.reason}" for each in examination.accepted}
    for found in examination.findings:
        level = "error"
        more = f"; fix: {found.fix.strip()}" if found.fix else ""
        if found.accepted:
            level = "notice"
            more = reasons[found.code]
        yield _annotation(examination, level, found.message + more, found.file, found.line)
    if examination.verdict == "unknown":
        yield _annotation(examination, "warning", examination.sentence)


def _annotation(
    examination: Examination,
    level: str,
    text: str,
    file: str | None = None,
    line: int | None = None,
) -> str:
    """The line of an annotation, without a file that is outside of GITHUB_WORKSPACE."""
    properties = {"title": "mha check"}
    if file is not None:
        root = Path(os.environ.get("GITHUB_WORKSPACE", "")).resolve()
        path = Path(file).resolve()
        if path.is_relative_to(root):
            properties["file"] = str(path.relative_to(root))
            properties |= {} if line is None else {"line": str(line)}
    words = (f"{name}={_escaped(visible(word), ':,')}" for name, word in properties.items())
    said = "\n".join(map(visible, text.splitlines()))
    message = _escaped(f"{visible(examination.target)}: {said}")
    return f"::{level} {','.join(words)}::{message}"


def _escaped(text: str, more: str = "") -> str:
    """A text as GitHub reads it back; `more` are further characters to escape."""
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text
