"""Numbers that must lie within a tolerance, and the tolerances that rounding needs by dtype."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import msgspec

from mhacli.io.data import finite

ROW_SUMS = "every query's weights sum to 1"
HEAD_OUTPUTS = "weights × values give the kernel's z"
"""The names of the checks of head statistics."""
_EARLIER_HEAD_OUTPUTS = "z of the pattern is the kernel's"
"""The last check's name in older records."""


class Check(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error with its tolerance. `error` is None if a number was not finite, and then `ok` is
    False. `ok` is None if the check does not apply, for the reason in `note`.

    `rounding` of a check of head statistics is the part of its tolerance for scores too large for
    their dtype, or 0. `n` removals were repeated by a second method, and `identical` says whether a
    pass in which every attention output is replaced by itself gives the same bits as a plain pass.
    """

    name: str = ""
    error: float | None
    tolerance: float
    ok: bool | None
    note: str = ""
    rounding: float | None = None
    n: int | None = None
    identical: bool | None = None

    @classmethod
    def of(cls, error: float, tolerance: float, *, holds: bool = True, **details: Any) -> Self:
        """The check of an error. `holds` is what must be true besides, and `details` are fields of
        the class.
        """
        return cls(
            error=finite(error), tolerance=tolerance, ok=holds and error <= tolerance, **details
        )

    @property
    def words(self) -> str:
        """The verdict on a run."""
        if self.ok is None:
            return f"not verified: {self.note}" if self.note else "not verified"
        return "self-check ok" if self.ok else "self-check FAILED"

    @property
    def severity(self) -> tuple[bool, float]:
        """The sort key among checks of one name: failed ones last, then by error."""
        return not self.ok, math.inf if self.error is None else self.error

    @property
    def is_of_outputs(self) -> bool:
        """Whether it compares outputs, which needs a layer whose values were captured."""
        return self.name in (HEAD_OUTPUTS, _EARLIER_HEAD_OUTPUTS)

    def and_holds(self, also: bool | None) -> Self:
        """The check, ok only if something else holds too."""
        return msgspec.structs.replace(self, ok=also and self.ok)


class SelfCheck(Check, frozen=True, kw_only=True):
    """A check whose error has another name in JSON. Of a run: the difference of the output from a
    float64 recomputation from the pattern shown; for decoding, the larger of this and the
    difference from a full recomputation.
    """

    error: float | None = msgspec.field(name="max_abs_error")

    @classmethod
    def of_layers(
        cls, layers: Sequence[Sequence[Check]], *, holds: bool = True, doubt: str = ""
    ) -> Self:
        """The worst of the last checks of layers, ok if all are; a `doubt`, or layers without any
        check, leave that open.
        """
        if not all(layers):
            return cls(error=None, tolerance=0.0, ok=None, note="no numbers were computed")
        worst = max((checks[-1] for checks in layers), key=lambda check: check.severity)
        is_ok = holds and all(check.ok for checks in layers for check in checks)
        ok = None if is_ok and doubt else is_ok
        return cls(error=worst.error, tolerance=worst.tolerance, ok=ok, note=doubt)


def worst_check(same: Sequence[Check]) -> Check:
    """The worst of checks with one name, with the largest rounding of any."""
    worst = max(same, key=lambda check: check.severity)
    return msgspec.structs.replace(worst, rounding=max(check.rounding or 0.0 for check in same))


# --------------------------------------------------------------------------------------- tolerances


class Tolerance(NamedTuple):
    """The largest differences that rounding explains in a dtype.

    `output`: of an output, relative to the sum of the magnitudes behind it; about twice the
    measured error for normal numbers, for up to `MEASURED_KEYS` keys of 128 columns.
    `stored_row_sum`: of the sum of a stored row, whose weights are rounded to the dtype; twice the
    rounding of 16 bits, and room for sums over many keys in wider dtypes. `runs`: between two runs,
    relative to the largest number of a site.
    """

    output: float
    stored_row_sum: float
    runs: float


TOLERANCES: Mapping[str, Tolerance] = {
    "bfloat16": Tolerance(output=2e-2, stored_row_sum=2e-2, runs=2e-2),
    "float16": Tolerance(output=5e-3, stored_row_sum=5e-3, runs=5e-3),
    "float32": Tolerance(output=2e-6, stored_row_sum=1e-4, runs=1e-5),
    "float64": Tolerance(output=1e-12, stored_row_sum=1e-6, runs=1e-12),
}
"""By dtype, the coarsest first."""


MEASURED_KEYS = 512
"""The largest number of keys for which `output` was measured."""


def coarsest(dtypes: Iterable[str]) -> str:
    """The coarsest of these dtypes that has tolerances; float32 if none has."""
    names = [*dtypes]
    return next((name for name in TOLERANCES if name in names), "float32")


def growth(n_keys: int) -> float:
    """How many times further a sum over so many keys may round: repeated tokens round in the same
    direction, as with 40 distinct tokens of 2 columns on a processor without AVX-512, 0.6 ×
    `output` for 512 keys and 7 × for 8,192. Source: Higham 2002, Accuracy and Stability of
    Numerical Algorithms, section 4.2.
    """
    return max(1.0, n_keys / MEASURED_KEYS)
