"""`mha doctor` as a Python function. Works without torch, and reports that it is missing."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib import metadata
from time import perf_counter
from typing import TYPE_CHECKING, Any

import mhacli
from mhacli.commands.check import HealthCheck
from mhacli.commands.doctor.result import Device, Report
from mhacli.errors import UsageError, installing, needed_ranges
from mhacli.io.progress import Progress, no_progress
from mhacli.settings import Dtype, ModelSettings

if TYPE_CHECKING:
    from torch import nn

    from mhacli.commands.check import Examined

_EXTRAS = {"transformers": "hf", "tokenizers": "hf", "textual": "tui", "matplotlib": "plot"}
LIBRARIES = ("torch", "numpy", "safetensors", "typer", "rich", "jaxtyping", *_EXTRAS)


def doctor(
    model: str | nn.Module | None = None,
    tokenizer: Any = None,
    *,
    texts: Sequence[str] = (),
    device: str = "auto",
    dtype: Dtype | None = None,
    seed: int = 0,
) -> Report:
    """The report on an installation or a model, as `mha doctor` prints it.

    Without `model` it examines this installation. A path or hub id is a checkpoint, examined as by `--model`;
    `tokenizer` is then `byte` or the path of a `tokenizer.json`. A transformers model in memory is copied, which takes
    as much memory again, and examined on its own device in its own dtype; `tokenizer` is then a transformers tokenizer,
    and without one the model reads random ids. Raises `MhaError` if the model cannot be loaded or reads no text.
    """
    if model is None and (tokenizer is not None or texts):
        raise UsageError("tokenizer and texts need a model", hint="doctor(model, tokenizer)")
    if model is None or isinstance(model, str):
        settings = ModelSettings(path=model, tokenizer=tokenizer, device=device, dtype=dtype)
        return examine(settings, texts, seed=seed)
    if device != "auto" or dtype is not None:
        raise UsageError("a model in memory is examined on its own device and in its own dtype")
    from mhacli.commands.check import examine_model

    return _report(partial(examine_model, model, tokenizer, texts, seed=seed), device, seed)


def examine(
    settings: ModelSettings, texts: Sequence[str] = (), *, seed: int, report_progress: Progress = no_progress
) -> Report:
    """The report on a checkpoint, or without a path on this installation: on every device or one, in every dtype or one.

    Raises `MhaError` for a missing device."""
    if settings.path is not None:
        from mhacli.commands.check import examine_checkpoint

        examination = partial(examine_checkpoint, settings, texts, seed=seed, report_progress=report_progress)
        return _report(examination, settings.device, seed)
    began, devices = perf_counter(), tuple[Device, ...]()
    installed, checks = _libraries()
    environment = {"mha": mhacli.__version__, "python": platform.python_version(), "device_asked": settings.device}
    environment["platform"] = f"{platform.system()} {platform.machine()}"
    try:
        from mhacli.commands.doctor.machine import check_machine, devices_of
    except (ImportError, OSError) as fault:  # a library that torch depends on may be missing too
        missing = str(getattr(fault, "name", "")).partition(".")[0]
        name = missing if missing in LIBRARIES else "torch"
        message, advice = f"it cannot be imported: {str(fault)[:200]}", f"pip install --force-reinstall {name}"
        checks.append(HealthCheck(name, False, message, meaning="Nothing can be computed.", advice=advice))
    else:
        devices = devices_of(settings.device)
        checks += check_machine(devices, settings.dtype, seed, report_progress)
    return Report(tuple(checks), installed, environment, devices, seed=seed, time_s=perf_counter() - began)


def _report(examination: Callable[[], Examined], requested: str, seed: int) -> Report:
    """The report on an examined model."""
    import torch

    from mhacli.attention.devices import environment

    began = perf_counter()
    model, checks, notes = examination()
    where = {name: str(value) for name, value in asdict(environment(torch.device(model.device), requested)).items()}
    return Report(checks, _libraries()[0], where, model=model, notes=notes, seed=seed, time_s=perf_counter() - began)


def _libraries() -> tuple[tuple[Mapping[str, str | None], ...], list[HealthCheck]]:
    """The libraries of mha with installed versions and required ranges, and whether these agree. Missing extras are listed,
    but are no fault."""
    from packaging.specifiers import SpecifierSet

    ranges, installed, problems, missing = needed_ranges(), [], dict[str, str](), []
    for name in LIBRARIES:
        version, needs, extra = None, ranges.get(name, ""), _EXTRAS.get(name)
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(name)
        installed.append({"name": name, "version": version, "needs": needs, "extra": extra})
        if version is None and extra:
            missing.append(name)
        elif version is None or not SpecifierSet(needs).contains(version, prereleases=True):
            problems[name] = f"{name} is {version or 'missing'}, but mha needs {needs}"
    libraries = f"{len(installed) - len(missing)} libraries have versions that mha works with"
    extras = f"not installed: {', '.join(missing)}. {installing(*missing)} installs them"
    return tuple(installed), [
        HealthCheck(
            "libraries", not problems, "; ".join(problems.values()) or libraries,
            meaning="Code that uses them fails, or runs untested." if problems else "",
            advice=f"{installing(*problems)} brings what is needed" if problems else "",
        ),
        HealthCheck("extras", None if missing else True, extras if missing else "all optional libraries are installed"),
    ]  # fmt: skip
