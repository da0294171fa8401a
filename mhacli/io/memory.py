"""Memory that a run may take, the number of CPUs, and pauses of the garbage collector.

Memory is checked before it is allocated: Linux grants too much and kills the process later.
"""

from __future__ import annotations

import gc
import os
import platform
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

USABLE_FRACTION = 0.8


def available_bytes() -> int:
    """Bytes that this process may still allocate: the least of free memory, the control group's limit and the rlimit."""
    limits = [limit for limit in (_mem_available(), _cgroup_room(), _rlimit_room()) if limit is not None]
    return max(0, min(limits, default=1 << 62))


def fits(needed: int, available: int) -> bool:
    """Whether `needed` is at most 80 % of the available bytes."""
    return needed <= USABLE_FRACTION * available


def keep_what_is_loaded() -> None:
    """Exempts all present objects from garbage collection, and those made within `uncollected` later on."""
    gc.freeze()


@contextmanager
def uncollected() -> Iterator[None]:
    """Switches the garbage collector off within the context.

    Importing torch creates many objects and no garbage; collections would take a quarter of its time. After
    `keep_what_is_loaded`, the objects made within the context are exempt for good.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count():
            gc.freeze()
        if was_on:
            gc.enable()


def _mem_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in os.sysconf_names else -1
        return pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_room() -> int | None:
    """Bytes left in the control group, version 2 or 1; None without a limit."""
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            return int(Path(limit).read_text()) - int(Path(usage).read_text())
        except (OSError, ValueError):  # absent, or the word "max"
            continue
    return None


def _rlimit_room() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return soft
    return soft - pages * resource.getpagesize()


def n_cpus() -> int:
    """The number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The model name of the processor, or else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def nvidia_driver() -> bool:
    """Whether NVIDIA's driver is loaded."""
    return Path("/proc/driver/nvidia/version").exists()
