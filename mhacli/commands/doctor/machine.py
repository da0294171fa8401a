"""Torch on this machine: its devices and threads, and attention in each dtype against float64."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from mhacli.attention import masks
from mhacli.attention.block import c_block
from mhacli.attention.core import attend
from mhacli.attention.devices import choose_device, driver, environment, free_bytes
from mhacli.commands.check import HealthCheck
from mhacli.io.files import format_size
from mhacli.io.memory import n_cpus
from mhacli.record.checks import TOLERANCES
from mhacli.settings import Dtype

_SIZE = (2, 6, 97, 48)
_TF32 = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")


def examine_machine(
    requested: str, dtype: Dtype | None, seed: int
) -> tuple[tuple[Mapping[str, Any], ...], list[HealthCheck]]:
    """All devices, or one by its name, and the checks of devices, threads and the block of statistics, and of attention in every
    dtype or one. Raises `MhaError` if the device is missing."""
    names = [requested]
    if requested == "auto":
        names = ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]
        names += ["mps"] if torch.backends.mps.is_available() else []
    devices = tuple(_device(name) for name in names)
    described = [f"{each['name']}: {each['what']}, {format_size(each['free_bytes'])} free" for each in devices]
    is_unused = driver() is not None and not torch.cuda.is_available()
    advice = "this torch cannot use the NVIDIA GPU that is here: pytorch.org lists the build for its driver"
    checks = [_row("devices", "; ".join(described), advice if is_unused else "")]
    n, cores, stated = torch.get_num_threads(), n_cpus(), os.environ.get("OMP_NUM_THREADS", "")
    most = max(n, int(stated) if stated.isdecimal() else 0)  # more than cores are slow, but not wrong
    message = f"{n} of {cores} cores (OMP_NUM_THREADS{'=' + stated if stated else ' is not set'})"
    advice = f"set OMP_NUM_THREADS={cores}, or leave it out" if most > cores else ""
    checks.append(_row("threads", message, advice, most, cores))
    blocks = ["torch", "the compiled block"] if c_block() is None else ["the compiled block", "torch"]
    checks.append(_row("statistics", f"{blocks[0]} computes statistics of heads, not {blocks[1]}"))
    if torch.get_default_dtype() != torch.float32:
        message = f"torch's default dtype is {torch.get_default_dtype()}, not float32"
        checks.append(_row("default dtype", message, "leave out torch.set_default_dtype"))
    dtypes = [*TOLERANCES][::-1] if dtype is None else [dtype]
    pairs = [(name, kind) for name in names for kind in dtypes if (name, kind) != ("mps", "float64")]
    return devices, [*checks, *(_check_attention(name, kind, seed) for name, kind in pairs)]


def _device(name: str) -> Mapping[str, Any]:
    device, total = choose_device(name), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    what = environment(device, name).device_name
    return {"name": name, "what": what, "total_bytes": total, "free_bytes": free_bytes(name)}


def _row(name: str, message: str, advice: str = "", value: int | None = None, most: int | None = None) -> HealthCheck:
    """A check that passes, or is a warning with advice."""
    return HealthCheck(name, None if advice else True, message, value, most, is_caution=advice != "", advice=advice)


def _check_attention(device: str, dtype: str, seed: int) -> HealthCheck:
    """Whether causal attention by its definition and by torch's kernel is what float64 gives for the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randn(_SIZE, generator=generator, dtype=torch.float64).to(getattr(torch, dtype)) for _ in range(3)]
    exact = attend(*(each.double() for each in numbers), allowed=masks.causal())
    most = TOLERANCES[dtype].output * max(1.0, float(exact.abs().max()))
    q, k, v = (each.to(device) for each in numbers)
    error, advice = math.inf, ""
    try:
        results = attend(q, k, v, allowed=masks.causal()), scaled_dot_product_attention(q, k, v, is_causal=True)
        error = max(float((z.cpu().double() - exact).abs().nan_to_num(nan=math.inf).max()) for z in results)
        message = f"its definition or torch's kernel differs from float64 by {error:.1e}; rounding explains {most:.1e}"
    except RuntimeError as fault:
        message = f"it raises an error: {fault!s:.200}"
    if error > most:
        advice = "use another dtype, device or release of torch"
    precision = torch.get_float32_matmul_precision()
    if dtype == "float32" and (precision != "highest" or torch.backends.cuda.matmul.allow_tf32):
        message = f"products may be rounded to TF32 or bfloat16: torch's precision is {precision!r}"
        advice = f"unset {' and '.join(_TF32)}, or torch.set_float32_matmul_precision('highest')"
    return HealthCheck(f"attention {device} {dtype}", not advice, message, error, most, advice=advice)
