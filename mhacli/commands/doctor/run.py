"""`mha doctor` as a Python function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mhacli.commands.doctor.installation import examine_installation, libraries
from mhacli.commands.doctor.result import Report
from mhacli.errors import UsageError
from mhacli.io.progress import Progress, no_progress
from mhacli.settings import Dtype, ModelSettings

if TYPE_CHECKING:
    from torch import nn

    from mhacli.commands.check import Examined


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
    """The report on a checkpoint, or without a path on this installation."""
    if settings.path is None:
        return examine_installation(settings.device, settings.dtype, seed=seed, report_progress=report_progress)
    from mhacli.commands.check import examine_checkpoint

    examination = partial(examine_checkpoint, settings, texts, seed=seed, report_progress=report_progress)
    return _report(examination, settings.device, seed)


def _report(examination: Callable[[], Examined], requested: str, seed: int) -> Report:
    """The report on an examined model."""
    import torch

    from mhacli.attention.devices import environment

    began = perf_counter()
    model, checks, notes = examination()
    where = {name: str(value) for name, value in vars(environment(torch.device(model.device), requested)).items()}
    return Report(checks, libraries(), where, model=model, notes=notes, seed=seed, time_s=perf_counter() - began)
