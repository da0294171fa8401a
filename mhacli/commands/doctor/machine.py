"""Torch on this machine: devices, settings, and the errors of every backend and of `attend` against float64."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from mhacli.attention import masks
from mhacli.attention.core import attend
from mhacli.attention.fused import kernel_among, operators_of
from mhacli.attention.tiled.reducer import kernel_fault
from mhacli.commands.bench.backends import (
    Exact,
    HeadTensors,
    deviation,
    draw_heads,
    exact_answer,
    explained,
    outcome_of,
    prepare,
)
from mhacli.commands.bench.workload import BACKENDS, COMPILED, Workload
from mhacli.commands.doctor.result import Device, HealthCheck, Kernel, Numerics
from mhacli.compute.base.devices import one_thread
from mhacli.errors import MhaError
from mhacli.io.data import finite
from mhacli.io.memory import nvidia_driver
from mhacli.io.progress import Progress
from mhacli.record.checks import TOLERANCES
from mhacli.settings import Dtype

DTYPES: tuple[Dtype, ...] = ("float64", "float32", "float16", "bfloat16")
_ALWAYS_THERE = ("explicit", "sdpa", "math", "tiled", "torch-mha", "torch-mha-weights")
"""Backends that run wherever torch does. Other kernels may be missing even if torch accepts being forced to use them."""
_SIZE = {"batch": 2, "n_heads": 6, "n_kv_heads": 6, "d_head": 64, "q_len": 130, "k_len": 130}
_MOST_FLOPS = 1e12
_WITH_ALL_THREADS = "float32"
"""The dtype tested with all threads. In the others the products are as small, and threads would only wait for each
other."""
_LOUD = 1000.0


def measure(
    devices: Sequence[str], dtype: Dtype | None, *, seed: int, compiles: bool, report_progress: Progress
) -> tuple[tuple[Kernel, ...], tuple[Numerics, ...]]:
    """Both tables, with rows by device and dtype."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise torch's profiler writes to stderr
    dtypes = DTYPES if dtype is None else (dtype,)
    places = [(device, kind) for device in devices for kind in dtypes]
    kernels: list[Kernel] = []
    numerics: list[Numerics] = []
    for place, (device, kind) in enumerate(places):
        report_progress(place / len(places), f"{device} {kind}")
        if device == "mps" and kind == "float64":  # MPS lacks float64
            continue
        with nullcontext() if kind == _WITH_ALL_THREADS else one_thread():
            kernels += _kernels(torch.device(device), kind, seed, compiles)
            numerics.append(numerics_of(torch.device(device), kind, seed))
    return tuple(kernels), tuple(numerics)


# ----------------------------------------------------------------------------------------------------------------- kernels


def _kernels(device: torch.device, dtype: Dtype, seed: int, compiles: bool) -> list[Kernel]:
    workload = Workload(**_SIZE, dtype=dtype, causal=True, direction="forward")
    heads = draw_heads(workload, device, seed)
    shared: list[Exact] = []
    return [_kernel(name, workload, heads, seed, shared, compiles=compiles) for name in BACKENDS]


