"""What docs/READING.md and `mha explain` say is what the tables of the screens and the catalogue of mistakes say."""

from __future__ import annotations

from types import ModuleType

import pytest
from support.documents import script


@pytest.fixture(scope="module")
def reading() -> ModuleType:
    """The script."""
    return script("reading")


def test_the_generated_parts_are_current(reading: ModuleType) -> None:
    page = reading.PAGE.read_text()
    assert reading.written(page) == page, "run docs/reading.py"


def test_the_texts_of_mistakes_are_current(reading: ModuleType) -> None:
    assert reading.MISTAKES_FILE.read_text() == reading.mistakes(), "run docs/reading.py"


def test_each_part_stands_between_its_markers(reading: ModuleType) -> None:
    page = reading.PAGE.read_text()
    for name in reading.PARTS:
        assert page.count(f"<!-- {name} -->") == page.count(f"<!-- /{name} -->") == 1


def test_a_part_that_was_changed_is_written_anew(reading: ModuleType) -> None:
    page = reading.PAGE.read_text()
    assert reading.written(page.replace("| `H` | entropy |", "| `X` | other |")) == page
    assert reading.table(("a", "b"), [("x|y", "")]) == "| a | b |\n| --- | --- |\n| x\\|y | – |"
