"""Torch on this machine: its devices and threads, and attention in each dtype against float64."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from mhacli.attention import masks
from mhacli.attention.block import c_block
from mhacli.attention.core import attend
from mhacli.attention.devices import choose_device, free_bytes
from mhacli.attention.environment import driver, environment
from mhacli.attention.on_device import reducer_on, runs_kernels
from mhacli.attention.taps import largest_difference
from mhacli.io.memory import n_cpus
from mhacli.numbers import shown
from mhacli.record.checks import TOLERANCES
from mhacli.settings import Dtype

from .result import HealthCheck

_SIZE = (2, 6, 97, 48)


def find_devices(requested: str) -> Iterator[Mapping[str, Any]]:
    """All devices for `auto`, or one by its name. Raises `MhaError` if it is missing."""
    names = [requested]
    if requested == "auto":
        names = ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]
        if torch.backends.mps.is_available():
            names.append("mps")
    for name in names:
        device = choose_device(name)
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
        what = environment(device, name).device_name
        yield {"name": name, "what": what, "total_bytes": total, "free_bytes": free_bytes(device)}


def check_machine(
    devices: Sequence[Mapping[str, Any]], dtype: Dtype | None, seed: int
) -> Iterator[HealthCheck]:
    """The checks of devices, threads and the block of statistics, and of attention in every dtype
    or one.
    """
    descriptions = "; ".join(
        f"{each['name']}: {each['what']}, {shown(each['free_bytes'], 'bytes')} free"
        for each in devices
    )
    advice = ""
    if driver() is not None and not torch.cuda.is_available():
        advice = (
            "this torch cannot use the NVIDIA GPU that is here: pytorch.org lists the build for its"
            " driver"
        )
    yield _row("devices", descriptions, advice)
    yield _check_threads()
    reducer = "torch" if c_block() is None else "the compiled block"
    words = [f"{reducer} computes statistics of heads"]
    gpus = [each["name"] for each in devices if runs_kernels(torch.device(each["name"]))]
    words += [f"on {name} {reducer_on(torch.device(name))}" for name in gpus]
    yield _row("statistics", "; ".join(words))
    default = torch.get_default_dtype()
    if default != torch.float32:
        message = f"torch's default dtype is {default}, not float32"
        yield _row("default dtype", message, "leave out torch.set_default_dtype")
    for device in devices:
        for kind in reversed(list(TOLERANCES)) if dtype is None else (dtype,):
            if (device["name"], kind) != ("mps", "float64"):  # which MPS lacks
                yield _check_attention(device["name"], kind, seed)


def _check_threads() -> HealthCheck:
    """Whether torch has no more threads than there are cores: more are slow, but not wrong."""
    n, cores = torch.get_num_threads(), n_cpus()
    stated = os.environ.get("OMP_NUM_THREADS", "")
    most = max(n, int(stated)) if stated.isdecimal() else n
    setting = f"={stated}" if stated else " is not set"
    advice = f"set OMP_NUM_THREADS={cores}, or leave it out" if most > cores else ""
    return _row("threads", f"{n} of {cores} cores (OMP_NUM_THREADS{setting})", advice, most, cores)


def _row(
    name: str, message: str, advice: str = "", value: int | None = None, most: int | None = None
) -> HealthCheck:
    """A check that passes, or is a warning with advice."""
    return HealthCheck(
        name, None if advice else True, message, value, most, is_caution=advice != "", advice=advice
    )


def _check_attention(device: str, dtype: str, seed: int) -> HealthCheck:
    """Whether causal attention by its definition and by torch's kernel is what float64 gives for
    the same numbers.
    """
    numbers = torch.randn(
        3, *_SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    numbers = numbers.to(getattr(torch, dtype))
    exact = attend(*numbers.double(), allowed=masks.causal())
    q, k, v = numbers.to(device)
    most = TOLERANCES[dtype].output * max(1.0, float(exact.abs().max()))
    try:
        results = (
            attend(q, k, v, allowed=masks.causal()),
            scaled_dot_product_attention(q, k, v, is_causal=True),
        )
        error = max(largest_difference(z, exact) for z in results)
        message = "difference from float64"
    except RuntimeError as fault:
        error, message = math.inf, f"it raises an error: {fault!s:.200}"
    advice = "use another dtype, device or release of torch" if error > most else ""
    precision = torch.get_float32_matmul_precision()
    if dtype == "float32" and precision != "highest":
        message = f"products may be rounded to TF32 or bfloat16: torch's precision is {precision!r}"
        advice = "unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and NVIDIA_TF32_OVERRIDE"
        advice += ", or torch.set_float32_matmul_precision('highest')"
    return HealthCheck(
        f"attention {device} {dtype}", not advice, message, error, most, advice=advice
    )
