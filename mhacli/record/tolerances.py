"""Rounding tolerances by dtype. Every check takes its tolerance from this table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Tolerance(NamedTuple):
    """The largest differences that rounding explains in a dtype.

    `output`: of an output, relative to the sum of the magnitudes behind it; about twice the measured error for normal
    numbers, for up to `MEASURED_KEYS` keys of 128 columns. `row_sum`: of a row's sum from 1 where it is computed.
    `stored_row_sum`: of the sum of a stored row, whose weights are rounded to the dtype; twice the rounding of 16 bits,
    and room for sums over many keys in wider dtypes. `runs`: between two runs, relative to the largest number of a
    site.
    """

    output: float
    row_sum: float
    stored_row_sum: float
    runs: float


TOLERANCES: Mapping[str, Tolerance] = {
    "bfloat16": Tolerance(output=2e-2, row_sum=5e-3, stored_row_sum=2e-2, runs=2e-2),
    "float16": Tolerance(output=5e-3, row_sum=1e-3, stored_row_sum=5e-3, runs=5e-3),
    "float32": Tolerance(output=2e-6, row_sum=1e-6, stored_row_sum=1e-4, runs=1e-5),
    "float64": Tolerance(output=1e-12, row_sum=1e-12, stored_row_sum=1e-6, runs=1e-12),
}
"""By dtype, the coarsest first."""


MEASURED_KEYS = 512
"""The largest number of keys for which `output` was measured. Repeated tokens round in the same direction: with 16,384
keys of 37 distinct tokens, torch's flash kernel on CPUs was off by 1.5 × `output`."""


def error_text(number: float) -> str:
    """A rounding error or tolerance in one format at every size, for easy comparison: `1.46e-04`."""
    return f"{number:.2e}" if number else "0"
