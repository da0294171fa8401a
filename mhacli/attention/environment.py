"""The versions, the device and the threads of a run."""

import platform
from pathlib import Path

import numpy
import torch

import mhacli
from mhacli.io import memory
from mhacli.record.record import Environment

from .on_device import compiler_on


def environment(device: torch.device, requested: str) -> Environment:
    """The environment of a run: versions, device and threads."""
    return Environment(
        mha=mhacli.__version__,
        torch=str(torch.__version__),
        numpy=numpy.__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        device=str(device),
        device_name=torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else memory.cpu_name(),
        device_asked=requested,
        threads=torch.get_num_threads(),
        kernels=compiler_on(device),
    )


def driver() -> str | None:
    """The version of NVIDIA's driver, or None."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(errors="replace").split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)
