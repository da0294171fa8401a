"""`mha doctor`: examines the installation: libraries, devices, settings, kernels, and the exactness of `attend`."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from time import perf_counter

import mhacli
from mhacli.commands.doctor.result import Device, HealthCheck, Kernel, Library, Numerics, Report
from mhacli.errors import installing, needed_ranges
from mhacli.io import memory
from mhacli.io.memory import cpu_name, n_cpus
from mhacli.io.progress import Progress, no_progress
from mhacli.settings import Dtype


def examine_installation(
    *,
    device: str = "auto",
    dtype: Dtype | None = None,
    seed: int = 0,
    compiles: bool = False,
    command: tuple[str, ...] = (),
    report_progress: Progress = no_progress,
) -> Report:
    """The report on every device or one, in every dtype or one.

    Compiled backends are skipped unless `compiles`, because each takes seconds. Raises `MhaError` for a missing device.
    Works without torch, and reports that it is missing.
    """
    began = perf_counter()
    installed = libraries()
    checks = check_libraries(installed)
    devices: tuple[Device, ...] = (cpu(),)
    kernels: tuple[Kernel, ...] = ()
    numerics: tuple[Numerics, ...] = ()
    fault: Exception | None = None
    try:
        from mhacli.commands.doctor import machine
    except (ImportError, OSError) as missing:  # a library that torch depends on may be missing too
        fault = missing
    if fault is not None:
        checks += [_not_loaded(fault), check_threads(None)]
    else:
        devices = machine.devices(device, cpu())
        checks += [check_threads(machine.n_threads()), *machine.check_settings(devices)]
        kernels, numerics = machine.measure(
            [device.name for device in devices], dtype, seed=seed, compiles=compiles, report_progress=report_progress
        )
        checks += [*_of_kernels(kernels), *_of_numerics(numerics)]
    return Report(
        checks=tuple(checks),
        libraries=installed,
        environment=_environment(device),
        devices=devices,
        kernels=kernels,
        numerics=numerics,
        command=command,
        seed=seed,
        time_s=perf_counter() - began,
    )


def _environment(device: str) -> dict[str, str]:
    return {
        "mha": mhacli.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device_asked": device,
    }


def _not_loaded(fault: Exception) -> HealthCheck:
    """The check for torch, or a library that it loads, that cannot be imported."""
    reason = next(iter(str(fault).splitlines()), type(fault).__name__)
    missing = (getattr(fault, "name", None) or "torch").partition(".")[0]
    name = missing if missing in USED else "torch"
    return HealthCheck(
        name, False, f"it cannot be imported: {reason:.200}", meaning="Nothing can be computed.",
        advice=f"pip install --force-reinstall {name}, in the environment of mha",
    )  # fmt: skip


def _of_kernels(kernels: Sequence[Kernel]) -> list[HealthCheck]:
    """One check per device and dtype, for the backend with the largest error."""
    checks = []
    for device, dtype in dict.fromkeys((kernel.device, kernel.dtype) for kernel in kernels):
        tested = [kernel for kernel in kernels if (kernel.device, kernel.dtype) == (device, dtype)]
        tried = [kernel for kernel in tested if kernel.ok is not None]
        bad = [kernel for kernel in tried if not kernel.ok]
        worst = max((kernel.max_error for kernel in tried if kernel.max_error is not None), default=None)
        tolerance = max((kernel.tolerance for kernel in tried if kernel.tolerance is not None), default=None)
        name = f"kernels {device} {dtype}"
        if bad:
            errors = ", ".join(f"{kernel.backend} {_error(kernel)}" for kernel in bad)
            checks.append(HealthCheck(
                name, False, f"{len(bad)} of {len(tried)} backends are wrong: {errors}", worst, tolerance,
                meaning="Models that use these kernels get wrong numbers.",
                advice="leave these backends out (torch.nn.attention.sdpa_kernel chooses one), and try another release of torch",
            ))  # fmt: skip
        else:
            others = (
                f", {len(tested) - len(tried)} do not exist here or were not tried" if len(tried) < len(tested) else ""
            )
            message = f"{len(tried)} backends agree with attention in float64{others}"
            checks.append(HealthCheck(name, True if tried else None, message, worst, tolerance))
    return checks


def _error(kernel: Kernel) -> str:
    return (kernel.reason or kernel.status) if kernel.max_error is None else f"differs by {kernel.max_error:.2g}"


def _of_numerics(numerics: Sequence[Numerics]) -> list[HealthCheck]:
    """One check per device and dtype."""
    checks = []
    for measured in numerics:
        name = f"numerics {measured.device} {measured.dtype}"
        if measured.ok:
            message = "attention, row sums, masked cells, rows without keys and scores × 1000 are correct"
            checks.append(HealthCheck(name, True, message, measured.max_error, measured.ceiling))
            continue
        message = "; ".join(_wrong(measured))
        checks.append(HealthCheck(
            name, False, message, measured.max_error, measured.ceiling,
            meaning="Every number that mha shows in this dtype is in doubt.",
            advice="use another dtype, device or release of torch; check the settings above first",
        ))  # fmt: skip
    return checks


def _wrong(measured: Numerics) -> list[str]:
    """The faults in measured numerics."""
    problems = (
        []
        if measured.max_error <= measured.ceiling
        else [f"the error is {measured.max_error:.2g}, above {measured.ceiling:g}"]
    )
    if not measured.row_sum_error <= measured.row_sum_ceiling:
        problems.append(f"row sums differ from 1 by {measured.row_sum_error:.2g}, above {measured.row_sum_ceiling:g}")
    problems += [] if measured.forbidden == 0 else [f"a masked cell has the weight {measured.forbidden:.2g}"]
    problems += [] if measured.empty == 0 else [f"a query without keys gets {measured.empty:.2g}"]
    return problems + ([] if measured.loud else ["scores × 1000 are not finite, or their rows do not sum to 1"])


# ------------------------------------------------------------------------------------------------ libraries and threads


USED = {"torch": None, "numpy": None, "safetensors": None, "typer": None, "rich": None, "jaxtyping": None,
        "transformers": "hf", "tokenizers": "hf", "textual": "tui", "matplotlib": "plot"}  # fmt: skip
"""The libraries to report, and the extra that installs each; None for those that mha always needs."""


def libraries() -> tuple[Library, ...]:
    """The libraries of mha with installed versions and required ranges."""
    needs = needed_ranges()
    return tuple(Library(name, _version(name), needs.get(name, ""), extra) for name, extra in USED.items())


def _version(name: str) -> str | None:
    """The installed version of a library by its metadata, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def is_within(version: str, needs: str) -> bool:
    """Whether a version lies in a range such as `>=5.3,<6`. An unreadable version counts as within.

    >>> is_within("5.23.0", "<6,>=5.3"), is_within("4.57", "<6,>=5.3")
    (True, False)
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(needs).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


def check_libraries(installed: tuple[Library, ...]) -> list[HealthCheck]:
    """Whether required libraries have a supported version. Missing extras are listed, but are no fault."""
    missing = [library.name for library in installed if library.extra is None and library.version is None]
    wrong = [
        library
        for library in installed
        if library.version is not None and not is_within(library.version, library.needs)
    ]
    checks = []
    problems = [f"{name} is missing" for name in missing]
    problems += [f"{library.name} is {library.version}, but mha needs {library.needs}" for library in wrong]
    if problems:
        checks.append(HealthCheck(
            "libraries", False, "; ".join(problems), meaning="Code that uses them fails, or runs untested.",
            advice=f"{installing(*(library.name for library in wrong))} brings what is needed",
        ))  # fmt: skip
    else:
        n = sum(library.version is not None for library in installed)
        checks.append(HealthCheck("libraries", True, f"{n} libraries have versions that mha works with"))
    absent = sorted({library.extra for library in installed if library.extra is not None and library.version is None})
    if absent:
        names = [library.name for library in installed if library.extra in absent and library.version is None]
        message = f"not installed: {', '.join(names)}. {installing(*names)} installs them"
        checks.append(HealthCheck("extras", None, message))
    else:
        checks.append(HealthCheck("extras", True, "all optional libraries are installed"))
    return checks


def check_threads(n_threads: int | None) -> HealthCheck:
    """Whether the number of threads suits the cores. Another number is slow, but not wrong."""
    cores = n_cpus()
    settings = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if os.environ.get(name)}
    variables = ", ".join(f"{name}={value}" for name, value in settings.items()) or "OMP_NUM_THREADS is not set"
    odd = [name for name, value in settings.items() if not re.fullmatch(r"\s*[1-9]\d*\s*", value)]
    n = "unknown" if n_threads is None else str(n_threads)
    message = f"{n} of {cores} cores ({variables})"
    if odd:
        advice = f"set {odd[0]} to a count such as {cores}, or leave it out"
        return HealthCheck(
            "threads", None, f"{odd[0]} is not a number of threads: {message}", is_caution=True, advice=advice
        )
    most = max([n_threads or 0, *map(int, settings.values())])
    if most > cores:
        advice = f"set OMP_NUM_THREADS={cores}, or leave it out"
        message_of_excess = f"more threads than cores, so they wait for each other: {message}"
        return HealthCheck("threads", None, message_of_excess, most, cores, is_caution=True, advice=advice)
    return HealthCheck("threads", True, message, n_threads, cores)


def cpu() -> Device:
    """This machine's processor and its memory."""
    pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in os.sysconf_names else 0
    total = pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else None
    cores = n_cpus()
    return Device("cpu", f"{cpu_name()}, {cores} core{'s' * (cores != 1)}", total, memory.available_bytes())
