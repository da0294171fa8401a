"""Runs what a file brings along, such as a chat template, with limits of memory and of processor
time, in a copy of this process that does nothing else.
"""

import json
import os
import resource
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from mhacli.errors import MhaError, bad_file, guarded

from .memory import mapped_bytes

MORE_BYTES = 1 << 30
"""The most memory beyond that of this process."""
CPU_S = 10
"""The most seconds of processor time."""
_LACKS_MEMORY = 2
"""The exit code of a copy to which memory is missing."""


def bounded(what: str, path: str, call: Callable[[], Any]) -> Any:
    """The JSON-serialisable result of a call that uses `what` of a file. The call must be Python
    alone: the copy has no other threads than its own. Raises `MhaError` as `guarded`, and for a
    call beyond a limit.
    """
    told, tells = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # of threads, which the copy does not have
        pid = os.fork()
    if not pid:
        os.close(told)
        _answer(tells, lambda: guarded(what, path, call))
    os.close(tells)
    try:
        with open(told, "rb") as answers:
            text = answers.read()
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if ended == 0:
        fault, result = json.loads(text)
        if fault:
            raise bad_file(path, fault)
        return result
    if ended == _LACKS_MEMORY:
        did = f"takes more than {MORE_BYTES >> 30} GiB of memory"
    elif ended == -signal.SIGXCPU:
        did = f"takes more than {CPU_S} seconds of processor time"
    elif ended < 0:
        did = f"ended its process by {signal.strsignal(-ended)}"
    else:
        raise RuntimeError(f"{what} could not be used in a process of its own")
    raise bad_file(path, f"{what} of {path} {did}")


def _answer(tells: int, call: Callable[[], Any]) -> NoReturn:
    """Sends what a call gives, or the sentence of its error, and ends this process."""
    try:
        _limit(resource.RLIMIT_CPU, CPU_S)
        with suppress(OSError):
            _limit(resource.RLIMIT_AS, mapped_bytes() + MORE_BYTES)
        answer: tuple[str | None, Any]
        try:
            answer = None, call()
        except MhaError as fault:
            answer = fault.typed_message, None
        with open(tells, "wb") as sent:
            sent.write(json.dumps(answer).encode())
        os._exit(0)
    except MemoryError:
        os._exit(_LACKS_MEMORY)
    finally:
        os._exit(1)  # a fault of mha: this copy must not go on as its parent does


def _limit(kind: int, most: int) -> None:
    """Lowers a limit of this process to `most`, if it is not lower."""
    soft, hard = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY or soft > most:
        resource.setrlimit(kind, (most, hard))
