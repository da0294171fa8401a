"""Long work: it reports its progress, and ends within a second of Ctrl-C or SIGTERM, even during a
long native call.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from .files import remove_temporary_folders

Progress = Callable[[str, float], None]
"""Takes the part of the work that begins, and the completed fraction of the work, from 0 to 1."""


def no_progress(part: str, fraction: float) -> None:
    """Discards progress."""


GRACE_S = 0.6
"""Seconds that the main thread has for its cleanup before the process is ended."""
_not_before = 0.0
_received = list[int]()
at_interrupt = list[Callable[[], None]]()
"""What the works that are going on do if a signal ends the process, from the outermost on."""


class Terminated(BaseException):
    """SIGTERM was received. Like `KeyboardInterrupt`, it is not an error."""


def raise_received() -> None:
    """Raises the exception of a received signal: anew where a library took it for a failure, such
    as of an import.
    """
    if _received:
        raise Terminated if _received[-1] == signal.SIGTERM else KeyboardInterrupt


def say_interrupted() -> None:
    """Does what the outermost work does if a signal ends the process, once."""
    outermost = at_interrupt[:1]
    at_interrupt.clear()
    for say in outermost:
        say()


def install() -> None:
    """Turns SIGINT and SIGTERM into exceptions, and ends the process if the exception is not raised
    in time.

    Python raises exceptions only between bytecodes, and a matrix product can take seconds. So a
    thread, woken through the signal's file descriptor, waits for a moment and then ends the process
    with the exit code 128 + signal number. Files stay whole because they take their names only when
    they are complete.
    """

    def end(number: int, frame: FrameType | None) -> None:
        _received.append(number)
        raise_received()

    def end_in_time() -> None:
        while True:
            for number in os.read(wakeup_fd, 64):
                if number in (signal.SIGINT, signal.SIGTERM):
                    threading.Event().wait(GRACE_S)
                    threading.Event().wait(max(0.0, _not_before - time.monotonic()))
                    say_interrupted()
                    remove_temporary_folders()
                    os._exit(128 + number)

    wakeup_fd, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if (
        signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    ):  # a background job of a shell must go on ignoring it
        signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=end_in_time, daemon=True).start()


@contextmanager
def graceful_interrupt(on_interrupt: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """A predicate that becomes true at the first Ctrl-C, so that work can end by itself. The second
    Ctrl-C interrupts as usual.

    The first Ctrl-C calls `on_interrupt`. Ignored interrupts stay ignored. For the main thread
    only.
    """
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        leave.close()
        stopped.set()
        on_interrupt()

    with ExitStack() as leave:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            leave.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, stop))
            # the thread that ends the process must not be woken
            leave.callback(
                signal.set_wakeup_fd, signal.set_wakeup_fd(-1), warn_on_full_buffer=False
            )
        yield stopped.is_set


@contextmanager
def uninterrupted(seconds: float) -> Iterator[None]:
    """Delays Ctrl-C and SIGTERM to the end of the block, which would leave processes behind if it
    were interrupted, but by at most `seconds`. For the main thread only.
    """
    global _not_before
    received = list[int]()
    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in numbers
    }
    _not_before = time.monotonic() + seconds
    try:
        yield
    finally:
        _not_before = 0.0
        for number, handler in before.items():
            signal.signal(number, handler)
        for sent in received:
            signal.raise_signal(sent)
