"""Printed numbers that differ by rounding alone: the same computation on another processor."""

from __future__ import annotations

import re

NUMBER = re.compile(
    r" *(?<![\w.#])[-−+]?(?:\d+\.\d*|\.\d+|\d+(?=e[-+]))(?:e[-+]?\d+)?|#[0-9a-f]{6}\b"
)
"""A decimal with the spaces before it, or a colour."""
TINY_AT_THE_END = (r"(?m)  +(?:0|\d\.?\d*e-(?:0[5-9]|[1-9]\d))$", "  TINY")
"""A column of rounding errors, which may be 0."""


def with_near_numbers_of_old(new: str, old: str) -> str:
    """The new line with the numbers of the old one where they are near; the rest of the lines is
    the same.
    """
    numbers = iter(NUMBER.findall(old))

    def choose(match: re.Match[str]) -> str:
        other = next(numbers, "")
        return other if other and is_near(match[0].strip(), other.strip()) else match[0]

    return NUMBER.sub(choose, new)


def is_near(a: str, b: str) -> bool:
    """Whether two numbers differ by one in the last place of the second or by float32, or two
    colours hardly.
    """
    if a.startswith("#") or b.startswith("#"):
        return a[0] == b[0] and all(
            abs(p - q) <= 4 for p, q in zip(bytes.fromhex(a[1:]), bytes.fromhex(b[1:]), strict=True)
        )
    mantissa, _, exponent = b.partition("e")
    last_place = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    x, y = (float(text.replace("−", "-")) for text in (a, b))
    return abs(x - y) <= max(1.01 * last_place if "." in mantissa else 0, 1e-5 * abs(y) + 1e-6)
