"""What the tests of several folders use."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def some(values: Iterable[object], *, default: Collection[object]) -> list[object]:
    """Values of which only those of `default` are run by default."""
    return [
        pytest.param(value, marks=() if value in default else pytest.mark.real) for value in values
    ]


def rows(cases: Iterable[Any], name: Callable[[Any], str]) -> list[object]:
    """The cases of a table under their names, for `parametrize`. Only those whose field `common`
    is true are run by default.
    """
    return [
        pytest.param(case, id=name(case), marks=() if case.common else pytest.mark.real)
        for case in cases
    ]
