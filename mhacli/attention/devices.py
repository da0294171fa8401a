"""The device of a computation: choice, free memory, description and threads."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from mhacli.errors import MhaError
from mhacli.io import memory


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


# ----------------------------------------------------------------------------------------- waiting


def backend_of(device: torch.device) -> Any:
    """torch's module for a kind of device, such as `torch.cuda`, which can wait for it; None for
    kinds without one.
    """
    return getattr(torch, device.type, None)


def has_numbers(device: torch.device) -> bool:
    """Whether tensors on a device have numbers: those on the device meta have shapes alone."""
    return device.type != "meta" or backend_of(device) is not None


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device, which is not waited for."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def sent(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a device as tensors of the CPU, by one copy, whose numbers are there after
    `wait_for` the device. Those of the CPU are given as they are.
    """
    by_dtype = defaultdict[torch.dtype, list[str]](list)
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            by_dtype[tensor.dtype].append(name)
    if not by_dtype:
        return dict(tensors)
    # the widest numbers first: each then begins at a multiple of its width
    dtypes = sorted(by_dtype, key=lambda dtype: -dtype.itemsize)
    names = [name for dtype in dtypes for name in by_dtype[dtype]]
    packed = torch.cat([tensors[name].reshape(-1).view(torch.uint8) for name in names])
    is_pinned = packed.device.type == "cuda"
    buffer = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=is_pinned)
    buffer.copy_(packed, non_blocking=True)
    result, start = dict(tensors), 0
    for dtype in dtypes:
        of_dtype = [tensors[name] for name in by_dtype[dtype]]
        end = start + sum(tensor.nbytes for tensor in of_dtype)
        parts = buffer[start:end].view(dtype).split([tensor.numel() for tensor in of_dtype])
        for name, tensor, part in zip(by_dtype[dtype], of_dtype, parts, strict=True):
            result[name] = part.view(tensor.shape)
        start = end
    return result


def wait_for(device: torch.device) -> None:
    """Waits until a device has computed all that it was asked for."""
    if (backend := backend_of(device)) is not None and device.type != "cpu":
        of_device = (device,) if device.type == "cuda" else ()
        backend.synchronize(*of_device)


def is_autocast_on(device: torch.device) -> bool:
    """Whether autocast is on for a device, some of which have none."""
    kind = device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """A context without autocast on a device."""
    with torch.autocast(device.type, enabled=False) if is_autocast_on(device) else nullcontext():
        yield


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
    as torch has; a single one in this thread.
    """
    n_threads = min(torch.get_num_threads(), len(jobs))
    if n_threads == 1:
        with one_thread(), torch.no_grad():
            return [job() for job in jobs]
    with (
        one_thread(),
        ThreadPoolExecutor(n_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool,
    ):
        return list(
            pool.map(lambda job: torch.no_grad()(job)(), jobs)
        )  # gradients are off in one thread alone
