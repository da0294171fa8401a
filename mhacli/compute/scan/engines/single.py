"""One worker in this process, and what every engine does."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from typing import Protocol

from mhacli.compute.scan.worker import WorkerStart, settings_here
from mhacli.requests.scan import ScanRequest
from mhacli.results.scan.settings import ScanSettings
from mhacli.results.scan.unit import Unit, UnitFiles

OnDone = Callable[[Unit, UnitFiles, str], None]
"""Hears of every unit that was computed and by which worker, in any order, in the process that runs the engine."""


def name_here() -> str:
    """The name of this process among workers."""
    return f"{platform.node()}, process {os.getpid()}"


class Engine(Protocol):
    """Shares units out to workers. What a unit gives does not depend on the engine."""

    def settings(self, request: ScanRequest) -> ScanSettings:
        """The settings that the workers compute with: their device and versions. Raises `MhaError` where they cannot."""

    def run(self, units: Iterator[Unit], start: WorkerStart, on_done: OnDone) -> None:
        """Computes all units. Takes one from `units` only when a worker can have it, and returns when the last is done.

        `units` ends early where the scan is to stop: what is in flight is still finished. Raises `MhaError` where a worker
        cannot start, or a unit cannot be computed.
        """


class SingleEngine:
    """The engine without workers beside this process."""

    def settings(self, request: ScanRequest) -> ScanSettings:
        """The settings of this process."""
        return settings_here(request)

    def run(self, units: Iterator[Unit], start: WorkerStart, on_done: OnDone) -> None:
        """Computes the units one after the other; the model is loaded when there is a first."""
        worker = None
        for unit in units:
            worker = worker or start.load()
            on_done(unit, worker.compute(unit), name_here())
