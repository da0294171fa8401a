"""The memory that a backend takes beyond its inputs: on the CPU, the high-water mark of a fresh process for each size.

The processes are copies of one that has loaded torch and computed nothing, so each starts in milliseconds. That one is
this module run as a program: a size per line comes in, and what became of it goes out.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

import torch

from mhacli.attention.backends import Prepared, draw_heads, explained, outcome_of, prepare
from mhacli.io.files import temporary_folder
from mhacli.results.bench.result import Status
from mhacli.results.bench.workload import Workload

_SURROUNDINGS = {"MALLOC_MMAP_THRESHOLD_": "65536", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Blocks from this size on are given back at once, so that the mark shows what was needed at one time; one process compiles."""

_PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h."""


class MemoryUse(NamedTuple):
    """How a fresh process fared; the bytes are None where the system does not tell."""

    status: Status
    extra_bytes: int | None
    reason: str | None = None


def cuda_memory_use(prepared: Prepared, workload: Workload) -> int:
    """Bytes beyond the inputs, from CUDA's own allocator."""
    device = prepared.leaves[0].device
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    prepared.once(workload.direction)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before + prepared.mask_bytes


class FreshProcesses:
    """Runs sizes on the CPU, each in a process of its own."""

    def __init__(self, parent: subprocess.Popen[str]) -> None:
        self._parent = parent

    def memory_use(self, backend: str, workload: Workload, seed: int) -> MemoryUse:
        """What became of it; a process that the system kills, for memory most likely, is `out-of-memory`."""
        asked = {"backend": backend, "workload": asdict(workload), "seed": seed, "threads": torch.get_num_threads()}
        to, answers = cast(TextIO, self._parent.stdin), cast(TextIO, self._parent.stdout)
        try:
            to.write(json.dumps(asked) + "\n")
            to.flush()
            return MemoryUse(*json.loads(answers.readline()))
        except (OSError, ValueError):
            return MemoryUse("ok", None, "the process to measure memory in has ended")


@contextmanager
def fresh_processes() -> Iterator[FreshProcesses]:
    """A process that loads torch and waits to be copied; it ends with the context, or with this process."""
    words = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with temporary_folder() as folder:
        surroundings = os.environ | _SURROUNDINGS | {"TORCHINDUCTOR_CACHE_DIR": folder}
        with subprocess.Popen(words, text=True, env=surroundings, **pipes) as parent:
            try:
                yield FreshProcesses(parent)
            finally:
                parent.kill()
                with suppress(OSError):  # what it never read
                    cast(TextIO, parent.stdin).close()


def serve() -> None:
    """Answers each line of stdin, a size, with what became of a copy of this process that ran it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not come between the answers
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a long call must not outlive who asked for it
            found = _measured(asked["backend"], Workload(**asked["workload"]), asked["seed"], asked["threads"])
            print(json.dumps(found), file=answers, flush=True)
            os._exit(0)
        _, ended = os.waitpid(child, 0)
        if ended:
            status = "out-of-memory" if os.WIFSIGNALED(ended) and os.WTERMSIG(ended) == signal.SIGKILL else "failed"
            print(json.dumps((status, None, f"its own process ended with {ended}")), file=answers, flush=True)


def _measured(backend: str, workload: Workload, seed: int, threads: int) -> MemoryUse:
    """Once to warm up, once to measure."""
    torch.set_num_threads(threads)
    try:
        with explained(backend):
            prepared = prepare(backend, workload, draw_heads(workload, torch.device("cpu"), seed), seed)
            prepared.once(workload.direction)
        before = _reset_mark()
        kept = prepared.once(workload.direction)
        after = _status_bytes("VmHWM")
        del kept
    except Exception as fault:
        status, reason = outcome_of(fault)
        return MemoryUse(status, None, reason)
    if before is None or after is None:
        return MemoryUse("ok", None)
    return MemoryUse("ok", max(0, after - before) + prepared.mask_bytes)


def _reset_mark() -> int | None:
    """The resident bytes now, with the high-water mark set back to them; None where the system cannot."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return None
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
