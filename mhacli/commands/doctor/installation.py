"""`mha doctor`: examines the installation in eight lines: libraries, extras, devices, threads, and attention in each dtype."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from time import perf_counter

import mhacli
from mhacli.commands.check import HealthCheck
from mhacli.commands.doctor.result import Device, Library, Report
from mhacli.errors import installing, needed_ranges
from mhacli.io.progress import Progress
from mhacli.settings import Dtype

USED = {"torch": None, "numpy": None, "safetensors": None, "typer": None, "rich": None, "jaxtyping": None,
        "transformers": "hf", "tokenizers": "hf", "textual": "tui", "matplotlib": "plot"}  # fmt: skip
"""The libraries to report, and the extra that installs each; None for those that mha always needs."""


def examine_installation(device: str, dtype: Dtype | None, *, seed: int, report_progress: Progress) -> Report:
    """The report on every device or one, in every dtype or one. Raises `MhaError` for a missing device. Works without torch,
    and reports that it is missing."""
    began, installed = perf_counter(), libraries()
    checks, devices = [*_check_libraries(installed)], tuple[Device, ...]()
    try:
        from mhacli.commands.doctor.machine import examine_machine
    except (ImportError, OSError) as fault:  # a library that torch depends on may be missing too
        name = (getattr(fault, "name", None) or "torch").partition(".")[0]
        name = name if name in USED else "torch"
        advice = f"pip install --force-reinstall {name}, in the environment of mha"
        message, meaning = f"it cannot be imported: {str(fault)[:200]}", "Nothing can be computed."
        checks.append(HealthCheck(name, False, message, meaning=meaning, advice=advice))
    else:
        more, devices = examine_machine(device, dtype, seed=seed, report_progress=report_progress)
        checks += more
    system = f"{platform.system()} {platform.machine()}"
    environment = {
        "mha": mhacli.__version__,
        "python": platform.python_version(),
        "platform": system,
        "device_asked": device,
    }
    return Report(tuple(checks), installed, environment, devices, seed=seed, time_s=perf_counter() - began)


def libraries() -> tuple[Library, ...]:
    """The libraries of mha with installed versions and required ranges."""
    needs, versions = needed_ranges(), dict[str, str]()
    for name in USED:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return tuple(Library(name, versions.get(name), needs.get(name, ""), extra) for name, extra in USED.items())


def _check_libraries(installed: tuple[Library, ...]) -> Iterator[HealthCheck]:
    """Whether required libraries have a supported version. Missing extras are listed, but are no fault."""
    from packaging.specifiers import SpecifierSet

    missing = [each for each in installed if each.version is None]
    wrong = [
        each
        for each in installed
        if each.version and not SpecifierSet(each.needs).contains(each.version, prereleases=True)
    ]
    problems = [f"{each.name} is missing" for each in missing if each.extra is None]
    problems += [f"{each.name} is {each.version}, but mha needs {each.needs}" for each in wrong]
    if problems:
        advice = f"{installing(*(each.name for each in wrong))} brings what is needed"
        meaning = "Code that uses them fails, or runs untested."
        yield HealthCheck("libraries", False, "; ".join(problems), meaning=meaning, advice=advice)
    else:
        n = len(installed) - len(missing)
        yield HealthCheck("libraries", True, f"{n} libraries have versions that mha works with")
    if names := [each.name for each in missing if each.extra]:
        yield HealthCheck("extras", None, f"not installed: {', '.join(names)}. {installing(*names)} installs them")
    else:
        yield HealthCheck("extras", True, "all optional libraries are installed")
