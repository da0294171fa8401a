"""What holds for every command of the corpus: width, colours, and pages and pictures without a
network.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import pytest
from support import golden
from support.mha import run

SGR = re.compile(r"\x1b\[[0-9;]*m")
REAL = {command.section for command in golden.commands() if command.is_real}
SECTIONS = [
    pytest.param(name, marks=[pytest.mark.real] if name in REAL else [])
    for name in dict.fromkeys(command.section for command in golden.commands())
]


def width(line: str) -> int:
    """The columns that a line takes on a screen."""
    return sum(
        0 if unicodedata.combining(sign) else 2 if unicodedata.east_asian_width(sign) in "WF" else 1
        for sign in line
    )


@pytest.mark.parametrize("section", SECTIONS)
def test_no_line_is_wider_than_the_screen(section: str) -> None:
    for command in golden.commands():
        if command.section == section and not {"--json", "--csv"} & {*command.words}:
            text = SGR.sub("", golden.printed(section)[command.line].stdout)
            lines = [line for line in text.split("\n") if width(line) > command.columns]
            assert all(line.startswith("next: mha") for line in lines), command.line


def test_only_what_may_be_copied_is_wider_than_a_narrow_terminal(tmp_path: Path) -> None:
    words = ("run", "one two three four", "--heads", "2", "--d-model", "8", "--view", "none")
    ended = run(tmp_path, *words, terminal=(50, 24), env={"COLUMNS": None, "TERM": "dumb"})
    wide = [line for line in ended.stdout.split("\n") if width(line) > 50]
    assert [line[:9] for line in wide] == ["next: mha"]


@pytest.mark.parametrize("columns", [40, 60])
def test_a_terminal_gets_an_error_in_lines_that_break_at_blanks(
    tmp_path: Path, columns: int
) -> None:
    words = ("run", "the cat", "--model", "absent/my_gpt.py:GPT")
    piped = run(tmp_path, *words, code=1).stderr
    screen = {"terminal": (columns, 24), "env": golden.ON_TERMINAL}
    shown = run(tmp_path, *words, code=1, **screen).stdout
    assert shown.split() == piped.split()
    assert max(map(width, shown.split("\n"))) <= columns
    assert max(map(width, piped.split("\n"))) > columns


@pytest.mark.parametrize("section", SECTIONS)
def test_only_what_is_coloured_has_codes_and_these_end_with_their_line(section: str) -> None:
    for command in golden.commands():
        if command.section == section:
            one = golden.printed(section)[command.line]
            assert ("\x1b" in one.stdout) == command.may_colour, command.line
            assert "\x1b" not in SGR.sub("", one.stdout + one.stderr)
            for line in one.stdout.split("\n") if command.may_colour else ():
                assert not (codes := SGR.findall(line)) or codes[-1] == "\x1b[0m", line


@pytest.mark.parametrize("section", SECTIONS)
def test_pages_and_pictures_need_no_network(section: str) -> None:
    for command in golden.commands():
        if command.section == section:
            for name, content in golden.printed(section)[command.line].files.items():
                assert not re.search(
                    r"(?:src|href)=\"(?!data:|#)|url\(\s*['\"]?https?:|@import", content
                ), name
