"""`mha doctor` as a Python function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mhacli.commands.doctor.result import DoctorRequest, Report
from mhacli.errors import UsageError
from mhacli.settings import Dtype

if TYPE_CHECKING:
    from torch import nn


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
    if model is None:
        if tokenizer is not None or texts:
            raise UsageError("tokenizer and texts need a model", hint="doctor(model, tokenizer)")
        from mhacli.commands.doctor.installation import examine_installation

        return examine_installation(DoctorRequest(device=device, dtype=dtype, seed=seed))
    from mhacli.commands.doctor.checkpoint import examine_checkpoint, examine_model

    if isinstance(model, str):
        return examine_checkpoint(
            DoctorRequest(path=model, text=tuple(texts), tokenizer=tokenizer, device=device, dtype=dtype, seed=seed)
        )
    if device != "auto" or dtype is not None:
        raise UsageError("a model in memory is examined on its own device and in its own dtype")
    return examine_model(model, tokenizer, DoctorRequest(path=type(model).__name__, text=tuple(texts), seed=seed))
