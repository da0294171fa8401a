"""`mhacli.diff`, which compares two records, or a model in memory with another or with outputs."""

import os
from collections.abc import Sequence
from typing import Any

from mhacli.commands.diff import view  # noqa: F401 - it registers the views of differences
from mhacli.errors import UsageError

from .records import compare_records
from .result import ModelDiff, RecordDiff


def diff(
    a: Any,
    b: Any,
    inputs: Any = None,
    *,
    tolerance: float | None = None,
    map: Sequence[str] = (),
) -> RecordDiff | ModelDiff:
    """The differences of `b` from `a`, as `mha diff` prints them. Each is a record or the path of
    one, or each is a model in memory, and both compute `inputs`: keywords, positional arguments, or
    a tensor. Instead of a model `b` may be the path of a safetensors file with outputs of another
    implementation, a tensor for each module. `map`, of models, is as `--map`: "LEFT=RIGHT" for the
    names of modules of `a` and `b`.

    `tolerance`, of records, is relative to the largest number of a site. 0 demands equal bits; None
    takes the tolerance of the coarser dtype. Raises `MhaError` for a file that is no record, and
    for models that cannot be compared.
    """
    is_a_model, is_b_model = (hasattr(each, "named_modules") for each in (a, b))
    if inputs is not None or is_a_model or is_b_model or map:
        is_known = is_a_model and (is_b_model or isinstance(b, (str, os.PathLike)))
        if inputs is None or not is_known or tolerance is not None:
            raise UsageError(
                "mhacli.diff compares two records, or two models over inputs",
                hint=(
                    "mhacli.diff(model_a, model_b, inputs), where model_b may be a file of outputs,"
                    " or mhacli.diff(record_a, record_b, tolerance=…)"
                ),
            )
        from .models import diff_modules

        return diff_modules(a, b, inputs, map)
    return compare_records(a, b, tolerance)
