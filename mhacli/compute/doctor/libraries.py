"""What is installed and how it is set up, as far as that can be told without torch: libraries, the CPU, the environment."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from mhacli.compute.bench.cpu_load import n_cpus
from mhacli.io import memory
from mhacli.io.extras import installing, needed_ranges
from mhacli.results.doctor import Device, HealthCheck, Library

USED = {"torch": None, "numpy": None, "safetensors": None, "typer": None, "rich": None, "jaxtyping": None,
        "transformers": "hf", "tokenizers": "hf", "textual": "tui", "matplotlib": "plot"}  # fmt: skip
"""The libraries that are told of, and the extra that brings each; None for those that mha cannot do without."""
_BOUND = re.compile(r"(>=|<=|==|!=|<|>)\s*([\d.]+)")
_PARTS = 3
"""Of a version that are compared: 5.3.0."""


def libraries() -> tuple[Library, ...]:
    """The libraries that mha uses, each with its version here and the range that mha needs."""
    needs = needed_ranges()
    return tuple(Library(name, _version(name), needs.get(name, ""), extra) for name, extra in USED.items())


def _version(name: str) -> str | None:
    """The version of a library by its metadata; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def is_within(version: str, needs: str) -> bool:
    """Whether a version lies in a range such as `>=5.3,<6`; what cannot be read is taken to.

    >>> is_within("5.23.0", "<6,>=5.3"), is_within("4.57", "<6,>=5.3")
    (True, False)
    """
    tests: Mapping[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
        ">=": lambda a, b: a >= b, "<=": lambda a, b: a <= b, "<": lambda a, b: a < b, ">": lambda a, b: a > b,
        "==": lambda a, b: a == b, "!=": lambda a, b: a != b,
    }  # fmt: skip
    release = _release(version)
    return not release or all(tests[sign](release, _release(bound)) for sign, bound in _BOUND.findall(needs))


def _release(version: str) -> tuple[int, ...]:
    """The first numbers of a version, filled up with zeros."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    parts = [int(part) for part in match[0].split(".")][:_PARTS] if match else []
    return tuple(parts + [0] * (_PARTS - len(parts))) if parts else ()


def check_libraries(found: tuple[Library, ...]) -> list[HealthCheck]:
    """Whether what is needed is here in a version that mha works with, and which extras are missing, which is no fault."""
    missing = [one.name for one in found if one.extra is None and one.version is None]
    wrong = [one for one in found if one.version is not None and not is_within(one.version, one.needs)]
    checks = []
    said = [f"{name} is missing" for name in missing]
    said += [f"{one.name} is {one.version}, needed is {one.needs}" for one in wrong]
    if said:
        checks.append(HealthCheck(
            "libraries", False, "; ".join(said), meaning="What uses them fails, or computes something that was never tried.",
            advice=f"{installing(*(one.name for one in wrong))} brings what is needed",
        ))  # fmt: skip
    else:
        n = sum(one.version is not None for one in found)
        checks.append(HealthCheck("libraries", True, f"{n} libraries are of versions that mha works with"))
    absent = sorted({one.extra for one in found if one.extra is not None and one.version is None})
    if absent:
        names = [one.name for one in found if one.extra in absent and one.version is None]
        message = f"not installed: {', '.join(names)}. {installing(*names)} installs them"
        checks.append(HealthCheck("extras", None, message))
    else:
        checks.append(HealthCheck("extras", True, "all optional libraries are installed"))
    return checks


def check_threads(n_threads: int | None) -> HealthCheck:
    """Whether the threads that are computed with suit the cores; where others than those are asked for, it is slow, not wrong."""
    cores = n_cpus()
    given = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if os.environ.get(name)}
    told = ", ".join(f"{name}={value}" for name, value in given.items()) or "OMP_NUM_THREADS is not set"
    odd = [name for name, value in given.items() if not re.fullmatch(r"\s*[1-9]\d*\s*", value)]
    n = "unknown" if n_threads is None else str(n_threads)
    message = f"{n} of {cores} cores ({told})"
    if odd:
        advice = f"set {odd[0]} to a count such as {cores}, or leave it out"
        return HealthCheck("threads", None, f"{odd[0]} is no count: {message}", is_caution=True, advice=advice)
    asked = max([n_threads or 0, *map(int, given.values())])
    if asked > cores:
        advice = f"set OMP_NUM_THREADS={cores}, or leave it out"
        said = f"more threads than cores, which wait for each other: {message}"
        return HealthCheck("threads", None, said, asked, cores, is_caution=True, advice=advice)
    return HealthCheck("threads", True, message, n_threads, cores)


def cpu() -> Device:
    """This machine's processor, and its memory."""
    pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in os.sysconf_names else 0
    total = pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else None
    cores = n_cpus()
    return Device("cpu", f"{_cpu_name()}, {cores} core{'s' * (cores != 1)}", total, memory.available_bytes())


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, None) or platform.processor() or platform.machine()


def nvidia_driver() -> bool:
    """Whether a driver of NVIDIA is loaded."""
    return Path("/proc/driver/nvidia/version").exists()
