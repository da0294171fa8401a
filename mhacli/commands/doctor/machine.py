"""Torch on this machine: its devices and threads, and attention in each dtype against float64."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence

import torch

from mhacli.attention import masks
from mhacli.attention.block import c_block
from mhacli.attention.core import attend
from mhacli.attention.devices import choose_device, driver, free_bytes
from mhacli.attention.fused import fused_attend
from mhacli.commands.check import HealthCheck
from mhacli.commands.doctor.result import Device
from mhacli.io.data import finite
from mhacli.io.memory import cpu_name, n_cpus
from mhacli.io.progress import Progress
from mhacli.record.checks import TOLERANCES
from mhacli.settings import Dtype

_SIZE = (2, 6, 97, 48)
_OVERRIDES = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")


def devices_of(requested: str) -> tuple[Device, ...]:
    """All devices, or one by its name. Raises `MhaError` if it is missing."""
    names = [requested]
    if requested == "auto":
        names = ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]
        names += ["mps"] if torch.backends.mps.is_available() else []
    return tuple(_device(name) for name in names)


def _device(name: str) -> Device:
    cores, total = n_cpus(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    what = f"{cpu_name()}, {cores} core{'s' * (cores != 1)}"
    if choose_device(name).type == "cuda":
        about = torch.cuda.get_device_properties(name)
        version, total = torch.version.cuda or torch.version.hip, about.total_memory
        what = f"{about.name}, capability {about.major}.{about.minor}, CUDA {version}"
    return Device(name, what, total, free_bytes(name))


def _row(
    name: str, message: str, advice: str = "", *, value: int | None = None, most: int | None = None
) -> HealthCheck:
    """A check that passes, or is a warning with advice."""
    return HealthCheck(name, None if advice else True, message, value, most, is_caution=advice != "", advice=advice)


def check_machine(
    devices: Sequence[Device], dtype: Dtype | None, seed: int, report_progress: Progress
) -> Iterator[HealthCheck]:
    """The checks of devices, threads and the block of statistics, and of attention in every dtype or one."""
    built = torch.version.cuda or torch.version.hip
    message = f"{', '.join(each.name for each in devices)}: torch {torch.__version__}, {f'CUDA {built}' if built else 'for CPUs'}"
    advice = ""
    if driver() and not torch.cuda.is_available():
        message += "; it cannot use the GPU of the NVIDIA driver that is here"
        advice = "install the build of torch for this driver (pytorch.org lists them), or ignore this"
    yield _row("devices", message, advice)
    n, cores, stated = torch.get_num_threads(), n_cpus(), os.environ.get("OMP_NUM_THREADS", "")
    most = max(n, int(stated) if stated.isdecimal() else 0)  # more than cores are slow, but not wrong
    message = f"{n} of {cores} cores (OMP_NUM_THREADS{'=' + stated if stated else ' is not set'})"
    advice = f"set OMP_NUM_THREADS={cores}, or leave it out" if most > cores else ""
    yield _row("threads", message, advice, value=most, most=cores)
    message = "the compiled block (C) computes the statistics of heads"
    if c_block() is None:
        message = "torch computes the statistics of heads: there is no compiled block (C), or MHA_BLOCK=torch"
    yield _row("statistics", message)
    if torch.get_default_dtype() != torch.float32:
        message = f"torch's default dtype is {torch.get_default_dtype()}, not float32"
        yield _row("default dtype", message, "leave out torch.set_default_dtype")
    dtypes = [*TOLERANCES][::-1] if dtype is None else [dtype]
    places = [(each.name, kind) for each in devices for kind in dtypes if (each.name, kind) != ("mps", "float64")]
    for place, (name, kind) in enumerate(places):
        report_progress(place / len(places), f"{name} {kind}")
        yield _check_attention(name, kind, seed)


def _check_attention(device: str, dtype: str, seed: int) -> HealthCheck:
    """Whether causal attention by its definition and by torch's kernel is what float64 gives for the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randn(_SIZE, generator=generator, dtype=torch.float64).to(getattr(torch, dtype)) for _ in range(3)]
    exact = attend(*(each.double() for each in numbers), allowed=masks.causal())
    most = TOLERANCES[dtype].output * max(1.0, float(exact.abs().max()))
    q, k, v = (each.to(device) for each in numbers)
    message, error = "its definition and torch's kernel agree with float64", math.inf
    precision = torch.get_float32_matmul_precision()
    try:
        results = attend(q, k, v, allowed=masks.causal()), fused_attend(q, k, v, causal=True)
        error = max(float((z.cpu().double() - exact).abs().nan_to_num(nan=math.inf).max()) for z in results)
        message = "its definition or torch's kernel differs from float64" if error > most else message
    except RuntimeError as fault:
        message = f"it raises an error: {fault!s:.200}"
    advice = "" if error <= most else "use another dtype, device or release of torch"
    if dtype == "float32" and (precision != "highest" or torch.backends.cuda.matmul.allow_tf32):
        message = f"products may be rounded to TF32 or bfloat16: torch's precision is {precision!r}"
        stated = [f"unset {variable}" for variable in _OVERRIDES if os.environ.get(variable)]
        advice = [*stated, "torch.set_float32_matmul_precision('highest') where it was changed"][0]
    meaning = "Numbers that mha computes in this dtype are less exact than they should be." if advice else ""
    name = f"attention {device} {dtype}"
    return HealthCheck(name, not advice, message, finite(error), most, meaning=meaning, advice=advice)
