"""The device of a computation: choice, free memory, description and threads."""

import platform
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy
import torch

import mhacli
from mhacli.errors import MhaError
from mhacli.io import memory
from mhacli.record.record import Environment


def choose_device(name: str, option: str = "--device") -> torch.device:
    """The torch device for a name; `auto` takes CUDA, then MPS, then the CPU.

    Raises `MhaError` if torch or the machine lacks the device; the message names `option`.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        # torch says nothing readable about it
        if name == "mps" and not torch.backends.mps.is_available():
            raise RuntimeError("this machine, or this build of torch, has no MPS")
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as fault:
        raise MhaError(
            f"{option} {name} is not available: " + str(fault).partition("\n")[0],
            hint="--device cpu works everywhere",
            code="no-device",
        ) from None
    return torch.device(name)


def free_bytes(device: torch.device) -> int:
    """The bytes that a run may still allocate on the device.

    The unused part of torch's cache of GPU memory counts as free.
    """
    if device.type != "cuda":
        return memory.available_bytes()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def environment(device: torch.device, requested: str) -> Environment:
    """The environment of a run: versions, device and threads."""
    from .on_device import compiler_on  # which needs this file

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


# ------------------------------------------------------------------------------------------ threads


T = TypeVar("T")


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread within the context, which is as fast as several for little
    work.
    """
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


def shared_out(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """The results of the jobs in order, without gradients. They run in parallel, in as many threads
    as torch has.
    """
    n_threads = min(torch.get_num_threads(), len(jobs))
    with (
        one_thread(),
        ThreadPoolExecutor(n_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool,
    ):
        return list(
            pool.map(lambda job: torch.no_grad()(job)(), jobs)
        )  # gradients are off in one thread alone
