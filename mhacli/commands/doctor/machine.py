"""Torch on this machine: its devices, and attention in each dtype against float64."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mhacli.attention import masks
from mhacli.attention.core import attend
from mhacli.attention.fused import fused_attend
from mhacli.commands.check import HealthCheck
from mhacli.commands.doctor.result import Device
from mhacli.errors import MhaError
from mhacli.io.data import finite
from mhacli.io.memory import nvidia_driver
from mhacli.io.progress import Progress
from mhacli.record.checks import TOLERANCES
from mhacli.settings import Dtype

_DTYPES: tuple[Dtype, ...] = ("float64", "float32", "float16", "bfloat16")
_SIZE = (2, 6, 97, 48)


# ------------------------------------------------------------------------------------------------------------------ devices


def n_threads() -> int:
    """The number of torch's CPU threads."""
    return torch.get_num_threads()


def devices(name_or_auto: str, cpu: Device) -> tuple[Device, ...]:
    """Every device, the CPU first, or only the requested one. Raises `MhaError` if it is missing."""
    present = [cpu]
    if torch.cuda.is_available():
        present += [_cuda(index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        present.append(Device("mps", "Apple GPU, which shares the memory of the CPU", None, None))
    if name_or_auto == "auto":
        return tuple(present)
    name = "cuda:0" if name_or_auto == "cuda" else name_or_auto
    chosen = tuple(device for device in present if device.name == name)
    if not chosen:
        raise MhaError(
            f"--device {name_or_auto}: there is no such device here, only {', '.join(device.name for device in present)}",
            hint="mha doctor without --device says why" if nvidia_driver() else "--device cpu works everywhere",
            code="no-device",
        )
    return chosen


def _cuda(index: int) -> Device:
    about = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    what = f"{about.name}, capability {about.major}.{about.minor}, CUDA {torch.version.cuda or torch.version.hip}"
    return Device(f"cuda:{index}", what, total, free)


def check_devices(present: Sequence[Device]) -> HealthCheck:
    """Whether this build of torch supports the graphics card, if there is one."""
    built = torch.version.cuda or torch.version.hip
    if not nvidia_driver() or torch.cuda.is_available():
        message = f"torch {torch.__version__}, {f'CUDA {built}' if built else 'for CPUs'}"
        return HealthCheck("devices", True, f"{', '.join(device.name for device in present)}: {message}")
    why = "cannot use it" if built else "was built without CUDA"
    return HealthCheck(
        "devices", None, f"there is an NVIDIA driver, but torch {torch.__version__} {why}", is_caution=True,
        advice="install the build of torch for this driver (pytorch.org lists them), or ignore this",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- attention


def check_attention(
    present: Sequence[Device], dtype: Dtype | None, seed: int, report_progress: Progress
) -> Iterator[HealthCheck]:
    """Attention on every device, in every dtype or one."""
    places = [(device.name, kind) for device in present for kind in (_DTYPES if dtype is None else (dtype,))]
    for n, (device, kind) in enumerate(places):
        report_progress(n / len(places), f"{device} {kind}")
        if device != "mps" or kind != "float64":  # MPS lacks float64
            yield _check_attention(torch.device(device), kind, seed)


def _check_attention(device: torch.device, dtype: Dtype, seed: int) -> HealthCheck:
    """Whether causal attention by its definition and by torch's kernel is what float64 gives for the same numbers."""
    name, tolerance = f"attention {device} {dtype}", TOLERANCES[dtype]
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randn(_SIZE, generator=generator, dtype=torch.float64).to(getattr(torch, dtype)) for _ in range(3)]
    exact = attend(*(tensor.double() for tensor in numbers), allowed=masks.causal())
    patterns: list[Tensor] = []

    def tap(site: str, tensor: Tensor, **where: object) -> None:
        patterns.extend([tensor.detach().cpu().double()] if site == "pattern" else [])

    q, k, v = (tensor.to(device) for tensor in numbers)
    try:
        outputs = {
            "its definition": attend(q, k, v, allowed=masks.causal(), tap=tap),
            "torch's kernel": fused_attend(q, k, v, causal=True),
        }
    except RuntimeError as fault:
        reason = next(iter(str(fault).splitlines()), type(fault).__name__)
        return HealthCheck(name, False, f"it raises an error: {reason:.200}", meaning=_MEANING, advice=_ADVICE)
    errors = {how: _largest(out.detach().cpu().double() - exact) for how, out in outputs.items()}
    worst, most = max(errors, key=lambda how: errors[how]), tolerance.output * max(1.0, float(exact.abs().max()))
    row_sums, masked = _largest(patterns[0].sum(dim=-1) - 1), _largest(patterns[0].triu(1))
    faults = [] if errors[worst] <= most else [f"{worst} differs from float64"]
    faults += [] if row_sums <= tolerance.row_sum else [f"row sums differ from 1 by {row_sums:.2g}"]
    faults += [] if masked == 0 else [f"a masked cell has the weight {masked:.2g}"]
    if faults:
        return HealthCheck(
            name, False, "; ".join(faults), finite(errors[worst]), most, meaning=_MEANING, advice=_ADVICE
        )
    if dtype == "float32" and (is_rounded := _rounded_products(name, errors[worst], most)) is not None:
        return is_rounded
    return HealthCheck(name, True, "its definition and torch's kernel agree with float64", errors[worst], most)


_MEANING = "Every number that mha shows in this dtype is in doubt."
_ADVICE = "use another dtype, device or release of torch"


def _rounded_products(name: str, error: float, most: float) -> HealthCheck | None:
    """The failed check if products of float32 may be computed in fewer digits."""
    precision = torch.get_float32_matmul_precision()
    if precision == "highest" and not torch.backends.cuda.matmul.allow_tf32:
        return None
    overrides = [name for name in ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE") if os.environ.get(name)]
    return HealthCheck(
        name, False, f"products may be rounded to TF32 or bfloat16: torch's precision is {precision!r}", error, most,
        meaning="Numbers in float32 are good to three digits instead of seven.",
        advice=f"unset {overrides[0]}" if overrides else "torch.set_float32_matmul_precision('highest') where it was changed",
    )  # fmt: skip


def _largest(numbers: Tensor) -> float:
    """The largest absolute value; infinite if one is not finite."""
    largest = numbers.abs().max().item()
    return largest if math.isfinite(largest) else math.inf
