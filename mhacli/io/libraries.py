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
        reason = " ".join(f"{type(fault).__name__}: {fault}".split())
        raise bad_file(path, f"{what} of {path} cannot be used: {reason:.300}") from None


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
