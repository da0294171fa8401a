"""The device that a study runs on: which one a name means, what it has room for, and how it is called."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy
import torch

import mhacli
from mhacli.errors import MhaError
from mhacli.io import memory
from mhacli.results.record.measures import Environment


def choose_device(name: str) -> torch.device:
    """The device that a config's name means; `auto` takes CUDA, then MPS, then the CPU.

    Raises `MhaError` that says whether torch or the machine lacks the device.
    """
    if name == "auto":
        return torch.device(
            "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        )
    kind, _, index = name.partition(":")
    if kind == "cuda":
        _require_cuda(name, int(index or 0))
    if kind == "mps" and not torch.backends.mps.is_available():
        built = "this machine has no such device" if torch.backends.mps.is_built() else "this build of torch has no MPS"
        raise MhaError(
            f"device mps must be present, got none: {built}", hint="--device cpu works everywhere", code="no-device"
        )
    return torch.device(name)


def free_bytes(device_name: str) -> int:
    """What a run on the device may still allocate: the device's own memory where it has its own.

    What torch keeps there for later use counts as free.
    """
    device = choose_device(device_name)
    if device.type != "cuda":
        return memory.available_bytes()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def _require_cuda(name: str, index: int) -> None:
    if torch.version.cuda is None and torch.version.hip is None:
        why = f"this build of torch ({torch.__version__}) has no CUDA"
    elif not torch.cuda.is_available():
        why = "this machine has no CUDA device that torch can use"
    elif index >= torch.cuda.device_count():
        why = f"this machine has {torch.cuda.device_count()}, numbered from 0"
    else:
        return
    raise MhaError(
        f"device {name} must be present, got none: {why}", hint="--device cpu works everywhere", code="no-device"
    )


def environment(device: torch.device, asked: str) -> Environment:
    """Where a study runs: versions, device and threads."""
    return Environment(
        mha=mhacli.__version__,
        torch=torch.__version__,
        numpy=numpy.__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        device=str(device),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        device_asked=asked,
        threads=torch.get_num_threads(),
    )


def cpu_name() -> str:
    """What the processor calls itself, or else its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def driver() -> str | None:
    """The version of NVIDIA's driver; None without one."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(errors="replace").split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)
