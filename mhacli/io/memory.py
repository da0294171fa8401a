"""How much memory a run may take, asked before it is taken (Linux grants too much and kills later), how many CPUs, and when
garbage may wait."""

from __future__ import annotations

import gc
import os
import platform
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARE_OF_AVAILABLE = 0.8


def available_bytes() -> int:
    """What this process may still allocate: the least of free memory, the control group's limit and the rlimit."""
    limits = [limit for limit in (_mem_available(), _cgroup_room(), _rlimit_room()) if limit is not None]
    return max(0, min(limits, default=1 << 62))


def fits(needed: int, available: int) -> bool:
    """Whether so many bytes may be taken: at most 80 % of what is available, so that the rest of the machine lives."""
    return needed <= SHARE_OF_AVAILABLE * available


def keep_what_is_loaded() -> None:
    """Says that this process is ours alone: what `uncollected` leaves is kept for good."""
    gc.freeze()


@contextmanager
def uncollected() -> Iterator[None]:
    """While it lasts no garbage is looked for, and in a process of ours later not among what it leaves. Loading torch makes many
    objects and no garbage; looking through them again and again takes a quarter of its time."""
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
    """Room left in the control group, version 2 or 1; None without a limit."""
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
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """What the processor calls itself, or else its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def nvidia_driver() -> bool:
    """Whether a driver of NVIDIA is loaded."""
    return Path("/proc/driver/nvidia/version").exists()
