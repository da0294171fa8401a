"""`mha doctor` as a Python function. Works without torch, and reports that it is missing."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from time import perf_counter
from typing import TYPE_CHECKING, Any

import mhacli
from mhacli.commands.check import HealthCheck
from mhacli.commands.doctor.result import Report
from mhacli.errors import UsageError, installing, needed_ranges
from mhacli.io.progress import Progress, no_progress
from mhacli.settings import Dtype, ModelSettings

if TYPE_CHECKING:
    from torch import nn

_EXTRAS = {"transformers": "hf", "tokenizers": "hf", "textual": "tui", "matplotlib": "plot"}
_REQUIRED = ("torch", "numpy", "safetensors", "msgspec", "typer", "rich", "jaxtyping")


def doctor(
    model: str | nn.Module | None = None,
    tokenizer: Any = None,
    *,
    texts: Sequence[str] = (),
    device: str = "auto",
    dtype: Dtype | None = None,
    seed: int = 0,
    revision: str | None = None,
    report_progress: Progress = no_progress,
) -> Report:
    """The report on an installation or a model, as `mha doctor` prints it.

    Without `model` it examines this installation, on every device or one, in every dtype or one. A path or hub id is a
    checkpoint, examined as by `--model`; `tokenizer` is then `byte` or the path of a `tokenizer.json`. A transformers
    model in memory is copied, which takes as much memory again, and examined on its own device in its own dtype;
    `tokenizer` is then a transformers tokenizer, and without one the model reads random ids. Raises `MhaError` for a
    missing device, and if the model cannot be loaded or reads no text.
    """
    began = perf_counter()
    if model is None:
        if tokenizer is not None or texts:
            raise UsageError(
                f"{(*texts, tokenizer)[0]!r:.80} needs a model", hint="add --model DIR, or a model in Python"
            )
        return _installation(device, dtype, seed, began)
    from mhacli.commands.check import examine_checkpoint, examine_model

    if isinstance(model, str):
        settings = ModelSettings(path=model, revision=revision, tokenizer=tokenizer, device=device, dtype=dtype)
        examined = examine_checkpoint(settings, texts, seed=seed, report_progress=report_progress)
    elif device == "auto" and dtype is None:
        examined = examine_model(model, tokenizer, texts, seed=seed)
    else:
        raise UsageError("a model in memory is examined on its own device and in its own dtype")
    import torch

    from mhacli.attention.devices import environment

    described, checks, notes = examined
    about = {name: str(value) for name, value in asdict(environment(torch.device(described.device), device)).items()}
    time_s = perf_counter() - began
    return Report(checks, _libraries()[0], about, model=described, notes=notes, seed=seed, time_s=time_s)


def _installation(device: str, dtype: Dtype | None, seed: int, began: float) -> Report:
    libraries, checks = _libraries()
    about = {"mha": mhacli.__version__, "python": platform.python_version(), "device_asked": device}
    about["platform"] = f"{platform.system()} {platform.machine()}"
    devices: tuple[Mapping[str, Any], ...] = ()
    try:
        from mhacli.commands.doctor.machine import examine_machine
    except (ImportError, OSError) as fault:  # a library that torch depends on may be missing too
        missing = str(getattr(fault, "name", "")).partition(".")[0]
        name = missing if missing in _REQUIRED else "torch"
        advice = f"pip install --force-reinstall {name}"
        checks.append(HealthCheck(name, False, f"it cannot be imported: {str(fault)[:200]}", advice=advice))
    else:
        devices, of_machine = examine_machine(device, dtype, seed)
        checks += of_machine
    return Report(tuple(checks), libraries, about, devices, seed=seed, time_s=perf_counter() - began)


def _libraries() -> tuple[tuple[Mapping[str, str | None], ...], list[HealthCheck]]:
    """The libraries, and whether those that are always needed and the extras have versions that mha works with. A missing extra
    is no fault."""
    from packaging.specifiers import SpecifierSet

    ranges, libraries, checks = needed_ranges(), [], []
    for row, names in (("libraries", _REQUIRED), ("extras", tuple(_EXTRAS))):
        words, unfit, is_fault = [], [], False
        for name in names:
            version, needs = None, ranges.get(name, "")
            with suppress(metadata.PackageNotFoundError):
                version = metadata.version(name)
            libraries.append({"name": name, "version": version, "needs": needs, "extra": _EXTRAS.get(name)})
            words.append(f"{name} {version or 'missing'}")
            if version is None or not SpecifierSet(needs).contains(version, prereleases=True):
                unfit.append(name)
                is_fault = is_fault or version is not None or name in _REQUIRED
        ok: bool | None = True
        if unfit:
            ok = False if is_fault else None
        checks.append(HealthCheck(row, ok, ", ".join(words), advice=installing(*unfit) if unfit else ""))
    return tuple(libraries), checks
