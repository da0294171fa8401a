"""`mha doctor`: the installation examined: libraries, devices, settings, kernels and the definition's own exactness."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from time import perf_counter

import mhacli
from mhacli.compute.doctor.libraries import USED, check_libraries, check_threads, cpu, libraries
from mhacli.results.doctor import Device, HealthCheck, Kernel, Numerics, Report
from mhacli.spec.config import Dtype

Told = Callable[[float, str], None]


def examine_installation(
    *,
    device: str = "auto",
    dtype: Dtype | None = None,
    seed: int = 0,
    compiles: bool = False,
    command: tuple[str, ...] = (),
    tell: Told = lambda share, doing: None,
) -> Report:
    """The report on every device here, or on the one that is asked for, in every dtype or in one.

    Backends that torch compiles are left out unless `compiles`: each takes seconds. Raises `MhaError` for a device that is
    not here. Works without torch, and says that it is missing.
    """
    began = perf_counter()
    found = libraries()
    checks = check_libraries(found)
    devices: tuple[Device, ...] = (cpu(),)
    kernels: tuple[Kernel, ...] = ()
    numerics: tuple[Numerics, ...] = ()
    fault: Exception | None = None
    try:
        from mhacli.compute.doctor import kernels as doctorkernels
        from mhacli.compute.doctor import settings as doctorsettings
    except (ImportError, OSError) as missing:  # a library that torch was built for may be missing too
        fault = missing
    if fault is not None:
        checks += [_not_loaded(fault), check_threads(None)]
    else:
        devices = doctorsettings.devices(device)
        checks += [check_threads(doctorsettings.n_threads()), *doctorsettings.check_settings(devices)]
        kernels, numerics = doctorkernels.measure(
            [one.name for one in devices], dtype, seed=seed, compiles=compiles, tell=tell
        )
        checks += [*_of_kernels(kernels), *_of_numerics(numerics)]
    return Report(
        checks=tuple(checks),
        libraries=found,
        environment=_environment(device),
        devices=devices,
        kernels=kernels,
        numerics=numerics,
        command=command,
        seed=seed,
        time_s=perf_counter() - began,
    )


def _environment(device: str) -> tuple[tuple[str, str], ...]:
    return (
        ("mha", mhacli.__version__),
        ("python", platform.python_version()),
        ("platform", f"{platform.system()} {platform.machine()}"),
        ("device_asked", device),
    )


def _not_loaded(fault: Exception) -> HealthCheck:
    """What to tell where torch, or something that is loaded with it, cannot be."""
    said = next(iter(str(fault).splitlines()), type(fault).__name__)
    missing = (getattr(fault, "name", None) or "torch").partition(".")[0]
    name = missing if missing in USED else "torch"
    return HealthCheck(
        name, False, f"it cannot be imported: {said:.200}", meaning="Nothing can be computed.",
        advice=f"pip install --force-reinstall {name}, in the environment of mha",
    )  # fmt: skip


def _of_kernels(kernels: Sequence[Kernel]) -> list[HealthCheck]:
    """One check for each device and dtype: its worst backend against the tolerance."""
    checks = []
    for device, dtype in dict.fromkeys((one.device, one.dtype) for one in kernels):
        own = [one for one in kernels if (one.device, one.dtype) == (device, dtype)]
        tried = [one for one in own if one.ok is not None]
        bad = [one for one in tried if not one.ok]
        worst = max((one.max_error for one in tried if one.max_error is not None), default=None)
        tolerance = max((one.tolerance for one in tried if one.tolerance is not None), default=None)
        name = f"kernels {device} {dtype}"
        if bad:
            told = ", ".join(f"{one.backend} {_error(one)}" for one in bad)
            checks.append(HealthCheck(
                name, False, f"{len(bad)} of {len(tried)} backends are wrong: {told}", worst, tolerance,
                meaning="Models that use these kernels get other numbers than attention by definition.",
                advice="leave these backends out (torch.nn.attention.sdpa_kernel chooses one), and try another release of torch",
            ))  # fmt: skip
        else:
            others = f", {len(own) - len(tried)} do not exist here or were not tried" if len(tried) < len(own) else ""
            said = f"{len(tried)} backends agree with attention in float64{others}"
            checks.append(HealthCheck(name, True if tried else None, said, worst, tolerance))
    return checks


def _error(kernel: Kernel) -> str:
    return (kernel.reason or kernel.status) if kernel.max_error is None else f"differs by {kernel.max_error:.2g}"


def _of_numerics(numerics: Sequence[Numerics]) -> list[HealthCheck]:
    """One check for each device and dtype."""
    checks = []
    for one in numerics:
        name = f"numerics {one.device} {one.dtype}"
        if one.ok:
            said = "attention, its row sums, forbidden cells, rows without keys and scores × 1000 are as they must be"
            checks.append(HealthCheck(name, True, said, one.max_error, one.ceiling))
            continue
        said = "; ".join(_wrong(one))
        checks.append(HealthCheck(
            name, False, said, one.max_error, one.ceiling, meaning="Every number that mha shows in this dtype is in doubt.",
            advice="take another dtype or device, and another release of torch; look at the settings above first",
        ))  # fmt: skip
    return checks


def _wrong(one: Numerics) -> list[str]:
    """What is not as it must be."""
    said = [] if one.max_error <= one.ceiling else [f"the error is {one.max_error:.2g}, above {one.ceiling:g}"]
    if not one.row_sum_error <= one.row_sum_ceiling:
        said.append(f"rows miss 1 by {one.row_sum_error:.2g}, above {one.row_sum_ceiling:g}")
    said += [] if one.forbidden == 0 else [f"a forbidden cell has the share {one.forbidden:.2g}"]
    said += [] if one.empty == 0 else [f"a query without keys gets {one.empty:.2g}"]
    return said + ([] if one.loud else ["scores × 1000 are not finite, or their rows do not add up to 1"])
