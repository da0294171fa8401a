"""Numbers as text. Each kind of number has one form, everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from msgspec import toml

Unit = Literal[
    "word",
    "id",
    "integer",
    "number",
    "short",
    "weight",
    "fraction",
    "nats",
    "change",
    "brief",
    "size",
    "percent",
    "count",
    "bytes",
    "seconds",
    "error",
]
"""What a value is: an `id` has no separators, a `change` a sign, the `size` of a change none, and a
`brief` one few digits; a `count` is of operations, and an `error` of rounding, with three
digits."""


@cache
def _forms() -> Mapping[Unit, Sequence[tuple[float, float, str]]]:
    """The forms of each unit: below which size, what the number is divided by, and its digits."""
    content = Path(__file__).with_name("numbers.toml").read_bytes()
    return toml.decode(content, type=dict[Unit, list[tuple[float, float, str]]])


def shown(value: object, unit: Unit, digits: int | None = None) -> str:
    """A value as text: a dash for None, a number in the form of its unit, or with so many decimals,
    of an error so many digits.

    >>> shown(0.171, "weight"), shown(-1.5, "weight", 1), shown(0.25, "change")
    ('.17', '-1.5', '+0.2500')
    >>> shown(12_800, "bytes"), shown(1.23e-5, "seconds"), shown(1.46e-4, "error")
    ('12.5 KiB', '12.3 µs', '1.46e-04')
    """
    if value is None:
        return "–"
    if unit in ("word", "id"):
        return str(value)
    number: Any = value
    if number == 0 and unit in ("brief", "change", "size", "number", "error"):
        return "0"
    if unit == "short" and isinstance(number, int):
        unit = "integer"
    forms = _forms()[unit]
    _, divisor, form = next((form for form in forms if abs(number) < form[0]), forms[-1])
    if digits is not None:
        _, _, suffix = form.partition("}")
        form = f"{{:.{digits}{'g' if unit == 'error' else 'f'}}}{suffix}"
    text = form.format(number if divisor == 1 else number / divisor)
    text = text.replace(". ", " ")  # three digits: 610 µs, 24.0 µs
    if unit in ("weight", "brief"):
        unsigned = text.lstrip("-")
        sign = "-" if number < 0 and unsigned.strip("0.") else ""
        return sign + (unsigned.removeprefix("0") or "0")
    return f"+{text}" if unit == "change" and number > 0 else text
