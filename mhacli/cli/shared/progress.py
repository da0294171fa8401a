"""A long look, with a bar and the time that is left, that Ctrl-C ends at once and that tells what it has finished."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from mhacli.cli.streams import progress

_WAIT_S = 0.05


class Look(Protocol):
    """Something that looks at heads one after the other."""

    def run(self, tell: Callable[[float, str], None]) -> None:
        """Does all of it; `tell` hears which share is done, and may raise to end it."""


def watch(look: Look) -> None:
    """Does the look with a bar and the time left. The work is done beside, for Ctrl-C to be heard at once."""
    with progress() as tell:
        is_wanted, faults = threading.Event(), list[BaseException]()
        is_wanted.set()

        def tell_or_stop(share: float, doing: str) -> None:
            if not is_wanted.is_set():
                raise _Stopped
            tell(share, doing)

        def work() -> None:
            try:
                look.run(tell_or_stop)
            except BaseException as fault:
                faults.append(fault)

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        try:
            while worker.is_alive():
                worker.join(_WAIT_S)
        finally:
            is_wanted.clear()
    if faults:
        raise faults[0]


class _Stopped(Exception):
    """Nobody waits for the rest."""
