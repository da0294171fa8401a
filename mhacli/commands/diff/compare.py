"""`mhacli.diff`, which compares two records or two models in memory."""

from typing import Any

from mhacli.commands.diff import view  # noqa: F401 - it registers the views of differences
from mhacli.errors import UsageError

from .records import compare_records
from .result import ModelDiff, RecordDiff


def diff(
    a: Any, b: Any, inputs: Any = None, *, tolerance: float | None = None
) -> RecordDiff | ModelDiff:
    """The differences of `b` from `a`, as `mha diff` prints them. Each is a record or the path of
    one, or each is a model in memory, and both compute `inputs`: keywords, positional arguments, or
    a tensor.

    `tolerance`, of records, is relative to the largest number of a site. 0 demands equal bits; None
    takes the tolerance of the coarser dtype. Raises `MhaError` for a file that is no record, and
    for models that cannot be compared.
    """
    are_models = [hasattr(each, "named_modules") for each in (a, b)]
    if inputs is not None or any(are_models):
        if inputs is None or not all(are_models) or tolerance is not None:
            raise UsageError(
                "mhacli.diff compares two records, or two models over inputs",
                hint=(
                    "mhacli.diff(model_a, model_b, inputs), or mhacli.diff(record_a, record_b,"
                    " tolerance=…)"
                ),
            )
        from .models import diff_modules

        return diff_modules(a, b, inputs)
    return compare_records(a, b, tolerance)
