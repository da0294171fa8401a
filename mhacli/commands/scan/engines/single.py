"""The protocol of engines, and the engine with one worker in this process."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from typing import Protocol

from mhacli.commands.scan.request import ScanRequest, ScanSettings
from mhacli.commands.scan.units import Unit, UnitFiles
from mhacli.commands.scan.worker import Worker, settings_here

Start = Callable[[], Worker]
"""Loads the model in the process that calls it. Can be pickled."""
OnDone = Callable[[Unit, UnitFiles, str], None]
"""Called with each computed unit, its files and its worker, in any order, in the process that runs the engine."""


def name_here() -> str:
    """The name of this process among workers."""
    return f"{platform.node()}, process {os.getpid()}"


class Engine(Protocol):
    """Distributes units to workers. The results do not depend on the engine."""

    def settings(self, request: ScanRequest) -> ScanSettings:
        """The settings of the workers, such as device and versions. Raises `MhaError` if they cannot compute the request."""

    def run(self, units: Iterator[Unit], start: Start, on_done: OnDone) -> None:
        """Computes all units, taking one from `units` only when a worker is free for it, and returns after the last.

        `units` ends early if the scan is to stop; units in progress are still finished. Raises `MhaError` if a worker cannot
        start or a unit cannot be computed.
        """

    def end(self) -> None:
        """Ends the processes that the engine has started."""


class SingleEngine:
    """The engine that computes in this process."""

    def settings(self, request: ScanRequest) -> ScanSettings:
        """The settings of this process."""
        return settings_here(request)

    def run(self, units: Iterator[Unit], start: Start, on_done: OnDone) -> None:
        """Computes the units one after the other; the model is loaded before the first."""
        worker = None
        for unit in units:
            worker = worker or start()
            on_done(unit, worker.compute(unit), name_here())

    def end(self) -> None:
        """Does nothing: there are no other processes."""
