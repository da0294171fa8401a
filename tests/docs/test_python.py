"""docs/PYTHON.md names the whole public interface, and its examples print what they show."""

import doctest
from pathlib import Path

from support.documents import blocks

import mhacli

PAGE = (Path(__file__).parents[2] / "docs" / "PYTHON.md").read_text()


def test_the_examples_print_what_they_show() -> None:
    examples = "\n".join(blocks(PAGE, "python"))
    test = doctest.DocTestParser().get_doctest(examples, {}, "docs/PYTHON.md", "docs/PYTHON.md", 0)
    assert len(test.examples) > 25
    told: list[str] = []
    assert doctest.DocTestRunner().run(test, out=told.append).failed == 0, "".join(told)


def test_every_public_name_is_on_the_page() -> None:
    assert [name for name in mhacli.__all__ if f"`{name}" not in PAGE and name != "__version__"] == []