def _kernel(
    backend: str, workload: Workload, heads: HeadTensors, seed: int, shared: list[Exact], *, compiles: bool
) -> Kernel:
    """A backend against the exact answer. `shared` caches the answer for backends that take the heads unchanged."""
    device, dtype = str(heads[0].device), workload.dtype
    if backend in COMPILED and not compiles:
        return Kernel(
            device, dtype, backend, "not tried", None, reason="takes seconds to compile; --compile includes it"
        )
    try:
        with explained(backend):
            prepared = prepare(backend, workload, heads, seed)
            ran = kernel_among(operators_of(lambda: prepared.once("forward")))
        if prepared.leaves is heads and not shared:
            shared.append(exact_answer(prepared, workload, most_flops=_MOST_FLOPS))
        takes_shared = prepared.leaves is heads
        exact = shared[0] if takes_shared else exact_answer(prepared, workload, most_flops=_MOST_FLOPS)
        error = deviation(prepared, workload, exact).max_error
    except Exception as fault:
        status, reason = outcome_of(fault)
        ok = False if status == "failed" and backend in _ALWAYS_THERE else None
        return Kernel(device, dtype, backend, status, ok, reason=reason)
    tolerance = TOLERANCES[dtype].output * max(1.0, float(exact.out.abs().max()))
    finite_error = finite(error)
    return Kernel(
        device, dtype, backend, "ok", error <= tolerance, finite_error, tolerance, ran,
        None if finite_error is not None else "results are not finite",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- numerics


def numerics_of(device: torch.device, dtype: Dtype, seed: int) -> Numerics:
    """The exactness of `attend` on a device in a dtype, against float64 on the CPU."""
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    sizes = ((2, 6, 97, 48), (2, 3, 97, 48), (2, 3, 97, 32))
    wide = [torch.randn(size, generator=generator, dtype=torch.float64).to(kind) for size in sizes]
    q, k, v = (tensor.to(device) for tensor in wide)
    exact = attend(*(tensor.double() for tensor in wide), allowed=masks.causal())
    pattern, z = _run(q, k, v)
    earlier = torch.ones(pattern.shape[-2:], dtype=torch.bool).tril()
    loud, loud_z = _run(q, k, v, scale=_LOUD * q.shape[-1] ** -0.5)
    empty_pattern, empty = _run(q, k, v, offset=-2)
    return Numerics(
        str(device),
        dtype,
        max_error=_largest(z - exact),
        ceiling=TOLERANCES[dtype].output * max(1.0, float(exact.abs().max())),
        row_sum_error=_largest(pattern.sum(dim=-1) - 1),
        row_sum_ceiling=TOLERANCES[dtype].row_sum,
        forbidden=_largest(pattern.masked_fill(earlier, 0.0)),
        empty=max(_largest(empty_pattern[..., :2, :]), _largest(empty[..., :2, :])),
        loud=bool(loud_z.isfinite().all()) and _largest(loud.sum(dim=-1) - 1) <= TOLERANCES[dtype].row_sum,
    )


def _run(q: Tensor, k: Tensor, v: Tensor, offset: int = 0, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """The pattern and z of causal attention, in float64 on the CPU. `offset` is the key position of the first query;
    with −2 the first two queries see no key."""
    kept: dict[str, Tensor] = {}

    def tap(site: str, tensor: Tensor, **where: object) -> None:
        kept[site] = tensor.detach().cpu().double()

    attend(q, k, v, allowed=masks.causal(offset), scale=scale, tap=tap)
    return kept["pattern"], kept["z"]


def _largest(numbers: Tensor) -> float:
    """The largest absolute value; infinite if one is not finite."""
    largest = numbers.abs().max().item()
    return largest if math.isfinite(largest) else math.inf


# ------------------------------------------------------------------------------------------------- devices and settings


_EXACT = "highest"
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


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


def check_settings(present: Sequence[Device]) -> list[HealthCheck]:
    """The settings of torch in this process and by the environment."""
    return [_build(present), _precision(), _default_dtype(), _deterministic(present), _reducer(present)]


def _build(present: Sequence[Device]) -> HealthCheck:
    """Whether this build of torch supports the graphics card, if there is one."""
    has_cuda = any(device.name.startswith("cuda") for device in present)
    if not nvidia_driver() or has_cuda or torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        return HealthCheck("build", True, f"torch {torch.__version__}, {f'CUDA {built}' if built else 'for CPUs'}")
    why = "was built without CUDA" if torch.version.cuda is None else "cannot use it"
    return HealthCheck(
        "build", None, f"there is an NVIDIA driver, but torch {torch.__version__} {why}", is_caution=True,
        advice="install the build of torch for this driver (pytorch.org lists them), or ignore this",
    )  # fmt: skip


def _precision() -> HealthCheck:
    """Whether float32 products are computed in float32."""
    precision = torch.get_float32_matmul_precision()
    if precision == _EXACT and not torch.backends.cuda.matmul.allow_tf32:
        return HealthCheck("precision", True, "products of float32 are computed in float32 (TF32 is off)")
    overrides = [name for name in ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE") if os.environ.get(name)]
    return HealthCheck(
        "precision", False, f"products of float32 may be rounded to TF32 or bfloat16: torch's precision is {precision!r}",
        meaning="Numbers in float32 are good to three digits instead of seven.",
        advice=f"unset {overrides[0]}" if overrides else "torch.set_float32_matmul_precision('highest') where it was changed",
    )  # fmt: skip


def _default_dtype() -> HealthCheck:
    kind = str(torch.get_default_dtype()).removeprefix("torch.")
    if kind == "float32":
        return HealthCheck("default-dtype", True, "torch makes tensors of float32 by default")
    return HealthCheck(
        "default-dtype", False, f"torch makes tensors of {kind} by default",
        meaning="Masks, positions and weights may be made in another dtype than the model's.",
        advice="look for torch.set_default_dtype in what Python loads at its start (sitecustomize), and take it out",
    )  # fmt: skip


def _deterministic(present: Sequence[Device]) -> HealthCheck:
    is_on = torch.are_deterministic_algorithms_enabled()
    has_cuda = any(device.name.startswith("cuda") for device in present)
    if is_on and has_cuda and not os.environ.get(_WORKSPACE):
        return HealthCheck(
            "deterministic", False, f"deterministic algorithms are on, but {_WORKSPACE} is not set",
            meaning="Products on CUDA raise an error.", advice=f"set {_WORKSPACE}=:4096:8 before torch is loaded",
        )  # fmt: skip
    return HealthCheck("deterministic", True, f"deterministic algorithms are {'on' if is_on else 'off, as by default'}")


def _reducer(present: Sequence[Device]) -> HealthCheck:
    """Whether the Triton kernel computes head statistics, which needs a CUDA device."""
    faults = {d.name: kernel_fault(torch.device(d.name), torch.float32) for d in present if d.name.startswith("cuda")}
    if not faults:
        return HealthCheck("reducer", None, "the Triton kernel for statistics of heads needs a CUDA device")
    reported = {name: fault for name, fault in faults.items() if fault is not None}
    if not reported:
        return HealthCheck("reducer", True, "the Triton kernel for statistics of heads runs, and agrees with torch")
    return HealthCheck(
        "reducer", None, "; ".join(f"{name}: {fault}" for name, fault in reported.items()), is_caution=True,
        meaning="Statistics of heads are made by torch, which takes longer.",
        advice="install the Triton that this build of torch names, or ignore this",
    )  # fmt: skip
