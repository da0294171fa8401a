"""`mhacli.diff`: the differences of two records, or of two models in memory."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any, overload

from mhacli.commands.diff.compare import RecordDiff
from mhacli.errors import UsageError
from mhacli.record.checks import TOLERANCES
from mhacli.record.record import Record
from mhacli.record.storage import load

if TYPE_CHECKING:
    from torch import nn

    from mhacli.commands.diff.result import ModelDiff

RecordLike = Record | str | os.PathLike[str]


@overload
def diff(a: RecordLike, b: RecordLike, *, tolerance: float | None = None) -> RecordDiff: ...
@overload
def diff(a: nn.Module, b: nn.Module, inputs: Any) -> ModelDiff: ...
def diff(a: Any, b: Any, inputs: Any = None, *, tolerance: float | None = None) -> RecordDiff | ModelDiff:
    """The differences of `b` from `a`, as `mha diff` prints them. Each is a record or the path of one, or each is a model in
    memory, and both compute `inputs`: keywords, positional arguments, or a tensor.

    `tolerance`, of records, is relative to the largest number of a site. 0 demands equal bits; None takes the tolerance of the
    coarser dtype. Raises `MhaError` for a file that is no record, and for models that cannot be compared.
    """
    are_models = [hasattr(each, "named_modules") for each in (a, b)]
    if inputs is not None or any(are_models):
        if inputs is None or not all(are_models) or tolerance is not None:
            raise UsageError(
                "mhacli.diff compares two records, or two models over inputs",
                hint="mhacli.diff(model_a, model_b, inputs), or mhacli.diff(record_a, record_b, tolerance=…)",
            )
        from mhacli.commands.diff.models import diff_modules

        return diff_modules(a, b, inputs)
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise UsageError(f"tolerance {tolerance:g} is no number from 0 on")
    given = {"the first record": a, "the second record": b}
    names = [name if isinstance(record, Record) else os.fspath(record) for name, record in given.items()]
    a, b = (record if isinstance(record, Record) else load(record) for record in given.values())
    dtype = None
    if tolerance is None:
        dtypes = {record.config.dtype if record.model is None else record.model.dtype for record in (a, b)}
        dtype = next((name for name in TOLERANCES if name in dtypes), "float32")
        tolerance = TOLERANCES[dtype].runs
    return RecordDiff(a, b, (names[0], names[1]), tolerance, dtype)
