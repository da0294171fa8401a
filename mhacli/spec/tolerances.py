"""How far numbers may be apart before it is more than rounding: one table by dtype, from which every check derives its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Tolerance(NamedTuple):
    """The largest differences that rounding explains in a dtype.

    `output`: of an output, relative to the magnitudes that it is the sum of; about twice what was measured for normal numbers, up
    to `MEASURED_KEYS` keys of 128 columns. `row_sum`: of the sum of a row of weights from 1 where it is computed, and
    `stored_row_sum` where it is read: each weight is rounded to the dtype, twice the rounding of 16 bits, with room for sums of
    many keys in the others. `runs`: of two runs, relative to the largest number of a site.
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
"""By the name of the dtype, the coarsest first."""


MEASURED_KEYS = 512
"""Up to so many keys `output` was measured. Tokens that repeat round in the same direction: at 16,384 keys of 37 tokens torch's
flash kernel on CPUs was off by 1.5 × that."""


def error_text(number: float) -> str:
    """A rounding error or a tolerance in one form at every size, so that two can be compared at a glance: `1.46e-04`."""
    return f"{number:.2e}" if number else "0"
