"""Ctrl-C and SIGTERM end the process within a second, even in the middle of a long native call."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from mhacli.io.files import remove_temporary_folders

GRACE_S = 0.6
"""How long the main thread has to clean up by itself before the process ends without it."""
_not_before = 0.0


class Terminated(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt, it is no error of the program."""


def install() -> None:
    """Turns SIGINT and SIGTERM into exceptions, and into the end of the process where those are not raised in time.

    Python raises only between bytecodes, and a matrix product can take seconds. A thread that the signal's file
    descriptor wakes waits a moment, then ends the process with the code that a shell reports, 128 + the signal's number.
    Files are safe from that: they take their names when they are whole.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell's background job keeps ignoring it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminate)
    threading.Thread(target=_end_in_time, args=(reading,), daemon=True).start()


def more_time(seconds: float) -> None:
    """Lets the main thread tell what is finished: the process is not ended from now on for so many seconds."""
    global _not_before
    _not_before = time.monotonic() + seconds


@contextmanager
def told_to_stop(on_interrupt: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, for work that then ends by itself; a second one is an interrupt as ever.

    `on_interrupt` is called at the first. Where interrupts are ignored they stay so. For the main thread alone.
    """
    stopped = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield stopped.is_set
        return
    writing = signal.set_wakeup_fd(-1)  # the thread that ends the process hears nothing meanwhile

    def leave() -> None:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def stop(number: int, frame: FrameType | None) -> None:
        leave()
        stopped.set()
        on_interrupt()

    signal.signal(signal.SIGINT, stop)
    try:
        yield stopped.is_set
    finally:
        leave()


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _end_in_time(reading: int) -> None:
    while True:
        for number in os.read(reading, 64):
            if number in (signal.SIGINT, signal.SIGTERM):
                threading.Event().wait(GRACE_S)
                threading.Event().wait(max(0.0, _not_before - time.monotonic()))
                remove_temporary_folders()
                os._exit(128 + number)
