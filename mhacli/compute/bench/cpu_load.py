"""How busy others keep the CPUs that a measurement runs on."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter, process_time


class ForeignLoad:
    """From its making on: how many of this process's CPUs others kept busy, on average."""

    def __init__(self) -> None:
        self._busy_s, self._own_s, self._began = _busy_s(), process_time(), perf_counter()

    def cpus(self) -> float | None:
        """The average until now; None where the system does not tell."""
        busy_s, elapsed_s = _busy_s(), perf_counter() - self._began
        if busy_s is None or self._busy_s is None or elapsed_s <= 0:
            return None
        return max(0.0, (busy_s - self._busy_s - (process_time() - self._own_s)) / elapsed_s)


def is_crowded(foreign_load: float | None, n_threads: int, n_cpus: int) -> bool:
    """Whether others took CPUs that the threads needed; a quarter of one is what any system takes."""
    return foreign_load is not None and foreign_load > max(0.25, n_cpus - n_threads)


def n_cpus() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _busy_s() -> float | None:
    """Seconds that the CPUs this process may use have been busy since the system began, for anybody."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        times = [line.split()[1:9] for line in lines if line.split()[0] in ours]
        ticks = [
            sum(map(int, of_cpu)) - int(of_cpu[3]) - int(of_cpu[4]) for of_cpu in times
        ]  # but idle and waiting for disks
        return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None
    except (OSError, AttributeError, ValueError, IndexError):
        return None
