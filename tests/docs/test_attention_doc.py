"""docs/ATTENTION.md shows every variant, with a command that prints what is shown, its reason and its source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.documents import blocks, printed_by, run, steps, unmatched

from mhacli.spec.variants import VARIANTS, Variant

DOCUMENT = (Path(__file__).parents[2] / "docs" / "ATTENTION.md").read_text()
SECTIONS = {
    title.lower(): body for title, body in re.findall(r"^### (.*?)\n(.*?)(?=^#|\Z)", DOCUMENT, re.DOTALL | re.MULTILINE)
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, in which the commands run one after the other."""
    return tmp_path_factory.mktemp("attention")


@pytest.mark.full
@pytest.mark.every_row
@pytest.mark.parametrize(("command", "shown"), [pytest.param(*step, id=step[0]) for step in steps(DOCUMENT)])
def test_a_command_prints_what_the_document_shows(command: str, shown: list[str], folder: Path) -> None:
    done = run(command, folder)
    assert done.returncode == 0, done.stderr
    missing = unmatched(shown, done.stdout.rstrip("\n").split("\n"))
    assert missing is None, f"{missing}\n--- is not in ---\n{done.stdout}"


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_variant_has_a_section_with_its_reason_its_source_and_a_command(variant: Variant) -> None:
    section = SECTIONS[variant.name.lower()]
    assert f"Why: {variant.why}. Source: {variant.source}." in " ".join(section.split())
    assert re.search(r"^\$ mha (trace|run) ", section, re.MULTILINE)


def test_there_is_no_section_for_what_does_not_exist() -> None:
    assert set(SECTIONS) == {variant.name.lower() for variant in VARIANTS}


@pytest.mark.parametrize("code", blocks(DOCUMENT, "python"))
def test_an_example_in_python_prints_its_comment(code: str, folder: Path) -> None:
    assert printed_by(code, folder) == re.findall(r"print\(.*\)  # (.*)$", code, flags=re.MULTILINE)[-1]
