"""docs/outputs.py puts new outputs in the place of old ones, elided in the same places."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import pytest
from support.documents import script, split_steps, steps, unmatched

PRINTED = ["header 2", "", "row a .12", "row b .34", "row c .56", "", "check ok", "took 3 ms"]


@pytest.fixture(scope="module")
def outputs() -> ModuleType:
    """The script."""
    return script("outputs")


@pytest.mark.parametrize(("shown", "new"), [
    (["anything"], PRINTED),
    (["header 1", "…"], ["header 2", "…"]),
    (["…", "row b .30", "row c .50", "…"], ["…", "row b .34", "row c .56", "…"]),
    (["header 1", "…", "row a .10", "…", "check no", "took 9 ms"], ["header 2", "…", "row a .12", "…", "check ok", "took 3 ms"]),
    (["…"], ["…"]),
])  # fmt: skip
def test_an_output_is_replaced_part_by_part(outputs: ModuleType, shown: Sequence[str], new: Sequence[str]) -> None:
    lines, likeness = outputs.refitted(shown, PRINTED)
    assert lines == new
    assert unmatched(lines, PRINTED) is None
    assert likeness >= outputs.ALIKE


def test_a_part_that_resembles_nothing_is_noticed(outputs: ModuleType) -> None:
    _, likeness = outputs.refitted(["…", "WXYZ", "…"], PRINTED)
    assert likeness < outputs.ALIKE


def test_a_document_is_the_sum_of_its_pieces() -> None:
    text = "a\n```console\n$ one\nshown\n$ two\n```\n```python\n$ no\n```\n```console\n$ pip install it\n```\n"
    assert "".join(piece for piece, _ in split_steps(text)) == text
    assert list(steps(text)) == [("one", ["shown"]), ("two", [])]
