"""The format of errors and tolerances."""

from __future__ import annotations

import pytest

from mhacli.spec.tolerances import error_text


@pytest.mark.parametrize(
    ("number", "text"), [(0.0, "0"), (1.463e-4, "1.46e-04"), (5.12e-05, "5.12e-05"), (0.25, "2.50e-01")]
)
def test_errors_of_every_size_have_one_form(number: float, text: str) -> None:
    assert error_text(number) == text
