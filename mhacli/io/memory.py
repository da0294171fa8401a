"""Memory that a run may take, the number of CPUs, and pauses of the garbage collector.

Memory is checked before it is allocated: Linux grants too much and kills the process later.
"""

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

USABLE_FRACTION = 0.8
_CONTROL_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""The limit and the use of a control group, of version 2 and 1."""


def available_bytes() -> int:
    """Bytes that this process may still allocate: the least of free memory, the control group's
    limit and the rlimit.
    """
    rooms = [os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()]
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        rooms += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for limit, usage in _CONTROL_GROUPS:
        with suppress(OSError, ValueError):  # absent, or the word "max"
            rooms.append(int(Path(limit).read_text()) - int(Path(usage).read_text()))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        with suppress(OSError):
            rooms.append(soft - mapped_bytes())
    return max(0, min(rooms))


def mapped_bytes() -> int:
    """The size of the address space of this process. Raises `OSError` where /proc is missing."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def fits(needed: int, available: int) -> bool:
    """Whether `needed` is at most 80 % of the available bytes."""
    return needed <= USABLE_FRACTION * available


@contextmanager
def gc_paused() -> Iterator[None]:
    """Switches the garbage collector off within the context.

    Importing torch creates many objects and no garbage; collections would take a quarter of its
    time. After `gc.freeze`, the objects made within the context are exempt for good.
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


def n_cpus() -> int:
    """The number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The model name of the processor, or else its architecture."""
    import platform  # it loads subprocess

    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
