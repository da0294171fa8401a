"""Numbers on the command line: Typer's ranges, in digits alone. An option takes one as `click_type`."""

from __future__ import annotations

import math
import re

from typer._click.types import FloatRange, IntRange

MAX_SECONDS = 86_400
"""The longest time that an option takes: a day."""
_WHOLE = r"[+-]?[0-9]{1,20}"
_DECIMAL = r"[+-]?(?:[0-9]{1,20}\.?[0-9]{0,20}|\.[0-9]{1,20})(?:[eE][+-]?[0-9]{1,3})?"


def _whole(value: object) -> int:
    if not re.fullmatch(_WHOLE, str(value)):
        raise ValueError
    return int(str(value))


def _finite(value: object) -> float:
    number = float(str(value)) if re.fullmatch(_DECIMAL, str(value)) else math.inf
    if math.isinf(number):
        raise ValueError
    return number


class Integer(IntRange):
    """A whole number from `low` to `high`, both included.

    At most 20 digits and a sign: Python's `1_0` and digits of other scripts are no numbers here.
    """

    _number_class = staticmethod(_whole)  # type: ignore[assignment]

    def __init__(self, low: int, high: int) -> None:
        super().__init__(low, high)
        self.name = f"whole number in the range {self._describe_range()}"


class Real(FloatRange):
    """A decimal number from `low` to `high`, both included; `above` and `below` are bounds that are not included.

    At most 20 digits before the point and 20 behind it, with or without an exponent; NaN and infinity are no numbers here.
    """

    _number_class = staticmethod(_finite)  # type: ignore[assignment]

    def __init__(
        self,
        low: float | None = None,
        high: float | None = None,
        *,
        above: float | None = None,
        below: float | None = None,
    ) -> None:
        super().__init__(
            low if above is None else above,
            high if below is None else below,
            min_open=above is not None,
            max_open=below is not None,
        )
        is_bounded = self.min is not None or self.max is not None
        self.name = f"number in the range {self._describe_range()}" if is_bounded else "finite number"
