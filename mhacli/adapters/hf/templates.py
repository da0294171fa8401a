"""The chat template of a checkpoint: a program that somebody else wrote, in jinja2, run in bounded time and memory.

The sandbox of jinja2 keeps it from files and from Python, but not from loops within loops, or strings of gigabytes. So a
process of its own renders it, with transformers' own function, which the system ends when it has had its time.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from mhacli.errors import MhaError
from mhacli.text.spans import Message

LIMIT_S: Final = 3.0
"""Of a processor's time, so that a busy machine makes no difference. Templates take a few milliseconds."""
MORE_BYTES: Final = 256 << 20
MAX_CHARACTERS: Final = 16 << 20
INSTEAD_OF_CHAT: Final = "give the whole text as TEXT or --file, with spans by characters or regular expressions"
_WAITING_S: Final = 120.0
_PROCESS = Path(__file__).with_name("template_process.py")


def render(template: str, messages: Sequence[Message], tokens: Mapping[str, str], path: str) -> str:
    """What the template of the checkpoint at `path` makes of a chat; `tokens` are the special ones, by their names.

    Raises `MhaError` for a template that refuses the chat or is none, and for one that takes too much time or memory.
    """
    asked = {
        "template": template,
        "messages": [{"role": message.role, "content": message.content} for message in messages],
        "tokens": dict(tokens),
        "limit_s": LIMIT_S,
        "more_bytes": MORE_BYTES,
        "most": MAX_CHARACTERS,
    }
    answer = _answer(json.dumps(asked).encode() + b"\n", path)
    if "text" not in answer:
        raise _refused(path, answer["fault"])
    return answer["text"]


def _answer(message: bytes, path: str) -> Mapping[str, str]:
    """The line that the process writes, or why there is none."""
    words = [sys.executable, "-P", str(_PROCESS)]
    try:
        done = subprocess.run(
            words, input=message, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_WAITING_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _too_slow(path) from None
    except OSError as fault:
        reason = fault.strerror or "unknown error"
        raise MhaError(f"a process must start that renders the chat template, got: {reason}", code="failed") from None
    if done.returncode == -signal.SIGXCPU:
        raise _too_slow(path)
    if done.returncode:
        return {"fault": f"its process ended with exit status {done.returncode}"}
    return dict(json.loads(done.stdout))


def _too_slow(path: str) -> MhaError:
    return MhaError(
        f"the chat template of {path} must be done within {LIMIT_S:g} seconds, got no end of it",
        hint=INSTEAD_OF_CHAT,
        code="too-slow",
        path=path,
    )


def _refused(path: str, fault: str) -> MhaError:
    return MhaError(
        f"the chat template of {path} must make a text of the chat, got: {fault:.300}",
        hint=INSTEAD_OF_CHAT,
        code="bad-template",
        path=path,
    )
