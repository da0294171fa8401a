"""Numbers as text. Each kind of number has one form, everywhere."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Literal

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

_FORMS: Mapping[Unit, Sequence[tuple[float, float, str]]] = {
    "integer": [(inf, 1, "{:,}")],
    "nats": [(inf, 1, "{:.2f}")],
    "weight": [(inf, 1, "{:.2f}")],
    "brief": [(9.995, 1, "{:.2f}"), (99.95, 1, "{:.1f}"), (inf, 1, "{:.0f}")],
    "short": [(9.995, 1, "{:.2f}"), (999.5, 1, "{:.1f}"), (inf, 1, "{:,.0f}")],
    "number": [(1e-4, 1, "{:.2e}"), (1e5, 1, "{:.4g}"), (inf, 1, "{:.2e}")],
    "change": [(1e-4, 1, "{:.1e}"), (inf, 1, "{:.4f}")],
    "size": [(1e-4, 1, "{:.1e}"), (inf, 1, "{:.4f}")],
    "error": [(0.0995, 1, "{:.2e}"), (inf, 1, "{:.3g}")],
    "fraction": [(inf, 0.01, "{:.0f} %")],
    "percent": [(0.0995, 0.01, "{:#.2g} %"), (inf, 0.01, "{:.0f} %")],
    "count": [
        (10_000, 1, "{}"),
        (999.5e3, 1e3, "{:#.3g} k"),
        (999.5e6, 1e6, "{:#.3g} M"),
        (999.5e9, 1e9, "{:#.3g} G"),
        (inf, 1e12, "{:#.3g} T"),
    ],
    "seconds": [
        (999.5e-9, 1e-9, "{:#.3g} ns"),
        (999.5e-6, 1e-6, "{:#.3g} µs"),
        (0.9995, 1e-3, "{:#.3g} ms"),
        (999.5, 1, "{:#.3g} s"),
        (inf, 1, "{:,.0f} s"),
    ],
    "bytes": [
        (1023.5, 1, "{:.0f} B"),
        (1023.95 * 2**10, 2**10, "{:.1f} KiB"),
        (1023.95 * 2**20, 2**20, "{:.1f} MiB"),
        (1023.95 * 2**30, 2**30, "{:.1f} GiB"),
        (inf, 2**40, "{:.1f} TiB"),
    ],
}
"""The forms of each unit: below which size, what the number is divided by, and its digits."""


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
    fitting = (form for form in _FORMS[unit] if abs(number) < form[0])
    _, divisor, form = next(fitting, _FORMS[unit][-1])
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
