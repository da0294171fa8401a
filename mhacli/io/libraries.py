"""Calls of libraries whose faults become errors that the user can read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from mhacli.errors import MhaError, bad_file

T = TypeVar("T")


def guarded(what: str, path: str, call: Callable[[], T]) -> T:
    """The result of a call of a library that uses `what` of a file or folder.

    Its exceptions, also panics of native code, which are no `Exception` and write to stderr, become an `MhaError` of one line.
    """
    try:
        with silent_stderr():
            return call()
    except (MemoryError, MhaError):
        raise
    except BaseException as fault:
        if not isinstance(fault, Exception) and type(fault).__name__ != "PanicException":
            raise  # an interrupt is not a fault of the file
        message = f"{what} of {path} cannot be used: {_first_line(fault):.300}"
        raise bad_file(path, message) from None


def _first_line(fault: BaseException) -> str:
    """The first line of an exception's message, with the second if the first only announces it; a `KeyError` as a missing key."""
    lines = [line for line in str(fault).splitlines() if line.strip()]
    if not lines or isinstance(fault, KeyError):
        return ": ".join([type(fault).__name__, *lines[:1]])
    return f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Discards everything written to stderr within the context, even by native code."""
    saved, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)
