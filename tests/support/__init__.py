from collections.abc import Collection, Iterable

import pytest


def some(values: Iterable[object], *, default: Collection[object]) -> list[object]:
    """Rows of which only those of `default` are run by default."""
    return [
        pytest.param(value, marks=() if value in default else pytest.mark.real) for value in values
    ]
