"""The devices that torch can use here, and its settings that change numbers without a word."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from mhacli.compute.doctor.libraries import cpu, nvidia_driver
from mhacli.errors import MhaError
from mhacli.results.doctor import Device, HealthCheck

_EXACT = "highest"
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def n_threads() -> int:
    """The threads that torch computes with on the CPU."""
    return torch.get_num_threads()


def devices(asked: str) -> tuple[Device, ...]:
    """Every device here, the CPU first; of `asked` other than auto that one alone. Raises `MhaError` where it is not here."""
    found = [cpu()]
    if torch.cuda.is_available():
        found += [_cuda(index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append(Device("mps", "Apple's GPU, in the same memory", None, None))
    if asked == "auto":
        return tuple(found)
    name = "cuda:0" if asked == "cuda" else asked
    chosen = tuple(one for one in found if one.name == name)
    if not chosen:
        raise MhaError(
            f"device {asked} must be present, got {', '.join(one.name for one in found)}",
            hint="mha doctor without --device says why" if nvidia_driver() else "--device cpu works everywhere",
            code="no-device",
        )
    return chosen


def _cuda(index: int) -> Device:
    about = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    what = f"{about.name}, capability {about.major}.{about.minor}, CUDA {torch.version.cuda or torch.version.hip}"
    return Device(f"cuda:{index}", what, total, free)


def check_settings(present: Sequence[Device]) -> list[HealthCheck]:
    """What is switched on or off in torch, for this process and by the environment."""
    return [_build(present), _precision(), _default_dtype(), _deterministic(present)]


def _build(present: Sequence[Device]) -> HealthCheck:
    """Whether a graphics card that is here is one that this build of torch can use."""
    has_cuda = any(one.name.startswith("cuda") for one in present)
    if not nvidia_driver() or has_cuda or torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        return HealthCheck("build", True, f"torch {torch.__version__}, {f'CUDA {built}' if built else 'for CPUs'}")
    why = "was built without CUDA" if torch.version.cuda is None else "cannot use it"
    return HealthCheck(
        "build", None, f"a driver of NVIDIA is here, and torch {torch.__version__} {why}", is_caution=True,
        advice="install the build of torch for this driver, as pytorch.org tells it, or leave the card alone",
    )  # fmt: skip


def _precision() -> HealthCheck:
    """Whether products of float32 are computed in float32."""
    said = torch.get_float32_matmul_precision()
    if said == _EXACT and not torch.backends.cuda.matmul.allow_tf32:
        return HealthCheck("precision", True, "products of float32 are computed in float32 (TF32 is off)")
    given = [name for name in ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE") if os.environ.get(name)]
    return HealthCheck(
        "precision", False, f"products of float32 may be rounded to TF32 or bfloat16: torch's precision is {said!r}",
        meaning="Numbers in float32 are good to three digits instead of seven.",
        advice=f"unset {given[0]}" if given else "torch.set_float32_matmul_precision('highest') where it was changed",
    )  # fmt: skip


def _default_dtype() -> HealthCheck:
    kind = str(torch.get_default_dtype()).removeprefix("torch.")
    if kind == "float32":
        return HealthCheck("default-dtype", True, "torch makes tensors of float32")
    return HealthCheck(
        "default-dtype", False, f"torch makes tensors of {kind} where nothing else is said",
        meaning="Masks, positions and weights may be made in another dtype than the model's.",
        advice="look for torch.set_default_dtype in what Python loads at its start (sitecustomize), and take it out",
    )  # fmt: skip


def _deterministic(present: Sequence[Device]) -> HealthCheck:
    is_on = torch.are_deterministic_algorithms_enabled()
    has_cuda = any(one.name.startswith("cuda") for one in present)
    if is_on and has_cuda and not os.environ.get(_WORKSPACE):
        return HealthCheck(
            "deterministic", False, f"deterministic algorithms are asked for, and {_WORKSPACE} is not set",
            meaning="Products on CUDA raise an error.", advice=f"set {_WORKSPACE}=:4096:8 before torch is loaded",
        )  # fmt: skip
    return HealthCheck("deterministic", True, f"deterministic algorithms are {'on' if is_on else 'off, as by default'}")
