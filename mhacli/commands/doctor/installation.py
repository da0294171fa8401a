"""`mha doctor`: examines the installation: libraries, devices, threads, and attention in each dtype."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from time import perf_counter

import mhacli
from mhacli.commands.check import HealthCheck
from mhacli.commands.doctor.result import Device, Library, Report
from mhacli.errors import installing, needed_ranges
from mhacli.io import memory
from mhacli.io.memory import cpu_name, n_cpus
from mhacli.io.progress import Progress
from mhacli.settings import Dtype


def examine_installation(device: str, dtype: Dtype | None, *, seed: int, report_progress: Progress) -> Report:
    """The report on every device or one, in every dtype or one. Raises `MhaError` for a missing device. Works without torch,
    and reports that it is missing."""
    began = perf_counter()
    installed = libraries()
    checks = check_libraries(installed)
    devices: tuple[Device, ...] = (cpu(),)
    try:
        from mhacli.commands.doctor import machine
    except (ImportError, OSError) as fault:  # a library that torch depends on may be missing too
        checks += [_not_loaded(fault), check_threads(None)]
    else:
        devices = machine.devices(device, cpu())
        checks += [machine.check_devices(devices), check_threads(machine.n_threads())]
        checks += machine.check_attention(devices, dtype, seed, report_progress)
    return Report(
        checks=tuple(checks),
        libraries=installed,
        environment={
            "mha": mhacli.__version__,
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
            "device_asked": device,
        },
        devices=devices,
        seed=seed,
        time_s=perf_counter() - began,
    )


def _not_loaded(fault: Exception) -> HealthCheck:
    """The check for torch, or a library that it loads, that cannot be imported."""
    reason = next(iter(str(fault).splitlines()), type(fault).__name__)
    missing = (getattr(fault, "name", None) or "torch").partition(".")[0]
    name = missing if missing in USED else "torch"
    return HealthCheck(
        name, False, f"it cannot be imported: {reason:.200}", meaning="Nothing can be computed.",
        advice=f"pip install --force-reinstall {name}, in the environment of mha",
    )  # fmt: skip


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
    cores, stated = n_cpus(), os.environ.get("OMP_NUM_THREADS", "")
    most = max(n_threads or 0, int(stated) if stated.isdecimal() else 0)
    message = f"{n_threads or 'unknown'} of {cores} cores (OMP_NUM_THREADS{'=' + stated if stated else ' is not set'})"
    if most <= cores:
        return HealthCheck("threads", True, message, n_threads, cores)
    advice = f"set OMP_NUM_THREADS={cores}, or leave it out"
    message = f"more threads than cores, so they wait for each other: {message}"
    return HealthCheck("threads", None, message, most, cores, is_caution=True, advice=advice)


def cpu() -> Device:
    """This machine's processor and its memory."""
    pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in os.sysconf_names else 0
    total = pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else None
    cores = n_cpus()
    return Device("cpu", f"{cpu_name()}, {cores} core{'s' * (cores != 1)}", total, memory.available_bytes())
